#pragma once

#include "tilewave/tile/attention.tile.hpp"

namespace tw::kernels::attention {

/// Orders sequences by their number of keys, the fewest first, for tiles that are taken from the last to the first: long ones at the end of
/// a launch would leave most of the device idle. A tile here is one sequence, held against C others at a time.
template <int C>
struct SequenceOrder {
  static constexpr const char* source = "kernels/attention/sequence_order.tile.hpp";

  template <class Target>
  struct On {
    using Row = Rows<Target, float, 1, C, 4, 1>;
    using Integers = Pointer<Target, const i32>;
    struct Params {
      Integers cu_q, cu_k;              ///< [batch + 1]
      Integers used_k;                  ///< [batch], or null
      int batch, queries, keys;         ///< queries and keys: of all sequences
      int tile_rows;                    ///< queries of a tile
      Pointer<Target, i32> order;       ///< [batch]: the sequence at each place
      Pointer<Target, i32> first_tile;  ///< [batch]: of the sequence at each place
    };

    TW_INLINE static int keys_of(const Params& p, int i) {
      const int size = SequenceRows::packed(p.cu_k, i, p.keys).size;
      return p.used_k ? SequenceRows::clamp(p.used_k[i], size) : size;
    }

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const int own = keys_of(p, t.m);
      Row before, tiles;  // per column, over all chunks: sequences that stand before this one, and their tiles
      block.fill(before, 0.0f);
      block.fill(tiles, 0.0f);
      TW_NO_UNROLL
      for (int first = 0; first < p.batch; first += C) {
        block.for_each(before, tiles, [&](int, int col, auto& x, auto& y) {
          const int other = first + col;
          if (other >= p.batch) return;
          const int keys = keys_of(p, other);
          if (keys > own || (keys == own && other >= t.m)) return;
          x += 1.0f;
          y += static_cast<float>(ceil_div(SequenceRows::packed(p.cu_q, other, p.queries).size, p.tile_rows));
        });
      }
      RowVector<Target, float, Row> place, first_tile;
      block.rows(before, [&](int i, auto row) { place[i] = row.sum(); });
      block.rows(tiles, [&](int i, auto row) { first_tile[i] = row.sum(); });
      block.for_rows(place, [&](int, int i, auto& x) {
        if (!block.owns_rows(place)) return;
        const int at = static_cast<int>(x);
        p.order[at] = t.m;
        p.first_tile[at] = static_cast<int>(first_tile[i]);
      });
    }
  };
};

}  // namespace tw::kernels::attention
