#include <algorithm>

#include "kernels/gemm/variants.hpp"
#include "kernels/generic_tiles.hpp"

namespace tw::kernels::gemm {

namespace {

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

std::vector<CostedTile> costed_configs(std::int64_t generic_shared) {
  if (generic_shared > 0) return generic_tiles(generic_shared);
  std::vector<CostedTile> all(kProductTiles.begin(), kProductTiles.end());
  all.insert(all.begin() + 5, kTeamTiles.begin(), kTeamTiles.end());  // behind those that are best for most sizes
  return all;
}

}  // namespace

double predicted_time(const Problem& p, const CostedTile& c, int splits) {
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

int used_splits(std::int64_t k, std::size_t element_bytes, int splits) {
  const std::int64_t steps = ceil_div(k * static_cast<std::int64_t>(element_bytes), kStepBytes);
  return static_cast<int>(ceil_div(steps, ceil_div(steps, splits)));
}

}  // namespace tw::kernels::gemm
