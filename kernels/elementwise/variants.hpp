#pragma once

#include <vector>

#include "tilewave/kernel.hpp"

namespace tw::kernels::elementwise {

/// The instantiations that are compiled ahead of time.
std::vector<KernelSpec> registered();
std::vector<KernelSpec> registered_casts();

}  // namespace tw::kernels::elementwise
