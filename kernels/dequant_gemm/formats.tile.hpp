#pragma once

#include "tilewave/tile/language.tile.hpp"
#include "tilewave/tile/packed.tile.hpp"

// The formats of a weight W [N, K] in fewer bits, as template arguments of kernels. tilewave/quantized.hpp defines them.

namespace tw::kernels::dequant_gemm {

/// W(n, k) = scale(n) * value(n, k), for Element i8 or fp8_e4m3. Kernels scale the sums.
template <class Element>
struct ScaledRows {
  using Codes = Element;
};
/// W(n, k) = scale(n, g) * (code(n, k) - zero(n, g)), g = k / Group, for u4x2 and u2x4. Without `Zeros` a zero point is the middle.
template <int Group, bool Zeros, class Integers = u4x2>
struct ScaledGroups {
  using Codes = Integers;
  using Scale = f16;
  template <class T>
  using Decode = FromZero;
  static constexpr int group = Group;
  static constexpr bool zeros = Zeros;
  static constexpr float middle = is_same<Integers, u4x2> ? kSymmetricZero : 2.0f;
};
/// W(n, k) = scale(n, g) * e2m1(code(n, k)), where the scales are f16 or e8m0.
template <class ScaleType>
struct ScaledFloats {
  using Codes = fp4x2;
  using Scale = ScaleType;
  /// bf16 has the exponents of e8m0, f16 has not.
  template <class T>
  using Decode = conditional<is_same<Scale, f16> || is_same<T, bf16>, TimesF16, TimesScale>;
  static constexpr int group = 32;
  static constexpr bool zeros = false;
  static constexpr float middle = 0;
};
/// W(n, k) = scale(n, g) * normal_float(code(n, k)).
struct NormalFloats {
  using Codes = u4x2;
  using Scale = float;
  template <class T>
  using Decode = TimesNormalFloat;
  static constexpr int group = 64;
  static constexpr bool zeros = false;
  static constexpr float middle = 0;
};

}  // namespace tw::kernels::dequant_gemm
