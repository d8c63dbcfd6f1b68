#pragma once

#include "kernels/tuner.hpp"

namespace tw::kernels::softmax {

inline constexpr ShapeKey kTuneShape[] = {{"rows", "rows of x"}, {"cols", "elements of a row"}};

/// The problem of softmax() on a GPU with x and y of the same dtype: how many warps hold a row.
FamilyProblem tune_problem(const ShapeValues& shape, DType dtype, Device device);

}  // namespace tw::kernels::softmax
