#pragma once

#include "tilewave/tile/attention_config.tile.hpp"
#include "tilewave/tile/attention_rules.tile.hpp"

// Which rows a tile of attention computes, and which keys they see.

namespace tw {

/// Orders tiles from the longest to the shortest. Under a causal mask the last rows of a sequence see the most keys; if such a tile started
/// last, all other blocks would wait for it. Heads are taken in groups, so that the keys and values in use fit the L2 cache. The grid's n
/// is heads * batch, its m the number of query tiles.
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

/// The rows of sequence `i` in a packed tensor: `size` rows from `begin` on. Values read from memory are clamped to the tensor's `rows`.
struct SequenceRows {
  int begin, size;
  TW_INLINE static int clamp(int x, int most) { return max(min(x, most), 0); }
  /// cu_seqlens: the offset of each sequence, and the end of the last one.
  TW_INLINE static SequenceRows packed(const auto& cu_seqlens, int i, int rows) {
    const int begin = clamp(cu_seqlens[i], rows);
    return {begin, max(clamp(cu_seqlens[i + 1], rows) - begin, 0)};
  }
};

/// A tile of packed sequences.
struct SequenceTile {
  int sequence;
  int index;  ///< the tile's in its sequence
  /// Sequence b has the tiles from cu_seqlens[b] / tile_rows + b on, and its last tile may be empty, so the host knows the number of tiles
  /// without knowing the lengths. Finds tile m.
  TW_INLINE static SequenceTile find(const auto& cu_seqlens, int batch, int tile_rows, int m) {
    int low = 0, high = batch;  // the first tile of `low` is m or before m, that of `high` is after m
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (cu_seqlens[middle] / tile_rows + middle <= m ? low : high) = middle;
    }
    return {low, max(m - (cu_seqlens[low] / tile_rows + low), 0)};
  }
};

/// An entry of the list of tiles of packed sequences: the index of each field.
struct PackedTile {
  static constexpr int sequence = 0, first_row = 1, q_begin = 2, q_rows = 3, k_begin = 4, keys = 5;
  static constexpr int numbers = 8;  ///< in an entry; the last two are unused
};

/// The list of a tile's blocks of keys: the index of each field. The blocks follow in the order in which they are computed: their numbers,
/// or with kColumns their first keys, which need not be multiples of the block's size.
struct BlockList {
  static constexpr int count = 0;      ///< blocks in the list
  static constexpr int cut = 1;        ///< the first ones, which rules cut
  static constexpr int cut_first = 2;  ///< the last ones, which rules cut
  static constexpr int columns = 3;    ///< kColumns: of the head's columns, the first ones that a row of the tile may see
  static constexpr int blocks = 4;     ///< index of the first block
};

/// The entries [begin, end) of a list that one of several splits takes.
struct ListShare {
  int begin, end;
  /// The first count % splits splits take one entry more than the others, so that no two differ by more than one.
  TW_INLINE static constexpr ListShare of(int count, int part, int splits) {
    const int each = count / splits, more = count - each * splits;
    const int begin = part * each + min(part, more);
    return {begin, begin + each + (part < more ? 1 : 0)};
  }
  /// How many of its entries are among the list's first n, and among the last n of `count`.
  TW_INLINE constexpr int among_first(int n) const { return max(min(n, end) - begin, 0); }
  TW_INLINE constexpr int among_last(int n, int count) const { return max(end - max(count - n, begin), 0); }
};

/// A factor for each batch and key head, f32.
template <class Target>
struct Descale {
  Pointer<Target, const float> data;  ///< null: 1
  i64 stride_j, stride_i;             ///< of batches and of key heads
  TW_INLINE float at(int batch, int head) const { return data ? static_cast<float>(data[batch * stride_j + head * stride_i]) : 1.0f; }
};
/// The factors of a tile: of the products of queries and keys, and of the values.
struct TileFactors {
  float of_scores, of_values;
};
struct NoTileFactors {};
/// A tile's list.
struct ListPlace {
  i64 first;  ///< index of the first block
};
struct NoListPlace {};
/// A tile's columns, single keys, come in blocks after those of its list.
struct ColumnPlace {
  int list_blocks;  ///< blocks before those of columns
  i64 positions;    ///< index of the first column's position
};
struct NoColumnPlace {};

/// The rows of a tile, and the blocks of keys that they see, from the last to the first. `p` are the Params of an Attention kernel, or
/// those of them that the form needs.
template <AttentionConfig kConfig, class Rules>
struct AttentionWork : conditional<(kConfig.form & kDescaled) != 0, TileFactors, NoTileFactors>,
                       conditional<(kConfig.form & kListed) != 0, ListPlace, NoListPlace>,
                       conditional<(kConfig.form & kColumns) != 0, ColumnPlace, NoColumnPlace> {
  static constexpr int BM = kConfig.rows, BN = kConfig.keys;
  static constexpr bool ragged = (kConfig.form & kRagged) != 0, split = (kConfig.form & kSplit) != 0, paged = (kConfig.form & kPaged) != 0,
                        descaled = (kConfig.form & kDescaled) != 0, listed = (kConfig.form & kListed) != 0,
                        columns = (kConfig.form & kColumns) != 0;
  static_assert(listed || !columns, "columns follow the blocks of a list");

  int batch, head, part;
  int first_row, rows;  ///< rows: the sequence's number of queries
  int seqlen_k, diagonal;
  int q_row, k_row;      ///< offsets of the sequence in the tensors
  int q_batch, k_batch;  ///< batch index in the tensors
  int blocks;            ///< 0: no row sees a key
  int last_block;
  int cut, cut_first;  ///< the number of blocks that rules cut: at the end, and at the start

  TW_INLINE static AttentionWork of(const auto& p, Tile t) {
    AttentionWork w;
    int m = t.m;
    w.part = 0;
    if constexpr (split) {
      w.part = m % p.splits;
      m /= p.splits;
    }
    int n = t.n;
    if constexpr (listed) n += p.first_head;
    w.batch = n / p.q.size_i;
    w.head = n - w.batch * p.q.size_i;
    w.q_batch = w.k_batch = w.batch;
    w.q_row = w.k_row = 0;
    w.rows = p.q.rows;
    w.seqlen_k = p.keys;
    if constexpr (ragged) {
      if (p.cu_q) w.q_batch = 0;
      if (p.tiles) {
        m = w.read_tile(p, m);
      } else {
        if (p.cu_q) {
          const SequenceTile found = SequenceTile::find(p.cu_q, p.batch, BM, m);
          w.batch = found.sequence;
          m = found.index;
          place(p.cu_q, w.batch, w.rows, w.q_row);
        }
        if (p.cu_k) place(p.cu_k, w.batch, w.seqlen_k, w.k_row);
        if (p.used_q) w.rows = clamp(p.used_q[w.batch], w.rows);
        if (p.used_k) w.seqlen_k = min(clamp(p.used_k[w.batch], w.seqlen_k) + w.added(p), w.seqlen_k);
      }
      w.k_batch = p.cu_k ? 0 : w.batch;
      w.find_cached(p);
    }
    w.first_row = m * BM;
    w.diagonal = p.has_diagonal ? p.diagonal : w.seqlen_k - w.seqlen_q(p);
    if constexpr (listed)
      w.take_list(p, t.m);
    else
      w.find_blocks(p);
    if constexpr (descaled) {
      const int kv_head = w.head / p.heads_per_kv;
      // Not 0, by which hidden scores, -infinity, must not be multiplied.
      constexpr float kSmallest = 1e-30f;
      w.of_scores = max(p.q_descale.at(w.batch, kv_head) * p.k_descale.at(w.batch, kv_head), kSmallest);
      w.of_values = p.v_descale.at(w.batch, kv_head);
    }
    return w;
  }

  /// The first key of the n-th block to be computed; of a block of columns, the number of its first column.
  TW_INLINE int first_key(const auto& p, int n) const {
    if constexpr (columns)
      return n < this->list_blocks ? static_cast<int>(p.lists[this->first + n]) : (n - this->list_blocks) * BN;
    else if constexpr (listed)
      return p.lists[this->first + n] * BN;
    else
      return (last_block - n) * BN;
  }
  /// Whether the n-th block is one of columns.
  TW_INLINE bool of_columns([[maybe_unused]] int n) const {
    if constexpr (columns)
      return n >= this->list_blocks;
    else
      return false;
  }
  TW_INLINE int seqlen_q(const auto& p) const {
    if constexpr (split) return p.queries > 0 ? p.queries : rows;
    return rows;
  }
  /// The head and the query of the tile's row `row`.
  TW_INLINE int head_of(const auto& p, int row) const {
    if constexpr (split) return head * p.heads_together + head_in_tile(p, row);
    return head;
  }
  TW_INLINE int query_of(const auto& p, int row) const {
    if constexpr (split) return first_row + row - head_in_tile(p, row) * p.queries;
    return first_row + row;
  }

 private:
  TW_INLINE static int clamp(int x, int most) { return SequenceRows::clamp(x, most); }
  /// The keys of a cache.
  TW_INLINE void find_cached(const auto& p) {
    if constexpr (requires { p.k_batch; }) {
      if (p.k_batch) k_batch = clamp(p.k_batch[batch], (paged && p.pages ? p.page_tables : p.k.size_j) - 1);
    }
    if constexpr (requires { p.k_begin; }) {
      if (p.k_begin) {
        const int begin = clamp(p.k_begin[batch], seqlen_k);
        k_row += begin;
        seqlen_k -= begin;
      }
    }
  }
  /// Keys that were appended to the sequence after its length was read.
  TW_INLINE int added(const auto& p) const {
    if constexpr (!requires { p.cu_added; })
      return 0;
    else
      return p.cu_added ? clamp(p.cu_added[batch + 1] - p.cu_added[batch], seqlen_k) : p.keys_added;
  }
  /// Reads entry m of the list. Returns the tile's index in its sequence.
  TW_INLINE int read_tile(const auto& p, int m) {
    const auto tile = p.tiles + static_cast<i64>(m) * PackedTile::numbers;
    batch = tile[PackedTile::sequence];
    q_row = tile[PackedTile::q_begin];
    rows = tile[PackedTile::q_rows];
    k_row = tile[PackedTile::k_begin];
    seqlen_k = tile[PackedTile::keys];
    return tile[PackedTile::first_row] / BM;
  }
  TW_INLINE static void place(const auto& cu_seqlens, int i, int& size, int& begin) {
    const SequenceRows at = SequenceRows::packed(cu_seqlens, i, size);
    begin = at.begin;
    size = at.size;
  }
  TW_INLINE void find_blocks(const auto& p) {
    const int last_row = min(first_row + BM, rows) - 1;
    blocks = last_block = cut = cut_first = 0;
    if (last_row < first_row) return;
    const KeyRange all{0, seqlen_k};
    const int last = last_row - first_row, queries = seqlen_q(p);
    const bool one_head = !split || head_in_tile(p, 0) == head_in_tile(p, last);
    const ScoreRows score_rows{batch,    head_of(p, 0), one_head ? query_of(p, 0) : 0, one_head ? query_of(p, last) : queries - 1, queries,
                               seqlen_k, diagonal};
    const KeyRange seen = Rules::keys(p.rules, score_rows, all), whole = Rules::untouched(p.rules, score_rows, all);
    if (seen.end <= seen.begin) return;
    int begin = seen.begin / BN, end = ceil_div(seen.end, BN);
    if constexpr (split) {
      if (p.splits > 1) {
        const int share = ceil_div(end - begin, p.splits);
        begin += part * share;
        end = min(end, begin + share);
        if (end <= begin) return;
      }
    }
    blocks = end - begin;
    last_block = end - 1;
    const int whole_end = max(whole.end, 0) / BN, whole_begin = ceil_div(max(whole.begin, 0), BN);
    cut = min(max(end - whole_end, 0), blocks);
    if (Rules::lower) cut_first = min(max(whole_begin - begin, 0), blocks - cut);
  }
  /// Reads the list of tile m of the grid. Splits share the blocks that are in the list evenly.
  TW_INLINE void take_list(const auto& p, int m) {
    int tile = m;
    if constexpr (split) tile /= p.splits;
    const int n = q_batch * p.lists_of_batch + head / p.heads_per_list - p.first_list;
    const i64 number = static_cast<i64>(n) * p.list_tiles + tile, list = number * p.list_numbers;
    const int count = p.lists[list + BlockList::count];
    ListShare share{0, count};
    if constexpr (split) share = ListShare::of(count, part, p.splits);
    this->first = list + BlockList::blocks + share.begin;
    last_block = 0;
    blocks = share.end - share.begin;
    cut = share.among_first(p.lists[list + BlockList::cut]);
    cut_first = share.among_last(p.lists[list + BlockList::cut_first], count);
    if constexpr (columns) {
      this->list_blocks = blocks;
      this->positions = number * p.column_numbers;
      const int of_columns = ceil_div(p.lists[list + BlockList::columns], BN);
      blocks += of_columns;
      cut_first += of_columns;
    }
  }
  TW_INLINE int head_in_tile(const auto& p, int row) const {
    return static_cast<int>(static_cast<u32>(min(first_row + row, rows - 1)) / static_cast<u32>(seqlen_q(p)));
  }
};

}  // namespace tw
