#pragma once

#include <vector>

#include "tilewave/kernel.hpp"

namespace tw::kernels::softmax {

/// The instantiations that are compiled ahead of time.
std::vector<KernelSpec> registered();

}  // namespace tw::kernels::softmax
