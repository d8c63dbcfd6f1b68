#pragma once

#include <vector>

#include "kernels/variant.hpp"

namespace tw::kernels::embedding {

inline constexpr ShapeKey kShape[] = {{"ids", "rows of y"}, {"dim", "columns"}, {"vocabulary", "rows of the table"}};

/// The instantiations that are compiled ahead of time.
std::vector<KernelVariant> registered();

}  // namespace tw::kernels::embedding
