#pragma once

#include "tilewave/tile/types.tile.hpp"

// Element functions: f32 in, f32 out, with the same names on every target. On the GPU they are the hardware's approximations if these keep
// the accuracy of a 16-bit result. exp2 has a relative error below 2^-21; tanh's 2^-11 is too coarse, so tanh is built from exp2.

// The C library's functions. On the host they are compiler builtins, which need no header; on the GPU the run-time compiler declares them.
#if TW_ON_GPU
#define TW_LIBM(name) ::name
#else
#define TW_LIBM(name) __builtin_##name
#endif

namespace tw {

inline constexpr float kInfinity = bit_cast<float>(0x7f800000u);
inline constexpr float kLog2E = 1.44269504088896341f;
inline constexpr float kLn2 = 0.693147180559945309f;

/// The larger of two numbers. If one is NaN, the other one, like the GPU's instruction.
TW_INLINE float max(float a, float b) {
#if TW_ON_GPU
  return ::fmaxf(a, b);
#else
  const float larger = a > b ? a : b;  // all comparisons are evaluated unconditionally, so that compilers vectorise loops of it
  return b != b ? a : larger;
#endif
}
/// The smaller of two numbers. If one is NaN, the other one.
TW_INLINE float min(float a, float b) {
#if TW_ON_GPU
  return ::fminf(a, b);
#else
  const float smaller = a < b ? a : b;
  return b != b ? a : smaller;
#endif
}
/// The same, but NaN if either is NaN.
TW_INLINE float max_or_nan(float a, float b) {
#if TW_ON_GPU
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
#else
  return b > a || b != b ? b : a;
#endif
}
TW_INLINE float min_or_nan(float a, float b) {
#if TW_ON_GPU
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
#else
  return b < a || b != b ? b : a;
#endif
}
TW_INLINE constexpr int max(int a, int b) { return a > b ? a : b; }
TW_INLINE constexpr int min(int a, int b) { return a < b ? a : b; }
TW_INLINE constexpr u32 max(u32 a, u32 b) { return a > b ? a : b; }
TW_INLINE constexpr u64 max(u64 a, u64 b) { return a > b ? a : b; }
TW_INLINE constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

/// a b + c, rounded once.
TW_INLINE float fma(float a, float b, float c) { return TW_LIBM(fmaf)(a, b, c); }

TW_INLINE float abs(float x) { return TW_LIBM(fabsf)(x); }

/// 2^x; 0 if the result is below the normal numbers.
TW_INLINE float exp2(float x) {
#if TW_ON_GPU
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  // Branch-free, so that compilers vectorise loops of it: 2^x = 2^n * 2^f, |f| <= 1/2, with a minimax polynomial for 2^f (relative error
  // 2e-7) and n added to its exponent. Results are selected by masks: g++ would branch around the second comparison of a nested ?:, because
  // a comparison may trap, and vectorise nothing.
  const float shifted = x + 12582912.0f;
  const float f = x - (shifted - 12582912.0f);
  float p = 1.540353e-4f;
  p = p * f + 1.3333558e-3f;
  p = p * f + 9.6181291e-3f;
  p = p * f + 5.5504109e-2f;
  p = p * f + 2.4022651e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.0f;
  const u32 inside = bit_cast<u32>(p) + (bit_cast<u32>(shifted) << 23);
  const u32 beyond = bit_cast<u32>(x + kInfinity);  // infinity or NaN
  const u32 below = x < -126.0f ? ~0u : 0u, in_range = x < 128.0f ? ~0u : 0u;
  return bit_cast<float>(((inside & in_range) | (beyond & ~in_range)) & ~below);
#endif
}

/// log2 x; log2 0 is -infinity.
TW_INLINE float log2(float x) {
#if TW_ON_GPU
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return __builtin_log2f(x);
#endif
}

TW_INLINE float exp(float x) { return exp2(x * kLog2E); }

TW_INLINE float sqrt(float x) { return TW_LIBM(sqrtf)(x); }

/// 1 / sqrt(x).
TW_INLINE float rsqrt(float x) {
#if TW_ON_GPU
  return ::rsqrtf(x);
#else
  return 1.0f / __builtin_sqrtf(x);
#endif
}

/// 1 / x.
TW_INLINE float reciprocal(float x) {
#if TW_ON_GPU
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return 1.0f / x;
#endif
}

TW_INLINE float tanh(float x) {
#if TW_ON_GPU
  const float e = exp2(abs(x) * (-2.0f * kLog2E));  // in (0, 1], so it cannot overflow
  const float y = (1.0f - e) * reciprocal(1.0f + e);
  // Near zero 1 - e cancels; x - x^3/3 + 2x^5/15 is exact to f32 below 0.06.
  const float x2 = x * x;
  const float near_zero = x * (1.0f + x2 * (-0.333333333f + x2 * 0.133333333f));
  return abs(x) < 0.06f ? near_zero : ::copysignf(y, x);
#else
  return __builtin_tanhf(x);
#endif
}

/// The power of two p for which 2^n <= |x| p < 2^(n + 1), but at most 2^100: the result where x is 0. n: 0 to 26.
TW_INLINE float scaling_power(float x, int n) {
  const int exponent = static_cast<int>(bit_cast<u32>(x) >> 23 & 255u);
  return bit_cast<float>(static_cast<u32>(min(254 + n - exponent, 227)) << 23);
}

// Fixed-point numbers of 15 bits: integers times fixed_point_scale(peak), where `peak` is the largest magnitude among them. An integer is x
// * fixed_point_power(peak), rounded to nearest; it is below 2^14.

TW_INLINE float fixed_point_power(float peak) { return scaling_power(peak, 13); }
/// NaN if `peak` is infinite or NaN.
TW_INLINE float fixed_point_scale(float peak) {
  return bit_cast<float>((254u << 23) - bit_cast<u32>(fixed_point_power(peak))) + (peak - peak);
}
/// A number below 2^22 plus this is rounded to an integer, which the sum's bits end with.
inline constexpr float kFixedPointRounding = 12582912.0f;  // 1.5 * 2^23

/// tanh by the GPU's own instruction, with a relative error up to 2^-11.
TW_INLINE float tanh_approx(float x) {
#if TW_ON_GPU
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  // Branch-free, so that compilers vectorise loops of it. 1 - 2 / (1 + e^2x) has an absolute error of 1e-7.
  return 1.0f - 2.0f / (1.0f + exp2(x * (2.0f * kLog2E)));
#endif
}

/// from - to, for numbers well below 2^24.
TW_INLINE float difference(int from, int to) { return static_cast<float>(from - to); }

TW_INLINE float erf(float x) { return TW_LIBM(erff)(x); }

TW_INLINE float sin(float x) { return TW_LIBM(sinf)(x); }
TW_INLINE float cos(float x) { return TW_LIBM(cosf)(x); }

TW_INLINE float sigmoid(float x) { return reciprocal(1.0f + exp2(-x * kLog2E)); }

// Activations as types, which kernels take as template parameters. A user-defined one is a struct with the same static function in an
// embedded file. X is float, or the target's replacement for it.

struct Identity {
  template <class X>
  TW_INLINE static X apply(X x) {
    return x;
  }
};
/// max(x, 0); NaN stays NaN.
struct Relu {
  template <class X>
  TW_INLINE static X apply(X x) {
    return x < 0.0f ? X(0.0f) : x;
  }
};
/// x / (1 + exp(-x)), also called swish.
struct Silu {
  template <class X>
  TW_INLINE static X apply(X x) {
    return x * sigmoid(x);
  }
};
/// x * Phi(x), where Phi is the normal distribution function: the exact GELU, to the accuracy of f32 relative to x.
struct GeluErf {
  template <class X>
  TW_INLINE static X apply(X x) {
    // Phi(-|x|) = 2^p(|x|), where p is a polynomial. Its error, weighted with the result, is at most 4e-8. It takes a third of the
    // instructions of erf and has no branches.
    const X z = abs(x);
    X p = z * -1.9490694e-6f + 3.0118941e-5f;
    p = p * z + -1.4834091e-4f;
    p = p * z + -2.1413037e-4f;
    p = p * z + 7.1465583e-3f;
    p = p * z + -5.2542042e-2f;
    p = p * z + -4.5919675e-1f;
    p = p * z + -1.1511061f;
    p = p * z + -1.0f;
    const X tail = exp2(p);
    // 1 - tail or tail. All operations are shared, because an operation that only one case needs would become a branch.
    return x * ((x < 0.0f ? X(0.0f) : X(1.0f)) + (x < 0.0f ? tail : -tail));
  }
};
/// 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))): the approximate GELU.
struct GeluTanh {
  template <class X>
  TW_INLINE static X apply(X x) {
    // (1 + tanh u) / 2 is sigmoid(2 u).
    return x * sigmoid(1.59576912160573071f * (x + 0.044715f * x * x * x));
  }
};

/// silu(gate) * up: the gated linear unit of Llama's MLP (Shazeer 2020, "GLU variants improve transformer").
struct SwiGlu {
  template <class X>
  TW_INLINE static X apply(X gate, X up) {
    return Silu::apply(gate) * up;
  }
};

}  // namespace tw
