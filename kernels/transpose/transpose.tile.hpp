#pragma once

#include "tilewave/tile/language.tile.hpp"

namespace tw::kernels::transpose {

/// Elements of a whole line of 128 bytes.
template <class T>
inline constexpr int kLine = 128 / static_cast<int>(sizeof(T));

/// y = x with rows and columns exchanged, for each i, in squares of `Side`: on a GPU kLine<T> or a multiple.
template <class T, int Side>
struct Transpose {
  static constexpr const char* source = "kernels/transpose/transpose.tile.hpp";
  static constexpr int side = Side;

  template <class Target>
  struct On {
    static constexpr int width = 16 / static_cast<int>(sizeof(T));
    /// A thread has up to four pieces of 16 bytes on their way.
    static constexpr int warps = max(min(Side * Side / width / 32 / 4, 8), 4);
    using Square = Rows<Target, T, Side, Side, warps, width>;
    struct Params {
      Global<Target, const T, Square> x;
      Global<Target, T, Square> y;
    };

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      Square x, y;
      block.load(x, p.x, t.m * Side, t.n * Side, t.batch);
      block.transpose(x, y);
      block.store(y, p.y, t.n * Side, t.m * Side, t.batch);
    }
  };
};

}  // namespace tw::kernels::transpose
