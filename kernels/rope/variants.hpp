#pragma once

#include <vector>

#include "kernels/variant.hpp"

namespace tw::kernels::rope {

inline constexpr ShapeKey kShape[] = {{"batch", "sequences", 1},
                                      {"seqlen", "tokens per sequence; rows of a table"},
                                      {"heads", "heads per token", 16},
                                      {"dim", "head dimension; all of it is rotated"}};

/// The instantiations that are compiled ahead of time.
std::vector<KernelVariant> registered();

}  // namespace tw::kernels::rope
