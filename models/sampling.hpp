#pragma once

#include <cstdint>
#include <span>

namespace tw::models {

struct SamplingOptions {
  double temperature = 0;  ///< 0: greedy; otherwise the scores are divided by it. At most 100
  double top_p = 1;        ///< only the likeliest tokens that together have this probability; above 0, at most 1
  std::uint64_t seed = 0;
};

/// Throws InvalidArgument for a temperature or top_p out of range.
void check(const SamplingOptions& options);

/// Samples a token from softmax(scores / temperature) restricted to top_p (Holtzman et al., arXiv 1904.09751; ties in the order of tokens).
/// The temperature must be above 0. Never selects a NaN; returns 0 if there is nothing else. The result depends only on scores, options,
/// `sequence` and `step`.
int sample(std::span<const float> scores, const SamplingOptions& options, std::uint64_t sequence, std::uint64_t step);

}  // namespace tw::models
