#pragma once

#include "kernels/gemm/gemm.tile.hpp"

// Products with few rows: their time is that of reading B once.

namespace tw::kernels::gemm {

/// D(n) = activation(alpha sum over k of A(k) B(n, k) + beta C + bias) + residual for one row of A: every row of B is a sum along the row,
/// taken by one warp or several; A comes from the cache. A block takes R rows of B, a piece of `Piece` columns at a time. The grid's n is
/// the batch: its products with the same rows of B follow each other.
template <class T, class Activation, bool kAddends, int R, int Piece, int Warps>
struct Gemv {
  static constexpr const char* source = "kernels/gemm/skinny.tile.hpp";

  template <class Target>
  struct On {
    static constexpr int warps = Warps;
    using Weights = Rows<Target, T, R, Piece, Warps>;
    using Sums = RowVector<Target, float, Weights>;

    struct Params {
      Global<Target, const T, Weights> a;  ///< [batch, 1, K]
      Global<Target, const T, Weights> b;  ///< [batch, N, K]
      Global<Target, const T> c;           ///< [batch, N, 1]: D and what goes with it stand on end, beside B's rows
      Global<Target, const T> residual;    ///< [batch, N, 1]
      Global<Target, T> d;                 ///< [batch, N, 1]
      Global<Target, const T> bias;        ///< [N, 1]
      float alpha, beta;
      int depth;                 ///< K
      int a_batches, b_batches;  ///< 0 where one operand serves all batches, else 1
      bool has_bias, has_residual;
    };

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      Sums y, addend;
      block.fill(y, 0.0f);
      for (int k = 0; k < p.depth; k += Piece) block.add_products(y, p.b, t.m * R, t.n * p.b_batches, p.a, t.n * p.a_batches, k);
      block.complete(y);
      const auto add = [&](const auto& tensor, int batch, float factor) {
        block.load(addend, tensor, t.m * R, 0, batch);
        block.for_rows(y, [&](int, int i, auto& x) { x += factor * addend[i]; });
      };
      block.for_rows(y, [&](int, int, auto& x) { x *= p.alpha; });
      if (kAddends && p.beta != 0.0f) add(p.c, t.n, p.beta);
      if (p.has_bias) add(p.bias, 0, 1);
      block.for_rows(y, [&](int, int, auto& x) { x = Activation::apply(x); });
      if (kAddends && p.has_residual) add(p.residual, t.n, 1);
      block.store(y, p.d, t.m * R, 0, t.n);
    }
  };
};

/// D = activation(alpha P + beta C + bias) + residual, P the sum of `splits` partial products in the order of their parts of K.
template <class T, class Activation, bool kAddends, int R, int C>
struct SumPartials {
  static constexpr const char* source = "kernels/gemm/skinny.tile.hpp";

  template <class Target>
  struct On {
    using X = Rows<Target, float, R, C, 4, 4>;
    struct Params {
      Global<Target, const float, X> partial;  ///< [batch, splits, M, N]
      Global<Target, const T, X> c;            ///< read when beta is not 0
      Global<Target, const T, X> residual;     ///< read when has_residual
      Global<Target, const T, X> bias;         ///< [N]
      Global<Target, T, X> d;
      float alpha, beta;
      int splits;
      bool has_bias, has_residual;
    };

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const int row0 = t.m * R, col0 = t.n * C;
      X sum, x;
      block.load(sum, p.partial, row0, col0, 0, t.batch);
      for (int split = 1; split < p.splits; ++split) {
        block.load(x, p.partial, row0, col0, split, t.batch);
        block.map(sum, x, [](float s, float y) { return s + y; });
      }
      block.map(sum, p.alpha, [](float s, float alpha) { return s * alpha; });
      if (kAddends && p.beta != 0.0f) {
        block.load(x, p.c, row0, col0, t.batch);
        block.map(sum, x, p.beta, [](float s, float c, float beta) { return s + beta * c; });
      }
      if (p.has_bias) {
        ColumnVector<Target, float, X> bias;
        block.load(bias, p.bias, 0, col0);
        block.map(sum, bias, [](float s, float b) { return s + b; });
      }
      block.map(sum, [](float s) { return Activation::apply(s); });
      if (kAddends && p.has_residual) {
        block.load(x, p.residual, row0, col0, t.batch);
        block.map(sum, x, [](float s, float r) { return s + r; });
      }
      block.store(sum, p.d, row0, col0, t.batch);
    }
  };
};

}  // namespace tw::kernels::gemm
