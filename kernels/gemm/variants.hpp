#pragma once

#include <span>
#include <vector>

#include "kernels/variant.hpp"
#include "tilewave/gemm.hpp"

namespace tw::kernels::gemm {

/// A tile configuration on the GPU.
struct Config {
  int bm, bn, stages, cluster, band;
};

/// All of them; GemmOptions::config indexes this, or on the CPU cpu_configs().
std::span<const Config> configs();

/// The CPU's: bm and bn count. The first for many rows, the second for few and so that small products occupy every thread.
std::span<const Config> cpu_configs();

/// What a choice of configuration depends on.
struct Problem {
  std::int64_t m, n, k, batch;
  int element_bytes;
  bool addends;  ///< D is read as C, or a residual is
  bool b_rows;   ///< B is stored [K, N]
  int units;     ///< streaming multiprocessors
};

/// The configuration with the least predicted time: rounds of tiles over the units, times the time of a tile. Plain arithmetic, the same
/// everywhere.
int choose_config(const Problem& problem);

/// In how many parts of K, whose sums are added up by a second kernel: more than 1 where the tiles of D are too few for the units.
int choose_splits(const Problem& problem, const Config& config);

/// The same for the product turned around, with 2 to 16 rows: m is the long side, N of the call.
int choose_turned_splits(const Problem& problem);

/// Largest M of the kernel that turns the product around, so that the rows of B fill the tensor cores' 64.
inline constexpr int kMostFewRows = 16;

inline constexpr ShapeKey kShape[] = {{"M", "rows of A and D"},         {"N", "columns of B and D"},
                                      {"K", "columns of A, rows of B"}, {"batch", "products", 1},
                                      {"bias", "1: with a bias", 0},    {"splits", "parts of K, of kernels for sums over parts", 4}};

/// The instantiations that are compiled ahead of time.
std::vector<KernelVariant> registered();

}  // namespace tw::kernels::gemm
