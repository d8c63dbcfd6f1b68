#pragma once

#include <algorithm>
#include <array>
#include <compare>
#include <cstdint>
#include <iterator>

// What a block of a product's kernel takes on an SM of sm_90a, as arithmetic on its tile sizes: the families whose kernels multiply tiles
// from a ring choose and prune with it, before anything is compiled.

namespace tw::kernels {

/// BM x BN sums; slots of 128 bytes of K of both operands; blocks of a cluster share B's. Tiles are done in bands of `band` rows (of
/// clusters), where a kernel has them. The warpgroups may be teams, which take tiles in turn: bm / 64 of them.
struct ProductTile {
  int bm = 0, bn = 0, stages = 0, cluster = 1, band = 1, teams = 1;
  auto operator<=>(const ProductTile&) const = default;
};

/// Tiles with the time of one step and that of a tile's start and end, in steps of 128 x 256. Of tiles that teams take in turn, only the
/// last one's end shows.
struct CostedTile : ProductTile {
  double step, around;
  int blocks = 1;  ///< of a multiprocessor, which take turns
};

/// Predicted time of `tiles` tiles of `steps` steps each, in rounds over `units` multiprocessors.
constexpr double product_time(const CostedTile& tile, std::int64_t tiles, double steps, int units) {
  const std::int64_t at_once = std::int64_t{units} * tile.blocks;
  const std::int64_t rounds = (tiles + at_once - 1) / at_once;
  if (tile.teams > 1) return static_cast<double>(rounds) * steps * tile.step + tile.around;
  // The last round may leave multiprocessors with fewer blocks, which are faster then.
  const std::int64_t last = tiles - (rounds - 1) * at_once, deep = (last + units - 1) / units;
  return static_cast<double>((rounds - 1) * tile.blocks + deep) * (steps * tile.step + tile.around);
}

/// The index of the tile with the least time(tile), of those that are valid(tile); 0 if none is.
template <class Tiles, class Valid, class Time>
int fastest_tile(const Tiles& tiles, Valid valid, Time time) {
  int best = 0;
  double best_time = 0;
  for (std::size_t i = 0; i < tiles.size(); ++i) {
    if (!valid(tiles[i])) continue;
    const double t = time(tiles[i]);
    if (best_time != 0 && t >= best_time) continue;
    best = static_cast<int>(i);
    best_time = t;
  }
  return best;
}

inline constexpr int kStepBytes = 128;               ///< of K, in each row of a slot
inline constexpr int kSharedBytesPerBlock = 232448;  ///< CUDA C++ Programming Guide, compute capability 9.0

/// Of the ring and of what results leave through: two slots of 64 x 128 bytes for each warpgroup. Results of 4 bytes leave from registers.
constexpr int product_shared_bytes(const ProductTile& t, int element_bytes) {
  const int staging = element_bytes == 4 ? 0 : t.bm / 64 * 2 * 64 * kStepBytes;
  return t.stages * (t.bm + t.bn) * kStepBytes + staging;
}

/// BN that the tensor cores' products have here: tilewave/tile/sm_90a/wgmma.tile.hpp.
inline constexpr int kProductColumns[] = {16, 32, 64, 80, 96, 128, 160, 176, 192, 256};

/// Whether the sums fit the registers of up to four warpgroups, and slots and barriers the shared memory.
constexpr bool product_fits(const ProductTile& t, int element_bytes) {
  constexpr int barriers = 1024, registers = 65536, loader = 128 * 40, overhead = 48;
  const int warpgroups = t.bm / 64;
  if (t.bm % 64 != 0 || warpgroups < 1 || warpgroups > 4) return false;
  if (std::find(std::begin(kProductColumns), std::end(kProductColumns), t.bn) == std::end(kProductColumns)) return false;
  if (t.stages < 2 || t.cluster < 1 || t.cluster > 2) return false;
  if (t.teams != 1 && (t.teams != warpgroups || element_bytes != 2)) return false;
  if (t.teams * t.bn / 2 + (t.teams > 1 ? 40 : overhead) > std::min((registers - loader) / (warpgroups * 128), 232)) return false;
  return barriers + product_shared_bytes(t, element_bytes) <= kSharedBytesPerBlock;
}

/// The predicted time of a step, in steps of 128 x 256: the tensor cores take bm bn, and longer the less each byte of the operands is used.
constexpr double product_step_cost(const ProductTile& t) {
  constexpr double full = 128 * 256, reuse = 1.0 / 128 + 1.0 / 256;
  const double bytes = 1.0 / t.bm + 1.0 / t.bn / t.cluster;
  return t.bm * t.bn / full * (1 + 16 * std::max(bytes - reuse, 0.0));
}

/// Tiles for sm_90a whose costs are known: slots and staging fill the 227 KB of shared memory. The costs are fitted to runs of `tilewave
/// bench gemm --all-configs` on an H200; a few per cent either way, as much as the card's power limit moves them from run to run.
inline constexpr std::array<CostedTile, 13> kProductTiles{{
    {{128, 256, 4, 2, 8}, 0.985, 5},  // fewest bytes from the L2 cache for a product: pairs of blocks load B once. For many rounds of tiles
    {{128, 256, 4, 1, 8}, 1.0, 4},    // without the cost of starting and ending in pairs
    {{128, 192, 4, 1, 16}, 0.76, 4},
    {{128, 128, 6, 1, 16}, 0.53, 4},
    {{64, 128, 8, 1, 16}, 0.30, 4},
    // For sizes that leave SMs without a tile in the last round of the ones above.
    {{256, 128, 3, 1, 8}, 1.03, 3.3},  // four warpgroups store: for results that take longer than the products
    {{192, 192, 3, 1, 8}, 1.11, 4},
    {{192, 160, 4, 1, 8}, 0.94, 4},
    {{192, 128, 4, 1, 8}, 0.79, 5},
    {{192, 96, 4, 1, 8}, 0.64, 4},
    {{64, 192, 6, 1, 16}, 0.37, 4},
    {{64, 96, 10, 1, 16}, 0.25, 4},
    {{64, 64, 10, 1, 16}, 0.20, 4},
}};

/// Tiles that teams take in turn: for many of them with few steps each, whose results leave under the products of the next ones.
inline constexpr std::array<CostedTile, 2> kTeamTiles{{
    {{128, 192, 4, 1, 16, 2}, 0.735, 8},
    {{128, 160, 5, 1, 16, 2}, 0.65, 8},
}};

/// The tile with its known costs, or with those that follow from its size.
constexpr CostedTile costed(const ProductTile& t) {
  const auto alike = [&](const CostedTile& known) {
    return known.bm == t.bm && known.bn == t.bn && known.cluster == t.cluster && known.teams == t.teams;
  };
  for (const CostedTile& known : kProductTiles)
    if (alike(known)) return {t, known.step, known.around};
  for (const CostedTile& known : kTeamTiles)
    if (alike(known)) return {t, known.step, known.around};
  return {t, product_step_cost(t), t.teams > 1 ? 8.0 : t.cluster > 1 ? 5.0 : 4.0};
}

/// How much longer than predicted a tile takes because of its stages alone, to rank points that are alike otherwise: none where the ring
/// takes all of a block's shared memory, and little where it takes half of it, so that an SM has two blocks. Other numbers of stages are
/// rarely best: they come last, so that candidates differ in their tiles.
constexpr double stages_cost(const ProductTile& t, int element_bytes) {
  constexpr int half = kSharedBytesPerBlock / 2 - 2048;
  ProductTile deeper = t;
  ++deeper.stages;
  if (!product_fits(deeper, element_bytes) || deeper.stages > 10) return 1;
  const bool two_blocks = product_shared_bytes(t, element_bytes) <= half;
  if (two_blocks && product_shared_bytes(deeper, element_bytes) > half) return 1.03;
  return 1.5;
}

}  // namespace tw::kernels
