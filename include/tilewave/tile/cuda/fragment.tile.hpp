#pragma once

#include "tilewave/tile/cuda/memory.tile.hpp"

namespace tw::cuda {

/// A number whose only thread-dependent part is `base`.
struct Offset {
  int base, fixed;
  TW_INLINE constexpr operator int() const { return base + fixed; }
};
/// from - to. A conversion takes as long as an exponential; this way all of a thread's columns share one.
TW_INLINE float difference(int from, const Offset& to) { return static_cast<float>(from - to.base) - static_cast<float>(to.fixed); }

/// R x C accumulators in the layout of mma and wgmma. Each warp holds `WarpRows` rows of C / `ColumnWarps` columns: warp w holds the rows
/// from w % (R / WarpRows) * WarpRows on; warps w, w + R / WarpRows, ... hold neighbouring columns of the same rows. Within 16 rows of a
/// warp, a quad of lanes holds two rows (r and r + 8), and a thread two neighbouring columns of every eight. A thread's elements are
/// ordered by 16 rows, then groups of 8 columns, then the two rows, then the two columns.
template <class T, int R, int C, int WarpRows = 16, int ColumnWarps = 1>
struct Fragment {
  static_assert(WarpRows % 16 == 0 && R % WarpRows == 0, "a Fragment's rows are dealt to warps in multiples of 16");
  static_assert(C % (8 * ColumnWarps) == 0, "a Fragment has a multiple of 8 columns for each warp");
  static constexpr TileKind kind = TileKind::fragment;
  static constexpr int rows = R;
  static constexpr int cols = C;
  static constexpr int warp_rows = WarpRows;
  static constexpr int warp_cols = C / ColumnWarps;
  static constexpr int row_warps = R / WarpRows;  ///< warps that hold the same column
  static constexpr int column_warps = ColumnWarps;
  static constexpr int warps = row_warps * column_warps;
  static constexpr int row_tiles = WarpRows / 16;
  static constexpr int tile_size = warp_cols / 2;  ///< a thread's elements in 16 rows
  static constexpr int size = row_tiles * tile_size;
  static constexpr int width = 2;                 ///< neighbours in a row: elements i, i + 1
  static constexpr int row_count = WarpRows / 8;  ///< a thread's rows
  static constexpr int row_threads = 4;           ///< neighbouring lanes that share a row
  static constexpr int share = warp_cols / 4;     ///< a thread's columns, in `pieces` pieces
  static constexpr int pieces = warp_cols / 8;
  static constexpr int piece_step = 8;  ///< columns from one of a thread's pieces to the next
  static constexpr int column_count = share;
  using Element = T;
  T x[size];

  /// The first row and the first column of the thread's warp.
  TW_INLINE static constexpr int warp_row(const Position& p) {
    return (ColumnWarps == 1 ? p.block_warp() : p.block_warp() % row_warps) * WarpRows;
  }
  TW_INLINE static constexpr int warp_col(const Position& p) { return ColumnWarps == 1 ? 0 : p.block_warp() / row_warps * warp_cols; }

  TW_INLINE static constexpr int row(const Position& p, int i) {
    if constexpr (WarpRows == 16 && ColumnWarps == 1) return p.row + i / 2 % 2 * 8;
    return warp_row(p) + p.lane / 4 + (i / tile_size * 16 + i / 2 % 2 * 8);
  }
  TW_INLINE static constexpr Offset col(const Position& p, int i) { return {p.col + warp_col(p), i % tile_size / 4 * 8 + i % 2}; }
  /// Index of the j-th element of the thread's row `r`, j < share.
  TW_INLINE static constexpr int in_row(int r, int j) { return r / 2 * tile_size + j / 2 * 4 + r % 2 * 2 + j % 2; }
  /// Index of element i's column among the thread's columns.
  TW_INLINE static constexpr int column_index(int i) { return i % tile_size / 4 * 2 + i % 2; }
  /// Index of the column range that the thread's warp holds.
  TW_INLINE static constexpr int part(const Position& p) { return ColumnWarps == 1 ? 0 : p.block_warp() / row_warps; }
};
/// Whether several warps hold a part of each row.
template <class F>
constexpr bool splits_rows_of() {
  if constexpr (requires { F::column_warps; }) return F::column_warps > 1;
  return false;
}
template <class F>
inline constexpr bool splits_rows = splits_rows_of<F>();

/// The left operand of a product in registers. 16-bit types have Fragment's layout with pairs packed: four registers hold 16 columns of 16
/// rows. With 8-bit types four registers hold 32 columns, and a thread holds four neighbours of every 16.
template <class T, int R, int C, int WarpRows = 16>
struct Operand {
  static_assert(sizeof(T) <= 2, "operands in registers are bf16, f16, fp8 or i8");
  static constexpr int rows = R;
  static constexpr int cols = C;
  static constexpr int width = 4 / static_cast<int>(sizeof(T));  ///< elements in a register, neighbours in a row
  static_assert(C % (8 * width) == 0, "an Operand has whole steps of a product: 16 columns of 16-bit elements, 32 of 8-bit ones");
  static constexpr int row_tiles = WarpRows / 16;
  static constexpr int tile_size = C / 2 / width;  ///< a thread's registers for 16 rows
  static constexpr int size = row_tiles * tile_size * width;
  static constexpr int row_count = 2 * row_tiles, row_threads = 4;
  using Element = T;
  u32 x[row_tiles * tile_size];

  TW_INLINE static constexpr int row(const Position& p, int i) {
    return Fragment<float, R, C, WarpRows>::row(p, 0) + i / width / tile_size * 16 + i / width % 2 * 8;
  }
  TW_INLINE static constexpr int col(const Position& p, int i) {
    return p.col / 2 * width + i / width % tile_size / 2 * (4 * width) + i % width;
  }
};

/// R x C elements for work without products, over a block of `Warps` warps: warp w holds rows w, w + Warps, .... With fewer rows than
/// warps, neighbouring warps share a row. If a row has fewer pieces than a warp has lanes, neighbouring rows share the warp. The lanes of a
/// row hold neighbouring pieces of `width` columns.
template <class T, int R, int C, int Warps, int Width>
struct Rows {
  static constexpr TileKind kind = TileKind::rows;
  static constexpr int warps = Warps;
  static constexpr int rows = R;
  static constexpr int cols = C;
  static constexpr int row_lanes = Width != 0 && C / Width < 32 ? C / Width : 32;  ///< the lanes of one warp that share a row
  static constexpr int warp_rows = 32 / row_lanes;                                 ///< neighbouring rows that share a warp
  static constexpr int row_warps = R < Warps ? Warps / R : 1;
  static constexpr int row_threads = row_lanes * row_warps;
  static_assert(R < Warps ? Warps % R == 0 : R % (Warps * warp_rows) == 0,
                "Rows are dealt evenly to a block's warps, or its warps to Rows");
  static_assert(row_lanes * warp_rows == 32 && (warp_rows == 1 || row_warps == 1), "a row's pieces are 1, 2, 4, ... lanes, or whole warps");
  static_assert(C % row_threads == 0, "the columns of Rows are dealt evenly to the lanes that share a row");
  static constexpr int share = C / row_threads;  ///< a thread's columns
  static constexpr int width = Width != 0 ? Width : share % 8 == 0 ? 8 : share % 4 == 0 ? 4 : share % 2 == 0 ? 2 : 1;
  static_assert(share % width == 0, "the columns of Rows are whole pieces of `Width` columns for each lane");
  static constexpr int pieces = share / width;
  static constexpr int piece_step = row_threads * width;  ///< columns from one of a thread's pieces to the next
  static constexpr int row_count = R < Warps ? 1 : R / (Warps * warp_rows);
  static constexpr int column_count = share;
  static constexpr int size = row_count * share;
  using Element = T;
  T x[size];

  TW_INLINE static constexpr int row(const Position& p, int i) {
    if constexpr (R == 1) return 0;  // the compiler does not know how many warps there are
    return (i / share * Warps + p.block_warp() / row_warps) * warp_rows + p.lane / row_lanes;
  }
  TW_INLINE static constexpr int col(const Position& p, int i) {
    return (p.block_warp() % row_warps * 32 + p.lane % row_lanes) * width + i / width % pieces * piece_step + i % width;
  }
  TW_INLINE static constexpr int in_row(int r, int j) { return r * share + j; }
  TW_INLINE static constexpr int column_index(int i) { return i % share; }
};

/// One value for each row of which a thread holds elements. The lanes that share a row hold copies.
template <class T, class Tile>
struct RowVector {
  static constexpr int size = Tile::row_count;
  static constexpr int row_threads = Tile::row_threads;
  T x[size];
  TW_INLINE static constexpr int row(const Position& p, int i) { return Tile::row(p, Tile::in_row(i, 0)); }
  TW_INLINE T& operator[](int i) { return x[i]; }
  TW_INLINE const T& operator[](int i) const { return x[i]; }
};

/// One value for each column of which a thread holds elements. Threads with the same columns hold copies.
template <class T, class Tile>
struct ColumnVector {
  static constexpr int size = Tile::column_count;
  T x[size];
  /// The tile's column of the vector's i-th value: that of element i in the thread's first row.
  TW_INLINE static constexpr int col(const Position& p, int i) { return Tile::col(p, Tile::in_row(0, i)); }
};

/// Folds one value from each of a row's `Warps` warps. All `threads` threads of the block call it, and each gets its row's result.
template <int Warps, int threads, class V, class Op>
TW_INLINE V across_warps(V value, [[maybe_unused]] Op op) {
#if TW_ON_GPU
  __shared__ V partial[threads / 32];
  const int warp = static_cast<int>(ptx::thread_index()) / 32;
  if (ptx::thread_index() % 32 == 0) partial[warp] = value;
  ptx::named_barrier(kComputeBarrier, threads);
  value = partial[warp / Warps * Warps];
  TW_UNROLL
  for (int i = 1; i < Warps; ++i) value = op(value, partial[warp / Warps * Warps + i]);
  ptx::named_barrier(kComputeBarrier, threads);  // the next reduction writes to the same memory
#endif
  return value;
}

/// One row of a tile, as block.rows() passes it on. Results are the same in every lane that shares the row.
template <class F, int kFirst = 0, int kCount = F::cols>
struct RowView {
  F& fragment;
  int r;
  static constexpr int share = F::size / F::row_count;  ///< the thread's elements of the whole row
  static constexpr int length = share * kCount / F::cols;

  /// `Count` columns from `First` on: multiples of 8 in a Fragment.
  template <int First, int Count>
  TW_INLINE auto columns() const {
    static_assert(!splits_rows<remove_const<F>>, TW_SPLIT_ROW);
    static_assert(First % F::piece_step == 0 && Count % F::piece_step == 0 && First + Count <= kCount,
                  "columns() are whole pieces of a row");
    return RowView<F, kFirst + First, Count>{fragment, r};
  }

  template <class V, class Op>
  TW_INLINE static V across(V value, Op op) {
    static_assert(!splits_rows<remove_const<F>>, TW_SPLIT_ROW);
    return across_lanes(value, op);
  }
  template <class V, class Op>
  TW_INLINE static V across_lanes(V value, Op op) {
    TW_UNROLL
    for (int mask = min(F::row_threads, 32) / 2; mask > 0; mask /= 2) value = op(value, ptx::shuffle_xor(value, mask));
    if constexpr (F::row_threads > 32) value = across_warps<F::row_threads / 32, F::rows * F::row_threads>(value, op);
    return value;
  }
  /// Folds `value(j)` of the thread's elements in several chains: a single chain would take its length times the latency of an operation.
  template <class Value, class Op>
  TW_INLINE static auto fold(Value value, Op op) {
    constexpr int chains = length >= 8 ? 4 : 1;
    decltype(value(0)) result[chains];
    TW_UNROLL
    for (int j = 0; j < length; ++j) {
      const auto x = value(j);
      result[j % chains] = j < chains ? x : op(result[j % chains], x);
    }
    return chains == 4 ? op(op(result[0], result[1 % chains]), op(result[2 % chains], result[3 % chains])) : result[0];
  }
  /// The largest f(x), an integer or float. NaNs are ignored unless all elements are NaN.
  template <class Fn>
  TW_INLINE auto max(Fn f) const {
    const auto larger = [](auto a, auto b) { return tw::max(a, b); };
    return across(fold([&](int j) { return f(fragment.x[index(j)]); }, larger), larger);
  }
  TW_INLINE auto max() const {
    return max([](auto x) { return x; });
  }
  /// The largest of this thread's elements of the row.
  TW_INLINE auto partial_max() const {
    return fold([&](int j) { return fragment.x[index(j)]; }, [](auto a, auto b) { return tw::max(a, b); });
  }
  /// The sum of f(x).
  template <class Fn>
  TW_INLINE auto sum(Fn f) const {
    const auto add = [](auto a, auto b) { return a + b; };
    return across(fold([&](int j) { return f(fragment.x[index(j)]); }, add), add);
  }
  TW_INLINE auto sum() const {
    return sum([](auto x) { return x; });
  }
  /// f(f(a, b), c)... over the row's elements, in an order that is the same in every run. f must be associative and commutative.
  template <class Fn>
  TW_INLINE auto fold(Fn f) const {
    return across(fold([&](int j) { return fragment.x[index(j)]; }, f), f);
  }
  /// x = f(x) for the row's elements. Returns the sum of this thread's results; block.complete() adds up the threads' sums, once after a
  /// loop.
  template <class Fn>
  TW_INLINE float map_partial_sum(Fn f) const {
    return fold(
        [&](int j) {
          float& x = fragment.x[index(j)];
          x = f(x);
          return x;
        },
        [](float a, float b) { return a + b; });
  }
  /// x = f(x) for the row's elements. Returns the sum of the results.
  template <class Fn>
  TW_INLINE float map_sum(Fn f) const {
    map(f);
    return sum();
  }
  template <class Fn>
  TW_INLINE void map(Fn f) const {
    TW_UNROLL
    for (int j = 0; j < length; ++j) fragment.x[index(j)] = f(fragment.x[index(j)]);
  }
  /// x = f(x) for the row's elements. Returns false if all of this thread's results are negative. It looks at sign bits: a three-input
  /// logic instruction takes two elements at once, a maximum only one.
  template <class Fn>
  TW_INLINE bool map_any_positive(Fn f) const {
    u32 sign = 1u << 31;
    TW_UNROLL
    for (int j = 0; j < length; ++j) {
      float& x = fragment.x[index(j)];
      x = f(x);
      sign &= bit_cast<u32>(x);
    }
    return sign == 0;
  }

 private:
  /// Index in the fragment of the thread's j-th element of the row.
  TW_INLINE constexpr int index(int j) const { return F::in_row(r, share * kFirst / F::cols + j); }
};

}  // namespace tw::cuda
