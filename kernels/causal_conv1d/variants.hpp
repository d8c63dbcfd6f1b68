#pragma once

#include <vector>

#include "kernels/variant.hpp"

namespace tw::kernels::causal_conv1d {

inline constexpr ShapeKey kShape[] = {
    {"batch", "sequences", 1}, {"seqlen", "time steps of a sequence"}, {"channels", "channels"}, {"width", "taps of the filter", 4}};

/// The instantiations that are compiled ahead of time.
std::vector<KernelVariant> registered();

}  // namespace tw::kernels::causal_conv1d
