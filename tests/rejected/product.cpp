// A product that compiles when nothing is defined. check.sh defines one mistake after the other and looks for the compiler's message.

#include "tilewave/analyze.hpp"
#include "tilewave/tile/cuda/target.tile.hpp"

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
#ifdef LOAD
    static void load(auto& producer, const Params& p, int, Memory& memory){
#else
    static void load(auto& producer, const Params& p, Tile, int, Memory& memory) {
#endif
        producer.put(memory.ring, [&](auto copy, A& a) { copy.tile(p.a, a, 0, 0); });
  } static void compute(auto& block, const Params&, Tile, Memory& memory, State& state) {
    block.fill(state.acc, 0.0f);
#ifdef SPLIT_ROWS
    Fragment<Target, float, 64, 128, 2> split;
    block.rows(split, [&](int, auto row) { static_cast<void>(row.max()); });
#endif
    block.take(memory.ring);
    block.release(memory.ring);
  }
#ifdef FINISH
  static void finished(auto& block, const Params& p, Tile, Memory&, State& state) { block.store(state.acc, p.d, 0, 0); }
#else
    static void finish(auto& block, const Params& p, Tile, Memory&, State& state) { block.store(state.acc, p.d, 0, 0); }
#endif
};
}
;

struct Scale {
  template <class Target>
  struct On {
    struct Params {
      Global<Target, float> d;
    };
#ifdef COMPUTE
    static void compute(auto& block, Tile){
#else
    static void compute(auto& block, const Params&, Tile) {
#endif
        block.sync();
  }
};
}
;

#ifdef TARGET
struct WithoutRings {
  template <class T, class Tile, int Split>
  using Global = cpu::Target::Global<T, Tile, Split>;
};
static_assert(Target<WithoutRings>);
#endif
static_assert(Target<cpu::Target> && Target<analysis::Target> && Target<sm_90a::Target<>> && Target<cuda::Target<>>);
#if !defined(LOAD) && !defined(FINISH) && !defined(STEPS)
static_assert(KernelWithRings<Product::On<cuda::Target<>>> && Kernel<Product::On<analysis::Target>>);
#endif
static_assert(!KernelWithRings<Scale::On<cpu::Target>>);

void run(const Tensor& a, const Tensor& d) {
  [[maybe_unused]] const auto bind_all = [&](auto& bind, auto& params) {
    bind(params.a, a);
    bind(params.d, d);
  };
#ifdef COMPUTE
  launch_cpu<Scale>({}, [&](auto& bind, auto& params) { bind(params.d, d); });
#elif defined(ANALYSE)
  analyze<Product>({}, bind_all);
#else
  launch_cpu<Product>({}, bind_all);
#endif
}
