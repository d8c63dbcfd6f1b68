#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace tw::kernels::norm {

/// A norm of [rows, cols].
struct PlainCall {
  std::span<const float> h = {};  ///< with the residual added and rounded
  std::int64_t cols = 0;
  std::span<const float> weight = {}, bias = {};  ///< [cols], or empty
  double epsilon = 0;
  bool rms = false;
};

/// Computes it in arithmetic of type Real. `normalised` is applied to the normalised elements, before weight and bias.
template <class Real, class Round>
std::vector<Real> plain(const PlainCall& call, Round normalised) {
  std::vector<Real> y(call.h.size());
  const auto cols = static_cast<std::size_t>(call.cols);
  for (std::size_t first = 0; first < call.h.size(); first += cols) {
    Real mean = 0, squares = 0;
    for (std::size_t c = 0; c < cols && !call.rms; ++c) mean += static_cast<Real>(call.h[first + c]);
    mean /= static_cast<Real>(cols);
    for (std::size_t c = 0; c < cols; ++c) {
      const Real distance = static_cast<Real>(call.h[first + c]) - mean;
      squares += distance * distance;
    }
    const Real scale = 1 / std::sqrt(squares / static_cast<Real>(cols) + static_cast<Real>(call.epsilon));
    for (std::size_t c = 0; c < cols; ++c) {
      Real v = static_cast<Real>(normalised((static_cast<Real>(call.h[first + c]) - mean) * scale));
      if (!call.weight.empty()) v *= static_cast<Real>(call.weight[c]);
      if (!call.bias.empty()) v += static_cast<Real>(call.bias[c]);
      y[first + c] = v;
    }
  }
  return y;
}

}  // namespace tw::kernels::norm
