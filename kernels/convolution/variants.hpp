#pragma once

#include <array>
#include <vector>

#include "kernels/product_tiles.hpp"
#include "kernels/variant.hpp"
#include "tilewave/tile/language.tile.hpp"

namespace tw::kernels::convolution {

/// A tile configuration; its band is not used.
using Config = ProductTile;

/// Those of sm_90a: the matrix product's, whose step and shared memory are the same.
inline constexpr std::array<CostedTile, 4> kConfigs{kProductTiles[0], kProductTiles[1], kProductTiles[3], kProductTiles[4]};

/// The CPU's: bm and bn count. The first for large images: every pixel is packed once for each tap, so wide tiles share that work. The
/// second so that small ones occupy every thread.
inline constexpr std::array<Config, 2> kCpuConfigs{{{256, 384, 2}, {32, 192, 2}}};

/// What the choice of a configuration and of a window depends on.
struct Problem {
  std::int64_t images, height, width;  ///< of the output
  std::int64_t channels;               ///< of the output: F
  std::int64_t steps;                  ///< of 128 bytes of channels, over all taps
  std::int64_t stride_h, stride_w;
  int units;                        ///< streaming multiprocessors
  std::int64_t generic_shared = 0;  ///< as in configs()
};

/// Those that the heuristic chooses from on a GPU; Conv2dOptions::config indexes this. `generic_shared`: the shared memory of a block,
/// where kernels are compiled for the generic target (kernels/generic_tiles.hpp); 0: kConfigs.
std::vector<CostedTile> configs(std::int64_t generic_shared = 0);

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

/// Predicted time: rounds of tiles over the SMs, times the time of a tile.
double predicted_time(const Problem& problem, const CostedTile& tile);

/// The one of configs(problem.generic_shared) with the least predicted time.
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
