#pragma once

#include "tilewave/tile/types.tile.hpp"

// Arguments of block.load(operand, packed, scales, decode): the scale of each code, and how the two are combined.
//
// `scales` is a RowVector with a scale for each row of the operand, or an object with a constant `group`, the number of neighbouring codes
// that share a scale, and operator()(row, group). Rows and groups are counted in the packed tile. It may return any type, which is passed
// to decode(number, scale) unchanged.

namespace tw {

/// A scale for each `Group` codes from a Shared tile of [rows, groups] or, with Contract::rows, [groups, rows]. `first` is the tile's
/// column (or row) that holds the first group: copies begin at multiples of 16 bytes, which may be before it.
template <int Group, Contract order, class Tile>
struct GroupScales {
  static constexpr int group = Group;
  const Tile& tile;
  int first;
  TW_INLINE float operator()(int row, int number) const {
    if constexpr (order == Contract::columns)
      return static_cast<float>(tile.get(row, first + number));
    else
      return static_cast<float>(tile.get(first + number, row));
  }
};
template <int Group, Contract order = Contract::columns, class Tile>
TW_INLINE GroupScales<Group, order, Tile> group_scales(const Tile& tile, int first = 0) {
  return {tile, first};
}

/// No scales: every scale is 1.
struct Unscaled {
  static constexpr int group = 1 << 20;
  TW_INLINE float operator()(int, int) const { return 1.0f; }
};

/// number * scale.
struct TimesScale {
  TW_INLINE auto operator()(auto number, auto scale) const { return number * scale; }
};

}  // namespace tw
