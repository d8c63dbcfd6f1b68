#pragma once

#include <cstdint>

#include "tilewave/attention.hpp"

namespace tw::kernels::attention {

/// What attention_decode() asks of its main kernel: checked, new keys in the cache, queries turned. A sequence's keys are dealt to `splits`
/// parts; each part's result goes to `parts` and `part_lse`, which combine() joins. The sink is combine()'s.
struct DecodeCall {
  Tensor q;         ///< [batch, seqlen_q, heads, head_dim]
  Tensor k_cache;   ///< [cache_batch, capacity, kv_heads, head_dim] or [pages, page_size, kv_heads, head_dim]
  Tensor v_cache;   ///< likewise, value_dim
  Tensor parts;     ///< output, f32 [splits, batch, kv_heads, seqlen_q * group, value_dim], row query * group + head in the group
  Tensor part_lse;  ///< output, f32 [splits, batch, kv_heads, seqlen_q * group], natural log; -infinity of a part without visible keys
  int splits = 1;
  int batch = 0, heads = 0, kv_heads = 0, seqlen_q = 0, head_dim = 0, value_dim = 0;
  int group = 1;  ///< heads / kv_heads
  /// Sequence b has the keys leftpad[b] to seqlens[b] + seqlen_new - 1, at most `capacity`. What lies on the device may be wrong.
  const std::int32_t* seqlens = nullptr;      ///< [batch]; null: `capacity`
  const std::int32_t* leftpad = nullptr;      ///< [batch], or null: 0
  const std::int32_t* batch_idx = nullptr;    ///< [batch], or null: b
  const std::int32_t* block_table = nullptr;  ///< [batch, capacity / page_size], or null: not paged
  std::int64_t block_table_stride = 0;        ///< from a sequence's pages to the next one's
  int page_size = 0;                          ///< 0: not paged
  int capacity = 0;                           ///< of a sequence, in tokens
  int seqlen_new = 0;
  float scale = 1;
  AttentionOptions options;  ///< causal, causal_offset, windows, softcap, alibi_slopes; what else it has is done
  Stream stream = Stream::standard(Device::cpu());
};

/// The main kernel.
void run_decode(const DecodeCall& call);

}  // namespace tw::kernels::attention
