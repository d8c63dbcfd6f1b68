#pragma once

#include <vector>

#include "kernels/variant.hpp"

namespace tw::kernels::bitnet {

inline constexpr ShapeKey kShape[] = {{"N", "rows of the weight"}, {"K", "columns of the weight"}, {"M", "rows of x", 1}};

/// The instantiations that are compiled ahead of time.
std::vector<KernelVariant> registered();

}  // namespace tw::kernels::bitnet
