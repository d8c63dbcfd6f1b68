#pragma once

#include "tilewave/tile/block_operations.tile.hpp"
#include "tilewave/tile/cuda/counters.tile.hpp"
#include "tilewave/tile/cuda/divided_codes.tile.hpp"
#include "tilewave/tile/cuda/divided_row.tile.hpp"
#include "tilewave/tile/cuda/global_memory.tile.hpp"
#include "tilewave/tile/cuda/hadamard.tile.hpp"
#include "tilewave/tile/cuda/operand.tile.hpp"
#include "tilewave/tile/cuda/reductions.tile.hpp"
#include "tilewave/tile/cuda/scans.tile.hpp"

namespace tw::cuda {

/// What block.await() gives a kernel.
template <class Block>
struct Polling {
  const Block& block;
  u32 absent = 0;

  template <class To, class G>
  TW_INLINE void load(To& to, const G& from, int row, int col, int i = 0, int j = 0) {
    block.load(to, Polled<G>(from, absent), row, col, i, j);
  }
  template <class To, class G, class RowOf>
  TW_INLINE void gather(To& to, const G& from, RowOf row_of, int col, int i = 0, int j = 0) {
    block.gather(to, Polled<G>(from, absent), row_of, col, i, j);
  }
};

/// What a kernel's compute() and finish() are given on every NVIDIA target: all warps that compute, as one object. A target's Block adds
/// rings, products and stores through shared memory.
template <int kWarps, bool kPieceLoads, bool kPieceStores>
struct BlockBase : GlobalMemory<kWarps, kPieceLoads, kPieceStores>, BlockOperations<BlockBase<kWarps, kPieceLoads, kPieceStores>> {
  using Base = GlobalMemory<kWarps, kPieceLoads, kPieceStores>;
  using Operations = BlockOperations<BlockBase>;
  using Base::add_products, Base::at, Base::complete, Base::fill, Base::for_each, Base::load, Base::owns_rows, Base::parallel, Base::store,
      Base::sync, Base::thread;
  using Operations::complete, Operations::load;

  // Operands in registers

  /// Rounds the accumulators to T, as the left operand of the next product.
  template <class T, class S, int R, int C, int WarpRows>
  TW_INLINE void convert(Operand<T, R, C, WarpRows>& to, const Fragment<S, R, C, WarpRows>& from) const {
    if constexpr (sizeof(T) == 1) {
      convert_bytes(at, to, from);
    } else {
      TW_UNROLL
      for (int i = 0; i < from.size / 2; ++i) to.x[i] = ptx::pack<T>(from.x[2 * i], from.x[2 * i + 1]);
    }
  }
  /// The same for an 8-bit type, in the order of columns for which no thread needs another's elements: of every 16 columns, column 4 t + 2
  /// u
  /// + c of the operand is column 8 u + 2 t + c of the accumulators (t < 4; u, c < 2). The product's right operand must have this order
  /// too.
  template <class T, class S, int R, int C, int WarpRows>
  TW_INLINE void convert_in_place(Operand<T, R, C, WarpRows>& to, const Fragment<S, R, C, WarpRows>& from) const {
    convert_bytes_in_place(to, from);
  }
  /// The rounded accumulators. `from` is of 16 bits, and may be an operand of a product in flight.
  template <class T, class S, int R, int C, int WarpRows>
  TW_INLINE void convert(Fragment<S, R, C, WarpRows>& to, const Operand<T, R, C, WarpRows>& from) const {
    static_assert(sizeof(T) == 2, "operands of 16 bits are converted back");
    TW_UNROLL
    for (int i = 0; i < to.size; ++i) to.x[i] = static_cast<S>(bit_cast<T>(static_cast<u16>(from.x[i / 2] >> i % 2 * 16)));
  }

  template <int R, int N>
  TW_INLINE void fill(DividedSums<R, N, kWarps>& sums, float value) const {
    for (float& x : sums.x) x = value;
  }
  template <int N>
  TW_INLINE void fill(DividedSquares<N, kWarps>& squares, float value) const {
    for (float& x : squares.x) x = value;
  }
  /// operand(n, c) *= factors(n % 8, c), rounded to T.
  template <class T, int N, int C>
  TW_INLINE void scale(DividedOperand<T, N, C, kWarps>& operand, const DividedOperand<T, 8, C, kWarps>& factors) const {
    scale_divided(operand, factors);
  }
  /// squares(n) += the sum of operand(n, c)^2 over this warp's columns.
  template <class T, int N, int C>
  TW_INLINE void add_squares(DividedSquares<N, kWarps>& squares, const DividedOperand<T, N, C, kWarps>& operand) const {
    add_squares_divided(squares, operand);
  }
  // The same for one row, which is spread over an operand's rows before it is multiplied.
  template <class T, int C>
  TW_INLINE void scale(DividedRow<T, C, kWarps>& row, const DividedRow<T, C, kWarps>& factors) const {
    scale_divided(row, factors);
  }
  template <class T, int N, int C>
  TW_INLINE void add_squares(DividedSquares<N, kWarps>& squares, const DividedRow<T, C, kWarps>& row) const {
    add_squares_divided(squares, row);
  }
  template <class T, int N, int C>
  TW_INLINE void make_digits(DividedRow<T, C, kWarps>& row, DigitScales<N, kWarps>& scales) const {
    cuda::make_digits(at, row, scales);
  }
  template <class T, int C, class G>
  TW_INLINE void load(DividedRow<T, C, kWarps>& to, const G& from, int row, int col, int i = 0, int j = 0) const {
    load_divided(at, to, from, row, col, i, j);
  }
  /// Every row of the operand becomes the row, digits or not.
  template <class T, int N, int C>
  TW_INLINE void spread(DividedOperand<T, N, C, kWarps>& operand, const DividedRow<T, C, kWarps>& row) const {
    spread_divided(at, operand, row);
  }
  /// Rounds an operand to fixed-point numbers, as products with integers need them.
  template <class T, int N, int C>
  TW_INLINE void make_digits(DividedOperand<T, N, C, kWarps>& operand, DigitScales<N, kWarps>& scales) const {
    cuda::make_digits(at, operand, scales);
  }
  template <class T, int N, int C, class G>
  TW_INLINE void load(DividedOperand<T, N, C, kWarps>& to, const G& from, int row, int col, int i = 0, int j = 0) const {
    constexpr bool whole = kPieceLoads && moves_in_pieces<typename G::TileType>;
    if constexpr (whole)
      static_assert(G::TileType::width % DividedOperand<T, N, C, kWarps>::width == 0,
                    "a tensor is bound with Rows of pieces as wide as a lane's");
    load_divided<whole>(at, to, from, row, col, i, j);
  }
  template <int R, int C, class Format, class G, class H>
  TW_INLINE void load(DividedScales<R, C, Format, kWarps>& to, const G& scales, const H& zeros, int row, int col, int apart = 8) const {
    load_divided_scales(at, to, scales, zeros, row, col, apart);
  }
  /// The same from a slot: x in vectors, for all rows of the operand; scales in strips, with zero points from memory.
  template <class T, int N, int C, int V, int Count>
  TW_INLINE void load(DividedOperand<T, N, C, kWarps>& to, const SharedVector<T, V> (&vectors)[Count]) const {
    load_divided(at, to, vectors);
  }
  template <int R, int C, class Format, class T, int Rows, int Count, class H>
  TW_INLINE void load(DividedScales<R, C, Format, kWarps>& to, const SharedStrip<T, Rows> (&strips)[Count], const H& zeros, int row,
                      int col) const {
    load_divided_scales(at, to, strips, zeros, row, col);
  }
  /// to(n, r) = the sum of all warps' sums(r, n).
  template <int R, int N, class F>
  TW_INLINE void complete(const DividedSums<R, N, kWarps>& sums, F& to, const Scratch<float, 16 * kWarps, R * N>& scratch) const {
    Base::template own<F>();
    complete_divided(at, sums, to, reinterpret_cast<float*>(shared_memory() + scratch.offset), [this] { sync(); });
  }
  /// first(n, r) = the sum of all warps' sums(r, n), second(n, r) that of their sums(r + R / 2, n).
  template <int R, int N, class F>
  TW_INLINE void complete(const DividedSums<R, N, kWarps>& sums, F& first, F& second,
                          const Scratch<float, 16 * kWarps, R * N>& scratch) const {
    Base::template own<F>();
    complete_divided(at, sums, first, second, reinterpret_cast<float*>(shared_memory() + scratch.offset), [this] { sync(); });
  }
  /// to[n] = the sum of all warps' squares(n).
  template <int N, class T, class F>
  TW_INLINE void complete(const DividedSquares<N, kWarps>& squares, RowVector<T, F>& to,
                          const VectorBuffer<float, N * kWarps>& shares) const {
    Base::template own<F>();
    complete_divided(at, squares, to, &shares[0], [this] { sync(); });
  }

  /// Makes a left operand in registers from a tile of codes: decode(number, scale) of each, from column `first` on. See packed.tile.hpp.
  /// `first` must be a multiple of the scales' group, unless all of the operand's columns are in one group.
  template <class T, int R, int C, int WarpRows, class Codes, int Bytes, class Scales, class Decode = TimesScale>
  requires(is_decoded<Codes, T>) TW_INLINE void load(Operand<T, R, C, WarpRows>& to, const Shared<Codes, R, Bytes, Contract::columns>& from,
                                                     const Scales& scales, Decode decode = {}, int first = 0) const {
    load_codes(at, to, from, scales, decode, first);
  }

  // Operations in which threads exchange elements

  template <class T, class F, class Op>
  TW_INLINE void column_reduce(const F& fragment, ColumnVector<T, F>& vector, const Scratch<T, F::rows, F::cols>& scratch, Op op) const {
    cuda::column_reduce(*this, fragment, vector, scratch.offset, op);
  }
  template <class F, class Fn>
  TW_INLINE void column_fold(const F& rows, ColumnVector<float, F>& vector, Fn f) const {
    cuda::fold_columns<kWarps, 1>(*this, &rows, &vector, f);
  }
  template <class F, int kCount, class Fn>
  TW_INLINE void column_fold(const F (&tiles)[kCount], ColumnVector<float, F> (&vectors)[kCount], Fn f) const {
    cuda::fold_columns<kWarps, kCount>(*this, tiles, vectors, f);
  }
  template <class F, int kCount, class To, class Fn>
  TW_INLINE void column_fold(const F (&tiles)[kCount], To& to, Fn f) const {
    cuda::column_fold(*this, tiles, to, f);
  }
  template <class From, class To>
  TW_INLINE void transpose(const From& from, To& to) const {
    cuda::transpose(*this, from, to);
  }
  template <class From, class To, class Fn>
  TW_INLINE void pairs(To& to, const From& from, Fn f) const {
    cuda::pairs(*this, to, from, f);
  }
  /// x(2 n, col) and x(2 n + 1, col) both become f(x(2 n, col), x(2 n + 1, col)).
  template <class F, class Fn>
  TW_INLINE void map_row_pairs(F& tile, Fn f) const {
    Base::template own<F>();
    cuda::map_row_pairs(at, tile, f);
  }
  /// The same for a tile and a vector in global memory, which the CPU reads in place. The tile starts at (row0, col0) of `tile`, outer
  /// index tile_i; the vector at column col0 of row 0, outer index vector_i.
  template <class F, class G, class H>
  TW_INLINE void add_products(RowVector<float, F>& sums, const G& tile, int row0, int tile_i, const H& vector, int vector_i,
                              int col0) const {
    F rows;
    ColumnVector<typename H::Element, F> columns;
    load(rows, tile, row0, col0, tile_i);
    load(columns, vector, 0, col0, vector_i);
    add_products(sums, rows, columns);
  }
  /// Replaces each row by its cumulative sums: x(row, col) becomes the sum of the elements up to col, or from col on.
  template <class F, class Direction = Forward>
  TW_INLINE void row_cumsum(F& tile, Direction = {}) const {
    Base::template own<F>();
    cuda::row_cumsum<is_same<Direction, Forward>>(at, tile);
  }
  /// Replaces every run of kSpan columns by its Walsh-Hadamard transform. kSpan is a power of two.
  template <int kSpan, class F>
  TW_INLINE void row_hadamard(F& tile) const {
    Base::template own<F>();
    cuda::row_hadamard<kSpan>(at, tile);
  }
  /// The cumulative sums of columns, over all of the block's rows.
  template <class T, int R, int C, class Direction = Forward>
  TW_INLINE void column_cumsum(Fragment<T, R, C>& fragment, const Scratch<T, R, C>& scratch, Direction = {}) const {
    Base::template own<Fragment<T, R, C>>();
    cuda::column_cumsum<is_same<Direction, Forward>>(at, fragment, scratch, [this] { sync(); });
  }
  /// The same for a vector in shared memory. All threads that compute see the result when this returns.
  template <class V, class T, int N, class Direction = Forward>
  TW_INLINE void cumsum(const V& from, const VectorBuffer<T, N>& to, Direction = {}) const {
    static_assert(V::size == N, "vectors of two lengths");
    sync();
    if (at.block_warp() == 0) vector_cumsum<is_same<Direction, Forward>>(at.lane, from, to);
    sync();
  }

  // Shared memory that the block owns

  /// Copies a vector in shared memory to the values of a tile's rows or columns. If the vector is in a slot, all warps of the warpgroup
  /// have read it when this returns, so the slot may be released.
  template <class T, class Tile, int N>
  TW_INLINE void load(RowVector<T, Tile>& to, const SharedVector<T, N>& from) const {
    load_vector(at, to, from);
    this->sync_warpgroup();
  }
  template <class T, class Tile, int N>
  TW_INLINE void load(RowVector<T, Tile>& to, const VectorBuffer<T, N>& from) const {
    load_vector(at, to, from);
  }
  template <class T, class Tile, int N>
  TW_INLINE void load(ColumnVector<T, Tile>& to, const SharedVector<T, N>& from) const {
    load_vector(at, to, from);
    this->sync_warpgroup();
  }
  template <class T, class Tile, int N>
  TW_INLINE void load(ColumnVector<T, Tile>& to, const VectorBuffer<T, N>& from, int first = 0) const {
    load_vector(at, to, from, first);
  }
  /// All threads that compute see the result when this returns.
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
  /// Copies a Fragment to a Buffer or back, with ordinary stores and loads. Other threads see the stores after a barrier.
  template <class F, class T, int R, int C, Contract contract>
  TW_INLINE void store(const F& from, const Buffer<T, R, C, contract>& to) const {
    static_assert(F::rows == R && F::cols == C, "a Buffer has its Fragment's shape");
    Base::template own<F>();
    store_pieces(at, from, to.tile());
  }
  /// to(col, row) = from(row, col).
  template <class F, class T, int R, int C, Contract contract>
  TW_INLINE void store_transposed(const F& from, const Buffer<T, R, C, contract>& to) const {
    static_assert(F::rows == C && F::cols == R, "a Buffer has its Fragment's shape, transposed");
    Base::template own<F>();
    store_transposed_elements(at, from, to.tile());
  }
  template <class F, class T, int R, int C, Contract contract>
  TW_INLINE void load(F& to, const Buffer<T, R, C, contract>& from) const {
    static_assert(F::rows == R && F::cols == C, "a Buffer has its Fragment's shape");
    Base::template own<F>();
    load_pieces(at, to, from.tile());
  }
  /// Does nothing: on this target only threads read shared memory, so barriers are enough.
  TW_INLINE void fence() const {}
  /// Adds the Fragment's elements to the tensor's, from (row, col) on, where column c is the tensor's even_first(c). Elements outside the
  /// tensor are dropped. The order in which blocks add is not defined.
  template <class F, class Box, class G>
  TW_INLINE void reduce_add(const F& from, const Box&, const G& to, int row, int col, int i = 0, int j = 0) const {
    static_assert(F::rows == Box::rows && F::cols == Box::cols, "an Outbox has its Fragment's shape");
    Base::template own<F>();
    TW_UNROLL
    for (int e = 0; e < F::size; ++e) {
      const int r = row + F::row(at, e), c = col + even_first(F::col(at, e));
      if (to.inside(r, c)) ptx::atomic_add(to.template at<float>(r, c, i, j), from.x[e]);
    }
  }
  /// The same when `turn` blocks have added at this counter, one of `counters` that began at 0: in the order of their turns.
  template <class F, class Box, class G>
  TW_INLINE void reduce_add_in_turn(const F& from, const Box& box, const G& to, int row, int col, int i, int j, u32* counters, i64 counter,
                                    int turn) const {
    wait_for(counters, counter, turn);
    reduce_add(from, box, to, row, col, i, j);
    announce(counters, counter);
  }
  /// Calls f(loads), in which loads.load() loads from Awaited tensors as load() does from others. Returns whether all elements were there,
  /// in this thread.
  template <class Fn>
  TW_INLINE bool attempt(Fn f) const {
    Polling<BlockBase> loads{*this};
    f(loads);
    return loads.absent == 0;
  }
  /// Calls f(loads) until all elements are there, for all of the warp's threads.
  template <class Fn>
  TW_INLINE void await(Fn f) const {
    while (ptx::any(!attempt(f))) {
    }
  }
  /// The same, unless attempt(f) has returned true.
  template <class Fn>
  TW_INLINE void await(bool there, Fn f) const {
    while (ptx::any(!there)) there = attempt(f);
  }
  /// Waits until `count` tiles have announced themselves at counter i. What they stored is there.
  TW_INLINE void wait_for(u32* counters, i64 i, int count) const {
    if (thread() == 0) ptx::await(counters + i, static_cast<u32>(count));
    sync();
  }
  /// Announces that what this tile has stored is there.
  TW_INLINE void announce(u32* counters, i64 i) const {
    sync();
    if (thread() == 0) ptx::add_release(counters + i, 1);
  }
  /// Calls f(i) for every i < count, distributed over the block's threads. f may read and write elements of the Buffer, as long as no two
  /// calls touch the same one. All threads that compute see the result when this returns.
  template <class T, int R, int C, Contract contract, class Fn>
  TW_INLINE void update(const Buffer<T, R, C, contract>&, int count, Fn f) const {
    parallel(count, f);
    sync();
  }
  /// The same for several Buffers.
  template <class Fn, class... Buffers>
  TW_INLINE void update(int count, Fn f, const Buffers&...) const {
    parallel(count, f);
    sync();
  }

  // Counters and lists. All threads call these together, except count() and append().

  /// Waits until all threads have finished with the counters. They are 0 when this returns.
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
  template <int N>
  TW_INLINE Located locate(const Histogram<N>& histogram, int n) const {
    return cuda::locate(*this, histogram, n);
  }
  /// Waits until all threads have finished with the list. It is empty when this returns.
  template <class T, int N>
  TW_INLINE void clear(const List<T, N>& list) const {
    sync();
    if (thread() == 0) *list.size() = 0;
    sync();
  }
  /// Appends in no defined order. Values beyond the N-th are lost.
  template <class T, int N>
  TW_INLINE void append(const List<T, N>& list, T value) const {
    const int i = static_cast<int>(ptx::fetch_add_shared(list.size(), 1));
    if (i < N) list[i] = value;
  }
  /// Appends the elements x of a row for which chosen(column, x) holds, in the order of their columns.
  template <class T, int N, class F, class Chosen>
  TW_INLINE void append_in_order(const List<T, N>& list, const F& row, Chosen chosen) const {
    cuda::append_in_order(*this, list, row, chosen);
  }
  /// The same, faster where few are chosen, for value_of(column, x) instead of x. What no longer fits is left out: a list that is full has
  /// perhaps not all of them.
  template <class T, int N, class F, class Chosen, class ValueOf>
  TW_INLINE void append_few(const List<T, N>& list, const F& row, Chosen chosen, ValueOf value_of) const {
    cuda::append_few(*this, list, row, chosen, value_of);
  }
  /// Waits until all threads have appended, and returns the number of values. They may be read afterwards.
  template <class T, int N>
  TW_INLINE int size(const List<T, N>& list) const {
    sync();
    return min(static_cast<int>(*list.size()), N);
  }
  /// Waits until all threads have appended.
  template <int N>
  TW_INLINE void sort(const List<u64, N>& list, int = N) const {
    cuda::sort(*this, list, size(list));
  }

  /// Prints the tile, one line for each row, through the device's printf buffer. It is slow: for debugging.
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
};

}  // namespace tw::cuda
