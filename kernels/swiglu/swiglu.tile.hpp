#pragma once

#include "tilewave/tile/language.tile.hpp"

// y = silu(gate) * up, element by element: a tile of each, loaded before anything is computed.

namespace tw::kernels::swiglu {

template <class In, class Out, int R, int C, int Width>
struct Swiglu {
  static constexpr const char* source = "kernels/swiglu/swiglu.tile.hpp";

  template <class Target>
  struct On {
    static constexpr int vector_bytes = 64;
    using Values = Rows<Target, float, R, C, 4, Width>;
    struct Params {
      Global<Target, const In, Values> gate, up;
      Global<Target, Out, Values> y;
    };
    static void compute(auto& block, const Params& p, Tile t) {
      const int row0 = t.m * R, col0 = t.n * C, j = p.y.size_j == 1 ? 0 : t.batch / p.y.size_i, i = t.batch - j * p.y.size_i;
      Values gate, up;
      block.load(gate, p.gate, row0, col0, i, j);
      block.load(up, p.up, row0, col0, i, j);
      block.map(gate, up, [](auto g, auto u) { return Silu::apply(g) * u; });
      block.store(gate, p.y, row0, col0, i, j);
    }
  };
};

/// Gate and up as the halves of one word, so that a lane loads both at once.
template <class In, class Out, int R, int C, int Width>
struct SwigluPairs {
  static constexpr const char* source = "kernels/swiglu/swiglu.tile.hpp";
  using Word = conditional<sizeof(In) == 2, i32, i64>;
  struct Pair {
    In gate, up;
  };

  template <class Target>
  struct On {
    static constexpr int vector_bytes = 64;
    using Pairs = Rows<Target, Word, R, C, 4, Width>;
    using Values = Rows<Target, float, R, C, 4, Width>;
    struct Params {
      Global<Target, const Word, Pairs> pairs;
      Global<Target, Out, Values> y;
    };
    static void compute(auto& block, const Params& p, Tile t) {
      const int row0 = t.m * R, col0 = t.n * C, j = p.y.size_j == 1 ? 0 : t.batch / p.y.size_i, i = t.batch - j * p.y.size_i;
      Pairs pairs;
      Values y;
      block.load(pairs, p.pairs, row0, col0, i, j);
      block.map(y, pairs, [](float, Word word) {
        const Pair pair = bit_cast<Pair>(word);
        return Silu::apply(static_cast<float>(pair.gate)) * static_cast<float>(pair.up);
      });
      block.store(y, p.y, row0, col0, i, j);
    }
  };
};

}  // namespace tw::kernels::swiglu
