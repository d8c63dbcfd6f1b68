#pragma once

#include <vector>

#include "kernels/variant.hpp"

namespace tw::kernels::norm {

inline constexpr ShapeKey kShape[] = {{"rows", "rows of x"},
                                      {"cols", "elements of a row"},
                                      {"weight", "1: with a weight (and, for layer norm, a bias)", 1},
                                      {"residual", "1: a residual is added first, and the sum is stored", 0}};

/// The instantiations that are compiled ahead of time.
std::vector<KernelVariant> registered();

}  // namespace tw::kernels::norm
