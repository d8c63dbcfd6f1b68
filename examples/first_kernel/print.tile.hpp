#pragma once

#include "tilewave/tile/language.tile.hpp"

/// Prints a tile before and after a change: y = x * 10.
struct Print {
  static constexpr const char* source = "print.tile.hpp";

  template <class Target>
  struct On {
    struct Params {
      tw::Global<Target, const float> x;
      tw::Global<Target, float> y;
    };

    static void compute(auto& block, const Params& p, tw::Tile t) {
      tw::Rows<Target, float, 4, 32> x;
      block.load(x, p.x, t.m * 4, 0);
      block.print("before", x);
      block.for_each(x, [](int, int, float& value) { value *= 10.0f; });
      block.print("after", x);
      block.store(x, p.y, t.m * 4, 0);
    }
  };
};
