// What attention_backward() refuses, and what it says.

#include <gtest/gtest.h>

#include <initializer_list>
#include <optional>
#include <string_view>

#include "runtime/format.hpp"
#include "tests/expect_error.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"
#include "tilewave/attention.hpp"

namespace tw::kernels::attention {
namespace {

using namespace tw::test;

class AttentionBackwardBadInput : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override {
    skip_unless_present(device);
    given.emplace(*this);
  }

  PlacedTensor make(Shape shape, DType dtype = DType::bf16, Placement placement = {.offset = 4}) const {
    return PlacedTensor(std::move(shape), dtype, device, placement);
  }
  /// A call that is right, until a test replaces an argument.
  struct Call {
    Tensor q, k, v, o, lse, d_o, dq, dk, dv;
    AttentionBackwardOptions options = {};
  };
  Call call() const { return {given->q, given->kv, given->kv, given->o, given->lse, given->d_o, given->dq, given->dk, given->dv}; }
  void refused(const Call& c, std::initializer_list<std::string_view> parts) {
    expect_error<InvalidArgument>([&] { attention_backward(c.q, c.k, c.v, c.o, c.lse, c.d_o, c.dq, c.dk, c.dv, c.options); }, parts);
    for (const PlacedTensor* const output : {&given->dq, &given->dk, &given->dv, &given->d_sink, &given->d_mask})
      EXPECT_TRUE(output->untouched());
  }

  /// The tensors of a call.
  struct Given {
    explicit Given(const AttentionBackwardBadInput& test)
        : q(test.make({2, 5, 4, 64})),
          kv(test.make({2, 7, 2, 64})),
          o(test.make({2, 5, 4, 64})),
          d_o(test.make({2, 5, 4, 64})),
          lse(test.make({2, 4, 5}, DType::f32)),
          sink(test.make({4}, DType::f32)),
          mask(test.make({4, 1, 7}, DType::f32)),
          dq(test.make({2, 5, 4, 64})),
          dk(test.make({2, 7, 2, 64})),
          dv(test.make({2, 7, 2, 64})),
          d_sink(test.make({4}, DType::f32)),
          d_mask(test.make({4, 1, 7}, DType::f32)) {}
    const PlacedTensor q, kv, o, d_o, lse, sink, mask, dq, dk, dv, d_sink, d_mask;
  };

  const Device device = GetParam();
  std::optional<Given> given;  ///< not before it is known whether the device is there
};

INSTANTIATE_TEST_SUITE_P(Ops, AttentionBackwardBadInput, testing::ValuesIn(kDevices), device_name);

TEST_P(AttentionBackwardBadInput, Shapes) {
  Call c = call();
  c.q = make({5, 4, 64});
  refused(c, {"attention_backward", "q is bf16[5, 4, 64]", "[batch, seqlen, heads, head_dim]"});
  c = call();
  c.d_o = make({2, 5, 4, 128});
  refused(c, {"d_o is bf16[2, 5, 4, 128]", "o's shape"});
  c = call();
  c.dq = make({2, 5, 2, 64});
  refused(c, {"dq is bf16[2, 5, 2, 64]", "q's shape"});
  c = call();
  c.dk = make({2, 7, 4, 64});
  refused(c, {"dk is bf16[2, 7, 4, 64]", "k's shape"});
  c = call();
  c.dv = make({2, 7, 2, 32});
  refused(c, {"dv is bf16[2, 7, 2, 32]", "v's shape"});
  c = call();
  c.k = c.v = make({3, 7, 2, 64});
  refused(c, {"k is bf16[3, 7, 2, 64]", "batch"});
}

TEST_P(AttentionBackwardBadInput, DtypesAndStrides) {
  Call c = call();
  c.d_o = make({2, 5, 4, 64}, DType::f16);
  refused(c, {"d_o is f16[2, 5, 4, 64]", "bf16"});
  c = call();
  c.dk = make({2, 7, 2, 64}, DType::f32);
  refused(c, {"dk is f32[2, 7, 2, 64]", "bf16"});
  c = call();
  c.d_o = make({2, 5, 4, 64}, DType::bf16, {.step = 2});
  refused(c, {"d_o is bf16[2, 5, 4, 64]", "last dimension must be contiguous"});
  c = call();
  c.dv = make({2, 7, 2, 64}, DType::bf16, {.step = 2});
  refused(c, {"dv is bf16[2, 7, 2, 64]", "last dimension must be contiguous"});
}

TEST_P(AttentionBackwardBadInput, F32OnAGpu) {
  if (!device.is_cuda()) GTEST_SKIP() << "f32 is supported on the CPU";
  Call c = call();
  for (Tensor* const t : {&c.q, &c.o, &c.d_o, &c.dq}) *t = make({2, 5, 4, 64}, DType::f32);
  for (Tensor* const t : {&c.k, &c.v, &c.dk, &c.dv}) *t = make({2, 7, 2, 64}, DType::f32);
  refused(c, {"q is f32[2, 5, 4, 64]", "f32 on the CPU"});
}

TEST_P(AttentionBackwardBadInput, Lse) {
  for (const Shape& shape : {Shape{2, 5, 4}, Shape{2, 4, 6}, Shape{8, 5}}) {
    Call c = call();
    c.lse = make(shape, DType::f32);
    refused(c, {"lse is f32[", "f32[2, 4, 5]"});
  }
  Call c = call();
  c.lse = make({2, 4, 5}, DType::f32, {.gap = 3});
  refused(c, {"lse is f32[2, 4, 5]", "contiguous"});
}

TEST_P(AttentionBackwardBadInput, Sinks) {
  Call c = call();
  c.options.d_sink = &given->d_sink.tensor();
  refused(c, {"d_sink is f32[4]", "forward.sink is not given"});
  const PlacedTensor wrong = make({3}, DType::f32);
  c.options.forward.sink = &given->sink.tensor();
  c.options.d_sink = &wrong.tensor();
  refused(c, {"d_sink is f32[3]", "f32[4]"});
}

TEST_P(AttentionBackwardBadInput, Masks) {
  Call c = call();
  c.options.d_mask = &given->d_mask.tensor();
  refused(c, {"d_mask is f32[4, 1, 7]", "forward.mask is not given"});
  c.options.forward.mask = &given->mask.tensor();
  const auto with = [&](const PlacedTensor& d_mask, std::initializer_list<std::string_view> parts) {
    Call other = c;
    other.options.d_mask = &d_mask.tensor();
    refused(other, parts);
    EXPECT_TRUE(d_mask.untouched());
  };
  with(make({4, 5, 7}, DType::f32), {"d_mask is f32[4, 5, 7]", "the mask's shape", "[4, 1, 7]"});
  with(make({1, 4, 1, 7}, DType::f32), {"d_mask is f32[1, 4, 1, 7]", "the mask's shape"});
  with(make({4, 1, 7}, DType::bf16), {"d_mask is bf16[4, 1, 7]", "f32"});
  with(make({4, 1, 7}, DType::f16), {"d_mask is f16[4, 1, 7]", "f32"});
  with(make({4, 1, 7}, DType::f32, {.gap = 3}), {"d_mask is f32[4, 1, 7]", "contiguous"});
  with(make({4, 1, 7}, DType::f32, {.step = 2}), {"d_mask is f32[4, 1, 7]", "contiguous"});
  if (device.is_cuda()) with(PlacedTensor({4, 1, 7}, DType::f32, Device::cpu()), {"d_mask is f32[4, 1, 7]", "cuda"});
  c.options.d_mask = &given->mask.tensor();
  refused(c, {"d_mask is", "shares memory with forward.mask"});
  c.options.d_mask = &given->d_mask.tensor();
  const Tensor boolean = Tensor::zeros({4, 1, 7}, DType::boolean, Stream::standard(device));
  c.options.forward.mask = &boolean;
  refused(c, {"d_mask is f32[4, 1, 7]", "forward.mask is bool[4, 1, 7]", "only masks that are added"});
  c.options.forward.mask = &given->mask.tensor();
  const Tensor selected = Tensor::zeros({1, 1, 1, 1}, DType::boolean, Stream::standard(device));
  const AttentionBlocks blocks{.mask = &selected};
  c.options.forward.blocks = &blocks;
  refused(c, {"d_mask is given", "forward.blocks"});
}

TEST_P(AttentionBackwardBadInput, OutputsThatShareMemory) {
  Call c = call();
  c.dq = c.d_o;
  refused(c, {"dq is", "shares memory with d_o"});
  c = call();
  c.dv = c.dk;
  refused(c, {"dv is", "shares memory with dk"});
  c = call();
  c.dk = c.v;
  refused(c, {"dk is", "shares memory with"});
  c = call();
  c.dq = Tensor::borrow(given->dq.tensor().data(), {2, 5, 4, 64}, DType::bf16, device, {0, 256, 64, 1});
  refused(c, {"dq is bf16[2, 5, 4, 64]", "distinct"});
}

TEST_P(AttentionBackwardBadInput, OptionsOfTheForwardPass) {
  Call c = call();
  c.options.forward.scale = -1;
  refused(c, {"scale is -1", "positive"});
  c = call();
  c.options.forward.window_left = -2;
  refused(c, {"window_left is -2"});
  c.options.forward.window_left = -1;
  c.options.forward.attention_chunk = -5;
  refused(c, {"attention_chunk is -5"});
  c.options.forward.attention_chunk = 0;
  c.options.forward.sm_margin = -3;
  refused(c, {"sm_margin is -3"});
  c.options.forward.sm_margin = 0;
  const PlacedTensor qv({1, 1, 1, 1}, DType::bf16, device);
  c.options.forward.qv = &qv.tensor();
  refused(c, {"qv is given", "gradients"});
}

}  // namespace
}  // namespace tw::kernels::attention
