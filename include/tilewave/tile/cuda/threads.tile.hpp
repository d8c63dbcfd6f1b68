#pragma once

#include "tilewave/tile/cuda/fragment.tile.hpp"

namespace tw::cuda {

/// The `kWarps` warps of a block that compute: their positions, their barriers, and loops distributed over them.
template <int kWarps>
struct Threads {
  static constexpr int threads = kWarps * 32;
  int first_thread;         ///< the number of the block's threads before these: the producer's, and those of other teams
  int first_warpgroup = 0;  ///< the number of the warpgroups of other teams before these, for barriers and staging
  Position at = Position::of(ptx::thread_index() - static_cast<u32>(first_thread));

  /// The thread's index among those that compute.
  TW_INLINE int thread() const { return at.block_warp() * 32 + at.lane; }
  /// Waits until all threads that compute have arrived.
  TW_INLINE void sync() const { ptx::named_barrier(barrier(), threads); }
  /// sync() that returns true, in all threads, if f holds for any of the vector's elements.
  template <class T, class Tile, class Fn>
  TW_INLINE bool sync_any(const RowVector<T, Tile>& vector, Fn f) const {
    bool found = false;
    for (const auto& x : vector.x) found = found || f(x);
    return ptx::named_barrier_any(barrier(), threads, found);
  }
  TW_INLINE void sync_warpgroup() const { sync_warpgroup(at); }
  /// Calls f(i) for every i < count, distributed over the block's threads.
  template <class Fn>
  TW_INLINE void parallel(int count, Fn f) const {
    for (int i = thread(); i < count; i += threads) f(i);
  }

 protected:
  /// The barrier of the threads that compute: a constant but for teams, so that it takes no register.
  TW_INLINE u32 barrier() const {
    return kWarps == 4 ? static_cast<u32>(kWarpgroupBarrier + first_warpgroup) : static_cast<u32>(kComputeBarrier);
  }
  TW_INLINE void sync_warpgroup(const Position& p) const {
    ptx::named_barrier(static_cast<u32>(kWarpgroupBarrier + first_warpgroup + p.warpgroup), kWarpgroupThreads);
  }
  /// Checks that a tile in registers belongs to this block.
  template <class F>
  static constexpr void own() {
    if constexpr (F::kind == TileKind::fragment) {
      static_assert(F::warps == kWarps, TW_FRAGMENT_ROWS);
      static_assert(accumulates<typename F::Element>, TW_ACCUMULATES);
    } else {
      static_assert(F::warps == kWarps, "Rows are dealt to the kernel's warps: give Rows the kernel's `warps`");
    }
  }
  /// The position, recomputed at the call. Code outside the main loop uses it, so that the loop does not hold the position in registers.
  TW_INLINE Position here() const {
    return Position::of(static_cast<u32>(ptx::opaque(static_cast<int>(ptx::thread_index())) - first_thread));
  }
};

}  // namespace tw::cuda
