#pragma once

#include "tilewave/tile/types.tile.hpp"

// What block.load(operand, packed, scales, decode) takes besides tiles: where a code's scale comes from, and what becomes of the two.
//
// `scales` is a RowVector of the operand's rows, or has `group`, how many neighbouring codes of a row share a value, and is a function of
// row and group, both counted in the packed tile. What it returns is up to the kernel: decode(number, value) gets it as it is.

namespace tw {

/// Scales of `Group` codes each, as they lie in a Shared tile: [rows, groups], or with Contract::rows [groups, rows].
template <int Group, class Tile>
struct GroupScales {
  static constexpr int group = Group;
  const Tile& tile;
  TW_INLINE float operator()(int row, int number) const {
    if constexpr (Tile::contract == decltype(Tile::contract)::columns)
      return static_cast<float>(tile.get(row, number));
    else
      return static_cast<float>(tile.get(number, row));
  }
};
template <int Group, class Tile>
TW_INLINE GroupScales<Group, Tile> group_scales(const Tile& tile) {
  return {tile};
}

/// Codes without scales: all are 1.
struct Unscaled {
  static constexpr int group = 1 << 20;
  TW_INLINE float operator()(int, int) const { return 1.0f; }
};

/// number * scale.
struct TimesScale {
  TW_INLINE auto operator()(auto number, auto scale) const { return number * scale; }
};

}  // namespace tw
