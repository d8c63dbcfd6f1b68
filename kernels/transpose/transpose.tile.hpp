#pragma once

#include "tilewave/tile/language.tile.hpp"

namespace tw::kernels::transpose {

/// Elements that 32 lanes move at once, 4 bytes each: a whole 128-byte line (8 bytes, and 256, where elements have so many).
template <class T>
inline constexpr int kLine = sizeof(T) < 4 ? 128 / static_cast<int>(sizeof(T)) : 32;

/// y = x with rows and columns exchanged, for each i, in squares of `Side`: on a GPU kLine<T>, so that every thread has eight loads in
/// flight.
template <class T, int Side>
struct Transpose {
  static constexpr const char* source = "kernels/transpose/transpose.tile.hpp";
  static constexpr int side = Side;

  template <class Target>
  struct On {
    static constexpr int warps = kLine<T> / 8;
    struct Params {
      Global<Target, const T> x;
      Global<Target, T> y;
    };

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      using Square = Rows<Target, T, Side, Side, warps, kLine<T> / 32>;
      Square x, y;
      block.load(x, p.x, t.m * Side, t.n * Side, t.batch);
      block.transpose(x, y);
      block.store(y, p.y, t.n * Side, t.m * Side, t.batch);
    }
  };
};

}  // namespace tw::kernels::transpose
