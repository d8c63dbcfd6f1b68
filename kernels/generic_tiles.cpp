#include "kernels/generic_tiles.hpp"

#include <algorithm>

namespace tw::kernels {

namespace {

constexpr int kWarpStaging = 16 * kStepBytes;  // tilewave/tile/cuda/ring.tile.hpp
constexpr int kReservedPerBlock = 1024;        // by the system, of a multiprocessor's shared memory
constexpr int kMostStages = 4;
constexpr int kBandRows = 2048;  // of A in a band, whose tiles are in flight together
constexpr double kAround = 3;    // a tile's start and end, in its own steps

struct Shape {
  int bm, bn, warps, blocks;
  double step;
};
// Efficiency falls with the size: more bytes are copied and read for each product.
constexpr Shape kShapes[] = {{128, 256, 8, 1, 1.0}, {128, 128, 4, 2, 0.47}, {64, 128, 4, 2, 0.30}, {64, 64, 4, 3, 0.17}};

}  // namespace

int generic_stages(std::int64_t shared_per_block, int slot_bytes, int other_bytes, int most) {
  return static_cast<int>(std::clamp<std::int64_t>((shared_per_block - other_bytes) / slot_bytes, 1, most));
}

std::vector<CostedTile> generic_tiles(std::int64_t shared_per_block) {
  std::vector<CostedTile> tiles;
  for (const Shape& s : kShapes) {
    const int slot = (s.bm + s.bn) * kStepBytes, staging = s.warps * kWarpStaging;
    // As many blocks as wanted, if each still has three stages; else fewer with more.
    for (int blocks = s.blocks; blocks >= 1; --blocks) {
      const std::int64_t share = (shared_per_block + kReservedPerBlock) / blocks - kReservedPerBlock;
      const int least = blocks == 1 ? 2 : 3;
      if (share < staging + least * slot) continue;
      const ProductTile tile{s.bm, s.bn, generic_stages(share, slot, staging, kMostStages), 1, kBandRows / s.bm};
      tiles.push_back({tile, s.step, kAround * s.step, blocks});
      break;
    }
  }
  return tiles;
}

std::int64_t generic_shared_bytes(const Stream& stream) {
  if (!stream.device().is_cuda() || stream.target() != GpuTarget::cuda) return 0;
  return static_cast<std::int64_t>(device_info(stream.device()).shared_per_block);
}

}  // namespace tw::kernels
