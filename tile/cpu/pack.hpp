#pragma once

// Packing into panels, written once for every instruction set; internal to each file that includes it, as microkernel.hpp is. What a set's
// class V adds for it:
//   widen(Element, bits)   kWidth consecutive elements, unaligned, as f32
//   transpose(vectors)     of kWidth vectors, in place
//   kIsa                   the set's name

#include "tile/cpu/microkernel.hpp"

namespace tw::cpu {
namespace {

struct F32 {
  using Bits = float;
};
struct F16 {
  using Bits = unsigned short;
};
struct BF16 {
  using Bits = unsigned short;
};

/// Rows of consecutive k: squares of kWidth rows by kWidth k are transposed in registers. `present` of the kWidth rows exist.
template <class V, class Element, bool Whole>
void pack_rows(float* panel, const typename Element::Bits* source, long row_stride, int present, int depth) {
  for (int k = 0; k < depth; k += V::kWidth) {
    const int at = least(k, depth - V::kWidth);  // the last square overlaps its neighbour, so nothing past the depth is read
    typename V::Register square[V::kWidth];
    TILEWAVE_UNROLL(16)
    for (int i = 0; i < V::kWidth; ++i) square[i] = Whole || i < present ? V::widen(Element{}, source + i * row_stride + at) : V::zero();
    V::transpose(square);
    TILEWAVE_UNROLL(16)
    for (int i = 0; i < V::kWidth; ++i) V::store(panel + static_cast<long>(at + i) * kPanelRows, square[i]);
  }
}

template <class V, class Element>
void pack_transposing(float* panels, const typename Element::Bits* source, long row_stride, int rows, int depth, int panel_depth) {
  const int padded = (rows + kPanelRows - 1) / kPanelRows * kPanelRows;
  for (int row = 0; row < padded; row += V::kWidth) {
    float* panel = panels + static_cast<long>(row / kPanelRows) * kPanelRows * panel_depth + row % kPanelRows;
    const int present = rows - row;
    if (present >= V::kWidth) {
      pack_rows<V, Element, true>(panel, source + row * row_stride, row_stride, V::kWidth, depth);
    } else {
      pack_rows<V, Element, false>(panel, present > 0 ? source + row * row_stride : source, row_stride, present, depth);
    }
  }
}

/// The kPanelRows rows of one k, all present and consecutive.
template <class V, class Element>
void pack_consecutive(float* panel, const typename Element::Bits* source) {
  TILEWAVE_UNROLL(4)
  for (int i = 0; i < kPanelRows; i += V::kWidth) V::store(panel + i, V::widen(Element{}, source + i));
}

/// The same for any stride, of which `present` exist.
template <class V, class Element>
void pack_gathering(float* panel, const typename Element::Bits* source, long row_stride, int present) {
  typename Element::Bits gathered[kPanelRows] = {};
  for (int i = 0; i < present; ++i) gathered[i] = source[i * row_stride];
  pack_consecutive<V, Element>(panel, gathered);
}

template <class V, class Element>
void pack(float* panels, const typename Element::Bits* source, long row_stride, long depth_stride, int rows, int depth, int panel_depth) {
  if (depth_stride == 1 && depth >= V::kWidth) {
    pack_transposing<V, Element>(panels, source, row_stride, rows, depth, panel_depth);
    return;
  }
  // A few k at a time through all panels. One k at a time would write to a page per panel; a whole depth at once would read a page per k,
  // and lines that are a power of two apart, more of them than their cache set has ways (8 usually), would be lost before the next panel
  // reads on.
  constexpr int kBlock = 8;
  for (int block = 0; block < depth; block += kBlock) {
    for (int row = 0; row < rows; row += kPanelRows) {
      float* panel = panels + static_cast<long>(row) * panel_depth;
      const int present = least(rows - row, kPanelRows);
      for (int k = block; k < least(depth, block + kBlock); ++k) {
        const typename Element::Bits* from = source + row * row_stride + k * depth_stride;
        if (row_stride == 1 && present == kPanelRows) {
          pack_consecutive<V, Element>(panel + static_cast<long>(k) * kPanelRows, from);
        } else {
          pack_gathering<V, Element>(panel + static_cast<long>(k) * kPanelRows, from, row_stride, present);
        }
      }
    }
  }
}

template <class V>
constexpr Library kLibrary{V::kIsa, mma<V>, pack<V, F32>, pack<V, F16>, pack<V, BF16>};

}  // namespace
}  // namespace tw::cpu
