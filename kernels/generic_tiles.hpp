#pragma once

#include <cstdint>
#include <vector>

#include "tilewave/device.hpp"

namespace tw::kernels {

/// Tiles of a product on the generic target (GpuTarget::cuda), with 128 bytes of K in a step. Each warp holds 64 x 64 or 32 x 64
/// accumulators.
struct GenericTile {
  int bm, bn, stages;
  int blocks;   ///< that a multiprocessor has shared memory for
  double step;  ///< time of a step, in steps of 128 x 256, when the multiprocessor's blocks take turns
};

/// Those that a block with so much shared memory can have, the largest first. At least two stages each: the copies of a step run under the
/// product of the one before.
std::vector<GenericTile> generic_tiles(std::int64_t shared_per_block);

/// Slots of `slot_bytes` that fit beside `other_bytes`, at most `most`.
int generic_stages(std::int64_t shared_per_block, int slot_bytes, int other_bytes, int most);

/// The shared memory of a block, if the stream's kernels are compiled for the generic target, else 0.
std::int64_t generic_shared_bytes(const Stream& stream);

/// Time of `tiles` tiles of `steps` steps each, in steps of 128 x 256.
double generic_time(const GenericTile& tile, std::int64_t tiles, double steps, int units);

}  // namespace tw::kernels
