#pragma once

#include "kernels/convolution/call.hpp"
#include "kernels/tuner.hpp"

namespace tw::kernels::convolution {

/// The key under which the call's tuned choice is stored: element type, order of the weights and all extents, strides, paddings and
/// dilations; on the CPU also the number of threads.
std::string problem_key(const Call& call);

/// Sets the call's configuration to the tuned one, if there is one and the call does not name another.
void use_tuned(Call& call);

inline constexpr ShapeKey kTuneShape[] = {{"N", "images"},
                                          {"H", "height of the input; 1: a one-dimensional convolution", 1},
                                          {"W", "width of the input"},
                                          {"C", "channels of the input"},
                                          {"F", "channels of the output"},
                                          {"K", "width (and height) of the kernel", 3},
                                          {"stride", "in every dimension", 1},
                                          {"padding", "in every dimension", 0},
                                          {"dilation", "in every dimension", 1},
                                          {"cf", "1: weights are stored [K, K, C, F]; 0: [F, K, K, C]", 0}};

FamilyProblem tune_problem(const ShapeValues& shape, DType dtype, Device device);

}  // namespace tw::kernels::convolution
