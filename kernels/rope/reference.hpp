#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace tw::kernels::rope {

/// A rotation of x, [tokens, heads, dim].
struct PlainCall {
  std::span<const float> x = {};
  std::span<const std::int64_t> positions = {};  ///< [tokens], rows of the table
  std::span<const float> cos = {}, sin = {};     ///< [positions, half]
  std::int64_t heads = 0, dim = 0, half = 0;
  bool interleaved = false;
};

/// Computes it in arithmetic of type Real.
template <class Real>
std::vector<Real> plain(const PlainCall& call) {
  std::vector<Real> y(call.x.begin(), call.x.end());
  for (std::size_t token = 0; token < call.positions.size(); ++token) {
    for (std::int64_t head = 0; head < call.heads; ++head) {
      Real* const row = y.data() + (static_cast<std::int64_t>(token) * call.heads + head) * call.dim;
      for (std::int64_t k = 0; k < call.half; ++k) {
        Real& first = row[call.interleaved ? 2 * k : k];
        Real& second = row[call.interleaved ? 2 * k + 1 : k + call.half];
        const auto at = static_cast<std::size_t>(call.positions[token] * call.half + k);
        const Real c = call.cos[at], s = call.sin[at], a = first, b = second;
        first = a * c - b * s;
        second = b * c + a * s;
      }
    }
  }
  return y;
}

/// position * theta^(-k / half), in long double.
inline long double angle(std::int64_t position, std::int64_t k, std::int64_t half, double theta) {
  return static_cast<long double>(position) *
         std::pow(static_cast<long double>(theta), -static_cast<long double>(k) / static_cast<long double>(half));
}

}  // namespace tw::kernels::rope
