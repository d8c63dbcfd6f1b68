#pragma once

#include <array>

#include "kernels/gemm/variants.hpp"

namespace tw::kernels::gemm {

/// The GPU's tile configurations. A step is 128 bytes of K; slots and staging fill the 227 KB of shared memory.
inline constexpr std::array<Config, 5> kConfigs{{
    {128, 256, 4, 2},  // fewest bytes of shared memory per product; pairs of blocks load B once
    {128, 256, 4, 1},
    {128, 192, 4, 1},
    {128, 128, 6, 1},
    {64, 128, 8, 1},
}};

/// Time of one step of a tile of each configuration on one unit, relative to the first's; and of a tile's start and end. Fitted to runs of
/// `tilewave bench gemm --all-configs` on an H200.
inline constexpr std::array<double, 5> kStepTime{1.0, 1.02, 0.79, 0.58, 0.33};
inline constexpr double kTileTime = 4.0;

/// Reading addends for 256 or 192 columns of accumulators needs more registers than a thread has.
constexpr bool allowed(const Config& config, int element_bytes, bool addends) {
  static_cast<void>(element_bytes);
  return !addends || config.bn <= 128;
}

}  // namespace tw::kernels::gemm
