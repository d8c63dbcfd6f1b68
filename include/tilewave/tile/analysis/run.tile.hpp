#pragma once

#include "tilewave/tile/analysis/block.tile.hpp"
#include "tilewave/tile/analysis/copy.tile.hpp"

#if !TW_ON_GPU

namespace tw::analysis {

/// Bytes of shared memory that a block of the kernel needs.
template <class On>
i64 memory_bytes() {
  return tw::detail::memory_bytes_of<On, Allocator>();
}

/// Counts one tile into `tally` and `cost`. `arena`: memory_bytes<On>() bytes.
template <class On>
void run(const typename On::Params& params, Tile tile_of_grid, u8* arena) {
  const auto tile = tw::detail::work_of<On>(params, tile_of_grid);
  Allocator allocator{arena};
  constexpr bool persistent = tw::detail::ScheduleOf<On>::Type::dispatch != Dispatch::plain;
  if constexpr (tw::detail::has_load<On>) {
    struct Loads {
      const typename On::Params& params;
      int rank;  ///< the block's rank in its cluster
      const decltype(tile)& work;
      typename On::Memory memory;
      int step = 0;
      int steps;
    } loads{params, tile_of_grid.m % tw::detail::cluster_of<On>(), tile, typename On::Memory(allocator), 0, On::steps(params, tile)};
    const auto pull = [](void* context) {
      Loads& l = *static_cast<Loads*>(context);
      if (l.step == l.steps) return false;
      const Producer producer{l.rank};
      On::load(producer, l.params, l.work, l.step++, l.memory);
      return true;
    };
    Block<tw::detail::fragment_rows_of<On>()> block(pull, &loads, allocator.last_buffer);
    typename tw::detail::StateOf<On>::Type state{};
    On::compute(block, params, tile, loads.memory, state);
    On::finish(block, params, tile, loads.memory, state);
    block.end(persistent);
  } else {
    using Block = Block<tw::detail::fragment_rows_of<On>()>;
    if constexpr (requires { typename On::Memory; }) {
      typename On::Memory memory(allocator);
      Block block([](void*) { return false; }, nullptr, allocator.last_buffer);
      On::compute(block, params, tile, memory);
      block.end(persistent);
    } else {
      Block block;
      On::compute(block, params, tile);
    }
  }
}

}  // namespace tw::analysis

#endif  // !TW_ON_GPU
