// What the functions of tilewave/linear_attention.hpp refuse, and what they say.

#include <gtest/gtest.h>

#include <limits>

#include "tests/expect_error.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"
#include "tilewave/linear_attention.hpp"

namespace tw {
namespace {

using namespace tw::test;

class LinearAttentionBadInput : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override {
    skip_unless_present(device);
    if (IsSkipped()) return;
    q = make({2, 5, 2, 8}), k = make({2, 5, 2, 8}), v = make({2, 5, 4, 16});
  }
  Tensor make(Shape shape, DType dtype = DType::bf16) const { return Tensor::zeros(std::move(shape), dtype, Stream::standard(device)); }
  void refused(const Tensor& q, const Tensor& k, const Tensor& v, std::initializer_list<std::string_view> parts,
               const LinearAttentionOptions& options = {}) {
    const PlacedTensor o({2, 5, 4, 16}, DType::bf16, device, {.offset = 8});
    expect_error<InvalidArgument>([&] { linear_attention(q, k, v, o, options); }, parts);
    EXPECT_TRUE(o.untouched());
  }
  const Device device = GetParam();
  Tensor q, k, v;
};

INSTANTIATE_TEST_SUITE_P(Ops, LinearAttentionBadInput, testing::ValuesIn(kDevices), device_name);

TEST_P(LinearAttentionBadInput, Operands) {
  refused(make({2, 5, 2, 8}, DType::i8), k, v, {"linear_attention", "q is i8[2, 5, 2, 8]", "bf16"});
  refused(make({5, 2, 8}), k, v, {"q is bf16[5, 2, 8]", "[batch, seqlen, heads, Dk]"});
  refused(make({2, 5, 2, 257}), k, v, {"q is bf16[2, 5, 2, 257]", "1 to 256"});
  const Tensor wide = make({2, 5, 2, 200});
  refused(wide, wide, v, {"config is 1", "200 columns", "128"}, {.config = 1});
  refused(q, make({2, 5, 2, 9}), v, {"k is bf16[2, 5, 2, 9]", "q's shape"});
  refused(q, make({2, 5, 2, 8}, DType::f16), v, {"k is f16[2, 5, 2, 8]", "bf16"});
  refused(q, k, make({2, 6, 4, 16}), {"v is bf16[2, 6, 4, 16]", "q, bf16[2, 5, 2, 8]"});
  refused(q, k, make({2, 5, 3, 16}), {"v is bf16[2, 5, 3, 16]", "multiple of q's"});
  refused(q, k, make({2, 5, 4, 0}), {"v is bf16[2, 5, 4, 0]", "1 to 256"});
  refused(q, k, make({2, 5, 4, 12}), {"o is bf16[2, 5, 4, 16]", "v's shape"});
  expect_error<InvalidArgument>([&] { linear_attention(q, k, v, v); }, {"o", "v", "memory"});
}

TEST_P(LinearAttentionBadInput, Options) {
  const Tensor short_g = make({3}, DType::f32), half_g = make({4}), state = make({2, 4, 8, 15}, DType::f32);
  refused(q, k, v, {"g is f32[3]", "f32[2, 5, 4] or f32[4]"}, {.g = &short_g});
  refused(q, k, v, {"g is bf16[4]", "f32"}, {.g = &half_g});
  refused(q, k, v, {"scale is inf", "finite"}, {.scale = std::numeric_limits<float>::infinity()});
  refused(q, k, v, {"initial_state is f32[2, 4, 8, 15]", "f32[2, 4, 8, 16]"}, {.initial_state = &state});
  refused(q, k, v, {"final_state is f32[2, 4, 8, 15]", "f32[2, 4, 8, 16]"}, {.final_state = &state});
  refused(q, k, v, {"config is 2", "-1 to 1"}, {.config = 2});
  const Tensor memory = make({3, 4, 8, 16}, DType::f32), first = memory.slice(0, 0, 2), second = memory.slice(0, 1, 3);
  refused(q, k, v, {"final_state", "initial_state"}, {.initial_state = &first, .final_state = &second});
}

TEST_P(LinearAttentionBadInput, PackedSequences) {
  const Tensor offsets = Tensor::from<std::int32_t>(std::vector<std::int32_t>{0, 3, 5}, {3}).to(device);
  refused(q, k, v, {"q is bf16[2, 5, 2, 8]", "cu_seqlens", "batch must be 1"}, {.cu_seqlens = &offsets});
  const Tensor wide = make({3}, DType::f32);
  refused(q, k, v, {"cu_seqlens is f32[3]", "i32[sequences + 1]"}, {.cu_seqlens = &wide});
  if (device.is_cuda()) return;
  const auto one = [](const Tensor& t) { return t.slice(0, 0, 1); };
  for (const std::vector<std::int32_t>& wrong : {std::vector<std::int32_t>{0, 3, 6}, {0, 4, 3}, {-1, 2, 5}}) {
    const Tensor cu = Tensor::from<std::int32_t>(wrong, {3});
    const PlacedTensor o({1, 5, 4, 16}, DType::bf16, device);
    expect_error<InvalidArgument>([&] { linear_attention(one(q), one(k), one(v), o, {.cu_seqlens = &cu}); }, {"cu_seqlens["});
    EXPECT_TRUE(o.untouched());
  }
}

TEST_P(LinearAttentionBadInput, Steps) {
  const Tensor o = make({2, 5, 4, 16}), state = make({2, 4, 8, 16}, DType::f32);
  expect_error<InvalidArgument>(
      [&] {
        linear_attention_step(q, k, v, o, make({2, 4, 16, 8}, DType::f32));
      },
      {"linear_attention_step", "state is f32[2, 4, 16, 8]", "f32[2, 4, 8, 16]"});
  expect_error<InvalidArgument>([&] { linear_attention_step(q, k, v, o, make({2, 4, 8, 16})); }, {"state is bf16[2, 4, 8, 16]", "f32"});
  expect_error<InvalidArgument>([&] { linear_attention_step(q, k, v, make({2, 5, 4, 8}), state); }, {"o is bf16[2, 5, 4, 8]"});
}

TEST_P(LinearAttentionBadInput, Gradients) {
  const Tensor d_o = make({2, 5, 4, 16}), dq = make({2, 5, 2, 8}), dk = make({2, 5, 2, 8}), dv = make({2, 5, 4, 16});
  const Tensor dg = make({2, 5, 4}, DType::f32), g = make({2, 5, 4}, DType::f32), state = make({2, 4, 8}, DType::f32);
  const auto fails = [&](const Tensor& to, const LinearAttentionBackwardOptions& options, std::initializer_list<std::string_view> parts) {
    expect_error<InvalidArgument>([&] { linear_attention_backward(q, k, v, d_o, dq, to, dv, options); }, parts);
  };
  fails(make({2, 5, 2, 9}), {}, {"linear_attention_backward", "dk is bf16[2, 5, 2, 9]", "k's shape"});
  fails(dq, {}, {"dk", "dq"});
  fails(dk, {.dg = &dg}, {"dg is f32[2, 5, 4]", "g is not given"});
  fails(dk, {.g = &g, .dg = &state}, {"dg is f32[2, 4, 8]", "f32[2, 5, 4]"});
  fails(dk, {.d_final_state = &state}, {"d_final_state is f32[2, 4, 8]", "f32[2, 4, 8, 16]"});
  fails(dk, {.d_initial_state = &state}, {"d_initial_state is f32[2, 4, 8]"});
}

}  // namespace
}  // namespace tw
