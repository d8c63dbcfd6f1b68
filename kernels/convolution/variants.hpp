#pragma once

#include <compare>
#include <span>
#include <vector>

#include "kernels/variant.hpp"
#include "tilewave/tile/language.tile.hpp"

namespace tw::kernels::convolution {

/// A tile configuration.
struct Config {
  int bm, bn, stages, cluster;
  auto operator<=>(const Config&) const = default;
};

/// All of them; Conv2dOptions::config indexes this.
std::span<const Config> configs();

/// The CPU's: bm and bn count. The first for large images, the second so that small ones occupy every thread.
std::span<const Config> cpu_configs();

/// What the choice of a configuration and of a window depends on.
struct Problem {
  std::int64_t images, height, width;  ///< of the output
  std::int64_t channels;               ///< of the output: F
  std::int64_t steps;                  ///< of 128 bytes of channels, over all taps
  std::int64_t stride_h, stride_w;
  int units;  ///< streaming multiprocessors
};

/// How many tiles of a configuration cover the output.
struct Tiling {
  Window window;  ///< of the output; its steps are 1
  std::int64_t across, down, deep;

  std::int64_t tiles() const { return across * down * deep; }
};

/// The window of `rows` pixels, of which the fewest tiles cover the output; of those with equally many the widest, then the
/// highest. As long as TMA can take
/// the strides it can take the window of the input, which is that many times as wide and high: boxes end at 256 elements.
Tiling choose_window(const Problem& problem, int rows);

/// Whether the GPU's kernel can have these tiles: kernels/product_tiles.hpp. Weights stored [.., C, F] are loaded in panels of 64 columns.
bool valid(const Config& config, int element_bytes, bool w_rows);

/// Predicted time of any valid configuration: rounds of tiles over the SMs, times the time of a tile.
double predicted_time(const Problem& problem, const Config& config);

/// The configuration with the least predicted time, as in kernels/gemm/heuristics.cpp.
int choose_config(const Problem& problem);

inline constexpr ShapeKey kShape[] = {{"N", "images"},
                                      {"H", "height of the input"},
                                      {"W", "width of the input"},
                                      {"C", "channels of the input"},
                                      {"F", "channels of the output"},
                                      {"K", "width and height of the kernel", 3},
                                      {"stride", "in both dimensions", 1},
                                      {"padding", "in both dimensions", 0},
                                      {"dilation", "in both dimensions", 1},
                                      {"bias", "1: with a bias", 0}};

/// The instantiations that are compiled ahead of time.
std::vector<KernelVariant> registered();
/// The same on the generic target, for blocks that can have so much shared memory.
std::vector<KernelSpec> registered_generic(std::int64_t shared_bytes);

}  // namespace tw::kernels::convolution
