#pragma once

#include "tilewave/tile/language.tile.hpp"

namespace tw::kernels::norm {

/// 1 / sqrt(variance + epsilon) of rows of up to C columns.
template <class X, int R, int C, int Warps, int Width>
struct RowScales {
  static constexpr const char* source = "kernels/norm/folded.tile.hpp";
  template <class Target>
  struct On {
    static constexpr int warps = Warps;
    using Values = Rows<Target, float, R, C, Warps, Width>;
    struct Params {
      Global<Target, const X, Values> x;  ///< [rows, K]
      Global<Target, float> scales;       ///< [rows, 1]
      float per_column, epsilon;          ///< 1 / K
    };

    static void compute(auto& block, const Params& p, Tile t) {
      Values x;
      block.load(x, p.x, t.m * R, 0);
      RowVector<Target, float, Values> mean, scale;
      block.rows(x, [&](int r, auto row) { mean[r] = row.sum() * p.per_column; });
      block.map(x, mean, [](float v, float m) { return v - m; });
      if (p.x.cols < C) {
        block.for_each(x, [&](int, int col, float& v) {
          if (col >= p.x.cols) v = 0;
        });
      }
      block.rows(x, [&](int r, auto row) { scale[r] = rsqrt(row.sum([](float v) { return v * v; }) * p.per_column + p.epsilon); });
      block.store(scale, p.scales, t.m * R, 0);
    }
  };
};

/// Replaces the rows w of a weight by w gamma, less their mean, and adds w beta to the bias.
template <class X, int R, int C, int Warps, int Width>
struct FoldNorm {
  static constexpr const char* source = "kernels/norm/folded.tile.hpp";
  template <class Target>
  struct On {
    static constexpr int warps = Warps;
    using Values = Rows<Target, float, R, C, Warps, Width>;
    struct Params {
      Global<Target, const X, Values> weight;       ///< [N, K]
      Global<Target, X, Values> folded;             ///< the same memory
      Global<Target, const X, Values> gamma, beta;  ///< [1, K]
      Global<Target, const X> bias;                 ///< [N, 1]
      Global<Target, X> folded_bias;                ///< the same memory
      float per_column;                             ///< 1 / K
    };

    static void compute(auto& block, const Params& p, Tile t) {
      const int row0 = t.m * R;
      Values w, shifted;
      block.load(w, p.weight, row0, 0);
      block.load(shifted, p.weight, row0, 0);
      ColumnVector<Target, float, Values> vector;
      block.load(vector, p.beta, 0, 0);
      block.map(shifted, vector, [](float v, float b) { return v * b; });
      RowVector<Target, float, Values> bias, mean;
      block.load(bias, p.bias, row0, 0);
      block.rows(shifted, [&](int r, auto row) { bias[r] += row.sum(); });
      block.store(bias, p.folded_bias, row0, 0);
      block.load(vector, p.gamma, 0, 0);
      block.map(w, vector, [](float v, float g) { return v * g; });
      block.rows(w, [&](int r, auto row) { mean[r] = row.sum() * p.per_column; });
      block.map(w, mean, [](float v, float m) { return v - m; });
      block.store(w, p.folded, row0, 0);
    }
  };
};

}  // namespace tw::kernels::norm
