#pragma once

#include <cmath>
#include <cstdint>
#include <tilewave/tensor.hpp>

namespace arr_coc {

/// A hash whose results look random: the last steps of MurmurHash3.
inline std::uint32_t hash(std::uint32_t x) {
  x = (x ^ (x >> 16)) * 0x85ebca6bu;
  x = (x ^ (x >> 13)) * 0xc2b2ae35u;
  return x ^ (x >> 16);
}

/// The example's weights: f32 [rows, cols], uniform with mean 0 and variance 1 / rows, so that a product keeps the size of its input.
/// Element i is a function of `seed` and i alone, without a generator's state or rounding, so other languages compute the same bits.
inline tw::Tensor weight(std::uint32_t seed, int rows, int cols) {
  const tw::Tensor w = tw::Tensor::empty({rows, cols}, tw::DType::f32);
  const double scale = std::sqrt(12.0 / rows);
  for (std::uint32_t i = 0; i < static_cast<std::uint32_t>(w.numel()); ++i) {
    const std::uint32_t bits = hash(hash(seed) + i) >> 8;  // 24 bits, which f32 holds exactly
    w.data<float>()[i] = static_cast<float>((bits * 0x1p-24 - 0.5) * scale);
  }
  return w;
}

}  // namespace arr_coc
