#pragma once

#include "tilewave/tile/cpu/library.tile.hpp"

// The library's products with weights in fewer bits, for kernels/dequant_gemm. Apart from cpu::Library, which every kernel of the cpu
// target includes.

namespace tw::cpu {

/// One row of a weight in fewer bits, as tilewave/quantized.hpp defines its formats.
struct QuantizedRow {
  const unsigned char* values;       ///< int8, fp8: one byte for each element; otherwise one for two or, of int2, four
  const unsigned short* scales;      ///< int4, int2, fp4: f16, one for each group
  const float* f32_scales;           ///< nf4
  const unsigned char* e8m0_scales;  ///< mxfp4
  const unsigned char* zeros;        ///< int4, int2: one for each group, or null: 8 or 2
  int group;                         ///< of all but int8 and fp8: 32, 64 or 128
  float scale;                       ///< int8, fp8: of the row
  const float* numbers;              ///< int2, nf4, fp4, mxfp4: the number of each code
  int code_bits;                     ///< the same: 2 or 4
};

/// to[k - first] = element k of the row, for `first` <= k < first + n. Of formats with groups `first` and n are multiples of the group.
using Dequantize = void (*)(float* to, const QuantizedRow& row, int first, int n);

/// sums[r] = sum over k < depth of element k of the weight's row and x[r * x_stride + k], for r < count. A sum does not depend on the
/// others.
using QuantizedDots = void (*)(float* sums, const QuantizedRow& row, const float* x, long x_stride, int count, int depth);

/// Rows of activations rounded to 8-bit integers, for products with weights in int8 or int4. Each row is cut into blocks of 64 bytes of the
/// weight: 64 (int8) or 128 (int4) elements. An int4 block holds first the elements with even indices, then those with odd ones. What is
/// missing in the last block is 0. x'(k) = scale of its block * codes.
struct RoundedRows {
  signed char* codes;  ///< [rows, blocks * elements of a block]
  float* scales;       ///< int8: [rows, blocks]; int4: [rows, blocks * 4], the block's for each 32 elements
  float* sums;         ///< of x': int8: [rows]; int4: [rows, blocks * 4], of each 32 elements
  int blocks;          ///< of a row
};
inline constexpr int kInt8Block = 64, kInt4Block = 128;

/// Rounds one row, the `at`-th: scale = a / 127 with the largest magnitude a of its block, code = x / scale to the nearest.
using RoundRow = void (*)(const RoundedRows& to, int at, const float* x, int depth);

/// QuantizedDots with rows of RoundedRows, whose products are exact integers.
using RoundedDots = void (*)(float* sums, const QuantizedRow& row, const RoundedRows& x, int count, int depth);

/// Rounds a row of activations with one scale, a / 127 with its largest magnitude a, for a product with the library's mma_i8: codes[k] =
/// x[k] / scale to the nearest, for k < depth. Returns the scale: NaN if an element is not finite, whatever the codes are then.
using RoundToI8 = float (*)(signed char* codes, const float* x, int depth);

/// The functions of one instruction set. Pointers need only their element's alignment.
struct QuantizedLibrary {
  Dequantize dequantize_i8;
  Dequantize dequantize_e4m3;
  Dequantize dequantize_u4;
  Dequantize dequantize_numbers;  ///< of rows with `numbers`
  QuantizedDots dots_i8;
  QuantizedDots dots_e4m3;
  QuantizedDots dots_u4;
  QuantizedDots dots_numbers;

  // Null where the set has no products of 8-bit integers that are faster than those above.
  RoundRow round_for_i8;
  RoundRow round_for_u4;
  RoundToI8 round_to_i8;
  RoundedDots rounded_dots_i8;
  RoundedDots rounded_dots_u4;
};

/// For the set that library() chose.
const QuantizedLibrary& quantized_library();

}  // namespace tw::cpu
