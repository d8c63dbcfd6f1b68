#pragma once

#include <algorithm>
#include <cstdint>

namespace tw {

/// How many blocks of a kernel a GPU has room for.
struct RoomForBlocks {
  std::int64_t at_once = 0;  ///< on all SMs: per_sm on each, or fewer if clusters leave some SMs empty
  int per_sm = 0, sms = 0;

  /// On all SMs but `sm_margin`, on one at least.
  std::int64_t with_margin(int sm_margin) const { return std::min(at_once, std::int64_t{per_sm} * std::max(sms - sm_margin, 1)); }
};

/// Blocks of a launch over `tiles` tiles: a multiple of `cluster`. `persistent`: blocks take one tile after the other.
inline std::int64_t launch_blocks(std::int64_t tiles, bool persistent, int cluster, const RoomForBlocks& room, int sm_margin) {
  const std::int64_t wanted = persistent ? std::min(tiles, room.with_margin(sm_margin)) : tiles;
  return std::max<std::int64_t>(wanted / cluster, 1) * cluster;
}

}  // namespace tw
