#pragma once

#include "tilewave/tile/cuda/buffers.tile.hpp"
#include "tilewave/tile/cuda/fragment.tile.hpp"
#include "tilewave/tile/cuda/memory.tile.hpp"
#include "tilewave/tile/cuda/operand.tile.hpp"
#include "tilewave/tile/cuda/scans.tile.hpp"
#include "tilewave/tile/cuda/scatter.tile.hpp"

namespace tw::cuda {

/// The role that computes, as a kernel sees it: all its warps at once. What every NVIDIA target has; a target's Block adds rings, products
/// and the ways through shared memory. `kPieceLoads`, `kPieceStores`: tensors that are bound with their Rows move in whole pieces.
template <int kWarps, bool kPieceLoads, bool kPieceStores>
struct BlockBase {
  int first_thread;  ///< of those that compute: the producer's come before
  Position at = Position::of(ptx::thread_index() - static_cast<u32>(first_thread));

  /// The accumulators rounded to T, as left operand of the next product.
  template <class T, class S, int R, int C, int WarpRows>
  TW_INLINE void convert(Operand<T, R, C, WarpRows>& to, const Fragment<S, R, C, WarpRows>& from) const {
    if constexpr (sizeof(T) == 1) {
      convert_bytes(at, to, from);
    } else {
      TW_UNROLL
      for (int i = 0; i < from.size / 2; ++i) to.x[i] = ptx::pack<T>(from.x[2 * i], from.x[2 * i + 1]);
    }
  }

  /// decode(number, scale) of a tile of codes, from its column `first` on, as left operand in registers: packed.tile.hpp. `first` is a
  /// multiple of the scales' group, or all the operand's columns lie in one group.
  template <class T, int R, int C, int WarpRows, class Codes, int Bytes, class Scales, class Decode = TimesScale>
  requires(codes_in<Codes> > 1) TW_INLINE void load(Operand<T, R, C, WarpRows>& to, const Shared<Codes, R, Bytes, Contract::columns>& from,
                                                    const Scales& scales, Decode decode = {}, int first = 0) const {
    load_codes(at, to, from, scales, decode, first);
  }

  // Elements and rows

  template <class F>
  TW_INLINE void fill(F& fragment, float value) const {
    own<F>();
    TW_UNROLL
    for (int i = 0; i < F::size; ++i) fragment.x[i] = to<typename F::Element>(value);
  }
  template <class T, class Tile>
  TW_INLINE void fill(RowVector<T, Tile>& vector, float value) const {
    for (auto& x : vector.x) x = value;
  }
  /// f(row, col, x) for every element of the block's tile; two tiles of one layout go in step: f(row, col, x, y).
  template <class F, class Fn>
  TW_INLINE void for_each(F& fragment, Fn f) const {
    own<F>();
    TW_UNROLL
    for (int i = 0; i < F::size; ++i) f(F::row(at, i), F::col(at, i), fragment.x[i]);
  }
  /// The same for `kCount` columns of a Fragment from `kFirst` on, multiples of 8.
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
  template <class F, class Other, class Fn>
  TW_INLINE void for_each(F& first, Other& second, Fn f) const {
    own<F>();
    static_assert(F::rows == Other::rows && F::cols == Other::cols && F::size == Other::size && F::width == Other::width,
                  "tiles of two layouts");
    TW_UNROLL
    for (int i = 0; i < F::size; ++i) f(F::row(at, i), F::col(at, i), first.x[i], second.x[i]);
  }
  /// f(row, col, x, y) with y = element (row0 + row, col0 + col) of `other`, 0 outside it.
  template <class F, class G, class Fn>
  TW_INLINE void for_each_with(F& fragment, const G& other, int row0, int col0, int i, int j, Fn f) const {
    own<F>();
    const Position at = here();
    // Two loops, because one with a branch in it needs more registers for its conditions than there are.
    if (whole<F>(other, row0, col0)) {
      TW_UNROLL
      for (int e = 0; e < F::size; e += F::width) {
        const auto piece = *piece_at<F::width>(other, row0 + F::row(at, e), col0 + F::col(at, e), i, j);
        TW_UNROLL
        for (int k = 0; k < F::width; ++k) f(F::row(at, e), F::col(at, e + k), fragment.x[e + k], static_cast<float>(piece.x[k]));
      }
    } else if (other.rows > 0 && other.cols > 0) {
      TW_UNROLL
      for (int e = 0; e < F::size; ++e) {
        const int row = row0 + F::row(at, e);
        const int col = col0 + F::col(at, e);
        const bool inside = other.inside(row, col);
        const auto y = *other.template at<const typename G::Element>(inside ? row : 0, inside ? col : 0, i, j);
        f(row - row0, col - col0, fragment.x[e], inside ? static_cast<float>(y) : 0.0f);
      }
    } else {
      for_each(fragment, [&](int row, int col, auto& x) { f(row, col, x, 0.0f); });
    }
  }
  /// f(i, row) for every row; i indexes a RowVector, `row` offers max(), sum(), map(f), map_sum(f), map_partial_sum(f).
  template <class F, class Fn>
  TW_INLINE void rows(F& fragment, Fn f) const {
    own<F>();
    TW_UNROLL
    for (int r = 0; r < F::row_count; ++r) f(r, RowView<F>{fragment, r});
  }
  /// f(row number in the tile, i, x) for every element x = vector[i] of a RowVector.
  template <class T, class Tile, class Fn>
  TW_INLINE void for_rows(RowVector<T, Tile>& vector, Fn f) const {
    const Position at = here();
    TW_UNROLL
    for (int i = 0; i < vector.size; ++i) f(vector.row(at, i), i, vector.x[i]);
  }
  /// True in one of the threads that hold copies of a RowVector's elements: the one that writes them.
  template <class T, class Tile>
  TW_INLINE bool owns_rows(const RowVector<T, Tile>& vector) const {
    if constexpr (Tile::kind == TileKind::fragment) {
      if (Tile::warp_col(at) != 0) return false;
    }
    return ptx::thread_index() % static_cast<u32>(vector.row_threads) == 0;
  }
  /// Adds up the shares of map_partial_sum().
  template <class T, class Tile>
  TW_INLINE void complete(RowVector<T, Tile>& sums) const {
    for (auto& x : sums.x) x = RowView<Tile>::across(x, [](float a, float b) { return a + b; });
  }
  /// The same where several warpgroups have a part of each row.
  template <class T, class Tile>
  TW_INLINE void complete(RowVector<T, Tile>& sums, const RowExchange<T, Tile>& exchange) const {
    const auto add = [](T a, T b) { return a + b; };
    for (auto& x : sums.x) x = RowView<Tile>::across_lanes(x, add);
    exchange_rows<Tile>(at, sums, exchange, add, [this] { sync(); });
  }
  /// vector[i] = the largest element of row i, or the sum of its elements, where several warpgroups have a part of the row.
  template <class F, class T>
  TW_INLINE void row_max(F& fragment, RowVector<T, F>& vector, const RowExchange<T, F>& exchange) const {
    own<F>();
    const auto larger = [](T a, T b) { return max(a, b); };
    rows(fragment, [&](int i, auto row) { vector[i] = row.across_lanes(row.partial_max(), larger); });
    exchange_rows<F>(at, vector, exchange, larger, [this] { sync(); });
  }
  template <class F, class T>
  TW_INLINE void row_sum(F& fragment, RowVector<T, F>& vector, const RowExchange<T, F>& exchange) const {
    own<F>();
    rows(fragment, [&](int i, auto row) { vector[i] = row.map_partial_sum([](T x) { return x; }); });
    complete(vector, exchange);
  }
  /// Every row becomes its cumulative sums: x(row, col) is the sum of those up to col, or from col on.
  template <class F, class Direction = Forward>
  TW_INLINE void row_cumsum(F& tile, Direction = {}) const {
    own<F>();
    cuda::row_cumsum<is_same<Direction, Forward>>(at, tile);
  }
  /// The same of columns, over all the block's rows.
  template <class T, int R, int C, class Direction = Forward>
  TW_INLINE void column_cumsum(Fragment<T, R, C>& fragment, const Scratch<T, R, C>& scratch, Direction = {}) const {
    own<Fragment<T, R, C>>();
    cuda::column_cumsum<is_same<Direction, Forward>>(at, fragment, scratch, [this] { sync(); });
  }
  /// The same of a vector in shared memory; visible to every thread that computes when it returns.
  template <class V, class T, int N, class Direction = Forward>
  TW_INLINE void cumsum(const V& from, const VectorBuffer<T, N>& to, Direction = {}) const {
    static_assert(V::size == N, "vectors of two lengths");
    sync();
    if (at.block_warp() == 0) vector_cumsum<is_same<Direction, Forward>>(at.lane, from, to);
    sync();
  }
  /// A vector in shared memory as values of a tile's rows or columns. Of one in a slot all warps of the warpgroup have read when it
  /// returns, so that the slot may be released.
  template <class T, class Tile, int N>
  TW_INLINE void load(RowVector<T, Tile>& to, const SharedVector<T, N>& from) const {
    load_vector(at, to, from);
    ptx::named_barrier(kWarpgroupBarrier + at.warpgroup, kWarpgroupThreads);
  }
  template <class T, class Tile, int N>
  TW_INLINE void load(RowVector<T, Tile>& to, const VectorBuffer<T, N>& from) const {
    load_vector(at, to, from);
  }
  template <class T, class Tile, int N>
  TW_INLINE void load(ColumnVector<T, Tile>& to, const SharedVector<T, N>& from) const {
    load_vector(at, to, from);
    ptx::named_barrier(kWarpgroupBarrier + at.warpgroup, kWarpgroupThreads);
  }
  template <class T, class Tile, int N>
  TW_INLINE void load(ColumnVector<T, Tile>& to, const VectorBuffer<T, N>& from) const {
    load_vector(at, to, from);
  }
  /// Visible to every thread that computes when it returns.
  template <class T, class Tile, int N>
  TW_INLINE void store(const RowVector<T, Tile>& from, const VectorBuffer<T, N>& to) const {
    static_assert(N == Tile::rows, "a vector has an element for each row");
    sync();
    if (owns_rows(from)) {
      TW_UNROLL
      for (int i = 0; i < from.size; ++i) to[from.row(at, i)] = from.x[i];
    }
    sync();
  }
  /// A Fragment into a Buffer, and back: by ordinary stores and loads. Other threads see what is stored after a barrier.
  template <class F, class T, int R, int C, Contract contract>
  TW_INLINE void store(const F& from, const Buffer<T, R, C, contract>& to) const {
    static_assert(F::rows == R && F::cols == C, "a Buffer has its Fragment's shape");
    own<F>();
    store_pairs(at, from, to.tile());
  }
  /// to(col, row) = from(row, col).
  template <class F, class T, int R, int C, Contract contract>
  TW_INLINE void store_transposed(const F& from, const Buffer<T, R, C, contract>& to) const {
    static_assert(F::rows == C && F::cols == R, "a Buffer has its Fragment's shape, transposed");
    own<F>();
    store_transposed_elements(at, from, to.tile());
  }
  template <class F, class T, int R, int C, Contract contract>
  TW_INLINE void load(F& to, const Buffer<T, R, C, contract>& from) const {
    static_assert(F::rows == R && F::cols == C, "a Buffer has its Fragment's shape");
    own<F>();
    load_pairs(at, to, from.tile());
  }
  /// Nothing but threads reads shared memory here: barriers are enough.
  TW_INLINE void fence() const {}
  TW_INLINE void sync_warpgroup() const { ptx::named_barrier(kWarpgroupBarrier + at.warpgroup, kWarpgroupThreads); }
  /// Adds the Buffer's elements to the tensor's, from (row, col) on; those outside are dropped.
  template <int R, int C, Contract contract, class G>
  TW_INLINE void reduce_add(const Buffer<float, R, C, contract>& from, const G& to, int row, int col, int i = 0, int j = 0) const {
    parallel(R * C, [&](int n) {
      const int r = n / C, c = n % C;
      if (to.inside(row + r, col + c)) ptx::atomic_add(to.template at<float>(row + r, col + c, i, j), from.at(r, c));
    });
  }
  template <int Left>
  TW_INLINE void wait_stores(Constant<Left>) const {}
  /// f(i) for every i < count, dealt to the block's threads: it may read and write the Buffer's elements, of which no two may clash. They
  /// are visible to every thread that computes when it returns.
  template <class T, int R, int C, Contract contract, class Fn>
  TW_INLINE void update(const Buffer<T, R, C, contract>&, int count, Fn f) const {
    parallel(count, f);
    sync();
  }
  /// x = f(x, y...) for every element, where each y is the element's value in an operand: a RowVector's of its row, a ColumnVector's of its
  /// column, another tile's of the same layout, or a number.
  template <class F, class Fn>
  TW_INLINE void map(F& tile, Fn f) const {
    map_with(tile, f);
  }
  template <class F, class A, class Fn>
  TW_INLINE void map(F& tile, const A& a, Fn f) const {
    map_with(tile, f, a);
  }
  template <class F, class A, class B, class Fn>
  TW_INLINE void map(F& tile, const A& a, const B& b, Fn f) const {
    map_with(tile, f, a, b);
  }
  template <class F, class A, class B, class C, class Fn>
  TW_INLINE void map(F& tile, const A& a, const B& b, const C& c, Fn f) const {
    map_with(tile, f, a, b, c);
  }
  template <class F, class A, class B, class C, class D, class Fn>
  TW_INLINE void map(F& tile, const A& a, const B& b, const C& c, const D& d, Fn f) const {
    map_with(tile, f, a, b, c, d);
  }
  /// sums[row] += sum over columns of tile(row, col) * vector[col], of this thread's share of the row: complete() adds the shares up.
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
  /// The same of a tile and a vector in global memory, which the CPU reads where they lie: tile(row, col) is that of `tile` at (row0 + row,
  /// col0 + col, tile_i), vector[col] that of `vector` at (0, col0 + col, vector_i).
  template <class F, class G, class H>
  TW_INLINE void add_products(RowVector<float, F>& sums, const G& tile, int row0, int tile_i, const H& vector, int vector_i,
                              int col0) const {
    F rows;
    ColumnVector<typename H::Element, F> columns;
    load(rows, tile, row0, col0, tile_i);
    load(columns, vector, 0, col0, vector_i);
    add_products(sums, rows, columns);
  }
  /// to(row, n) = f(from(row, 2 n), from(row, 2 n + 1)).
  template <class T, int R, int C, int WarpRows, int ColumnWarps, class Fn>
  TW_INLINE void pairs(Fragment<T, R, C / 2, WarpRows, ColumnWarps>& to, const Fragment<T, R, C, WarpRows, ColumnWarps>& from, Fn f) const {
    using From = Fragment<T, R, C, WarpRows, ColumnWarps>;
    static_assert(From::warp_cols % 16 == 0, "pairs() halves the columns, which stay a multiple of 8");
    // A thread has a pair of every eight columns, and wants two neighbouring results of every eight: those of two neighbours in its quad.
    const int quad = at.lane & ~3;
    const int low = quad + at.lane % 2 * 2;
    const bool second = at.lane % 4 >= 2;
    TW_UNROLL
    for (int group = 0; group < From::size / 8; ++group) {
      TW_UNROLL
      for (int r = 0; r < 2; ++r) {
        const T* x = from.x + group * 8 + r * 2;
        const T first = f(x[0], x[1]), last = f(x[4], x[5]);
        TW_UNROLL
        for (int n = 0; n < 2; ++n) {
          const T of_first = ptx::shuffle(first, low + n), of_last = ptx::shuffle(last, low + n);
          to.x[group * 4 + r * 2 + n] = second ? of_last : of_first;
        }
      }
    }
  }
  /// vector[col] = sum of the column over all the block's rows.
  template <class T, class F>
  TW_INLINE void column_sum(const F& fragment, ColumnVector<T, F>& vector, const Scratch<T, F::rows, F::cols>& scratch) const {
    reduce_columns(fragment, vector, scratch.offset, [](float a, float b) { return a + b; });
  }
  /// vector[col] = largest element of the column.
  template <class T, class F>
  TW_INLINE void column_max(const F& fragment, ColumnVector<T, F>& vector, const Scratch<T, F::rows, F::cols>& scratch) const {
    reduce_columns(fragment, vector, scratch.offset, [](float a, float b) { return max(a, b); });
  }
  /// vector[col] = f(f(a, b), c)... of the column's elements, in an order that is the same in every run; f must be associative and
  /// commutative.
  template <int R, int C, int Warps, int Width, class Fn>
  TW_INLINE void column_fold(const Rows<float, R, C, Warps, Width>& rows, ColumnVector<float, Rows<float, R, C, Warps, Width>>& vector,
                             Fn f) const {
    using F = Rows<float, R, C, Warps, Width>;
    static_assert(F::warp_rows == 1, "column_fold() is for rows of whole warps");
    constexpr int warps = Warps / F::row_warps;  // that hold a column
    TW_UNROLL
    for (int n = 0; n < vector.size; ++n) {
      vector.x[n] = rows.x[n];
      TW_UNROLL
      for (int r = 1; r < F::row_count; ++r) vector.x[n] = f(vector.x[n], rows.x[F::in_row(r, n)]);
    }
    if constexpr (warps > 1) {
#if TW_ON_GPU
      // Pieces of up to 16 bytes, and the lanes' side by side.
      constexpr int piece = F::width % 4 == 0 ? 4 : F::width;
      __shared__ Piece<float, piece> partial[warps][C / piece];
      const int warp = at.block_warp() / F::row_warps;
      TW_UNROLL
      for (int n = 0; n < vector.size; n += piece) {
        Piece<float, piece> mine;
        TW_UNROLL
        for (int k = 0; k < piece; ++k) mine.x[k] = vector.x[n + k];
        partial[warp][vector.col(at, n) / piece] = mine;
      }
      sync();
      TW_UNROLL
      for (int n = 0; n < vector.size; n += piece) {
        TW_UNROLL
        for (int w = 0; w < warps; ++w) {
          const Piece<float, piece> other = partial[w][vector.col(at, n) / piece];
          TW_UNROLL
          for (int k = 0; k < piece; ++k) vector.x[n + k] = w == 0 ? other.x[k] : f(vector.x[n + k], other.x[k]);
        }
      }
      sync();  // the next fold writes there
#endif
    }
  }
  /// to(col, row) = from(row, col), through shared memory. Rows of both are lines of 128 bytes or multiples.
  template <class T, int R, int C, int Warps, int Width>
  TW_INLINE void transpose([[maybe_unused]] const Rows<T, R, C, Warps, Width>& from,
                           [[maybe_unused]] Rows<T, C, R, Warps, Width>& to) const {
#if TW_ON_GPU
    using From = Rows<T, R, C, Warps, Width>;
    using To = Rows<T, C, R, Warps, Width>;
    constexpr int pieces = R / Width;  // of a row of `to`
    constexpr int line_pieces = 128 / (Width * static_cast<int>(sizeof(T)));
    static_assert(From::width == Width && pieces % line_pieces == 0, "a transposition needs Rows of stated widths and whole lines");
    // Shared memory holds the rows of `to`. The lanes that write one element each write to every Width-th row: pieces are exchanged within
    // lines so that these rows' differ in banks.
    __shared__ Piece<T, Width> shared[C * pieces];
    const auto place = [](u32 row, u32 piece) { return row * pieces + (piece ^ row / Width % line_pieces); };
    TW_UNROLL
    for (int e = 0; e < From::size; e += Width) {
      const u32 row = static_cast<u32>(From::col(at, e)), col = static_cast<u32>(From::row(at, e));
      Piece<T, Width>* const first = shared + place(row, col / Width);
      TW_UNROLL
      for (int k = 0; k < Width; ++k) first[k * pieces].x[col % Width] = from.x[e + k];
    }
    sync();
    TW_UNROLL
    for (int e = 0; e < To::size; e += Width) {
      const Piece<T, Width> piece = shared[place(static_cast<u32>(To::row(at, e)), static_cast<u32>(To::col(at, e)) / Width)];
      TW_UNROLL
      for (int k = 0; k < Width; ++k) to.x[e + k] = piece.x[k];
    }
    sync();  // the next transposition writes there
#endif
  }
  /// True when f holds for any of the vector's elements that this warp holds; warps may differ.
  template <class T, class Tile, class Fn>
  TW_INLINE bool any(const RowVector<T, Tile>& vector, Fn f) const {
    bool found = false;
    for (const auto& x : vector.x) found = found || f(x);
    return ptx::any(found);
  }

  // Global memory

  /// Elements from (row, col) on; `fill` outside the tensor.
  template <class F, class G>
  TW_INLINE void load(F& to, const G& from, int row, int col, int i = 0, int j = 0) const {
    for_each_with(to, from, row, col, i, j, [](int, int, auto& x, float y) { x = tw::to<remove_const_reference<decltype(x)>>(y); });
  }
  template <class T, int R, int C, int Warps, int Width, class G>
  TW_INLINE void load(Rows<T, R, C, Warps, Width>& to, const G& from, int row0, int col0, int i = 0, int j = 0, Fill fill = {}) const {
    gather(
        to, from, [row0](int row) { return row0 + row; }, col0, i, j, fill);
  }
  /// Row r of the tile is row row_of(r) of the tensor.
  template <class T, int R, int C, int Warps, int Width, class G, class RowOf>
  TW_INLINE void gather(Rows<T, R, C, Warps, Width>& to, const G& from, RowOf row_of, int col0, int i = 0, int j = 0,
                        Fill fill = {}) const {
    using F = Rows<T, R, C, Warps, Width>;
    own<F>();
    using E = typename G::Element;
    const Position at = here();
    Words<E, F::width> words[F::row_count][F::pieces];
    // Loads stand together, without branches between them, so that all are on their way at once; what follows is the same for all ways.
    if constexpr (moves_in_words<G, kPieceLoads>) {
      gather_in_words<F>(words, from, row_of, col0, i, j, value_of<E>(fill));
    } else {
      TW_UNROLL
      for (int r = 0; r < F::row_count; ++r)
        load_row<F>(words[r], from, row_of(F::row(at, F::in_row(r, 0))), col0 + F::col(at, 0), i, j, value_of<E>(fill));
    }
    TW_UNROLL
    for (int r = 0; r < F::row_count; ++r) {
      TW_UNROLL
      for (int n = 0; n < F::pieces; ++n) words[r][n].unpack(to.x + F::in_row(r, n * F::width));
    }
  }
  template <class F, class G>
  TW_INLINE void load(F& to, const G& from, int row, int col, Fill fill) const {
    load(to, from, row, col, 0, 0, fill);
  }
  /// The values of the columns from `col` on, which row `row` of the tensor holds (row 0 of a vector); `fill` outside it.
  template <class T, class Tile, class G>
  TW_INLINE void load(ColumnVector<T, Tile>& to, const G& from, int row, int col, int i = 0, int j = 0, Fill fill = {}) const {
    using E = typename G::Element;
    const Position at = here();
    Words<E, Tile::width> words[Tile::pieces];
    load_row<Tile>(words, from, row, col + to.col(at, 0), i, j, value_of<E>(fill));
    TW_UNROLL
    for (int n = 0; n < Tile::pieces; ++n) words[n].unpack(to.x + n * Tile::width);
  }
  /// The values of the rows from `row` on, which column `col` of the tensor holds; `fill` outside it.
  template <class T, class Tile, class G>
  TW_INLINE void load(RowVector<T, Tile>& to, const G& from, int row, int col, int i = 0, int j = 0, Fill fill = {}) const {
    using E = typename G::Element;
    const Position at = here();
    TW_UNROLL
    for (int n = 0; n < to.size; ++n) {
      const int r = row + to.row(at, n);
      to.x[n] = from.inside(r, col) ? tw::to<T>(*from.template at<const E>(r, col, i, j)) : tw::to<T>(fill.value);
    }
  }
  /// The vector's values into column `col`, from row `row` on.
  template <class T, class Tile, class G>
  TW_INLINE void store(const RowVector<T, Tile>& from, const G& to, int row, int col, int i = 0, int j = 0) const {
    using E = typename G::Element;
    if (!owns_rows(from)) return;
    const Position at = here();
    TW_UNROLL
    for (int n = 0; n < from.size; ++n) {
      const int r = row + from.row(at, n);
      if (to.inside(r, col)) *to.template at<E>(r, col, i, j) = tw::to<E>(from.x[n]);
    }
  }
  /// One element as f32, which must lie inside the tensor; every thread gets it.
  template <class G>
  TW_INLINE float value(const G& from, int row, int col, int i = 0, int j = 0) const {
    return static_cast<float>(*from.template at<const typename G::Element>(row, col, i, j));
  }
  /// map(tile, operands..., f) and store(tile, to, row0, col0, i, j): on a CPU in pieces, so that memory takes one while the next is
  /// computed.
  template <class F, class G, class Fn, class... Operands>
  TW_INLINE void map_store(F& tile, const G& to, int row0, int col0, int i, int j, Fn f, const Operands&... operands) const {
    map_with(tile, f, operands...);
    store(tile, to, row0, col0, i, j);
  }
  /// Elements outside the tensor are dropped; each is rounded to the tensor's type.
  template <class F, class G>
  TW_INLINE void store(const F& from, const G& to, int row0, int col0, int i = 0, int j = 0) const {
    store_rows(from, to, row0, col0, i, j, kAllRows);
  }
  template <class T, int R, int C, int Warps, int Width, class G>
  TW_INLINE void store(const Rows<T, R, C, Warps, Width>& from, const G& to, int row0, int col0, int i = 0, int j = 0) const {
    using F = Rows<T, R, C, Warps, Width>;
    own<F>();
    using E = typename G::Element;
    const Position at = here();
    if constexpr (moves_in_words<G, kPieceStores>) {
      const bool stored = in_widest_words<F::width>(to, col0, [&](auto size) {
        TW_UNROLL
        for (int r = 0; r < F::row_count; ++r) {
          const int row = row0 + F::row(at, F::in_row(r, 0));
          store_row_in_words<F, decltype(size)::value>(from.x + F::in_row(r, 0), to, row, col0 + F::col(at, 0), i, j);
        }
      });
      if (stored) return;
    }
    TW_UNROLL
    for (int r = 0; r < F::row_count; ++r) {
      const int row = row0 + F::row(at, F::in_row(r, 0)), col = col0 + F::col(at, 0);
      if (pieces<F, kPieceStores>(to, col0)) {
        E* const first = to.template piece_at<E>(row, col, i, j);
        TW_UNROLL
        for (int n = 0; n < F::pieces; ++n) {
          Words<E, F::width> words;
          words.pack(from.x + F::in_row(r, n * F::width));
          if (to.inside(row, col + n * F::piece_step)) words.store(first + n * F::piece_step);
        }
      } else {
        TW_UNROLL
        for (int n = 0; n < F::share; ++n) {
          const int c = ptx::opaque(col + n / F::width * F::piece_step + n % F::width);
          if (to.inside(row, c)) *to.template at<E>(row, c, i, j) = tw::to<E>(from.x[F::in_row(r, n)]);
        }
      }
    }
  }
  /// Adds each element to the tensor's: scatter_add() to neighbouring rows.
  template <class F, class G>
  TW_INLINE void atomic_add(const F& from, const G& to, int row0, int col0, int i = 0, int j = 0) const {
    scatter_add(
        from, to, [row0](int row) { return row0 + row; }, col0, i, j);
  }
  /// Stores row r of the tile as row row_of(r) of the tensor, from column `col0` on. Elements outside the tensor are dropped: -1 drops a
  /// row.
  template <class F, class G, class RowOf>
  TW_INLINE void scatter(const F& from, const G& to, RowOf row_of, int col0, int i = 0, int j = 0) const {
    own<F>();
    scatter_rows<Replace>(here(), from, to, row_of, col0, i, j);
  }
  /// The same, but adds to the tensor's elements (f32, f16 or bf16), in any order. Each sum is rounded to the tensor's type.
  template <class F, class G, class RowOf>
  TW_INLINE void scatter_add(const F& from, const G& to, RowOf row_of, int col0, int i = 0, int j = 0) const {
    own<F>();
    scatter_rows<Add>(here(), from, to, row_of, col0, i, j);
  }

  /// All threads that compute have arrived.
  TW_INLINE void sync() const { ptx::named_barrier(kComputeBarrier, threads); }

  // What the block's threads share: counters and lists. Every thread calls these, but for count() and append().

  /// f(i) for every i < count, dealt to the block's threads.
  template <class Fn>
  TW_INLINE void parallel(int count, Fn f) const {
    for (int i = thread(); i < count; i += threads) f(i);
  }
  /// Waits until all have done with the counters; they are 0 when it returns.
  template <int N>
  TW_INLINE void clear(const Histogram<N>& histogram) const {
    sync();
    parallel(N, [&](int i) { histogram.counts()[i] = 0; });
    sync();
  }
  template <int N>
  TW_INLINE void count(const Histogram<N>& histogram, int counter) const {
    ptx::fetch_add_shared(histogram.counts() + counter, 1);
  }
  /// Waits until all have counted, then finds where the n-th is, n > 0; at least n were counted. A thread has neighbouring counters, the
  /// first thread the last ones: a scan of the threads' sums, within warps and over them, tells in whose counters it is.
  template <int N>
  TW_INLINE Located locate(const Histogram<N>& histogram, int n) const {
    static_assert(N % threads == 0, "the counters of a histogram are dealt evenly to the block's threads");
    constexpr int share = N / threads;
    sync();
    const u32* const last = histogram.counts() + (N - 1 - thread() * share);
    int own = 0;
    TW_UNROLL
    for (int i = 0; i < share; ++i) own += static_cast<int>(last[-i]);
    int until = own;  // counted by this lane and those before it
    TW_UNROLL
    for (int distance = 1; distance < 32; distance *= 2) {
      const int before = ptx::shuffle(until, at.lane - distance);
      if (at.lane >= distance) until += before;
    }
    if (at.lane == 31) histogram.warp_sums()[at.block_warp()] = until;
    sync();
    for (int warp = 0; warp < at.block_warp(); ++warp) until += histogram.warp_sums()[warp];
    int above = until - own;
    if (above < n && n <= until) {
      int i = 0;
      while (above + static_cast<int>(last[-i]) < n) above += static_cast<int>(last[-i++]);
      *histogram.located() = {N - 1 - thread() * share - i, above, static_cast<int>(last[-i])};
    }
    sync();
    return *histogram.located();
  }
  /// Waits until all have done with the list; it is empty when it returns.
  template <class T, int N>
  TW_INLINE void clear(const List<T, N>& list) const {
    sync();
    if (thread() == 0) *list.size() = 0;
    sync();
  }
  /// In any order; of more than N values some are lost.
  template <class T, int N>
  TW_INLINE void append(const List<T, N>& list, T value) const {
    const int i = static_cast<int>(ptx::fetch_add_shared(list.size(), 1));
    if (i < N) list[i] = value;
  }
  /// Waits until all have appended: the number of values, which may be read then.
  template <class T, int N>
  TW_INLINE int size(const List<T, N>& list) const {
    sync();
    return min(static_cast<int>(*list.size()), N);
  }
  /// Waits until all have appended and sorts, so that the n largest values come first, the largest at the very front; they may be read when
  /// it returns. Bitonic: of a power of two of values, padded with zeros.
  template <int N>
  TW_INLINE void sort(const List<u64, N>& list, int = N) const {
    static_assert((N & (N - 1)) == 0, "a list that is sorted has room for a power of two of values");
    const int used = size(list);
    int padded = 2;
    while (padded < used) padded *= 2;
    parallel(padded - used, [&](int i) { list[used + i] = 0; });
    sync();
    TW_NO_UNROLL
    for (int run = 2; run <= padded; run *= 2) {
      TW_NO_UNROLL
      for (int stride = run / 2; stride > 0; stride /= 2) {
        parallel(padded / 2, [&](int i) {
          const int low = 2 * i - (i & (stride - 1));
          const u64 a = list[low], b = list[low + stride];
          const bool descending = (low & run) == 0;
          if ((a < b) == descending) {
            list[low] = b;
            list[low + stride] = a;
          }
        });
        sync();
      }
    }
  }

  /// Prints the tile, a line a row, through the device's printf buffer. Slow; for looking.
  template <class F>
  TW_INLINE void print([[maybe_unused]] const char* name, [[maybe_unused]] F& fragment) const {
#if TW_ON_GPU
    for (int row = 0; row < F::rows; ++row) {
      if (ptx::block_index() == 0 && at.warpgroup + at.warp + at.lane == 0) printf("%s[%d]:", name, row);
      for (int col = 0; col < F::cols; ++col) {
        sync();
        for_each(fragment, [&](int r, int c, auto& x) {
          if (r == row && c == col && ptx::block_index() == 0) printf(" %g", static_cast<double>(static_cast<float>(x)));
        });
      }
      sync();
      if (ptx::block_index() == 0 && at.warpgroup + at.warp + at.lane == 0) printf("\n");
    }
#endif
  }

 protected:
  static constexpr int threads = kWarps * 32;
  template <class F>
  static constexpr void own() {
    if constexpr (F::kind == TileKind::fragment) {
      static_assert(F::warps == kWarps, TW_FRAGMENT_ROWS);
      static_assert(accumulates<typename F::Element>, TW_ACCUMULATES);
    } else {
      static_assert(F::warps == kWarps, "Rows are dealt to the kernel's warps: give Rows the kernel's `warps`");
    }
  }
  static constexpr int kAllRows = 0x7fffffff;  ///< an end that no row is behind: the tensor's own counts
  /// The thread's number among those that compute.
  TW_INLINE int thread() const { return at.block_warp() * 32 + at.lane; }

  /// The position, computed here and now: for code outside the main loop, through which nothing of it shall be kept in registers.
  TW_INLINE Position here() const {
    return Position::of(static_cast<u32>(ptx::opaque(static_cast<int>(ptx::thread_index())) - first_thread));
  }

  /// Neighbours in a row, moved as one word (two for 8 f32).
  template <class T, int width>
  struct alignas(width * sizeof(T) < 16 ? width * sizeof(T) : 16) Piece {
    T x[width];
  };
  /// A tile's pieces from column `col0` on are aligned, and each lies inside the tensor or outside: the same answer for every thread. Of a
  /// tensor that is bound with its Rows it is part of the kernel's variant, `kWhole`.
  template <class F, bool kWhole, class G>
  static TW_INLINE bool pieces(const G& tensor, int col0) {
    if constexpr (moves_in_pieces<typename G::TileType>) {
      static_assert(!kWhole || G::TileType::width % F::width == 0, "a tensor is bound with the Rows that are copied, or wider ones");
      return kWhole;
    } else {
      return tensor.template whole_pieces<typename G::Element, F::width>() && col0 % F::width == 0;
    }
  }
  /// Zeros without a conversion: the usual case.
  template <class E>
  static TW_INLINE E value_of(Fill fill) {
    return fill.value == 0.0f ? E{} : tw::to<E>(fill.value);
  }
  /// What a thread has of a row of F: its pieces from `col` on; `otherwise` outside the tensor.
  template <class F, class E, class G>
  TW_INLINE void load_row(Words<E, F::width>* words, const G& from, int row, int col, int i, int j, E otherwise) const {
    if (pieces<F, kPieceLoads>(from, col)) {
      const E* const first = from.template piece_at<const E>(row, col, i, j);
      TW_UNROLL
      for (int n = 0; n < F::pieces; ++n) words[n].load_if(from.inside(row, col + n * F::piece_step), first + n * F::piece_step, otherwise);
    } else {
      TW_UNROLL
      for (int n = 0; n < F::share; ++n) {
        const int c = ptx::opaque(col + n / F::width * F::piece_step + n % F::width);
        words[n / F::width].set(n % F::width, from.inside(row, c) ? *from.template at<const E>(row, c, i, j) : otherwise);
      }
    }
  }
  /// Rows that are not whole pieces: a tensor of a length that is no multiple of the pieces', or whose rows begin at lower multiples.
  template <class G, bool kWhole>
  static constexpr bool moves_in_words = moves_in_pieces<typename G::TileType> && !kWhole;
  /// f(Constant<S>) with the most elements S that make a word of 4, 8 or 16 bytes for which all rows are aligned from column `col` on, the
  /// same for every thread; false if there are none.
  template <int S, class G, class Fn>
  static TW_INLINE bool in_widest_words(const G& tensor, int col, Fn f) {
    using T = typename G::Element;
    constexpr int bytes = S * static_cast<int>(sizeof(T));
    if constexpr (bytes > 16) {
      return in_widest_words<S / 2>(tensor, col, f);
    } else if constexpr (bytes >= 4) {
      if (!tensor.template vectors<T, S>() || col % S != 0) return in_widest_words<S / 2>(tensor, col, f);
      f(Constant<S>{});
      return true;
    } else {
      return false;
    }
  }
  /// How many elements row `row` has from `col` on, not positive if none.
  template <class G>
  static TW_INLINE int inside_row(const G& tensor, int row, int col) {
    return static_cast<u32>(row) < static_cast<u32>(tensor.rows) ? tensor.cols - col : 0;
  }
  /// load_row() in words of S elements; one in which the tensor ends is left to load_row_end().
  template <class F, int S, class E, class G>
  TW_INLINE void load_row_in_words(Words<E, F::width>* words, const G& from, int row, int col, int i, int j, E otherwise) const {
    const E* const first = from.template piece_at<const E>(row, col, i, j);
    const int count = inside_row(from, row, col);
    TW_UNROLL
    for (int n = 0; n < F::pieces; ++n) {
      words[n].fill(otherwise);
      TW_UNROLL
      for (int k = 0; k < F::width; k += S) {
        const int place = n * F::piece_step + k;
        words[n].template load_word_if<S>(place + S <= count, first + place, k);
      }
    }
  }
  /// The piece in which the tensor ends, if it is this thread's. Apart from the row's other loads, which its branch would hold up.
  template <class F, class E, class G>
  TW_INLINE void load_row_end(Words<E, F::width>* words, const G& from, int row, int col, int i, int j, E otherwise) const {
    const int count = inside_row(from, row, col);
    if (count % F::width == 0) return;
    TW_UNROLL
    for (int n = 0; n < F::pieces; ++n) {
      const int left = count - n * F::piece_step;
      if (left <= 0 || left >= F::width) continue;
      const E* const first = from.template piece_at<const E>(row, col, i, j) + n * F::piece_step;
      TW_UNROLL
      for (int k = 0; k < F::width; ++k) words[n].set(k, k < left ? first[k] : otherwise);
    }
  }
  /// gather() of such rows: in words, if there are any for which they are aligned.
  template <class F, class E, class G, class RowOf>
  TW_INLINE void gather_in_words(Words<E, F::width> (&words)[F::row_count][F::pieces], const G& from, RowOf row_of, int col0, int i, int j,
                                 E otherwise) const {
    const Position at = here();
    const auto row = [&](int r) { return row_of(F::row(at, F::in_row(r, 0))); };
    const int col = col0 + F::col(at, 0);
    const bool in_words = in_widest_words<F::width>(from, col0, [&](auto size) {
      TW_UNROLL
      for (int r = 0; r < F::row_count; ++r) load_row_in_words<F, decltype(size)::value>(words[r], from, row(r), col, i, j, otherwise);
    });
    TW_UNROLL
    for (int r = 0; r < F::row_count; ++r) {
      if (in_words)
        load_row_end<F>(words[r], from, row(r), col, i, j, otherwise);
      else
        load_row<F>(words[r], from, row(r), col, i, j, otherwise);
    }
  }
  /// A row of a tile, x[F::share], in words of S elements, and element by element where the tensor ends.
  template <class F, int S, class T, class G>
  TW_INLINE void store_row_in_words(const T* x, const G& to, int row, int col, int i, int j) const {
    using E = typename G::Element;
    E* const first = to.template piece_at<E>(row, col, i, j);
    const int count = inside_row(to, row, col);
    TW_UNROLL
    for (int n = 0; n < F::pieces; ++n) {
      Words<E, F::width> words;
      words.pack(x + n * F::width);
      TW_UNROLL
      for (int k = 0; k < F::width; k += S) {
        const int place = n * F::piece_step + k;
        if (place + S <= count) {
          words.template store_word<S>(first + place, k);
        } else {
          TW_UNROLL
          for (int e = 0; e < S - 1; ++e)
            if (place + e < count) first[place + e] = words.get(k + e);
        }
      }
    }
  }
  template <class F, class Fn, class... Operands>
  TW_INLINE void map_with(F& tile, Fn f, const Operands&... operands) const {
    own<F>();
    TW_UNROLL
    for (int r = 0; r < F::row_count; ++r) {
      TW_UNROLL
      for (int n = 0; n < F::size / F::row_count; ++n) {
        const int i = F::in_row(r, n);
        tile.x[i] = f(tile.x[i], value_at<F>(operands, r, i)...);
      }
    }
  }
  /// An operand of map() at element i, which is in row r of the thread's.
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
  /// The whole tile lies inside the tensor, and its pieces are aligned: the same answer for every thread.
  template <class F, class G>
  static TW_INLINE bool whole(const G& tensor, int row0, int col0) {
    return tensor.template vectors<typename G::Element, F::width>() && col0 % F::width == 0 && row0 + F::rows <= tensor.rows &&
           col0 + F::cols <= tensor.cols && F::cols % (F::width * F::row_threads) == 0;
  }
  /// Straight from registers.
  template <class F, class G>
  TW_INLINE void store_rows(const F& from, const G& to, int row0, int col0, int i, int j, int rows_end) const {
    own<F>();
    using T = typename G::Element;
    const Position at = here();
    const bool pieces = to.template whole_pieces<T, F::width>() && col0 % F::width == 0;
    TW_UNROLL
    for (int r = 0; r < F::row_count; ++r) {
      const int row = row0 + F::row(at, F::in_row(r, 0)), first_col = col0 + F::col(at, F::in_row(r, 0));
      if (static_cast<u32>(row) >= static_cast<u32>(min(rows_end, to.rows))) continue;
      T* const first = to.template at<T>(row, first_col, i, j);
      if (pieces) {
        TW_UNROLL
        for (int n = 0; n < F::share; n += F::width) {
          const int e = F::in_row(r, n), step = n / F::width * F::piece_step;
          Piece<T, F::width> piece;
          TW_UNROLL
          for (int k = 0; k < F::width; ++k) piece.x[k] = tw::to<T>(from.x[e + k]);
          if (first_col + step < to.cols) *reinterpret_cast<Piece<T, F::width>*>(first + step) = piece;
        }
      } else {
        TW_UNROLL
        for (int n = 0; n < F::share; ++n) {
          const int step = n / F::width * F::piece_step + n % F::width;
          if (first_col + step < to.cols) first[step * to.stride_col] = tw::to<T>(from.x[F::in_row(r, n)]);
        }
      }
    }
  }
  /// The first `cols` columns of a panel in shared memory, with ordinary stores: neighbouring threads have neighbouring words, the widest
  /// for which all rows of the tensor are aligned.
  template <class T, class G>
  TW_INLINE void copy_panel(const u8* panel, int cols, const G& to, int row0, int col0, int i, int j, int rows_end) const {
    constexpr int widest = 16 / static_cast<int>(sizeof(T));
    const auto copy = [&](auto size) { copy_panel_words<decltype(size)::value, T>(panel, cols, to, row0, col0, i, j, rows_end); };
    // A tensor that TMA can take is aligned, and its columns are a multiple of the widest words'.
    if (kPieceStores || (to.template vectors<T, widest>() && col0 % widest == 0)) return copy(Constant<widest>{});
    if (to.template vectors<T, widest / 2>() && col0 % (widest / 2) == 0) return copy(Constant<widest / 2>{});
    if (to.template vectors<T, widest / 4>() && col0 % (widest / 4) == 0) return copy(Constant<widest / 4>{});
    copy(Constant<1>{});
  }
  template <int S, class T, class G>
  TW_INLINE void copy_panel_words(const u8* panel, int cols, const G& to, int row0, int col0, int i, int j, int rows_end) const {
    constexpr int widest = 16 / static_cast<int>(sizeof(T));
    const int words = cols / S, end = min(rows_end, to.rows);
    TW_NO_UNROLL
    for (int n = static_cast<int>(ptx::thread_index()) % kWarpgroupThreads; n < kWarpgroupRows * words; n += kWarpgroupThreads) {
      const int r = n / words, c = n % words * S, row = row0 + r, col = col0 + c;
      if (row >= end) break;
      const T* const word = reinterpret_cast<const T*>(panel + r * kPanelBytes + (c / widest ^ (r & 7)) * 16) + c % widest;
      T* const first = to.template at<T>(row, col, i, j);
      if (col + S <= to.cols) {
        *reinterpret_cast<Piece<T, S>*>(first) = *reinterpret_cast<const Piece<T, S>*>(word);
      } else {
        TW_NO_UNROLL
        for (int k = 0; k < S - 1 && col + k < to.cols; ++k) first[k] = word[k];  // S is 1 where columns are not side by side
      }
    }
  }
  /// Straight from registers, each row of the tile where place_of(row) says.
  template <class F, class G, class PlaceOf>
  TW_INLINE void store_places(const F& from, const G& to, int col0, PlaceOf place_of) const {
    own<F>();
    using T = typename G::Element;
    const Position at = here();
    const bool pieces = to.template whole_pieces<T, F::width>() && col0 % F::width == 0;
    TW_UNROLL
    for (int r = 0; r < F::row_count; ++r) {
      const Place place = place_of(F::row(at, F::in_row(r, 0)));
      if (!place.inside) continue;
      TW_UNROLL
      for (int n = 0; n < F::share; n += F::width) {
        const int e = F::in_row(r, n);
        const int col = col0 + F::col(at, e);
        if (pieces) {
          const Piece<T, F::width> piece{tw::to<T>(from.x[e]), tw::to<T>(from.x[e + 1])};
          if (to.inside(place.row, col)) *piece_at<F::width>(to, place.row, col, place.i, place.j) = piece;
        } else {
          TW_UNROLL
          for (int k = 0; k < F::width; ++k)
            if (to.inside(place.row, col + k)) *to.template at<T>(place.row, col + k, place.i, place.j) = tw::to<T>(from.x[e + k]);
        }
      }
    }
  }
  template <int width, class G>
  static TW_INLINE auto* piece_at(const G& tensor, int row, int col, int i, int j) {
    using T = typename G::Element;
    if constexpr (G::readable)
      return reinterpret_cast<const Piece<T, width>*>(tensor.template at<const T>(row, col, i, j));
    else
      return reinterpret_cast<Piece<T, width>*>(tensor.template at<T>(row, col, i, j));
  }

  template <class T, class F, class Op>
  TW_INLINE void reduce_columns(const F& fragment, ColumnVector<T, F>& vector, int scratch, Op op) const {
    T* const partial = reinterpret_cast<T*>(shared_memory() + scratch);
    TW_UNROLL
    for (int i = 0; i < F::column_count; ++i) {
      const int e = F::in_row(0, i);
      T value = op(fragment.x[e], fragment.x[e + 2]);
      TW_UNROLL
      for (int r = 2; r < F::row_count; ++r) value = op(value, fragment.x[F::in_row(r, i)]);
      TW_UNROLL
      for (int mask = 4; mask < 32; mask *= 2) value = op(value, ptx::shuffle_xor(value, mask));
      if (at.lane < 4) partial[F::warp_row(at) / F::warp_rows * F::cols + vector.col(at, i)] = value;
    }
    sync();
    TW_UNROLL
    for (int i = 0; i < F::column_count; ++i) {
      T value = partial[vector.col(at, i)];
      for (int warp = 1; warp < F::row_warps; ++warp) value = op(value, partial[warp * F::cols + vector.col(at, i)]);
      vector.x[i] = value;
    }
    sync();
  }
};

}  // namespace tw::cuda
