#pragma once

#include "tilewave/tile/language.tile.hpp"

/// C = relu(A B): A [M, K], B [K, N] and C [M, N] in f16, sums in f32. One tile of C is BM x BN; A and B arrive BK deep, four steps ahead.
struct MatmulRelu {
  static constexpr const char* source = "matmul_relu.tile.hpp";

  template <class Target>
  struct On {
    static constexpr int BM = 128, BN = 128, BK = 64, rows = BM;
    using A = tw::Shared<Target, tw::f16, BM, BK>;
    using B = tw::Shared<Target, tw::f16, BK, BN, tw::Contract::rows>;
    struct Slot {
      A a;
      B b;
    };
    using Memory = tw::Ring<Target, Slot, 4>;
    using State = tw::Fragment<Target, float, BM, BN>;

    struct Params {
      tw::Global<Target, const tw::f16, A> a;
      tw::Global<Target, const tw::f16, B> b;
      tw::Global<Target, tw::f16> c;
    };

    static int steps(const Params& p, tw::Tile) { return tw::ceil_div(p.a.cols, BK); }

    static void load(auto& producer, const Params& p, tw::Tile t, int step, Memory& memory) {
      producer.put(memory, [&](auto copy, Slot& slot) {
        copy.tile(p.a, slot.a, t.m * BM, step * BK);
        copy.tile(p.b, slot.b, step * BK, t.n * BN);
      });
    }

    static void compute(auto& block, const Params& p, tw::Tile t, Memory& memory, State& acc) {
      for (int step = 0; step < steps(p, t); ++step) {
        const Slot& slot = block.take(memory);
        block.mma(acc, slot.a, slot.b, step == 0);
        block.wait(tw::leave<0>, acc);
        block.release(memory);
      }
    }

    static void finish(auto& block, const Params& p, tw::Tile t, Memory&, State& acc) {
      block.for_each(acc, [](int, int, float& x) { x = tw::max(x, 0.0f); });
      block.store(acc, p.c, t.m * BM, t.n * BN);
    }
  };
};
