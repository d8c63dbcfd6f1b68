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

/// (number - 2) * 64, of 2-bit codes for an operand of i8: -128, -64, 0 or 64, because a code is put into the top bits of a byte. Sums of
/// products are 64 times those of number - 2.
struct CentredTimes64 {
  TW_INLINE auto operator()(auto number, auto) const { return (number - 2.0f) * 64.0f; }
};

/// (number - 8) * 16, of 4-bit codes for an operand of i8, likewise: -128 to 112.
struct CentredTimes16 {
  TW_INLINE auto operator()(auto number, auto) const { return (number - 8.0f) * 16.0f; }
};
/// number - zero, of 4-bit codes for an operand of i8. The scale is the zero point, an integer from 0 to 15.
struct LessZero {
  TW_INLINE auto operator()(auto number, auto zero) const { return number - zero; }
};

/// The quantiles of a normal distribution by number, 0 to 15 (NF4: QLoRA, arXiv 2305.14314, appendix E). Selected bit by bit: the compiler
/// would put an array into memory.
TW_INLINE constexpr float normal_float(int number) {
  const auto of_two = [&](float even, float odd) { return (number & 1) != 0 ? odd : even; };
  const auto of_four = [&](float low, float high) { return (number & 2) != 0 ? high : low; };
  const auto of_eight = [&](float low, float high) { return (number & 4) != 0 ? high : low; };
  const float negative = of_eight(of_four(of_two(-1.0f, -0.6961928009986877f), of_two(-0.5250730514526367f, -0.39491748809814453f)),
                                  of_four(of_two(-0.28444138169288635f, -0.18477343022823334f), of_two(-0.09105003625154495f, 0.0f)));
  const float positive =
      of_eight(of_four(of_two(0.07958029955625534f, 0.16093020141124725f), of_two(0.24611230194568634f, 0.33791524171829224f)),
               of_four(of_two(0.44070982933044434f, 0.5626170039176941f), of_two(0.7229568362236023f, 1.0f)));
  return (number & 8) != 0 ? positive : negative;
}
/// normal_float(number) * scale, of `u4x2`.
struct TimesNormalFloat {
  TW_INLINE auto operator()(auto number, auto scale) const { return normal_float(static_cast<int>(number)) * scale; }
};

// A format, the argument of DividedScales, describes codes whose neighbours, `group` of them, share a scale. It has the types
//   Codes      the codes
//   Scale      the scales as they are stored: f16, float or e8m0
//   Decode<T>  FromZero, TimesF16, TimesScale or TimesNormalFloat, for an operand of T
// and the constants
//   int group
//   bool zeros     whether each group has a zero point, of FromZero
//   float middle   the zero point of integers whose groups have none, otherwise 0

/// number(code) as add_products() multiplies it with an operand of T: less its zero point, or a NormalFloat rounded to T.
template <class Format, class T>
TW_INLINE float number_of_code(float code, float zero) {
  using Decode = typename Format::template Decode<T>;
  if constexpr (is_same<Decode, FromZero>)
    return code - zero;
  else if constexpr (is_same<Decode, TimesNormalFloat>)
    return static_cast<float>(T(normal_float(static_cast<int>(code))));
  else
    return code;
}

/// Whether block.load(operand, tile) decodes a tile of T for operands of Operand: 4-bit and 2-bit codes, and 8-bit ones for 16-bit
/// operands.
template <class T, class Operand>
inline constexpr bool is_decoded = codes_in<T> > 1 || ((is_same<T, i8> || is_same<T, fp8_e4m3>)&&sizeof(Operand) == 2);

}  // namespace tw
