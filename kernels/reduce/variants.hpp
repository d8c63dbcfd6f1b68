#pragma once

#include <cstdint>
#include <vector>

#include "kernels/variant.hpp"

namespace tw::kernels::reduce {

/// How a dimension of `extent` elements is split among blocks.
struct Splits {
  int count;
  int length;  ///< elements of each split except the last, a multiple of the tile's
};
/// `blocks`: the number of blocks without splits. `tile`: elements that a block processes at a time. `wanted`: the number of blocks that
/// keeps the device busy.
Splits choose_splits(std::int64_t extent, std::int64_t blocks, int tile, int wanted);

inline constexpr ShapeKey kShape[] = {{"batch", "matrices", 1},
                                      {"rows", "rows of each matrix"},
                                      {"cols", "columns"},
                                      {"splits", "splits of each row or column, reduced by different blocks", 1}};

/// The instantiations that are compiled ahead of time.
std::vector<KernelVariant> registered();

}  // namespace tw::kernels::reduce
