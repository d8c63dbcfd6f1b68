#pragma once

#include <vector>

#include "kernels/variant.hpp"

namespace tw::kernels::elementwise {

inline constexpr ShapeKey kShape[] = {{"rows", "rows of each tensor"}, {"cols", "columns"}};

/// The instantiations that are compiled ahead of time.
std::vector<KernelVariant> registered();
std::vector<KernelVariant> registered_casts();

}  // namespace tw::kernels::elementwise
