#pragma once

#include "tilewave/tile/gemm.tile.hpp"

namespace tw::kernels::gemm {

/// Part of the sum of a tile of D.
struct PartOfTile {
  int tile;         ///< in the order of the tiles
  int first;        ///< its first step of K
  int steps;        ///< 0: there is nothing to do
  int share;        ///< which share of the steps it is in
  int other_parts;  ///< of a tile's first part: the number of others, which are in the shares that follow
};

/// How the steps of all tiles are divided (stream-K, https://arxiv.org/abs/2301.03598). As many tiles as fill whole rounds over all blocks
/// are not divided: in these rounds all blocks go through K together, so that they find each other's operands in the L2 cache. The steps of
/// the remaining tiles form one sequence, which is cut into an equal share for each block. A share begins with the end of a tile, unless a
/// tile begins there too, and goes on with the tiles that begin in it. Blocks compute these ends first, in a round of their own, so that an
/// end is ready when the block with the tile's first part needs it.
struct Shares {
  int tiles;       ///< of D
  int tile_steps;  ///< steps of K
  int whole;       ///< tiles that are not shared, a multiple of `blocks`
  int blocks;      ///< blocks at once
  int steps;       ///< of a share: the last ones may have fewer, or none

  TW_INLINE static constexpr Shares of(int tiles, int tile_steps, int blocks) {
    constexpr int least_steps = 8;
    const int whole = tiles / blocks * blocks;
    return {tiles, tile_steps, whole, blocks, max(ceil_div((tiles - whole) * tile_steps, blocks), least_steps)};
  }

  /// Parts of tiles, and empty ones.
  TW_INLINE constexpr int parts() const { return whole + blocks * (1 + ceil_div(steps, tile_steps)); }

  TW_INLINE constexpr PartOfTile part(int i) const {
    if (i < whole) return {i, 0, tile_steps, 0, 0};
    const int round = (i - whole) / blocks, share = (i - whole) % blocks;
    const int begin = min(share * steps, shared_steps()), end = min(begin + steps, shared_steps());
    if (round == 0) {
      const int first = begin % tile_steps;
      return {whole + begin / tile_steps, first, first == 0 ? 0 : min(tile_steps - first, end - begin), share, 0};
    }
    const int tile = ceil_div(begin, tile_steps) + round - 1, start = tile * tile_steps;
    const int last_share = (start + tile_steps - 1) / steps;
    return {whole + tile, 0, max(0, min(tile_steps, end - start)), share, last_share - share};
  }

 private:
  TW_INLINE constexpr int shared_steps() const { return (tiles - whole) * tile_steps; }
};

/// The product A B in such shares. The block that computes a tile's first part adds the others to it, in their order, from f32 sums in
/// global memory: the result does not depend on which block is faster.
template <class Operands, class Epilogue, class Tiles>
struct StreamKGemm {
  static constexpr const char* source = "kernels/gemm/stream_k.tile.hpp";
  using WarpTile = typename Gemm<Operands, Epilogue, Tiles>::WarpTile;

  template <class Target>
  struct On {
    static constexpr int BM = Tiles::bm, BN = Tiles::bn;
    using In = Inputs<Target, Operands, Tiles>;
    using Acc = Fragment<Target, float, BM, BN>;
    using End = typename Epilogue::template On<Target, Acc>;
    static constexpr int rows = BM;
    static constexpr bool waits = true;
    static_assert(Tiles::cluster == 1 && Tiles::teams == 1, "parts of a tile differ in their steps");

    /// The parts in their order.
    struct Schedule {
      static constexpr Dispatch dispatch = Dispatch::persistent;
      TW_INLINE static constexpr Tile at(const TileGrid&, int i) { return {i, 0, 0}; }
    };
    struct Params {
      In in;
      typename End::Params epilogue;
      TileGrid grid;  ///< of the tiles of D
      Shares shares;
      Global<Target, float> sums;     ///< [blocks, BM, BN]: of tiles' ends
      Pointer<Target, u32> complete;  ///< [tiles - whole]: how many of a tile's ends are; zeros before and after
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
      PartOfTile part;
      Place at;
    };

    TW_INLINE static Work work(const Params& p, Tile t) {
      const PartOfTile part = p.shares.part(t.m);
      const Tile tile = Banded<Tiles::band>::at(p.grid, part.tile);
      return {part, {tile.m * BM, tile.n * BN, tile.batch}};
    }

    TW_INLINE static int steps(const Params&, const Work& w) { return w.part.steps; }

    TW_INLINE static void load(auto& producer, const Params& p, const Work& w, int step, Memory& memory) {
      p.in.load(producer, memory.operands, w.at, w.part.first + step);
    }

    TW_INLINE static void compute(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      constexpr bool begins = epilogue::begins<Epilogue>;
      const int n = w.part.steps;
      if (n == 0) return block.fill(state.acc, 0.0f);  // sums that are not set on every path are spilled
      if constexpr (begins) {
        if (w.part.first == 0)
          End::begin(block, state.acc, p.epilogue, w.at);
        else
          block.fill(state.acc, 0.0f);
      }
      multiply_steps<Target, begins>(block, memory.operands, state.acc, n);
    }

    TW_INLINE static void finish(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      const auto [tile, first, steps, share, others] = w.part;
      if (steps == 0) return;
      if (first > 0) {
        block.save(state.acc, p.sums, share);
        block.announce(p.complete, tile - p.shares.whole);
        return;
      }
      if (others > 0) {
        block.wait_for(p.complete, tile - p.shares.whole, others);
        block.parallel(1, [&, counter = tile - p.shares.whole](int) { p.complete[counter] = 0; });  // for the next launch
      }
      TW_NO_UNROLL
      for (int i = 1; i <= others; ++i) block.add_saved(state.acc, p.sums, share + i);
      End::apply(block, state.acc, p.epilogue, memory.out, w.at);
    }
  };
};

}  // namespace tw::kernels::gemm
