#pragma once

#include "tilewave/tile/cuda/fragment.tile.hpp"

namespace tw::cuda {

/// The `kWarps` warps of a block that compute: their positions, their barriers, and loops distributed over them.
template <int kWarps>
struct Threads {
  static constexpr int threads = kWarps * 32;
  int first_thread;  ///< the number of the block's threads before these, which belong to the producer
  Position at = Position::of(ptx::thread_index() - static_cast<u32>(first_thread));

  /// The thread's index among those that compute.
  TW_INLINE int thread() const { return at.block_warp() * 32 + at.lane; }
  /// Waits until all threads that compute have arrived.
  TW_INLINE void sync() const { ptx::named_barrier(kComputeBarrier, threads); }
  TW_INLINE void sync_warpgroup() const { ptx::named_barrier(kWarpgroupBarrier + at.warpgroup, kWarpgroupThreads); }
  /// Calls f(i) for every i < count, distributed over the block's threads.
  template <class Fn>
  TW_INLINE void parallel(int count, Fn f) const {
    for (int i = thread(); i < count; i += threads) f(i);
  }

 protected:
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
