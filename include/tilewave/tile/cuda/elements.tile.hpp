#pragma once

#include "tilewave/tile/cuda/buffers.tile.hpp"
#include "tilewave/tile/cuda/threads.tile.hpp"
#include "tilewave/tile/cuda/widened.tile.hpp"

namespace tw::cuda {

/// A block's operations on the elements and rows of tiles in registers.
template <int kWarps>
struct Elements : Threads<kWarps> {
  using Base = Threads<kWarps>;
  using Base::at, Base::here, Base::sync;

  /// Restores the order of columns that were loaded from a tensor to which Fragments had been added: see even_first().
  template <class T, int R, int C, int Warps, int Width>
  TW_INLINE void interleave(Rows<T, R, C, Warps, Width>& rows) const {
    using Values = Rows<T, R, C, Warps, Width>;
    static_assert(Values::width == 8, TW_INTERLEAVED);
    Base::template own<Values>();
    TW_UNROLL
    for (int n = 0; n < Values::size; n += 8) {
      T x[8];
      TW_UNROLL
      for (int k = 0; k < 8; ++k) x[k] = rows.x[n + even_first(k)];
      TW_UNROLL
      for (int k = 0; k < 8; ++k) rows.x[n + k] = x[k];
    }
  }
  template <class F>
  TW_INLINE void fill(F& fragment, float value) const {
    Base::template own<F>();
    TW_UNROLL
    for (int i = 0; i < F::size; ++i) fragment.x[i] = to<typename F::Element>(value);
  }
  template <class T, class Tile>
  TW_INLINE void fill(RowVector<T, Tile>& vector, float value) const {
    for (auto& x : vector.x) x = value;
  }
  /// Calls f(row, col, x) for every element of the block's tile, or f(row, col, x, y) for two tiles with the same layout.
  template <class F, class Fn>
  TW_INLINE void for_each(F& fragment, Fn f) const {
    Base::template own<F>();
    TW_UNROLL
    for (int i = 0; i < F::size; ++i) f(F::row(at, i), F::col(at, i), fragment.x[i]);
  }
  /// The same for `kCount` columns of a Fragment from `kFirst` on, both multiples of 8.
  template <int kFirst, int kCount, class T, int R, int C, int WarpRows, int ColumnWarps, class Fn>
  TW_INLINE void for_columns(Fragment<T, R, C, WarpRows, ColumnWarps>& fragment, Fn f) const {
    static_assert(kFirst % 8 == 0 && kCount % 8 == 0 && kFirst + kCount <= C, "for_columns() takes whole pieces of a row");
    static_assert(ColumnWarps == 1, TW_SPLIT_ROW);
    using F = Fragment<T, R, C, WarpRows, ColumnWarps>;
    TW_UNROLL
    for (int tile = 0; tile < F::size; tile += F::tile_size) {
      TW_UNROLL
      for (int i = tile + kFirst / 2; i < tile + (kFirst + kCount) / 2; ++i) f(F::row(at, i), F::col(at, i), fragment.x[i]);
    }
  }
  /// Calls f(row, col, x, y) for pairs of a row's elements, x in column `col` and y `kDistance` columns after it. The columns of each
  /// `kPeriod` up to `kDistance` have such a partner; both are multiples of 8.
  template <int kDistance, int kPeriod, class F, class Fn>
  TW_INLINE void for_pairs(F& fragment, Fn f) const {
    static_assert(kDistance % 8 == 0 && 2 * kDistance <= kPeriod && F::cols % kPeriod == 0, "for_pairs() takes whole periods of a row");
    static_assert(F::kind == TileKind::fragment && !splits_rows<F>, TW_SPLIT_ROW);
    Base::template own<F>();
    // What f reads for a column of one period, it may need for that of the next.
    TW_UNROLL
    for (int tile = 0; tile < F::size; tile += F::tile_size) {
      TW_UNROLL
      for (int first = tile; first < tile + kDistance / 2; ++first) {
        TW_UNROLL
        for (int i = first; i < tile + F::tile_size; i += kPeriod / 2)
          f(F::row(at, i), F::col(at, i), fragment.x[i], fragment.x[i + kDistance / 2]);
      }
    }
  }
  template <class F, class Other, class Fn>
  TW_INLINE void for_each(F& first, Other& second, Fn f) const {
    Base::template own<F>();
    static_assert(F::rows == Other::rows && F::cols == Other::cols && F::size == Other::size && F::width == Other::width,
                  "tiles of two layouts");
    TW_UNROLL
    for (int i = 0; i < F::size; ++i) f(F::row(at, i), F::col(at, i), first.x[i], second.x[i]);
  }
  /// Calls f(i, row) for every row. i indexes a RowVector; `row` is a RowView.
  template <class F, class Fn>
  TW_INLINE void rows(F& fragment, Fn f) const {
    Base::template own<F>();
    TW_UNROLL
    for (int r = 0; r < F::row_count; ++r) f(r, RowView<F>{fragment, r});
  }
  /// Calls f(row, i, x) for every element x = vector[i] of a RowVector, where `row` is the row's index in the tile.
  template <class T, class Tile, class Fn>
  TW_INLINE void for_rows(RowVector<T, Tile>& vector, Fn f) const {
    const Position at = here();
    TW_UNROLL
    for (int i = 0; i < vector.size; ++i) f(vector.row(at, i), i, vector.x[i]);
  }
  /// Several threads hold copies of a RowVector's elements. Returns true in the one that should write them.
  template <class T, class Tile>
  TW_INLINE bool owns_rows(const RowVector<T, Tile>& vector) const {
    if constexpr (Tile::kind == TileKind::fragment) {
      if (Tile::warp_col(at) != 0) return false;
    }
    return ptx::thread_index() % static_cast<u32>(vector.row_threads) == 0;
  }
  /// Adds up the partial sums of map_partial_sum().
  template <class T, class Tile>
  TW_INLINE void complete(RowVector<T, Tile>& sums) const {
    for (auto& x : sums.x) x = RowView<Tile>::across(x, [](float a, float b) { return a + b; });
  }
  /// Combines the partial results of the lanes and warpgroups that share a row.
  template <class T, class Tile, class Op>
  TW_INLINE void combine_rows(RowVector<T, Tile>& vector, const RowExchange<T, Tile>& exchange, Op op) const {
    for (auto& x : vector.x) x = RowView<Tile>::across_lanes(x, op);
    exchange_rows<kWarps, Tile>(at, vector, exchange, op, [this] { sync(); });
  }
  /// x = f(x, y...) for every element: see map().
  template <class F, class Fn, class... Operands>
  TW_INLINE void map_with(F& tile, Fn f, const Operands&... operands) const {
    Base::template own<F>();
    TW_UNROLL
    for (int r = 0; r < F::row_count; ++r) {
      TW_UNROLL
      for (int n = 0; n < F::size / F::row_count; ++n) {
        const int i = F::in_row(r, n);
        tile.x[i] = f(tile.x[i], value_at<F>(operands, r, i)...);
      }
    }
  }
  /// sums[row] += the sum over columns of tile(row, col) * vector[col], for this thread's columns. complete() then adds up the partial
  /// sums.
  template <class F, class T, class U>
  TW_INLINE void add_products(RowVector<float, F>& sums, const F& tile, const ColumnVector<U, T>& vector) const {
    TW_UNROLL
    for (int r = 0; r < F::row_count; ++r) {
      const float sum = RowView<const F>::fold(
          [&](int n) {
            const int e = F::in_row(r, n);
            return static_cast<float>(tile.x[e]) * static_cast<float>(vector.x[F::column_index(e)]);
          },
          [](float a, float b) { return a + b; });
      sums.x[r] += sum;
    }
  }
  /// f(row) for each of N rows that widen() is to widen, in the threads that will.
  template <int N, class Fn>
  TW_INLINE auto values_of_rows(Fn f) const {
    QuadRows<N, Base::threads, decltype(f(0))> rows(Base::thread());
    TW_UNROLL
    for (int n = 0; n < rows.count; ++n) {
      if (rows.exists(n)) rows.x[n] = f(rows.row(n));
    }
    return rows;
  }
  /// tile(r, c) = code(r, c) * factor(x, c), where x is the value of row r, rounded once to f16; zeros from row `end` on. The factor is an
  /// f16, the same for every 64 columns. The tile's slot has been taken or peeked at. As after store() to a Buffer, a fence() and a barrier
  /// must come before products.
  template <class Codes, int R, int C, class Value, class Fn>
  TW_INLINE void widen(Widened<Codes, R, C>& tile, const QuadRows<R, Base::threads, Value>& rows, int end, Fn factor) const {
    cuda::widen(Base::thread(), tile, rows, end, factor);
  }
  /// Returns true if f holds for any of the vector's elements that this warp holds. Warps may differ.
  template <class T, class Tile, class Fn>
  TW_INLINE bool any(const RowVector<T, Tile>& vector, Fn f) const {
    bool found = false;
    for (const auto& x : vector.x) found = found || f(x);
    return ptx::any(found);
  }

 protected:
  /// The value of an operand of map() for element i, which is in the thread's row r.
  template <class F, class T, class Tile>
  static TW_INLINE T value_at(const RowVector<T, Tile>& vector, int r, int) {
    static_assert(Tile::row_count == F::row_count, "a RowVector of a tile with other rows");
    return vector.x[r];
  }
  template <class F, class T, class Tile>
  static TW_INLINE T value_at(const ColumnVector<T, Tile>& vector, int, int i) {
    static_assert(Tile::column_count == F::column_count, "a ColumnVector of a tile with other columns");
    return vector.x[F::column_index(i)];
  }
  template <class F, class Other>
  requires(Other::size == F::size && Other::rows == F::rows) static TW_INLINE auto value_at(const Other& tile, int, int i) {
    return tile.x[i];
  }
  template <class F>
  static TW_INLINE float value_at(float number, int, int) {
    return number;
  }
};

}  // namespace tw::cuda
