#pragma once

#include "tilewave/detail/attention_call.hpp"

namespace tw::detail {

/// What messages call an op and its arguments.
struct AttentionNames {
  const char* op;
  const char* k = "k";
  const char* v = "v";
};

/// What all forms of attention check. q and o are [batch, seqlen_q, heads, dim], k and v [batch, seqlen_k, kv_heads, dim], their batches
/// their own; `batch` is the number of sequences. Throws InvalidArgument.
AttentionCall check_common(const AttentionNames& names, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o,
                           std::int64_t batch, const Shape& lse_shape, const AttentionOptions& options);

}  // namespace tw::detail
