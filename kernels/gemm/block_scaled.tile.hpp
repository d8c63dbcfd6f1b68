#pragma once

#include "tilewave/tile/gemm.tile.hpp"

namespace tw::kernels::gemm {

/// One product: tiles follow one another, all with the same B.
struct OneProduct {
  static constexpr bool grouped = false;
  template <class Target>
  struct Params {
    template <int BM, int Cluster>
    TW_INLINE RowsOfTile rows_of(int m) const {
      return {0, m * BM, 0x7fffffff};
    }
  };
};

/// D(m, n) = sum over blocks kb of 128 k of a_scales(kb, m) * b_scales(n / 128, kb) * sum over k in kb of A(m, k) B(n, k): fp8 operands
/// whose scales change along K. There are two levels of accumulation. The tensor cores, which keep about 14 bits of sums of fp8 products,
/// accumulate over 128 of K only. Their results are scaled and added up in f32 while the next step's product runs: that of the same
/// warpgroup, if it has registers for two (128 rows), or that of another. Scales arrive with the operands. `Layout` says which rows a tile
/// has: those of one product, or of groups.
template <class Out, class Tiles, class Layout = OneProduct>
struct BlockScaledGemm {
  static constexpr const char* source = "kernels/gemm/block_scaled.tile.hpp";
  using WarpTile = tw::WarpTile<32, 2>;  // three sums share a thread's registers

  template <class Target>
  struct On {
    static constexpr int BM = Tiles::bm, BN = Tiles::bn;
    static_assert(Tiles::bk == 128 && 128 % BN == 0, "a step has one scale for each row of A and one for B");
    using In = Inputs<Target, Operands<fp8_e4m3, Contract::columns, Contract::columns>, Tiles>;
    // Copies of vectors begin at multiples of 16 bytes: a step's scales, and what comes with them.
    static constexpr int together = 16 / static_cast<int>(sizeof(float));
    using RowScales = SharedVector<Target, float, BM + together>;
    using BlockScale = SharedVector<Target, float, together>;
    using OutTile = Staging<Target, Out, BM, BN>;
    using Acc = Fragment<Target, float, BM, BN>;
    using Schedule = Banded<Tiles::band>;
    static constexpr int rows = BM;
    static constexpr int cluster = Tiles::cluster;

    struct Slot {
      typename In::A a;
      typename In::B b;
      RowScales a_scales;
      BlockScale b_scale;
    };
    struct Params {
      In in;
      Global<Target, const float, RowScales> a_scales;   ///< [ceil(K / 128), M]
      Global<Target, const float, BlockScale> b_scales;  ///< [groups, ceil(N / 128), ceil(K / 128)]
      Global<Target, Out, OutTile> d;
      typename Layout::template Params<Target> layout;
    };
    struct Memory {
      Ring<Target, Slot, Tiles::stages> operands;
      OutTile out;
      explicit constexpr Memory(auto& block) : operands(block), out(block) {}
    };
    struct State {
      Acc sum;
    };
    struct Work {
      RowsOfTile rows;
      int col;
    };

    TW_INLINE static Work work(const Params& p, Tile t) { return {p.layout.template rows_of<BM, cluster>(t.m), t.n * BN}; }
    TW_INLINE static int steps(const Params& p, const Work& w) { return w.rows.group < 0 ? 0 : ceil_div(p.in.depth, 128); }

    TW_INLINE static void load(auto& producer, const Params& p, const Work& w, int step, Memory& memory) {
      producer.put(memory.operands, [&](auto copy, Slot& slot) {
        copy.tile(p.in.a, slot.a, w.rows.first, step * 128);
        copy.tile_for_cluster(p.in.b, slot.b, w.col, step * 128, w.rows.group);
        copy.vector(p.a_scales, slot.a_scales, step, w.rows.first / together * together);
        copy.vector(p.b_scales, slot.b_scale, w.col / 128, step / together * together, w.rows.group);
      });
    }

    /// A step in flight: its product, and its scales.
    struct Step {
      Acc products;
      RowVector<Target, float, Acc> scale;
    };
    TW_INLINE static void begin(auto& block, const Work& w, int step, Memory& memory, Step& s) {
      const Slot& slot = block.take(memory.operands);
      block.mma(s.products, slot.a, slot.b, true);
      const int first = w.rows.first % together;
      const auto b_scale = slot.b_scale[step % together];
      block.for_rows(s.scale, [&](int row, int, auto& scale) { scale = slot.a_scales[first + row] * b_scale; });
      block.fence();  // before the slot is released
      block.sync_warpgroup();
    }
    /// Completes the oldest step in flight and adds it to the sum; `Left` others stay in flight.
    template <int Left>
    TW_INLINE static void end(auto& block, Memory& memory, Step& s, State& state) {
      block.wait(leave<Left>, s.products);
      block.release(memory.operands);
      block.map(state.sum, s.products, s.scale, [](auto sum, auto x, auto scale) { return sum + x * scale; });
    }

    TW_INLINE static void compute(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      block.fill(state.sum, 0.0f);
      const int last = steps(p, w) - 1;
      if (last < 0) return;
      if constexpr (in_flight<Target> == 0 || BM > 128) {
        Step one;
        TW_NO_UNROLL
        for (int step = 0; step <= last; ++step) {
          begin(block, w, step, memory, one);
          end<0>(block, memory, one, state);
        }
        return;
      }
      Step even, odd;
      begin(block, w, 0, memory, even);
      int step = 0;
      TW_NO_UNROLL
      for (; step + 1 < last; step += 2) {
        begin(block, w, step + 1, memory, odd);
        end<1>(block, memory, even, state);
        begin(block, w, step + 2, memory, even);
        end<1>(block, memory, odd, state);
      }
      if (step < last) {
        begin(block, w, last, memory, odd);
        end<1>(block, memory, even, state);
        end<0>(block, memory, odd, state);
      } else {
        end<0>(block, memory, even, state);
      }
    }

    TW_INLINE static void finish(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      if (!Layout::grouped || w.rows.group >= 0) block.store(state.sum, memory.out, p.d, w.rows.first, w.col, 0, 0, w.rows.end);
    }
  };
};

}  // namespace tw::kernels::gemm
