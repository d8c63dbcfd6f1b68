#pragma once

#include <vector>

#include "kernels/variant.hpp"

namespace tw::kernels::moe {

inline constexpr ShapeKey kShape[] = {
    {"tokens", "tokens"}, {"experts", "experts", 256}, {"k", "experts of a token", 8}, {"dim", "elements of a token", 7168}};

/// The instantiations that are compiled ahead of time.
std::vector<KernelVariant> registered();

}  // namespace tw::kernels::moe
