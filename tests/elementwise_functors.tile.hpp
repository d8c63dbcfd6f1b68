#pragma once

#include "tilewave/tile/elementwise.tile.hpp"

// Functions as a user would write them, for kernels/elementwise/elementwise_test.cpp.

namespace tw::test {

inline constexpr const char* kFunctors = "tests/elementwise_functors.tile.hpp";

/// 30 tanh(x / 30).
struct Softcap {
  static constexpr const char* source = kFunctors;
  static float apply(float x) { return 30.0f * tanh(x * (1.0f / 30.0f)); }
};

/// a + (b - a) t.
struct Lerp {
  static constexpr const char* source = kFunctors;
  static float apply(float a, float b, float t) { return a + (b - a) * t; }
};

}  // namespace tw::test
