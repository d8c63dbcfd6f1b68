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

/// 32 elements as f32.
template <class V>
constexpr int kRegistersOf32 = 32 / V::kWidth;

/// 32 codes of 4 bits, less zero, times scale. A set may have V::widen_codes(), which gives 32 codes in order as f32.
template <class V>
void dequantize_codes(float* to, const unsigned char* values, float scale, float zero) {
  if constexpr (requires(typename V::Register(&codes)[kRegistersOf32<V>]) { V::widen_codes(values, codes); }) {
    typename V::Register codes[kRegistersOf32<V>];
    V::widen_codes(values, codes);
    for (int j = 0; j < kRegistersOf32<V>; ++j) V::store(to + j * V::kWidth, (codes[j] - zero) * scale);
  } else {
    for (int j = 0; j < 16; ++j) {
      to[2 * j] = (static_cast<float>(values[j] & 15) - zero) * scale;
      to[2 * j + 1] = (static_cast<float>(values[j] >> 4) - zero) * scale;
    }
  }
}

template <class V>
void dequantize_u4(float* to, const QuantizedRow& row, int first, int n) {
  for (int k = 0; k < n; k += row.group) {
    const int g = (first + k) / row.group;
    const float scale = finite_f16(row.scales[g]);
    const float zero = row.zeros == nullptr ? 8.0f : static_cast<float>(row.zeros[g]);
    const unsigned char* values = row.values + (first + k) / 2;
    for (int part = 0; part < row.group; part += 32) dequantize_codes<V>(to + k + part, values + part / 2, scale, zero);
  }
}

inline float scale_of_group(const QuantizedRow& row, int g) {
  if (row.scales != nullptr) return finite_f16(row.scales[g]);
  if (row.f32_scales != nullptr) return row.f32_scales[g];
  const unsigned exponent = row.e8m0_scales[g];  // 2^(exponent - 127), of which the smallest is subnormal, or NaN
  return __builtin_bit_cast(float, exponent == 255 ? 0x7fc00000u : exponent == 0 ? 0x400000u : exponent << 23);
}

/// The numbers of 32 codes that begin with values[0], less zero, times scale. A set may have V::lookup(), which gives the numbers in order.
template <class V, int kBits>
void dequantize_by_table(float* to, const unsigned char* values, const float* numbers, float scale, float zero) {
  if constexpr (requires(typename V::Register(&out)[kRegistersOf32<V>]) { V::template lookup<kBits>(values, numbers, out); }) {
    typename V::Register out[kRegistersOf32<V>];
    V::template lookup<kBits>(values, numbers, out);
    for (int j = 0; j < kRegistersOf32<V>; ++j) V::store(to + j * V::kWidth, (out[j] - zero) * scale);
  } else {
    constexpr int count = 8 / kBits;
    for (int j = 0; j < 32; ++j) to[j] = (numbers[values[j / count] >> kBits * (j % count) & ((1 << kBits) - 1)] - zero) * scale;
  }
}

template <class V, int kBits>
void dequantize_numbers_of(float* to, const QuantizedRow& row, int first, int n) {
  for (int k = 0; k < n; k += row.group) {
    const int g = (first + k) / row.group;
    const float scale = scale_of_group(row, g);
    const float zero = kBits == 4 ? 0.0f : row.zeros == nullptr ? 2.0f : static_cast<float>(row.zeros[g]);
    const unsigned char* values = row.values + (first + k) * kBits / 8;
    for (int part = 0; part < row.group; part += 32)
      dequantize_by_table<V, kBits>(to + k + part, values + part * kBits / 8, row.numbers, scale, zero);
  }
}
template <class V>
void dequantize_numbers(float* to, const QuantizedRow& row, int first, int n) {
  row.code_bits == 2 ? dequantize_numbers_of<V, 2>(to, row, first, n) : dequantize_numbers_of<V, 4>(to, row, first, n);
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

/// 2 V::kWidth elements without NaN, as f32 divided by kFactor.
template <class V>
struct FiniteE4M3 {
  static constexpr float kFactor = [] {
    if constexpr (requires { V::kFiniteE4M3Factor; }) return V::kFiniteE4M3Factor;
    return 1.0f;
  }();
  static void widen(const unsigned char* bits, typename V::Register (&out)[2]) {
    if constexpr (requires { V::widen_finite_e4m3(bits, out); }) {
      V::widen_finite_e4m3(bits, out);
    } else {
      out[0] = V::widen(E4M3{}, bits);
      out[1] = V::widen(E4M3{}, bits + V::kWidth);
    }
  }
};

/// `Rows` rows of x against one row of the weight, which is widened in registers. Two sums for each hide the latency of a multiply-add.
template <class V, int Rows>
void dots_e4m3_of(float* sums, const QuantizedRow& row, const float* x, long x_stride, int depth) {
  constexpr int kTogether = 2 * V::kWidth;
  typename V::Register sum[Rows][2], w[2];
  for (auto& s : sum) s[0] = s[1] = V::zero();
  int k = 0;
  for (; k + kTogether <= depth; k += kTogether) {
    FiniteE4M3<V>::widen(row.values + k, w);
    TILEWAVE_UNROLL(4)
    for (int r = 0; r < Rows; ++r) {
      sum[r][0] = V::multiply_add(w[0], V::load(x + r * x_stride + k), sum[r][0]);
      sum[r][1] = V::multiply_add(w[1], V::load(x + r * x_stride + k + V::kWidth), sum[r][1]);
    }
  }
  if (k < depth) {
    unsigned char values[kTogether] = {};
    __builtin_memcpy(values, row.values + k, static_cast<unsigned long>(depth - k));
    FiniteE4M3<V>::widen(values, w);
    for (int r = 0; r < Rows; ++r) {
      float last[kTogether] = {};
      __builtin_memcpy(last, x + r * x_stride + k, static_cast<unsigned long>(depth - k) * sizeof(float));
      sum[r][0] = V::multiply_add(w[0], V::load(last), sum[r][0]);
      sum[r][1] = V::multiply_add(w[1], V::load(last + V::kWidth), sum[r][1]);
    }
  }
  for (int r = 0; r < Rows; ++r) sums[r] = total<V>(sum[r][0] + sum[r][1]) * row.scale * FiniteE4M3<V>::kFactor;
}

template <class V>
void dots_e4m3(float* sums, const QuantizedRow& row, const float* x, long x_stride, int count, int depth) {
  int r = 0;
  for (; r + 4 <= count; r += 4) dots_e4m3_of<V, 4>(sums + r, row, x + r * x_stride, x_stride, depth);
  if (count - r >= 2) dots_e4m3_of<V, 2>(sums + r, row, x + r * x_stride, x_stride, depth), r += 2;
  if (count - r >= 1) dots_e4m3_of<V, 1>(sums + r, row, x + r * x_stride, x_stride, depth);
}

}  // namespace
}  // namespace tw::cpu
