#pragma once

#include "tilewave/tile/types.tile.hpp"

// Arguments of block.load(operand, packed, scales, decode): the scale of each code, and how the two are combined.
//
// `scales` is a RowVector with a scale for each row of the operand, or an object with a constant `group`, the number of neighbouring codes
// that share a scale, and operator()(row, group). Rows and groups are counted in the packed tile. It may return any type, which is passed
// to decode(number, scale) unchanged. Instead of operator() it may have in_registers(i, group), where i is the index of the row in a
// RowVector.

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

/// What the decoder FromZero takes. `scale` is an f16 number, `zero` an integer from 0 to 15.
template <class Number>
struct ScaleAndZero {
  Number scale, zero;
};

// Decoders whose pairs of codes become 16-bit floats without conversion instructions (tilewave/tile/cuda/code_pairs.tile.hpp). They round
// once, as the formulas say.

/// (number - zero) * scale.
struct FromZero {
  TW_INLINE auto operator()(auto number, const auto& s) const { return (number - s.zero) * s.scale; }
};
/// number * scale, where the scale is an f16 number.
struct TimesF16 : TimesScale {};
/// The number alone, of a code of 8 bits.
struct AsStored {
  TW_INLINE auto operator()(auto number, auto) const { return number; }
};

/// Whether block.load(operand, tile) decodes a tile of T for operands of Operand: 4-bit and 2-bit codes, and 8-bit ones for 16-bit
/// operands.
template <class T, class Operand>
inline constexpr bool is_decoded = codes_in<T> > 1 || ((is_same<T, i8> || is_same<T, fp8_e4m3>)&&sizeof(Operand) == 2);

}  // namespace tw
