#pragma once

#include <compare>
#include <span>
#include <vector>

#include "kernels/variant.hpp"
#include "tilewave/gemm.hpp"

namespace tw::kernels::gemm {

/// A tile configuration on the GPU.
struct Config {
  int bm = 0, bn = 0, stages = 0, cluster = 1, band = 1;
  auto operator<=>(const Config&) const = default;
};

/// Those that the heuristic chooses from; GemmOptions::config indexes this, or on the CPU cpu_configs().
std::span<const Config> configs();

/// The CPU's: bm and bn count. The first for many rows, the second for few and so that small products occupy every thread.
std::span<const Config> cpu_configs();

/// What a choice of configuration depends on.
struct Problem {
  std::int64_t m, n, k, batch;
  int element_bytes;
  bool addends;                     ///< D is read as C, or a residual is
  bool b_rows;                      ///< B is stored [K, N]
  int units;                        ///< streaming multiprocessors
  std::int64_t generic_shared = 0;  ///< of a block, where kernels are compiled for the generic target; else 0
};

/// Whether the GPU's kernel can have these tiles: accumulators fit the registers and slots the shared memory; reading addends for more than
/// 128 columns of accumulators needs more registers than a thread has; a B stored [K, N] is loaded in panels of 64 columns.
bool valid(const Config& config, const Problem& problem);

/// Those that the heuristic chooses from for a problem: configs(), or the tiles of the generic target.
std::vector<Config> configs_for(const Problem& problem);

/// The configuration of configs_for(problem) with the least predicted time: rounds of tiles over the SMs, times the time of a tile. Plain
/// arithmetic, the same everywhere.
int choose_config(const Problem& problem);

/// A configuration of sm_90a with as many slots as the generic target has room for.
Config fit_generic(Config tile, std::int64_t shared_bytes);

/// Predicted time of any valid configuration with K in `splits` splits, in the heuristic's unit: to rank a tuner's candidates.
double predicted_time(const Problem& problem, const Config& config, int splits);

/// The number of K splits, which a second kernel adds up: more than 1 where D has too few tiles for the SMs.
int choose_splits(const Problem& problem, const Config& config);

/// The same for 2 to 16 rows, where the operands are swapped.
int choose_swapped_splits(const Problem& problem);

/// The number of K splits actually used: `splits`, reduced so that no split is empty (nine steps in eight splits of two are five).
int used_splits(std::int64_t k, std::size_t element_bytes, int splits);

/// Largest M of the kernel that swaps the operands, so that the rows of B fill the tensor cores' 64.
inline constexpr int kMostSkinnyRows = 16;

inline constexpr ShapeKey kShape[] = {{"M", "rows of A and D"},         {"N", "columns of B and D"},
                                      {"K", "columns of A, rows of B"}, {"batch", "number of products", 1},
                                      {"bias", "1: with a bias", 0},    {"splits", "number of K splits (split-K kernels)", 4}};

/// The instantiations that are compiled ahead of time.
std::vector<KernelVariant> registered();
/// The same on the generic target, for blocks that can have so much shared memory.
std::vector<KernelSpec> registered_generic(std::int64_t shared_bytes);

}  // namespace tw::kernels::gemm
