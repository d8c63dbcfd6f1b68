#pragma once

#include <vector>

#include "kernels/product_tiles.hpp"
#include "tilewave/tune.hpp"

// What the spaces of the families with products share.

namespace tw::kernels {

/// The first ranges of such a space: a tile's numbers, which mean the same whatever the list of configurations becomes.
inline std::vector<TuneRange> product_ranges() {
  return {{"bm", {64, 128, 192, 256}},
          {"bn", {std::begin(kProductColumns), std::end(kProductColumns)}},
          {"stages", every(2, 10)},
          {"cluster", {1, 2}}};
}
inline std::vector<int> values_of(const ProductTile& t) { return {t.bm, t.bn, t.stages, t.cluster}; }

/// The tile of a point's values, or of those that were kept for it.
inline ProductTile tile_of(const std::vector<int>& v) { return {v[0], v[1], v[2], v[3], v.size() > 4 ? v[4] : 1, v.size() > 6 ? v[6] : 1}; }

/// A tile of the CPU, with the times of its products and of packing, a twentieth of them in tiles of 384 x 384.
inline CostedTile cpu_cost(const ProductTile& t) { return {t, t.bm * t.bn + 10.0 * (t.bm + t.bn), 0}; }

}  // namespace tw::kernels
