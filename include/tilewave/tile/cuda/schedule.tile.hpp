#pragma once

#include "tilewave/tile/cuda/memory.tile.hpp"

// The parts of schedules that are the same on every NVIDIA target.

namespace tw::cuda {

/// Returns the index of the next tile, from a counter that all blocks share. The last block that finds no tile left resets the counter for
/// the next launch.
TW_INLINE int next_tile(const TileGrid& grid) {
  u32* const counter = ptx::opaque(&grid)->counter;  // read here instead of being kept in registers
  const int tile = static_cast<int>(ptx::block_count() + ptx::fetch_add(counter, 1));
  if (tile >= grid.count() && ptx::fetch_add(counter + 1, 1) == ptx::block_count() - 1) {
    counter[0] = 0;
    counter[1] = 0;
  }
  return tile;
}

/// Runs a kernel without rings, for one block. `Block` is a BlockBase with the target's additions. `tile_at(i)` is tile number i of
/// `count`; the block starts with tile `first` and, if it is persistent, takes every `stride`-th tile.
template <class On, Dispatch dispatch, class Block, class TileAt, class MakeAllocator>
TW_INLINE void run_without_rings(const Block& block, const typename On::Params& params, int first, int stride, int count, TileAt tile_at,
                                 MakeAllocator make_allocator) {
  const auto compute_tile = [&](int i) {
    if constexpr (requires { typename On::Memory; }) {
      auto allocator = make_allocator();
      typename On::Memory memory(allocator);
      On::compute(block, params, tile_at(i), memory);
    } else {
      On::compute(block, params, tile_at(i));
    }
  };
  if constexpr (dispatch == Dispatch::plain) {
    compute_tile(first);
  } else {
    for (int i = first; i < count; i += stride) compute_tile(i);
  }
}

}  // namespace tw::cuda
