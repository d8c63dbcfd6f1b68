#pragma once

#include "tilewave/tile/attention.tile.hpp"

namespace tw::kernels::attention {

/// 8-bit values as attention's products take them: y[batch, head, column, key], with the keys in the order of eight_bit_key(). Keys after
/// the last one are 0. A tile is a square of one head's values.
template <class T, int Side>
struct TransposeValues {
  static constexpr const char* source = "kernels/attention/values.tile.hpp";
  static_assert(sizeof(T) == 1 && Side % 16 == 0);

  template <class Target>
  struct On {
    static constexpr int warps = 8;
    using Square = Rows<Target, T, Side, Side, warps, 16>;
    struct Params {
      Global<Target, const T, Square> x;  ///< [batch, head, key, column]
      Global<Target, T, Square> y;        ///< [batch, head, column, key]
    };

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const int key0 = t.m * Side, col0 = t.n * Side, j = t.batch / p.x.size_i, i = t.batch - j * p.x.size_i;
      Square x, y;
      // To load keys in another order costs nothing: a row is a piece of memory of its own anyway.
      block.gather(
          x, p.x, [key0](int row) { return key0 + eight_bit_key(row); }, col0, i, j);
      block.transpose(x, y);
      block.store(y, p.y, col0, key0, i, j);
    }
  };
};

}  // namespace tw::kernels::attention
