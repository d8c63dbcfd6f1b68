#pragma once

#include "tilewave/detail/attention_call.hpp"

namespace tw::kernels::attention {

/// Has the tiles of packed sequences taken longest first, on a GPU and where they are so many that it matters. The result must outlive the
/// launch of the call.
Tensor order_sequences(detail::AttentionCall& call);

/// Enqueues what finds the order: i32[batch] the sequence at each place, the one with the fewest keys first, and i32[batch] the first tile
/// of the sequence at each place, where a tile has `tile_rows` queries.
void sequence_order(const detail::AttentionCall& call, int tile_rows, const Tensor& order, const Tensor& first_tile);

}  // namespace tw::kernels::attention
