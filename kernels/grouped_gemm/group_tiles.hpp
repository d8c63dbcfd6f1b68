#pragma once

#include "kernels/grouped_gemm/group_tiles.tile.hpp"
#include "tilewave/tensor.hpp"

// The list of tiles of groups, for the kernels of any family that take ListedGroups.

namespace tw::kernels::grouped_gemm {

/// Groups that ListGroupTiles counts at a time.
inline constexpr int kListed = 512;

/// Entries of a list: as many as groups of any size may need.
int list_size(int rows, int groups, int tile_rows);

/// Lists the tiles of `tile_rows` of groups whose offsets, i32 [groups + 1], are on a GPU. The list is memory of the call, i32 [entries,
/// ListedGroups::numbers].
Tensor list_tiles(const Tensor& offsets, int rows, int tile_rows, const Stream& stream);

/// Fills in the parameters of ListGroupTiles.
template <class Params>
void bind_list(Params& p, const Tensor& offsets, int rows, int tile_rows, const Tensor& tiles) {
  p.groups.offsets = offsets.data<i32>();
  p.groups.count = static_cast<int>(offsets.shape(0)) - 1;
  p.groups.rows = rows;
  p.tile_rows = tile_rows;
  p.tiles = tiles.data<i32>();
  p.count = static_cast<int>(tiles.shape(0));
}

}  // namespace tw::kernels::grouped_gemm
