#pragma once

#include "kernels/attention/call.hpp"
#include "kernels/attention/key_blocks.tile.hpp"

// From the blocks of a call to the lists that its tiles read.

namespace tw::kernels::attention {

/// More queries than any sequence has.
inline constexpr int kOneBlock = 1 << 30;

/// The call's mask of blocks, or what marks its indices in one: [batch, heads, query_blocks, key_blocks].
Tensor blocks_mask(const AttentionCall& call);

/// Memory for the lists of tiles of `tile_rows` queries and `tile_keys` keys, i32 [lists, numbers of a list], which it makes the call's.
Tensor allocate_lists(AttentionCall& call, int tile_rows, int tile_keys);

/// The grid of ListKeyBlocks.
template <class Kernel>
TileGrid list_grid(const Tensor& lists) {
  return {ceil_div(static_cast<int>(lists.shape(0)), Kernel::rows)};
}

/// Fills in ListKeyBlocks' Params.
template <class P>
void fill_lists(P& p, const AttentionCall& call, const Tensor& mask, const Tensor& lists) {
  const KeyBlocks& blocks = call.blocks;
  p.mask = static_cast<const u8*>(mask.data());
  p.stride_batch = blocks.one_sequence ? 0 : mask.stride(0);
  p.stride_head = mask.shape(1) > 1 ? mask.stride(1) : 0;
  p.stride_query = mask.stride(2), p.stride_key = mask.stride(3);
  p.mask_queries = static_cast<int>(mask.shape(2)), p.mask_keys = static_cast<int>(mask.shape(3));
  p.query_block = call.split ? kOneBlock : blocks.of.query_block;
  p.key_block = blocks.of.key_block;
  p.lists = lists.data<std::int32_t>();
  p.list_count = static_cast<int>(lists.shape(0)), p.list_tiles = blocks.list_tiles;
  p.list_numbers = blocks.list_numbers;
  p.lists_of_batch = blocks.lists_of_batch, p.heads_per_list = blocks.heads_per_list;
  p.q.rows = static_cast<int>(call.q.shape(2)), p.q.size_i = static_cast<int>(call.q.shape(1));
  p.keys = call.keys;
  p.has_diagonal = call.diagonal.has_value();
  p.diagonal = call.diagonal.value_or(0);
  float unit = call.scale;
  detail::fill_rules(Rules<tw::Band<true, true>>{}, p.rules, call, unit, kNoUserRule);
  p.batch = call.batch;
  p.cu_q = call.cu_q, p.cu_k = call.cu_k, p.used_q = call.used_q, p.used_k = call.used_k;
  p.keys_added = call.keys_added, p.cu_added = call.cu_added;
  p.tiles = call.tiles;
  p.heads_together = call.heads_together;
  p.queries = call.split ? call.queries : 0;
  p.splits = 1;
}

}  // namespace tw::kernels::attention
