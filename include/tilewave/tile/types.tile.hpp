#pragma once

// Element types, and the few traits that tile code needs. Tile headers only include each other, because the GPU's run-time compiler has no
// standard headers.

#if defined(__CUDACC_RTC__) || defined(__CUDA_ARCH__)
#define TW_ON_GPU 1
#define TW_INLINE __forceinline__
#define TW_UNROLL _Pragma("unroll")
#define TW_NO_UNROLL _Pragma("unroll 1")
#else
#define TW_ON_GPU 0
#define TW_INLINE inline __attribute__((always_inline))
#define TW_UNROLL
#define TW_NO_UNROLL
#endif

// Conversions of 8-bit floats are instructions since compute capability 8.9.
#if TW_ON_GPU && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define TW_CONVERTS_FP8 1
#else
#define TW_CONVERTS_FP8 0
#endif

namespace tw {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i8 = signed char;
using i32 = int;
using i64 = long long;

template <class A, class B>
inline constexpr bool is_same = false;
template <class A>
inline constexpr bool is_same<A, A> = true;

template <class T>
struct RemoveConst {
  using Type = T;
};
template <class T>
struct RemoveConst<const T> {
  using Type = T;
};
template <class T>
using remove_const = typename RemoveConst<T>::Type;

template <class T>
struct RemoveReference {
  using Type = T;
};
template <class T>
struct RemoveReference<T&> {
  using Type = T;
};
template <class T>
using remove_const_reference = remove_const<typename RemoveReference<T>::Type>;

template <bool Condition, class A, class B>
struct Conditional {
  using Type = A;
};
template <class A, class B>
struct Conditional<false, A, B> {
  using Type = B;
};
template <bool Condition, class A, class B>
using conditional = typename Conditional<Condition, A, B>::Type;

/// A number as a type, so that a compile-time constant can be passed as an argument: block.wait(leave<1>, acc).
template <int N>
struct Constant {
  static constexpr int value = N;
};

/// The dimension of a Shared tile that a product sums over. mma(acc, a, b) is acc(m, n) += sum over k of a(m, k) * b(n, k): a tile stored
/// as [M, K] or [N, K] contracts its columns, one stored as [K, M] or [K, N] its rows.
enum class Contract { columns, rows };

template <class To, class From>
TW_INLINE constexpr To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  return __builtin_bit_cast(To, from);
}

namespace detail {

/// How a small floating-point format treats values above its largest finite value.
enum class Overflow { infinity, saturate };

/// The bits of `x` in a format with `Exponent` and `Mantissa` bits (bias 2^(Exponent-1) - 1), rounded to nearest even, including
/// subnormals. NaN becomes `kNan`. `kLargest` is the code of the largest finite magnitude.
template <int Exponent, int Mantissa, Overflow overflow, u32 kLargest, u32 kNan>
constexpr u32 encode_float(float x) {
  constexpr int bias = (1 << (Exponent - 1)) - 1;
  const u32 bits = bit_cast<u32>(x);
  const u32 sign = (bits >> 31) << (Exponent + Mantissa);
  const u32 magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | kNan;
  const int exponent = static_cast<int>(magnitude >> 23) - 127 + bias;  // the target's exponent field, if the result is a normal number
  u32 scaled = magnitude - (static_cast<u32>(127 - bias) << 23);
  int shift = 23 - Mantissa;
  if (exponent < 1) {
    shift += 1 - exponent;
    if (shift > 24) return sign;  // less than half of the smallest subnormal, as every f32 subnormal is
    scaled = (magnitude & 0x7fffffu) | 0x800000u;
  }
  const u32 odd = (scaled >> shift) & 1u;
  const u32 code = (scaled + ((1u << (shift - 1)) - 1) + odd) >> shift;
  if (code > kLargest) return sign | (overflow == Overflow::infinity ? kLargest + 1 : kLargest);
  return sign | code;
}

/// The value of a code. If `kIeee`, every code with an all-ones exponent is infinity or NaN; otherwise only `kNan` is NaN.
template <int Exponent, int Mantissa, bool kIeee, u32 kNan>
constexpr float decode_float(u32 code) {
  constexpr int bias = (1 << (Exponent - 1)) - 1;
  constexpr u32 mantissa_mask = (1u << Mantissa) - 1;
  const u32 sign = ((code >> (Exponent + Mantissa)) & 1u) << 31;
  const u32 exponent = (code >> Mantissa) & ((1u << Exponent) - 1);
  const u32 mantissa = code & mantissa_mask;
  if (kIeee && exponent == (1u << Exponent) - 1) return bit_cast<float>(sign | 0x7f800000u | (mantissa << (23 - Mantissa)));
  if (!kIeee && kNan != 0 && (code & ((1u << (Exponent + Mantissa)) - 1)) == kNan) return bit_cast<float>(sign | 0x7fc00000u);
  if (exponent == 0) {
    const float quantum = bit_cast<float>(static_cast<u32>(127 + 1 - bias - Mantissa) << 23);
    const float value = static_cast<float>(mantissa) * quantum;
    return sign ? -value : value;
  }
  return bit_cast<float>(sign | ((exponent + 127 - bias) << 23) | (mantissa << (23 - Mantissa)));
}

}  // namespace detail

/// IEEE half precision: 5 exponent and 10 mantissa bits.
struct f16 {
  u16 bits;
  f16() = default;
  TW_INLINE constexpr explicit f16(float x) : bits(0) {
#if TW_ON_GPU
    if (!__builtin_is_constant_evaluated()) {
      u32 pair;  // converting two is faster than converting one
      asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(0.0f), "f"(x));
      bits = static_cast<u16>(pair);
      return;
    }
#endif
    bits = static_cast<u16>(detail::encode_float<5, 10, detail::Overflow::infinity, 0x7bff, 0x7e00>(x));
  }
  TW_INLINE constexpr explicit operator float() const {
#if TW_ON_GPU
    if (!__builtin_is_constant_evaluated()) {
      float x;
      asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
      return x;
    }
#endif
    return detail::decode_float<5, 10, true, 0>(bits);
  }
};

/// The upper half of an f32: 8 exponent and 7 mantissa bits.
struct bf16 {
  u16 bits;
  bf16() = default;
  TW_INLINE constexpr explicit bf16(float x) : bits(0) {
#if TW_ON_GPU
    if (!__builtin_is_constant_evaluated()) {
      u32 pair;  // converting two is faster than converting one
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(0.0f), "f"(x));
      bits = static_cast<u16>(pair);
      return;
    }
#endif
    const u32 b = bit_cast<u32>(x);
    const bool nan = (b & 0x7fffffffu) > 0x7f800000u;
    bits = nan ? static_cast<u16>((b >> 16) | 0x40u) : static_cast<u16>((b + 0x7fffu + ((b >> 16) & 1u)) >> 16);
  }
  TW_INLINE constexpr explicit operator float() const { return bit_cast<float>(static_cast<u32>(bits) << 16); }
};

/// An f32 as tensor cores see it: 8 exponent and 10 mantissa bits in a 32-bit container. Tensor cores drop the low 13 bits of an f32
/// operand; this type rounds to nearest even.
struct tf32 {
  u32 bits;
  tf32() = default;
  TW_INLINE constexpr explicit tf32(float x) : bits(bit_cast<u32>(x)) {
    const bool finite = (bits & 0x7f800000u) != 0x7f800000u;
    if (finite) bits = (bits + 0xfffu + ((bits >> 13) & 1u)) & ~0x1fffu;
  }
  TW_INLINE constexpr explicit operator float() const { return bit_cast<float>(bits); }
};

/// 8-bit float with 4 exponent and 3 mantissa bits and no infinity. Larger values and infinities become +-448, NaN stays NaN, as with the
/// GPU's satfinite conversion.
struct fp8_e4m3 {
  u8 bits;
  fp8_e4m3() = default;
  TW_INLINE constexpr explicit fp8_e4m3(float x) : bits(0) {
#if TW_CONVERTS_FP8
    if (!__builtin_is_constant_evaluated()) {
      u16 pair;
      asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
      bits = static_cast<u8>(pair);
      return;
    }
#endif
    bits = static_cast<u8>(detail::encode_float<4, 3, detail::Overflow::saturate, 0x7e, 0x7f>(x));
  }
  TW_INLINE constexpr explicit operator float() const {
#if TW_CONVERTS_FP8
    if (!__builtin_is_constant_evaluated()) {
      u32 pair;  // f16 represents every fp8 number
      asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<u16>(bits)));
      f16 x;
      x.bits = static_cast<u16>(pair);
      return static_cast<float>(x);
    }
#endif
    return detail::decode_float<4, 3, false, 0x7f>(bits);
  }
};

/// 8-bit float with 5 exponent and 2 mantissa bits. Larger finite values and infinities become +-57344, as with the GPU's satfinite
/// conversion.
struct fp8_e5m2 {
  u8 bits;
  fp8_e5m2() = default;
  TW_INLINE constexpr explicit fp8_e5m2(float x) : bits(0) {
#if TW_CONVERTS_FP8
    if (!__builtin_is_constant_evaluated()) {
      u16 pair;
      asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
      bits = static_cast<u8>(pair);
      return;
    }
#endif
    bits = static_cast<u8>(detail::encode_float<5, 2, detail::Overflow::saturate, 0x7b, 0x7f>(x));
  }
  TW_INLINE constexpr explicit operator float() const {
#if TW_ON_GPU
    if (!__builtin_is_constant_evaluated()) {
      f16 x;
      x.bits = static_cast<u16>(bits << 8);  // the upper half of an f16
      return static_cast<float>(x);
    }
#endif
    return detail::decode_float<5, 2, true, 0>(bits);
  }
};

template <class T>
inline constexpr bool is_fp8 = is_same<T, fp8_e4m3> || is_same<T, fp8_e5m2>;

/// Whether A and B are element types of one product: the same, or two kinds of fp8.
template <class A, class B>
inline constexpr bool multiplies = is_same<A, B> || (is_fp8<A> && is_fp8<B>);
#define TW_MULTIPLIES "both operands of a product have one element type, or each a kind of fp8"

/// 4-bit float with 2 exponent bits and 1 mantissa bit: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, in the low half of a byte.
/// Conversions saturate; NaN becomes +6.
struct fp4_e2m1 {
  u8 bits;
  fp4_e2m1() = default;
  TW_INLINE constexpr explicit fp4_e2m1(float x)
      : bits(x != x ? u8{7} : static_cast<u8>(detail::encode_float<2, 1, detail::Overflow::saturate, 7, 7>(x))) {}
  TW_INLINE constexpr explicit operator float() const { return detail::decode_float<2, 1, false, 0>(bits); }
};

/// Two 4-bit floats in a byte, the first in the low half.
struct fp4x2 {
  u8 bits;
  TW_INLINE constexpr fp4_e2m1 get(int index) const {
    fp4_e2m1 x{};
    x.bits = static_cast<u8>((bits >> (4 * index)) & 15);
    return x;
  }
  TW_INLINE constexpr void set(int index, fp4_e2m1 x) { bits = static_cast<u8>((bits & (index ? 0x0f : 0xf0)) | (x.bits << (4 * index))); }
};

/// A scale that is a power of two from 2^-127 to 2^127, as 8 exponent bits; 255 is NaN. Conversions round up, so that dividing by the scale
/// cannot overflow.
struct e8m0 {
  u8 bits;
  e8m0() = default;
  TW_INLINE constexpr explicit e8m0(float x) : bits(0) {
    const u32 b = bit_cast<u32>(x);
    const u32 magnitude = b & 0x7fffffffu;
    if (magnitude > 0x7f800000u || ((b >> 31) != 0 && magnitude != 0)) {
      bits = 255;  // NaN; also for negative values, which are not valid scales
    } else if (magnitude < 0x800000u) {
      bits = magnitude > 0x400000u ? u8{1} : u8{0};  // f32 subnormals: 2^-127 is 0x400000
    } else {
      const u32 rounded = (magnitude + 0x7fffffu) >> 23;
      bits = static_cast<u8>(rounded > 254 ? 254 : rounded);
    }
  }
  TW_INLINE constexpr explicit operator float() const {
    if (bits == 255) return bit_cast<float>(0x7fc00000u);
    return bits == 0 ? bit_cast<float>(0x400000u) : bit_cast<float>(static_cast<u32>(bits) << 23);
  }
};

/// Two 4-bit or four 2-bit integers in a byte, the first in the lowest bits.
template <int kBits, bool kSigned>
struct SmallIntegers {
  static constexpr int count = 8 / kBits;
  u8 bits;
  TW_INLINE constexpr int get(int index) const {
    const int code = bits >> (kBits * index) & ((1 << kBits) - 1);
    return kSigned && code >> (kBits - 1) != 0 ? code - (1 << kBits) : code;
  }
  /// `x` must be in range: -8 to 7 or 0 to 15 with 4 bits, -2 to 1 or 0 to 3 with 2 bits.
  TW_INLINE constexpr void set(int index, int x) {
    const int mask = ((1 << kBits) - 1) << (kBits * index);
    bits = static_cast<u8>((bits & ~mask) | (static_cast<int>(static_cast<u32>(x) << (kBits * index)) & mask));
  }
};
using i4x2 = SmallIntegers<4, true>;
using u4x2 = SmallIntegers<4, false>;
using i2x4 = SmallIntegers<2, true>;
using u2x4 = SmallIntegers<2, false>;

/// The number of codes in an element of type T: 2 or 4 if T is a byte of codes, otherwise 1.
template <class T>
inline constexpr int codes_in = 1;
template <>
inline constexpr int codes_in<fp4x2> = 2;
template <int kBits, bool kSigned>
inline constexpr int codes_in<SmallIntegers<kBits, kSigned>> = SmallIntegers<kBits, kSigned>::count;

/// The value of code `index` in `bits`, which holds codes of type T, the first in the lowest bits. An integer code is put into the mantissa
/// of 2^23. A 4-bit float is put into the upper bits of an f32, and a multiplication corrects the exponent. Conversion instructions would
/// be several times slower.
template <class T>
TW_INLINE constexpr float value_of_code(u32 bits, int index) {
  static_assert(codes_in<T> > 1, "codes are elements of i4x2, u4x2, i2x4, u2x4 and fp4x2");
  constexpr int width = 8 / codes_in<T>;
  if constexpr (is_same<T, fp4x2>) {
    const u32 code = bits >> (width * index);
    return bit_cast<float>((code & 8u) << 28 | (code & 7u) << 22) * bit_cast<float>(253u << 23);
  } else {
    constexpr bool negative = is_same<T, SmallIntegers<width, true>>;
    constexpr u32 offset = negative ? 1u << (width - 1) : 0u;  // inverts the sign bit of a two's complement code, which adds this much
    const u32 code = (bits >> (width * index) & ((1u << width) - 1u)) ^ (0x4b000000u | offset);
    return bit_cast<float>(code) - (8388608.0f + static_cast<float>(offset));
  }
}

/// The zero point of a 4-bit code from 0 to 15 without one: the middle.
inline constexpr float kSymmetricZero = 8.0f;

/// int8 is the C++ type.
using int8 = i8;

namespace detail {

template <class T>
inline constexpr bool is_integer = is_same<T, i8> || is_same<T, u8> || is_same<T, short> || is_same<T, u16> || is_same<T, i32> ||
                                   is_same<T, u32> || is_same<T, long> || is_same<T, unsigned long> || is_same<T, i64> || is_same<T, u64>;
template <class T>
inline constexpr bool is_signed = static_cast<T>(-1) < static_cast<T>(0);
template <class T>
inline constexpr T largest = static_cast<T>(~u64{0} >> (64 - 8 * sizeof(T) + (is_signed<T> ? 1 : 0)));
template <class T>
inline constexpr T lowest = is_signed<T> ? static_cast<T>(-largest<T> - 1) : T{0};

template <class To, class From>
TW_INLINE constexpr To saturated(From x) {
  if (is_signed<From> && x < From{0}) {
    if (!is_signed<To>) return 0;
    return static_cast<i64>(x) < static_cast<i64>(lowest<To>) ? lowest<To> : static_cast<To>(x);
  }
  return static_cast<u64>(x) > static_cast<u64>(largest<To>) ? largest<To> : static_cast<To>(x);
}

/// Selects only between integers, and evaluates every comparison. Compilers then vectorise loops of it. They do not if a selection could
/// skip a floating-point operation that might trap.
template <class To>
TW_INLINE constexpr To rounded(float x) {
#if TW_ON_GPU
  if constexpr (sizeof(To) < 4 || is_same<To, i32>) {
    if (!__builtin_is_constant_evaluated()) {
      int n;  // saturated; NaN becomes 0
      asm("cvt.rni.s32.f32 %0, %1;" : "=r"(n) : "f"(x));
      return saturated<To>(n);
    }
  }
#endif
  const u32 bits = bit_cast<u32>(x);
  const u32 magnitude = bits & 0x7fffffffu;
  const u32 number = magnitude > 0x7f800000u ? 0u : magnitude;  // NaN becomes 0
  if constexpr (sizeof(To) < 4) {
    constexpr u32 kLimit = bit_cast<u32>(131072.0f);  // larger than every value of To
    const float limited = bit_cast<float>((number < kLimit ? number : kLimit) | (bits & 0x80000000u));
    int n = static_cast<int>(bit_cast<u32>(limited + 12582912.0f)) -
            0x4b400000;  // 1.5 * 2^23: the low bits of the sum hold the nearest integer
    n = n < static_cast<int>(lowest<To>) ? static_cast<int>(lowest<To>) : n;
    n = n > static_cast<int>(largest<To>) ? static_cast<int>(largest<To>) : n;
    return static_cast<To>(n);
  } else {
    // largest<To> + 1 is a power of two.
    constexpr u32 kLimit = bit_cast<u32>(2.0f * static_cast<float>(largest<To> / 2 + 1));
    const bool negative = bits >> 31 != 0;
    const bool inside = (number < kLimit) & (is_signed<To> | !negative);
    const float limited = bit_cast<float>(inside ? number | (bits & 0x80000000u) : 0u);
    const To whole = static_cast<To>(limited);
    const float rest = limited - static_cast<float>(whole);  // exact; 0 from 2^23 on
    const bool odd = (whole & 1) != 0;
    const To up = static_cast<To>((rest > 0.5f) | ((rest == 0.5f) & odd));
    const To down = static_cast<To>((rest < -0.5f) | ((rest == -0.5f) & odd));
    return inside ? static_cast<To>(whole + up - down) : negative ? lowest<To> : largest<To>;
  }
}

}  // namespace detail

/// Element conversions, the only ones that tile code uses: to<T>(x). Floats are rounded to the nearest even integer, values out of range
/// become the nearest integer in range, and NaN becomes 0. Conversions between integer types are exact; from integers to other types they
/// go through f32.
template <class To, class From>
TW_INLINE constexpr To to(From x) {
  if constexpr (is_same<To, From>) {
    return x;
  } else if constexpr (detail::is_integer<To> && detail::is_integer<From>) {
    return detail::saturated<To>(x);
  } else if constexpr (detail::is_integer<To>) {
    return detail::rounded<To>(static_cast<float>(x));
  } else {
    return static_cast<To>(static_cast<float>(x));
  }
}

/// x rounded to T, as a float.
template <class T>
TW_INLINE constexpr float rounded_to(float x) {
#if !TW_ON_GPU
  if constexpr (is_same<T, bf16>) {  // does not go through 16 bits: compilers would narrow and widen vectors for that
    const u32 b = bit_cast<u32>(x);
    const bool nan = (b & 0x7fffffffu) > 0x7f800000u;
    return bit_cast<float>((nan ? b | 0x400000u : b + 0x7fffu + ((b >> 16) & 1u)) & 0xffff0000u);
  }
#endif
  return static_cast<float>(to<T>(x));
}

}  // namespace tw
