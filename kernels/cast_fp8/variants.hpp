#pragma once

#include <vector>

#include "tilewave/kernel.hpp"

namespace tw::kernels::cast_fp8 {

/// The instantiations that are compiled ahead of time.
std::vector<KernelSpec> registered();

}  // namespace tw::kernels::cast_fp8
