#pragma once

#include "tilewave/tile/language.tile.hpp"

namespace tw {

/// A number as the sum of two: `low` is what `high` is off by.
template <class X>
struct Compensated {
  X high, low;
};

/// exp(x) for recurrences, which multiply a state by it at each step: s high + (s low + ...). The error of exp(x) alone, up to 2^-22 and
/// the same at each step while x is, would add up along the memory of 1 / (1 - exp(x)) steps. Of the sum of both parts it is at most 2^-23
/// |x| for |x| <= 1/2, so the longer the memory, the smaller; beyond that, `low` is 0. X is float, or the target's replacement for it.
template <class X>
TW_INLINE Compensated<X> compensated_exp(X x) {
  const X high = exp(x);
  // (exp(x) - 1) / x: the Taylor series up to x^7 / 8!, which leaves out 1e-8 of it. high - 1 is exact.
  const X series =
      1.0f +
      x * (1.0f / 2 + x * (1.0f / 6 + x * (1.0f / 24 + x * (1.0f / 120 + x * (1.0f / 720 + x * (1.0f / 5040 + x * (1.0f / 40320)))))));
  return {high, abs(x) <= 0.5f ? x * series - (high - 1.0f) : X(0.0f)};
}

}  // namespace tw
