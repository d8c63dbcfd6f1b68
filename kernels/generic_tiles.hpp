#pragma once

#include <cstdint>
#include <vector>

#include "kernels/product_tiles.hpp"
#include "tilewave/device.hpp"

namespace tw::kernels {

/// Tiles of a product on the generic target (GpuTarget::cuda) that a block with so much shared memory can have, the largest first. Each
/// warp holds 64 x 64 or 32 x 64 accumulators. At least two stages each: the copies of a step run under the product of the one before.
std::vector<CostedTile> generic_tiles(std::int64_t shared_per_block);

/// Slots of `slot_bytes` that fit beside `other_bytes`, at most `most`.
int generic_stages(std::int64_t shared_per_block, int slot_bytes, int other_bytes, int most);

/// The shared memory of a block, if the stream's kernels are compiled for the generic target, else 0.
std::int64_t generic_shared_bytes(const Stream& stream);

}  // namespace tw::kernels
