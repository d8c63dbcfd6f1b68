#pragma once

// The matrix product of one tile, written once for every instruction set and element type. It is included by files that are compiled with
// different flags, so all of it is internal to each (the linker would otherwise keep one copy, of any of the sets) and nothing else may be
// included here.
//
// The products of one element type by one set are given as a class P:
//   Element, Sum       of the panels and of the accumulator
//   Register           a vector of kWidth sums; kWidth divides kPanelRows
//   kRows, kVectors    the accumulators of the main microkernel, all of which stay in registers: rows of a times vectors of columns of b
//   kDepth             how many lines a panel of b and a panel of a have when both stay in the first-level cache
//   zero, accumulate   a sum of 0; puts or adds a sum to kWidth consecutive accumulators
//   columns, row       one group of k of kWidth consecutive columns; of one row, for all columns
//   multiply_add       sum + row * columns
//   kStarts            whether the caller says what the sums of each row start with; start() makes a register of it
// What the loop over k calls is always inlined: GCC inlines nothing else into a function with other sanitizers.

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

/// Elements of 4 bytes of a panel: consecutive k of one row.
template <class Element>
constexpr int kGroup = 4 / static_cast<int>(sizeof(Element));

/// Elements of a line: one group of every row of a panel.
template <class Element>
constexpr long kLine = kPanelRows* kGroup<Element>;

template <class Element>
constexpr int groups_of(int depth) {
  return (depth + kGroup<Element> - 1) / kGroup<Element>;
}

/// The operands of a product as every loop below hands them on. `panel_depth` counts elements, `groups` groups of k.
template <class P>
struct Operands {
  typename P::Sum* acc;
  long acc_stride;
  const typename P::Element* a;
  int rows;
  int groups;
  int panel_depth;
  const int* start;  ///< one for each row, or null: 0
  bool overwrite;
};

// The address sanitizer checks the lines that a loop over k reads before the loop. A check at each read makes the loop eight times slower,
// and tests of models wait for little else.
#if defined(__SANITIZE_ADDRESS__)
#define TILEWAVE_LINES_ARE_CHECKED __attribute__((no_sanitize("address")))
extern "C" void* __asan_region_is_poisoned(void* begin, unsigned long size);

/// Reports a read outside of the program's memory among those of `elements` elements in each of `groups` lines.
template <class Element>
void check_lines(const Element* first, int groups, int elements) {
  if (groups == 0) return;
  const auto bytes = static_cast<unsigned long>((groups - 1) * kLine<Element> + elements) * sizeof(Element);
  const void* const outside = __asan_region_is_poisoned(const_cast<Element*>(first), bytes);
  if (outside != nullptr) static_cast<void>(*static_cast<const volatile char*>(outside));
}
#else
#define TILEWAVE_LINES_ARE_CHECKED
template <class Element>
void check_lines(const Element*, int, int) {}
#endif

/// A tile of accumulators, Rows by Vectors * kWidth: `a` steps through one panel, b[j] through the panel of the j-th vector of columns.
template <class P, int Rows, int Vectors>
[[gnu::noinline]] TILEWAVE_LINES_ARE_CHECKED void microkernel(typename P::Sum* acc, long acc_stride, const typename P::Element* a,
                                                              const typename P::Element* const* b, int groups,
                                                              [[maybe_unused]] const int* start, bool overwrite) {
  using Element = typename P::Element;
  typename P::Register sum[Rows][Vectors];
  const Element* column[Vectors];
  TILEWAVE_UNROLL(16)
  for (int j = 0; j < Vectors; ++j) column[j] = b[j];
  TILEWAVE_UNROLL(16)
  for (int i = 0; i < Rows; ++i) {
    // Wanted only after the last k, and usually out of the first-level cache since the previous step of k.
    __builtin_prefetch(acc + i * acc_stride, 1);
    __builtin_prefetch(acc + i * acc_stride + Vectors * P::kWidth - 1, 1);
    TILEWAVE_UNROLL(16)
    for (int j = 0; j < Vectors; ++j) {
      sum[i][j] = P::zero();
      if constexpr (P::kStarts) {
        if (start != nullptr) sum[i][j] = P::start(start[i]);
      }
    }
  }
  TILEWAVE_UNROLL(4)
  for (int k = 0; k < groups; ++k) {
    const long at = k * kLine<Element>;
    decltype(P::columns(a)) columns[Vectors];
    TILEWAVE_UNROLL(16)
    for (int j = 0; j < Vectors; ++j) columns[j] = P::columns(column[j] + at);
    TILEWAVE_UNROLL(16)
    for (int i = 0; i < Rows; ++i) {
      const auto row = P::row(a + at + i * kGroup<Element>);
      TILEWAVE_UNROLL(16)
      for (int j = 0; j < Vectors; ++j) sum[i][j] = P::multiply_add(row, columns[j], sum[i][j]);
    }
  }
  TILEWAVE_UNROLL(16)
  for (int i = 0; i < Rows; ++i) {
    TILEWAVE_UNROLL(16)
    for (int j = 0; j < Vectors; ++j) P::accumulate(acc + i * acc_stride + j * P::kWidth, sum[i][j], overwrite);
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

/// How many vectors of columns come next when `left` are: rather 2 + 2 than 3 + 1, which would load more for each product.
constexpr int next_vectors(int left, int most) { return left == most + 1 && left % 2 == 0 ? left / 2 : least(left, most); }

/// All rows against one group of Vectors vectors of columns.
template <class P, int MostRows, int Vectors>
void column_group(const Operands<P>& x, const typename P::Element* const* b) {
  for (int panel = 0; panel < x.rows; panel += kPanelRows) {
    const auto* panel_a = x.a + static_cast<long>(panel) * x.panel_depth;
    const int in_panel = least(x.rows - panel, kPanelRows);
    for (int row = 0; row < in_panel;) {
      const int taken = next_rows(in_panel - row, MostRows);
      auto* out = x.acc + (panel + row) * x.acc_stride;
      const auto* from = panel_a + row * kGroup<typename P::Element>;
      const int* start = x.start == nullptr ? nullptr : x.start + panel + row;
      check_lines(from, x.groups, taken * kGroup<typename P::Element>);
      if (start != nullptr) check_lines(start, 1, taken);
      for (int j = 0; j < Vectors; ++j) check_lines(b[j], x.groups, P::kWidth * kGroup<typename P::Element>);
      if constexpr (MostRows >= 8) {
        if (taken == 8) microkernel<P, 8, Vectors>(out, x.acc_stride, from, b, x.groups, start, x.overwrite);
      }
      if constexpr (MostRows >= 6) {
        if (taken == 6) microkernel<P, 6, Vectors>(out, x.acc_stride, from, b, x.groups, start, x.overwrite);
      }
      if constexpr (MostRows >= 4) {
        if (taken == 4) microkernel<P, 4, Vectors>(out, x.acc_stride, from, b, x.groups, start, x.overwrite);
      }
      if (taken == 2) microkernel<P, 2, Vectors>(out, x.acc_stride, from, b, x.groups, start, x.overwrite);
      if (taken == 1) microkernel<P, 1, Vectors>(out, x.acc_stride, from, b, x.groups, start, x.overwrite);
      row += taken;
    }
  }
}

/// column_group for the largest group of at most Vectors that `vectors` allows.
template <class P, int MostRows, int Vectors>
void column_group_of(int vectors, const Operands<P>& x, const typename P::Element* const* b) {
  if constexpr (Vectors > 1) {
    if (vectors < Vectors) {
      column_group_of<P, MostRows, Vectors - 1>(vectors, x, b);
      return;
    }
  }
  column_group<P, MostRows, Vectors>(x, b);
}

/// Each column group of b stays in the first-level cache while all of a passes by it; a is small enough to come from the second level.
template <class P, int MostRows, int Vectors>
void product(const Operands<P>& whole, const typename P::Element* b, int cols) {
  using Element = typename P::Element;
  const int chunks = whole.groups <= P::kDepth ? 1 : (whole.groups + P::kDepth - 1) / P::kDepth;
  const int chunk = (whole.groups + chunks - 1) / chunks;
  int vectors;
  for (int col = 0; col < cols; col += vectors * P::kWidth) {
    vectors = next_vectors((cols - col + P::kWidth - 1) / P::kWidth, Vectors);
    int k = 0;
    do {  // once for a depth of 0, which may have to set acc to 0
      const Element* group[Vectors];
      for (int j = 0; j < vectors; ++j) {
        const int c = col + j * P::kWidth;
        group[j] =
            b + static_cast<long>(c / kPanelRows) * kPanelRows * whole.panel_depth + k * kLine<Element> + c % kPanelRows * kGroup<Element>;
      }
      Operands<P> part = whole;
      part.acc += col;
      part.a += k * kLine<Element>;
      part.groups = least(whole.groups - k, chunk);
      if (k > 0) {
        part.start = nullptr;
        part.overwrite = false;
      }
      column_group_of<P, MostRows, Vectors>(vectors, part, group);
      k += chunk;
    } while (k < whole.groups);
  }
}

template <class P>
void mma_starting_with(const int* start, typename P::Sum* acc, long acc_stride, const typename P::Element* a, const typename P::Element* b,
                       int rows, int cols, int depth, int panel_depth, bool overwrite) {
  const Operands<P> x{acc, acc_stride, a, rows, groups_of<typename P::Element>(depth), panel_depth, start, overwrite};
  // One or two rows need more columns at once for as many independent sums.
  if (rows <= 2) {
    product<P, 2, 6>(x, b, cols);
  } else {
    product<P, P::kRows, P::kVectors>(x, b, cols);
  }
}

template <class P>
void mma(typename P::Sum* acc, long acc_stride, const typename P::Element* a, const typename P::Element* b, int rows, int cols, int depth,
         int panel_depth, bool overwrite) {
  mma_starting_with<P>(nullptr, acc, acc_stride, a, b, rows, cols, depth, panel_depth, overwrite);
}

}  // namespace
}  // namespace tw::cpu
