// Gradients of linear attention against those of the recurrence in double, on the CPU and, where there is one, on a GPU.

#include <gtest/gtest.h>

#include <algorithm>

#include "kernels/linear_attention/case.hpp"

namespace tw::kernels::linear_attention {
namespace {

using namespace tw::test;

class LinearAttentionBackward : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override { skip_unless_present(device); }
  void check(Case c, DType dtype) {
    for (const int config : configs_of(dtype, std::max(c.dk, c.dv), device)) {
      c.config = config;
      check_config(c, dtype);
    }
  }
  void check_config(const Case& c, DType dtype) {
    SCOPED_TRACE(c.text(dtype));
    const Operands of(c, dtype, device, random);
    if (!launched([&] { linear_attention_backward(of.q, of.k, of.v, of.d_o, of.dq, of.dk, of.dv, of.backward()); })) return;
    const auto expected = of.expected(true);
    const auto of_no_sequence = [&](std::int64_t of_step) {
      return [&c, of_step](std::size_t i) {
        const auto t = static_cast<std::int64_t>(i) / of_step;
        return !c.cu_seqlens.empty() && (t < c.cu_seqlens.front() || t >= c.cu_seqlens.back());
      };
    };
    expect_accurate("dq", of.dq, expected.dq, of, 3, of_no_sequence(c.heads * c.dk));
    expect_accurate("dk", of.dk, expected.dk, of, 3, of_no_sequence(c.heads * c.dk));
    expect_accurate("dv", of.dv, expected.dv, of, 3, of_no_sequence(c.heads_of_v() * c.dv));
    if (c.gate != Gate::none) expect_accurate("dg", of.dg, expected.dg, of, 3, of_no_sequence(c.heads_of_v()));
    if (c.initial) expect_accurate("d_initial_state", of.d_initial, expected.d_initial, of, 3);
  }
  const Device device = GetParam();
  std::mt19937_64 random = random_engine();
};
INSTANTIATE_TEST_SUITE_P(Devices, LinearAttentionBackward, testing::ValuesIn(kDevices), device_name);

TEST_P(LinearAttentionBackward, EveryLength) {
  for (const std::int64_t seqlen : {1, 63, 64, 65, 131}) check({.seqlen = seqlen}, DType::bf16);
  for (const DType dtype : {DType::f16, DType::f32})
    for (const std::int64_t seqlen : {1, 67}) check({.batch = 2, .seqlen = seqlen}, dtype);
}

TEST_P(LinearAttentionBackward, EveryDimension) {
  for (const DType dtype : {DType::bf16, DType::f32}) {
    check({.seqlen = 70, .dk = 32, .dv = 128}, dtype);
    check({.seqlen = 70, .dk = 200, .dv = 40}, dtype);
    check({.seqlen = 66, .dk = 33, .dv = 7}, dtype);
  }
  check({.seqlen = 66, .dk = 256, .dv = 256}, DType::f16);
}

TEST_P(LinearAttentionBackward, EveryGate) {
  for (const DType dtype : {DType::bf16, DType::f32})
    for (const Gate gate : {Gate::none, Gate::of_heads, Gate::strong, Gate::resets})
      check({.batch = 2, .seqlen = 90, .gate = gate, .initial = gate != Gate::none}, dtype);
}

TEST_P(LinearAttentionBackward, HeadsShareKeys) {
  check({.batch = 2, .seqlen = 80, .heads = 2, .shared = 3, .dk = 40, .dv = 24, .gap = 8}, DType::bf16);
  check({.seqlen = 30, .heads = 2, .shared = 2, .dk = 40, .dv = 24, .order = {0, 2, 1, 3}}, DType::f32);
  for (const DType dtype : {DType::bf16, DType::f32})
    check({.seqlen = 70, .heads = 2, .shared = 2, .dk = 40, .dv = 24, .state_order = {0, 1, 3, 2}}, dtype);
}

TEST_P(LinearAttentionBackward, PackedSequences) {
  for (const DType dtype : {DType::bf16, DType::f32}) {
    check({.seqlen = 200, .heads = 2, .cu_seqlens = {0, 1, 1, 65, 129, 200}}, dtype);
    check({.seqlen = 200, .shared = 2, .cu_seqlens = {3, 67, 190}}, dtype);
  }
}

TEST_P(LinearAttentionBackward, WithoutStepsTheStatesGradientStays) {
  check({.batch = 2, .seqlen = 0}, DType::bf16);
  check({.batch = 0}, DType::bf16);
}

}  // namespace
}  // namespace tw::kernels::linear_attention
