#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "tilewave/bitnet.hpp"

namespace tw::kernels::bitnet {

/// Rows of x [m, k] as integers with scales, by the formula.
struct PlainActivations {
  std::vector<int> values;
  std::vector<float> scales;
};
inline PlainActivations plain_activations(std::span<const float> x, std::int64_t m, std::int64_t k) {
  PlainActivations result;
  for (std::int64_t row = 0; row < m; ++row) {
    const auto of_row = x.subspan(static_cast<std::size_t>(row * k), static_cast<std::size_t>(k));
    float a = 1e-5f;
    bool finite = true;
    for (const float v : of_row) finite = finite && std::isfinite(v), a = std::max(a, std::abs(v));
    const float factor = 127.0f / a;
    for (const float v : of_row)
      result.values.push_back(finite ? static_cast<int>(std::clamp(std::nearbyint(v * factor), -128.0f, 127.0f)) : 0);
    result.scales.push_back(finite ? a / 127.0f : std::numeric_limits<float>::quiet_NaN());
  }
  return result;
}

/// The numbers of a weight on the CPU, code by code: [N, K].
inline std::vector<int> numbers_of(const TernaryMatrix& w) {
  std::vector<int> numbers;
  for (std::int64_t n = 0; n < w.rows(); ++n)
    for (std::int64_t k = 0; k < w.columns(); ++k) numbers.push_back((static_cast<int>(w.values.at({n, k / 4})) >> (k % 4 * 2) & 3) - 2);
  return numbers;
}

/// -1, 0 or 1: w / scale rounded.
inline int plain_ternary(float w, float scale) { return static_cast<int>(std::clamp(std::nearbyint(w / scale), -1.0f, 1.0f)); }

/// The sums of products [m, n] of x [m, k] and w [n, k].
inline std::vector<std::int64_t> plain_sums(std::span<const int> x, std::span<const int> w, std::int64_t m, std::int64_t n,
                                            std::int64_t k) {
  std::vector<std::int64_t> sums;
  for (std::int64_t r = 0; r < m; ++r) {
    for (std::int64_t i = 0; i < n; ++i) {
      std::int64_t sum = 0;
      for (std::int64_t c = 0; c < k; ++c) sum += x[static_cast<std::size_t>(r * k + c)] * w[static_cast<std::size_t>(i * k + c)];
      sums.push_back(sum);
    }
  }
  return sums;
}

}  // namespace tw::kernels::bitnet
