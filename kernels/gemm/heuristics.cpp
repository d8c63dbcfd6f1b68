#include <algorithm>

#include "kernels/gemm/configs.hpp"
#include "kernels/gemm/variants.hpp"
#include "kernels/generic_tiles.hpp"
#include "kernels/product_tiles.hpp"

namespace tw::kernels::gemm {

namespace {

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

/// The measured cost of a configuration's tile, or one that follows from its size.
CostedConfig cost_of(const Config& c) {
  const auto found = std::find_if(kCostedConfigs.begin(), kCostedConfigs.end(), [&](const CostedConfig& known) {
    return known.bm == c.bm && known.bn == c.bn && known.cluster == c.cluster;
  });
  if (found != kCostedConfigs.end()) return *found;
  return {c, product_step_cost({c.bm, c.bn, c.stages, c.cluster}), c.cluster > 1 ? 5.0 : 4.0};
}

/// Predicted time with K in `splits` splits, in steps of the second configuration.
double time_of(const Problem& p, const CostedConfig& c, std::int64_t splits) {
  const std::int64_t padded_m = ceil_div(ceil_div(p.m, c.bm), c.cluster) * c.cluster;
  const std::int64_t rounds = ceil_div(padded_m * ceil_div(p.n, c.bn) * p.batch * splits, p.units);
  const double steps = static_cast<double>(p.k * p.element_bytes) / kStepBytes / static_cast<double>(splits);
  double time = static_cast<double>(rounds) * (steps * c.step + c.tile);
  if (splits > 1) {
    // A second launch, and f32 sums that are written and read, from the L2 cache at best.
    constexpr double launch = 4, bytes_per_step = 2e6;
    time += launch + static_cast<double>(p.m * p.n * p.batch * splits) * 8 / bytes_per_step;
  }
  return time;
}

/// On the generic target: those whose addends fit a thread's registers, too.
std::vector<GenericTile> tiles_for(const Problem& p) {
  std::vector<GenericTile> tiles = generic_tiles(p.generic_shared);
  if (p.addends) std::erase_if(tiles, [](const GenericTile& tile) { return tile.bn > 128; });
  return tiles;
}

}  // namespace

std::span<const Config> configs() { return kConfigs; }

bool valid(const Config& c, const Problem& p) {
  if (p.generic_shared > 0) {
    const std::vector<Config> all = configs_for(p);
    return std::find(all.begin(), all.end(), c) != all.end();
  }
  if (c.band < 1 || !product_fits({c.bm, c.bn, c.stages, c.cluster}, p.element_bytes)) return false;
  return (!p.addends || c.bn <= 128) && (!p.b_rows || c.bn % 64 == 0);
}

std::vector<Config> configs_for(const Problem& p) {
  if (p.generic_shared == 0) return {kConfigs.begin(), kConfigs.end()};
  constexpr int kBandRows = 2048;  // of A in a band, whose tiles are in flight together
  std::vector<Config> configs;
  for (const GenericTile& tile : tiles_for(p)) configs.push_back({tile.bm, tile.bn, tile.stages, 1, kBandRows / tile.bm});
  return configs;
}

int choose_config(const Problem& p) {
  if (p.generic_shared > 0) {
    const std::vector<GenericTile> tiles = tiles_for(p);
    const double steps = static_cast<double>(p.k * p.element_bytes) / kStepBytes;
    const auto time = [&](const GenericTile& t) {
      return generic_time(t, ceil_div(p.m, t.bm) * ceil_div(p.n, t.bn) * p.batch, steps, p.units);
    };
    const auto best = std::min_element(tiles.begin(), tiles.end(), [&](const auto& a, const auto& b) { return time(a) < time(b); });
    return static_cast<int>(best - tiles.begin());
  }
  int best = 0;
  double best_time = 0;
  for (int i = 0; i < static_cast<int>(kCostedConfigs.size()); ++i) {
    const CostedConfig& c = kCostedConfigs[static_cast<std::size_t>(i)];
    if (!valid(c, p)) continue;
    const double time = time_of(p, c, 1);
    if (best_time == 0 || time < best_time) {
      best = i;
      best_time = time;
    }
  }
  return best;
}

double predicted_time(const Problem& p, const Config& config, int splits) { return time_of(p, cost_of(config), splits); }

Config fit_generic(Config tile, std::int64_t shared_bytes) {
  constexpr int kStaging = 16 * 16 * kStepBytes;  // of 16 warps at most
  tile.cluster = 1;
  tile.stages = generic_stages(shared_bytes, (tile.bm + tile.bn) * kStepBytes, kStaging, std::min(tile.stages, 4));
  return tile;
}

int choose_splits(const Problem& p, const Config& config) {
  const CostedConfig cost = cost_of(config);
  constexpr int kMost = 16;
  constexpr std::int64_t kLeastSteps = 8;
  const std::int64_t steps = ceil_div(p.k * p.element_bytes, kStepBytes);
  int best = 1;
  for (int splits = 2; splits <= kMost && steps / splits >= kLeastSteps; ++splits)
    if (time_of(p, cost, splits) < 0.9 * time_of(p, cost, best)) best = splits;
  return best;
}

int choose_swapped_splits(const Problem& p) {
  // Reading B is all there is to it: enough splits that every SM has one, of at least 4 steps.
  const std::int64_t tiles = ceil_div(p.n, kSwapped.bm) * p.batch;
  const std::int64_t steps = ceil_div(p.k * p.element_bytes, kStepBytes);
  const std::int64_t wanted = ceil_div(2 * p.units, std::max<std::int64_t>(tiles, 1));
  return static_cast<int>(std::clamp<std::int64_t>(std::min(wanted, steps / 4), 1, 32));
}

int used_splits(std::int64_t k, std::size_t element_bytes, int splits) {
  const std::int64_t steps = ceil_div(k * static_cast<std::int64_t>(element_bytes), kStepBytes);
  return static_cast<int>(ceil_div(steps, ceil_div(steps, splits)));
}

}  // namespace tw::kernels::gemm
