#pragma once

// Packing into panels, and products of what is widened on its way from them, written once for every instruction set; internal to each file
// that includes it, as microkernel.hpp is. A set is given as a class V: a P of f32 (microkernel.hpp), and
//   kIsa                       the set's name
//   load, store                of kWidth consecutive f32, or as many groups, unaligned
//   widen(Element, bits)       kWidth consecutive elements, unaligned, as f32; of those that are not widened, groups as they are
//   transpose(vectors)         of kWidth vectors, in place
//   interleave(Element, k, i)  groups of kWidth consecutive rows from i on, the elements of each k being consecutive from k[j] on
//   split(Element, bits, out)  the j-th elements of kWidth consecutive groups, as f32
//   Exact                      V with sums that are integers, small enough for f32, and added to 32-bit integers

#include "microkernels/microkernel.hpp"
#include "microkernels/rows.hpp"

namespace tw::cpu {
namespace {

struct F32 {
  using Bits = float;
  using Packed = float;
};
struct F16 {
  using Bits = unsigned short;
  using Packed = float;
};
struct E4M3 {
  using Bits = unsigned char;
  using Packed = float;
};
struct E5M2 {
  using Bits = unsigned char;
  using Packed = float;
};
struct BF16 {
  using Bits = unsigned short;
  using Packed = unsigned short;
};
struct I8 {
  using Bits = signed char;
  using Packed = signed char;
};

template <class Element>
constexpr int kGroupOf = kGroup<typename Element::Packed>;

template <class V, class Packed>
void store_groups(Packed* to, typename V::Register x) {
  V::store(reinterpret_cast<float*>(to), x);
}

/// Rows of consecutive k: squares of kWidth rows by kWidth groups of k are transposed in registers. `present` of the kWidth rows exist.
template <class V, class Element, bool Whole>
void pack_rows(typename Element::Packed* panel, const typename Element::Bits* source, long row_stride, int present, int groups) {
  constexpr int kTogether = kGroupOf<Element>;
  for (int k = 0; k < groups; k += V::kWidth) {
    const int at = least(k, groups - V::kWidth);  // the last square overlaps its neighbour, so nothing past the depth is read
    typename V::Register square[V::kWidth];
    TILEWAVE_UNROLL(16)
    for (int i = 0; i < V::kWidth; ++i) {
      __builtin_prefetch(source + (i + V::kWidth) * row_stride + at * kTogether);  // of the next rows
      square[i] = Whole || i < present ? V::widen(Element{}, source + i * row_stride + at * kTogether) : V::zero();
    }
    V::transpose(square);
    TILEWAVE_UNROLL(16)
    for (int i = 0; i < V::kWidth; ++i) store_groups<V>(panel + (at + i) * kLine<typename Element::Packed>, square[i]);
  }
}

template <class V, class Element>
void pack_transposing(typename Element::Packed* panels, const typename Element::Bits* source, long row_stride, int rows, int groups,
                      int panel_depth) {
  const int padded = (rows + kPanelRows - 1) / kPanelRows * kPanelRows;
  for (int row = 0; row < padded; row += V::kWidth) {
    auto* panel = panels + static_cast<long>(row / kPanelRows) * kPanelRows * panel_depth + row % kPanelRows * kGroupOf<Element>;
    const int present = rows - row;
    if (present >= V::kWidth) {
      pack_rows<V, Element, true>(panel, source + row * row_stride, row_stride, V::kWidth, groups);
    } else {
      pack_rows<V, Element, false>(panel, present > 0 ? source + row * row_stride : source, row_stride, present, groups);
    }
  }
}

/// One line: the kPanelRows rows of a group of k, all present and consecutive from k[j] on.
template <class V, class Element>
void pack_consecutive(typename Element::Packed* line, const typename Element::Bits* const* k) {
  TILEWAVE_UNROLL(4)
  for (int i = 0; i < kPanelRows; i += V::kWidth) store_groups<V>(line + i * kGroupOf<Element>, V::interleave(Element{}, k, i));
}

/// So many k are packed at a time where they are not consecutive, and fetched ahead: the processor does not guess strides of several KB.
constexpr int kDepthBlock = 8;

/// One line of any strides, of which `present` rows and `depth` k exist.
template <class V, class Element>
void pack_line(typename Element::Packed* line, const typename Element::Bits* source, long row_stride, long depth_stride, int present,
               int depth) {
  constexpr int kTogether = kGroupOf<Element>;
  const typename Element::Bits* k[kTogether];
  if (row_stride == 1 && present == kPanelRows && depth >= kTogether) {
    for (int j = 0; j < kTogether; ++j) {
      k[j] = source + j * depth_stride;
      __builtin_prefetch(k[j] + kDepthBlock * depth_stride);
    }
    pack_consecutive<V, Element>(line, k);
    return;
  }
  typename Element::Bits gathered[kTogether][kPanelRows] = {};
  for (int j = 0; j < kTogether; ++j) {
    k[j] = gathered[j];
    if (j >= depth) continue;
    for (int i = 0; i < present; ++i) gathered[j][i] = source[i * row_stride + j * depth_stride];
  }
  pack_consecutive<V, Element>(line, k);
}

template <class V, class Element>
void pack(typename Element::Packed* panels, const typename Element::Bits* source, long row_stride, long depth_stride, int rows, int depth,
          int panel_depth) {
  constexpr int kTogether = kGroupOf<Element>;
  int done = 0;
  if (depth_stride == 1 && depth >= V::kWidth * kTogether) {
    pack_transposing<V, Element>(panels, source, row_stride, rows, depth / kTogether, panel_depth);
    done = depth / kTogether * kTogether;
  }
  // A few k at a time through all panels. One k at a time would write to a page per panel; a whole depth at once would read a page per k,
  // and lines that are a power of two apart, more of them than their cache set has ways (8 usually), would be lost before the next panel
  // reads on.
  for (int block = done; block < depth; block += kDepthBlock) {
    for (int row = 0; row < rows; row += kPanelRows) {
      auto* panel = panels + static_cast<long>(row) * panel_depth;
      const int present = least(rows - row, kPanelRows);
      for (int k = block; k < least(depth, block + kDepthBlock); k += kTogether) {
        pack_line<V, Element>(panel + static_cast<long>(k) * kPanelRows, source + row * row_stride + k * depth_stride, row_stride,
                              depth_stride, present, depth - k);
      }
    }
  }
}

/// k from `first` to `first + depth` of as many panels as `rows` need, as f32 panels of `depth`.
template <class V, class Element>
void widen_panels(float* wide, const typename Element::Packed* panels, int rows, int first, int depth, int panel_depth) {
  constexpr int kTogether = kGroupOf<Element>;
  for (int row = 0; row < rows; row += kPanelRows) {
    const auto* from = panels + static_cast<long>(row) * panel_depth + static_cast<long>(first) * kPanelRows;
    float* to = wide + static_cast<long>(row) * depth;
    for (int k = 0; k < depth; k += kTogether) {
      TILEWAVE_UNROLL(4)
      for (int i = 0; i < kPanelRows; i += V::kWidth) {
        typename V::Register elements[kTogether];
        V::split(Element{}, from + k * kPanelRows + i * kTogether, elements);
        TILEWAVE_UNROLL(4)
        for (int j = 0; j < kTogether; ++j) {
          if (k + j < depth) V::store(to + (k + j) * kPanelRows + i, elements[j]);
        }
      }
    }
  }
}

/// The product of a type that the set has no instruction for: blocks of its panels are widened to f32 on the stack. Each block of a serves
/// all columns, each block of b kRows rows, so the widening itself is a hundredth of the work.
template <class V, class P, class Element>
void mma_widening(typename P::Sum* acc, long acc_stride, const typename Element::Packed* a, const typename Element::Packed* b, int rows,
                  int cols, int depth, int panel_depth, bool overwrite) {
  constexpr int kRows = 128, kCols = 3 * kPanelRows;
  static_assert(V::kDepth % kGroupOf<Element> == 0);
  alignas(64) float wide_a[kRows * V::kDepth];
  alignas(64) float wide_b[kCols * V::kDepth];
  for (int row = 0; row < rows; row += kRows) {
    const int some_rows = least(rows - row, kRows);
    int k = 0;
    do {  // once for a depth of 0, which may have to set acc to 0
      const int some_depth = least(depth - k, V::kDepth);
      widen_panels<V, Element>(wide_a, a + static_cast<long>(row) * panel_depth, some_rows, k, some_depth, panel_depth);
      for (int col = 0; col < cols; col += kCols) {
        const int some_cols = least(cols - col, kCols);
        widen_panels<V, Element>(wide_b, b + static_cast<long>(col) * panel_depth, some_cols, k, some_depth, panel_depth);
        mma<P>(acc + row * acc_stride + col, acc_stride, wide_a, wide_b, some_rows, some_cols, some_depth, some_depth, overwrite && k == 0);
      }
      k += V::kDepth;
    } while (k < depth);
  }
}

template <class V>
void widen_f16(float* to, const unsigned short* from, long n) {
  in_vectors<V::kWidth>(to, from, n, [](float* t, const unsigned short* f) { V::store(t, V::widen(F16{}, f)); });
}

}  // namespace
}  // namespace tw::cpu
