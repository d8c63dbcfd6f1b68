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

/// Up to N rows of A times B: tiles of D have R columns, for which R rows of B arrive through a ring. The block's warps divide K among
/// them, so that R can be small and a B with few rows still occupies the SMs. A comes from the cache. The grid's n is the batch, as in
/// Gemv.
template <class T, class Epilogue, int R, int N, int Stages, int Warps>
struct SkinnyGemm {
  static constexpr const char* source = "kernels/gemm/skinny.tile.hpp";
  static constexpr int panel = 64;             ///< columns of B for each warp, in a slot
  static constexpr int depth = panel * Warps;  ///< columns of a slot

  template <class Target>
  struct On {
    static constexpr int warps = Warps;
    using Schedule = Banded<1>;
    using Slot = Shared<Target, T, R * Warps, panel>;
    using Sums = DividedSums<Target, R, N, Warps>;
    using A = DividedOperand<Target, T, N, depth, Warps>;
    using Out = Rows<Target, float, N, R, Warps, N * R / (32 * Warps)>;  // a piece for each thread
    using End = typename Epilogue::template On<Target, Out>;

    struct Params {
      struct In {
        Global<Target, const T> a;          ///< [batch, M, K]
        Windowed<Target, const T, Slot> b;  ///< [batch, K / panel, N, panel], in windows of R rows of each panel
        int depth;                          ///< K
        int a_batches, b_batches;           ///< 0 if one operand serves all batches, otherwise 1
      } in;
      typename End::Params epilogue;
      bool constant_b;  ///< B was complete when the previous launch began
    };
    struct Memory {
      Ring<Target, Slot, Stages> b;
      Scratch<Target, float, 16 * Warps, R * N> sums;
      explicit constexpr Memory(auto& block) : b(block), sums(block) {}
    };
    struct State {
      Sums sums;
    };

    TW_INLINE static bool loads_early(const Params& p) { return p.constant_b; }
    TW_INLINE static int steps(const Params& p, Tile) { return ceil_div(p.in.depth, depth); }
    TW_INLINE static void load(auto& producer, const Params& p, Tile t, int step, Memory& memory) {
      producer.template limit<min(2, Stages - 1)>(memory.b);
      producer.put(memory.b, [&](auto copy, Slot& slot) { copy.window(p.in.b, slot, t.m * R, 0, step * Warps, t.n * p.in.b_batches); });
    }
    TW_INLINE static void compute(auto& block, const Params& p, Tile t, Memory& memory, State& state) {
      block.fill(state.sums, 0.0f);
      const int n = steps(p, t), batch = t.n * p.in.a_batches;
      A even, odd;  // each in flight while the step before waits for B
      block.load(even, p.in.a, 0, 0, batch);
      block.load(odd, p.in.a, 0, depth, batch);
      const auto multiply = [&](A& a, int step) {
        if (step >= n) return;
        block.add_products(state.sums, block.take(memory.b), a);
        block.release(memory.b);
        block.load(a, p.in.a, 0, (step + 2) * depth, batch);
      };
      for (int step = 0; step < n; step += 2) {
        multiply(even, step);
        multiply(odd, step + 1);
      }
    }
    TW_INLINE static void finish(auto& block, const Params& p, Tile t, Memory& memory, State& state) {
      Out out;
      block.complete(state.sums, out, memory.sums);
      NoMemory none(block);
      End::apply(block, out, p.epilogue, none, Place{0, t.m * R, t.n});
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
