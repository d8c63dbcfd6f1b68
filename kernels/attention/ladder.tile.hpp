#pragma once

#include "tilewave/tile/attention.tile.hpp"

// The history of attention kernels, one idea per step, to measure what each idea gains: `tilewave bench attention --ladder`. These kernels
// compute self-attention with equal lengths and equal numbers of heads; tw::attention does everything else.

namespace tw::kernels::attention {

inline constexpr const char* kLadderKernels = "kernels/attention/ladder.tile.hpp";

/// The mask between unfused products: to = from, but -infinity if the key is after the query. [head, query, key], in place.
template <class T>
struct CausalMask {
  static constexpr const char* source = kLadderKernels;
  static constexpr int tile_rows = 8, tile_cols = 512;

  template <class Target>
  struct On {
    using X = Rows<Target, float, tile_rows, tile_cols, 4, 16 / static_cast<int>(sizeof(T))>;
    struct Params {
      Global<Target, const T, X> from;
      Global<Target, T, X> to;
    };
    static void compute(auto& block, const Params& p, Tile t) {
      const int row0 = t.m * tile_rows, col0 = t.n * tile_cols;
      X x;
      block.load(x, p.from, row0, col0, t.batch);
      block.for_each(x, [&](int row, int col, auto& score) {
        if (col0 + col > row0 + row) score = -kInfinity;
      });
      block.store(x, p.to, row0, col0, t.batch);
    }
  };
};

/// A thread block for each tile, one head after the other. The grid is the same as for LongestFirst.
struct HeadByHead {
  static constexpr Dispatch dispatch = Dispatch::plain;
  TW_INLINE static constexpr Tile at(const TileGrid& grid, int i) { return {i % grid.m, i / grid.m, 0}; }
};

// The fused steps. Each derives from the previous one and changes some of its choices.

/// FlashAttention (Dao et al. 2022): online softmax, so that the scores never leave the registers.
struct OnlineSoftmax {
  static constexpr int rows = 64;                      ///< queries per tile: one warpgroup
  static constexpr int stages = 1;                     ///< blocks of keys and values in shared memory; with 1, loads and products alternate
  static constexpr bool normalise_every_block = true;  ///< divide the output by the sum so far, and multiply it again for the next block
  static constexpr bool mask_every_block = true;       ///< even if all keys of the block are visible
  static constexpr bool scores_ahead = false;          ///< compute the next block's scores during this block's softmax
  static constexpr bool lazy_rescale = false;          ///< rescale the output only if a row's maximum grows by much
  using Schedule = HeadByHead;
};
/// FlashAttention 2 (Dao 2023): less arithmetic outside the products, more queries per loaded key, and loads that overlap with products.
struct LessBesides : OnlineSoftmax {
  static constexpr int rows = 128;
  static constexpr int stages = 2;
  static constexpr bool normalise_every_block = false;
  static constexpr bool mask_every_block = false;
};
/// FlashAttention 3 (Shah et al. 2024): the tensor cores work while exponentials are computed.
struct ScoresAhead : LessBesides {
  static constexpr bool scores_ahead = true;
};
struct LazyRescale : ScoresAhead {
  static constexpr bool lazy_rescale = true;
};
/// Persistent blocks, which load for the next tile while they finish one; heads in groups that fit the L2 cache.
struct LongTilesFirst : LazyRescale {
  using Schedule = LongestFirst;
};

/// O = softmax(scale Q K^T) V in one kernel, with the choices of `Rung`. Keys are processed in blocks of 128, the last ones first.
template <class T, int D, class Rung>
struct FusedAttention {
  static constexpr const char* source = kLadderKernels;
  static constexpr int BM = Rung::rows, BN = 128;
  static_assert(BN % BM == 0, "every row sees a key in the first block that is processed");

  template <class Target>
  struct On {
    using Q = Shared<Target, T, BM, D>;
    using K = Shared<Target, T, BN, D>;
    using V = Shared<Target, T, BN, D, Contract::rows>;
    using Out = Staging<Target, T, BM, D>;
    using Scores = Fragment<Target, float, BM, BN>;
    using Weights = Operand<Target, T, BM, BN>;
    using PerRow = RowVector<Target, float, Scores>;
    using Schedule = typename Rung::Schedule;
    static constexpr int rows = BM;

    struct Params {
      Global<Target, const T, Q> q;  ///< [batch, head, row, D], like the others
      Global<Target, const T, K> k;
      Global<Target, const T, V> v;
      Global<Target, T, Out> o;
      float scale_log2;  ///< times log2(e): exponentials are powers of two
      bool causal;
    };
    struct Memory {
      Ring<Target, Q, 1> q;
      Ring<Target, K, Rung::stages> k;
      Ring<Target, V, Rung::stages> v;
      Out out;
      explicit constexpr Memory(auto& block) : q(block), k(block), v(block), out(block) {}
    };
    struct State {
      Fragment<Target, float, BM, D> out;
      PerRow largest;  ///< the maximum that the row's exponentials are relative to
      PerRow sum;
    };

    /// The number of key blocks that the tile's rows see; and how many of these, at the end, need a mask.
    TW_INLINE static int blocks(const Params& p, Tile t) {
      const int keys = p.k.rows;
      return ceil_div(p.causal ? min((t.m + 1) * BM, keys) : keys, BN);
    }
    TW_INLINE static int masked_blocks(const Params& p, Tile t) {
      const int all = blocks(p, t);
      return Rung::mask_every_block ? all : all - (p.causal ? min(t.m * BM + 1, p.k.rows) : p.k.rows) / BN;
    }

    /// Step s loads block s of the keys and of the values. With scores_ahead values are used, and loaded, one step later than keys.
    TW_INLINE static int steps(const Params& p, Tile t) { return blocks(p, t) + (Rung::scores_ahead ? 1 : 0); }
    TW_INLINE static void load(auto& producer, const Params& p, Tile t, int step, Memory& memory) {
      const int all = blocks(p, t), batch = t.n / p.q.size_i, head = t.n - batch * p.q.size_i;
      const int of_values = Rung::scores_ahead ? step - 1 : step;
      if (step == 0) producer.put(memory.q, [&](auto copy, Q& q) { copy.tile(p.q, q, t.m * BM, 0, head, batch); });
      if (step < all) producer.put(memory.k, [&](auto copy, K& k) { copy.tile(p.k, k, (all - 1 - step) * BN, 0, head, batch); });
      if (of_values >= 0) producer.put(memory.v, [&](auto copy, V& v) { copy.tile(p.v, v, (all - 1 - of_values) * BN, 0, head, batch); });
    }

    TW_INLINE static void compute(auto& block, const Params& p, Tile t, Memory& memory, State& state) {
      block.fill(state.largest, -kInfinity);
      block.fill(state.sum, 0.0f);
      const Q& q = block.take(memory.q);
      const int all = blocks(p, t), masked = masked_blocks(p, t);
      if constexpr (Rung::scores_ahead) {
        Weights weights;
        first_scores(block, p, t, all - 1, memory, q, weights, state);
        int n = 1;
        for (; n < masked; ++n) scores_over_output<true>(block, p, t, all - 1 - n, n == 1, memory, q, weights, state);
        for (; n < all; ++n) scores_over_output<false>(block, p, t, all - 1 - n, n == 1, memory, q, weights, state);
        block.release(memory.q);
        block.mma(state.out, weights, block.take(memory.v), all == 1);
        block.wait(leave<0>, state.out);
        block.release(memory.v);
      } else {
        block.fill(state.out, 0.0f);
        int n = 0;
        for (; n < masked; ++n) one_by_one<true>(block, p, t, all - 1 - n, memory, q, state);
        for (; n < all; ++n) one_by_one<false>(block, p, t, all - 1 - n, memory, q, state);
        block.release(memory.q);
      }
    }

    TW_INLINE static void finish(auto& block, const Params& p, Tile t, Memory& memory, State& state) {
      if constexpr (!Rung::normalise_every_block) {
        block.complete(state.sum);
        normalise(block, state);
      }
      const int batch = t.n / p.q.size_i;
      block.store(state.out, memory.out, p.o, t.m * BM, 0, t.n - batch * p.q.size_i, batch);
    }

   private:
    /// Processes block `b`: scores, softmax and output, one after the other. With a ring of one slot the next keys are loaded afterwards.
    template <bool kMasked>
    TW_INLINE static void one_by_one(auto& block, const Params& p, Tile t, int b, Memory& memory, const Q& q, State& state) {
      Scores scores;
      Weights weights;
      PerRow decay;
      block.mma(scores, q, block.take(memory.k), true);
      block.wait(leave<0>, scores);
      if (kMasked) mask(block, p, t, b, scores);
      softmax(block, p, scores, state, decay);
      block.map(state.out, decay, [](auto x, auto d) { return x * d; });
      block.convert(weights, scores);
      block.mma(state.out, weights, block.take(memory.v), false);
      block.wait(leave<0>, state.out);
      block.release(memory.k);
      block.release(memory.v);
      if constexpr (Rung::normalise_every_block) normalise(block, state);
    }

    /// The first block's scores and softmax.
    TW_INLINE static void first_scores(auto& block, const Params& p, Tile t, int b, Memory& memory, const Q& q, Weights& weights,
                                       State& state) {
      Scores scores;
      PerRow decay;
      block.mma(scores, q, block.take(memory.k), true);
      block.wait(leave<0>, scores);
      block.release(memory.k);
      mask(block, p, t, b, scores);
      softmax(block, p, scores, state, decay);
      block.convert(weights, scores);
    }
    /// The scores of block `b`, and, during their softmax, the output of the previous block.
    template <bool kMasked>
    TW_INLINE static void scores_over_output(auto& block, const Params& p, Tile t, int b, bool first_output, Memory& memory, const Q& q,
                                             Weights& weights, State& state) {
      Scores scores;
      PerRow decay;
      block.mma(scores, q, block.take(memory.k), true);
      block.mma(state.out, weights, block.take(memory.v), first_output);
      block.wait(leave<1>, scores);
      block.release(memory.k);
      if (kMasked) mask(block, p, t, b, scores);
      softmax(block, p, scores, state, decay);
      block.wait(leave<0>, state.out);
      block.release(memory.v);
      if (!Rung::lazy_rescale || block.any(decay, [](auto x) { return x != 1.0f; }))
        block.map(state.out, decay, [](auto x, auto d) { return x * d; });
      block.convert(weights, scores);
    }

    TW_INLINE static void mask(auto& block, const Params& p, Tile t, int b, Scores& scores) {
      const int row0 = t.m * BM, key0 = b * BN, last_key = p.k.rows - 1;
      block.for_each(scores, [&](int row, int col, auto& x) {
        if (key0 + col > (p.causal ? min(row0 + row, last_key) : last_key)) x = -kInfinity;
      });
    }

    /// Replaces scores by exp(score - largest) and adds them to `sum`. `decay` is the factor for the output so far.
    TW_INLINE static void softmax(auto& block, const Params& p, Scores& scores, State& state, PerRow& decay) {
      block.rows(scores, [&](int i, auto row) {
        const auto before = state.largest[i];
        const auto now = max(before, row.max());
        const auto largest = Rung::lazy_rescale && (now - before) * p.scale_log2 <= 8.0f ? before : now;
        const auto shrinks = exp2((before - largest) * p.scale_log2);
        const auto shift = largest * p.scale_log2;
        const auto weight = [&](auto x) { return exp2(x * p.scale_log2 - shift); };
        state.largest[i] = largest;
        const auto sum = state.sum[i] * shrinks;
        if constexpr (Rung::normalise_every_block) {
          decay[i] = sum;
          state.sum[i] = sum + row.map_sum(weight);
        } else {
          decay[i] = shrinks;
          state.sum[i] = sum + row.map_partial_sum(weight);
        }
      });
    }
    TW_INLINE static void normalise(auto& block, State& state) {
      PerRow scale;
      block.for_rows(scale, [&](int, int i, auto& x) { x = reciprocal(state.sum[i]); });
      block.map(state.out, scale, [](auto x, auto s) { return x * s; });
    }
  };
};

}  // namespace tw::kernels::attention
