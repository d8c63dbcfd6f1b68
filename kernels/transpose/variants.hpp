#pragma once

#include <vector>

#include "kernels/variant.hpp"

namespace tw::kernels::transpose {

inline constexpr ShapeKey kShape[] = {{"M", "rows of x"}, {"N", "columns of x"}, {"batch", "matrices", 1}};

/// The instantiations that are compiled ahead of time: all.
std::vector<KernelVariant> registered();

}  // namespace tw::kernels::transpose
