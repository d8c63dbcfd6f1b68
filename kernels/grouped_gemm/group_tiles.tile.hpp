#pragma once

#include "tilewave/tile/gemm.tile.hpp"
#include "tilewave/tile/segments.tile.hpp"

namespace tw::kernels::grouped_gemm {

/// The tiles of groups, by a list: which rows of which group the blocks of a cluster compute. Surplus entries have group -1.
struct ListedGroups {
  static constexpr bool grouped = true;
  static constexpr int numbers = 3;  ///< of an entry: those of RowsOfTile

  template <class Target>
  struct Params {
    Pointer<Target, const i32> tiles;

    /// The rows of tile number `m`.
    template <int BM, int Cluster>
    TW_INLINE gemm::RowsOfTile rows_of(int m) const {
      const auto entry = tiles + static_cast<i64>(m / Cluster) * numbers;
      return {entry[0], entry[1] + m % Cluster * BM, entry[2]};
    }
  };
};

/// Lists the tiles of all groups. Empty groups have none, so the list of a few rows is short however many groups there are, and a block
/// finds its tile with one memory access. A tile of this kernel is one group, whose tiles come after those of the groups before it; C
/// groups are counted at a time.
template <int C>
struct ListGroupTiles {
  static constexpr const char* source = "kernels/grouped_gemm/group_tiles.tile.hpp";

  template <class Target>
  struct On {
    using Row = Rows<Target, float, 1, C, 4, 1>;
    struct Params {
      Segments<Target> groups;
      int tile_rows;               ///< of a cluster
      Pointer<Target, i32> tiles;  ///< [count, ListedGroups::numbers]
      int count;                   ///< entries; those that no group needs get group -1
    };

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const int g = t.m;
      const auto tiles_of = [&](int other) { return ceil_div(p.groups.at(other).size, p.tile_rows); };
      Row before;
      block.fill(before, 0.0f);
      TW_NO_UNROLL
      for (int first = 0; first < g; first += C) {
        block.for_each(before, [&](int, int col, auto& x) {
          if (first + col < g) x += static_cast<float>(tiles_of(first + col));
        });
      }
      RowVector<Target, float, Row> sum;
      block.rows(before, [&](int i, auto row) { sum[i] = row.sum(); });
      const int begin = static_cast<int>(sum[0]), own = tiles_of(g);
      const auto segment = p.groups.at(g);
      // Wrong offsets, whose groups overlap, could give more tiles than the list has.
      const int last = g == p.groups.count - 1 ? p.count : min(begin + own, p.count);
      block.parallel(max(last - begin, 0), [&](int i) {
        const auto entry = p.tiles + static_cast<i64>(begin + i) * ListedGroups::numbers;
        entry[0] = i < own ? g : -1;
        entry[1] = segment.begin + i * p.tile_rows;
        entry[2] = segment.begin + segment.size;
      });
    }
  };
};

}  // namespace tw::kernels::grouped_gemm
