#pragma once

#include "tilewave/tile/language.tile.hpp"

namespace tw::kernels::gemm {

/// D = activation(alpha A B + beta C + bias) + residual, tile by tile.
///
/// `a` and `b` say which dimension of A and B as stored the product sums over: NT is (columns, columns), NN (columns, rows), TN (rows,
/// rows). kAddends: beta C or a residual is read (its own variant: the addresses need registers, so it wants narrower tiles than a plain
/// product). Each tile of D is BM x BN; operands arrive BK at a time through a ring of `Stages` slots. `Cluster` blocks, neighbours along
/// M, share every tile of B. Tiles are done in bands of `Band` rows (of clusters).
template <class T, Contract a_contract, Contract b_contract, class Activation, bool kAddends, int BM, int BN, int BK, int Stages,
          int Cluster, int Band>
struct Gemm {
  static constexpr const char* source = "kernels/gemm/gemm.tile.hpp";

  template <class Target>
  struct On {
    using A = conditional<a_contract == Contract::columns, Shared<Target, T, BM, BK>, Shared<Target, T, BK, BM, Contract::rows>>;
    using B = conditional<b_contract == Contract::columns, Shared<Target, T, BN, BK>, Shared<Target, T, BK, BN, Contract::rows>>;
    using Out = Staging<Target, T, BM, BN>;
    using Schedule = Banded<Band>;
    static constexpr int rows = BM;
    static constexpr int cluster = Cluster;

    struct Params {
      Global<Target, const T, A> a;
      Global<Target, const T, B, Cluster> b;
      Global<Target, const T> c;         ///< read when beta is not 0
      Global<Target, const T> residual;  ///< read when has_residual
      Global<Target, T, Out> d;
      const T* bias;  ///< N values, or null
      float alpha, beta;
      int depth;                 ///< K
      int a_batches, b_batches;  ///< 0 where one operand serves all batches, else 1
      bool has_residual;
    };

    struct Slot {
      A a;
      B b;
    };
    struct Memory {
      Ring<Target, Slot, Stages> operands;
      Out out;
      explicit constexpr Memory(auto& block) : operands(block), out(block) {}
    };
    struct State {
      Fragment<Target, float, BM, BN> acc;
    };

    TW_INLINE static int steps(const Params& p, Tile) { return ceil_div(p.depth, BK); }

    TW_INLINE static void load(auto& producer, const Params& p, Tile t, int step, Memory& memory) {
      producer.put(memory.operands, [&](auto copy, Slot& slot) {
        if constexpr (a_contract == Contract::columns)
          copy.tile(p.a, slot.a, t.m * BM, step * BK, t.batch * p.a_batches);
        else
          copy.tile(p.a, slot.a, step * BK, t.m * BM, t.batch * p.a_batches);
        if constexpr (b_contract == Contract::columns)
          copy.tile_for_cluster(p.b, slot.b, t.n * BN, step * BK, t.batch * p.b_batches);
        else
          copy.tile_for_cluster(p.b, slot.b, step * BK, t.n * BN, t.batch * p.b_batches);
      });
    }

    TW_INLINE static void compute(auto& block, const Params& p, Tile t, Memory& memory, State& state) {
      const int n = steps(p, t);
      if (n == 0) {
        block.fill(state.acc, 0.0f);
        return;
      }
      // One product is always in flight: a slot is released when the product after the one that read it has been issued.
      for (int step = 0; step < n; ++step) {
        const Slot& slot = block.take(memory.operands);
        block.mma(state.acc, slot.a, slot.b, step == 0);
        if (step > 0) {
          block.wait(leave<1>, state.acc);
          block.release(memory.operands);
        }
      }
      block.wait(leave<0>, state.acc);
      block.release(memory.operands);
    }

    TW_INLINE static void finish(auto& block, const Params& p, Tile t, Memory& memory, State& state) {
      auto& acc = state.acc;
      const int row0 = t.m * BM;
      const int col0 = t.n * BN;
      block.for_each(acc, [&](int, int, float& x) { x *= p.alpha; });
      if (kAddends && p.beta != 0.0f)
        block.for_each_with(acc, p.c, row0, col0, t.batch, 0, [&](int, int, float& x, float c) { x += p.beta * c; });
      if (p.bias) {
        block.for_each(acc, [&](int, int col, float& x) {
          if (col0 + col < p.d.cols) x += static_cast<float>(p.bias[col0 + col]);
        });
      }
      block.for_each(acc, [&](int, int, float& x) { x = Activation::apply(x); });
      if (kAddends && p.has_residual)
        block.for_each_with(acc, p.residual, row0, col0, t.batch, 0, [&](int, int, float& x, float r) { x += r; });
      block.store(acc, memory.out, p.d, row0, col0, t.batch);
    }
  };
};

}  // namespace tw::kernels::gemm
