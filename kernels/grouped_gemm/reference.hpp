#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/gemm/reference.hpp"

namespace tw::kernels::grouped_gemm {

/// Offsets as the kernels see them: clamped, and groups whose offsets decrease are empty.
struct PlainGroups {
  std::span<const std::int32_t> offsets;
  std::int64_t rows;

  std::int64_t count() const { return static_cast<std::int64_t>(offsets.size()) - 1; }
  std::int64_t begin(std::int64_t g) const { return std::clamp<std::int64_t>(offsets[static_cast<std::size_t>(g)], 0, rows); }
  std::int64_t size(std::int64_t g) const { return std::max<std::int64_t>(begin(g + 1) - begin(g), 0); }
};

/// A call of grouped_gemm() in plain numbers, row-major.
struct PlainCall {
  PlainGroups groups;
  std::span<const float> a;     ///< [m, k]
  std::span<const float> b;     ///< [groups, k, n]
  std::span<const float> bias;  ///< [groups, n], or empty
  std::int64_t n, k;
  Activation activation;
};
/// D, by one of gemm's references for each group. Rows of no group are `outside`.
template <class Product>
std::vector<double> evaluate(const PlainCall& call, double outside, Product product) {
  const std::int64_t n = call.n, k = call.k, width = call.activation == Activation::swiglu ? n / 2 : n;
  std::vector<double> d(static_cast<std::size_t>(call.groups.rows * width), outside);
  const auto part = [](std::span<const float> s, std::int64_t first, std::int64_t size) {
    return s.empty() ? s : s.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(size));
  };
  for (std::int64_t g = 0; g < call.groups.count(); ++g) {
    const std::int64_t begin = call.groups.begin(g), size = call.groups.size(g);
    const std::vector<double> rows = product(gemm::PlainCall{.m = size,
                                                             .n = n,
                                                             .k = k,
                                                             .a = part(call.a, begin * k, size * k),
                                                             .b = part(call.b, g * k * n, k * n),
                                                             .bias = part(call.bias, g * n, n),
                                                             .activation = call.activation});
    std::copy(rows.begin(), rows.end(), d.begin() + begin * width);
  }
  return d;
}

/// D of k_grouped_gemm() in arithmetic of type Real, each element rounded by round(); `a`: [k, m], `b`: [k, n], `before`: what it is added
/// to, [groups, m, n], or empty.
template <class Real, class Round>
std::vector<double> evaluate_k_grouped(const PlainGroups& groups, std::span<const float> a, std::span<const float> b,
                                       std::span<const float> before, std::int64_t m, std::int64_t n, Round round) {
  std::vector<double> d(static_cast<std::size_t>(groups.count() * m * n));
  std::vector<Real> sums(static_cast<std::size_t>(m * n));
  for (std::int64_t g = 0; g < groups.count(); ++g) {
    std::fill(sums.begin(), sums.end(), Real{0});
    for (std::int64_t k = groups.begin(g); k < groups.begin(g) + groups.size(g); ++k)
      for (std::int64_t i = 0; i < m; ++i)
        for (std::int64_t j = 0; j < n; ++j)
          sums[static_cast<std::size_t>(i * n + j)] +=
              static_cast<Real>(a[static_cast<std::size_t>(k * m + i)]) * static_cast<Real>(b[static_cast<std::size_t>(k * n + j)]);
    for (std::size_t i = 0; i < sums.size(); ++i) {
      const std::size_t at = static_cast<std::size_t>(g * m * n) + i;
      d[at] = round(static_cast<double>(sums[i]) + (before.empty() ? 0.0 : before[at]));
    }
  }
  return d;
}

}  // namespace tw::kernels::grouped_gemm
