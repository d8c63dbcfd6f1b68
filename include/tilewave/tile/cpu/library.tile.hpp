#pragma once

// The CPU target's library: operations on whole tiles that are compiled once for each instruction set. The process selects one set of the
// sources (tile/cpu/*.cpp) when it starts, so that a user's kernel needs no special flags and no AVX-512 instruction leaks into other code.

namespace tw::cpu {

/// An operand tile of a matrix product is stored in panels of 16 rows. Along the contracted index k a panel is a sequence of 64-byte lines.
/// A line holds 4 bytes of each of the 16 rows: one k of f32, two consecutive k of bf16 or four of i8, as the CPU's dot-product
/// instructions for these types need them. f16 and 8-bit floats are widened to f32. With kGroup = 4 / sizeof(element), element (row, k) is
/// at panel[(row / 16) * 16 * panel_depth + (k / kGroup) * 16 * kGroup + (row % 16) * kGroup + k % kGroup]. Both operands use the same
/// layout.
inline constexpr int kPanelRows = 16;

/// acc[r * acc_stride + c] (+)= sum over k < depth of a(r, k) * b(c, k), for r < rows, c < cols. `overwrite`: acc is set instead of added
/// to. `a` and `b` are panels of `panel_depth`, a multiple of kGroup. In both, rows from `rows` up to the next multiple of 16 must be
/// readable. For k from `depth` up to the next multiple of kGroup, both must hold finite values and one must hold zeros. acc must be
/// writable up to the next multiple of 16 columns and of 8 rows; its content there is undefined.
template <class Sum, class Element>
using Mma = void (*)(Sum* acc, long acc_stride, const Element* a, const Element* b, int rows, int cols, int depth, int panel_depth,
                     bool overwrite);

/// Packs source(r, k) = source[r * row_stride + k * depth_stride], r < rows, k < depth, into panels of `panel_depth`. Rows from `rows` up
/// to the next multiple of 16, and k from `depth` up to the next multiple of kGroup, become 0. The source needs only its element's
/// alignment; strides count elements and may have any value. 16-bit and 8-bit floats are passed as their bits.
template <class Element, class Source>
using Pack = void (*)(Element* panels, const Source* source, long row_stride, long depth_stride, int rows, int depth, int panel_depth);

/// Writes n elements and bypasses the caches: to[k] = from[k] rounded to nearest even, for k < n. Pointers need only their element's
/// alignment. Other threads see the writes after a fence, such as the end of a parallel_for.
template <class Element>
using Stream = void (*)(Element* to, const float* from, long n);

/// to[k] = from[k] rounded to nearest even, for k < n. NaN stays NaN. bf16 and f16 are passed as their bits.
using Narrow = void (*)(unsigned short* to, const float* from, long n);
/// to[k] = from[k], for k < n. bf16 and f16 are passed as their bits.
using Widen = void (*)(float* to, const unsigned short* from, long n);

/// sums[r] += sum over c < cols of rows[r * row_stride + c] * vector[c], for r < count. Pointers need only their element's alignment;
/// 16-bit floats are passed as their bits. A row's sum does not depend on the other rows.
template <class Source>
using Dots = void (*)(float* sums, const Source* rows, long row_stride, const Source* vector, int count, int cols);

/// sums[c] += sum over r < count of weights[r] * rows[r * row_stride + c], for c < cols. Pointers need only their element's alignment.
using AddRows = void (*)(float* sums, const float* rows, long row_stride, const float* weights, int count, int cols);

/// x[k] = 2^(x[k] * scale - base) for k < n, a multiple of 16; returns their sum. Exponents are below 128, or NaN; below -126 the result is
/// 0.
using Exponentials = float (*)(float* x, float scale, float base, int n);
/// The largest of n numbers, a multiple of 16. NaNs are ignored; without a number the result is -infinity.
using LargestOf = float (*)(const float* x, int n);

/// The functions of one instruction set. All pointers are 64-byte aligned unless stated otherwise; sizes may be zero.
struct Library {
  const char* isa;  ///< "baseline", "avx2" or "avx512"; the last is followed by "+vnni", "+bf16" and "+amx", those that are used

  Mma<float, float> mma_f32;            ///< f32 throughout, k ascending
  Mma<float, unsigned short> mma_bf16;  ///< f32 sums; subnormal elements may be treated as 0
  Mma<int, signed char> mma_i8;         ///< exact modulo 2^32

  Pack<float, float> pack_f32;
  Pack<float, unsigned short> pack_f16;
  Pack<float, unsigned char> pack_e4m3;
  Pack<float, unsigned char> pack_e5m2;
  Pack<unsigned short, unsigned short> pack_bf16;
  Pack<signed char, signed char> pack_i8;

  Stream<float> stream_f32;
  Stream<unsigned short> stream_bf16;
  Narrow narrow_bf16;
  Narrow narrow_f16;
  Widen widen_bf16;
  Widen widen_f16;

  Dots<float> dots_f32;
  Dots<unsigned short> dots_bf16;
  Dots<unsigned short> dots_f16;
  AddRows add_rows_f32;

  // Null where a set has nothing better than the loops and the products above.
  Exponentials exponentials;
  LargestOf largest;
  Mma<float, unsigned short> mma_bf16_by_rows;  ///< mma_bf16 with a(r, k) at a[r * panel_depth + k], and with no rows after `rows`
};

/// Stores to a tensor of at least this many bytes bypass the caches. With ordinary stores the tensor would evict other data, would itself
/// be evicted before it is read, and each line would be read before it is written. The value is about the size of a last-level cache shared
/// by the cores of one complex; the size that virtual machines report can be wrong by a factor of ten.
inline constexpr long long kStreamBytes = 16 << 20;

/// The best set for this processor. TILEWAVE_ISA=baseline|avx2|avx512|avx512+vnni+bf16 in the environment at the first call selects a
/// lower one (avx512: without VNNI, BF16 and AMX; the last one: without AMX).
const Library& library();

/// The vector width of the set that library() chose: 64 with AVX-512, 32 with AVX2, otherwise 16.
int vector_bytes();

}  // namespace tw::cpu
