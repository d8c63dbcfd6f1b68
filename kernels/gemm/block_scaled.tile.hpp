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
/// accumulate over 128 of K only. Their results are scaled and added up in f32 by one warpgroup while the product of another runs. A tile
/// of 256 rows has two parts, whose products use the same registers in turn. Scales arrive with the operands. `Layout` says which rows a
/// tile has: those of one product, or of groups.
template <class Out, class Tiles, class Layout = OneProduct>
struct BlockScaledGemm {
  static constexpr const char* source = "kernels/gemm/block_scaled.tile.hpp";
  using WarpTile = tw::WarpTile<32, 2>;  // sums and products share a thread's registers

  template <class Target>
  struct On {
    static constexpr int BM = Tiles::bm, BN = Tiles::bn;
    static_assert(Tiles::bk == 128 && 128 % BN == 0, "a step has one scale for each row of A and one for B");
    static constexpr int parts = BM > 192 ? 2 : 1;
    static constexpr int rows = BM / parts;
    static constexpr int cluster = Tiles::cluster;
    using A = Shared<Target, fp8_e4m3, rows, 128>;
    using B = Shared<Target, fp8_e4m3, BN, 128>;
    // Copies of vectors begin at multiples of 16 bytes: a step's scales, and what comes with them.
    static constexpr int together = 16 / static_cast<int>(sizeof(float));
    using RowScales = SharedVector<Target, float, rows + together>;
    using BlockScale = SharedVector<Target, float, together>;
    using OutTile = Staging<Target, Out, rows, BN>;
    using Acc = Fragment<Target, float, rows, BN>;
    using Schedule = Banded<Tiles::band>;

    struct Slot {
      A a[parts];
      B b;
      RowScales a_scales[parts];
      BlockScale b_scale;
    };
    struct Params {
      Global<Target, const fp8_e4m3, A> a;
      Global<Target, const fp8_e4m3, B, cluster> b;
      int depth;                                         ///< K
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
      Acc sums[parts];
    };
    struct Work {
      RowsOfTile at;
      int col;
    };

    TW_INLINE static Work work(const Params& p, Tile t) { return {p.layout.template rows_of<BM, cluster>(t.m), t.n * BN}; }
    TW_INLINE static int steps(const Params& p, const Work& w) { return w.at.group < 0 ? 0 : ceil_div(p.depth, 128); }

    TW_INLINE static void load(auto& producer, const Params& p, const Work& w, int step, Memory& memory) {
      producer.put(memory.operands, [&](auto copy, Slot& slot) {
        TW_UNROLL
        for (int part = 0; part < parts; ++part) {
          const int row = w.at.first + part * rows;
          copy.tile(p.a, slot.a[part], row, step * 128);
          copy.vector(p.a_scales, slot.a_scales[part], step, row / together * together);
        }
        copy.tile_for_cluster(p.b, slot.b, w.col, step * 128, w.at.group);
        copy.vector(p.b_scales, slot.b_scale, w.col / 128, step / together * together, w.at.group);
      });
    }

    TW_INLINE static void compute(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      for (Acc& sum : state.sums) block.fill(sum, 0.0f);
      const int n = steps(p, w);
      TW_NO_UNROLL
      for (int step = 0; step < n; ++step) {
        const Slot& slot = block.take(memory.operands);
        const int first = w.at.first % together;
        Acc products;
        RowVector<Target, float, Acc> scale;
        TW_UNROLL
        for (int part = 0; part < parts; ++part) {
          block.mma(products, slot.a[part], slot.b, true);
          const auto b_scale = slot.b_scale[step % together];
          block.for_rows(scale, [&](int row, int, auto& x) { x = slot.a_scales[part][first + row] * b_scale; });
          if (part == parts - 1) {  // scales are read before the slot is released
            block.fence();
            block.sync_warpgroup();
          }
          block.wait(leave<0>, products);
          if (part == parts - 1) block.release(memory.operands);
          block.map(state.sums[part], products, scale, [](auto sum, auto x, auto s) { return sum + x * s; });
        }
      }
    }

    TW_INLINE static void finish(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      if (w.at.group < 0) return;
      TW_UNROLL
      for (int part = 0; part < parts; ++part)
        block.store(state.sums[part], memory.out, p.d, w.at.first + part * rows, w.col, 0, 0, w.at.end);
    }
  };
};

}  // namespace tw::kernels::gemm
