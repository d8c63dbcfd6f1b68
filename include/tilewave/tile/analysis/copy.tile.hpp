#pragma once

#include "tilewave/tile/analysis/target.tile.hpp"

#if !TW_ON_GPU

namespace tw::analysis {

/// Copies from global memory to the tiles of a slot.
struct Copy {
  int rank;  ///< the block's rank in its cluster

  template <class G, class S>
  void tile(const G& from, S& to, int row, int col, int = 0, int = 0) const {
    require(cut_piece<typename S::Element>(col));
    tally.read[from.place] += from.bytes(row, col, S::rows, S::cols);
    fill(from, to, row, col);
  }
  template <class G, class S>
  void part(const G& from, S& to, int, int count, int row, int col, int = 0, int = 0) const {
    require(cut_piece<typename S::Element>(col));
    tally.read[from.place] += from.bytes(row, col, count, S::cols);
    tally.shared += sizeof(S) / S::rows * static_cast<u64>(count);
    const int cols = overlap(col, S::cols, from.cols);
    to.set_inside(S::contract == Contract::columns ? typename S::Inside{S::rows, cols} : typename S::Inside{cols, S::rows});
  }
  /// The tile whose rows are the window that begins at (row, i, j).
  template <class G, class S>
  void window(const G& from, S& to, int row, int col, int i, int j) const {
    require(cut_piece<typename S::Element>(col));
    const int rows = inside_window(from, S::rows, row, i, j), cols = overlap(col, S::cols, from.cols);
    tally.read[from.place] += static_cast<u64>(rows) * static_cast<u64>(cols) * sizeof(typename S::Element);
    tally.shared += sizeof(S);
    to.set_inside({rows, cols});
  }
  /// Copies one share of the rows. The other blocks of the cluster multicast theirs.
  template <class G, class S>
  void tile_for_cluster(const G& from, S& to, int row, int col, int = 0, int = 0) const {
    require(cut_piece<typename S::Element>(col));
    constexpr int share = S::rows / G::split;
    tally.read[from.place] += from.bytes(row + rank * share, col, share, S::cols);
    fill(from, to, row, col);
  }
  template <class G, class S>
  void window_for_cluster(const G& from, S& to, int row, int col, int i, int j) const {
    require(cut_piece<typename S::Element>(col));
    const Window& w = from.window;
    constexpr int share = S::rows / G::split;
    const int first = rank * share, cols = overlap(col, S::cols, from.cols);
    const int rows = inside_window(from, share, row + w.row(first), i + w.i(first), j + w.j(first));
    tally.read[from.place] += static_cast<u64>(rows) * static_cast<u64>(cols) * sizeof(typename S::Element);
    tally.shared += sizeof(S);
    to.set_inside({inside_window(from, S::rows, row, i, j), cols});
  }
  template <class G, class T, int N>
  void vector(const G& from, SharedVector<T, N>&, int row, int col, int = 0, int = 0) const {
    require(cut_piece<T>(col));
    tally.read[from.place] += from.bytes(row, col, 1, N);
    tally.shared += N * sizeof(T);
  }

 private:
  template <class G, class S>
  static void fill(const G& from, S& to, int row, int col) {
    tally.shared += sizeof(S);
    const int rows = overlap(row, S::rows, from.rows), cols = overlap(col, S::cols, from.cols);
    to.set_inside(S::contract == Contract::columns ? typename S::Inside{rows, cols} : typename S::Inside{cols, rows});
  }
};

struct GatherCopy : Copy {
  /// A row that is gathered several times is counted several times.
  template <class G, class S, class RowOf>
  void gather(const G& from, S& to, RowOf row_of, int col, int = 0, int = 0) const {
    require(cut_piece<typename S::Element>(col));
    int rows = 0;
    for (int r = 0; r < S::rows; ++r) rows += overlap(row_of(r), 1, from.rows);
    const int cols = overlap(col, S::cols, from.cols);
    tally.read[from.place] += static_cast<u64>(rows) * static_cast<u64>(cols) * sizeof(typename S::Element);
    tally.shared += sizeof(S);
    to.set_inside(S::contract == Contract::columns ? typename S::Inside{rows, cols} : typename S::Inside{cols, rows});
  }
};

struct Producer {
  int rank;
  template <class G>
  void prefetch(const G&, int, int, int, int) const {}
  void wait_for_previous_launch() const {}
  template <int N, class RingType>
  void limit(const RingType&) const {
    static_assert(N >= 1, "one slot must be allowed on its way");
  }
  /// Counts one read of each number.
  template <int N, class Fn>
  auto row_numbers(Fn f) const {
    struct Numbers {
      int x[N];
      int operator()(int row) const { return x[row]; }
    } numbers;
    for (int row = 0; row < N; ++row) numbers.x[row] = f(row);
    return numbers;
  }
  template <class RingType, class Fill>
  void put(RingType& ring, Fill fill) const {
    if constexpr (RingType::gathers)
      fill(GatherCopy{{rank}}, *ring.slots);
    else
      fill(Copy{rank}, *ring.slots);
    ++ring.filled;
  }
};

}  // namespace tw::analysis

#endif  // !TW_ON_GPU
