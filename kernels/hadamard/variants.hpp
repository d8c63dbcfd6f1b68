#pragma once

#include <vector>

#include "kernels/variant.hpp"

namespace tw::kernels::hadamard {

inline constexpr ShapeKey kShape[] = {{"rows", "rows of x; their length is the kernel's"}};

/// The instantiations that are compiled ahead of time.
std::vector<KernelVariant> registered();

}  // namespace tw::kernels::hadamard
