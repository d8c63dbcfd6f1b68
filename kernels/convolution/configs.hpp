#pragma once

#include <array>

#include "kernels/convolution/variants.hpp"

namespace tw::kernels::convolution {

/// The GPU's tile configurations: those of the matrix product (kernels/gemm/configs.hpp), whose step and shared memory are the same.
inline constexpr std::array<Config, 4> kConfigs{{{128, 256, 4, 2}, {128, 256, 4, 1}, {128, 128, 6, 1}, {64, 128, 8, 1}}};

/// Time of one step of a tile, and of a tile's start and end, in steps of the second configuration, from the matrix product's runs.
struct Cost {
  double step, tile;
};
inline constexpr std::array<Cost, 4> kCosts{{{0.985, 5}, {1.0, 4}, {0.53, 4}, {0.30, 4}}};

}  // namespace tw::kernels::convolution
