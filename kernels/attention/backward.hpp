#pragma once

#include <optional>
#include <vector>

#include "kernels/attention/call.hpp"
#include "kernels/attention/gradients.tile.hpp"
#include "kernels/attention/heuristics.hpp"
#include "kernels/attention/key_gradients.tile.hpp"
#include "kernels/attention/mask_gradient.tile.hpp"
#include "kernels/attention/query_gradient.tile.hpp"
#include "kernels/variant.hpp"

// From attention_backward() to its kernels.

namespace tw::kernels::attention {

/// The lists of blocks of queries that a launch's tiles of keys read: see KeyGradients' Params.
struct QueryLists {
  const std::int32_t* lists = nullptr;
  int list_tiles = 0;
  std::int64_t list_numbers = 0;
  int list_blocks = 0, list_bits = 0;
  int first_head = 0;
  int head_count = 0;  ///< heads of the launch, of batch * kv_heads; 0: all
};

/// A checked call. Tensors are [batch, head, row, dim]; for packed sequences the batch is 1.
struct BackwardCall {
  AttentionCall forward;
  const float* lse = nullptr;
  Tensor d_o = {}, dq = {}, dk = {}, dv = {};
  float* d_sink = nullptr;
  std::optional<Tensor> d_mask = {};  ///< [batch, head, query, key], where each extent may be 1
  bool deterministic = true;
  /// f32 [batch, head, padded queries], written by the first kernel: see KeyGradients
  Tensor lse_log2 = {}, delta = {};
  /// f32 [batch, head, query, dim]: see AllGradients. Empty if dQ has a kernel of its own
  Tensor dq_sum = {};
  /// i32 [batch, head, padded queries / rows of all_gradients_config()], set to 0. Empty if additions to dq_sum have no order
  Tensor turns = {};
  /// i32: offsets and lengths of packed sequences, checked, to which the pointers of `forward` point, and the sequences of padded queries
  Tensor lengths = {};
  const std::int32_t* padded_sequences = nullptr;  ///< see PaddedQueries
  QueryLists query_lists = {};

  bool packed() const { return forward.cu_q != nullptr; }
};

/// Throws InvalidArgument, with nothing written.
BackwardCall check_backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& lse, const Tensor& d_o,
                            const Tensor& dq, const Tensor& dk, const Tensor& dv, const AttentionBackwardOptions& options);

/// The same for packed sequences.
BackwardCall check_varlen_backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& lse, const Tensor& d_o,
                                   const Tensor& dq, const Tensor& dk, const Tensor& dv, const PackedSequences& sequences,
                                   const AttentionBackwardOptions& options);

/// Enqueues a checked call, or runs it. `with_sink`: also computes d_sink.
void run_backward(BackwardCall& call, bool with_sink = false);

/// The number of queries in lse_log2 and delta, a multiple of all tiles.
int padded_queries(int queries);
int padded_queries(const BackwardCall& call);

/// Packed sequences. Runs before all others: allocates and computes `lengths`.
void run_checked_sequences(BackwardCall& call);
/// Sets the gradients of rows that no sequence uses to 0.
void run_zero_unused(const BackwardCall& call);
/// On a GPU and where they are so many that it pays, the list of tiles of `tile_rows` rows that a launch over `grid` takes. Otherwise an
/// empty tensor. Tiles are of keys, in any order or the order of turns, or of queries.
enum class TilesOf { keys, keys_in_turn, queries };
Tensor list_tiles(const BackwardCall& call, TilesOf of, const TileGrid& grid, int tile_rows);

/// Whether there are gradients to compute; others are 0 or have no elements.
bool has_queries(const BackwardCall& call);
bool has_keys(const BackwardCall& call);

/// Whether all gradients come from one kernel, AllGradients.
bool adds_up_query_gradient(const BackwardCall& call);
void all_gradients_on_gpu(const BackwardCall& call);
/// Runs before the gradients: allocates and computes lse_log2 and delta. With `adds_up` it also allocates dq_sum and turns, set to 0.
void run_delta(BackwardCall& call, bool adds_up);
/// Runs after AllGradients: dQ from dq_sum.
void run_scaled_sum(const BackwardCall& call);

void key_gradients_on_cpu(const BackwardCall& call);
void key_gradients_on_gpu(const BackwardCall& call);
void query_gradient_on_cpu(const BackwardCall& call);
void query_gradient_on_gpu(const BackwardCall& call);
void mask_gradient_on_cpu(const BackwardCall& call);
void mask_gradient_on_gpu(const BackwardCall& call);
void listed_gradients_on_cpu(const BackwardCall& call);

/// The tiles that a GPU's kernels have.
AttentionConfig all_gradients_config(const BackwardCall& call);
AttentionConfig key_gradients_config(const BackwardCall& call);
AttentionConfig query_gradient_config(const BackwardCall& call);
AttentionConfig mask_gradient_config(const BackwardCall& call);

/// For FirstKeysFirst.
TileGrid key_gradients_grid(const BackwardCall& call, int tile_keys);

/// For MaskGradient.
TileGrid mask_gradient_grid(const BackwardCall& call, const AttentionConfig& config);

/// Fills in the Params that all gradients' kernels have.
template <class RuleList, class P>
void fill_scores(auto& bind, P& p, const BackwardCall& call) {
  const AttentionCall& forward = call.forward;
  // What is empty is not read, but a tensor map must describe some memory.
  const bool queries = forward.q.numel() > 0, keys = forward.k.numel() > 0;
  bind(p.q, queries ? forward.q : forward.k);
  bind(p.d_o, queries ? call.d_o : forward.v);
  bind(p.k, keys ? forward.k : forward.q);
  bind(p.v, keys ? forward.v : call.d_o);
  bind(p.lse, call.lse_log2);
  bind(p.delta, call.delta);
  p.heads_per_kv = keys ? static_cast<int>(forward.q.shape(1) / forward.k.shape(1)) : 1;
  p.has_diagonal = forward.diagonal.has_value();
  p.diagonal = forward.diagonal.value_or(0);
  p.keys = forward.keys;
  float unit = forward.scale;
  detail::fill_rules(RuleList{}, p.rules, forward, unit, kNoUserRule);
  p.scale_log2 = unit * kLog2E;
  detail::fill_dropout(p.dropout, forward);
  p.batch = forward.batch;
  p.cu_q = forward.cu_q, p.cu_k = forward.cu_k, p.used_q = forward.used_q, p.used_k = forward.used_k;
}
/// The same for KeyGradients and QueryGradient, but for the gradients that they store. `tiles`: see list_tiles().
template <class RuleList, class P>
void fill_backward(auto& bind, P& p, const BackwardCall& call, const Tensor& tiles) {
  fill_scores<RuleList>(bind, p, call);
  p.scale = call.forward.scale;
  p.tiles = tiles.numel() > 0 ? tiles.data<std::int32_t>() : nullptr;
}
template <class RuleList, class P>
void fill_key_gradients(auto& bind, P& p, const BackwardCall& call, const Tensor& tiles = {}) {
  fill_backward<RuleList>(bind, p, call, tiles);
  bind(p.dk, call.dk);
  bind(p.dv, call.dv);
  p.queries = static_cast<int>(call.forward.q.shape(2));
  p.kv_heads = static_cast<int>(call.dk.shape(1));
  const QueryLists& lists = call.query_lists;
  p.lists = lists.lists, p.list_tiles = lists.list_tiles, p.list_numbers = lists.list_numbers, p.list_bits = lists.list_bits;
  p.first_head = lists.first_head;
}
template <class RuleList, class P>
void fill_all_gradients(auto& bind, P& p, const BackwardCall& call, const Tensor& tiles = {}) {
  fill_key_gradients<RuleList>(bind, p, call, tiles);
  bind(p.dq, call.dq_sum.numel() > 0 ? call.dq_sum : call.delta);
  p.turns = call.turns.numel() > 0 ? reinterpret_cast<u32*>(call.turns.template data<std::int32_t>()) : nullptr;
}
template <class RuleList, class P>
void fill_query_gradient(auto& bind, P& p, const BackwardCall& call, const Tensor& tiles = {}) {
  fill_backward<RuleList>(bind, p, call, tiles);
  bind(p.dq, call.dq);
  const KeyBlocks& blocks = call.forward.blocks;
  p.lists = blocks.lists, p.list_tiles = blocks.list_tiles, p.list_numbers = blocks.list_numbers;
  p.lists_of_batch = blocks.lists_of_batch, p.heads_per_list = blocks.heads_per_list;
  p.first_head = blocks.first_head, p.first_list = blocks.first_list;
}

template <class RuleList, class P>
void fill_mask_gradient(auto& bind, P& p, const BackwardCall& call) {
  fill_scores<RuleList>(bind, p, call);
  bind(p.d_mask, *call.d_mask);
  p.queries = static_cast<int>(call.forward.q.shape(2));
}

/// The kernels that are compiled ahead of time.
std::vector<KernelVariant> registered_backward();
std::vector<KernelSpec> registered_backward_generic(std::int64_t shared_bytes);
/// What calls with lists of blocks compile, of both targets.
std::vector<KernelSpec> listed_backward_specs();
/// What calls with d_mask compile, of both targets.
std::vector<KernelSpec> mask_gradient_specs();
/// What calls with attention_chunk compile, of Hopper GPUs.
std::vector<KernelSpec> chunks_backward_specs();

}  // namespace tw::kernels::attention
