#include <algorithm>
#include <cmath>

#include "kernels/gemm/stream_k.tile.hpp"
#include "kernels/gemm/variants.hpp"
#include "kernels/generic_tiles.hpp"
#include "kernels/workspace.hpp"
#include "tilewave/gemm.hpp"

namespace tw::kernels::gemm {

namespace {

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

std::vector<CostedTile> costed_configs(std::int64_t generic_shared) {
  if (generic_shared > 0) return generic_tiles(generic_shared);
  std::vector<CostedTile> all(kProductTiles.begin(), kProductTiles.end());
  all.insert(all.begin() + 5, kTeamTiles.begin(), kTeamTiles.end());  // behind those that are best for most sizes
  return all;
}

/// How the kernel with these tiles divides the steps.
Shares shares_of(const Problem& p, const Config& c) {
  const std::int64_t tiles = ceil_div(p.m, c.bm) * ceil_div(p.n, c.bn) * p.batch;
  return Shares::of(static_cast<int>(tiles), static_cast<int>(ceil_div(p.k * p.element_bytes, kStepBytes)), p.units);
}

/// Predicted time in shares of all tiles' steps, in steps of 128 x 256.
double stream_k_time(const Problem& p, const CostedTile& c) {
  const Shares shares = shares_of(p, c);
  // The launch does not overlap with the one before. A tile's first part waits for the others and adds them; steps of different K share
  // less in the L2 cache.
  constexpr double launch = 2, other_part = 5, apart = 1.15;
  const double whole = static_cast<double>(shares.whole / p.units) * (shares.tile_steps * c.step + c.around);
  const double size = c.bm * c.bn / (128.0 * 256), other_parts = std::ceil(static_cast<double>(shares.tile_steps) / shares.steps);
  return launch + whole + shares.steps * c.step * apart + 2 * c.around + size * (p.end + other_part * other_parts);
}

}  // namespace

double predicted_time(const Problem& p, const CostedTile& c, int splits) {
  if (splits == kStreamK) return stream_k_time(p, c);
  const std::int64_t padded_m = ceil_div(ceil_div(p.m, c.bm), c.cluster) * c.cluster;
  const double steps = static_cast<double>(p.k * p.element_bytes) / kStepBytes / static_cast<double>(splits);
  CostedTile tile = c;
  if (splits == 1) tile.around += p.end * c.bm * c.bn / (128 * 256);
  const double time = product_time(tile, padded_m * ceil_div(p.n, c.bn) * p.batch * splits, steps, p.units);
  if (splits == 1) return time;
  // A second launch, and f32 sums that are written and read, from the L2 cache at best.
  constexpr double launch = 4, bytes_per_step = 2e6;
  return time + launch + static_cast<double>(p.m * p.n * p.batch * splits) * 8 / bytes_per_step;
}

std::vector<Config> configs(std::int64_t generic_shared) {
  const std::vector<CostedTile> tiles = costed_configs(generic_shared);
  return {tiles.begin(), tiles.end()};
}

bool valid(const Config& c, const Problem& p) {
  const int most_with_addends = p.begins ? 192 : c.bm <= 128 ? 128 : c.bm <= 192 ? 96 : 0;
  if (c.teams > 1 && (p.addends || p.pairs || p.column_step > 1)) return false;
  if (c.bn % p.column_step != 0) return false;
  if ((p.addends && c.bn > most_with_addends) || (p.b_rows && c.bn % 64 != 0)) return false;
  if (p.generic_shared == 0) return c.band >= 1 && product_fits(c, p.element_bytes);
  const std::vector<Config> all = configs(p.generic_shared);
  return std::find(all.begin(), all.end(), c) != all.end();
}

bool valid_stream_k(const Config& c, const Problem& p) {
  // Steps are counted in an int, and a launch has so many counters.
  const bool countable = p.units <= kMostCounters && static_cast<double>(p.units) * static_cast<double>(p.k) < 1 << 30;
  return c.cluster == 1 && c.teams == 1 && !p.pairs && valid(c, p) && p.k > 0 && countable;
}

int choose_config(const Problem& p) {
  return fastest_tile(
      costed_configs(p.generic_shared), [&](const CostedTile& c) { return valid(c, p); },
      [&](const CostedTile& c) { return predicted_time(p, c, 1); });
}

int choose_block_scaled(std::int64_t groups, std::int64_t m, std::int64_t n, std::int64_t k, int units) {
  return fastest_tile(
      kBlockScaledTiles, [](const CostedTile&) { return true; },
      [&](const CostedTile& t) {
        const std::int64_t tiles = groups * ceil_div(ceil_div(m, t.bm), t.cluster) * t.cluster * ceil_div(n, t.bn);
        return product_time(t, tiles, static_cast<double>(k) / kStepBytes, units);
      });
}

Config fit_generic(Config tile, std::int64_t shared_bytes, int other_bytes) {
  tile.cluster = tile.teams = 1;
  tile.stages = generic_stages(shared_bytes, (tile.bm + tile.bn) * kStepBytes, other_bytes, std::min(tile.stages, 4));
  return tile;
}

bool valid_skinny(const Config& c, std::int64_t m) {
  const int threads = kSkinnyWarps * 32, sums = kSkinnyWarps * c.bm * c.bn * 4, slot = c.bm * kSkinnyWarps * kStepBytes;
  const bool known = (c.bm == 16 || c.bm == 32) && (c.bn == 8 || c.bn == 16) && c.cluster == 1;
  return known && c.bn >= m && c.bm * c.bn >= threads && c.stages >= 2 && 1024 + c.stages * slot + sums <= kSharedBytesPerBlock;
}

Config fit_skinny(int m, std::int64_t shared_bytes) {
  Config tile = skinny_tile(m);
  tile.stages = generic_stages(shared_bytes, tile.bm * kSkinnyWarps * kStepBytes, kSkinnyWarps * tile.bm * tile.bn * 4, tile.stages);
  return tile;
}

int choose_splits(const Problem& p, const Config& config) {
  constexpr int kMost = 16;
  constexpr std::int64_t kLeastSteps = 8;
  const std::int64_t steps = ceil_div(p.k * p.element_bytes, kStepBytes);
  const CostedTile tile = costed(config);
  int best = 1;
  for (int splits = 2; splits <= kMost && steps / splits >= kLeastSteps; ++splits)
    if (predicted_time(p, tile, splits) < 0.9 * predicted_time(p, tile, best)) best = splits;
  return best;
}

std::optional<Config> choose_stream_k(const Problem& p) {
  const std::vector<CostedTile> tiles = costed_configs(p.generic_shared);
  const auto usable = [&](const CostedTile& c) { return valid_stream_k(c, p); };
  if (std::none_of(tiles.begin(), tiles.end(), usable)) return {};
  return tiles[static_cast<std::size_t>(fastest_tile(tiles, usable, [&](const CostedTile& c) { return predicted_time(p, c, kStreamK); }))];
}

Choice choose(const Problem& p, bool divides) {
  constexpr double sure = 0.85;  // of the time without shares: predictions are off by a tenth either way
  Choice choice{configs(p.generic_shared)[static_cast<std::size_t>(choose_config(p))]};
  if (!divides) return choice;
  choice.splits = choose_splits(p, choice.tile);
  const auto time = [&](const Choice& c) { return predicted_time(p, costed(c.tile), c.splits); };
  if (p.generic_shared > 0) return choice;  // its blocks share SMs, so ends of tiles already run under products
  const std::optional<Config> tile = choose_stream_k(p);
  if (tile && time({*tile, kStreamK}) < sure * time(choice)) choice = {*tile, kStreamK};
  return choice;
}

int used_splits(std::int64_t k, std::size_t element_bytes, int splits) {
  const std::int64_t steps = ceil_div(k * static_cast<std::int64_t>(element_bytes), kStepBytes);
  return static_cast<int>(ceil_div(steps, ceil_div(steps, splits)));
}

}  // namespace tw::kernels::gemm
