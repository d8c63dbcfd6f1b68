#pragma once

#include "tilewave/tile/cuda/copy.tile.hpp"
#include "tilewave/tile/sm_90a/memory.tile.hpp"

namespace tw::sm_90a {

// The producer: one warpgroup. With TMA one of its threads issues everything; without it, all of them copy.

/// Copies into one slot by TMA; bytes count toward the slot's full barrier.
template <int Cluster>
struct TmaCopy {
  u64* barrier;
  u32 rank;

  /// The tile whose first element is (row, col) of outer indices (i, j). Elements outside the tensor become 0.
  template <class G, class S>
  TW_INLINE void tile(const G& from, S& to, int row, int col, int i = 0, int j = 0) const {
    if constexpr (cuda::is_shared_strip<S>)
      complete_padding<sizeof(S) - S::panel_bytes>();
    else if constexpr (cuda::is_strip<S>)
      ptx::expect(barrier, sizeof to);  // put() does not expect these bytes
    TW_UNROLL
    for (int panel = 0; panel < S::panels; ++panel)
      ptx::load_4d(to.bytes + panel * S::panel_bytes, from.tensor_map, barrier, col + panel * S::panel_cols, row, i, j);
  }
  /// Elements of one row, from (row, col) on.
  template <class G, class T, int N>
  TW_INLINE void vector(const G& from, SharedVector<T, N>& to, int row, int col, int i = 0, int j = 0) const {
    ptx::load_4d(to.x, from.tensor_map, barrier, col, row, i, j);
    complete_padding<sizeof(SharedVector<T, N>) - sizeof to.x>();
  }
  /// Part of a tile that comes from several places: its rows `first` to `first` + count - 1, from (row, col) of (i, j) on. Parts are
  /// copied in order; `count` is a multiple of 16 and what the tensor was bound with (CopiedRows).
  template <class G, class S>
  TW_INLINE void part(const G& from, S& to, int first, int count, int row, int col, int i = 0, int j = 0) const {
    constexpr int row_bytes = S::panel_bytes / S::rows;
    if constexpr (cuda::is_strip<S>) ptx::expect(barrier, static_cast<u32>(count * row_bytes));
    TW_UNROLL
    for (int panel = 0; panel < S::panels; ++panel)
      ptx::load_4d(to.bytes + panel * S::panel_bytes + first * row_bytes, from.tensor_map, barrier, col + panel * S::panel_cols, row, i, j);
  }
  /// The tile whose rows are the window that begins at (row, i, j). All of it may lie outside the tensor.
  template <class G, class S>
  TW_INLINE void window(const G& from, S& to, int row, int col, int i, int j) const {
    tile(from, to, row, col, i, j);  // the window's shape and steps are in the tensor map
  }
  /// The same tile for every block of the cluster: each loads its share of the rows and sends it to all.
  template <class G, class S>
  TW_INLINE void tile_for_cluster(const G& from, S& to, int row, int col, int i = 0, int j = 0) const {
    share(from, to, col, [=](int first) { return Place{row + first, i, j}; });
  }
  /// The same with a window, as window() copies it.
  template <class G, class S>
  TW_INLINE void window_for_cluster(const G& from, S& to, int row, int col, int i, int j) const {
    const Window& w = from.window;
    share(from, to, col, [=](int first) { return Place{row + w.row(first), i + w.i(first), j + w.j(first)}; });
  }

 private:
  /// put() expects all bytes of the slot, padding included.
  template <u32 kBytes>
  TW_INLINE void complete_padding() const {
    if constexpr (kBytes > 0) ptx::complete_bytes(barrier, kBytes);
  }
  /// Where the row of a tile comes from.
  struct Place {
    int row, i, j;
  };
  template <class G, class S, class PlaceOf>
  TW_INLINE void share(const G& from, S& to, int col, PlaceOf place_of) const {
    if constexpr (Cluster == 1) {
      const Place at = place_of(0);
      tile(from, to, at.row, col, at.i, at.j);
    } else {
      static_assert(G::split == Cluster, "a tile for the whole cluster comes from a Global<..., Split = cluster>");
      constexpr int rows = S::rows / Cluster;
      const int first = static_cast<int>(rank) * rows;
      const Place at = place_of(first);
      TW_UNROLL
      for (int panel = 0; panel < S::panels; ++panel)
        ptx::load_4d_multicast(to.bytes + panel * S::panel_bytes + first * kPanelBytes, from.tensor_map, barrier,
                               static_cast<u16>((1 << Cluster) - 1), col + panel * S::panel_cols, at.row, at.i, at.j);
    }
  }
};

/// Copies into one slot of a GatherRing. All threads call it: one issues TMA copies of whole tiles, and all gather rows by cp.async.
template <int Cluster>
struct GatherCopy {
  TmaCopy<Cluster> tma;
  int thread;

  template <class G, class S>
  TW_INLINE void tile(const G& from, S& to, int row, int col, int i = 0, int j = 0) const {
    if (expect(sizeof to)) tma.tile(from, to, row, col, i, j);
  }
  template <class G, class T, int N>
  TW_INLINE void vector(const G& from, SharedVector<T, N>& to, int row, int col, int i = 0, int j = 0) const {
    if (expect(sizeof to)) tma.vector(from, to, row, col, i, j);
  }
  template <class G, class S>
  TW_INLINE void part(const G& from, S& to, int first, int count, int row, int col, int i = 0, int j = 0) const {
    if (expect(static_cast<u32>(S::panels * count * kPanelBytes))) tma.part(from, to, first, count, row, col, i, j);
  }
  template <class G, class S>
  TW_INLINE void window(const G& from, S& to, int row, int col, int i, int j) const {
    if (expect(sizeof to)) tma.window(from, to, row, col, i, j);
  }
  template <class G, class S>
  TW_INLINE void tile_for_cluster(const G& from, S& to, int row, int col, int i = 0, int j = 0) const {
    if (expect(sizeof to)) tma.tile_for_cluster(from, to, row, col, i, j);
  }
  template <class G, class S>
  TW_INLINE void window_for_cluster(const G& from, S& to, int row, int col, int i, int j) const {
    if (expect(sizeof to)) tma.window_for_cluster(from, to, row, col, i, j);
  }
  template <class G, class S, class RowOf>
  TW_INLINE void gather(const G& from, S& to, RowOf row_of, int col, int i = 0, int j = 0) const {
    constexpr int width = 16 / static_cast<int>(sizeof(typename S::Element));
    if (from.cols % width == 0) return cuda::Gathering<cuda::AsyncCopy<kWarpgroupThreads>>(thread).gather(from, to, row_of, col, i, j);
    // The last 16 bytes of a row would reach past its end. TMA clips them; cp.async would copy what comes after the row.
    const cuda::Gathering<cuda::StridedCopy<kWarpgroupThreads>> strided(thread);
    if constexpr (requires { row_of.f; })
      strided.gather(from, to, row_of.f, col, i, j);  // it copies other rows
    else
      strided.gather(from, to, row_of, col, i, j);
    ptx::fence_proxy();
    ptx::fence_block();  // arrive_copied() waits for asynchronous copies only
  }

 private:
  /// True in the thread that issues TMA copies; the slot then waits for `bytes` more.
  TW_INLINE bool expect(u32 bytes) const {
    if (thread == 0) ptx::expect(tma.barrier, bytes);
    return thread == 0;
  }
};

/// The numbers f(0) to f(N - 1) of a tile's rows. Each thread of the producer holds only the numbers of the rows that it copies.
template <int N, class Fn>
struct RowNumbers {
  using Copy = cuda::AsyncCopy<kWarpgroupThreads>;
  static_assert(N % Copy::rows_at_once == 0, "each thread copies as many rows");
  Fn f;
  int line;  ///< the first of the thread's rows
  int x[N / Copy::rows_at_once];

  TW_INLINE RowNumbers(Fn of, int thread) : f(of), line(thread / Copy::line_pieces) {
    TW_UNROLL
    for (int n = 0; n < N / Copy::rows_at_once; ++n) x[n] = f(line + n * Copy::rows_at_once);
  }
  TW_INLINE int operator()(int row) const { return x[(row - line) / Copy::rows_at_once]; }
};

/// The producer role. put() waits for a free slot, then calls `fill(copy, slot)`. `kAll`: all its threads call put(), although this variant
/// uses TMA.
template <bool kTma, int Cluster, bool kAll = false>
struct Producer {
  int thread;
  u32 rank;  ///< of this block in its cluster

  /// For a kernel that loads early: what follows may read what the previous launch has written.
  TW_INLINE void wait_for_previous_launch() const { ptx::wait_for_previous_launch(); }
  /// Fetches to the L2 cache what the threads that compute will load. It is only a hint: what is not contiguous is left.
  template <class G>
  TW_INLINE void prefetch(const G& from, int row, int col, int rows, int cols) const {
    using E = const typename G::Element;
    rows = min(rows, from.rows - row);
    cols = min(cols, from.cols - col);
    if (thread != 0 || rows <= 0 || cols <= 0 || from.stride_col != 1 || (rows > 1 && from.stride_row != cols)) return;
    const auto first = reinterpret_cast<u64>(from.template piece_at<E>(row, col, 0, 0));
    const u64 begin = (first + 15) & ~u64{15}, end = (first + static_cast<u64>(rows) * static_cast<u64>(cols) * sizeof(E)) & ~u64{15};
    if (begin < end) ptx::prefetch_to_l2(reinterpret_cast<const void*>(begin), static_cast<u32>(end - begin));
  }
  /// Waits until fewer than N of the ring's slots are on their way. A kernel that others wait for wants no more bytes in flight than keep
  /// the memory busy: what passes through its queues, such as stores and counters, waits behind all of them.
  template <int N, class RingType>
  TW_INLINE void limit(const RingType& ring) const {
    if constexpr (kTma) {
      static_assert(!RingType::gathers && !kAll && N >= 1 && N < RingType::stages, "limit() leaves slots that are not on their way");
      const bool last_round = ring.next.index < N;  // that slot was put in the round before
      ptx::wait(ring.full_barrier(ring.next.index - N + (last_round ? RingType::stages : 0)), ring.next.parity ^ (last_round ? 1u : 0u));
    }
  }
  /// See tw::row_numbers().
  template <int N, class Fn>
  TW_INLINE auto row_numbers(Fn f) const {
    if constexpr (kTma && kAll)
      return RowNumbers<N, Fn>(f, thread);
    else
      return f;
  }
  template <class RingType, class Fill>
  TW_INLINE void put(RingType& ring, Fill fill) const {
    const int index = ring.next.index;
    u64* const full = ring.full_barrier(index);
    auto& slot = ring.slot(index);
    if constexpr (kTma && kAll && !RingType::gathers) {
      if (thread != 0) return ring.next.advance();
    }
    ptx::wait(ring.empty_barrier(index), ring.next.parity ^ 1);
    ring.next.advance();
    if constexpr (RingType::gathers) {
      if constexpr (kTma) {
        fill(GatherCopy<Cluster>{{full, rank}, thread}, slot);
        ptx::arrive_copied(full);
      } else {
        fill(cuda::Gathering<cuda::StridedCopy<kWarpgroupThreads>>(thread), slot);
        ptx::fence_proxy();
        ptx::arrive(full);
      }
    } else if constexpr (kTma) {
      ptx::arrive_expect(full, cuda::arriving_bytes<typename RingType::Slot>());
      fill(TmaCopy<Cluster>{full, rank}, slot);
    } else {
      fill(cuda::StridedCopy<kWarpgroupThreads>(thread), slot);
      ptx::fence_proxy();
      ptx::named_barrier(kProducerBarrier, kWarpgroupThreads);
      if (thread == 0) ptx::arrive(full);
    }
  }
};

}  // namespace tw::sm_90a
