#pragma once

#include <functional>
#include <string_view>
#include <vector>

#include "tilewave/tune.hpp"

// tune()'s first half, for callers that have several problems: their kernels are compiled together.

namespace tw {

/// The kernels that the candidates would run on a GPU. A candidate whose launch throws gets that as its problem.
std::vector<KernelSpec> kernels_of_candidates(const TuneProblem& problem, std::vector<TuneCandidate>& candidates);

/// Compiles the kernels in parallel, each once. One that does not compile says so when it is launched.
void compile_ahead(const std::vector<KernelSpec>& specs, const std::function<void(std::string_view)>& progress);

}  // namespace tw
