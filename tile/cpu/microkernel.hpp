#pragma once

// The matrix product of one tile, written once for every instruction set. It is included by files that are compiled with different flags,
// so all of it is internal to each (the linker would otherwise keep one copy, of any of the sets) and nothing else may be included here.
//
// A set is given as a class V:
//   Register           a vector of kWidth floats; kWidth divides kPanelRows
//   kRows, kVectors    the accumulators of the main microkernel, all of which stay in registers: rows of a times vectors of columns of b
//   kDepth             how deep a panel of b and a panel of a are when both stay in the first-level cache
//   zero, load, store, broadcast, add, multiply_add

#include "tilewave/tile/cpu/library.tile.hpp"

#define TILEWAVE_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define TILEWAVE_UNROLL(times) TILEWAVE_PRAGMA(unroll times)
#else
#define TILEWAVE_UNROLL(times) TILEWAVE_PRAGMA(GCC unroll times)
#endif

namespace tw::cpu {
namespace {

constexpr int least(int x, int y) { return x < y ? x : y; }

/// A tile of accumulators, Rows by Vectors * kWidth: `a` steps through one panel, b[j] through the panel of the j-th vector of columns.
template <class V, int Rows, int Vectors>
[[gnu::noinline]] void microkernel(float* acc, long acc_stride, const float* a, const float* const* b, int depth, bool overwrite) {
  typename V::Register sum[Rows][Vectors];
  const float* column[Vectors];
  TILEWAVE_UNROLL(16)
  for (int j = 0; j < Vectors; ++j) column[j] = b[j];
  TILEWAVE_UNROLL(16)
  for (int i = 0; i < Rows; ++i) {
    // Wanted only after the last k, and usually out of the first-level cache since the previous step of k.
    __builtin_prefetch(acc + i * acc_stride, 1);
    __builtin_prefetch(acc + i * acc_stride + Vectors * V::kWidth - 1, 1);
    TILEWAVE_UNROLL(16)
    for (int j = 0; j < Vectors; ++j) sum[i][j] = V::zero();
  }
  TILEWAVE_UNROLL(4)
  for (int k = 0; k < depth; ++k) {
    const long at = static_cast<long>(k) * kPanelRows;
    typename V::Register columns[Vectors];
    TILEWAVE_UNROLL(16)
    for (int j = 0; j < Vectors; ++j) columns[j] = V::load(column[j] + at);
    TILEWAVE_UNROLL(16)
    for (int i = 0; i < Rows; ++i) {
      const typename V::Register row = V::broadcast(a + at + i);
      TILEWAVE_UNROLL(16)
      for (int j = 0; j < Vectors; ++j) sum[i][j] = V::multiply_add(row, columns[j], sum[i][j]);
    }
  }
  TILEWAVE_UNROLL(16)
  for (int i = 0; i < Rows; ++i) {
    TILEWAVE_UNROLL(16)
    for (int j = 0; j < Vectors; ++j) {
      float* out = acc + i * acc_stride + j * V::kWidth;
      V::store(out, overwrite ? sum[i][j] : V::add(V::load(out), sum[i][j]));
    }
  }
}

/// How many rows of a panel come next when `left` are: a step never straddles two panels, so a whole one is 6 + 6 + 4 or 8 + 8. Rows are
/// rounded up to an even number, which the caller's accumulator has room for, and 8 is 4 + 4 rather than 6 + 2, whose few sums could not
/// hide the latency of a multiply-add.
constexpr int next_rows(int left, int most) {
  const int even = left == 1 ? 1 : (left + 1) / 2 * 2;
  if (even <= most) return even;
  return even == most + 2 ? 4 : most;
}

/// All rows against one group of Vectors vectors of columns.
template <class V, int MostRows, int Vectors>
void column_group(float* acc, long acc_stride, const float* a, const float* const* b, int rows, int depth, int panel_depth,
                  bool overwrite) {
  for (int panel = 0; panel < rows; panel += kPanelRows) {
    const float* panel_a = a + static_cast<long>(panel) * panel_depth;
    const int in_panel = least(rows - panel, kPanelRows);
    for (int row = 0; row < in_panel;) {
      const int taken = next_rows(in_panel - row, MostRows);
      float* out = acc + (panel + row) * acc_stride;
      const float* from = panel_a + row;
      if constexpr (MostRows >= 8) {
        if (taken == 8) microkernel<V, 8, Vectors>(out, acc_stride, from, b, depth, overwrite);
      }
      if constexpr (MostRows >= 6) {
        if (taken == 6) microkernel<V, 6, Vectors>(out, acc_stride, from, b, depth, overwrite);
      }
      if constexpr (MostRows >= 4) {
        if (taken == 4) microkernel<V, 4, Vectors>(out, acc_stride, from, b, depth, overwrite);
      }
      if (taken == 2) microkernel<V, 2, Vectors>(out, acc_stride, from, b, depth, overwrite);
      if (taken == 1) microkernel<V, 1, Vectors>(out, acc_stride, from, b, depth, overwrite);
      row += taken;
    }
  }
}

/// column_group for the largest group of at most Vectors that `vectors` allows.
template <class V, int MostRows, int Vectors>
void column_group_of(int vectors, float* acc, long acc_stride, const float* a, const float* const* b, int rows, int depth, int panel_depth,
                     bool overwrite) {
  if constexpr (Vectors > 1) {
    if (vectors < Vectors) {
      column_group_of<V, MostRows, Vectors - 1>(vectors, acc, acc_stride, a, b, rows, depth, panel_depth, overwrite);
      return;
    }
  }
  column_group<V, MostRows, Vectors>(acc, acc_stride, a, b, rows, depth, panel_depth, overwrite);
}

/// Each column group of b stays in the first-level cache while all of a passes by it; a is small enough to come from the second level.
template <class V, int MostRows, int Vectors>
void product(float* acc, long acc_stride, const float* a, const float* b, int rows, int cols, int depth, int panel_depth, bool overwrite) {
  const int chunks = depth <= V::kDepth ? 1 : (depth + V::kDepth - 1) / V::kDepth;
  const int chunk = (depth + chunks - 1) / chunks;
  for (int col = 0; col < cols; col += Vectors * V::kWidth) {
    const int vectors = least((cols - col + V::kWidth - 1) / V::kWidth, Vectors);
    int k = 0;
    do {  // once for a depth of 0, which may have to set acc to 0
      const float* group[Vectors];
      for (int j = 0; j < vectors; ++j) {
        const int c = col + j * V::kWidth;
        group[j] = b + static_cast<long>(c / kPanelRows) * kPanelRows * panel_depth + static_cast<long>(k) * kPanelRows + c % kPanelRows;
      }
      column_group_of<V, MostRows, Vectors>(vectors, acc + col, acc_stride, a + static_cast<long>(k) * kPanelRows, group, rows,
                                            least(depth - k, chunk), panel_depth, overwrite && k == 0);
      k += chunk;
    } while (k < depth);
  }
}

template <class V>
void mma(float* acc, long acc_stride, const float* a, const float* b, int rows, int cols, int depth, int panel_depth, bool overwrite) {
  // One or two rows need more columns at once for as many independent sums.
  if (rows <= 2) {
    product<V, 2, 6>(acc, acc_stride, a, b, rows, cols, depth, panel_depth, overwrite);
  } else {
    product<V, V::kRows, V::kVectors>(acc, acc_stride, a, b, rows, cols, depth, panel_depth, overwrite);
  }
}

}  // namespace
}  // namespace tw::cpu
