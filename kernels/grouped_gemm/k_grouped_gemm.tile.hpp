#pragma once

#include "tilewave/tile/gemm.tile.hpp"
#include "tilewave/tile/segments.tile.hpp"

namespace tw::kernels::grouped_gemm {

/// D[g] = the sum over the k of group g of A(:, k) B(k, :), through gemm's epilogue: the groups divide the summed dimension. It is the
/// gradient of a grouped product's weights. Both operands are stored with the summed dimension outermost. Batch t.batch of the grid is a
/// group.
template <class T, class Epilogue, class Tiles>
struct KGroupedGemm {
  static constexpr const char* source = "kernels/grouped_gemm/k_grouped_gemm.tile.hpp";
  using WarpTile = conditional<epilogue::reads_addends<Epilogue>, tw::WarpTile<32, 2>, SquareWarpTile<Tiles::bm, Tiles::bn>>;

  template <class Target>
  struct On {
    static constexpr int BM = Tiles::bm, BN = Tiles::bn, BK = Tiles::bk;
    using A = Shared<Target, T, BK, BM, Contract::rows>;
    using B = Shared<Target, T, BK, BN, Contract::rows>;
    using Acc = Fragment<Target, float, BM, BN>;
    using End = typename Epilogue::template On<Target, Acc>;
    using Schedule = Banded<Tiles::band>;
    static constexpr int rows = BM;
    static constexpr int cluster = Tiles::cluster;

    struct Slot {
      A a;
      B b;
    };
    struct Params {
      Global<Target, const T, A> a;           ///< [K, M]
      Global<Target, const T, B, cluster> b;  ///< [K, N]
      Segments<Target> groups;
      typename End::Params epilogue;
    };
    struct Memory {
      Ring<Target, Slot, Tiles::stages> operands;
      typename End::Memory out;
      explicit constexpr Memory(auto& block) : operands(block), out(block) {}
    };
    struct State {
      Acc acc;
    };
    struct Work {
      typename Segments<Target>::Segment group;
      Tile tile;
    };

    TW_INLINE static Work work(const Params& p, Tile t) { return {p.groups.at(t.batch), t}; }
    TW_INLINE static int steps(const Params&, const Work& w) { return ceil_div(w.group.size, BK); }

    TW_INLINE static void load(auto& producer, const Params& p, const Work& w, int step, Memory& memory) {
      producer.put(memory.operands, [&](auto copy, Slot& slot) {
        const int k = w.group.begin + step * BK;
        copy.tile(p.a, slot.a, k, w.tile.m * BM);
        copy.tile_for_cluster(p.b, slot.b, k, w.tile.n * BN);
      });
    }

    TW_INLINE static void compute(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      const int n = steps(p, w);
      if (n == 0) {
        block.fill(state.acc, 0.0f);
        return;
      }
      gemm::multiply_steps<Target>(block, memory.operands, state.acc, n, [&](Slot& slot, int step) {
        const int left = w.group.size - step * BK;
        if (left < BK) {  // the next group's, which may be infinite
          block.zero_rows(slot.a, left);
          block.zero_rows(slot.b, left);
        }
      });
    }

    TW_INLINE static void finish(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      End::apply(block, state.acc, p.epilogue, memory.out, Place{w.tile.m * BM, w.tile.n * BN, w.tile.batch});
    }
  };
};

}  // namespace tw::kernels::grouped_gemm
