#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include "tilewave/device.hpp"
#include "tilewave/dtype.hpp"

namespace tw::test {

/// What an op's products are rounded to: its dtype, except that a GPU's products of f32 are tf32.
enum class Arithmetic { f32, tf32, f16, bf16 };

inline Arithmetic arithmetic_of(DType dtype, Device device) {
  if (dtype == DType::f16) return Arithmetic::f16;
  if (dtype == DType::bf16) return Arithmetic::bf16;
  return device.is_cuda() ? Arithmetic::tf32 : Arithmetic::f32;
}

/// `x` rounded to nearest even in `dtype`: f32, f16, bf16 or fp8.
inline float round_to(DType dtype, float x) {
  if (dtype == DType::fp8_e4m3) return static_cast<float>(fp8_e4m3(x));
  if (dtype == DType::fp8_e5m2) return static_cast<float>(fp8_e5m2(x));
  if (dtype == DType::f16) return static_cast<float>(f16(x));
  if (dtype == DType::bf16) return static_cast<float>(bf16(x));
  return x;
}

/// What an op gave, and what it is held against. All of one size.
struct Results {
  std::span<const double> out;
  std::span<const double> reference;  ///< the exact result for the same inputs
  std::span<const double> naive;      ///< the unfused operations in the data type, sums in f32
  Arithmetic arithmetic = Arithmetic::f32;
  /// Products that each element is the sum of.
  std::int64_t terms = std::numeric_limits<std::int64_t>::max();
  double factor = 2;  ///< errors allowed, in those of `naive`; 3 for gradients
  /// For results that may be 0 because large numbers cancel: the sum of their absolute values, for each element. Both bounds are at least
  /// the rounding error of that.
  std::span<const double> cancelled = {};
  std::int64_t cancelled_products = 1;  ///< of which each of those large numbers is the sum, such as the head dimension
  double relative_l2 = 0;  ///< replaces the bound on the L2 norm, for operands that are rounded more coarsely than the result; 0: standard
};

namespace internal {

/// Distance of neighbouring numbers of the output's type at magnitude `x`.
inline double ulp(Arithmetic arithmetic, double x) {
  const bool half = arithmetic == Arithmetic::f16;
  const int mantissa = half ? 10 : arithmetic == Arithmetic::bf16 ? 7 : 23;
  const int lowest = half ? -14 : -126;
  const int exponent = x > 0 ? std::max(std::ilogb(x), lowest) : lowest;
  return std::ldexp(1.0, exponent - mantissa);
}

inline double relative_l2_limit(Arithmetic arithmetic) {
  switch (arithmetic) {
    case Arithmetic::bf16:
      return 1e-2;
    case Arithmetic::f16:
      return 2e-3;
    case Arithmetic::tf32:
      return 1e-3;
    case Arithmetic::f32:
      break;
  }
  return 1e-5;
}

/// The relative error of what cancels: a rounding to the output's type, such as O's in delta. Of f32 it is three standard deviations of the
/// error of a sum of `products` products, one after the other: after k of n the partial sum has grown to sqrt(k / n) of its size, and each
/// addition is off by up to 2^-24 of it, 2^-24 / sqrt(3) in the root mean square.
inline double rounding(Arithmetic arithmetic, std::int64_t products) {
  if (arithmetic != Arithmetic::f32) return ulp(arithmetic, 1) / 4;
  return 3 * std::ldexp(1.0, -24) * std::sqrt(static_cast<double>(products) / 6);
}

}  // namespace internal

/// The accuracy rule of every op:
///   max|out - reference| <= factor max|naive - reference| + 2 ulp(max|reference|) + 1e-5, and
///   |out - reference| / |reference| <= 1e-2 (bf16), 2e-3 (f16), 1e-3 (tf32), 1e-5 (f32) in the L2 norm, so that one wrong tile cannot hide
///   under a large maximum.
/// The second is a statement on many elements, so it is made for 64 and more: in fewer nothing can hide. For tf32 it is closer. Tensor
/// cores truncate operands, by up to 2^-10 each; of sums of many random terms that makes an error of 7.7e-4 on average, more or less by
/// chance where few rows, columns and terms share few operands. It is made for 4096 and more elements of 64 and more terms.
inline testing::AssertionResult accurate(const Results& r) {
  const bool tf32 = r.arithmetic == Arithmetic::tf32;
  if (r.out.size() != r.reference.size() || r.out.size() != r.naive.size())
    return testing::AssertionFailure() << r.out.size() << " elements, but " << r.reference.size() << " and " << r.naive.size()
                                       << " to hold them against";
  double worst = 0, naive_worst = 0, largest = 0, error_squares = 0, squares = 0;
  std::size_t at = 0;
  for (std::size_t i = 0; i < r.out.size(); ++i) {
    const double error = std::abs(r.out[i] - r.reference[i]);
    if (!std::isfinite(error))
      return testing::AssertionFailure() << "element " << i << " is " << r.out[i] << " instead of " << r.reference[i];
    if (error > worst) {
      worst = error;
      at = i;
    }
    naive_worst = std::max(naive_worst, std::abs(r.naive[i] - r.reference[i]));
    largest = std::max(largest, std::abs(r.reference[i]));
    error_squares += error * error;
    squares += r.reference[i] * r.reference[i];
  }
  double largest_cancelled = 0, cancelled_squares = 0;
  for (const double x : r.cancelled) {
    largest_cancelled = std::max(largest_cancelled, x);
    cancelled_squares += x * x;
  }
  const double rounding = internal::rounding(r.arithmetic, r.cancelled_products);
  const double limit = std::max(r.factor * naive_worst + 2 * internal::ulp(r.arithmetic, largest) + 1e-5, rounding * largest_cancelled);
  if (!(worst <= limit)) {
    return testing::AssertionFailure() << "element " << at << " is " << r.out[at] << " instead of " << r.reference[at] << ": off by "
                                       << worst << ", allowed " << limit << " (the naive computation is off by " << naive_worst << ")";
  }
  if (r.out.size() < (tf32 ? 4096u : 64u) || (tf32 && r.terms < 64)) return testing::AssertionSuccess();
  const double relative_l2 = r.relative_l2 > 0 ? r.relative_l2 : internal::relative_l2_limit(r.arithmetic);
  const double l2_limit = std::max(relative_l2 * std::sqrt(squares), rounding * std::sqrt(cancelled_squares));
  if (!(std::sqrt(error_squares) <= l2_limit))
    return testing::AssertionFailure() << "the L2 norm of the error is " << std::sqrt(error_squares) << ", allowed " << l2_limit;
  return testing::AssertionSuccess();
}

}  // namespace tw::test
