// The kernel for few rows of A, which gemm() uses on GPUs only, on the CPU target.

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "kernels/gemm/launch.hpp"
#include "kernels/gemm/reference.hpp"
#include "runtime/format.hpp"
#include "tests/accuracy.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"
#include "tilewave/tile/cpu/target.tile.hpp"

namespace tw::kernels::gemm {
namespace {

using namespace tw::test;

struct Case {
  int m, n, k, batch = 0;
  bool b_batched = true;
  bool epilogue = false;
  std::int64_t a_gap = 0, b_gap = 0;
};

/// Runs the kernel for one case on the CPU target and holds it against the rule.
template <Kernel kernel>
void check(const Case& c, std::mt19937_64& random) {
  SCOPED_TRACE(
      tw::format("m {} n {} k {} batch {} b {} epilogue {} gaps {} {}", c.m, c.n, c.k, c.batch, c.b_batched, c.epilogue, c.a_gap, c.b_gap));
  constexpr DType dtype = kernel.dtype;
  const Device device = Device::cpu();
  const auto shape = [&](bool batched, std::int64_t rows, std::int64_t cols) {
    return batched ? Shape{c.batch, rows, cols} : Shape{rows, cols};
  };
  const bool batched = c.batch > 0, b_batched = batched && c.b_batched;
  PlacedTensor a(shape(batched, c.m, c.k), dtype, device, {.gap = c.a_gap});
  const std::vector<int> stored_by_columns = b_batched ? std::vector{0, 2, 1} : std::vector{1, 0};
  PlacedTensor b(shape(b_batched, c.k, c.n), dtype, device, {.order = stored_by_columns, .gap = c.b_gap});
  PlacedTensor d(shape(batched, c.m, c.n), dtype, device, {.gap = 1}), residual(shape(batched, c.m, c.n), dtype, device);
  PlacedTensor bias({c.n}, dtype, device);
  const std::vector<float> a_values = a.fill_random(random);
  const std::vector<float> b_values = b.fill_random(random, 1 / std::sqrt(static_cast<float>(c.k)));
  std::vector<float> c_values, bias_values, residual_values;
  if (c.epilogue) {
    c_values = d.fill_random(random);
    bias_values = bias.fill_random(random);
    residual_values = residual.fill_random(random);
  }
  GemmOptions options{.constant_b = true};
  if (c.epilogue) options = {.alpha = 0.5f, .beta = -2, .bias = &bias.tensor(), .residual = &residual.tensor(), .constant_b = true};
  const Call call = make_call(a, b, d, options);
  const Launch x = make_launch(call, kernel);
  launch_cpu<HostKernel<kernel>>(x.grid, [&](auto& bind, auto& p) { bind_launch(bind, p, call, x); });

  const PlainCall plain{c.m,       c.n,           c.k,          batched ? c.batch : 1, a_values,
                        b_values,  c_values,      bias_values,  residual_values,       batched,
                        b_batched, options.alpha, options.beta, Activation::none};
  const Arithmetic arithmetic = arithmetic_of(dtype, device);
  EXPECT_TRUE(accurate({d.values(), reference(plain), naive(plain, dtype, false), arithmetic, c.k}));
  EXPECT_TRUE(d.gaps_intact());
}

template <DType dtype, bool addends>
constexpr Kernel kernel_for(int rows) {
  return {.dtype = dtype, .form = Kernel::skinny, .addends = addends, .tile = skinny_tile(rows)};
}

template <DType dtype>
void check_all() {
  cpu::set_poison_released_slots(true);
  std::mt19937_64 random = random_engine();
  for (const int n : {1, 32, 75}) {
    for (const int k : {64, 512, 1600, 2048}) {
      check<kernel_for<dtype, false>(8)>({.m = 1, .n = n, .k = k}, random);
      check<kernel_for<dtype, false>(8)>({.m = 8, .n = n, .k = k, .batch = 2, .b_batched = n == 32, .a_gap = 3, .b_gap = 8}, random);
      check<kernel_for<dtype, true>(16)>({.m = 13, .n = n, .k = k, .epilogue = true, .b_gap = 5}, random);
      check<kernel_for<dtype, true>(16)>({.m = 16, .n = n, .k = k, .batch = 3, .epilogue = true}, random);
    }
  }
}

TEST(SkinnyGemm, OfBf16IsCorrectOnTheCpu) { check_all<DType::bf16>(); }
TEST(SkinnyGemm, OfF16IsCorrectOnTheCpu) { check_all<DType::f16>(); }

}  // namespace
}  // namespace tw::kernels::gemm
