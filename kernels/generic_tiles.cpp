#include "kernels/generic_tiles.hpp"

#include <algorithm>

namespace tw::kernels {

namespace {

constexpr int kLine = 128;                // bytes of a row in a slot
constexpr int kWarpStaging = 16 * kLine;  // tilewave/tile/cuda/ring.tile.hpp
constexpr int kReservedPerBlock = 1024;   // by the system, of a multiprocessor's shared memory
constexpr int kMostStages = 4;

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

std::vector<GenericTile> generic_tiles(std::int64_t shared_per_block) {
  std::vector<GenericTile> tiles;
  for (const Shape& s : kShapes) {
    const int slot = (s.bm + s.bn) * kLine, staging = s.warps * kWarpStaging;
    // As many blocks as wanted, if each still has three stages; else fewer with more.
    for (int blocks = s.blocks; blocks >= 1; --blocks) {
      const std::int64_t share = (shared_per_block + kReservedPerBlock) / blocks - kReservedPerBlock;
      const int least = blocks == 1 ? 2 : 3;
      if (share < staging + least * slot) continue;
      tiles.push_back({s.bm, s.bn, generic_stages(share, slot, staging, kMostStages), blocks, s.step});
      break;
    }
  }
  return tiles;
}

std::int64_t generic_shared_bytes(const Stream& stream) {
  if (!stream.device().is_cuda() || stream.target() != GpuTarget::cuda) return 0;
  return static_cast<std::int64_t>(device_info(stream.device()).shared_per_block);
}

double generic_time(const GenericTile& tile, std::int64_t tiles, double steps, int units) {
  constexpr double around = 3;  // a tile's start and end, in its own steps
  const std::int64_t at_once = std::int64_t{units} * tile.blocks;
  const std::int64_t rounds = (tiles + at_once - 1) / at_once;
  // The last round may leave multiprocessors with fewer blocks, which are faster then.
  const std::int64_t last = tiles - (rounds - 1) * at_once, deep = (last + units - 1) / units;
  return static_cast<double>((rounds - 1) * tile.blocks + deep) * (steps + around) * tile.step;
}

}  // namespace tw::kernels
