#pragma once

#include "tilewave/tile/language.tile.hpp"

namespace tw::kernels::mamba2 {

/// How a step size follows from dt + dt_bias.
struct StepSize {
  bool softplus;
  float least, largest;

  /// log(1 + exp(x)), to f32's accuracy also where it is small. With e = exp(-|x|) it is max(x, 0) + log(1 + e), and log(1 + e) is
  /// 2 atanh(s), s = e / (2 + e) <= 1/3: the terms from s^17 on are below 2^-28.
  template <class X>
  TW_INLINE static X softplus_of(X x) {
    const X e = exp(-abs(x));
    const X s = e / (2.0f + e), s2 = s * s;
    const X series =
        1.0f +
        s2 * (1.0f / 3 + s2 * (1.0f / 5 + s2 * (1.0f / 7 + s2 * (1.0f / 9 + s2 * (1.0f / 11 + s2 * (1.0f / 13 + s2 * (1.0f / 15)))))));
    return max(x, 0.0f) + 2.0f * s * series;
  }
  template <class X>
  TW_INLINE X unlimited(X x) const {
    return softplus ? softplus_of(x) : x;
  }
  /// A NaN stays NaN.
  template <class X>
  TW_INLINE X of(X x) const {
    return min_or_nan(max_or_nan(unlimited(x), least), largest);
  }
  /// The derivative.
  template <class X>
  TW_INLINE X derivative(X x) const {
    const X size = unlimited(x);
    const X inside = size < least || size > largest ? X(0.0f) : X(1.0f);
    return softplus ? inside * sigmoid(x) : inside;
  }
};

/// dt A: the logarithm of the decay. A step of size 0 has none, also if the rate is -infinity.
template <class X>
TW_INLINE X log_decay(X size, X rate) {
  return size == 0.0f ? X(0.0f) : size * rate;
}

/// The steps of a call that belong to sequences: all, or with packed sequences those from the first offset to the last.
template <class Target>
struct Steps {
  Pointer<Target, const i32> cu_seqlens;  ///< [sequences + 1], or null
  int sequences, length;

  TW_INLINE int begin() const { return cu_seqlens ? max(min(cu_seqlens[0], length), 0) : 0; }
  TW_INLINE int end() const { return cu_seqlens ? max(min(cu_seqlens[sequences], length), 0) : length; }
};

}  // namespace tw::kernels::mamba2
