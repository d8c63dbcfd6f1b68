#pragma once

#include "tilewave/tile/gemm.tile.hpp"

// Products with small M, whose time is that of reading B once.

namespace tw::kernels::gemm {

/// One row of A times B: acc(n) = sum over k of A(k) B(n, k). One or several warps reduce each row of B; A comes from the cache. A block
/// processes R rows of B, `Piece` columns at a time. The grid's n is the batch, so that products with the same rows of B run one after the
/// other. The epilogue's tensors are transposed, to match the rows of B: [batch, N, 1].
template <class T, class Epilogue, int R, int Piece, int Warps>
struct Gemv {
  static constexpr const char* source = "kernels/gemm/skinny.tile.hpp";

  template <class Target>
  struct On {
    static constexpr int warps = Warps;
    using Weights = Rows<Target, T, R, Piece, Warps>;
    using Sums = RowVector<Target, float, Weights>;
    using End = typename Epilogue::template On<Target, Sums>;

    struct In {
      Global<Target, const T, Weights> a;  ///< [batch, 1, K]
      Global<Target, const T, Weights> b;  ///< [batch, N, K]
      int depth;                           ///< K
      int a_batches, b_batches;            ///< 0 if one operand serves all batches, otherwise 1
    };
    struct Params {
      In in;
      typename End::Params epilogue;
    };

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      Sums y;
      block.fill(y, 0.0f);
      const In& in = p.in;
      for (int k = 0; k < in.depth; k += Piece) block.add_products(y, in.b, t.m * R, t.n * in.b_batches, in.a, t.n * in.a_batches, k);
      block.complete(y);
      NoMemory none(block);
      End::apply(block, y, p.epilogue, none, Place{t.m * R, 0, t.n});
    }
  };
};

/// Adds up the partial products of the K splits, in order, and applies the epilogue.
template <class Epilogue, int R, int C>
struct SumPartials {
  static constexpr const char* source = "kernels/gemm/skinny.tile.hpp";

  template <class Target>
  struct On {
    using X = Rows<Target, float, R, C, 4, 4>;
    using End = typename Epilogue::template On<Target, X>;
    struct Params {
      Global<Target, const float, X> partial;  ///< [batch, splits, M, N]
      typename End::Params epilogue;
      int splits;
    };

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const int row0 = t.m * R, col0 = t.n * C;
      X sum, x;
      block.load(sum, p.partial, row0, col0, 0, t.batch);
      for (int split = 1; split < p.splits; ++split) {
        block.load(x, p.partial, row0, col0, split, t.batch);
        block.map(sum, x, [](float s, float y) { return s + y; });
      }
      NoMemory none(block);
      End::apply(block, sum, p.epilogue, none, Place{row0, col0, t.batch});
    }
  };
};

}  // namespace tw::kernels::gemm
