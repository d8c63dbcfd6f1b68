#pragma once

#include <vector>

#include "tilewave/kernel.hpp"

namespace tw::kernels::transpose {

/// The instantiations that are compiled ahead of time: all.
std::vector<KernelSpec> registered();

}  // namespace tw::kernels::transpose
