#pragma once

#include "tilewave/tile/language.tile.hpp"

/// Rotary position embedding, half-split (GPT-NeoX, Llama): columns j and j + D/2 of row `position` are rotated. The tables hold the cosine
/// and sine of the angle in (position, j). x and y are [heads, positions, D] of bf16, the tables [positions, D/2] of f32. Su et al. 2021,
/// arXiv:2104.09864.
template <int R, int D>
struct Rotary {
  static constexpr const char* source = "step5_rotary.tile.hpp";

  template <class Target>
  struct On {
    static constexpr int half = D / 2;

    struct Params {
      tw::Global<Target, const tw::bf16> x;
      tw::Global<Target, tw::bf16> y;
      const float* cos;
      const float* sin;
    };

    static void compute(auto& block, const Params& p, tw::Tile t) {
      const int row0 = t.m * R;
      tw::Rows<Target, float, R, half> left, right;
      block.load(left, p.x, row0, 0, t.batch);
      block.load(right, p.x, row0, half, t.batch);
      block.for_each(left, right, [&](int row, int col, float& a, float& b) {
        if (row0 + row >= p.x.rows) return;
        const int angle = (row0 + row) * half + col;
        const float rotated = a * p.cos[angle] - b * p.sin[angle];
        b = b * p.cos[angle] + a * p.sin[angle];
        a = rotated;
      });
      block.store(left, p.y, row0, 0, t.batch);
      block.store(right, p.y, row0, half, t.batch);
    }
  };
};
