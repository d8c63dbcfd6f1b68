#include <algorithm>

#include "kernels/convolution/configs.hpp"
#include "kernels/product_tiles.hpp"

namespace tw::kernels::convolution {

namespace {

constexpr std::int64_t kLargestBox = 256;  // of TMA
constexpr std::int64_t kLargestStep = 8;

std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

/// A window of `extent` pixels along a dimension is copied at once, or nothing with this stride is.
bool copied_at_once(std::int64_t extent, std::int64_t stride) {
  return extent == 1 || stride > kLargestStep || extent * stride <= kLargestBox;
}

}  // namespace

std::span<const Config> configs() { return kConfigs; }

Tiling choose_window(const Problem& p, int rows) {
  Tiling best{};
  for (int log_width = 30; log_width >= 0; --log_width) {
    for (int log_height = 30 - log_width; log_height >= 0; --log_height) {
      const std::int64_t width = std::int64_t{1} << log_width, height = std::int64_t{1} << log_height;
      if (width * height > rows || !copied_at_once(width, p.stride_w) || !copied_at_once(height, p.stride_h)) continue;
      const Tiling tiling{{.log_width = log_width, .log_height = log_height},
                          divide_up(p.width, width),
                          divide_up(p.height, height),
                          divide_up(p.images, rows / (width * height))};
      if (best.across == 0 || tiling.tiles() < best.tiles()) best = tiling;
    }
  }
  return best;
}

bool valid(const Config& c, int element_bytes, bool w_rows) {
  return product_fits({c.bm, c.bn, c.stages, c.cluster}, element_bytes) && (!w_rows || c.bn % 64 == 0);
}

double predicted_time(const Problem& p, const Config& c) {
  const auto known = std::find_if(kConfigs.begin(), kConfigs.end(),
                                  [&](const Config& k) { return k.bm == c.bm && k.bn == c.bn && k.cluster == c.cluster; });
  const Cost cost = known != kConfigs.end() ? kCosts[static_cast<std::size_t>(known - kConfigs.begin())]
                                            : Cost{product_step_cost({c.bm, c.bn, c.stages, c.cluster}), c.cluster > 1 ? 5.0 : 4.0};
  const Tiling tiling = choose_window(p, c.bm);
  const std::int64_t in_image = divide_up(tiling.across * tiling.down, c.cluster) * c.cluster;
  const std::int64_t rounds = divide_up(in_image * tiling.deep * divide_up(p.channels, c.bn), p.units);
  return static_cast<double>(rounds) * (static_cast<double>(p.steps) * cost.step + cost.tile);
}

int choose_config(const Problem& p) {
  const auto faster = [&](const Config& a, const Config& b) { return predicted_time(p, a) < predicted_time(p, b); };
  return static_cast<int>(std::min_element(kConfigs.begin(), kConfigs.end(), faster) - kConfigs.begin());
}

}  // namespace tw::kernels::convolution
