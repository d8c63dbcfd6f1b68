#include <array>

#include "kernels/gemm/configs.hpp"
#include "kernels/gemm/variants.hpp"

namespace tw::kernels::gemm {

std::span<const Config> configs() { return kConfigs; }

int choose_config(const Problem& p) {
  int best = 0;
  double best_time = 0;
  for (int i = 0; i < static_cast<int>(kConfigs.size()); ++i) {
    const Config& c = kConfigs[static_cast<std::size_t>(i)];
    if (!allowed(c, p.addends, p.b_rows)) continue;
    const auto tiles_m = (p.m + c.bm - 1) / c.bm;
    const auto tiles_n = (p.n + c.bn - 1) / c.bn;
    const auto padded_m = (tiles_m + c.cluster - 1) / c.cluster * c.cluster;
    const auto rounds = (padded_m * tiles_n * p.batch + p.units - 1) / p.units;
    const double steps = static_cast<double>(p.k * p.element_bytes) / 128;
    const double time =
        static_cast<double>(rounds) * (steps * kCosts[static_cast<std::size_t>(i)].step + kCosts[static_cast<std::size_t>(i)].tile);
    if (best_time == 0 || time < best_time) {
      best = i;
      best_time = time;
    }
  }
  return best;
}

}  // namespace tw::kernels::gemm
