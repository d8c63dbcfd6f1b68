#pragma once

#include "tilewave/tile/language.tile.hpp"

namespace tw::kernels::attention {

/// Tiles of queries, longest first: with a causal mask the last rows of a sequence see the most keys, and a block that starts one late would hold everybody up.
/// Heads are taken a group at a time so that the keys and values in use fit the L2 cache. The grid's n is heads * batch, m the query tiles.
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

/// Where an iteration waits for the output product that runs under its softmax. The compiler's assembler moves the wait up, to before the exponentials if nothing is in the
/// way, and then nothing runs under them; a branch keeps it where it stands, and waiting for the next keys is a branch that costs nothing. Which place is best
/// depends on the tile (README.md).
enum class JoinAt {
  anywhere,  ///< where the assembler puts it
  half,      ///< when half of the rows have been exponentiated
  end        ///< when all have
};

/// O = softmax(scale Q K^T) V with online softmax: the scores never leave the registers (FlashAttention; Dao et al. 2022, 2023; Shah et al. 2024).
///
/// One tile is BM queries of one head; keys and values arrive BN at a time, the last ones first, so that the blocks that a mask cuts come before those it does not.
template <class T, int D, bool kCausal, int BM, int BN, JoinAt kJoin>
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
    using PerRow = RowVector<Target, float, BM>;
    using Schedule = LongestFirst;
    static constexpr int rows = BM;

    struct Params {
      Global<Target, const T, Q> q;  ///< [batch, head, query, D]
      Global<Target, const T, K> k;  ///< [batch, kv head, key, D]
      Global<Target, const T, V> v;
      Global<Target, T, Out> o;
      float* lse;  ///< [batch, head, query], or null
      float scale_log2;  ///< softmax scale * log2(e): exponentials are powers of two
      int heads, heads_per_kv;
      int total_heads;    ///< heads * batch; the grid may be larger, its last group incomplete
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

    /// Blocks of keys that tile t sees; step s is block steps - 1 - s.
    TW_INLINE static int steps(const Params& p, Tile t) {
      if (t.n >= p.total_heads) return 0;
      int keys = p.k.rows;
      if (kCausal) keys = min(keys, (t.m + 1) * BM + p.causal_offset);
      return keys > 0 ? ceil_div(keys, BN) : 0;
    }
    /// How many of them, counted from the last, have keys that some row does not see.
    TW_INLINE static int masked_steps(const Params& p, Tile t, int n) {
      int whole = p.k.rows / BN;  // blocks before the end of the keys
      if (kCausal) whole = min(whole, max(t.m * BM + p.causal_offset + 1, 0) / BN);
      return max(n - whole, 0);
    }

    TW_INLINE static void load(auto& producer, const Params& p, Tile t, int step, Memory& memory) {
      const int head = t.n % p.heads;
      const int batch = t.n / p.heads;
      const int kv_head = head / p.heads_per_kv;
      const int key = (steps(p, t) - 1 - step) * BN;
      if (step == 0) producer.put(memory.q, [&](auto copy, Q& q) { copy.tile(p.q, q, t.m * BM, 0, head, batch); });
      producer.put(memory.k, [&](auto copy, K& k) { copy.tile(p.k, k, key, 0, kv_head, batch); });
      producer.put(memory.v, [&](auto copy, V& v) { copy.tile(p.v, v, key, 0, kv_head, batch); });
    }

    /// Scores that a row must not see become -infinity.
    TW_INLINE static void mask(auto& block, const Params& p, Tile t, int key0, Scores& scores) {
      block.for_each(scores, [&](int row, int col, float& x) {
        const int key = key0 + col;
        const bool seen = key < p.k.rows && (!kCausal || key <= t.m * BM + row + p.causal_offset);
        if (!seen) x = -kInfinity;
      });
    }

    /// Scores become exp(score - largest); `sum` grows by them. `decay` is what earlier terms of sum and output must be multiplied by.
    /// `halfway()` is called when half of the rows are done.
    TW_INLINE static void softmax(auto& block, const Params& p, Scores& scores, State& state, PerRow& decay, auto halfway) {
      const auto one_row = [&](int i, auto row) {
        const float before = state.largest[i];
        const float now = max(before, row.max());
        // The old maximum serves as long as no exponential exceeds 2^8: it cancels in the end, and the output need not be scaled. (A true comparison of the
        // difference: the product with scale_log2 would be contracted to an FMA and differ from zero where the maxima are equal.)
        const float largest = (now - before) * p.scale_log2 <= 8.0f ? before : now;
        const float base = largest == -kInfinity ? 0.0f : largest;  // no key seen yet
        decay[i] = exp2((before - base) * p.scale_log2);
        const float shift = base * p.scale_log2;
        state.largest[i] = largest;
        state.sum[i] = state.sum[i] * decay[i] + row.map_partial_sum([&](float x) { return exp2(x * p.scale_log2 - shift); });
      };
      block.rows(scores, one_row, halfway);
    }

    /// Queries times keys; the first block of a tile.
    TW_INLINE static void begin(auto& block, const Params& p, Tile t, int n, int masked, Memory& memory, const Q& q, Weights& weights, State& state) {
      Scores scores;
      PerRow decay;
      block.mma(scores, q, block.take(memory.k), true);
      block.wait(leave<0>, scores);
      block.release(memory.k);
      if (masked > 0) mask(block, p, t, (n - 1) * BN, scores);
      softmax(block, p, scores, state, decay, [] {});
      block.convert(weights, scores);
    }
    /// A later block: its scores, and under them the output of the block before.
    template <bool kMasked>
    TW_INLINE static void next(auto& block, const Params& p, Tile t, int step, int n, Memory& memory, const Q& q, Weights& weights, State& state) {
      Scores scores;
      PerRow decay;
      block.mma(scores, q, block.take(memory.k), true);
      block.mma(state.out, weights, block.take(memory.v), step == 1);
      block.wait(leave<1>, scores);
      block.release(memory.k);
      if (kMasked) mask(block, p, t, (n - 1 - step) * BN, scores);
      const auto join = [&] {
        if (kJoin != JoinAt::anywhere && step + 1 < n) block.await(memory.k);
        block.wait(leave<0>, state.out);
      };
      softmax(block, p, scores, state, decay, [&] {
        if (kJoin == JoinAt::half) join();
      });
      if (kJoin != JoinAt::half) join();
      block.release(memory.v);
      if (block.any(decay, [](float x) { return x != 1.0f; })) block.map_rows(state.out, decay, [](float x, float d) { return x * d; });
      block.convert(weights, scores);
    }

    TW_INLINE static void compute(auto& block, const Params& p, Tile t, Memory& memory, State& state) {
      block.fill(state.largest, -kInfinity);
      block.fill(state.sum, 0.0f);
      const int n = steps(p, t);
      if (n == 0) {
        block.fill(state.out, 0.0f);
        return;
      }
      const int masked = masked_steps(p, t, n);
      const Q& q = block.take(memory.q);
      Weights weights;
      begin(block, p, t, n, masked, memory, q, weights, state);
      int step = 1;
      for (; step < masked; ++step) next<true>(block, p, t, step, n, memory, q, weights, state);
      for (; step < n; ++step) next<false>(block, p, t, step, n, memory, q, weights, state);
      block.release(memory.q);
      block.mma(state.out, weights, block.take(memory.v), n == 1);
      block.wait(leave<0>, state.out);
      block.release(memory.v);
    }

    TW_INLINE static void finish(auto& block, const Params& p, Tile t, Memory& memory, State& state) {
      if (t.n >= p.total_heads) return;
      const int head = t.n % p.heads;
      const int batch = t.n / p.heads;
      block.complete(state.sum);
      PerRow scale;
      block.for_rows(scale, [&](int, int i, float& x) { x = state.sum[i] == 0.0f ? 0.0f : reciprocal(state.sum[i]); });
      block.map_rows(state.out, scale, [](float x, float s) { return x * s; });
      if (p.lse) {
        block.for_rows(state.sum, [&](int row, int i, float& sum) {
          const int query = t.m * BM + row;
          const float lse = sum == 0.0f ? -kInfinity : (state.largest[i] * p.scale_log2 + log2(sum)) * kLn2;
          if (query < p.q.rows && block.owns_row()) p.lse[static_cast<i64>(t.n) * p.q.rows + query] = lse;
        });
      }
      block.store(state.out, memory.out, p.o, t.m * BM, 0, head, batch);
    }
  };
};

}  // namespace tw::kernels::attention
