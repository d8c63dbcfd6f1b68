#pragma once

#include <span>
#include <vector>

#include "tilewave/gemm.hpp"
#include "tilewave/kernel.hpp"

namespace tw::kernels::gemm {

/// A tile configuration on the GPU.
struct Config {
  int bm, bn, stages, cluster, band;
};

/// All of them; GemmOptions::config indexes this.
std::span<const Config> configs();

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

/// The instantiations that are compiled ahead of time.
std::vector<KernelSpec> registered();

}  // namespace tw::kernels::gemm
