#pragma once

#include "tilewave/tile/cuda/code_pairs.tile.hpp"
#include "tilewave/tile/cuda/fragment.tile.hpp"

// Left operands in registers, made from accumulators or from codes.

namespace tw::cuda {

/// Rounds accumulators to an 8-bit type. A thread holds two neighbours in every 8 columns of the accumulators and needs four neighbours in
/// every 16 columns of the operand, so the lanes of a quad exchange pairs.
template <class T, class S, int R, int C, int WarpRows>
TW_INLINE void convert_bytes(const Position& at, Operand<T, R, C, WarpRows>& to, const Fragment<S, R, C, WarpRows>& from) {
  const auto pair = [](const S* x) {
    if constexpr (is_fp8<T>)
      return ptx::narrow_pair<T>(static_cast<float>(x[0]), static_cast<float>(x[1]));
    else
      return u32{bit_cast<u8>(tw::to<T>(x[0]))} | u32{bit_cast<u8>(tw::to<T>(x[1]))} << 8;
  };
  const int first = (at.lane & ~3) + at.lane % 2 * 2;  // this lane and the next hold the four columns
  const u32 halves = at.lane % 4 < 2 ? 0x5410 : 0x7632;
  TW_UNROLL
  for (int n = 0; n < to.row_tiles * to.tile_size; ++n) {  // odd registers hold the row 8 below
    const S* const x = from.x + n / 2 * 8 + n % 2 * 2;
    const u32 pairs = pair(x) | pair(x + 4) << 16;
    const u32 low = ptx::shuffle(pairs, first), high = ptx::shuffle(pairs, first + 1);
    to.x[n] = ptx::permute_bytes(low, high, halves);
  }
}

/// Rounds accumulators to an 8-bit type without exchanges. Of every 16 columns, column 4 t + 2 u + c of the operand is column 8 u + 2 t + c
/// of the accumulators (t < 4; u, c < 2).
template <class T, class S, int R, int C, int WarpRows>
TW_INLINE void convert_bytes_in_place(Operand<T, R, C, WarpRows>& to, const Fragment<S, R, C, WarpRows>& from) {
  static_assert(is_fp8<T>, "operands of fp8");
  TW_UNROLL
  for (int n = 0; n < to.row_tiles * to.tile_size; ++n) {  // odd registers hold the row 8 below
    const S* const x = from.x + n / 2 * 8 + n % 2 * 2;
    to.x[n] = ptx::narrow_pair<T>(static_cast<float>(x[0]), static_cast<float>(x[1])) |
              ptx::narrow_pair<T>(static_cast<float>(x[4]), static_cast<float>(x[5])) << 16;
  }
}

template <class Scales>
TW_INLINE auto scale_of(const Scales& scales, [[maybe_unused]] int half, [[maybe_unused]] int row, int group) {
  if constexpr (requires { scales.in_registers(half, group); })
    return scales.in_registers(half, group);
  else
    return scales(row, group);
}
template <class T, class Tile>
TW_INLINE T scale_of(const RowVector<T, Tile>& vector, int half, int, int) {
  return vector.x[half];
}
template <class Scales>
struct GroupOf : Constant<Scales::group> {};
template <class T, class Tile>
struct GroupOf<RowVector<T, Tile>> : Constant<1 << 20> {};

/// The value of code `index` of neighbouring codes.
template <class Codes>
TW_INLINE float number_of(u32 codes, int index) {
  if constexpr (codes_in < Codes >> 1)
    return value_of_code<Codes>(codes, index);
  else
    return static_cast<float>(bit_cast<Codes>(static_cast<u8>(codes >> 8 * index)));
}

/// The scale as DecodePair takes it, or unchanged.
template <class Pair, class Scale>
TW_INLINE auto prepared(const Scale& scale) {
  if constexpr (Pair::known)
    return Pair::prepare(scale);
  else
    return scale;
}

/// Decodes codes from column `first` on. The codes of one register of the operand take half a byte, one byte or two.
template <class T, int R, int C, int WarpRows, class S, class Scales, class Decode>
TW_INLINE void load_codes(const Position& at, Operand<T, R, C, WarpRows>& to, const S& from, const Scales& scales, Decode decode,
                          int first) {
  using Codes = typename S::Element;
  using To = Operand<T, R, C, WarpRows>;
  using Pair = DecodePair<Codes, T, Decode>;
  constexpr int in_byte = codes_in<Codes>, bits = 8 / in_byte * To::width;  // bits of a register's codes
  constexpr int step = 8 * To::width;                                       // columns of four registers
  constexpr int group = GroupOf<Scales>::value;
  static_assert(group % step == 0, "a group of scales is a multiple of 16 codes of a 16-bit operand, of 32 of an 8-bit one");
  const int row0 = To::row(at, 0), col0 = To::col(at, 0), group0 = static_cast<int>(static_cast<u32>(first) / group);
  TW_UNROLL
  for (int tile = 0; tile < To::row_tiles; ++tile) {
    decltype(prepared<Pair>(scale_of(scales, 0, 0, 0))) scale[2];
    TW_UNROLL
    for (int n = 0; n < C / step; ++n) {
      if (n * step % group == 0) {
        TW_UNROLL
        for (int half = 0; half < 2; ++half)
          scale[half] = prepared<Pair>(scale_of(scales, tile * 2 + half, row0 + tile * 16 + half * 8, group0 + n * step / group));
      }
      TW_UNROLL
      for (int r = 0; r < 4; ++r) {
        const int col = first + col0 + n * step + r / 2 * (step / 2);
        const u8* const place = from.bytes + S::offset(row0 + tile * 16 + r % 2 * 8, col / in_byte);
        u32 codes;
        if constexpr (bits == 16)
          codes = *reinterpret_cast<const u16*>(place);
        else
          codes = u32{*place} >> col0 % in_byte * (8 / in_byte);
        u32& word = to.x[tile * To::tile_size + n * 4 + r];
        if constexpr (Pair::known) {
          word = Pair::decode(codes, scale[r % 2]);
        } else {
          float x[To::width];
          TW_UNROLL
          for (int k = 0; k < To::width; ++k) x[k] = decode(number_of<Codes>(codes, k), scale[r % 2]);
          Words<T, To::width> packed{};
          packed.pack(x);
          word = packed.w[0];
        }
      }
    }
  }
}

}  // namespace tw::cuda
