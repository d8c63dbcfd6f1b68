#pragma once

#include "tilewave/tile/cpu/target.tile.hpp"

#if !TW_ON_GPU

namespace tw::cpu {

/// 16-byte vectors. low() and high() interleave the lanes of two vectors, a0 b0 a1 b1 ..., and return the first or second half.
template <int kBytes>
struct Interleave;
template <>
struct Interleave<1> {
  typedef u8 Lanes __attribute__((vector_size(16)));
  static constexpr int lanes = 16;
  static TW_INLINE Lanes low(Lanes a, Lanes b) {
    return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  }
  static TW_INLINE Lanes high(Lanes a, Lanes b) {
    return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  }
};
template <>
struct Interleave<2> {
  typedef u16 Lanes __attribute__((vector_size(16)));
  static constexpr int lanes = 8;
  static TW_INLINE Lanes low(Lanes a, Lanes b) { return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11); }
  static TW_INLINE Lanes high(Lanes a, Lanes b) { return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15); }
};
template <>
struct Interleave<4> {
  typedef u32 Lanes __attribute__((vector_size(16)));
  static constexpr int lanes = 4;
  static TW_INLINE Lanes low(Lanes a, Lanes b) { return __builtin_shufflevector(a, b, 0, 4, 1, 5); }
  static TW_INLINE Lanes high(Lanes a, Lanes b) { return __builtin_shufflevector(a, b, 2, 6, 3, 7); }
};
template <>
struct Interleave<8> {
  typedef u64 Lanes __attribute__((vector_size(16)));
  static constexpr int lanes = 2;
  static TW_INLINE Lanes low(Lanes a, Lanes b) { return __builtin_shufflevector(a, b, 0, 2); }
  static TW_INLINE Lanes high(Lanes a, Lanes b) { return __builtin_shufflevector(a, b, 1, 3); }
};

/// Transposes a square with as many rows as a vector has lanes: interleaving rows i and i + n/2, log2(n) times, is a transposition.
template <class Vectors>
TW_INLINE void transpose_square(const void* from, long from_stride, void* to, long to_stride) {
  using Lanes = typename Vectors::Lanes;
  constexpr int n = Vectors::lanes;
  constexpr long bytes = 16 / n;
  Lanes rows[n], turned[n];
  for (int i = 0; i < n; ++i) __builtin_memcpy(&rows[i], static_cast<const u8*>(from) + i * from_stride * bytes, 16);
  for (int step = 1; step < n; step *= 2) {
    for (int i = 0; i < n / 2; ++i) {
      turned[2 * i] = Vectors::low(rows[i], rows[i + n / 2]);
      turned[2 * i + 1] = Vectors::high(rows[i], rows[i + n / 2]);
    }
    for (int i = 0; i < n; ++i) rows[i] = turned[i];
  }
  for (int i = 0; i < n; ++i) __builtin_memcpy(static_cast<u8*>(to) + i * to_stride * bytes, &rows[i], 16);
}

}  // namespace tw::cpu

#endif  // !TW_ON_GPU
