#include "models/sampling.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <vector>

#include "runtime/format.hpp"
#include "tilewave/error.hpp"

namespace tw::models {

void check(const SamplingOptions& options) {
  if (!(options.temperature >= 0 && options.temperature <= 100))
    throw InvalidArgument(tw::format("temperature is {}; it must be from 0 to 100", options.temperature));
  if (!(options.top_p > 0 && options.top_p <= 1))
    throw InvalidArgument(tw::format("top_p is {}; it must be above 0 and at most 1", options.top_p));
}

int sample(std::span<const float> scores, const SamplingOptions& options, std::uint64_t sequence, std::uint64_t step) {
  int best = -1;
  for (std::size_t i = 0; i < scores.size(); ++i)
    if (!std::isnan(scores[i]) && (best < 0 || scores[i] > scores[static_cast<std::size_t>(best)])) best = static_cast<int>(i);
  if (best < 0) return 0;
  const double largest = scores[static_cast<std::size_t>(best)];
  if (!std::isfinite(largest)) return best;

  std::vector<double> weights(scores.size());
  for (std::size_t i = 0; i < scores.size(); ++i)
    weights[i] = std::isnan(scores[i]) ? 0 : std::exp((scores[i] - largest) / options.temperature);
  std::vector<int> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  if (options.top_p < 1) {
    std::stable_sort(order.begin(), order.end(),
                     [&](int a, int b) { return weights[static_cast<std::size_t>(a)] > weights[static_cast<std::size_t>(b)]; });
    const double wanted = options.top_p * std::accumulate(weights.begin(), weights.end(), 0.0);
    double sum = 0;
    std::size_t kept = 0;
    while (kept < order.size() && sum < wanted) sum += weights[static_cast<std::size_t>(order[kept++])];
    order.resize(kept);
  }
  double sum = 0;
  for (const int i : order) sum += weights[static_cast<std::size_t>(i)];
  // Every draw has its own generator, so that sequences do not depend on each other.
  const auto low = [](std::uint64_t x) { return static_cast<std::uint32_t>(x); };
  std::seed_seq seeds{low(options.seed), low(options.seed >> 32), low(sequence), low(sequence >> 32), low(step), low(step >> 32)};
  std::mt19937_64 engine(seeds);
  double left = sum * static_cast<double>(engine() >> 11) * 0x1p-53;
  for (const int i : order) {
    left -= weights[static_cast<std::size_t>(i)];
    if (left < 0) return i;
  }
  return best;
}

}  // namespace tw::models
