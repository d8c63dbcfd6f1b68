#pragma once

#include "tilewave/tile/attention_work.tile.hpp"
#include "tilewave/tile/dropout.tile.hpp"

// What the kernels of attention's backward pass share whose tiles are keys, and whose scores are [keys, queries].

namespace tw::kernels::attention {

/// Orders tiles of keys from the first to the last: under a causal mask the first keys are seen by the most queries. Heads are taken in
/// groups, as in LongestFirst: the queries that pass by stay in the L2 cache. Heads are those of keys, and m counts tiles of keys.
struct FirstKeysFirst {
  static constexpr Dispatch dispatch = Dispatch::dynamic;
  TW_INLINE static constexpr Tile at(const TileGrid& grid, int i) {
    const Tile last_first = LongestFirst::at(grid, i);
    return {grid.m - 1 - last_first.m, last_first.n, 0};
  }
};

/// The keys of a tile, and the blocks of queries that see them, in each head that shares the keys.
template <AttentionConfig kConfig, class Rules>
struct KeyGradientsWork {
  static constexpr int BM = kConfig.rows, BN = kConfig.keys;

  int batch, kv_head;
  int first_key;
  int seqlen_q, seqlen_k, diagonal;
  int first_block, blocks;  ///< of queries
  int steps;                ///< blocks of all heads

  TW_INLINE static KeyGradientsWork of(const auto& p, Tile t) {
    KeyGradientsWork w;
    w.batch = t.n / p.kv_heads;
    w.kv_head = t.n - w.batch * p.kv_heads;
    w.first_key = t.m * BN;
    w.seqlen_q = p.queries;
    w.seqlen_k = p.keys;
    w.diagonal = p.has_diagonal ? p.diagonal : w.seqlen_k - w.seqlen_q;
    const ScoreKeys keys{w.first_key, min(w.first_key + BN, w.seqlen_k) - 1, w.seqlen_q, w.seqlen_k, w.diagonal};
    const QueryRange all{0, w.seqlen_q}, seen = Rules::queries(p.rules, keys, all);
    w.first_block = w.blocks = 0;
    if (seen.begin < seen.end) {
      w.first_block = seen.begin / BM;
      w.blocks = ceil_div(seen.end, BM) - w.first_block;
    }
    w.steps = w.blocks * p.heads_per_kv;
    return w;
  }
  TW_INLINE int head(const auto& p, int step) const { return kv_head * p.heads_per_kv + step / blocks; }
  TW_INLINE Dropout dropout(const auto& p, int step) const {
    return Dropout::of(p.dropout, batch * p.kv_heads * p.heads_per_kv + head(p, step));
  }
  TW_INLINE int first_query(int step) const { return (first_block + step % blocks) * BM; }
};

/// Applies the rules to a step's scores, which have a row for each key and a column for each query. Scores of keys that a query must not
/// see become -infinity. If a rule bends scores, as softcap does, `slopes` is set to the derivatives.
template <class Rules, class Work>
TW_INLINE void apply_rules_to_keys(auto& block, const auto& p, const Work& w, int step, auto& scores, auto& slopes) {
  constexpr int BM = Work::BM, BN = Work::BN;
  const int head = w.head(p, step), query0 = w.first_query(step);
  const auto at = [&](int row, auto col) {
    const int key = w.first_key + row, query = query0 + col;
    return Score{w.batch, head, query, key, w.seqlen_q, w.seqlen_k, w.diagonal, difference(query + w.diagonal, key)};
  };
  const auto apply = [&](auto cut) {
    if constexpr (Rules::bending) {
      block.fill(slopes, 1.0f);
      Rules::template apply<decltype(cut)::value != 0, 0, BM>(block, p.rules, scores, at, slopes);
    } else {
      Rules::template apply<decltype(cut)::value != 0, 0, BM>(block, p.rules, scores, at);
    }
  };
  const ScoreRows rows{w.batch, head, query0, min(query0 + BM, w.seqlen_q) - 1, w.seqlen_q, w.seqlen_k, w.diagonal};
  const tw::KeyRange whole = Rules::untouched(p.rules, rows, {0, w.seqlen_k});
  if (whole.begin <= w.first_key && whole.end >= w.first_key + BN) return apply(Constant<0>{});
  apply(Constant<1>{});
  if (w.first_key + BN > w.seqlen_k) {
    block.for_each(scores, [&](int row, int, auto& x) {
      if (w.first_key + row >= w.seqlen_k) x = -kInfinity;
    });
  }
}

}  // namespace tw::kernels::attention
