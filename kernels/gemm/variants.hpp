#pragma once

#include <array>
#include <optional>
#include <vector>

#include "kernels/product_tiles.hpp"
#include "kernels/variant.hpp"

namespace tw::kernels::gemm {

/// A tile configuration.
using Config = ProductTile;

/// Tiles of fp8 products with scales for each 128 of K: two or three sums of 64 registers in each thread. Costs as in kProductTiles, in
/// steps of 256 x 128.
inline constexpr std::array<CostedTile, 5> kBlockScaledTiles{{{{256, 128, 3, 1, 8}, 1.0, 1},
                                                              {{192, 128, 4, 1, 8}, 0.70, 2},
                                                              {{128, 128, 5, 2, 8}, 0.525, 2},
                                                              {{64, 128, 6, 1, 16}, 0.40, 2},
                                                              {{64, 64, 8, 1, 16}, 0.26, 2}}};
/// The index of the one with the least predicted time for `groups` products, on a GPU of so many SMs.
int choose_block_scaled(std::int64_t groups, std::int64_t m, std::int64_t n, std::int64_t k, int units);

/// Of products with few rows of A, M: the most, the warps of a block, and the columns of B that each takes at once.
inline constexpr int kMostSkinnyRows = 16, kSkinnyWarps = 8, kSkinnyPanel = 64;
/// Their tiles: rows of B against all of A.
constexpr Config skinny_tile(int m) { return {32, m <= 8 ? 8 : kMostSkinnyRows, 3, 1, 1}; }

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

/// The CPU's tiles: bm and bn count. Measured (README.md). The first: packing costs a twentieth of the time. The second: for few rows, and
/// so that small products occupy every thread.
inline constexpr std::array<Config, 2> kCpuConfigs{{{384, 384, 2}, {32, 192, 2}}};

/// Whether A is stored [K, M], and B [K, N].
struct Layout {
  bool a_rows = false, b_rows = false;
  auto operator<=>(const Layout&) const = default;
};

/// What a choice of configuration depends on.
struct Problem {
  std::int64_t m, n, k, batch;
  int element_bytes;
  bool addends;                     ///< D is read as C, or a residual is
  bool b_rows;                      ///< B is stored [K, N]
  int units;                        ///< streaming multiprocessors
  std::int64_t generic_shared = 0;  ///< as in configs()
  bool begins = false;              ///< sums can begin with the addends: see LinearOptions
  bool pairs = false;               ///< pairs of columns make one of D
  int column_step = 1;              ///< columns of a head that is rotated, of which a tile has a multiple
  double end = 0;                   ///< what an activation adds to the end of 128 x 256 sums, in their steps
};

/// Those that the heuristic chooses from on a GPU; GemmOptions::config indexes this, or on the CPU kCpuConfigs. `generic_shared`: the
/// shared memory of a block, where kernels are compiled for the generic target (kernels/generic_tiles.hpp); 0: sm_90a's.
std::vector<Config> configs(std::int64_t generic_shared = 0);

/// Whether the GPU's kernel can have these tiles: accumulators fit the registers and slots the shared memory; reading addends at the end
/// for more than 128 columns of accumulators, or 96 with three warpgroups, needs more registers than a thread has, and so does reading any
/// in a team, or at the beginning for more than 192 columns, and rotating heads in a team; a B stored [K, N] is loaded in panels of 64
/// columns; teams make no pairs of columns into one.
bool valid(const Config& config, const Problem& problem);

/// The valid one of configs(problem.generic_shared) with the least predicted time. Plain arithmetic, the same everywhere.
int choose_config(const Problem& problem);

/// A configuration of sm_90a with as many slots as the generic target has room for, beside `other_bytes`: by default staging of the 16
/// warps that a block has at most.
Config fit_generic(Config tile, std::int64_t shared_bytes, int other_bytes = 16 * 16 * kStepBytes);

/// Whether the kernel for few rows of A can have these tiles: slots and the sums of all warps fit the shared memory, and each thread has a
/// result at least.
bool valid_skinny(const Config& config, std::int64_t m);

/// skinny_tile() with the slots that the generic target has room for, beside the sums of all warps.
Config fit_skinny(int m, std::int64_t shared_bytes);

/// Predicted time with K in `splits` splits or shares (kStreamK), in steps of 128 x 256.
double predicted_time(const Problem& problem, const CostedTile& config, int splits);

/// Tiles, and how K is divided: in splits, which a second kernel adds up, where D has too few tiles for the SMs; in shares (kStreamK) where
/// whole rounds of tiles would leave many SMs idle in the last one.
struct Choice {
  Config tile;
  int splits = 1;
};
/// The number of K splits of these tiles.
int choose_splits(const Problem& problem, const Config& config);
/// Of the tiles that a kernel for shares of K can have, those with the least predicted time, if there are any.
std::optional<Config> choose_stream_k(const Problem& problem);
/// What a call gets that chooses nothing itself. `divides`: whether K may be divided.
Choice choose(const Problem& problem, bool divides);

/// Whether a kernel for shares of K can have these tiles.
bool valid_stream_k(const Config& config, const Problem& problem);

/// The number of K splits actually used: `splits`, reduced so that no split is empty (nine steps in eight splits of two are five).
int used_splits(std::int64_t k, std::size_t element_bytes, int splits);

inline constexpr ShapeKey kShape[] = {{"M", "rows of A and D"},         {"N", "columns of B and D"},
                                      {"K", "columns of A, rows of B"}, {"batch", "number of products", 1},
                                      {"bias", "1: with a bias", 0},    {"splits", "number of K splits (split-K kernels)", 4}};

/// The instantiations that are compiled ahead of time.
std::vector<KernelVariant> registered();
/// The same on the generic target, for blocks that can have so much shared memory.
std::vector<KernelSpec> registered_generic(std::int64_t shared_bytes);

}  // namespace tw::kernels::gemm
