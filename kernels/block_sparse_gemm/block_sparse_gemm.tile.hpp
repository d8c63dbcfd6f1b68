#pragma once

#include "tilewave/tile/gemm.tile.hpp"

namespace tw::kernels::block_sparse_gemm {

/// A mask of the products of block row m, block column n and block k of the sum. Dimensions that it does not have, have stride 0.
template <class Target>
struct Mask {
  Pointer<Target, const u8> data;  ///< or null, which keeps all
  i64 stride_m, stride_n, stride_k;
  TW_INLINE bool keeps(int m, int n, int k) const { return !data || data[m * stride_m + n * stride_n + k * stride_k] != 0; }
};

/// Lists, for each block of D, the blocks of the sum that no mask hides, in order: one list for a row of blocks if nothing depends on the
/// column, and the other way round. A list is its length, or -1 if D's block is hidden, and the numbers of the blocks. Each warp makes one
/// list, C blocks at a time.
template <int C>
struct ListBlocks {
  static constexpr const char* source = "kernels/block_sparse_gemm/block_sparse_gemm.tile.hpp";
  static constexpr int rows = 4;

  template <class Target>
  struct On {
    using Row = Rows<Target, i32, rows, C, 4, 1>;
    struct Params {
      Mask<Target> a, b, d, product;
      Pointer<Target, i32> lists;  ///< [lists_m * lists_n, depth + 1]
      int lists_m, lists_n;
      int depth;  ///< blocks of the sum
    };

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const int count = p.lists_m * p.lists_n;
      RowVector<Target, i32, Row> before;
      block.for_rows(before, [&](int, int, i32& n) { n = 0; });
      TW_NO_UNROLL
      for (int first = 0; first < p.depth; first += C) {
        Row kept, places;
        const auto keep = [&](int row, int col, i32& x) {
          const int list = t.m * rows + row, m = list / p.lists_n, n = list % p.lists_n, k = first + col;
          x = list < count && k < p.depth && p.a.keeps(m, n, k) && p.b.keeps(m, n, k) && p.d.keeps(m, n, k) && p.product.keeps(m, n, k);
        };
        block.for_each(kept, keep);
        block.for_each(places, keep);
        block.row_cumsum(places);
        block.map(places, before, [](i32 place, i32 n) { return place + n; });
        block.for_each(kept, places, [&](int row, int col, i32& x, i32& place) {
          if (x != 0) p.lists[static_cast<i64>(t.m * rows + row) * (p.depth + 1) + place] = first + col;
        });
        block.rows(kept, [&](int i, auto row) { before[i] += row.sum(); });
      }
      if (!block.owns_rows(before)) return;
      block.for_rows(before, [&](int row, int, i32& n) {
        const int list = t.m * rows + row;
        if (list >= count) return;
        const bool hidden = !p.d.keeps(list / p.lists_n, list % p.lists_n, 0);
        p.lists[static_cast<i64>(list) * (p.depth + 1)] = hidden ? -1 : n;
      });
    }
  };
};

/// The product A B of the blocks that the lists name. `Operands`, `Epilogue` and `Tiles` are gemm's. A tile lies in one block of D in every
/// dimension that a mask has.
template <class Operands, class Epilogue, class Tiles>
struct BlockSparseGemm {
  static constexpr const char* source = "kernels/block_sparse_gemm/block_sparse_gemm.tile.hpp";
  using WarpTile = SquareWarpTile<Tiles::bm, Tiles::bn>;

  template <class Target>
  struct On {
    static constexpr int BM = Tiles::bm, BN = Tiles::bn, BK = Tiles::bk;
    using In = gemm::Inputs<Target, Operands, Tiles>;
    using Acc = Fragment<Target, float, BM, BN>;
    using End = typename Epilogue::template On<Target, Acc>;
    using Schedule = Banded<Tiles::band>;
    static constexpr int rows = BM;
    static_assert(Tiles::cluster == 1, "blocks of a cluster would share columns of B, but they have lists of their own");

    struct Params {
      In in;
      typename End::Params epilogue;
      Pointer<Target, const i32> lists;
      int list_rows, list_cols;  ///< of D, that share a list
      int lists_n;
      int depth;  ///< blocks of the sum
      int steps_of_block;
    };
    struct Memory {
      Ring<Target, typename In::Slot, Tiles::stages> operands;
      typename End::Memory out;
      explicit constexpr Memory(auto& block) : operands(block), out(block) {}
    };
    struct State {
      Acc acc;
    };
    struct Work {
      int row, col;
      int list;   ///< index of the first block's number
      int count;  ///< blocks; negative: D's block is hidden
    };

    TW_INLINE static Work work(const Params& p, Tile t) {
      const int row = t.m * BM, col = t.n * BN;
      const int list = (row / p.list_rows * p.lists_n + col / p.list_cols) * (p.depth + 1);
      return {row, col, list + 1, p.lists[list]};
    }

    TW_INLINE static int steps(const Params& p, const Work& w) { return max(w.count, 0) * p.steps_of_block; }

    TW_INLINE static void load(auto& producer, const Params& p, const Work& w, int step, Memory& memory) {
      const int in_block = step % p.steps_of_block, block = p.lists[w.list + step / p.steps_of_block];
      p.in.load(producer, memory.operands, {w.row, w.col, 0}, block * p.steps_of_block + in_block);
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
      const Place at{w.row, w.col, 0};
      if (w.count < 0)
        epilogue::store(block, state.acc, p.epilogue.d, memory.out, at);
      else
        End::apply(block, state.acc, p.epilogue, memory.out, at);
    }
  };
};

}  // namespace tw::kernels::block_sparse_gemm
