#pragma once

#include "tilewave/tile/language.tile.hpp"

namespace tw::kernels::elementwise {

/// A bool in memory, whose byte may have values other than 0 and 1.
struct Flag {
  u8 byte;
  Flag() = default;
  TW_INLINE constexpr explicit Flag(float x) : byte(x != 0.0f) {}
  TW_INLINE constexpr explicit operator float() const { return byte != 0 ? 1.0f : 0.0f; }
};

/// The integer as an f32 that rounds to fewer bits in the same way as the integer itself. If it has more than 24 bits, the last kept bit is
/// 1 if any dropped bit is ("round to odd", Boldo and Melquiond 2008). Rounding to nearest twice could round the wrong way.
template <class Integer>
TW_INLINE float to_float_odd(Integer x) {
  u64 magnitude = x < 0 ? u64{0} - static_cast<u64>(x) : static_cast<u64>(x);
#if TW_ON_GPU
  const int dropped = 64 - 24 - ::__clzll(static_cast<long long>(magnitude | 1));
#else
  const int dropped = 64 - 24 - __builtin_clzll(magnitude | 1);
#endif
  if (dropped > 0) {
    const u64 kept = magnitude >> dropped;
    magnitude = (kept | (kept << dropped != magnitude ? 1u : 0u)) << dropped;
  }
  const float value = static_cast<float>(magnitude);
  return x < 0 ? -value : value;
}

/// out = in, converted. The parameters are Elementwise's.
template <class From, class To>
struct Cast {
  static constexpr const char* source = "kernels/elementwise/cast.tile.hpp";
  static constexpr int inputs = 1;
  static constexpr int width = 16 / static_cast<int>(sizeof(From) > sizeof(To) ? sizeof(From) : sizeof(To));
  static constexpr int tile_rows = width > 8 ? 8 : 16;
  static constexpr int tile_cols = 32 * width;
  static constexpr bool rounds_twice = is_same<From, long> || is_same<From, i32>
                                           ? is_same<To, f16> || is_same<To, bf16> || is_same<To, fp8_e4m3> || is_same<To, fp8_e5m2>
                                           : false;

  template <class Target>
  struct On {
    using X = Rows<Target, From, tile_rows, tile_cols, 4, width>;
    struct Part {
      Global<Target, const From, X> in[1];
      Global<Target, To, X> out;
    };
    struct Params {
      Part parts[2];
      int tiles;
    };

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const Part& part = p.parts[t.m < p.tiles ? 0 : 1];
      const int row = t.m < p.tiles ? t.m * tile_rows : 0, col = t.n * tile_cols;
      const int j = part.out.size_j == 1 ? 0 : t.batch / part.out.size_i, i = t.batch - j * part.out.size_i;
      X x;
      block.load(x, part.in[0], row, col, i, j);
      if constexpr (rounds_twice) {
        Rows<Target, float, tile_rows, tile_cols, 4, width> rounded;
        block.fill(rounded, 0.0f);
        block.map(rounded, x, [](auto, From value) { return to_float_odd(value); });
        block.store(rounded, part.out, row, col, i, j);
      } else {
        block.store(x, part.out, row, col, i, j);
      }
    }
  };
};

}  // namespace tw::kernels::elementwise
