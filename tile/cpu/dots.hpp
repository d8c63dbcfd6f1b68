#pragma once

// Products of rows in memory with a vector, as library.tile.hpp says, written once for every instruction set; internal to each file that
// includes it. A set is given as pack.hpp's class V.

#include "tile/cpu/pack.hpp"

namespace tw::cpu {
namespace {

/// Consecutive elements as f32: of bf16 those with even and those with odd places apart.
template <class V, class Element>
struct Piece {
  static constexpr int kParts = kGroupOf<Element> == 2 ? 2 : 1;
  static constexpr int kElements = V::kWidth * kParts;
  typename V::Register parts[kParts];

  explicit Piece(const typename Element::Bits* bits) {
    if constexpr (kParts == 2) {
      V::split(Element{}, bits, parts);
    } else {
      parts[0] = V::widen(Element{}, bits);
    }
  }
};

template <class V>
float total(typename V::Register x) {
  alignas(64) float lanes[V::kWidth];
  V::store(lanes, x);
  for (int n = V::kWidth / 2; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) lanes[i] += lanes[i + n];
  return lanes[0];
}

/// Several rows at a time: as many independent sums hide the latency of a multiply-add.
template <class V, class Element, int Rows>
void dots_of_rows(float* sums, const typename Element::Bits* rows, long row_stride, const typename Element::Bits* vector, int cols) {
  using P = Piece<V, Element>;
  typename V::Register sum[Rows];
  for (auto& x : sum) x = V::zero();
  const auto add = [&](const typename Element::Bits* v, const typename Element::Bits* row, long stride) {
    const P factor(v);
    TILEWAVE_UNROLL(8)
    for (int r = 0; r < Rows; ++r) {
      const P x(row + r * stride);
      TILEWAVE_UNROLL(2)
      for (int part = 0; part < P::kParts; ++part) sum[r] = V::multiply_add(x.parts[part], factor.parts[part], sum[r]);
    }
  };
  int c = 0;
  for (; c + P::kElements <= cols; c += P::kElements) add(vector + c, rows + c, row_stride);
  if (c < cols) {
    typename Element::Bits padded_vector[P::kElements] = {}, padded[Rows * P::kElements] = {};
    const auto bytes = static_cast<unsigned long>(cols - c) * sizeof(typename Element::Bits);
    __builtin_memcpy(padded_vector, vector + c, bytes);
    for (int r = 0; r < Rows; ++r) __builtin_memcpy(padded + r * P::kElements, rows + r * row_stride + c, bytes);
    add(padded_vector, padded, P::kElements);
  }
  for (int r = 0; r < Rows; ++r) sums[r] += total<V>(sum[r]);
}

template <class V, class Element>
void dots(float* sums, const typename Element::Bits* rows, long row_stride, const typename Element::Bits* vector, int count, int cols) {
  constexpr int kTogether = 8;
  int r = 0;
  for (; r + kTogether <= count; r += kTogether)
    dots_of_rows<V, Element, kTogether>(sums + r, rows + r * row_stride, row_stride, vector, cols);
  for (; r < count; ++r) dots_of_rows<V, Element, 1>(sums + r, rows + r * row_stride, row_stride, vector, cols);
}

}  // namespace
}  // namespace tw::cpu
