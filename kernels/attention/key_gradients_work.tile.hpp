#pragma once

#include "kernels/attention/packed_rows.tile.hpp"
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

/// The list of a tile's blocks of queries: the index of each field.
struct QueryList {
  static constexpr int count = 0;
  /// Index of the first entry. Entries ascend: h 2^list_bits + b is block b of the h-th head that shares the keys.
  static constexpr int entries = 4;
};

/// The keys of a tile, and the blocks of queries that see them, in each head that shares the keys.
template <AttentionConfig kConfig, class Rules>
struct KeyGradientsWork : conditional<(kConfig.form & kListed) != 0, ListPlace, NoListPlace> {
  static constexpr int BM = kConfig.rows, BN = kConfig.keys;
  static constexpr bool ragged = (kConfig.form & kRagged) != 0, listed = (kConfig.form & kListed) != 0;

  int batch, kv_head;
  int tensor_batch;            ///< batch index in the tensors
  int q_row, k_row, sums_row;  ///< rows at which the sequence begins: of q and d_o; of k and v; of lse, delta and the sum for dQ
  int first_key;
  int seqlen_q, seqlen_k, diagonal;
  int first_block, blocks;  ///< of queries
  int steps;                ///< blocks of all heads

  TW_INLINE static KeyGradientsWork of(const auto& p, Tile t) {
    KeyGradientsWork w;
    int n = t.n;
    if constexpr (listed) n += p.first_head;
    w.batch = n / p.kv_heads;
    w.kv_head = n - w.batch * p.kv_heads;
    w.tensor_batch = w.batch;
    w.q_row = w.k_row = w.sums_row = 0;
    w.first_key = t.m * BN;
    w.seqlen_q = p.queries;
    w.seqlen_k = p.keys;
    if constexpr (ragged) {
      if (TW_ON_GPU || p.cu_k) w.find_sequence(p, t.m);  // a kernel of the CPU serves both forms
    }
    w.diagonal = p.has_diagonal ? p.diagonal : w.seqlen_k - w.seqlen_q;
    if constexpr (listed) {
      const i64 list = (static_cast<i64>(t.n) * p.list_tiles + t.m) * p.list_numbers;
      w.first = list + QueryList::entries;
      w.first_block = w.blocks = 0;
      w.steps = p.lists[list + QueryList::count];
      return w;
    }
    const ScoreKeys keys{w.first_key, min(w.first_key + BN, w.seqlen_k) - 1, w.seqlen_q, w.seqlen_k, w.diagonal};
    const QueryRange all{0, w.seqlen_q}, seen = Rules::queries(p.rules, keys, all);
    w.first_block = w.blocks = 0;
    if (seen.begin < seen.end && !w.is_empty()) {
      w.first_block = seen.begin / BM;
      w.blocks = ceil_div(seen.end, BM) - w.first_block;
    }
    w.steps = w.blocks * p.heads_per_kv;
    return w;
  }
  /// The block of queries of a step, and its head.
  TW_INLINE int entry(const auto& p, int step) const {
    if constexpr (listed)
      return p.lists[this->first + step];
    else
      return step;
  }
  TW_INLINE int head(const auto& p, int entry) const {
    if constexpr (listed)
      return kv_head * p.heads_per_kv + static_cast<int>(static_cast<u32>(entry) >> p.list_bits);
    else
      return kv_head * p.heads_per_kv + entry / blocks;
  }
  TW_INLINE Dropout dropout(const auto& p, int entry) const {
    return Dropout::of(p.dropout, batch * p.kv_heads * p.heads_per_kv + head(p, entry));
  }
  TW_INLINE int first_query(const auto& p, int entry) const {
    if constexpr (listed)
      return static_cast<int>(static_cast<u32>(entry) & ((1u << p.list_bits) - 1)) * BM;
    else
      return (first_block + entry % blocks) * BM;
  }
  /// Whether the tile has no keys, which the host could not know.
  TW_INLINE bool is_empty() const { return ragged && first_key >= seqlen_k; }
  /// The rows of a tile after the sequence's end belong to another sequence and may be NaN, which weights of 0 would not hide. Sets them to
  /// 0, for this warpgroup's next products.
  TW_INLINE void keep_keys(auto& block, auto& tile) const {
    if constexpr (ragged) {
      if (first_key + BN > seqlen_k) block.zero_rows(tile, seqlen_k - first_key);
    }
  }
  TW_INLINE void keep_queries(auto& block, const auto& p, auto& tile, int entry) const {
    if constexpr (ragged) {
      const int left = seqlen_q - first_query(p, entry);
      if (left < BM) block.zero_rows(tile, left);
    }
  }

 private:
  TW_INLINE void find_sequence(const auto& p, int m) {
    tensor_batch = 0;
    if (p.tiles) {
      // The list's tiles are of keys: queries and keys have changed places.
      const auto tile = p.tiles + static_cast<i64>(m) * PackedTile::numbers;
      batch = tile[PackedTile::sequence];
      first_key = tile[PackedTile::first_row];
      k_row = tile[PackedTile::q_begin];
      seqlen_k = tile[PackedTile::q_rows];
      q_row = tile[PackedTile::k_begin];
      seqlen_q = tile[PackedTile::keys];
    } else {
      const SequenceTile found = SequenceTile::find(p.cu_k, p.batch, BN, m);
      batch = found.sequence;
      first_key = found.index * BN;
      k_row = p.cu_k[batch];
      seqlen_k = p.used_k[batch];
      q_row = p.cu_q[batch];
      seqlen_q = p.used_q[batch];
    }
    sums_row = padded_begin(q_row, batch);
  }
};

/// Stores a tile's dK or dV. Those of packed sequences end at the sequence's last key.
template <class Work>
TW_INLINE void store_keys(auto& block, const Work& w, const auto& gradient, const auto& staging, const auto& to) {
  if constexpr (Work::ragged)
    block.store(gradient, staging, to, w.k_row + w.first_key, 0, w.kv_head, w.tensor_batch, w.k_row + w.seqlen_k);
  else
    block.store(gradient, staging, to, w.first_key, 0, w.kv_head, w.batch);
}

/// Applies the rules to an entry's scores, which have a row for each key and a column for each query. Scores of keys that a query must not
/// see become -infinity. If a rule bends scores, as softcap does, `slopes` is set to the derivatives.
template <class Rules, class Work>
TW_INLINE void apply_rules_to_keys(auto& block, const auto& p, const Work& w, int entry, auto& scores, auto& slopes) {
  constexpr int BM = Work::BM, BN = Work::BN;
  const int head = w.head(p, entry), query0 = w.first_query(p, entry);
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
