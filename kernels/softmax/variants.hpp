#pragma once

#include <vector>

#include "kernels/variant.hpp"

namespace tw::kernels::softmax {

inline constexpr ShapeKey kShape[] = {{"rows", "rows of x"}, {"cols", "elements of a row"}};

/// The instantiations that are compiled ahead of time.
std::vector<KernelVariant> registered();

}  // namespace tw::kernels::softmax
