#pragma once

#include "tilewave/tile/language.tile.hpp"

namespace tw::kernels::transpose {

/// The side of the squares on a GPU: two lines of 128 bytes, if they fit into shared memory.
template <class T>
inline constexpr int kGpuSide = sizeof(T) == 1 ? 128 : 256 / static_cast<int>(sizeof(T));

/// y = x with rows and columns swapped, for each i, in squares of `Side`. A GPU loads and stores them in pieces of `Width` elements.
template <class T, int Side, int Width>
struct Transpose {
  static constexpr const char* source = "kernels/transpose/transpose.tile.hpp";
  static constexpr int side = Side;

  template <class Target>
  struct On {
    static constexpr int warps = max(min(Side * Side / Width / 32 / 4, 8), 4);  ///< a thread has at least four pieces in flight
    using Square = Rows<Target, T, Side, Side, warps, Width>;
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
