#pragma once

#include "kernels/gemm/block_scaled.tile.hpp"
#include "kernels/grouped_gemm/group_tiles.tile.hpp"
#include "tilewave/tile/gemm.tile.hpp"

namespace tw::kernels::grouped_gemm {

/// Products of groups of rows. Those of fp8 are gemm's BlockScaledGemm with ListedGroups.
///
/// D(r, :) = activation(A(r, :) B[g] + bias[g]) for the rows r of each group g, tile by tile of a list (group_tiles.tile.hpp). `Operands`
/// and `Tiles` are gemm's. The blocks of a cluster are in one group, whose tiles of B they share. A SwiGlu activation turns each pair of
/// columns into one.
template <class Operands, class Out, class Act, class Tiles>
struct GroupedGemm {
  static constexpr const char* source = "kernels/grouped_gemm/grouped_gemm.tile.hpp";
  using WarpTile = SquareWarpTile<Tiles::bm, Tiles::bn>;

  template <class Target>
  struct On {
    static constexpr int BM = Tiles::bm, BN = Tiles::bn;
    static constexpr bool pairs = is_same<Act, SwiGlu>;
    using In = gemm::Inputs<Target, Operands, Tiles>;
    using Acc = Fragment<Target, float, BM, BN>;
    using Ends = epilogue::Ends<Target, Out, Acc, pairs>;
    using Schedule = Banded<Tiles::band>;
    static constexpr int rows = BM;
    static constexpr int cluster = Tiles::cluster;

    struct Params {
      In in;
      Global<Target, Out, typename Ends::Out> d;
      Pointer<Target, const Out> bias;  ///< [groups, N], or null
      typename ListedGroups::Params<Target> groups;
      int columns;  ///< N
    };
    struct Memory {
      Ring<Target, typename In::Slot, Tiles::stages> operands;
      typename Ends::Memory out;
      explicit constexpr Memory(auto& block) : operands(block), out(block) {}
    };
    struct State {
      Acc acc;
    };
    struct Work {
      gemm::RowsOfTile rows;
      int col;
    };

    TW_INLINE static Work work(const Params& p, Tile t) { return {p.groups.template rows_of<BM, cluster>(t.m), t.n * BN}; }

    TW_INLINE static int steps(const Params& p, const Work& w) { return w.rows.group < 0 ? 0 : ceil_div(p.in.depth, Tiles::bk); }

    TW_INLINE static void load(auto& producer, const Params& p, const Work& w, int step, Memory& memory) {
      p.in.load(producer, memory.operands, {w.rows.first, w.col, w.rows.group}, step);  // a_batches is 0, b_batches 1
    }

    TW_INLINE static void compute(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      const int n = steps(p, w);
      if (n == 0) {
        block.fill(state.acc, 0.0f);
        return;
      }
      gemm::multiply_steps<Target>(block, memory.operands, state.acc, n);
    }

    TW_INLINE static void finish(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      const auto [group, first, end] = w.rows;
      if (group < 0 || first >= end) return;
      if (p.bias)
        epilogue::add_bias<Target>(block, state.acc, p.bias + static_cast<i64>(group) * p.columns, Place{first, w.col, 0}, p.columns);
      if constexpr (pairs) {
        typename Ends::Pairs out;
        block.pairs(out, state.acc, [](auto gate, auto up) { return SwiGlu::apply(gate, up); });
        block.store(out, memory.out.out, p.d, first, w.col / 2, 0, 0, end);
      } else {
        epilogue::map(block, state.acc, [](auto x) { return Act::apply(x); });
        block.store(state.acc, memory.out.out, p.d, first, w.col, 0, 0, end);
      }
    }
  };
};

}  // namespace tw::kernels::grouped_gemm
