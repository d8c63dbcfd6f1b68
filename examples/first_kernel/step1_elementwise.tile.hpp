#pragma once

#include "tilewave/tile/language.tile.hpp"

/// y = silu(gate) * up, element by element: the activation between the two products of a Llama block. All [rows, cols] of bf16, computed in
/// f32.
template <int R, int C>
struct SiluMul {
  static constexpr const char* source = "step1_elementwise.tile.hpp";

  template <class Target>
  struct On {
    struct Params {
      tw::Global<Target, const tw::bf16> gate, up;
      tw::Global<Target, tw::bf16> y;
    };

    static void compute(auto& block, const Params& p, tw::Tile t) {
      const int row0 = t.m * R, col0 = t.n * C;
      tw::Rows<Target, float, R, C> gate, up;
      block.load(gate, p.gate, row0, col0);
      block.load(up, p.up, row0, col0);
      block.for_each(gate, up, [](int, int, float& g, float u) {
        const float silu = g / (1.0f + tw::exp(-g));
        g = silu * u;
      });
      block.store(gate, p.y, row0, col0);
    }
  };
};
