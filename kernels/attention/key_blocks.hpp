#pragma once

#include <functional>

#include "kernels/attention/backward.hpp"
#include "kernels/attention/call.hpp"
#include "kernels/attention/key_blocks.tile.hpp"

// From the blocks of a call to the lists that its tiles read.

namespace tw::kernels::attention {

/// More queries than any sequence has.
inline constexpr int kOneBlock = 1 << 30;

/// A mask of blocks and where it begins: see BlockMask.
using HostMask = BlockMask<cpu::Target>;

/// What writes a launch's lists.
using WriteLists = std::function<void(const AttentionCall& call, const HostMask& mask, const Tensor& lists)>;
using WriteQueryLists = std::function<void(const BackwardCall& call, const Tensor& tiles, const HostMask& mask, const Tensor& lists)>;
/// A launch whose tiles read the lists in the call.
using Launch = std::function<void(const AttentionCall&)>;
using LaunchBackward = std::function<void(const BackwardCall&)>;

/// Makes the lists of tiles of `tile_rows` queries and `tile_keys` keys, and calls `launch` with a call that has them: once, or if the
/// lists of all heads would take more than KeyBlocks::most_list_bytes for some of the heads at a time. A stream's work is in order, so the
/// next lists use the same memory.
void with_lists(const AttentionCall& call, int tile_rows, int tile_keys, const Launch& launch);
void with_lists(const AttentionCall& call, int tile_rows, int tile_keys, const WriteLists& write, const Launch& launch);

// The same in the backward pass, for tiles of queries and of keys. `tiles`: of list_tiles(). Without blocks they call `launch` with `call`.
void with_key_lists(const BackwardCall& call, int tile_rows, int tile_keys, const Tensor& tiles, const LaunchBackward& launch);
void with_query_lists(const BackwardCall& call, int tile_rows, int tile_keys, const Tensor& tiles, const LaunchBackward& launch);
void with_query_lists(const BackwardCall& call, int tile_rows, int tile_keys, const Tensor& tiles, const WriteQueryLists& write,
                      const LaunchBackward& launch);

/// Heads whose lists are made at once, of [batch, heads]: all heads of some sequences, or some heads of one.
struct ListedHeads {
  int first_batch, batches, first_head, heads;
};
/// The heads of all launches, in order. `unit`: heads that stay together, whose lists take `unit_bytes`; `shared`: all sequences have the
/// same lists.
std::vector<ListedHeads> listed_heads(int batches, int heads, int unit, std::int64_t unit_bytes, std::int64_t most_bytes, bool shared);

/// Fills in a kernel's BlockMask.
void fill_mask(auto& to, const HostMask& mask) {
  to.data = static_cast<const u8*>(mask.data);
  to.first = mask.first;
  to.stride_batch = mask.stride_batch, to.stride_head = mask.stride_head;
  to.stride_query = mask.stride_query, to.stride_key = mask.stride_key;
  to.queries = mask.queries, to.keys = mask.keys;
  to.query_block = mask.query_block, to.key_block = mask.key_block;
  to.heads_per_list = mask.heads_per_list;
}

/// Fills in ListKeyBlocks' Params.
template <class P>
void fill_lists(P& p, const AttentionCall& call, const HostMask& mask, const Tensor& lists) {
  const KeyBlocks& blocks = call.blocks;
  fill_mask(p.mask, mask);
  p.lists = lists.data<std::int32_t>();
  p.list_count = static_cast<int>(lists.shape(0)), p.list_tiles = blocks.list_tiles;
  p.list_numbers = blocks.list_numbers;
  p.lists_of_batch = blocks.lists_of_batch, p.first_list = blocks.first_list;
  p.q.rows = static_cast<int>(call.q.shape(2)), p.q.size_i = static_cast<int>(call.q.shape(1));
  p.keys = call.keys;
  p.has_diagonal = call.diagonal.has_value();
  p.diagonal = call.diagonal.value_or(0);
  float unit = call.scale;
  detail::fill_rules(Rules<tw::Band<true, true, true>>{}, p.rules, call, unit, kNoUserRule);
  p.batch = call.batch;
  p.cu_q = call.cu_q, p.cu_k = call.cu_k, p.used_q = call.used_q, p.used_k = call.used_k, p.k_begin = call.k_begin;
  p.keys_added = call.keys_added, p.cu_added = call.cu_added;
  p.tiles = call.tiles;
  p.heads_together = call.heads_together;
  p.queries = call.split ? call.queries : 0;
  p.splits = 1;
}

/// Fills in ListQueryBlocks' Params.
template <class P>
void fill_query_lists(P& p, const BackwardCall& call, const Tensor& tiles, const HostMask& mask, const Tensor& lists) {
  const AttentionCall& forward = call.forward;
  fill_mask(p.mask, mask);
  p.lists = lists.data<std::int32_t>();
  p.list_count = static_cast<int>(lists.shape(0)), p.list_tiles = call.query_lists.list_tiles;
  p.list_numbers = call.query_lists.list_numbers;
  p.list_blocks = call.query_lists.list_blocks, p.list_bits = call.query_lists.list_bits, p.first_head = call.query_lists.first_head;
  p.queries = static_cast<int>(forward.q.shape(2)), p.keys = forward.keys;
  p.kv_heads = static_cast<int>(call.dk.shape(1));
  p.heads_per_kv = static_cast<int>(forward.q.shape(1) / call.dk.shape(1));
  p.has_diagonal = forward.diagonal.has_value();
  p.diagonal = forward.diagonal.value_or(0);
  float unit = forward.scale;
  detail::fill_rules(Rules<tw::Band<true, true, true>>{}, p.rules, forward, unit, kNoUserRule);
  p.batch = forward.batch;
  p.cu_q = forward.cu_q, p.cu_k = forward.cu_k, p.used_q = forward.used_q, p.used_k = forward.used_k;
  p.tiles = tiles.numel() > 0 ? tiles.data<std::int32_t>() : nullptr;
}

}  // namespace tw::kernels::attention
