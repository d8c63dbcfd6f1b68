#pragma once

// Tile-granular work of the cpu target that is worth its own machine code per instruction set. The sources (tile/cpu/*.cpp) are compiled
// once per set and chosen when the process starts, so a user's kernel needs no special flags and no AVX-512 instruction leaks into other
// code.

namespace tw::cpu {

/// An operand tile of a matrix product lies in panels of 16 rows, the contracted index k slower than the row: element (row, k) is at
/// panel[(row / 16) * 16 * panel_depth + k * 16 + row % 16]. Both operands use the same layout, always widened to f32.
inline constexpr int kPanelRows = 16;

/// What each instruction set provides. All pointers are 64-byte aligned unless said otherwise; sizes may be zero.
struct Library {
  const char* isa;  ///< "baseline", "avx2" or "avx512"

  /// acc[r * acc_stride + c] (+)= sum over k < depth of a(r, k) * b(c, k), for r < rows, c < cols, f32 throughout, k ascending.
  /// `overwrite`: acc is set, not added to. `a` and `b` are panels of `panel_depth`; rows beyond `rows` up to the next multiple of 16 are
  /// readable in both and hold finite values; acc is writable (and its content irrelevant) up to the next multiple of 16 columns and
  /// the next multiple of 8 rows.
  void (*mma)(float* acc, long acc_stride, const float* a, const float* b, int rows, int cols, int depth, int panel_depth, bool overwrite);

  /// Packs source(r, k) = source[r * row_stride + k * depth_stride], r < rows, k < depth, into panels of `panel_depth`. Rows from `rows` up
  /// to the next multiple of 16 become 0. The source needs only its element's alignment; strides count elements and may be anything.
  void (*pack_f32)(float* panels, const float* source, long row_stride, long depth_stride, int rows, int depth, int panel_depth);
  /// The same, widening; the elements are given by their 16 bits.
  void (*pack_f16)(float* panels, const unsigned short* source, long row_stride, long depth_stride, int rows, int depth, int panel_depth);
  void (*pack_bf16)(float* panels, const unsigned short* source, long row_stride, long depth_stride, int rows, int depth, int panel_depth);
};

/// The best that this processor has; TILEWAVE_ISA=baseline|avx2|avx512 in the environment at the first call lowers it.
const Library& library();

}  // namespace tw::cpu
