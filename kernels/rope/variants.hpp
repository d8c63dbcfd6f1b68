#pragma once

#include <vector>

#include "kernels/variant.hpp"

namespace tw::kernels::rope {

inline constexpr ShapeKey kShape[] = {{"batch", "sequences", 1},
                                      {"seqlen", "tokens of each; of a table, its rows"},
                                      {"heads", "of a token", 16},
                                      {"dim", "elements of a head, all of them rotated"}};

/// The instantiations that are compiled ahead of time.
std::vector<KernelVariant> registered();

}  // namespace tw::kernels::rope
