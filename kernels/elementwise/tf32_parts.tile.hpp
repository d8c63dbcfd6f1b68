#pragma once

#include "tilewave/tile/elementwise.tile.hpp"

namespace tw::kernels {

// x is the sum of two tf32 numbers and an error of at most 2^-22 x: x rounded to tf32, and the rest rounded to tf32.

struct Tf32High {
  static constexpr const char* source = "kernels/elementwise/tf32_parts.tile.hpp";
  TW_INLINE static float apply(float x) { return static_cast<float>(tf32(x)); }
};
struct Tf32Low {
  static constexpr const char* source = "kernels/elementwise/tf32_parts.tile.hpp";
  TW_INLINE static float apply(float x) {
    const float rest = x - static_cast<float>(tf32(x));
    return rest == rest ? static_cast<float>(tf32(rest)) : 0.0f;  // infinity has none
  }
};

}  // namespace tw::kernels
