#pragma once

#include "kernels/gemm/call.hpp"
#include "kernels/tuner.hpp"

namespace tw::kernels::gemm {

/// The key under which the call's tuned choice is stored: "gemm bf16 nt M=4096,N=4096,K=4096,batch=1", with " addends" if C or a residual
/// is read, and on the CPU with the number of threads. Calls with other sizes have other keys.
std::string problem_key(const Call& call);

/// Sets the call's configuration to the tuned one, if there is one and the call does not name another.
void use_tuned(Call& call);

inline constexpr ShapeKey kTuneShape[] = {{"M", "rows of A and D"},
                                          {"N", "columns of B and D"},
                                          {"K", "columns of A, rows of B"},
                                          {"batch", "number of products", 1},
                                          {"a_rows", "1: A is stored [K, M]", 0},
                                          {"b_rows", "1: B is stored [K, N]; 0: [N, K], as weights are", 0},
                                          {"residual", "1: a residual is added", 0}};

/// The values of a configuration and its number of K splits, in the order of the space's ranges.
std::vector<int> values_of(const Config& config, int splits);

/// All tiles, stages, clusters, bands and K splits that the GPU kernel supports for the call, on a GPU with `units` SMs. Points that are
/// equivalent to another one are not valid: bands higher than the grid, and splits that would be empty.
TuneSpace gpu_space(const Call& call, int units);

FamilyProblem tune_problem(const ShapeValues& shape, DType dtype, Device device);

}  // namespace tw::kernels::gemm
