#pragma once

#include <vector>

#include "kernels/variant.hpp"

namespace tw::kernels::swiglu {

inline constexpr ShapeKey kShape[] = {{"rows", "rows of y"}, {"cols", "elements of a row of y"}};

/// The instantiations that are compiled ahead of time.
std::vector<KernelVariant> registered();

}  // namespace tw::kernels::swiglu
