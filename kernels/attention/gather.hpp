#pragma once

#include "tilewave/detail/attention_call.hpp"

namespace tw::kernels::attention {

/// Whether the kernel can read the call's pages where they lie: whole pages of a multiple of 16 tokens, which is what it copies at once,
/// from the first token on.
bool reads_pages(const detail::AttentionCall& call);

/// Copies the tokens in use of a paged cache to contiguous memory, and makes the call one without pages. The memory lives as long as what
/// is returned.
Tensor gather_pages(detail::AttentionCall& call);

}  // namespace tw::kernels::attention
