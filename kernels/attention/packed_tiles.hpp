#pragma once

#include "tilewave/detail/attention_call.hpp"

namespace tw::kernels::attention {

/// Has the tiles of packed sequences listed before they are taken, on a GPU and where they are so many that it pays. The result must
/// outlive the launch of the call.
Tensor list_packed_tiles(detail::AttentionCall& call);

/// Enqueues what fills in `tiles`, i32[at least as many as there are, PackedTile::numbers], where a tile has `tile_rows` queries.
void packed_tiles(const detail::AttentionCall& call, int tile_rows, const Tensor& tiles);

}  // namespace tw::kernels::attention
