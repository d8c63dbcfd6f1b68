#pragma once

#include "tilewave/tile/cuda/ptx.tile.hpp"
#include "tilewave/tile/packed.tile.hpp"

// Two neighbouring codes as a register of two 16-bit floats, without conversion instructions: the codes are put into the bits of floats,
// and multiply-adds of pairs correct the exponents, subtract zero points and apply scales. Functions run on the host as well, for tests.

namespace tw::cuda {

/// a * b + c for both halves of a register, rounded once.
template <class T>
TW_INLINE u32 multiply_add_pairs(u32 a, u32 b, u32 c) {
  u32 d = 0;
#if TW_ON_GPU
  if constexpr (is_same<T, bf16>)
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  else
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
#else
  const auto half = [](u32 pair, int n) { return static_cast<float>(bit_cast<T>(static_cast<u16>(pair >> 16 * n))); };
  for (int n = 0; n < 2; ++n) d |= u32{bit_cast<u16>(T(half(a, n) * half(b, n) + half(c, n)))} << 16 * n;
#endif
  return d;
}

/// (x & mask) | bits. The compiler would split it, because an instruction has room for one constant.
TW_INLINE u32 masked_or(u32 x, u32 mask, u32 bits) {
#if TW_ON_GPU
  u32 d;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(x), "r"(mask), "r"(bits));
  return d;
#else
  return (x & mask) | bits;
#endif
}

/// (x & mask) ^ bits, likewise.
TW_INLINE u32 masked_xor(u32 x, u32 mask, u32 bits) {
#if TW_ON_GPU
  u32 d;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(d) : "r"(x), "r"(mask), "r"(bits));
  return d;
#else
  return (x & mask) ^ bits;
#endif
}

/// Both halves of a register.
template <class T>
TW_INLINE u32 twice(T x) {
  return u32{bit_cast<u16>(x)} * 0x10001u;
}
inline constexpr u32 kMinusZeros = 0x80008000u;  ///< as an addend it keeps the sign of a product that is 0

/// A scale for decoded pairs. Its value is an f16 number. A bf16 holds 8 of its 11 bits, so the other 3 are in `low`.
template <class T>
struct PairScale {
  u32 high, low;
  TW_INLINE static PairScale of(float scale) {
    const T high(scale);
    return {twice(high), twice(T(scale - static_cast<float>(high)))};
  }
  /// pair * scale, rounded once: products with `low` are exact for numbers of up to 5 bits.
  TW_INLINE u32 times(u32 pair) const {
    if constexpr (is_same<T, bf16>)
      return multiply_add_pairs<T>(pair, high, multiply_add_pairs<T>(pair, low, kMinusZeros));
    else
      return multiply_add_pairs<T>(pair, high, kMinusZeros);
  }
};

/// How a pair of neighbouring codes becomes two elements of T in a register. `prepare` turns what `scales` returns into registers, once for
/// each row and group. Not `known` where codes are decoded one by one.
template <class Codes, class T, class Decode>
struct DecodePair {
  static constexpr bool known = false;
};

/// Codes are unsigned integers, one after the other in the low bits.
template <int kBits, class T>
requires(sizeof(T) == 2 && !is_same<T, short>) struct DecodePair<SmallIntegers<kBits, false>, T, FromZero> {
  static constexpr bool known = true;
  static constexpr u32 above = is_same<T, bf16> ? 0x43004300u : 0x64006400u;  ///< 128 or 1024, whose last bits are a code's: 128 + code
  static constexpr u32 one = is_same<T, bf16> ? 0x3f803f80u : 0x3c003c00u;
  struct Scale {
    u32 minus_zero;
    PairScale<T> scale;
  };
  TW_INLINE static Scale prepare(const ScaleAndZero<float>& s) {
    return {twice(T(-(static_cast<float>(is_same<T, bf16> ? 128 : 1024) + s.zero))), PairScale<T>::of(s.scale)};
  }
  TW_INLINE static u32 decode(u32 codes, const Scale& s) {
    constexpr u32 apart = 1u | 1u << (16 - kBits), mask = (1u << kBits) - 1u;
    return s.scale.times(multiply_add_pairs<T>(masked_or(codes * apart, mask * 0x10001u, above), one, s.minus_zero));
  }
};

/// Two codes of 8 bits, which both types hold exactly.
template <class T>
requires(sizeof(T) == 2 && !is_same<T, short>) struct DecodePair<i8, T, AsStored> {
  static constexpr bool known = true;
  struct Scale {};
  TW_INLINE static Scale prepare(float) { return {}; }
  TW_INLINE static u32 decode(u32 codes, Scale) {
    if constexpr (is_same<T, bf16>) {  // has room for 7 bits: 128 + those, minus 128, or 256 if the code is negative
      const u32 pair = ptx::permute_bytes(codes, 0, 0x4140u);
      return multiply_add_pairs<T>(masked_or(pair, 0x007f007fu, 0x43004300u), 0x3f803f80u, masked_or(pair, 0x00800080u, 0xc300c300u));
    } else {  // 1024 + 128 + code
      return multiply_add_pairs<T>(ptx::permute_bytes(codes ^ 0x8080u, 0x64u, 0x4140u), 0x3c003c00u, 0xe480e480u);
    }
  }
};
/// Sign, exponent and mantissa go where T has them, and a power of two corrects the exponent: right for subnormal numbers, too.
template <class T>
requires(sizeof(T) == 2 && !is_same<T, short>) struct DecodePair<fp8_e4m3, T, AsStored> {
  static constexpr bool known = true;
  struct Scale {};
  TW_INLINE static Scale prepare(float) { return {}; }
  TW_INLINE static u32 decode(u32 codes, Scale) {
    constexpr bool wide = is_same<T, bf16>;
    const u32 pair = ptx::permute_bytes(codes, 0, 0x1404u);
    const u32 magnitude = pair >> (wide ? 4 : 1) & (wide ? 0x07f007f0u : 0x3f803f80u);
    return multiply_add_pairs<T>(masked_or(pair, 0x80008000u, magnitude), wide ? 0x7b807b80u : 0x5c005c00u, kMinusZeros);  // 2^120 or 2^8
  }
};
template <class T>
requires(sizeof(T) == 2 && !is_same<T, short>) struct DecodePair<fp4x2, T, TimesF16> {
  static constexpr bool known = true;
  using Scale = PairScale<T>;
  TW_INLINE static Scale prepare(float scale) { return Scale::of(scale); }
  TW_INLINE static u32 decode(u32 codes, const Scale& s) {
    constexpr bool wide = is_same<T, bf16>;
    const u32 apart = codes * 0x1001u;  // four bits in the low bits of each half
    const u32 magnitude = apart << (wide ? 6 : 9) & (wide ? 0x01c001c0u : 0x0e000e00u);
    const u32 pair = masked_or(apart << 12, 0x80008000u, magnitude);
    return s.times(multiply_add_pairs<T>(pair, wide ? 0x7e807e80u : 0x74007400u, kMinusZeros));  // 2^126 or 2^14
  }
};
/// Four codes of 2 bits, from a byte: each goes to the top of a byte, and inverting its upper bit subtracts 2.
template <>
struct DecodePair<u2x4, i8, CentredTimes64> {
  static constexpr bool known = true;
  struct Scale {};
  TW_INLINE static Scale prepare(float) { return {}; }
  TW_INLINE static u32 decode(u32 codes, Scale) {
    // Of codes 0 and 2, and of 1 and 3, neither product carries, and what they bring besides the four codes is masked.
    const u32 even = codes * (1u << 6 | 1u << 18), odd = codes * (1u << 12 | 1u << 24);
    return masked_xor(even | odd, 0xc0c0c0c0u, 0x80808080u);
  }
};
/// Four codes of 4 bits, from two bytes, in the upper half of a byte each. Inverting a code's upper bit subtracts 8.
template <>
struct DecodePair<u4x2, i8, CentredTimes16> {
  static constexpr bool known = true;
  struct Scale {};
  TW_INLINE static Scale prepare(float) { return {}; }
  TW_INLINE static u32 decode(u32 codes, Scale) {
    const u32 twice = ptx::permute_bytes(codes, 0, 0x1100u);
    return masked_xor(twice << 4, 0x00f000f0u, masked_xor(twice, 0xf000f000u, 0x80808080u));
  }
};
/// The same in the lower halves. 128 + code - zero does not borrow from the next byte.
template <>
struct DecodePair<u4x2, i8, LessZero> {
  static constexpr bool known = true;
  using Scale = u32;  ///< the zero point, four times
  TW_INLINE static Scale prepare(float zero) { return static_cast<u32>(zero) * 0x01010101u; }
  TW_INLINE static u32 decode(u32 codes, Scale zeros) {
    const u32 twice = ptx::permute_bytes(codes, 0, 0x1100u);
    const u32 above = masked_or(twice >> 4, 0x0f000f00u, masked_or(twice, 0x000f000fu, 0x80808080u));
    return (above - zeros) ^ 0x80808080u;
  }
};
/// Lane n of a warp holds number n. All lanes of the warp decode together.
template <class T>
requires(sizeof(T) == 2 && !is_same<T, short>) struct DecodePair<u4x2, T, TimesNormalFloat> {
  static constexpr bool known = true;
  using Scale = float;
  TW_INLINE static Scale prepare(float scale) { return scale; }
  TW_INLINE static u32 decode(u32 codes, Scale scale) {
    const int low = static_cast<int>(codes & 15u), high = static_cast<int>(codes >> 4 & 15u);
#if TW_ON_GPU
    const float own = normal_float(static_cast<int>(ptx::thread_index() % 16));
    return ptx::pack<T>(ptx::shuffle(own, low) * scale, ptx::shuffle(own, high) * scale);
#else
    return u32{bit_cast<u16>(T(normal_float(low) * scale))} | u32{bit_cast<u16>(T(normal_float(high) * scale))} << 16;
#endif
  }
};

}  // namespace tw::cuda
