#pragma once

#include "tilewave/tile/cuda/multistage.tile.hpp"
#include "tilewave/tile/cuda/schedule.tile.hpp"
#include "tilewave/tile/cuda/target.tile.hpp"

// How a block runs a kernel on any NVIDIA GPU.

namespace tw::cuda {

/// A tile of a dynamic schedule, which the first thread passes to the others through shared memory. There are two: one is read while its
/// tile is computed, the other is written meanwhile.
template <class Work>
struct QueuedTile {
  int more;  ///< 0: there is no further tile
  Work work;
  static TW_INLINE QueuedTile& at(int n) { return reinterpret_cast<QueuedTile*>(shared_memory())[n % 2]; }
};

/// Writes the grid's i-th tile, or that there is none, for all threads. The first thread calls it.
template <class On, class Work>
TW_INLINE void queue_tile(const typename On::Params& params, const TileGrid& grid, int n, int i) {
  QueuedTile<Work>& tile = QueuedTile<Work>::at(n);
  tile.more = i < grid.count();
  if (tile.more) tile.work = tw::detail::work_of<On>(params, tw::detail::ScheduleOf<On>::Type::at(grid, i));
}

/// Runs a block from start to end. `On` is the kernel on target T. Calls that are not inlined would keep rings in local memory.
template <class On, class T>
TW_INLINE void run(const typename On::Params& params, const TileGrid& grid) {
  using S = Shape<On, T>;
  using Schedule = typename tw::detail::ScheduleOf<On>::Type;
  const int first = static_cast<int>(ptx::block_index()), stride = static_cast<int>(ptx::block_count());

  ptx::wait_for_previous_launch();
  ptx::allow_next_launch();
  if constexpr (!S::produces) {
    const ProductBlock<S::warps(), T::piece_loads, T::piece_stores> block{0};
    run_without_rings<On, S::dispatch>(
        block, params, first, stride, grid.count(), [&](int i) { return Schedule::at(grid, i); }, [] { return S::tiles(); });
  } else {
    using Work = decltype(tw::detail::work_of<On>(params, Tile{}));
    using State = typename tw::detail::StateOf<On>::Type;
    Allocator allocator = S::tiles();
    typename On::Memory memory(allocator);
    // The next tile's first steps are loaded during finish() of this one.
    if constexpr (S::dispatch == Dispatch::dynamic) {
      using Queued = QueuedTile<Work>;
      static_assert(2 * sizeof(Queued) <= kTileQueueBytes, "a Work does not fit before the tiles");
      MultistageBlock<On, T, const Work*> block(params, memory);
      if (ptx::thread_index() == 0) queue_tile<On, Work>(params, grid, 0, first);
      block.sync();
      if (!Queued::at(0).more) return;
      block.begin(&Queued::at(0).work);
      bool more = true;
      TW_NO_UNROLL
      for (int n = 0; more; ++n) {
        if (ptx::thread_index() == 0) queue_tile<On, Work>(params, grid, n + 1, next_tile(grid));
        const Work& work = Queued::at(n).work;
        State state;
        On::compute(block, params, work, memory, state);
        block.sync();
        more = Queued::at(n + 1).more;
        if (more) block.load_early(&Queued::at(n + 1).work);
        On::finish(block, params, work, memory, state);
        block.sync();  // the tile's entry is about to be overwritten
      }
    } else {
      MultistageBlock<On, T, Work> block(params, memory);
      Work work = tw::detail::work_of<On>(params, Schedule::at(grid, first));
      block.begin(work);
      int i = first;
      // A function of its own, which is inlined late: otherwise the compiler computes the copies' addresses long before they are used, in
      // registers that the accumulators need.
      const auto compute_tile = [&](const Work& tile, auto load_next) {
        State state;
        On::compute(block, params, tile, memory, state);
        load_next();
        On::finish(block, params, tile, memory, state);
      };
      TW_NO_UNROLL
      while (true) {
        Work following;
        bool more = false;
        if constexpr (S::dispatch == Dispatch::persistent) more = i + stride < grid.count();
        compute_tile(work, [&] {
          if (!more) return;
          following = tw::detail::work_of<On>(params, Schedule::at(grid, i + stride));
          block.load_early(following);
        });
        if (!more) break;
        work = following;
        i += stride;
      }
    }
  }
}

}  // namespace tw::cuda
