#pragma once

#include "tilewave/tile/cuda/multistage.tile.hpp"
#include "tilewave/tile/cuda/schedule.tile.hpp"
#include "tilewave/tile/cuda/target.tile.hpp"

// How a block runs a kernel on any NVIDIA GPU.

namespace tw::cuda {

/// A tile of a dynamic schedule, as the first thread hands it to the others through shared memory. Two take turns: one is computed, and
/// read until then, while the next is fetched.
template <class Work>
struct QueuedTile {
  int more;  ///< 0: there is no further tile
  Work work;
  static TW_INLINE QueuedTile& at(int n) { return reinterpret_cast<QueuedTile*>(shared_memory())[n % 2]; }
};

/// One block's life. `On` is the kernel on target T.
template <class On, class T>
TW_INLINE void run(const typename On::Params& params, const TileGrid& grid) {
  using S = Shape<On, T>;
  using Schedule = typename tw::detail::ScheduleOf<On>::Type;
  const int first = static_cast<int>(ptx::block_index()), stride = static_cast<int>(ptx::block_count());
  const auto tile_at = [&](int i) { return Schedule::at(grid, i); };

  ptx::wait_for_previous_launch();
  ptx::allow_next_launch();
  if constexpr (!S::produces) {
    const BlockBase<S::warps(), T::piece_loads, T::piece_stores> block{0};
    run_without_rings<On, S::dispatch>(block, params, first, stride, grid.count(), tile_at, [] { return S::tiles(); });
  } else {
    using Work = decltype(tw::detail::work_of<On>(params, Tile{}));
    Allocator allocator = S::tiles();
    typename On::Memory memory(allocator);
    const auto compute = [&](auto& block, const Work& work, auto load_next) {
      typename tw::detail::StateOf<On>::Type state;
      On::compute(block, params, work, memory, state);
      load_next();
      On::finish(block, params, work, memory, state);
    };
    if constexpr (S::dispatch == Dispatch::dynamic) {
      using Queued = QueuedTile<Work>;
      static_assert(2 * sizeof(Queued) <= kTileQueueBytes, "a Work does not fit before the tiles");
      MultistageBlock<On, T, const Work*> block(params, memory);
      const auto queue = [&](int n, auto next) {
        if (ptx::thread_index() != 0) return;
        const int i = next();
        Queued& tile = Queued::at(n);
        tile.more = i < grid.count();
        if (tile.more) tile.work = tw::detail::work_of<On>(params, tile_at(i));
      };
      queue(0, [&] { return first; });
      block.sync();
      if (!Queued::at(0).more) return;
      block.begin(&Queued::at(0).work);
      bool more = true;
      TW_NO_UNROLL
      for (int n = 0; more; ++n) {
        queue(n + 1, [&] { return next_tile(grid); });
        compute(block, Queued::at(n).work, [&] {
          block.sync();
          more = Queued::at(n + 1).more;
          if (more) block.load_early(&Queued::at(n + 1).work);
        });
        block.sync();  // the tile's entry is written again
      }
    } else {
      MultistageBlock<On, T, Work> block(params, memory);
      Work work = tw::detail::work_of<On>(params, tile_at(first));
      block.begin(work);
      int i = first;
      TW_NO_UNROLL
      while (true) {
        Work following;
        bool more = false;
        if constexpr (S::dispatch == Dispatch::persistent) more = i + stride < grid.count();
        compute(block, work, [&] {
          if (!more) return;
          following = tw::detail::work_of<On>(params, tile_at(i + stride));
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
