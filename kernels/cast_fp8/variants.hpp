#pragma once

#include <vector>

#include "kernels/variant.hpp"

namespace tw::kernels::cast_fp8 {

inline constexpr ShapeKey kShape[] = {
    {"rows", "rows of x"}, {"cols", "elements of a row"}, {"groups", "groups of rows of the same size (grouped kernel)", 8}};

/// The instantiations that are compiled ahead of time.
std::vector<KernelVariant> registered();
/// Of them, the cast of rotated heads of 128 columns.
KernelVariant rotated_heads_variant();
/// All that calls of cast_fp8_heads() and head_scales() compile.
std::vector<KernelSpec> all_head_specs();

}  // namespace tw::kernels::cast_fp8
