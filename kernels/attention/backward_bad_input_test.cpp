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
    for (const PlacedTensor* const output : {&given->dq, &given->dk, &given->dv, &given->d_sink}) EXPECT_TRUE(output->untouched());
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
          dq(test.make({2, 5, 4, 64})),
          dk(test.make({2, 7, 2, 64})),
          dv(test.make({2, 7, 2, 64})),
          d_sink(test.make({4}, DType::f32)) {}
    const PlacedTensor q, kv, o, d_o, lse, sink, dq, dk, dv, d_sink;
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
