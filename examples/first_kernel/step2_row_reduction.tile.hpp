#pragma once

#include "tilewave/tile/language.tile.hpp"

/// RMS norm: y = x / sqrt(mean of x^2 over the row + epsilon) * weight. x and y are [rows, cols] of bf16, cols at most C; weight is [cols].
template <int R, int C>
struct RmsNorm {
  static constexpr const char* source = "step2_row_reduction.tile.hpp";

  template <class Target>
  struct On {
    struct Params {
      tw::Global<Target, const tw::bf16> x;
      tw::Global<Target, tw::bf16> y;
      const float* weight;
      float epsilon;
    };

    static void compute(auto& block, const Params& p, tw::Tile t) {
      using X = tw::Rows<Target, float, R, C>;
      X x;
      tw::RowVector<Target, float, X> scale;
      block.load(x, p.x, t.m * R, 0);  // columns beyond the tensor become 0, which a sum of squares does not notice
      auto squares = x;
      block.rows(squares, [&](int i, auto row) {
        row.map([](float v) { return v * v; });
        scale[i] = tw::rsqrt(row.sum() / static_cast<float>(p.x.cols) + p.epsilon);
      });
      block.map(x, scale, [](float v, float s) { return v * s; });
      block.for_each(x, [&](int, int col, float& v) {
        if (col < p.x.cols) v *= p.weight[col];
      });
      block.store(x, p.y, t.m * R, 0);
    }
  };
};
