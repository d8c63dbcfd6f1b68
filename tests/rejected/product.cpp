// A product that compiles when nothing is defined. check.sh defines one mistake after the other and looks for the compiler's message.

#include "tilewave/analyze.hpp"

using namespace tw;

struct Product {
  template <class Target>
  struct On {
    using A = Shared<Target, bf16, 128, 64>;
#ifdef ACCUMULATORS
    using Sums = Fragment<Target, double, 128, 128>;
#else
    using Sums = Fragment<Target, float, 128, 128>;
#endif
#ifndef ROWS
    static constexpr int rows = 128;
#endif
    struct Params {
      Global<Target, const bf16, A> a;
      Global<Target, float> d;
    };
    struct Memory {
      Ring<Target, A, 2> ring;
      explicit constexpr Memory(auto& block) : ring(block) {}
    };
    struct State {
      Sums acc;
    };
#ifdef STEPS
    static int step(const Params&, Tile) { return 1; }
#else
    static int steps(const Params&, Tile) { return 1; }
#endif
    static void load(auto& producer, const Params& p, Tile, int, Memory& memory) {
      producer.put(memory.ring, [&](auto copy, A& a) { copy.tile(p.a, a, 0, 0); });
    }
    static void compute(auto& block, const Params&, Tile, Memory& memory, State& state) {
      block.fill(state.acc, 0.0f);
      block.take(memory.ring);
      block.release(memory.ring);
    }
    static void finish(auto& block, const Params& p, Tile, Memory&, State& state) { block.store(state.acc, p.d, 0, 0); }
  };
};

void run(const Tensor& a, const Tensor& d) {
  const auto bind_all = [&](auto& bind, auto& params) {
    bind(params.a, a);
    bind(params.d, d);
  };
#ifdef ANALYSE
  analyze<Product>({}, bind_all);
#else
  launch_cpu<Product>({}, bind_all);
#endif
}
