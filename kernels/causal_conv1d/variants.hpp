#pragma once

#include <vector>

#include "kernels/variant.hpp"

namespace tw::kernels::causal_conv1d {

inline constexpr ShapeKey kShape[] = {
    {"batch", "sequences", 1}, {"seqlen", "time steps of a sequence"}, {"channels", "channels"}, {"width", "taps of the filter", 4}};

/// The instantiations that are compiled ahead of time.
std::vector<KernelVariant> registered();

/// Every kernel that a call may launch, in four variants: loads in whole pieces of 16 bytes or by elements, and stores likewise.
std::vector<KernelSpec> all_specs();

}  // namespace tw::kernels::causal_conv1d
