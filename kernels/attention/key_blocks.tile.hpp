#pragma once

#include "tilewave/tile/attention_work.tile.hpp"

// Which blocks of keys the tiles of attention see: from indices to a mask of blocks, and from a mask to lists.

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

/// Lists, for each tile of kRows queries, the blocks of kKeys keys that a mask selects and `causal`, the window and the sequence's end
/// leave visible: see BlockList. Both sizes divide those of the mask's blocks. Each warp makes one list, C blocks at a time.
template <int kRows, int kKeys, int C = 32>
struct ListKeyBlocks {
  static constexpr const char* source = "kernels/attention/key_blocks.tile.hpp";
  static constexpr int rows = 4;
  static constexpr AttentionConfig kConfig{
      .head_dim = 0, .value_dim = 0, .rows = kRows, .keys = kKeys, .stages = 0, .form = kRagged | kSplit};

  template <class Target>
  struct On {
    using Row = Rows<Target, i32, rows, C, 4, 1>;
    using Band = Rules<tw::Band<true, true>>;
    using Seen = AttentionWork<kConfig, Band>;
    using Integers = Pointer<Target, const i32>;
    struct Extents {
      int rows;    ///< of a tensor of queries
      int size_i;  ///< heads
    };
    struct Params {
      Pointer<Target, const u8> mask;
      i64 stride_batch, stride_head, stride_query, stride_key;  ///< 0 where all have the same
      int mask_queries, mask_keys;                              ///< blocks of the mask; others are not selected
      int query_block, key_block;                               ///< queries and keys of a block of the mask
      Pointer<Target, i32> lists;                               ///< [list, tile, list_numbers]
      int list_count, list_tiles;
      i64 list_numbers;
      int lists_of_batch, heads_per_list;  ///< as in Attention

      // As in Attention.
      Extents q;
      int keys;
      bool has_diagonal;
      int diagonal;
      typename Band::template Params<Target> rules;
      int batch;
      Integers cu_q, cu_k, used_q, used_k;
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
      const int tile = list % p.list_tiles, n = list / p.list_tiles;
      const int heads = p.q.size_i, lists = max(p.lists_of_batch, 1);
      const int batch = p.lists_of_batch > 0 ? n / lists : 0, head = (n - batch * p.lists_of_batch) * p.heads_per_list;
      const Seen w = Seen::of(p, {tile, batch * heads + head, 0});
      const int query = w.first_row / p.query_block;
      return {w.batch * p.stride_batch + head / p.heads_per_list * p.stride_head + query * p.stride_query, w.last_block,
              query < p.mask_queries ? w.blocks : 0, w.cut, w.blocks - w.cut_first};
    }

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      RowVector<Target, Candidates, Row> candidates;
      RowVector<Target, i32, Row> count, cut, cut_first;
      block.for_rows(candidates, [&](int row, int, Candidates& c) {
        const int list = t.m * rows + row;
        c = list < p.list_count ? candidates_of(p, list) : Candidates{0, 0, 0, 0, 0};
      });
      block.for_rows(count, [](int, int, i32& n) { n = 0; });
      block.for_rows(cut, [](int, int, i32& n) { n = 0; });
      block.for_rows(cut_first, [](int, int, i32& n) { n = 0; });
      const int most = ceil_div(p.keys, kKeys), per_block = p.key_block / kKeys;
      TW_NO_UNROLL
      for (int first = 0; first < most; first += C) {
        Row numbers, places, early, late;  // numbers: of a block plus 1, or 0 if it is not in the list
        block.for_each(places, [&](int, int col, i32& x) { x = first + col; });
        block.map(numbers, places, candidates, [&](i32, i32 n, const Candidates& c) {
          const int number = c.last_block - n, in_mask = number / per_block;
          return n < c.blocks && in_mask < p.mask_keys && p.mask[c.mask + in_mask * p.stride_key] != 0 ? number + 1 : 0;
        });
        block.map(early, numbers, places, candidates, [](i32, i32 x, i32 n, const Candidates& c) { return x > 0 && n < c.cut ? 1 : 0; });
        block.map(late, numbers, places, candidates,
                  [](i32, i32 x, i32 n, const Candidates& c) { return x > 0 && n >= c.whole_end ? 1 : 0; });
        block.map(places, numbers, [](i32, i32 x) { return x > 0 ? 1 : 0; });
        block.row_cumsum(places);
        block.map(places, count, [](i32 place, i32 n) { return place + n; });
        block.for_each(numbers, places, [&](int row, int, i32& number, i32& place) {
          if (number > 0) p.lists[(t.m * rows + row) * p.list_numbers + BlockList::blocks + place - 1] = number - 1;
        });
        block.map(numbers, 0, [](i32 x, i32) { return x > 0 ? 1 : 0; });
        block.rows(numbers, [&](int i, auto row) { count[i] += row.sum(); });
        block.rows(early, [&](int i, auto row) { cut[i] += row.sum(); });
        block.rows(late, [&](int i, auto row) { cut_first[i] += row.sum(); });
      }
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

}  // namespace tw::kernels::attention
