#pragma once

#include <optional>

#include "tilewave/tensor.hpp"

namespace tw {

struct AttentionOptions {
  float scale = 0;                        ///< softmax scale; 0: 1 / sqrt(head_dim)
  bool causal = false;                    ///< query i sees keys j <= i + causal_offset
  std::optional<int> causal_offset = {};  ///< default seqlen_k - seqlen_q: the last query sees every key
  const Tensor* lse = nullptr;  ///< output, f32 [batch, heads, seqlen_q], contiguous: natural log of the softmax denominator, -infinity
                                ///< where no key is seen
  std::optional<Stream> stream = {};  ///< default: the device's standard stream
};

/// O = softmax(scale Q K^T) V, exact, in O(seqlen) memory.
///
/// `q`, `o`: [batch, seqlen_q, heads, head_dim]; `k`, `v`: [batch, seqlen_k, kv_heads, head_dim]; heads a multiple of kv_heads: query head
/// h uses key head h / (heads / kv_heads). head_dim 64 or 128. bf16 or f16 on CPU and GPU, f32 on the CPU; accumulation in f32. Any
/// strides; on a GPU 16-byte aligned rows (head_dim contiguous) are fast. A query that sees no key gives 0. seqlen_k may be 0.
///
/// Enqueues on the stream and returns (on the CPU: done when it returns). Deterministic. Throws InvalidArgument for shapes, dtypes, strides
/// or devices that do not fit, with nothing written; CompileError, DeviceError.
void attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const AttentionOptions& options = {});

}  // namespace tw
