#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace tw::kernels::softmax {

/// softmax(scale x) of each row of [rows, cols], computed in arithmetic of type Real.
template <class Real>
std::vector<Real> plain(std::span<const float> x, std::int64_t rows, std::int64_t cols, Real scale) {
  std::vector<Real> y(x.size());
  for (std::int64_t row = 0; row < rows; ++row) {
    const float* const from = x.data() + row * cols;
    Real* const to = y.data() + row * cols;
    Real largest = -std::numeric_limits<Real>::infinity(), sum = 0;
    for (std::int64_t c = 0; c < cols; ++c) largest = std::max(largest, static_cast<Real>(from[c]));
    for (std::int64_t c = 0; c < cols; ++c) sum += to[c] = std::exp(scale * (static_cast<Real>(from[c]) - largest));
    for (std::int64_t c = 0; c < cols; ++c) to[c] /= sum;
  }
  return y;
}

}  // namespace tw::kernels::softmax
