#pragma once

#include <cstdint>

#include "tilewave/rope.hpp"
#include "tilewave/tensor.hpp"

namespace tw::kernels::attention {

/// New keys and values, and where they go; checked.
struct AppendCall {
  Tensor new_k, new_v;                        ///< [batch, seqlen_new, kv_heads, ...]
  Tensor k_cache, v_cache;                    ///< [cache_batch, capacity, kv_heads, ...] or [pages, page_size, kv_heads, ...]
  const std::int32_t* seqlens = nullptr;      ///< [batch]
  const std::int32_t* batch_idx = nullptr;    ///< [batch], or null: entries of the cache, or rows of the block table
  const std::int32_t* leftpad = nullptr;      ///< [batch], or null
  const std::int32_t* block_table = nullptr;  ///< [tables, pages of a sequence], or null
  std::int64_t block_table_stride = 0;        ///< from a row of the table to the next
  int tables = 0;
  const std::int32_t* cu_new = nullptr;  ///< [batch + 1], or null: new_k and new_v are packed, [1, total_new, kv_heads, ...]
  int batch = 0;                         ///< sequences
  std::int64_t capacity = 0;             ///< tokens of a sequence
  /// [positions, rotary_dim / 2], or null: then nothing is turned. Queries, [batch, seqlen_q, heads, head_dim], are turned into `turned_q`,
  /// if there are any.
  const Tensor* rotary_cos = nullptr;
  const Tensor* rotary_sin = nullptr;
  RopePairing pairing = RopePairing::half_split;
  Tensor q = {}, turned_q = {};
  bool queries_advance = false;  ///< query i has the position of new key i; else all have that of new key 0
};

/// One launch for all of it. What does not fit into the cache is dropped, as is what wrong lengths or numbers would lead outside.
void append(const AppendCall& call, const Stream& stream);

}  // namespace tw::kernels::attention
