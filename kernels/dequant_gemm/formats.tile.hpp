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
/// W(n, k) = scale(n, g) * (code(n, k) - zero(n, g)), g = k / Group, for two codes in a byte. Without `Zeros` a zero point is 8.
template <int Group, bool Zeros>
struct ScaledGroups {
  using Codes = u4x2;
  using Scale = f16;
  using Decode = FromZero;
  static constexpr int group = Group;
  static constexpr bool zeros = Zeros;
  static constexpr float middle = kSymmetricZero;
};

}  // namespace tw::kernels::dequant_gemm
