#pragma once

#include <vector>

#include "kernels/variant.hpp"

namespace tw::kernels::gated_delta {

inline constexpr ShapeKey kShape[] = {
    {"batch", "sequences", 1}, {"seqlen", "tokens of a sequence"}, {"heads", "heads", 16}, {"dim", "dimensions of keys and values"}};

/// The instantiations that are compiled ahead of time.
std::vector<KernelVariant> registered();
/// The same for the generic target, whose tiles are smaller.
std::vector<KernelSpec> registered_generic();

}  // namespace tw::kernels::gated_delta
