#pragma once

#include "kernels/grouped_gemm/group_tiles.tile.hpp"

// Which weight the rows of x are multiplied with, as a template argument of kernels. On<Target> of a kernel derives from Weights::Kernel,
// and its functions take Weights::Work: a Tile, or what the list has for it.

namespace tw::kernels::dequant_gemm {

/// The rows of W and x that a tile multiplies.
struct RowsOfTile {
  int group;  ///< negative: there is nothing to do
  int row;    ///< the first row of the group's weight, a column of y
  int w_row;  ///< the same row in W
  int x_row;  ///< the first row of x
  int x_end;  ///< the row after the group's last one; may be inside the tile
  int split;  ///< of K
};

/// All rows have one weight, W [N, K].
struct OneWeight {
  static constexpr bool grouped = false;
  using Work = Tile;
  struct Kernel {};
  template <class Target>
  struct Params {};

  template <int BW, int BX>
  TW_INLINE static RowsOfTile rows(const Work& t) {
    return {0, t.m * BW, t.m * BW, t.n * BX, 0x7fffffff, t.batch};
  }
};

/// Each group of rows has a weight of its own. W has them one below the other, [groups N, K]. Tiles of x are those of a list.
struct WeightOfGroup {
  static constexpr bool grouped = true;
  using Work = RowsOfTile;
  struct Kernel {
    using Work = RowsOfTile;
  };
  template <class Target>
  struct Params {
    typename grouped_gemm::ListedGroups::template Params<Target> list;
    int weight_rows;  ///< N

    template <int BW, int BX>
    TW_INLINE RowsOfTile at(Tile t) const {
      const auto [group, first, end] = list.template rows_of<BX, 1>(t.n);
      return {group, t.m * BW, group * weight_rows + t.m * BW, first, end, 0};
    }
  };

  template <int BW, int BX>
  TW_INLINE static RowsOfTile rows(const Work& w) {
    return w;
  }
};

}  // namespace tw::kernels::dequant_gemm
