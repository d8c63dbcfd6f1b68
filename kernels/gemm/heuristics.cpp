#include <algorithm>
#include <array>

#include "kernels/gemm/configs.hpp"
#include "kernels/gemm/variants.hpp"

namespace tw::kernels::gemm {

namespace {

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

/// Predicted time with K in `splits` parts, in steps of the second configuration.
double time_of(const Problem& p, const Config& c, const Cost& cost, std::int64_t splits) {
  const std::int64_t padded_m = ceil_div(ceil_div(p.m, c.bm), c.cluster) * c.cluster;
  const std::int64_t rounds = ceil_div(padded_m * ceil_div(p.n, c.bn) * p.batch * splits, p.units);
  const double steps = static_cast<double>(p.k * p.element_bytes) / 128 / static_cast<double>(splits);
  double time = static_cast<double>(rounds) * (steps * cost.step + cost.tile);
  if (splits > 1) {
    // A second launch, and f32 sums that are written and read, from the L2 cache at best.
    constexpr double launch = 4, bytes_per_step = 2e6;
    time += launch + static_cast<double>(p.m * p.n * p.batch * splits) * 8 / bytes_per_step;
  }
  return time;
}

}  // namespace

std::span<const Config> configs() { return kConfigs; }

int choose_config(const Problem& p) {
  int best = 0;
  double best_time = 0;
  for (int i = 0; i < static_cast<int>(kConfigs.size()); ++i) {
    const Config& c = kConfigs[static_cast<std::size_t>(i)];
    if (!allowed(c, p.addends, p.b_rows)) continue;
    const double time = time_of(p, c, kCosts[static_cast<std::size_t>(i)], 1);
    if (best_time == 0 || time < best_time) {
      best = i;
      best_time = time;
    }
  }
  return best;
}

int choose_splits(const Problem& p, const Config& config) {
  const auto same = [&](const Config& c) { return c.bm == config.bm && c.bn == config.bn && c.cluster == config.cluster; };
  const auto found = std::find_if(kConfigs.begin(), kConfigs.end(), same);
  if (found == kConfigs.end()) return 1;
  const Cost& cost = kCosts[static_cast<std::size_t>(found - kConfigs.begin())];
  constexpr int kMost = 16;
  constexpr std::int64_t kLeastSteps = 8;
  const std::int64_t steps = ceil_div(p.k * p.element_bytes, 128);
  int best = 1;
  for (int splits = 2; splits <= kMost && steps / splits >= kLeastSteps; ++splits)
    if (time_of(p, config, cost, splits) < 0.9 * time_of(p, config, cost, best)) best = splits;
  return best;
}

int choose_turned_splits(const Problem& p) {
  // Reading B is all there is to it: enough parts that every unit has one, of at least 4 steps.
  const std::int64_t tiles = ceil_div(p.m, kTurned.bm) * p.batch;
  const std::int64_t steps = ceil_div(p.k * p.element_bytes, 128);
  const std::int64_t wanted = ceil_div(2 * p.units, std::max<std::int64_t>(tiles, 1));
  return static_cast<int>(std::clamp<std::int64_t>(std::min(wanted, steps / 4), 1, 32));
}

}  // namespace tw::kernels::gemm
