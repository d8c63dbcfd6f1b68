#pragma once

#include "tilewave/tile/sm_90a/memory.tile.hpp"

namespace tw::sm_90a {

/// R x C accumulators, wgmma's layout: a warpgroup holds 64 rows, a warp 16 of them, a quad of lanes two rows (r and r + 8), a thread two
/// neighbouring columns of every eight. Element i of a thread: column pair i / 4, row r + 8 * (i / 2 % 2), column i % 2 of the pair.
template <class T, int R, int C>
struct Fragment {
  static_assert(R % kWarpgroupRows == 0 && C % 8 == 0, "a Fragment has a multiple of 64 rows and of 8 columns");
  static constexpr int rows = R;
  static constexpr int cols = C;
  static constexpr int size = C / 2;
  static constexpr int width = 2;        ///< elements side by side: i, i + 1
  static constexpr int row_count = 2;    ///< rows of a thread
  static constexpr int row_threads = 4;  ///< neighbouring lanes that share them
  using Element = T;
  T x[size];

  TW_INLINE static constexpr int row(const Position& p, int i) { return p.row + i / 2 % 2 * 8; }
  TW_INLINE static constexpr int col(const Position& p, int i) { return i / 4 * 8 + p.col + i % 2; }
  /// Index of the j-th element of a thread's row `r`, j < size / row_count.
  TW_INLINE static constexpr int in_row(int r, int j) { return j / 2 * 4 + r * 2 + j % 2; }
};

/// The left operand of a product in registers: Fragment's layout, pairs packed to 16 bits. Four registers hold 16 columns.
template <class T, int R, int C>
struct Operand {
  static_assert(sizeof(T) == 2, "operands in registers are bf16 or f16");
  static constexpr int cols = C;
  using Element = T;
  u32 x[C / 4];
};

/// R x C elements for work without products, one warpgroup: warp w has rows w, w + 4, ...; its lanes hold neighbouring pieces of `width`
/// columns.
template <class T, int R, int C>
struct Rows {
  static constexpr int rows = R;
  static constexpr int cols = C;
  static constexpr int width = C % 256 == 0 ? 8 : C % 128 == 0 ? 4 : C % 64 == 0 ? 2 : 1;
  static constexpr int pieces = C / (32 * width);
  static constexpr int row_count = R / 4;
  static constexpr int row_threads = 32;
  static constexpr int size = row_count * pieces * width;
  static_assert(R % 4 == 0, "Rows are dealt to four warps");
  static_assert(C % 32 == 0, "the columns of Rows are dealt to 32 lanes");
  using Element = T;
  T x[size];

  TW_INLINE static constexpr int row(const Position& p, int i) { return i / (pieces * width) * 4 + p.warp; }
  TW_INLINE static constexpr int col(const Position& p, int i) { return (i / width % pieces * 32 + p.lane) * width + i % width; }
  TW_INLINE static constexpr int in_row(int r, int j) { return r * pieces * width + j; }
};

/// One value for each row that a thread holds part of; its lanes hold copies.
template <class T, class Tile>
struct RowVector {
  static constexpr int size = Tile::row_count;
  static constexpr int row_threads = Tile::row_threads;
  T x[size];
  TW_INLINE static constexpr int row(const Position& p, int i) { return Tile::row(p, Tile::in_row(i, 0)); }
  TW_INLINE T& operator[](int i) { return x[i]; }
  TW_INLINE const T& operator[](int i) const { return x[i]; }
};

/// One value for each column of a Fragment that a thread holds part of.
template <class T, int C>
struct ColumnVector {
  T x[C / 4];
  TW_INLINE static constexpr int col(const Position& p, int i) { return i / 2 * 8 + p.col + i % 2; }
};

/// One row of a fragment, as block.rows() hands it out. Results are the same in every lane that shares the row.
template <class F>
struct RowView {
  F& fragment;
  int r;
  static constexpr int length = F::size / F::row_count;

  template <class Op>
  TW_INLINE static float across(float value, Op op) {
    TW_UNROLL
    for (int mask = F::row_threads / 2; mask > 0; mask /= 2) value = op(value, ptx::shuffle_xor(value, mask));
    return value;
  }
  /// Folds `value(j)` of the thread's share of the row in a few chains: one chain would take its length times the latency of an operation.
  template <class Value, class Op>
  TW_INLINE static float fold(Value value, Op op) {
    constexpr int chains = length >= 8 ? 4 : 1;
    float result[chains];
    TW_UNROLL
    for (int j = 0; j < length; ++j) {
      const float x = value(j);
      result[j % chains] = j < chains ? x : op(result[j % chains], x);
    }
    return chains == 4 ? op(op(result[0], result[1 % chains]), op(result[2 % chains], result[3 % chains])) : result[0];
  }
  TW_INLINE float max() const {
    const auto larger = [](float a, float b) { return tw::max(a, b); };
    return across(fold([&](int j) { return fragment.x[F::in_row(r, j)]; }, larger), larger);
  }
  /// x = f(x) for the row's elements; the sum of the results over this thread's share of the row. block.complete() adds the shares up:
  /// once, after a loop.
  template <class Fn>
  TW_INLINE float map_partial_sum(Fn f) const {
    return fold(
        [&](int j) {
          float& x = fragment.x[F::in_row(r, j)];
          x = f(x);
          return x;
        },
        [](float a, float b) { return a + b; });
  }
  template <class Fn>
  TW_INLINE void map(Fn f) const {
    TW_UNROLL
    for (int j = 0; j < length; ++j) fragment.x[F::in_row(r, j)] = f(fragment.x[F::in_row(r, j)]);
  }
  TW_INLINE float sum() const {
    const auto add = [](float a, float b) { return a + b; };
    return across(fold([&](int j) { return fragment.x[F::in_row(r, j)]; }, add), add);
  }
};

}  // namespace tw::sm_90a
