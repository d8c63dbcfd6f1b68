// Forward passes and steps against the recurrence in double, on the CPU and, where there is one, on a GPU.

#include <gtest/gtest.h>

#include "kernels/linear_attention/case.hpp"

namespace tw::kernels::linear_attention {
namespace {

using namespace tw::test;

class LinearAttention : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override { skip_unless_present(device); }
  void check(Case c, DType dtype) {
    for (const int config : configs_of(dtype, c.dk, device)) {
      c.config = config;
      check_config(c, dtype);
    }
  }
  void check_config(const Case& c, DType dtype) {
    SCOPED_TRACE(c.text(dtype));
    const Operands of(c, dtype, device, random);
    if (!launched([&] { tw::linear_attention(of.q, of.k, of.v, of.o, of.forward()); })) return;
    const auto expected = of.expected(false);
    const std::int64_t of_step = c.heads_of_v() * c.dv;
    const auto of_no_sequence = [&](std::size_t i) {
      const auto t = static_cast<std::int64_t>(i) / of_step;
      return !c.cu_seqlens.empty() && (t < c.cu_seqlens.front() || t >= c.cu_seqlens.back());
    };
    expect_accurate("o", of.o, expected.o, of, 2, of_no_sequence);
    if (c.initial)
      expect_accurate("final_state", of.final, expected.final, of, 2);
    else
      EXPECT_TRUE(of.final.untouched());
  }
  const Device device = GetParam();
  std::mt19937_64 random = random_engine();
};
INSTANTIATE_TEST_SUITE_P(Devices, LinearAttention, testing::ValuesIn(kDevices), device_name);

TEST_P(LinearAttention, EveryLength) {
  for (const std::int64_t seqlen : {1, 2, 63, 64, 65, 127, 128, 193}) check({.seqlen = seqlen, .shared = 2}, DType::bf16);
  for (const std::int64_t seqlen : {1, 64, 131}) {
    check({.batch = 2, .seqlen = seqlen}, DType::f16);
    check({.batch = 2, .seqlen = seqlen}, DType::f32);
  }
}

TEST_P(LinearAttention, EveryDimension) {
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
    check({.seqlen = 70, .dk = 32, .dv = 128}, dtype);
    check({.seqlen = 70, .dk = 128, .dv = 32}, dtype);
    check({.seqlen = 70, .dk = 256, .dv = 256}, dtype);
    check({.seqlen = 70, .dk = 96, .dv = 200}, dtype);
    check({.seqlen = 66, .dk = 33, .dv = 1}, dtype);
  }
}

TEST_P(LinearAttention, EveryGate) {
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32})
    for (const Gate gate : {Gate::none, Gate::of_heads, Gate::strong, Gate::resets})
      check({.batch = 2, .seqlen = 150, .heads = 2, .gate = gate, .initial = gate != Gate::none}, dtype);
}

/// CPUs compute these in chunks, others step by step.
TEST_P(LinearAttention, WeakGatesOfF32) {
  for (const std::int64_t dk : {40, 128}) {
    for (const Gate gate : {Gate::none, Gate::faint}) {
      check({.batch = 2, .seqlen = 200, .heads = 2, .shared = 2, .dk = dk, .dv = 60, .gate = gate}, DType::f32);
      check({.seqlen = 300, .dk = dk, .dv = 130, .gate = gate, .cu_seqlens = {3, 70, 70, 197, 261}}, DType::f32);
    }
  }
}

/// Step by step, a state that nothing is added to decays by exp(1000 g). Each of the 1000 roundings of both of its products is off by up to
/// 2^-24 of the state, 2^-24 / sqrt(3) in the root mean square; allowed are four standard deviations of their sum. An exp(g) of one f32
/// number would be off by the same amount at each step.
TEST_P(LinearAttention, ErrorsOfWeakGatesDoNotAddUp) {
  constexpr std::int64_t kSteps = 1000, kHeads = 8;
  PlacedTensor q({1, kSteps, kHeads, 1}, DType::f32, device), o({1, kSteps, kHeads, 4}, DType::f32, device);
  PlacedTensor v({1, kSteps, kHeads, 4}, DType::f32, device), g({kHeads}, DType::f32, device);
  PlacedTensor state({1, kHeads, 1, 4}, DType::f32, device);
  q.fill(std::vector<float>(kSteps * kHeads)), v.fill(std::vector<float>(kSteps * kHeads * 4));
  std::vector<float> gates;
  for (std::int64_t head = 0; head < kHeads; ++head) gates.push_back(-std::uniform_real_distribution<float>(1e-4f, 4e-3f)(random));
  g.fill(gates);
  const std::vector<float> before = state.fill_random(random);
  if (!launched(
          [&] { tw::linear_attention(q, q, v, o, {.g = &g.tensor(), .initial_state = &state.tensor(), .final_state = &state.tensor()}); }))
    return;
  const std::vector<double> after = state.values();
  const double allowed = 4 * std::ldexp(1.0, -24) * std::sqrt(2.0 * kSteps / 3);
  for (std::size_t i = 0; i < after.size(); ++i)
    EXPECT_NEAR(after[i] / (before[i] * std::exp(kSteps * static_cast<double>(gates[i / 4]))), 1, allowed) << "gate " << gates[i / 4];
}

TEST_P(LinearAttention, HeadsShareKeys) { check({.batch = 2, .seqlen = 80, .heads = 3, .shared = 3, .dk = 40, .dv = 24}, DType::bf16); }

TEST_P(LinearAttention, PackedSequences) {
  for (const DType dtype : {DType::bf16, DType::f32}) {
    check({.seqlen = 300, .heads = 2, .cu_seqlens = {0, 1, 1, 65, 129, 300}}, dtype);
    check({.seqlen = 200, .shared = 2, .initial = false, .cu_seqlens = {3, 67, 190}}, dtype);
  }
  check({.seqlen = 90, .gate = Gate::none, .cu_seqlens = {0, 90}}, DType::f16);
}

TEST_P(LinearAttention, EveryStride) {
  for (const DType dtype : {DType::bf16, DType::f32}) {
    check({.batch = 2, .seqlen = 70, .heads = 2, .gap = 8}, dtype);
    check({.batch = 2, .seqlen = 70, .heads = 2, .gap = 3}, dtype);
    check({.batch = 2, .seqlen = 70, .heads = 2, .order = {0, 2, 1, 3}}, dtype);
    check({.batch = 2, .seqlen = 70, .heads = 2, .order = {3, 1, 0, 2}}, dtype);
    check({.batch = 2, .seqlen = 70, .heads = 2, .dk = 40, .state_order = {0, 1, 3, 2}}, dtype);
  }
}

TEST_P(LinearAttention, WithoutStepsTheStateStays) {
  for (const DType dtype : {DType::bf16, DType::f32}) check({.batch = 2, .seqlen = 0, .heads = 2}, dtype);
  check({.seqlen = 0, .cu_seqlens = {0, 0, 0}}, DType::bf16);
  check({.batch = 0}, DType::bf16);
}

TEST_P(LinearAttention, StepsReplaceTheState) {
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
    for (const std::int64_t seqlen : {0, 1, 4}) {
      const Case c{.batch = 3, .seqlen = seqlen, .heads = 2, .shared = 2, .dk = 96, .dv = 130, .gate = Gate::strong, .gap = 2};
      SCOPED_TRACE(c.text(dtype));
      const Operands of(c, dtype, device, random);
      of.final.tensor().copy_from(of.initial.tensor());
      if (!launched([&] { linear_attention_step(of.q, of.k, of.v, of.o, of.final, {.g = &of.g.tensor()}); })) return;
      const auto expected = of.expected(false);
      expect_accurate("o", of.o, expected.o, of, 2);
      expect_accurate("state", of.final, expected.final, of, 2);
    }
  }
}

/// One call, and the same steps in two: the state carries everything.
TEST_P(LinearAttention, GoesOnFromItsState) {
  const Case c{.seqlen = 64 + 37, .heads = 2};
  const Operands of(c, DType::f32, device, random);
  const auto part = [&](const Tensor& t, std::int64_t first, std::int64_t end) { return t.slice(1, first, end); };
  for (const auto& [first, end] : {std::pair{0, 64}, {64, 101}}) {
    const Tensor g = part(of.g, first, end);
    const Tensor& from = first == 0 ? of.initial.tensor() : of.final.tensor();
    if (!launched([&, f = first, e = end] {
          tw::linear_attention(part(of.q, f, e), part(of.k, f, e), part(of.v, f, e), part(of.o, f, e),
                               {.g = &g, .initial_state = &from, .final_state = &of.final.tensor()});
        }))
      return;
  }
  const auto expected = of.expected(false);
  expect_accurate("o", of.o, expected.o, of, 2);
  expect_accurate("final_state", of.final, expected.final, of, 2);
}

}  // namespace
}  // namespace tw::kernels::linear_attention
