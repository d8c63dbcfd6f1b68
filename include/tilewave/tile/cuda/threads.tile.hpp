#pragma once

#include "tilewave/tile/cuda/fragment.tile.hpp"

namespace tw::cuda {

/// The threads of a block that compute, `kWarps` warps: their positions and barriers, and loops over them.
template <int kWarps>
struct Threads {
  static constexpr int threads = kWarps * 32;
  int first_thread;  ///< the number of threads before them, which belong to the producer
  Position at = Position::of(ptx::thread_index() - static_cast<u32>(first_thread));

  /// The thread's number among those that compute.
  TW_INLINE int thread() const { return at.block_warp() * 32 + at.lane; }
  /// All threads that compute have arrived.
  TW_INLINE void sync() const { ptx::named_barrier(kComputeBarrier, threads); }
  TW_INLINE void sync_warpgroup() const { ptx::named_barrier(kWarpgroupBarrier + at.warpgroup, kWarpgroupThreads); }
  /// f(i) for every i < count, distributed over the block's threads.
  template <class Fn>
  TW_INLINE void parallel(int count, Fn f) const {
    for (int i = thread(); i < count; i += threads) f(i);
  }

 protected:
  /// Checks that a tile in registers is one of this block's.
  template <class F>
  static constexpr void own() {
    if constexpr (F::kind == TileKind::fragment) {
      static_assert(F::warps == kWarps, TW_FRAGMENT_ROWS);
      static_assert(accumulates<typename F::Element>, TW_ACCUMULATES);
    } else {
      static_assert(F::warps == kWarps, "Rows are dealt to the kernel's warps: give Rows the kernel's `warps`");
    }
  }
  /// The position, computed at the call. For code outside the main loop: the loop then needs no registers to keep the position for it.
  TW_INLINE Position here() const {
    return Position::of(static_cast<u32>(ptx::opaque(static_cast<int>(ptx::thread_index())) - first_thread));
  }
};

}  // namespace tw::cuda
