#pragma once

#include "tilewave/tile/cuda/schedule.tile.hpp"
#include "tilewave/tile/sm_90a/block.tile.hpp"
#include "tilewave/tile/sm_90a/producer.tile.hpp"
#include "tilewave/tile/sm_90a/target.tile.hpp"

// How a block runs a kernel: roles are split once (setmaxnreg requires it), each role walks the same tiles.

namespace tw::sm_90a {

/// Registers per thread. `Blocks` share the 64K registers of an SM; a block starts with its share spread evenly, and setmaxnreg can only
/// redistribute that. A producer that uses TMA needs 40 for the tile arithmetic (with three and more warpgroups that compute on an SM, 32
/// must do); one that copies by itself needs more, and leaves as much as possible to accumulators that two warpgroups hold.
template <int Warpgroups, int Blocks, bool kOneLoads>
constexpr int producer_registers() {
  if (Warpgroups * Blocks > 1) return !kOneLoads ? 56 : Warpgroups * Blocks > 2 ? 32 : 40;
  return kOneLoads ? 40 : 80;
}
template <int Warpgroups, int Blocks, bool kOneLoads>
constexpr int compute_registers() {
  constexpr int at_start = 65536 / (Blocks * (Warpgroups + 1) * kWarpgroupThreads) / 8 * 8;
  return (at_start * (Warpgroups + 1) - producer_registers<Warpgroups, Blocks, kOneLoads>()) / Warpgroups / 8 * 8;
}

/// Passes tiles from the producer to the consumer warpgroups, for dynamic schedules and kernels with a Work: a ring of two entries in
/// shared memory, after the barriers. An entry stays valid until all warpgroups have released it.
template <class Work>
struct TileQueue {
  static constexpr int slots = 2;
  static constexpr int offset = kBarrierBytes / 2;
  struct Entry {
    int more;  ///< 0: there is no further tile
    Work work;
  };
  static_assert(slots * sizeof(Entry) + 8 <= kBarrierBytes - offset, "a Work does not fit behind the barriers");
  int full, empty;
  int index = 0;
  u32 parity = 0;

  constexpr explicit TileQueue(Allocator& allocator)
      : full(allocator.barriers(slots, 1)), empty(allocator.barriers(slots, allocator.warpgroups)) {}

  TW_INLINE Entry& entry() const { return reinterpret_cast<Entry*>(shared_memory() + offset)[index]; }
  TW_INLINE void advance() {
    if (++index == slots) {
      index = 0;
      parity ^= 1;
    }
  }
  /// Producer: waits until the next entry may be written.
  TW_INLINE Entry& begin_put() const {
    ptx::wait(barrier_at(empty + index), parity ^ 1);
    return entry();
  }
  TW_INLINE void end_put(bool first_thread) {
    if (first_thread) ptx::arrive(barrier_at(full + index));
    advance();
  }
  TW_INLINE const Entry& take() const {
    ptx::wait(barrier_at(full + index), parity);
    return entry();
  }
  /// Releases the entry taken, for the caller's warpgroup.
  TW_INLINE void release() {
    ptx::named_barrier(kWarpgroupBarrier + ptx::thread_index() / kWarpgroupThreads - 1, kWarpgroupThreads);
    if (ptx::thread_index() % kWarpgroupThreads == 0) ptx::arrive(barrier_at(empty + index));
    advance();
  }
};

/// Runs a block from start to end. `On` is the kernel on target T.
template <class On, class T>
TW_INLINE void run(const typename On::Params& params, const TileGrid& grid) {
  using S = Shape<On, T>;
  using Schedule = typename tw::detail::ScheduleOf<On>::Type;
  using Work = decltype(tw::detail::work_of<On>(params, Tile{}));
  constexpr int cluster = S::cluster;
  constexpr bool dynamic = S::dispatch == Dispatch::dynamic;
  constexpr bool queued = dynamic || requires { typename On::Work; };  // the producer passes the tiles to the consumers
  static_assert(!dynamic || cluster == 1, "a dynamic schedule gives tiles to single blocks");
  static_assert(!queued || S::teams == 1, "teams need a schedule that is known to all");
  using ComputeBlock = Block<S::team_warpgroups, T::tma_load, T::tma_store, cluster, S::teams>;

  const u32 rank = cluster > 1 ? ptx::cluster_rank() : 0;
  const TileGrid clusters{grid.m / cluster, grid.n, grid.batch, grid.counter};
  const int first = static_cast<int>(ptx::block_index()) / cluster;
  const int stride = static_cast<int>(ptx::block_count()) / cluster;
  const auto tile_at = [&](int i) {
    Tile tile = Schedule::at(clusters, i);
    tile.m = tile.m * cluster + static_cast<int>(rank);
    return tile;
  };

  // Nothing before this touches global memory, so it may overlap with the end of the previous launch. A producer that need not wait leaves
  // it to the threads that compute to let the next launch begin: what was complete for this launch is then complete for the next.
  const auto begin = [] {
    ptx::wait_for_previous_launch();
    ptx::allow_next_launch();
  };
  if constexpr (!S::produces) {
    begin();
    const ComputeBlock block{0};
    cuda::run_without_rings<On, S::dispatch>(block, params, first, stride, clusters.count(), tile_at, [] {
      return Allocator{S::warpgroups, cluster};
    });
  } else {
    using Memory = typename On::Memory;
    constexpr bool all_load = S::all_load();
    if (ptx::thread_index() == 0) {
      Allocator allocator{S::team_warpgroups, cluster, true};
      Memory memory(allocator);
      TileQueue<Work> queue(allocator);
      ptx::fence_barrier_init();
    }
#if TW_ON_GPU
    if constexpr (cluster > 1)
      ptx::cluster_sync();
    else
      __syncthreads();
#endif
    if (ptx::thread_index() >= kWarpgroupThreads || !tw::detail::loads_early<On>(params)) begin();
    Allocator allocator{S::team_warpgroups, cluster};
    Memory memory(allocator);
    TileQueue<Work> queue(allocator);

    if (ptx::thread_index() < kWarpgroupThreads) {
      if constexpr (S::moves_registers) ptx::give_registers<producer_registers<S::warpgroups, S::min_blocks, !all_load>()>();
      const int thread = static_cast<int>(ptx::thread_index());
      const Producer<T::tma_load, cluster, all_load> producer{thread, rank};
      const auto load_tile = [&](const Work& work) {
        const int steps = On::steps(params, work);
        TW_NO_UNROLL
        for (int step = 0; step < steps; ++step) On::load(producer, params, work, step, memory);
      };
      if constexpr (S::adds) {
        if (thread / 32 == 1) ComputeBlock::add_all(On::outbox(memory), thread == 32);
      }
      if (all_load || thread == 0) {
        if constexpr (!queued) {
          TW_NO_UNROLL
          for (int i = first; i < clusters.count(); i += stride) load_tile(tile_at(i));
        } else {
          int i = first;
          TW_NO_UNROLL
          while (true) {
            auto& entry = queue.begin_put();
            if (thread == 0) {
              entry.more = i < (dynamic ? grid : clusters).count();
              if (entry.more) entry.work = tw::detail::work_of<On>(params, tile_at(i));
            }
            if constexpr (all_load) ptx::named_barrier(kProducerBarrier, kWarpgroupThreads);
            queue.end_put(thread == 0);
            if (i >= (dynamic ? grid : clusters).count()) break;
            load_tile(entry.work);
            if constexpr (!dynamic) {
              i += stride;
            } else if constexpr (!all_load) {
              i = cuda::next_tile(grid);
            } else {  // the other producer threads get it through shared memory
              volatile int* const shared = reinterpret_cast<volatile int*>(barrier_at(kBarrierBytes / 8 - 1));
              if (thread == 0) *shared = cuda::next_tile(grid);
              ptx::named_barrier(kProducerBarrier, kWarpgroupThreads);
              i = *shared;
              ptx::named_barrier(kProducerBarrier, kWarpgroupThreads);
            }
          }
        }
      }
    } else {
      if constexpr (S::moves_registers) ptx::take_registers<compute_registers<S::warpgroups, S::min_blocks, !all_load>()>();
      const int team = S::teams == 1 ? 0 : ptx::uniform(static_cast<int>(ptx::thread_index() / kWarpgroupThreads) - 1);
      const ComputeBlock block{kWarpgroupThreads * (1 + team), team};
      // Otherwise the compiler keeps the rings of a long kernel in local memory, and calls a function.
      const auto compute_tile = [&](const Work& work) __attribute__((always_inline)) {
        typename tw::detail::StateOf<On>::Type state;
        On::compute(block, params, work, memory, state);
        On::finish(block, params, work, memory, state);
      };
      if constexpr (queued) {
        TW_NO_UNROLL
        while (true) {
          const auto& entry = queue.take();
          if (!entry.more) break;
          compute_tile(entry.work);
          queue.release();
        }
      } else if constexpr (S::teams == 1) {
        TW_NO_UNROLL
        for (int i = first; i < clusters.count(); i += stride) compute_tile(tile_at(i));
      } else {
        // The slots of all tiles are in one order. A team takes those of its own tiles and passes over the others.
        auto& ring = On::ring(memory);
        int turn = 0;
        TW_NO_UNROLL
        for (int i = first; i < clusters.count(); i += stride, turn = turn + 1 == S::teams ? 0 : turn + 1) {
          const Tile tile = tile_at(i);
          const int steps = On::steps(params, tile);
          if (turn != team) {
            ring.pass_over(steps);
            continue;
          }
          // What a tile does before it takes its first slot need not wait for its turn.
          const bool last = i + stride >= clusters.count();
          ring.awaits_turn = i != first && steps > 0;
          ring.until_turn = last ? 0 : steps;
          if (steps == 0 && i != first) block.begin_turn();
          if (steps == 0 && !last) block.end_turn();
          compute_tile(tile);
        }
      }
      if constexpr (S::adds) block.close(On::outbox(memory));
      if (ptx::thread_index() % kWarpgroupThreads == 0) ptx::store_wait_read<0>();
    }
    if constexpr (cluster > 1) ptx::cluster_sync();  // no block exits while another may still write to its shared memory
  }
}

}  // namespace tw::sm_90a
