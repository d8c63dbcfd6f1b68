#pragma once

#include "tilewave/detail/attention_call.hpp"

namespace tw::detail {

/// Packed sequences, [total, heads, dim], as one of a batch.
inline Tensor as_batch(const Tensor& t) {
  return Tensor::borrow(t.data(), {1, t.shape(0), t.shape(1), t.shape(2)}, t.dtype(), t.device(),
                        {t.stride(0) * t.shape(0), t.stride(0), t.stride(1), t.stride(2)});
}

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
