#pragma once

#include "kernels/attention/key_gradients_work.tile.hpp"
#include "tilewave/tile/attention_work.tile.hpp"

// Which blocks of keys the tiles of attention see, and which blocks of queries those of its gradients: from indices to a mask of blocks,
// and from a mask to lists.

namespace tw::kernels::attention {

/// Turns lists of indices into rows of a mask. A tile is one list. Indices may come in any order and more than once; those outside the row
/// are ignored.
struct MarkBlocks {
  static constexpr const char* source = "kernels/attention/key_blocks.tile.hpp";

  template <class Target>
  struct On {
    struct Params {
      Pointer<Target, const i32> indices, counts;  ///< counts: how many of a list's entries are used; null: all
      i64 stride_batch, stride_head, stride_query, stride_entry;
      i64 counts_stride_batch, counts_stride_head, counts_stride_query;
      int heads, queries, entries;  ///< of the lists, [batch, heads, blocks of queries, entries]
      int blocks;                   ///< of keys
      Pointer<Target, u8> mask;     ///< [batch, heads, blocks of queries, blocks]
    };

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const int query = t.m % p.queries, head = t.m / p.queries % p.heads, batch = t.m / p.queries / p.heads;
      const auto row = p.mask + static_cast<i64>(t.m) * p.blocks;
      block.parallel(p.blocks, [&](int i) { row[i] = 0; });
      block.sync();
      const auto list = p.indices + (batch * p.stride_batch + head * p.stride_head + query * p.stride_query);
      int count = p.entries;
      if (p.counts)
        count = SequenceRows::clamp(p.counts[batch * p.counts_stride_batch + head * p.counts_stride_head + query * p.counts_stride_query],
                                    count);
      block.parallel(count, [&](int i) {
        const int key = list[i * p.stride_entry];
        if (key >= 0 && key < p.blocks) row[key] = 1;
      });
    }
  };
};

/// A mask of blocks, as kernels that make lists read it.
template <class Target>
struct BlockMask {
  Pointer<Target, const u8> data;
  i64 first;                                                ///< index of batch 0 and head 0, which memory need not hold
  i64 stride_batch, stride_head, stride_query, stride_key;  ///< 0 where all have the same
  int queries, keys;                                        ///< blocks of the mask; others are not selected
  int query_block, key_block;                               ///< queries and keys of a block
  int heads_per_list;                                       ///< query heads with the same blocks

  TW_INLINE i64 row(int batch, int head, int query) const {
    return first + batch * stride_batch + head / heads_per_list * stride_head + query * stride_query;
  }
};

/// Makes `rows` lists, each of them in one warp, from candidates 0 to most - 1 of each list, `C` at a time. `entry(n, of)` is what
/// candidate n adds to the list of `of` plus 1, or 0. `places[row]` is the index of a list's first entry. Calls `counted(entries, numbers)`
/// for each C candidates.
template <class Row, int C, class Of>
TW_INLINE void make_lists(auto& block, int most, const Of& lists_of, auto& count, auto places, const auto& to, auto entry, auto counted) {
  block.for_rows(count, [](int, int, i32& n) { n = 0; });
  TW_NO_UNROLL
  for (int first = 0; first < most; first += C) {
    Row entries, numbers;
    block.for_each(numbers, [&](int, int col, i32& x) { x = first + col; });
    block.map(entries, numbers, lists_of, [&](i32, i32 n, const auto& of) { return entry(n, of); });
    counted(entries, numbers);
    block.map(numbers, entries, [](i32, i32 x) { return x != 0 ? 1 : 0; });
    block.row_cumsum(numbers);
    block.map(numbers, count, [](i32 place, i32 n) { return place + n; });
    block.for_each(entries, numbers, [&](int row, int, i32& x, i32& place) {
      if (x != 0) to[places(row) + place - 1] = x - 1;
    });
    block.map(entries, 0, [](i32 x, i32) { return x != 0 ? 1 : 0; });
    block.rows(entries, [&](int i, auto row) { count[i] += row.sum(); });
  }
}

/// Lists, for each tile of kRows queries, the blocks of kKeys keys that a mask selects and `causal`, the window and the sequence's end
/// leave visible, from the last block to the first, so that blocks cut by a mask come before whole ones: see BlockList. Both sizes divide
/// those of the mask's blocks.
template <int kRows, int kKeys, int C = 256>
struct ListKeyBlocks {
  static constexpr const char* source = "kernels/attention/key_blocks.tile.hpp";
  static constexpr int rows = 4;
  static constexpr AttentionConfig kConfig{
      .head_dim = 0, .value_dim = 0, .rows = kRows, .keys = kKeys, .stages = 0, .form = kRagged | kSplit};

  template <class Target>
  struct On {
    using Row = Rows<Target, i32, rows, C, 4, 8>;
    using Band = Rules<tw::Band<true, true, true>>;
    using Seen = AttentionWork<kConfig, Band>;
    using Integers = Pointer<Target, const i32>;
    struct Extents {
      int rows;    ///< of a tensor of queries
      int size_i;  ///< heads
    };
    struct Params {
      BlockMask<Target> mask;
      Pointer<Target, i32> lists;  ///< [list, tile, list_numbers]
      int list_count, list_tiles;
      i64 list_numbers;
      int lists_of_batch, first_list;  ///< as in Attention

      // As in Attention.
      Extents q;
      int keys;
      bool has_diagonal;
      int diagonal;
      typename Band::template Params<Target> rules;
      int batch;
      Integers cu_q, cu_k, used_q, used_k, k_begin;
      int keys_added;
      Integers cu_added;
      Integers tiles;
      int heads_together, queries, splits;
    };
    /// What a list selects from.
    struct Candidates {
      i64 mask;        ///< index of the row of the mask
      int last_block;  ///< candidate n is block last_block - n
      int blocks;
      int cut, whole_end;  ///< candidates before `cut` and from whole_end on are cut by rules
    };

    TW_INLINE static Candidates candidates_of(const Params& p, int list) {
      const int tile = list % p.list_tiles, n = list / p.list_tiles + p.first_list;
      const int batch = p.lists_of_batch > 0 ? n / p.lists_of_batch : 0, head = (n - batch * p.lists_of_batch) * p.mask.heads_per_list;
      const Seen w = Seen::of(p, {tile, batch * p.q.size_i + head, 0});
      const int query = w.first_row / p.mask.query_block;
      return {p.mask.row(w.batch, head, query), w.last_block, query < p.mask.queries ? w.blocks : 0, w.cut, w.blocks - w.cut_first};
    }

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      RowVector<Target, Candidates, Row> candidates;
      RowVector<Target, i32, Row> count, cut, cut_first;
      block.for_rows(candidates, [&](int row, int, Candidates& c) {
        const int list = t.m * rows + row;
        c = list < p.list_count ? candidates_of(p, list) : Candidates{0, 0, 0, 0, 0};
      });
      block.for_rows(cut, [](int, int, i32& n) { n = 0; });
      block.for_rows(cut_first, [](int, int, i32& n) { n = 0; });
      const int per_block = p.mask.key_block / kKeys;
      make_lists<Row, C>(
          block, ceil_div(p.keys, kKeys), candidates, count,
          [&](int row) { return (t.m * rows + row) * p.list_numbers + BlockList::blocks; }, p.lists,
          [&](i32 n, const Candidates& c) {
            const int number = c.last_block - n, in_mask = number / per_block;
            return n < c.blocks && in_mask < p.mask.keys && p.mask.data[c.mask + in_mask * p.mask.stride_key] != 0 ? number + 1 : 0;
          },
          [&](const Row& entries, const Row& numbers) {
            Row early, late;
            block.map(early, entries, numbers, candidates,
                      [](i32, i32 x, i32 n, const Candidates& c) { return x > 0 && n < c.cut ? 1 : 0; });
            block.map(late, entries, numbers, candidates,
                      [](i32, i32 x, i32 n, const Candidates& c) { return x > 0 && n >= c.whole_end ? 1 : 0; });
            block.rows(early, [&](int i, auto row) { cut[i] += row.sum(); });
            block.rows(late, [&](int i, auto row) { cut_first[i] += row.sum(); });
          });
      if (!block.owns_rows(count)) return;
      const auto store = [&](RowVector<Target, i32, Row>& values, int field) {
        block.for_rows(values, [&](int row, int, i32& n) {
          const int list = t.m * rows + row;
          if (list < p.list_count) p.lists[list * p.list_numbers + field] = n;
        });
      };
      store(count, BlockList::count);
      store(cut, BlockList::cut);
      store(cut_first, BlockList::cut_first);
    }
  };
};

/// Lists, for each tile of kKeys keys of the gradients, the blocks of kRows queries of all heads that share the keys and select them: see
/// QueryList. Queries that `causal` and the window keep from all keys of the tile are left out. `kForm`: kRagged for packed sequences.
template <int kRows, int kKeys, int kForm, int C = 256>
struct ListQueryBlocks {
  static constexpr const char* source = "kernels/attention/key_blocks.tile.hpp";
  static constexpr int rows = 4;
  static constexpr AttentionConfig kConfig{.head_dim = 0, .value_dim = 0, .rows = kRows, .keys = kKeys, .stages = 0, .form = kForm};

  template <class Target>
  struct On {
    using Row = Rows<Target, i32, rows, C, 4, 8>;
    using Band = Rules<tw::Band<true, true, true>>;
    using Seen = KeyGradientsWork<kConfig, Band>;
    using Integers = Pointer<Target, const i32>;
    struct Params {
      BlockMask<Target> mask;
      Pointer<Target, i32> lists;  ///< [list, tile, list_numbers]
      int list_count, list_tiles;
      i64 list_numbers;

      int list_blocks;  ///< blocks of queries of a head

      // As in KeyGradients.
      int list_bits, first_head;
      int queries, keys;
      int kv_heads, heads_per_kv;
      bool has_diagonal;
      int diagonal;
      typename Band::template Params<Target> rules;
      int batch;
      Integers cu_q, cu_k, used_q, used_k;
      Integers tiles;
    };
    /// What a list selects from. The heads that share the keys come one after the other, `blocks` candidates each, from first_block on.
    struct Candidates {
      int batch, head, key_block;
      int first_block, blocks, count;
    };

    TW_INLINE static Candidates candidates_of(const Params& p, int list) {
      const Seen w = Seen::of(p, {list % p.list_tiles, list / p.list_tiles + p.first_head, 0});
      const int key_block = w.first_key / p.mask.key_block;
      return {w.batch, w.kv_head * p.heads_per_kv, key_block, w.first_block, max(w.blocks, 1), key_block < p.mask.keys ? w.steps : 0};
    }

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      RowVector<Target, Candidates, Row> candidates;
      RowVector<Target, i32, Row> count;
      block.for_rows(candidates, [&](int row, int, Candidates& c) {
        const int list = t.m * rows + row;
        c = list < p.list_count ? candidates_of(p, list) : Candidates{0, 0, 0, 0, 1, 0};
      });
      const int per_block = p.mask.query_block / kRows;
      make_lists<Row, C>(
          block, p.heads_per_kv * p.list_blocks, candidates, count,
          [&](int row) { return (t.m * rows + row) * p.list_numbers + QueryList::entries; }, p.lists,
          [&](i32 n, const Candidates& c) {
            const int head = n / c.blocks, number = c.first_block + n - head * c.blocks, in_mask = number / per_block;
            const bool selected = n < c.count && in_mask < p.mask.queries &&
                                  p.mask.data[p.mask.row(c.batch, c.head + head, in_mask) + c.key_block * p.mask.stride_key] != 0;
            return selected ? static_cast<int>(static_cast<u32>(head) << p.list_bits) + number + 1 : 0;
          },
          [](const Row&, const Row&) {});
      if (!block.owns_rows(count)) return;
      block.for_rows(count, [&](int row, int, i32& n) {
        const int list = t.m * rows + row;
        if (list < p.list_count) p.lists[list * p.list_numbers + QueryList::count] = n;
      });
    }
  };
};

}  // namespace tw::kernels::attention
