#pragma once

#include "tilewave/tile/language.tile.hpp"

namespace tw::kernels::attention {

/// Tiles of queries, longest first: with a causal mask the last rows of a sequence see the most keys, and a block that starts one late
/// would hold everybody up. Heads are taken a group at a time so that the keys and values in use fit the L2 cache. The grid's n is heads *
/// batch, m the query tiles.
struct LongestFirst {
  static constexpr Dispatch dispatch = Dispatch::dynamic;
  /// grid.batch counts groups of heads, grid.n the heads of one group; tile.n is the head.
  TW_INLINE static constexpr Tile at(const TileGrid& grid, int i) {
    const int per_group = grid.m * grid.n;
    const int group = i / per_group;
    const int in_group = i - group * per_group;
    return {grid.m - 1 - in_group / grid.n, group * grid.n + in_group % grid.n, 0};
  }
};

/// O = softmax(scale Q K^T) V with online softmax: the scores never leave the registers (FlashAttention; Dao et al. 2022, 2023; Shah et al.
/// 2024).
///
/// One tile is BM queries of one head; keys and values arrive BN at a time, the last ones first, so that the blocks that a mask cuts come
/// before those it does not.
template <class T, int D, bool kCausal, int BM, int BN>
struct Attention {
  static constexpr const char* source = "kernels/attention/attention.tile.hpp";

  template <class Target>
  struct On {
    using Q = Shared<Target, T, BM, D>;
    using K = Shared<Target, T, BN, D>;
    using V = Shared<Target, T, BN, D, Contract::rows>;
    using Out = Staging<Target, T, BM, D>;
    using Scores = Fragment<Target, float, BM, BN>;
    using Weights = Operand<Target, T, BM, BN>;
    using PerRow = RowVector<Target, float, Scores>;
    using Schedule = LongestFirst;
    static constexpr int rows = BM;

    struct Params {
      Global<Target, const T, Q> q;  ///< [batch, head, query, D]
      Global<Target, const T, K> k;  ///< [batch, kv head, key, D]
      Global<Target, const T, V> v;
      Global<Target, T, Out> o;
      Pointer<Target, float> lse;  ///< [batch, head, query], or null
      float scale_log2;            ///< softmax scale * log2(e): exponentials are powers of two
      int heads, heads_per_kv;
      int seqlen_k;
      int causal_offset;  ///< query i sees keys j <= i + causal_offset
    };
    struct Memory {
      Ring<Target, Q, 1> q;
      Ring<Target, K, 2> k;
      Ring<Target, V, 2> v;
      Out out;
      explicit constexpr Memory(auto& block) : q(block), k(block), v(block), out(block) {}
    };
    struct State {
      Fragment<Target, float, BM, D> out;
      PerRow largest;  ///< that the row's exponentials are relative to
      PerRow sum;
    };
    struct Locals {
      Scores scores;
      Weights weights;
    };

    /// Blocks of keys that tile t sees.
    TW_INLINE static int seen(const Params& p, Tile t) {
      int keys = p.seqlen_k;
      if (kCausal) keys = min(keys, (t.m + 1) * BM + p.causal_offset);
      return keys > 0 ? ceil_div(keys, BN) : 0;
    }
    /// Blocks that it takes, the last first: number n is block blocks - 1 - n. A tile that sees none takes one block of zeros, all of it
    /// masked.
    TW_INLINE static int blocks(const Params& p, Tile t) { return max(seen(p, t), 1); }
    /// Step s loads keys number s and values number s - 1, the order in which compute takes them: loaded in any other order, each would
    /// wait for the other's slot.
    TW_INLINE static int steps(const Params& p, Tile t) { return blocks(p, t) + 1; }
    /// How many of them, counted from the last, have keys that some row does not see.
    TW_INLINE static int masked_blocks(const Params& p, Tile t, int n) {
      int whole = p.seqlen_k / BN;  // blocks before the end of the keys
      if (kCausal) whole = min(whole, max(t.m * BM + p.causal_offset + 1, 0) / BN);
      return max(n - whole, 0);
    }

    TW_INLINE static void load(auto& producer, const Params& p, Tile t, int step, Memory& memory) {
      const int head = t.n % p.heads;
      const int batch = t.n / p.heads;
      const int kv_head = head / p.heads_per_kv;
      const int key = (seen(p, t) - 1 - step) * BN;  // before the first key, where copies find zeros, when none is seen
      if (step == 0) producer.put(memory.q, [&](auto copy, Q& q) { copy.tile(p.q, q, t.m * BM, 0, head, batch); });
      if (step < blocks(p, t)) producer.put(memory.k, [&](auto copy, K& k) { copy.tile(p.k, k, key, 0, kv_head, batch); });
      if (step > 0) producer.put(memory.v, [&](auto copy, V& v) { copy.tile(p.v, v, key + BN, 0, kv_head, batch); });
    }

    /// Scores that a row must not see become -infinity.
    TW_INLINE static void mask(auto& block, const Params& p, Tile t, int key0, Scores& scores) {
      block.for_each(scores, [&](int row, int col, auto& x) {
        const int key = key0 + col;
        const bool visible = key < p.seqlen_k && (!kCausal || key <= t.m * BM + row + p.causal_offset);
        if (!visible) x = -kInfinity;
      });
    }

    /// Scores become exp(score - largest); `sum` grows by them. `decay` is what earlier terms of sum and output must be multiplied by.
    TW_INLINE static void softmax(auto& block, const Params& p, Scores& scores, State& state, PerRow& decay) {
      block.rows(scores, [&](int i, auto row) {
        const auto before = state.largest[i];
        const auto now = max(before, row.max());
        // The old maximum serves as long as no exponential exceeds 2^8: it cancels in the end, and the output need not be scaled. (A true
        // comparison of the difference: the product with scale_log2 would be contracted to an FMA and differ from zero where the maxima are
        // equal.)
        const auto largest = (now - before) * p.scale_log2 <= 8.0f ? before : now;
        const auto base = largest == -kInfinity ? 0.0f : largest;  // no key seen yet
        decay[i] = exp2((before - base) * p.scale_log2);
        const auto shift = base * p.scale_log2;
        state.largest[i] = largest;
        state.sum[i] = state.sum[i] * decay[i] + row.map_partial_sum([&](auto x) { return exp2(x * p.scale_log2 - shift); });
      });
    }

    /// The first block: its scores and weights.
    TW_INLINE static void first(auto& block, const Params& p, Tile t, int n, int masked, Memory& memory, const Q& q, Weights& weights,
                                State& state) {
      Scores scores;
      PerRow decay;
      block.mma(scores, q, block.take(memory.k), true);
      block.wait(leave<0>, scores);
      block.release(memory.k);
      if (masked > 0) mask(block, p, t, (n - 1) * BN, scores);
      softmax(block, p, scores, state, decay);
      block.convert(weights, scores);
    }
    /// A later block: its scores, and under them the output of the block before.
    template <bool kMasked>
    TW_INLINE static void next(auto& block, const Params& p, Tile t, int step, int n, Memory& memory, const Q& q, Weights& weights,
                               State& state) {
      Scores scores;
      PerRow decay;
      block.mma(scores, q, block.take(memory.k), true);
      block.mma(state.out, weights, block.take(memory.v), step == 1);
      block.wait(leave<1>, scores);
      block.release(memory.k);
      if (kMasked) mask(block, p, t, (n - 1 - step) * BN, scores);
      softmax(block, p, scores, state, decay);
      block.wait(leave<0>, state.out);
      block.release(memory.v);
      if (block.any(decay, [](auto x) { return x != 1.0f; })) block.map(state.out, decay, [](auto x, auto d) { return x * d; });
      block.convert(weights, scores);
    }

    TW_INLINE static void compute(auto& block, const Params& p, Tile t, Memory& memory, State& state) {
      block.fill(state.largest, -kInfinity);
      block.fill(state.sum, 0.0f);
      const int n = blocks(p, t);
      const int masked = masked_blocks(p, t, n);
      const Q& q = block.take(memory.q);
      Weights weights;
      first(block, p, t, n, masked, memory, q, weights, state);
      int step = 1;
      for (; step < masked; ++step) next<true>(block, p, t, step, n, memory, q, weights, state);
      for (; step < n; ++step) next<false>(block, p, t, step, n, memory, q, weights, state);
      block.release(memory.q);
      block.mma(state.out, weights, block.take(memory.v), n == 1);
      block.wait(leave<0>, state.out);
      block.release(memory.v);
    }

    TW_INLINE static void finish(auto& block, const Params& p, Tile t, Memory& memory, State& state) {
      const int head = t.n % p.heads;
      const int batch = t.n / p.heads;
      block.complete(state.sum);
      PerRow scale;
      block.for_rows(scale, [&](int, int i, auto& x) { x = state.sum[i] == 0.0f ? 0.0f : reciprocal(state.sum[i]); });
      block.map(state.out, scale, [](auto x, auto s) { return x * s; });
      if (p.lse) {
        block.for_rows(state.sum, [&](int row, int i, auto& sum) {
          const int query = t.m * BM + row;
          const auto lse = sum == 0.0f ? -kInfinity : (state.largest[i] * p.scale_log2 + log2(sum)) * kLn2;
          if (query < p.q.rows && block.owns_rows(state.sum)) p.lse[static_cast<i64>(t.n) * p.q.rows + query] = lse;
        });
      }
      block.store(state.out, memory.out, p.o, t.m * BM, 0, head, batch);
    }
  };
};

}  // namespace tw::kernels::attention
