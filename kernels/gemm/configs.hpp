#pragma once

#include <array>

#include "kernels/gemm/variants.hpp"

namespace tw::kernels::gemm {

/// The GPU's tile configurations. A step is 128 bytes of K; slots and staging fill the 227 KB of shared memory.
inline constexpr std::array<Config, 5> kConfigs{{
    {128, 256, 4, 2, 8},  // fewest bytes from the L2 cache for a product: pairs of blocks load B once. For many rounds of tiles
    {128, 256, 4, 1, 8},  // without the cost of starting and ending in pairs
    {128, 192, 4, 1, 16},
    {128, 128, 6, 1, 16},
    {64, 128, 8, 1, 16},
}};

/// Time of one step of a tile, and of a tile's start and end, in steps of the second configuration. Fitted to runs of `tilewave bench gemm
/// --all-configs` on an H200; a few per cent either way, as much as the card's power limit moves them from run to run.
struct Cost {
  double step, tile;
};
inline constexpr std::array<Cost, 5> kCosts{{{0.985, 5}, {1.0, 4}, {0.76, 4}, {0.53, 4}, {0.30, 4}}};

/// Tiles of fp8 products with scales for each 128 of K: three sums of 64 registers in each thread.
inline constexpr std::array<Config, 2> kBlockScaledConfigs{{{128, 128, 6, 2, 8}, {128, 128, 6, 1, 16}}};

/// Tiles of products with 2 to 16 rows, turned around: 128 rows of B against all of A.
inline constexpr Config kTurned{128, kMostFewRows, 10, 1, 1};

/// Of products with one row: rows of B in a block, columns of a piece, warps.
struct GemvConfig {
  int rows, piece, warps;
};
inline constexpr GemvConfig kGemv{8, 1024, 4};

/// Reading addends for more than 128 columns of accumulators needs more registers than a thread has; a B stored [K, N] is loaded in panels
/// of 64 columns.
constexpr bool allowed(const Config& config, bool addends, bool b_rows) {
  return (!addends || config.bn <= 128) && (!b_rows || config.bn % 64 == 0);
}

}  // namespace tw::kernels::gemm
