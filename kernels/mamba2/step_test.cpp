// Decoding steps against the recurrence in double, on the CPU and, where there is one, on a GPU.

#include <gtest/gtest.h>

#include "kernels/mamba2/case.hpp"

namespace tw::kernels::mamba2 {
namespace {

using namespace tw::test;

class Mamba2Step : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override { skip_unless_present(device); }
  void check(const Case& c, DType dtype, DType states) {
    SCOPED_TRACE(c.text(dtype) + " states " + std::string(name_of(states)));
    Operands of(c, dtype, device, random, states);
    of.final.fill(of.of_initial);
    if (!launched([&] { mamba2_step(of.x, of.dt, of.rate, of.b, of.c_matrix, of.final, of.y, of.options<Mamba2StepOptions>()); })) return;
    auto expected = of.expected(false);
    expect_accurate("y", of.y, expected.y, dtype, 2, c.state);
    for (double& x : expected.final.naive) x = round_to(states, static_cast<float>(x));
    expect_accurate("states", of.final, expected.final, states, 2, c.seqlen);
  }
  const Device device = GetParam();
  std::mt19937_64 random = random_engine();
};
INSTANTIATE_TEST_SUITE_P(Devices, Mamba2Step, testing::ValuesIn(kDevices), device_name);

TEST_P(Mamba2Step, EveryType) {
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32})
    for (const DType states : {DType::f32, dtype})
      for (const bool f32_dt : {false, true})
        for (const std::int64_t seqlen : {0, 1, 4})
          check({.batch = 3, .seqlen = seqlen, .groups = 2, .shared = 2, .dim = 48, .state = 96, .f32_dt = f32_dt, .gap = 2}, dtype,
                states);
}

TEST_P(Mamba2Step, EveryDimension) {
  for (const DType dtype : {DType::bf16, DType::f32}) {
    check({.seqlen = 1, .shared = 3, .dim = 64, .state = 128}, dtype, dtype);
    check({.seqlen = 1, .shared = 3, .dim = 1, .state = 1}, dtype, dtype);
    check({.seqlen = 1, .shared = 3, .dim = 256, .state = 256}, dtype, dtype);
    check({.seqlen = 2, .dim = 67, .state = 33, .state_order = {1, 0, 3, 2}}, dtype, dtype);
  }
}

TEST_P(Mamba2Step, EveryOption) {
  check({.seqlen = 1, .shared = 2, .gate = false, .skip = 0}, DType::bf16, DType::f32);
  check({.seqlen = 1, .shared = 2, .bias = false, .skip = 1}, DType::bf16, DType::f32);
  check({.seqlen = 3, .shared = 2, .softplus = false, .dt_min = 0.1f, .dt_max = 0.4f}, DType::bf16, DType::bf16);
  for (const Rate rate : {Rate::strong, Rate::zero, Rate::infinite})
    check({.seqlen = 2, .shared = 2, .rate = rate}, DType::f32, DType::f32);
}

/// One scan, and the same steps in two calls: the states carry everything.
TEST_P(Mamba2Step, GoesOnFromAScan) {
  const Case c{.batch = 2, .seqlen = 70, .shared = 2, .dim = 40, .state = 24};
  const Operands of(c, DType::f32, device, random);
  const auto part = [](const Tensor& t, std::int64_t first, std::int64_t end) { return t.slice(1, first, end); };
  if (!launched([&] {
        Mamba2Options scan = of.forward();
        const Tensor z = part(of.z, 0, 67);
        scan.z = &z;
        tw::mamba2(part(of.x, 0, 67), part(of.dt, 0, 67), of.rate, part(of.b, 0, 67), part(of.c_matrix, 0, 67), part(of.y, 0, 67), scan);
        for (std::int64_t t = 67; t < 70; ++t) {
          Mamba2StepOptions step = of.options<Mamba2StepOptions>();
          const Tensor gate = part(of.z, t, t + 1);
          step.z = &gate;
          mamba2_step(part(of.x, t, t + 1), part(of.dt, t, t + 1), of.rate, part(of.b, t, t + 1), part(of.c_matrix, t, t + 1), of.final,
                      part(of.y, t, t + 1), step);
        }
      }))
    return;
  const auto expected = of.expected(false);
  expect_accurate("y", of.y, expected.y, DType::f32, 2, c.state);
  expect_accurate("states", of.final, expected.final, DType::f32, 2, c.seqlen);
}

/// A pool of states: an index for each sequence says which is its own, and a sequence without one is left out.
TEST_P(Mamba2Step, StatesFromAPool) {
  const Case c{.batch = 4, .seqlen = 1, .shared = 2, .dim = 40, .state = 24};
  const Operands of(c, DType::bf16, device, random);
  const std::vector<std::int32_t> indices{5, -1, 0, 6};
  const Tensor on_device = Tensor::from<std::int32_t>(indices, {4}).to(device);
  PlacedTensor pool({6, 2, 40, 24}, DType::f32, device);
  std::vector<float> before = pool.fill_random(random);
  const std::size_t area = 2 * 40 * 24;
  for (const std::size_t n : {0u, 2u})
    std::copy_n(of.of_initial.begin() + static_cast<std::ptrdiff_t>(n * area), area,
                before.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(indices[n]) * area));
  pool.fill(before);
  Mamba2StepOptions options = of.options<Mamba2StepOptions>();
  options.state_indices = &on_device;
  if (!launched([&] { mamba2_step(of.x, of.dt, of.rate, of.b, of.c_matrix, pool, of.y, options); })) return;
  const auto expected = of.expected(false);
  expect_accurate("y", of.y, expected.y, DType::bf16, 2, c.state, [](std::size_t i) { return i / 80 % 2 == 1; });
  const std::vector<double> after = pool.values();
  for (std::size_t i = 0; i < after.size(); ++i) {
    const std::size_t slot = i / area;
    if (slot != 0 && slot != 5) {
      ASSERT_EQ(after[i], before[i]) << i;
    } else {
      ASSERT_NEAR(after[i], expected.final.reference[(slot == 5 ? 0 : 2 * area) + i % area], 1e-5) << i;
    }
  }
}

}  // namespace
}  // namespace tw::kernels::mamba2
