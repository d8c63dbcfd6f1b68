#pragma once

#include <functional>
#include <string_view>
#include <vector>

#include "tilewave/tune.hpp"

// The first half of tune(), for callers with several problems, whose kernels are compiled together.

namespace tw {

/// The kernels that the candidates would run on a GPU. If a candidate's launch throws, the message becomes its `problem`.
std::vector<KernelSpec> kernels_of_candidates(const TuneProblem& problem, std::vector<TuneCandidate>& candidates);

/// Compiles the kernels for the GPU of `stream` in parallel, each once. Compile errors are reported when the kernel is launched.
void compile_candidates(const std::vector<KernelSpec>& specs, const Stream& stream, const std::function<void(std::string_view)>& progress);

}  // namespace tw
