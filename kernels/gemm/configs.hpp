#pragma once

#include <array>

#include "kernels/gemm/variants.hpp"

namespace tw::kernels::gemm {

/// Tiles that the heuristic chooses from, with the time of one step of a tile, and of a tile's start and end, in steps of the second
/// configuration. A step is 128 bytes of K; slots and staging fill the 227 KB of shared memory. The costs are fitted to runs of `tilewave
/// bench gemm --all-configs` on an H200; a few per cent either way, as much as the card's power limit moves them from run to run.
struct CostedConfig : Config {
  double step, tile;
};
inline constexpr std::array<CostedConfig, 5> kCostedConfigs{{
    {{128, 256, 4, 2, 8}, 0.985, 5},  // fewest bytes from the L2 cache for a product: pairs of blocks load B once. For many rounds of tiles
    {{128, 256, 4, 1, 8}, 1.0, 4},    // without the cost of starting and ending in pairs
    {{128, 192, 4, 1, 16}, 0.76, 4},
    {{128, 128, 6, 1, 16}, 0.53, 4},
    {{64, 128, 8, 1, 16}, 0.30, 4},
}};
inline constexpr auto kConfigs = [] {
  std::array<Config, kCostedConfigs.size()> configs{};
  for (std::size_t i = 0; i < configs.size(); ++i) configs[i] = kCostedConfigs[i];
  return configs;
}();

/// Tiles of fp8 products with scales for each 128 of K: three sums of 64 registers in each thread.
inline constexpr std::array<Config, 2> kBlockScaledConfigs{{{128, 128, 6, 2, 8}, {128, 128, 6, 1, 16}}};

/// Tiles of products with 2 to 16 rows, whose operands are swapped: 128 rows of B against all of A.
inline constexpr Config kSwapped{128, kMostSkinnyRows, 10, 1, 1};

/// Of products with one row: rows of B in a block, columns of a piece, warps.
struct GemvConfig {
  int rows, piece, warps;
};
inline constexpr GemvConfig kGemv{8, 1024, 4};

/// Tiles of the kernel that adds up the splits of K.
struct SumConfig {
  int rows, cols;
};
inline constexpr SumConfig kSum{4, 256};

}  // namespace tw::kernels::gemm
