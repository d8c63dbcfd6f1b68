#pragma once

#include "tilewave/detail/attention_call.hpp"

// From the public functions to the kernels.

namespace tw::kernels::attention {

/// Packed sequences, [total, heads, dim], as one of a batch.
inline Tensor as_batch(const Tensor& t) {
  return Tensor::borrow(t.data(), {1, t.shape(0), t.shape(1), t.shape(2)}, t.dtype(), t.device(),
                        {t.stride(0) * t.shape(0), t.stride(0), t.stride(1), t.stride(2)});
}

/// What messages call an op and its arguments.
struct Names {
  const char* op;
  const char* k = "k";
  const char* v = "v";
};

/// What all forms of attention check. q and o are [batch, seqlen_q, heads, dim], k and v [batch, seqlen_k, kv_heads, dim], their batches
/// their own; `batch` is the number of sequences. Throws InvalidArgument.
detail::AttentionCall check_common(const Names& names, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o,
                                   std::int64_t batch, const Shape& lse_shape, const AttentionOptions& options);

/// Throws InvalidArgument unless `t`, lengths, offsets or numbers, is contiguous, i32[size] and on the device; null if `t` is.
const std::int32_t* check_integers(const char* op, const char* name, const Tensor* t, std::int64_t size, Device device);

/// Throws InvalidArgument unless cu_seqlens, i32 on any device, does not decrease and stays within 0 and `total`, the number of `what`.
void check_offsets(const char* op, const char* name, const Tensor& cu_seqlens, std::int64_t total, const char* what);

/// No user-defined rule.
inline constexpr auto kNoUserRule = [](auto&) {};

/// Enqueues a checked call, or runs it.
void run(const detail::AttentionCall& call);
void run_on_cpu(const detail::AttentionCall& call);
void run_on_gpu(const detail::AttentionCall& call);
void run_on_gpu(const detail::AttentionCall& call, const AttentionConfig& config);

}  // namespace tw::kernels::attention
