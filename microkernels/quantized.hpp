#pragma once

// Weights in fewer bits, widened to f32, as quantized_library.hpp says, written once for every instruction set; internal to each file that
// includes it. A set is given as pack.hpp's class V. The loops are plain, because compilers vectorise them.

#include "microkernels/dots.hpp"
#include "microkernels/quantized_library.hpp"

namespace tw::cpu {
namespace {

inline void dequantize_i8(float* to, const QuantizedRow& row, int first, int n) {
  const auto* values = reinterpret_cast<const signed char*>(row.values) + first;
  const float scale = row.scale;
  for (int k = 0; k < n; ++k) to[k] = static_cast<float>(values[k]) * scale;
}

template <class V>
void dequantize_e4m3(float* to, const QuantizedRow& row, int first, int n) {
  const float scale = row.scale;
  in_vectors<V::kWidth>(to, row.values + first, n, [](float* t, const unsigned char* f) { V::store(t, V::widen(E4M3{}, f)); });
  for (int k = 0; k < n; ++k) to[k] *= scale;
}

/// The value of an f16 that is finite: its exponent and mantissa, moved to their places in f32, are 2^112 times too small.
inline float finite_f16(unsigned short bits) {
  const unsigned magnitude = (bits & 0x7fffu) << 13, sign = (bits & 0x8000u) << 16;
  return __builtin_bit_cast(float, __builtin_bit_cast(unsigned, __builtin_bit_cast(float, magnitude) * 0x1p112f) | sign);
}

inline void dequantize_u4(float* to, const QuantizedRow& row, int first, int n) {
  for (int k = 0; k < n; k += row.group) {
    const int g = (first + k) / row.group;
    const float scale = finite_f16(row.scales[g]);
    const int zero = row.zeros == nullptr ? 8 : row.zeros[g];
    const unsigned char* values = row.values + (first + k) / 2;
    // 32 at a time, so that the compiler knows how many there are.
    for (int part = 0; part < row.group; part += 32) {
      for (int j = 0; j < 16; ++j) {
        const int code = values[part / 2 + j];
        to[k + part + 2 * j] = static_cast<float>((code & 15) - zero) * scale;
        to[k + part + 2 * j + 1] = static_cast<float>((code >> 4) - zero) * scale;
      }
    }
  }
}

/// A piece of the row is widened in the first-level cache and multiplied with all rows of x.
template <class V, Dequantize dequantize>
void quantized_dots(float* sums, const QuantizedRow& row, const float* x, long x_stride, int count, int depth) {
  constexpr int kPiece = 1024;
  alignas(64) float wide[kPiece];
  for (int r = 0; r < count; ++r) sums[r] = 0;
  for (int k = 0; k < depth; k += kPiece) {
    const int n = least(depth - k, kPiece);
    dequantize(wide, row, k, n);
    dots<V, F32>(sums, x + k, x_stride, wide, count, n);
  }
}

}  // namespace
}  // namespace tw::cpu
