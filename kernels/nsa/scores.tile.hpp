#pragma once

#include "kernels/nsa/work.tile.hpp"

namespace tw::kernels::nsa {

/// Keys of a step.
inline constexpr int kScoredKeys = 128;
/// Columns of a product: heads of tokens.
inline constexpr int kScoredColumns = 64;

/// Scores of blocks, for selecting: score(token, c) = the sum over the heads of a group of exp(scale q k_c - lse), the weights that the
/// compressed keys have in nsa_compressed(). The first blocks and the last ones have scores that no sum reaches; a block that is neither
/// and whose last token is after the query has 0.
///
/// Keys are the rows of a product and heads of tokens its columns, so that a row sums over heads. A tile has `kScoredColumns / Group`
/// tokens, whose heads stay in shared memory.
template <class T, int D, int Group, int Stages>
struct BlockScores {
  static constexpr const char* source = "kernels/nsa/scores.tile.hpp";
  static constexpr int tokens = kScoredColumns / Group;

  template <class Target>
  struct On {
    static constexpr int rows = kScoredKeys;
    static constexpr int vector_bytes = 64;
    using Q = Shared<Target, T, kScoredColumns, D>;
    using K = Shared<Target, T, kScoredKeys, D>;
    using Scores = Fragment<Target, float, kScoredKeys, kScoredColumns>;
    using PerKey = RowVector<Target, float, Scores>;
    using PerHead = ColumnVector<Target, float, Scores>;
    using Schedule = HeadByHead;

    struct Params {
      Global<Target, const T, Q> q;      ///< [tokens, heads of keys, heads of a group, D]
      Global<Target, const T, K> k;      ///< [batch, heads of keys, keys, D]
      Pointer<Target, const float> lse;  ///< [tokens, heads]
      Sequences<Target> sequences;
      Pointer<Target, float> scores;  ///< [tokens, heads of this launch, columns]
      Pointer<Target, i32> ends;      ///< [tokens, heads of this launch]: the columns that are written
      int first_head, launch_heads;   ///< heads of keys of this launch
      int group, heads;               ///< query heads of a group, and all
      int columns;
      int initial_blocks, local_blocks;
      float scale_log2;

      /// Blocks that begin at the token or before.
      TW_INLINE int blocks(const TokenTile& w, int token) const {
        const int position = w.position + token;
        return position < 0 ? 0 : min(static_cast<int>(static_cast<u32>(position) / static_cast<u32>(w.span)) + 1, columns);
      }
    };
    struct Work : TokenTile {
      int head, steps;
    };
    struct Memory {
      Ring<Target, Q, 1> q;
      Ring<Target, K, Stages> keys;
      VectorBuffer<Target, float, kScoredColumns> lse;
      explicit constexpr Memory(auto& block) : q(block), keys(block), lse(block) {}
    };
    struct State {};

    TW_INLINE static Work work(const Params& p, Tile t) {
      Work w;
      static_cast<TokenTile&>(w) = p.sequences.find(t.m, tokens);
      w.head = p.first_head + t.n;
      w.steps = w.count > 0 ? ceil_div(p.blocks(w, w.count - 1), kScoredKeys) : 0;
      return w;
    }
    TW_INLINE static int steps(const Params&, const Work& w) { return w.steps; }

    TW_INLINE static void load(auto& producer, const Params& p, const Work& w, int step, Memory& memory) {
      if (step == 0) {
        producer.put(memory.q, [&](auto copy, Q& q) {
          TW_NO_UNROLL
          for (int n = 0; n < tokens; ++n)  // after the last token it is repeated, and its results are dropped
            copy.part(p.q, q, n * Group, Group, 0, 0, w.head, w.row + min(n, w.count - 1));
        });
      }
      producer.put(memory.keys, [&](auto copy, K& k) { copy.tile(p.k, k, w.k_row + step * kScoredKeys, 0, w.head, w.k_batch); });
    }

    TW_INLINE static void compute(auto& block, const Params& p, const Work& w, Memory& memory, State&) {
      const i64 row0 = static_cast<i64>(w.row) * p.launch_heads + (w.head - p.first_head);
      block.parallel(w.count, [&](int n) { p.ends[row0 + static_cast<i64>(n) * p.launch_heads] = p.blocks(w, n); });
      if (w.steps == 0) return;
      block.sync();  // the last tile's LSE has been read
      block.parallel(kScoredColumns, [&](int i) {
        const int token = i / Group, head = i % Group;
        memory.lse[i] = kInfinity;
        if (token < w.count && head < p.group) {
          const auto lse = p.lse[(static_cast<i64>(w.row) + token) * p.heads + w.head * p.group + head];
          if (lse != -kInfinity) memory.lse[i] = lse * kLog2E;
        }
      });
      block.sync();
      PerHead lse;
      block.load(lse, memory.lse);
      const Q& q = block.take(memory.q);
      TW_NO_UNROLL
      for (int step = 0; step < w.steps; ++step) {
        Scores scores;
        PerKey sums[tokens];
        block.mma(scores, block.take(memory.keys), q, true);
        block.wait(leave<0>, scores);
        block.release(memory.keys);
        block.map(scores, lse, [&](auto x, auto l) { return exp2(x * p.scale_log2 - l); });
        add_heads<0>(block, scores, sums);
        store<0>(block, p, w, step * kScoredKeys, row0, sums);
      }
      block.release(memory.q);
    }
    TW_INLINE static void finish(auto&, const Params&, const Work&, Memory&, State&) {}

   private:
    template <int n>
    TW_INLINE static void add_heads(auto& block, Scores& scores, PerKey (&sums)[tokens]) {
      block.rows(scores, [&](int i, auto row) { sums[n][i] = row.template columns<n * Group, Group>().sum(); });
      if constexpr (n + 1 < tokens) add_heads<n + 1>(block, scores, sums);
    }
    template <int n>
    TW_INLINE static void store(auto& block, const Params& p, const Work& w, int key0, i64 row0, PerKey (&sums)[tokens]) {
      // Values above all sums. The token's own block is taken first.
      constexpr float kOwn = 3e38f, kAlways = 2e38f;
      const int blocks = n < w.count ? p.blocks(w, n) : 0, complete = w.visible(n);
      const auto to = p.scores + (row0 + static_cast<i64>(n) * p.launch_heads) * p.columns;
      block.for_rows(sums[n], [&](int row, int, auto& sum) {
        const int c = key0 + row;
        if (c >= blocks || !block.owns_rows(sums[n])) return;
        auto score = sum;
        if (c >= complete) score = 0.0f;
        if (c < p.initial_blocks || c >= blocks - p.local_blocks) score = kAlways;
        if (c == blocks - 1 && p.local_blocks > 0) score = kOwn;
        to[c] = score;
      });
      if constexpr (n + 1 < tokens) store<n + 1>(block, p, w, key0, row0, sums);
    }
  };
};

}  // namespace tw::kernels::nsa
