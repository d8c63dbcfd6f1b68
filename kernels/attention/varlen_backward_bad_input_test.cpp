// What attention_varlen_backward() refuses, and what it says.

#include <gtest/gtest.h>

#include <initializer_list>
#include <optional>
#include <string_view>

#include "tests/expect_error.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"
#include "tilewave/attention.hpp"

namespace tw::kernels::attention {
namespace {

using namespace tw::test;

class AttentionVarlenBackwardBadInput : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override {
    skip_unless_present(device);
    given.emplace(*this);
  }

  PlacedTensor make(Shape shape, DType dtype = DType::bf16, Placement placement = {.offset = 4}) const {
    return PlacedTensor(std::move(shape), dtype, device, placement);
  }
  Tensor integers(std::initializer_list<std::int32_t> values) const {
    const Tensor host = Tensor::empty({static_cast<std::int64_t>(values.size())}, DType::i32);
    std::copy(values.begin(), values.end(), host.data<std::int32_t>());
    return host.to(device);
  }
  /// A call that is right, until a test replaces an argument. Of two sequences.
  struct Call {
    Tensor q, k, v, o, lse, d_o, dq, dk, dv;
    PackedSequences sequences;
    AttentionBackwardOptions options = {.forward = {.check_contents = true}};
  };
  Call call() const {
    return {given->q,   given->kv, given->kv, given->o,  given->lse,
            given->d_o, given->dq, given->dk, given->dv, {integers({0, 3, 10}), integers({0, 5, 14})}};
  }
  void refused(const Call& c, std::initializer_list<std::string_view> parts) {
    expect_error<InvalidArgument>(
        [&] { attention_varlen_backward(c.q, c.k, c.v, c.o, c.lse, c.d_o, c.dq, c.dk, c.dv, c.sequences, c.options); }, parts);
    for (const PlacedTensor* const output : {&given->dq, &given->dk, &given->dv, &given->d_sink, &given->d_mask})
      EXPECT_TRUE(output->untouched());
  }

  /// The tensors of a call.
  struct Given {
    explicit Given(const AttentionVarlenBackwardBadInput& test)
        : q(test.make({10, 4, 64})),
          kv(test.make({14, 2, 64})),
          o(test.make({10, 4, 64})),
          d_o(test.make({10, 4, 64})),
          lse(test.make({4, 10}, DType::f32)),
          dq(test.make({10, 4, 64})),
          dk(test.make({14, 2, 64})),
          dv(test.make({14, 2, 64})),
          d_sink(test.make({4}, DType::f32)),
          d_mask(test.make({2, 1, 7, 9}, DType::f32)) {}
    const PlacedTensor q, kv, o, d_o, lse, dq, dk, dv, d_sink, d_mask;
  };

  const Device device = GetParam();
  std::optional<Given> given;  ///< not before it is known whether the device is there
};

INSTANTIATE_TEST_SUITE_P(Ops, AttentionVarlenBackwardBadInput, testing::ValuesIn(kDevices), device_name);

TEST_P(AttentionVarlenBackwardBadInput, Shapes) {
  Call c = call();
  c.q = make({2, 5, 4, 64});
  refused(c, {"attention_varlen_backward", "q is bf16[2, 5, 4, 64]", "[total, heads, head_dim]"});
  c = call();
  c.d_o = make({11, 4, 64});
  refused(c, {"d_o is bf16[11, 4, 64]", "o's shape"});
  c = call();
  c.dq = make({10, 2, 64});
  refused(c, {"dq is bf16[10, 2, 64]", "q's shape"});
  c = call();
  c.dk = make({2, 7, 2, 64});
  refused(c, {"dk is bf16[2, 7, 2, 64]", "k's shape"});
  c = call();
  c.dv = make({14, 2, 32});
  refused(c, {"dv is bf16[14, 2, 32]", "v's shape"});
  c = call();
  c.lse = make({10, 4}, DType::f32);
  refused(c, {"lse is f32[10, 4]", "f32[4, 10]"});
}

TEST_P(AttentionVarlenBackwardBadInput, DtypesAndStrides) {
  Call c = call();
  c.d_o = make({10, 4, 64}, DType::f16);
  refused(c, {"d_o is f16[10, 4, 64]", "bf16"});
  c = call();
  c.dv = make({14, 2, 64}, DType::bf16, {.step = 2});
  refused(c, {"dv is bf16[14, 2, 64]", "last dimension must be contiguous"});
  c = call();
  c.dq = Tensor::borrow(given->dq.tensor().data(), {10, 4, 64}, DType::bf16, device, {0, 64, 1});
  refused(c, {"dq is bf16[10, 4, 64]", "distinct"});
}

TEST_P(AttentionVarlenBackwardBadInput, Sequences) {
  Call c = call();
  c.sequences.cu_seqlens_q = make({3}, DType::f32);
  refused(c, {"cu_seqlens_q is f32[3]", "i32"});
  c = call();
  c.sequences.cu_seqlens_k = integers({0, 14});
  refused(c, {"cu_seqlens_k is i32[2]", "i32[3]"});
  c = call();
  const Tensor three = integers({1, 1, 1}), too_many = integers({3, 8}), negative = integers({-1, 2});
  c.sequences.seqused_q = &three;
  refused(c, {"seqused_q is i32[3]", "i32[2]"});
  c.sequences.seqused_q = &too_many;
  refused(c, {"seqused_q[1] is 8", "7 queries"});
  c = call();
  c.sequences.seqused_k = &negative;
  refused(c, {"seqused_k[0] is -1"});
  c = call();
  c.sequences.cu_seqlens_q = integers({0, 11, 10});
  refused(c, {"cu_seqlens_q[1] is 11", "must not decrease"});
  c = call();
  c.sequences.cu_seqlens_k = integers({0, 5, 15});
  refused(c, {"cu_seqlens_k[2] is 15", "14 keys"});
}

TEST_P(AttentionVarlenBackwardBadInput, OutputsThatShareMemory) {
  Call c = call();
  c.dq = c.d_o;
  refused(c, {"dq is", "shares memory with d_o"});
  c = call();
  c.dv = c.dk;
  refused(c, {"dv is", "shares memory with dk"});
  c = call();
  c.sequences.cu_seqlens_q = Tensor::borrow(given->dq.tensor().data(), {3}, DType::i32, device);
  refused(c, {"dq is", "shares memory with cu_seqlens_q"});
}

TEST_P(AttentionVarlenBackwardBadInput, Options) {
  Call c = call();
  c.options.d_sink = &given->d_sink.tensor();
  refused(c, {"d_sink is f32[4]", "forward.sink is not given"});
  c = call();
  const PlacedTensor mask = make({7, 1, 10, 14}, DType::f32), short_mask = make({2, 14}, DType::f32);
  c.options.forward.mask = &mask.tensor();
  refused(c, {"mask is f32[7, 1, 10, 14]", "longest seqlen_q, longest seqlen_k"});
  c.options.forward.mask = &short_mask.tensor();
  if (!device.is_cuda()) refused(c, {"mask has 2 queries; sequence"});
}

TEST_P(AttentionVarlenBackwardBadInput, GradientsOfMasks) {
  Call c = call();
  c.options.d_mask = &given->d_mask.tensor();
  refused(c, {"attention_varlen_backward", "d_mask is f32[2, 1, 7, 9]", "forward.mask is not given"});
  const PlacedTensor mask = make({2, 1, 7, 9}, DType::f32), other = make({1, 1, 7, 9}, DType::f32);
  c.options.forward.mask = &mask.tensor();
  c.options.d_mask = &other.tensor();
  refused(c, {"d_mask is f32[1, 1, 7, 9]", "the mask's shape"});
  c.options.d_mask = &given->d_mask.tensor();
  c.sequences.cu_seqlens_q = Tensor::borrow(given->d_mask.tensor().data(), {3}, DType::i32, device);
  refused(c, {"d_mask is", "shares memory with cu_seqlens_q"});
}

}  // namespace
}  // namespace tw::kernels::attention
