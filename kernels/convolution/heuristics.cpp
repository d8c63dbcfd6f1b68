#include <algorithm>

#include "kernels/convolution/variants.hpp"
#include "kernels/generic_tiles.hpp"

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

std::vector<CostedTile> configs(std::int64_t generic_shared) {
  return generic_shared > 0 ? generic_tiles(generic_shared) : std::vector(kConfigs.begin(), kConfigs.end());
}

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

bool valid(const Config& c, int element_bytes, bool w_rows) { return product_fits(c, element_bytes) && (!w_rows || c.bn % 64 == 0); }

double predicted_time(const Problem& p, const CostedTile& c) {
  const Tiling tiling = choose_window(p, c.bm);
  const std::int64_t in_image = divide_up(tiling.across * tiling.down, c.cluster) * c.cluster;
  return product_time(c, in_image * tiling.deep * divide_up(p.channels, c.bn), static_cast<double>(p.steps), p.units);
}

int choose_config(const Problem& p) {
  return fastest_tile(
      configs(p.generic_shared), [](const CostedTile&) { return true; }, [&](const CostedTile& c) { return predicted_time(p, c); });
}

}  // namespace tw::kernels::convolution
