#pragma once

#include <array>

#include "kernels/convolution/variants.hpp"

namespace tw::kernels::convolution {

/// The GPU's tile configurations: those of the matrix product (kernels/gemm/configs.hpp), whose step and shared memory are the same.
inline constexpr std::array<Config, 3> kConfigs{{{128, 256, 4}, {128, 128, 6}, {64, 128, 8}}};

/// Time of one step of a tile, and of a tile's start and end, in steps of the first configuration, from the matrix product's runs.
struct Cost {
  double step, tile;
};
inline constexpr std::array<Cost, 3> kCosts{{{1.0, 4}, {0.53, 4}, {0.30, 4}}};

}  // namespace tw::kernels::convolution
