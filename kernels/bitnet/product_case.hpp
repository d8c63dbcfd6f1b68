#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "kernels/bitnet/reference.hpp"
#include "tests/accuracy.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"

// Random operands of products, and what the tests hold their results against.

namespace tw::kernels::bitnet {

struct ProductCase {
  std::int64_t m, n, k;
  bool bias = false, accumulate = false;
  std::int64_t gap = 0, align = 1;  ///< elements between rows of x and y, and what x's rows start at multiples of
};

/// Operands on a device. Elements of x are of the full range of i8, and W has a scale for each row.
struct ProductOperands {
  ProductCase c;
  test::PlacedTensor x, y, bias;
  Tensor x_scales;
  TernaryMatrix weight;
  std::vector<int> x_numbers, numbers;
  std::vector<float> row_scales, scales, biases, before;

  ProductOperands(const ProductCase& given, DType dtype, Device device, std::mt19937_64& random)
      : c(given),
        x({c.m, c.k}, DType::i8, device, {.gap = c.gap, .align = c.align}),
        y({c.m, c.n}, dtype, device, {.gap = c.gap}),
        bias({c.n}, dtype, device) {
    const auto pick = [&](int low, int high) { return low + static_cast<int>(random() % static_cast<unsigned>(high - low + 1)); };
    const Tensor integers = Tensor::empty({c.n, c.k}, DType::i8), of_rows = Tensor::empty({c.n}, DType::f32);
    x_scales = Tensor::empty({c.m}, DType::f32);
    std::vector<float> x_values;
    for (std::int64_t i = 0; i < c.m * c.k; ++i)
      x_numbers.push_back(pick(-128, 127)), x_values.push_back(static_cast<float>(x_numbers.back()));
    for (std::int64_t i = 0; i < c.n * c.k; ++i) numbers.push_back(pick(-1, 1)), integers.data<i8>()[i] = static_cast<i8>(numbers.back());
    for (std::int64_t i = 0; i < c.m; ++i)
      row_scales.push_back(x_scales.data<float>()[i] = std::ldexp(static_cast<float>(pick(100, 999)), -16));
    for (std::int64_t i = 0; i < c.n; ++i) scales.push_back(of_rows.data<float>()[i] = std::ldexp(static_cast<float>(pick(100, 999)), -13));
    x.fill(x_values);
    x_scales = x_scales.to(device);
    weight = pack_ternary(integers, of_rows).to(device);
    biases = bias.fill_random(random);
    if (c.accumulate) before = y.fill_random(random);
  }

  /// Without a bias and addends every bit is known; otherwise what is added may be rounded before it is added, or not.
  void expect_right(DType dtype) const {
    const std::vector<std::int64_t> sums = plain_sums(x_numbers, numbers, c.m, c.n, c.k);
    const std::vector<double> results = y.values();
    const double last = dtype == DType::f32 ? 0x1p-24 : dtype == DType::f16 ? 0x1p-11 : 0x1p-8;
    for (std::size_t i = 0; i < results.size(); ++i) {
      const std::size_t row = i / static_cast<std::size_t>(c.n), col = i % static_cast<std::size_t>(c.n);
      const float exact = static_cast<float>(sums[i]) * row_scales[row] * scales[col];
      if (!c.bias && !c.accumulate) {
        ASSERT_EQ(results[i], static_cast<double>(test::round_to(dtype, exact))) << row << ", " << col;
        continue;
      }
      const double added = c.bias ? static_cast<double>(biases[col]) : 0, old = c.accumulate ? static_cast<double>(before[i]) : 0;
      const double expected = static_cast<double>(exact) + added + old;
      const double error = 3 * 0x1p-24 * (std::abs(static_cast<double>(exact)) + std::abs(added) + std::abs(old));
      ASSERT_LE(std::abs(results[i] - expected), error + last * (std::abs(expected) + error) + (dtype == DType::f16 ? 0x1p-25 : 0))
          << row << ", " << col;
    }
    EXPECT_TRUE(y.gaps_intact());
  }
};

}  // namespace tw::kernels::bitnet
