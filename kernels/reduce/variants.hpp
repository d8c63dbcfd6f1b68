#pragma once

#include <cstdint>
#include <vector>

#include "tilewave/kernel.hpp"

namespace tw::kernels::reduce {

/// How a dimension of `extent` elements is shared by blocks.
struct Splits {
  int count;
  int length;  ///< elements of each but the last, a multiple of the tile's
};
/// `blocks` there are without splits; `tile` elements go through a block at a time; `wanted` blocks keep the device busy.
Splits choose_splits(std::int64_t extent, std::int64_t blocks, int tile, int wanted);

/// The instantiations that are compiled ahead of time.
std::vector<KernelSpec> registered();

}  // namespace tw::kernels::reduce
