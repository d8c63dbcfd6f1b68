#pragma once

#include "tilewave/tile/sm_90a/memory.tile.hpp"

namespace tw::sm_90a {

// Threads that load: one warpgroup. With TMA one thread issues everything; without, all of them copy.

/// Copies into one slot by TMA; bytes count toward the slot's full barrier.
template <int Cluster>
struct TmaCopy {
  u64* barrier;
  u32 rank;

  /// The tile whose first element is (row, col) of outer indices (i, j). Elements outside the tensor become 0.
  template <class G, class S>
  TW_INLINE void tile(const G& from, S& to, int row, int col, int i = 0, int j = 0) const {
    TW_UNROLL
    for (int panel = 0; panel < S::panels; ++panel)
      ptx::load_4d(to.bytes + panel * S::panel_bytes, from.tensor_map, barrier, col + panel * S::panel_cols, row, i, j);
  }
  /// Part of a tile that comes from several places: its rows `first` to `first` + count - 1, from (row, col) of (i, j) on. Parts are
  /// copied in order; `count` is a multiple of 16 and what the tensor was bound with (CopiedRows).
  template <class G, class S>
  TW_INLINE void part(const G& from, S& to, int first, int, int row, int col, int i = 0, int j = 0) const {
    TW_UNROLL
    for (int panel = 0; panel < S::panels; ++panel)
      ptx::load_4d(to.bytes + panel * S::panel_bytes + first * kPanelBytes, from.tensor_map, barrier, col + panel * S::panel_cols, row, i,
                   j);
  }
  /// The tile whose rows are the window that begins at (row, i, j). All of it may lie outside the tensor.
  template <class G, class S>
  TW_INLINE void window(const G& from, S& to, int row, int col, int i, int j) const {
    tile(from, to, row, col, i, j);  // the window's shape and steps are in the tensor map
  }
  /// The same tile for every block of the cluster: each loads its share of the rows and sends it to all.
  template <class G, class S>
  TW_INLINE void tile_for_cluster(const G& from, S& to, int row, int col, int i = 0, int j = 0) const {
    if constexpr (Cluster == 1) {
      tile(from, to, row, col, i, j);
    } else {
      static_assert(G::split == Cluster, "a tile for the whole cluster comes from a Global<..., Split = cluster>");
      constexpr int share = S::rows / Cluster;
      const int first = static_cast<int>(rank) * share;
      TW_UNROLL
      for (int panel = 0; panel < S::panels; ++panel)
        ptx::load_4d_multicast(to.bytes + panel * S::panel_bytes + first * kPanelBytes, from.tensor_map, barrier,
                               static_cast<u16>((1 << Cluster) - 1), col + panel * S::panel_cols, row + first, i, j);
    }
  }
};

/// The same copies by ordinary loads, for bases and strides that TMA cannot take. Slower: it exists so that nothing is refused.
struct StridedCopy {
  int thread;

  template <class G, class S>
  TW_INLINE void tile(const G& from, S& to, int row, int col, int i = 0, int j = 0) const {
    copy(from, to, 0, S::rows, col, [&](int r) { return Place{row + r, i, j, true}; });
  }
  template <class G, class S>
  TW_INLINE void part(const G& from, S& to, int first, int count, int row, int col, int i = 0, int j = 0) const {
    copy(from, to, first, count, col, [&](int r) { return Place{row + r - first, i, j, true}; });
  }
  template <class G, class S>
  TW_INLINE void window(const G& from, S& to, int row, int col, int i, int j) const {
    const Window& w = from.window;
    copy(from, to, 0, S::rows, col, [&](int r) {
      const int in_i = i + w.i(r), in_j = j + w.j(r);
      return Place{row + w.row(r), in_i, in_j, from.inside_outer(in_i, in_j)};
    });
  }
  template <class G, class S>
  TW_INLINE void tile_for_cluster(const G& from, S& to, int row, int col, int i = 0, int j = 0) const {
    tile(from, to, row, col, i, j);
  }

 private:
  /// Where a row of the tile comes from.
  struct Place {
    int row, i, j;
    bool inside;  ///< the outer dimensions
  };
  /// Rows `first` to `first` + count - 1 of the tile.
  template <class G, class S, class PlaceOf>
  TW_INLINE void copy(const G& from, S& to, int first, int count, int col, PlaceOf place_of) const {
    using Bits = conditional<sizeof(typename S::Element) == 1, u8,
                             conditional<sizeof(typename S::Element) == 2, u16, u32>>;  // nothing is computed: bits are moved
    constexpr int width = 16 / static_cast<int>(sizeof(Bits));
    constexpr int pieces = S::panels * S::panel_cols / width;
    const bool along_rows = from.stride_col != 1;  // then neighbouring threads take neighbouring rows, to read neighbouring addresses
    TW_NO_UNROLL
    for (int n = thread; n < count * pieces; n += kWarpgroupThreads) {
      const int r = first + (along_rows ? n % count : n / pieces);
      const int c = (along_rows ? n / count : n % pieces) * width;
      const Place place = place_of(r);
      u32 words[4] = {0, 0, 0, 0};
      TW_UNROLL
      for (int e = 0; e < width; ++e) {
        const bool inside = place.inside && from.inside(place.row, col + c + e);
        const u32 bits = inside ? u32{*from.template at<const Bits>(place.row, col + c + e, place.i, place.j)} : 0u;
        words[e * 4 / width] |= bits << (e * 32 * 4 / width % 32);
      }
      ptx::store_shared_16(ptx::address(to.bytes) + static_cast<u32>(S::offset(r, c)), words[0], words[1], words[2], words[3]);
    }
  }
};

/// The role that loads. put() waits for a free slot, then lets `fill(copy, slot)` copy into it.
template <bool kTma, int Cluster>
struct Producer {
  int thread;
  u32 rank;  ///< of this block in its cluster

  template <class RingType, class Fill>
  TW_INLINE void put(RingType& ring, Fill fill) const {
    const int index = ring.next.index;
    u64* const full = ring.full_barrier(index);
    auto& slot = ring.slot(index);
    ptx::wait(ring.empty_barrier(index), ring.next.parity ^ 1);
    ring.next.advance();
    if constexpr (kTma) {
      ptx::arrive_expect(full, sizeof(typename RingType::Slot));
      fill(TmaCopy<Cluster>{full, rank}, slot);
    } else {
      fill(StridedCopy{thread}, slot);
      ptx::fence_proxy();
      ptx::named_barrier(kProducerBarrier, kWarpgroupThreads);
      if (thread == 0) ptx::arrive(full);
    }
  }
};

}  // namespace tw::sm_90a
