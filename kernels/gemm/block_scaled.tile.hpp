#pragma once

#include "tilewave/tile/gemm.tile.hpp"

namespace tw::kernels::gemm {

/// D(m, n) = sum over blocks kb of 128 k of a_scales(m, kb) * b_scales(n / 128, kb) * sum over k in kb of A(m, k) B(n, k): fp8 operands
/// whose scales change along K. There are two levels of accumulation. The tensor cores, which keep about 14 bits of sums of fp8 products,
/// accumulate over 128 of K only. Their results are scaled and added up in f32 while the next step's product runs.
template <class Out, class Tiles>
struct BlockScaledGemm {
  static constexpr const char* source = "kernels/gemm/block_scaled.tile.hpp";
  using WarpTile = tw::WarpTile<32, 2>;  // three sums share a thread's registers

  template <class Target>
  struct On {
    static constexpr int BM = Tiles::bm, BN = Tiles::bn;
    static_assert(Tiles::bk == 128 && 128 % BN == 0, "a step has one scale for each row of A and one for B");
    using In = Inputs<Target, Operands<fp8_e4m3, Contract::columns, Contract::columns>, Tiles>;
    using Slot = typename In::Slot;
    using OutTile = Staging<Target, Out, BM, BN>;
    using Acc = Fragment<Target, float, BM, BN>;
    using Schedule = Banded<Tiles::band>;
    static constexpr int rows = BM;
    static constexpr int cluster = Tiles::cluster;

    struct Params {
      In in;
      Global<Target, const float> a_scales;  ///< [M, ceil(K / 128)]
      Global<Target, const float> b_scales;  ///< [ceil(N / 128), ceil(K / 128)]
      Global<Target, Out, OutTile> d;
    };
    struct Memory {
      Ring<Target, Slot, Tiles::stages> operands;
      OutTile out;
      explicit constexpr Memory(auto& block) : operands(block), out(block) {}
    };
    struct State {
      Acc sum;
    };

    TW_INLINE static int steps(const Params& p, Tile) { return ceil_div(p.in.depth, 128); }

    TW_INLINE static void load(auto& producer, const Params& p, Tile t, int step, Memory& memory) {
      p.in.load(producer, memory.operands, t, 0, step);
    }

    /// A step in flight: its product, and its scales, whose loads are not waited for until the product is done.
    struct Step {
      Acc products;
      RowVector<Target, float, Acc> scale;
      float b_scale;
    };
    TW_INLINE static void begin(auto& block, const Params& p, Tile t, int step, Memory& memory, Step& s) {
      const Slot& slot = block.take(memory.operands);
      block.mma(s.products, slot.a, slot.b, true);
      block.load(s.scale, p.a_scales, t.m * BM, step);
      s.b_scale = block.value(p.b_scales, t.n * BN / 128, step);
    }
    /// Completes the oldest step in flight and adds it to the sum; `Left` others stay in flight.
    template <int Left>
    TW_INLINE static void end(auto& block, Memory& memory, Step& s, State& state) {
      block.wait(leave<Left>, s.products);
      block.release(memory.operands);
      const float b_scale = s.b_scale;
      block.for_rows(s.scale, [&](int, int, float& scale) { scale *= b_scale; });
      block.map(state.sum, s.products, s.scale, [](float sum, float x, float scale) { return sum + x * scale; });
    }

    TW_INLINE static void compute(auto& block, const Params& p, Tile t, Memory& memory, State& state) {
      block.fill(state.sum, 0.0f);
      const int last = steps(p, t) - 1;
      if (last < 0) return;
      if constexpr (in_flight<Target> == 0) {
        Step one;
        TW_NO_UNROLL
        for (int step = 0; step <= last; ++step) {
          begin(block, p, t, step, memory, one);
          end<0>(block, memory, one, state);
        }
        return;
      }
      Step even, odd;
      begin(block, p, t, 0, memory, even);
      int step = 0;
      TW_NO_UNROLL
      for (; step + 1 < last; step += 2) {
        begin(block, p, t, step + 1, memory, odd);
        end<1>(block, memory, even, state);
        begin(block, p, t, step + 2, memory, even);
        end<1>(block, memory, odd, state);
      }
      if (step < last) {
        begin(block, p, t, last, memory, odd);
        end<1>(block, memory, even, state);
        end<0>(block, memory, odd, state);
      } else {
        end<0>(block, memory, even, state);
      }
    }

    TW_INLINE static void finish(auto& block, const Params& p, Tile t, Memory& memory, State& state) {
      block.store(state.sum, memory.out, p.d, t.m * BM, t.n * BN);
    }
  };
};

}  // namespace tw::kernels::gemm
