#pragma once

#include "tilewave/detail/attention_call.hpp"

// What decode does to caches of keys and values around the attention itself.

namespace tw::kernels::attention {

/// Whether the kernel can read the call's pages where they lie: whole pages of a multiple of 16 tokens, which is what it copies at once,
/// from the first token on.
bool reads_pages(const detail::AttentionCall& call);

/// Copies the tokens in use of a paged cache to contiguous memory, and makes the call one without pages. The memory lives as long as what
/// is returned.
Tensor gather_pages(detail::AttentionCall& call);

/// Writes the new keys and values of `cache` into the call's, and rotates its queries into `rotated_q` where there is a table and a query:
/// one launch for all of it. What does not fit into the cache is dropped, as is what wrong lengths or numbers would lead outside.
void append(const detail::AttentionCall& call, const CacheOptions& cache, const Tensor& rotated_q);

/// Whether each query is rotated by its own position; else by that of the first new key.
inline bool queries_advance(const detail::AttentionCall& call) { return call.upper || call.lower; }

}  // namespace tw::kernels::attention
