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

TuneProblem tune_problem(const ShapeValues& shape, DType dtype, Device device);

}  // namespace tw::kernels::gemm
