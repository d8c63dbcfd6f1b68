#pragma once

#include "tilewave/tile/language.tile.hpp"

/// C = A B: A [M, K], B [K, N], C [M, N], all of T, sums in f32.
template <class T, int BM, int BN, int BK, int Stages>
struct Matmul {
  static constexpr const char* source = "step3_matmul.tile.hpp";

  template <class Target>
  struct On {
    using A = tw::Shared<Target, T, BM, BK>;                      // stored [M, K]: a product sums over its columns
    using B = tw::Shared<Target, T, BK, BN, tw::Contract::rows>;  // stored [K, N]: over its rows
    using Out = tw::Staging<Target, T, BM, BN>;
    static constexpr int rows = BM;

    struct Params {
      tw::Global<Target, const T, A> a;
      tw::Global<Target, const T, B> b;
      tw::Global<Target, T, Out> c;
    };
    struct Slot {
      A a;
      B b;
    };
    struct Memory {
      tw::Ring<Target, Slot, Stages> operands;
      Out out;
      explicit constexpr Memory(auto& block) : operands(block), out(block) {}
    };
    struct State {
      tw::Fragment<Target, float, BM, BN> acc;
    };

    static int steps(const Params& p, tw::Tile) { return tw::ceil_div(p.a.cols, BK); }

    static void load(auto& producer, const Params& p, tw::Tile t, int step, Memory& memory) {
      producer.put(memory.operands, [&](auto copy, Slot& slot) {
        copy.tile(p.a, slot.a, t.m * BM, step * BK);
        copy.tile(p.b, slot.b, step * BK, t.n * BN);
      });
    }

    static void compute(auto& block, const Params& p, tw::Tile t, Memory& memory, State& state) {
      block.fill(state.acc, 0.0f);
      const int n = steps(p, t);
      for (int step = 0; step < n; ++step) {
        const Slot& slot = block.take(memory.operands);
        block.mma(state.acc, slot.a, slot.b, false);  // starts the product and goes on
        if (step > 0) {
          block.wait(tw::leave<1>, state.acc);  // the product before this one has finished
          block.release(memory.operands);
        }
      }
      block.wait(tw::leave<0>, state.acc);
      if (n > 0) block.release(memory.operands);
    }

    static void finish(auto& block, const Params& p, tw::Tile t, Memory& memory, State& state) {
      block.store(state.acc, memory.out, p.c, t.m * BM, t.n * BN);
    }
  };
};
