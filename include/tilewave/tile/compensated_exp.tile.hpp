#pragma once

#include "tilewave/tile/language.tile.hpp"

namespace tw {

/// A number as the sum of two.
template <class X>
struct Compensated {
  X high, low;
};

/// exp(x) for recurrences, which multiply a state by it at each step: s high + (s low + ...). The error of exp(x) alone, up to 2^-22 and
/// the same at each step while x is, would add up along the memory of 1 / (1 - exp(x)) steps. For |x| <= 1/2 `high` is 1 and `low` exp(x) -
/// 1, which is off by 2^-23 |x| at most, so the longer the memory, the less; with or without fused multiply-adds only the sum is rounded.
/// Beyond that, `high` is exp(x) and `low` 0. X is float, or the target's replacement for it.
template <class X>
TW_INLINE Compensated<X> compensated_exp(X x) {
  // (exp(x) - 1) / x: the Taylor series up to x^7 / 8!, which leaves out 1e-8 of it.
  const X series =
      1.0f +
      x * (1.0f / 2 + x * (1.0f / 6 + x * (1.0f / 24 + x * (1.0f / 120 + x * (1.0f / 720 + x * (1.0f / 5040 + x * (1.0f / 40320)))))));
  const bool weak = abs(x) <= 0.5f;
  return {weak ? X(1.0f) : exp(x), weak ? x * series : X(0.0f)};
}

}  // namespace tw
