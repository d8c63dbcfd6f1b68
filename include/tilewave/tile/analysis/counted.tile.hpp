#pragma once

#include "tilewave/tile/math.tile.hpp"

// The number type that replaces float in tiles of the analysis target and counts its own operations. Every kernel includes it, so that
// tw::exp2 and the other element functions are declared for it before kernels use them.

#if !TW_ON_GPU

namespace tw {

namespace analysis {

/// The operations of element functions.
struct Cost {
  u64 f32 = 0;        ///< additions, multiplications, comparisons, max, min; negations are free
  u64 special = 0;    ///< exp2, log2, sqrt, rsqrt, reciprocal (including that of a division), erf, sin, cos
  u64 uncounted = 0;  ///< elements passed to functions of float, whose operations cannot be counted
  u64 shared = 0;     ///< bytes of histograms and lists that element functions read and write

  constexpr Cost& operator+=(const Cost& other) {
    f32 += other.f32;
    special += other.special;
    uncounted += other.uncounted;
    shared += other.shared;
    return *this;
  }
  friend constexpr Cost operator*(const Cost& cost, u64 times) {
    return {cost.f32 * times, cost.special * times, cost.uncounted * times, cost.shared * times};
  }
  friend constexpr bool operator==(const Cost&, const Cost&) = default;
};

/// What this thread has counted so far.
inline constinit thread_local Cost cost{};

}  // namespace analysis

/// A float that counts its arithmetic. Its value is a placeholder, which comparisons use.
struct Counted {
  float value;

  Counted() = default;
  constexpr Counted(float x) : value(x) {}
  constexpr explicit operator float() const { return value; }
  constexpr explicit operator int() const { return static_cast<int>(value); }

  static Counted operation(float result) {
    ++analysis::cost.f32;
    return result;
  }
  static Counted special(float result) {
    ++analysis::cost.special;
    return result;
  }
  static bool comparison(bool result) {
    ++analysis::cost.f32;
    return result;
  }

  friend Counted operator+(Counted a, Counted b) { return operation(a.value + b.value); }
  friend Counted operator-(Counted a, Counted b) { return operation(a.value - b.value); }
  friend Counted operator*(Counted a, Counted b) { return operation(a.value * b.value); }
  /// Counts a reciprocal and a multiplication.
  friend Counted operator/(Counted a, Counted b) { return operation(a.value * special(1.0f / b.value).value); }
  friend Counted operator-(Counted a) { return -a.value; }
  friend bool operator<(Counted a, Counted b) { return comparison(a.value < b.value); }
  friend bool operator<=(Counted a, Counted b) { return comparison(a.value <= b.value); }
  friend bool operator>(Counted a, Counted b) { return comparison(a.value > b.value); }
  friend bool operator>=(Counted a, Counted b) { return comparison(a.value >= b.value); }
  friend bool operator==(Counted a, Counted b) { return comparison(a.value == b.value); }
  friend bool operator!=(Counted a, Counted b) { return comparison(a.value != b.value); }
  Counted& operator+=(Counted b) { return *this = *this + b; }
  Counted& operator-=(Counted b) { return *this = *this - b; }
  Counted& operator*=(Counted b) { return *this = *this * b; }
  Counted& operator/=(Counted b) { return *this = *this / b; }
};

// The element functions, counted as on a GPU: one special-function operation each, unless they are built from others.
inline Counted abs(Counted x) { return abs(x.value); }
inline Counted max(Counted a, Counted b) { return Counted::operation(max(a.value, b.value)); }
inline Counted min(Counted a, Counted b) { return Counted::operation(min(a.value, b.value)); }
inline Counted max_or_nan(Counted a, Counted b) { return Counted::operation(max_or_nan(a.value, b.value)); }
inline Counted min_or_nan(Counted a, Counted b) { return Counted::operation(min_or_nan(a.value, b.value)); }
inline Counted exp2(Counted x) { return Counted::special(exp2(x.value)); }
inline Counted log2(Counted x) { return Counted::special(log2(x.value)); }
inline Counted exp(Counted x) { return exp2(x * kLog2E); }
inline Counted sqrt(Counted x) { return Counted::special(sqrt(x.value)); }
inline Counted rsqrt(Counted x) { return Counted::special(rsqrt(x.value)); }
inline Counted reciprocal(Counted x) { return Counted::special(reciprocal(x.value)); }
inline Counted erf(Counted x) { return Counted::special(erf(x.value)); }
inline Counted sin(Counted x) { return Counted::special(sin(x.value)); }
inline Counted cos(Counted x) { return Counted::special(cos(x.value)); }
inline Counted sigmoid(Counted x) { return reciprocal(1.0f + exp2(-x * kLog2E)); }
inline Counted scaling_power(Counted x, int n) { return Counted::operation(scaling_power(x.value, n)); }
inline Counted tanh_approx(Counted x) { return Counted::special(tanh_approx(x.value)); }
/// (1 - e) / (1 + e) with e = exp(-2 |x|).
inline Counted tanh(Counted x) {
  const Counted e = exp2(abs(x) * (-2.0f * kLog2E));
  return (1.0f - e) * reciprocal(1.0f + e);
}

}  // namespace tw

#endif  // !TW_ON_GPU
