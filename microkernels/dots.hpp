#pragma once

// Products of rows in memory with a vector, and sums of rows, as library.tile.hpp says, written once for every instruction set; internal to
// each file that includes it. A set is given as pack.hpp's class V.

#include "microkernels/pack.hpp"

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

/// lanes[0] = the sum of n lanes, a power of two. Unrolled, it stays in registers.
template <int n>
[[gnu::always_inline]] inline void add_lanes(float* lanes) {
  if constexpr (n > 1) {
    TILEWAVE_UNROLL(8)
    for (int i = 0; i < n / 2; ++i) lanes[i] += lanes[i + n / 2];
    add_lanes<n / 2>(lanes);
  }
}
template <class V>
float total(typename V::Register x) {
  alignas(64) float lanes[V::kWidth];
  V::store(lanes, x);
  add_lanes<V::kWidth>(lanes);
  return lanes[0];
}

/// One row after the other: memory is read in one stream, which the processor sees coming. Several sums hide the latency of a multiply-add.
template <class V, class Element>
void dots(float* sums, const typename Element::Bits* rows, long row_stride, const typename Element::Bits* vector, int count, int cols) {
  using P = Piece<V, Element>;
  constexpr int kSums = 4;
  for (int r = 0; r < count; ++r) {
    const typename Element::Bits* row = rows + r * row_stride;
    typename V::Register sum[kSums];
    for (auto& x : sum) x = V::zero();
    const auto add = [&](typename V::Register& to, const typename Element::Bits* x, const typename Element::Bits* y) {
      const P a(x), b(y);
      TILEWAVE_UNROLL(2)
      for (int part = 0; part < P::kParts; ++part) to = V::multiply_add(a.parts[part], b.parts[part], to);
    };
    int c = 0;
    for (; c + kSums * P::kElements <= cols; c += kSums * P::kElements) {
      TILEWAVE_UNROLL(4)
      for (int n = 0; n < kSums; ++n) add(sum[n], row + c + n * P::kElements, vector + c + n * P::kElements);
    }
    for (; c < cols; c += P::kElements) {
      typename Element::Bits x[P::kElements] = {}, y[P::kElements] = {};
      const auto bytes = static_cast<unsigned long>(least(cols - c, P::kElements)) * sizeof x[0];
      __builtin_memcpy(x, row + c, bytes);
      __builtin_memcpy(y, vector + c, bytes);
      add(sum[0], x, y);
    }
    sums[r] += total<V>((sum[0] + sum[1]) + (sum[2] + sum[3]));
  }
}

/// Eight vectors of sums stay in registers for all rows, and hide the latency of a multiply-add.
template <class V>
void add_rows(float* sums, const float* rows, long row_stride, const float* weights, int count, int cols) {
  const auto add = [&]<int N>(int c) {
    typename V::Register sum[N];
    for (int n = 0; n < N; ++n) sum[n] = V::load(sums + c + n * V::kWidth);
    for (int r = 0; r < count; ++r) {
      const typename V::Register weight = V::row(weights + r);
      TILEWAVE_UNROLL(8)
      for (int n = 0; n < N; ++n) sum[n] = V::multiply_add(weight, V::load(rows + r * row_stride + c + n * V::kWidth), sum[n]);
    }
    for (int n = 0; n < N; ++n) V::store(sums + c + n * V::kWidth, sum[n]);
  };
  int c = 0;
  for (; c + 8 * V::kWidth <= cols; c += 8 * V::kWidth) add.template operator()<8>(c);
  for (; c + V::kWidth <= cols; c += V::kWidth) add.template operator()<1>(c);
  for (; c < cols; ++c)
    for (int r = 0; r < count; ++r) sums[c] += weights[r] * rows[r * row_stride + c];
}

}  // namespace
}  // namespace tw::cpu
