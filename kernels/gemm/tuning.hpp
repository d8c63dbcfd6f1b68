#pragma once

#include "kernels/gemm/call.hpp"
#include "kernels/tuner.hpp"

namespace tw::kernels::gemm {

/// What tuned choices know the call by: "gemm bf16 nt M=4096,N=4096,K=4096,batch=1", with " addends" when C or a residual is read, and on
/// the CPU the number of threads. Exact: other sizes are other problems.
std::string problem_key(const Call& call);

/// Sets the call's configuration to the tuned one, if it names none and there is one.
void use_tuned(Call& call);

inline constexpr ShapeKey kTuneShape[] = {{"M", "rows of A and D"},
                                          {"N", "columns of B and D"},
                                          {"K", "columns of A, rows of B"},
                                          {"batch", "products", 1},
                                          {"a_rows", "1: A is stored [K, M]", 0},
                                          {"b_rows", "1: B is stored [K, N]; 0: [N, K], as weights are", 0},
                                          {"addends", "1: a residual is added", 0}};

/// The values of a configuration and of its splits of K, in the order of the space's ranges.
std::vector<int> values_of(const Config& config, int splits);

/// All tiles, stages, clusters, bands and splits that the GPU's kernel can have for the call, on a GPU of `units` SMs. Those that do the
/// same as another point are not valid: bands of more rows of tiles than there are, splits that would be empty.
TuneSpace gpu_space(const Call& call, int units);

FamilyProblem tune_problem(const ShapeValues& shape, DType dtype, Device device);

}  // namespace tw::kernels::gemm
