#pragma once

#include "tilewave/tile/language.tile.hpp"

namespace tw::kernels::indexer {

#if TW_ON_GPU

/// Sums over heads of a product's columns, one for each of its rows (keys) and queries: column n * Heads + h is head h of query n.
///
/// Four neighbouring lanes share two rows. Each of them sums its own columns with one multiply-add each; then the lanes exchange halves, so
/// that each holds the sums of one row and of half the queries. That takes fewer instructions than complete(), which gives every lane all
/// sums, and each lane stores its own.
template <class Target, class Acc, int Heads>
struct HeadSums {
  static constexpr int queries = Acc::cols / Heads;
  static constexpr int kept = max(queries / 2, 1);
  static_assert(Acc::row_count == 2 && Acc::row_threads == 4, "a warp holds 16 whole rows");
  /// A factor for each row.
  using Scales = float;
  float x[kept];

  TW_INLINE static int row(const auto& block) { return Acc::row(block.at, Acc::in_row(0, 0)) + block.at.lane % 2 * 8; }
  TW_INLINE static void read(auto& block, Scales& scales, auto scale_of) { scales = scale_of(row(block)); }

  /// The sums of weight * max(0, x), from halves of the weights. x + |x| is exact and twice the maximum; it takes half of a maximum's time,
  /// because a GPU has twice as many lanes for additions.
  TW_INLINE void sum(auto& block, const Acc& acc, const auto& half_weights) {
    constexpr int share = Heads / 4;  // columns of a query in a lane
    float sums[queries][2];
    TW_UNROLL
    for (int n = 0; n < queries; ++n) {
      TW_UNROLL
      for (int i = 0; i < 2; ++i) {
        float sum = 0.0f;
        TW_UNROLL
        for (int j = n * share; j < (n + 1) * share; ++j) {
          const int e = Acc::in_row(i, j);
          sum = fma(acc.x[e] + abs(acc.x[e]), half_weights.x[Acc::column_index(e)], sum);
        }
        sums[n][i] = sum;
      }
    }
    const bool second_row = block.at.lane % 2 != 0, second_half = block.at.lane / 2 % 2 != 0;
    float of_row[queries];
    TW_UNROLL
    for (int n = 0; n < queries; ++n) of_row[n] = exchange(sums[n][0], sums[n][1], second_row, 1);
    if constexpr (queries == 1) {
      x[0] = of_row[0] + cuda::ptx::shuffle_xor(of_row[0], 2);
    } else {
      TW_UNROLL
      for (int n = 0; n < kept; ++n) x[n] = exchange(of_row[n], of_row[kept + n], second_half, 2);
    }
  }
  TW_INLINE void multiply(auto&, Scales scales) {
    for (float& sum : x) sum *= scales;
  }
  /// f(row, query, sum) for each sum.
  TW_INLINE void for_each(auto& block, auto f) const {
    const int half = block.at.lane / 2 % 2;
    if (queries == 1 && half != 0) return;  // a copy
    TW_UNROLL
    for (int n = 0; n < kept; ++n) f(row(block), queries == 1 ? 0 : half * kept + n, x[n]);
  }

 private:
  /// `first` or `second` of this lane and of the lane `mask` away, added up.
  TW_INLINE static float exchange(float first, float second, bool wants_second, int mask) {
    const float own = wants_second ? second : first, other = wants_second ? first : second;
    return own + cuda::ptx::shuffle_xor(other, mask);
  }
};

#else

template <class Target, class Acc, int Heads>
struct HeadSums {
  static constexpr int queries = Acc::cols / Heads;
  using Scales = RowVector<Target, float, Acc>;
  Scales x[queries];

  TW_INLINE static void read(auto& block, Scales& scales, auto scale_of) {
    block.for_rows(scales, [&](int row, int, auto& scale) { scale = scale_of(row); });
  }
  TW_INLINE void sum(auto& block, Acc& acc, const auto& half_weights) {
    block.map(acc, half_weights, [](auto element, auto half_weight) { return (element + abs(element)) * half_weight; });
    sum_from<0>(block, acc);
  }
  TW_INLINE void multiply(auto& block, const Scales& scales) {
    for (Scales& sums : x) block.for_rows(sums, [&](int, int i, auto& sum) { sum = sum * scales[i]; });
  }
  TW_INLINE void for_each(auto& block, auto f) {
    for (int n = 0; n < queries; ++n) block.for_rows(x[n], [&](int row, int, auto& sum) { f(row, n, sum); });
  }

 private:
  template <int n>
  TW_INLINE void sum_from(auto& block, Acc& acc) {
    block.rows(acc, [&](int i, auto row) { x[n][i] = row.template columns<n * Heads, Heads>().sum(); });
    if constexpr (n + 1 < queries) sum_from<n + 1>(block, acc);
  }
};

#endif

}  // namespace tw::kernels::indexer
