// Gradients against those of the recurrence in double, on the CPU and, where there is one, on a GPU.

#include <gtest/gtest.h>

#include "kernels/mamba2/call.hpp"
#include "kernels/mamba2/case.hpp"

namespace tw::kernels::mamba2 {
namespace {

using namespace tw::test;

class Mamba2Backward : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override { skip_unless_present(device); }
  /// In steps, and through linear attention.
  void check(Case c, DType dtype) {
    for (const int config : dtype != DType::f32 && c.cu_seqlens.empty() ? std::vector{-1, 0} : std::vector{-1}) {
      c.config = config;
      check_config(c, dtype);
    }
  }
  void check_config(const Case& c, DType dtype) {
    SCOPED_TRACE(c.text(dtype));
    const Operands of(c, dtype, device, random);
    if (!launched([&] { mamba2_backward(of.x, of.dt, of.rate, of.b, of.c_matrix, of.dy, of.dx, of.d_dt, of.db, of.dc, of.backward()); }))
      return;
    auto expected = of.expected(true);
    if (dtype != DType::f32 && c.cu_seqlens.empty() && c.config != 0 && c.config != 1) {
      // In five steps no large terms cancel, so these gradients get the usual bound on the norm of the error. It needs many elements,
      // because a single one may be close to 0 by chance. A and dt_bias have one for each head, and no head may be much larger than others.
      if (c.batch * c.seqlen * c.heads() >= 64) expected.d_dt.cancelled.clear();
      if (c.heads() >= 64 && c.rate == Rate::even) expected.da.cancelled.clear(), expected.d_bias.cancelled.clear();
    }
    const auto skip = [&](std::int64_t elements) { return [&of, elements](std::size_t i) { return of.of_no_sequence(i, elements); }; };
    const auto expect = [&](const char* name, const PlacedTensor& t, const Expected& e, std::int64_t products, std::int64_t of_step = 0) {
      if (of_step > 0)
        expect_accurate(name, t, e, dtype, 3, products, skip(of_step));
      else
        expect_accurate(name, t, e, dtype, 3, products);
    };
    expect("dx", of.dx, expected.dx, c.state, c.heads() * c.dim);
    expect("dB", of.db, expected.db, c.dim, c.groups * c.state);
    expect("dC", of.dc, expected.dc, c.dim, c.groups * c.state);
    expect("d_dt", of.d_dt, expected.d_dt, c.state, c.heads());
    expect("dA", of.da, expected.da, c.state);
    if (c.gate)
      expect("dz", of.dz, expected.dz, c.state, c.heads() * c.dim);
    else
      EXPECT_TRUE(of.dz.untouched());
    if (c.skip > 0) expect("dD", of.dd, expected.dd, c.seqlen);
    if (c.bias) expect("d_dt_bias", of.d_bias, expected.d_bias, c.state);
    if (c.initial) expect("d_initial_states", of.d_initial, expected.d_initial, c.seqlen);
  }
  const Device device = GetParam();
  std::mt19937_64 random = random_engine();
};
INSTANTIATE_TEST_SUITE_P(Devices, Mamba2Backward, testing::ValuesIn(kDevices), device_name);

TEST_P(Mamba2Backward, EveryLength) {
  for (const std::int64_t seqlen : {1, 63, 64, 65, 131}) check({.seqlen = seqlen}, DType::bf16);
  for (const DType dtype : {DType::f16, DType::f32})
    for (const std::int64_t seqlen : {1, 67}) check({.batch = 2, .seqlen = seqlen}, dtype);
  check({.batch = 2, .seqlen = 523, .dim = 8, .state = 8}, DType::f32);  // three runs of each sequence
  for (const std::int64_t seqlen : {256, 257, 600})                      // up to three chunks
    check({.batch = 2, .seqlen = seqlen, .shared = 2, .dim = 16, .state = 32}, DType::bf16);
}

TEST_P(Mamba2Backward, ManyHeads) {
  for (const DType dtype : {DType::bf16, DType::f16}) {
    check({.seqlen = 270, .groups = 4, .shared = 16, .dim = 16, .state = 16, .rate = Rate::even}, dtype);
    check({.seqlen = 90, .groups = 64, .dim = 16, .state = 16, .rate = Rate::even, .gate = false, .skip = 1, .numbered = true}, dtype);
  }
}

TEST_P(Mamba2Backward, EveryDimension) {
  for (const DType dtype : {DType::bf16, DType::f32}) {
    check({.seqlen = 70, .dim = 128, .state = 32}, dtype);
    check({.seqlen = 66, .dim = 40, .state = 200}, dtype);
    check({.seqlen = 66, .dim = 33, .state = 7}, dtype);
    check({.seqlen = 66, .dim = 1, .state = 9, .skip = 1}, dtype);
  }
  check({.seqlen = 66, .dim = 256, .state = 256}, DType::f16);
}

TEST_P(Mamba2Backward, EveryOption) {
  for (const DType dtype : {DType::bf16, DType::f32}) {
    check({.shared = 2, .gate = false, .skip = 0}, dtype);
    check({.shared = 2, .gate = false, .skip = 1}, dtype);
    check({.shared = 2, .initial = false, .skip = 1}, dtype);
    check({.softplus = false, .bias = false}, dtype);
    check({.dt_min = 0.2f, .dt_max = 0.5f, .f32_dt = true}, dtype);
  }
  check({.batch = 2, .seqlen = 300, .shared = 2, .dim = 16, .state = 16, .skip = 1, .f32_dt = true, .numbered = true}, DType::f16);
}

TEST_P(Mamba2Backward, EverySchedule) {
  // Walks are for Hopper's target.
  const bool can_walk = !device.is_cuda() || scan_fits(Stream::standard(device));
  for (const int config : can_walk ? std::vector{-1, 0, 1, 2} : std::vector{-1, 0, 2})
    check_config({.batch = 2, .seqlen = 300, .shared = 2, .dim = 72, .state = 128, .numbered = true, .config = config}, DType::bf16);
}

TEST_P(Mamba2Backward, EveryRate) {
  for (const DType dtype : {DType::bf16, DType::f32})
    for (const Rate rate : {Rate::strong, Rate::zero, Rate::infinite}) check({.batch = 2, .seqlen = 90, .shared = 2, .rate = rate}, dtype);
}

TEST_P(Mamba2Backward, HeadsShareGroups) {
  check({.batch = 2, .seqlen = 80, .groups = 2, .shared = 3, .dim = 40, .state = 24, .gap = 8}, DType::bf16);
  for (const DType dtype : {DType::f16, DType::f32})
    check({.batch = 2, .seqlen = 30, .groups = 2, .shared = 2, .dim = 40, .state = 24, .order = {0, 2, 1, 3}, .state_order = {0, 1, 3, 2}},
          dtype);
  check({.batch = 2, .seqlen = 70, .groups = 2, .gap = 3, .state_order = {1, 0, 2, 3}}, DType::bf16);
}

TEST_P(Mamba2Backward, PackedSequences) {
  for (const DType dtype : {DType::bf16, DType::f32}) {
    check({.seqlen = 200, .shared = 2, .cu_seqlens = {0, 1, 1, 65, 129, 200}}, dtype);
    check({.seqlen = 200, .shared = 2, .initial = false, .cu_seqlens = {3, 67, 190}}, dtype);
    check({.batch = 2, .seqlen = 150, .numbered = true}, dtype);
  }
}

TEST_P(Mamba2Backward, WithoutStepsTheStatesGradientStays) {
  for (const int skip : {1, 2}) check({.batch = 2, .seqlen = 0, .skip = skip}, DType::bf16);
  for (const DType dtype : {DType::bf16, DType::f32}) check({.batch = 0}, dtype);
}

TEST_P(Mamba2Backward, TheSameBitsInEveryRun) {
  const Case c{.batch = 2, .seqlen = 300, .groups = 2, .shared = 2};
  const Operands of(c, DType::bf16, device, random);
  const auto run = [&] {
    return launched([&] { mamba2_backward(of.x, of.dt, of.rate, of.b, of.c_matrix, of.dy, of.dx, of.d_dt, of.db, of.dc, of.backward()); });
  };
  const auto results = [&] {
    std::vector<std::vector<double>> all;
    for (const PlacedTensor* t : {&of.dx, &of.d_dt, &of.db, &of.dc, &of.da, &of.dd, &of.dz, &of.d_bias, &of.d_initial})
      all.push_back(t->values());
    return all;
  };
  if (!run()) return;
  const auto first = results();
  if (!run()) return;
  EXPECT_EQ(results(), first);
}

}  // namespace
}  // namespace tw::kernels::mamba2
