// Forward passes against the recurrence in double, on the CPU and, where there is one, on a GPU.

#include <gtest/gtest.h>

#include "kernels/mamba2/call.hpp"
#include "kernels/mamba2/case.hpp"

namespace tw::kernels::mamba2 {
namespace {

using namespace tw::test;

class Mamba2 : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override { skip_unless_present(device); }
  /// In one walk, and by linear attention.
  void check(Case c, DType dtype) {
    const bool can = dtype != DType::f32 && c.state <= 128 && (!device.is_cuda() || scan_fits(Stream::standard(device)));
    for (const int config : can ? std::vector{-1, 1, 2} : std::vector{-1}) {
      c.config = config;
      check_config(c, dtype);
    }
  }
  void check_config(const Case& c, DType dtype) {
    SCOPED_TRACE(c.text(dtype));
    const Operands of(c, dtype, device, random);
    if (!launched([&] { tw::mamba2(of.x, of.dt, of.rate, of.b, of.c_matrix, of.y, of.forward()); })) return;
    const auto expected = of.expected(false);
    expect_accurate("y", of.y, expected.y, dtype, 2, c.state, [&](std::size_t i) { return of.of_no_sequence(i, c.heads() * c.dim); });
    if (c.initial)
      expect_accurate("final_states", of.final, expected.final, dtype, 2, c.seqlen);
    else
      EXPECT_TRUE(of.final.untouched());
  }
  const Device device = GetParam();
  std::mt19937_64 random = random_engine();
};
INSTANTIATE_TEST_SUITE_P(Devices, Mamba2, testing::ValuesIn(kDevices), device_name);

TEST_P(Mamba2, EveryLength) {
  for (const std::int64_t seqlen : {1, 2, 63, 64, 65, 127, 128, 129, 193, 257}) check({.seqlen = seqlen, .shared = 2}, DType::bf16);
  for (const DType dtype : {DType::f16, DType::f32})
    for (const std::int64_t seqlen : {1, 64, 131}) check({.batch = 2, .seqlen = seqlen}, dtype);
}

TEST_P(Mamba2, EveryDimension) {
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
    check({.seqlen = 70, .dim = 64, .state = 128}, dtype);
    check({.seqlen = 70, .dim = 128, .state = 32}, dtype);
    check({.seqlen = 66, .dim = 33, .state = 17}, dtype);
    check({.seqlen = 66, .dim = 200, .state = 256}, dtype);
  }
}

TEST_P(Mamba2, EveryOption) {
  for (const DType dtype : {DType::bf16, DType::f32}) {
    check({.shared = 3, .gate = false, .skip = 0}, dtype);
    check({.shared = 3, .gate = false, .skip = 1}, dtype);
    check({.shared = 3, .initial = false, .skip = 0}, dtype);
    check({.softplus = false, .bias = false}, dtype);
    check({.dt_min = 0.2f, .dt_max = 0.5f, .f32_dt = true}, dtype);
  }
}

TEST_P(Mamba2, EveryRate) {
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32})
    for (const Rate rate : {Rate::strong, Rate::zero, Rate::infinite})
      check({.batch = 2, .seqlen = 150, .shared = 2, .rate = rate, .softplus = rate != Rate::infinite}, dtype);
}

/// A step of size 0 leaves the state as it is, although -infinity would forget it.
TEST_P(Mamba2, StepsOfSizeZeroDoNothing) {
  PlacedTensor x({1, 3, 1, 4}, DType::f32, device), b({1, 3, 1, 4}, DType::f32, device), y({1, 3, 1, 4}, DType::f32, device);
  PlacedTensor dt({1, 3, 1}, DType::f32, device), a({1}, DType::f32, device), states({1, 1, 4, 4}, DType::f32, device);
  x.fill_random(random), b.fill_random(random);
  dt.fill(std::vector<float>{0, -1, 0});
  a.fill(std::vector<float>{-kInf});
  const std::vector<float> before = states.fill_random(random);
  if (!launched([&] { tw::mamba2(x, dt, a, b, b, y, {.initial_states = &states.tensor(), .final_states = &states.tensor()}); })) return;
  const std::vector<double> after = states.values();
  for (std::size_t i = 0; i < after.size(); ++i) EXPECT_EQ(after[i], before[i]) << i;
}

/// With A = 0, B = C = x = 1 and no D the outputs are sums of step sizes.
TEST_P(Mamba2, SoftplusIsExactWhereItIsSmall) {
  const std::vector<float> raw{-80, -20, -7, -1, -0.1f, 0, 0.1f, 1, 7, 20, 80};
  const auto n = static_cast<std::int64_t>(raw.size());
  PlacedTensor x({n, 1, 1, 1}, DType::f32, device), b({n, 1, 1, 1}, DType::f32, device), y({n, 1, 1, 1}, DType::f32, device);
  PlacedTensor dt({n, 1, 1}, DType::f32, device), a({1}, DType::f32, device);
  x.fill(std::vector<float>(raw.size(), 1)), b.fill(std::vector<float>(raw.size(), 1)), dt.fill(raw), a.fill(std::vector<float>{0});
  if (!launched([&] { tw::mamba2(x, dt, a, b, b, y, {.dt_softplus = true}); })) return;
  const std::vector<double> sizes = y.values();
  for (std::size_t i = 0; i < raw.size(); ++i) {
    const double exact = std::max(raw[i], 0.0f) + std::log1p(std::exp(-std::abs(static_cast<double>(raw[i]))));
    // exp2's argument is -115 at most: rounded to 2^-18, which exp2 makes a relative error of 2.6e-6.
    EXPECT_NEAR(sizes[i] / exact, 1, 4e-6) << raw[i];
  }
}

TEST_P(Mamba2, PackedSequences) {
  for (const DType dtype : {DType::bf16, DType::f32}) {
    check({.seqlen = 300, .shared = 2, .cu_seqlens = {0, 1, 1, 65, 129, 300}}, dtype);
    check({.seqlen = 200, .shared = 2, .initial = false, .cu_seqlens = {3, 67, 190}}, dtype);
    check({.batch = 2, .seqlen = 150, .shared = 2, .numbered = true}, dtype);
  }
}

TEST_P(Mamba2, EveryStride) {
  for (const DType dtype : {DType::bf16, DType::f32}) {
    check({.batch = 2, .seqlen = 70, .groups = 2, .gap = 8}, dtype);
    check({.batch = 2, .seqlen = 70, .groups = 2, .gap = 3, .state_order = {0, 1, 3, 2}}, dtype);
    check({.batch = 2, .seqlen = 70, .groups = 2, .order = {3, 1, 0, 2}}, dtype);
  }
}

TEST_P(Mamba2, EverySchedule) {
  // Walks are for Hopper's target.
  const bool can_walk = !device.is_cuda() || scan_fits(Stream::standard(device));
  for (const int config : can_walk ? std::vector{-1, 0, 1, 2} : std::vector{-1, 0})
    check_config({.batch = 2, .seqlen = 300, .shared = 2, .dim = 72, .state = 128, .config = config}, DType::bf16);
}

TEST_P(Mamba2, WithoutStepsTheStatesStay) {
  for (const DType dtype : {DType::bf16, DType::f32}) check({.batch = 2, .seqlen = 0, .groups = 2}, dtype);
  check({.seqlen = 0, .cu_seqlens = {0, 0, 0}}, DType::bf16);
  check({.batch = 0}, DType::bf16);
}

}  // namespace
}  // namespace tw::kernels::mamba2
