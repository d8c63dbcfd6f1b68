#pragma once

#include <vector>

#include "kernels/variant.hpp"

namespace tw::kernels::causal_conv1d {

inline constexpr ShapeKey kShape[] = {
    {"batch", "sequences", 1}, {"seqlen", "time steps of a sequence"}, {"channels", "channels"}, {"width", "taps of the filter", 4}};

/// The instantiations that are compiled ahead of time.
std::vector<KernelVariant> registered();

/// All kernels that calls launch, each for tensors that are loaded or stored in whole pieces of 16 bytes, and for those that are not.
std::vector<KernelSpec> all_specs();

}  // namespace tw::kernels::causal_conv1d
