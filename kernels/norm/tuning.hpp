#pragma once

#include "kernels/tuner.hpp"

namespace tw::kernels::norm {

inline constexpr ShapeKey kTuneShape[] = {{"rows", "rows of x"},
                                          {"cols", "elements of a row"},
                                          {"layer", "1: layer norm; 0: RMS norm", 0},
                                          {"weight", "1: with a weight (and, for layer norm, a bias)", 1},
                                          {"residual", "1: a residual is added first, and the sum is stored", 0}};

/// The problem of layer_norm() or rms_norm() on a GPU with all tensors of the same dtype: how many warps hold a row.
FamilyProblem tune_problem(const ShapeValues& shape, DType dtype, Device device);

}  // namespace tw::kernels::norm
