#pragma once

#include "tilewave/tile/language.tile.hpp"

namespace tw::kernels::transpose {

/// y = x with rows and columns exchanged, for each i. A warp reads and writes rows of whole 128-byte lines (256 for 8-byte elements), 4 or
/// 8 bytes a lane.
template <class T>
struct Transpose {
  static constexpr const char* source = "kernels/transpose/transpose.tile.hpp";
  static constexpr int width = sizeof(T) < 4 ? 4 / static_cast<int>(sizeof(T)) : 1;
  static constexpr int side = 32 * width;

  template <class Target>
  struct On {
    struct Params {
      Global<Target, const T> x;
      Global<Target, T> y;
    };

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      using Square = Rows<Target, T, side, side, 4, width>;
      Square x, y;
      block.load(x, p.x, t.m * side, t.n * side, t.batch);
      block.transpose(x, y);
      block.store(y, p.y, t.n * side, t.m * side, t.batch);
    }
  };
};

}  // namespace tw::kernels::transpose
