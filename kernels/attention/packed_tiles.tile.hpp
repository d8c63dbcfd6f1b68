#pragma once

#include "tilewave/tile/attention.tile.hpp"

namespace tw::kernels::attention {

/// Computes the list of tiles of packed sequences, sorted by the number of keys. Attention takes tiles from the last to the first, so long
/// ones run first; at the end of a launch they would leave most of the device idle. In the backward pass, queries and keys change places
/// for tiles of keys, which may also be taken from the first to the last. With the list a block finds its tile with one memory access
/// instead of a binary search. A tile of this kernel is one sequence, which is compared with C others at a time.
template <int C>
struct PackedTiles {
  static constexpr const char* source = "kernels/attention/packed_tiles.tile.hpp";

  template <class Target>
  struct On {
    using Row = Rows<Target, float, 1, C, 4, 1>;
    using Integers = Pointer<Target, const i32>;
    struct Params {
      Integers cu_q, cu_k;         ///< [batch + 1]
      Integers used_q, used_k;     ///< [batch], or null
      int batch, queries, keys;    ///< queries and keys: totals of all sequences
      int tile_rows;               ///< queries per tile
      bool longest_first;          ///< descending numbers of keys
      int count;                   ///< length of the list; surplus entries have no queries
      Pointer<Target, i32> tiles;  ///< [count, PackedTile::numbers]
    };

    TW_INLINE static SequenceRows rows_of(const Integers& cu_seqlens, const Integers& used, int i, int rows) {
      SequenceRows at = SequenceRows::packed(cu_seqlens, i, rows);
      if (used) at.size = SequenceRows::clamp(used[i], at.size);
      return at;
    }

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const SequenceRows q = rows_of(p.cu_q, p.used_q, t.m, p.queries), k = rows_of(p.cu_k, p.used_k, t.m, p.keys);
      Row before, tiles;  // per column: the number of sequences that come before this one, and of their tiles
      block.fill(before, 0.0f);
      block.fill(tiles, 0.0f);
      TW_NO_UNROLL
      for (int first = 0; first < p.batch; first += C) {
        block.for_each(before, tiles, [&](int, int col, auto& x, auto& y) {
          const int other = first + col;
          if (other >= p.batch) return;
          const int keys = rows_of(p.cu_k, p.used_k, other, p.keys).size;
          if ((p.longest_first ? keys < k.size : keys > k.size) || (keys == k.size && other >= t.m)) return;
          x += 1.0f;
          y += static_cast<float>(ceil_div(rows_of(p.cu_q, p.used_q, other, p.queries).size, p.tile_rows));
        });
      }
      RowVector<Target, float, Row> place, begin;
      block.rows(before, [&](int i, auto row) { place[i] = row.sum(); });
      block.rows(tiles, [&](int i, auto row) { begin[i] = row.sum(); });
      const int first = static_cast<int>(begin[0]), own = ceil_div(q.size, p.tile_rows);
      const bool last = static_cast<int>(place[0]) == p.batch - 1;
      // Wrong offsets, whose sequences overlap, could give more tiles than the list has.
      block.parallel(max((last ? p.count : min(first + own, p.count)) - first, 0), [&](int i) {
        const auto to = p.tiles + static_cast<i64>(first + i) * PackedTile::numbers;
        to[PackedTile::sequence] = t.m;
        to[PackedTile::first_row] = i * p.tile_rows;
        to[PackedTile::q_begin] = q.begin;
        to[PackedTile::q_rows] = i < own ? q.size : 0;
        to[PackedTile::k_begin] = k.begin;
        to[PackedTile::keys] = k.size;
      });
    }
  };
};

}  // namespace tw::kernels::attention
