#pragma once

#include "tilewave/quantized.hpp"

// Weights in 4 bits as published checkpoints store them, as QuantizedMatrix. All tensors are row-major and on the CPU; so is the result,
// which has memory of its own.
//
// A scale for G inputs becomes scales of groups of 128 where G is a multiple of 128, and otherwise of 32, of which G must be a multiple.
// G is K where a row has one scale. Scales are f16, bf16 or f32 and are rounded to f16. If every zero point is 8, the result is symmetric.
//
// The functions throw InvalidArgument for shapes and dtypes that do not fit, for a scale that f16 cannot hold, and for a zero point of 16.

namespace tw {

/// AutoAWQ ("gemm"): qweight i32 [K, N / 8], qzeros i32 [K / G, N / 8], scales [K / G, N].
///
///   W(n, k) = scales(k / G, n) (q(k, n) - zero(k / G, n))
///
/// Bits 4 i to 4 i + 3 of word (k, c) are q(k, 8 c + order[i]), order = 0, 2, 4, 6, 1, 3, 5, 7, and those of qzeros likewise.
QuantizedMatrix convert_awq(const Tensor& qweight, const Tensor& qzeros, const Tensor& scales);

struct GptqOptions {
  /// [K] of i32: the group of each input. Groups must be neighbours in order: weights quantised with desc_act have no such layout here.
  const Tensor* g_idx = nullptr;
  /// As AutoGPTQ stores zero points, and not as its format "gptq_v2" does.
  bool zeros_minus_one = true;
};
/// GPTQ: qweight i32 [K / 8, N], qzeros i32 [K / G, N / 8], scales [K / G, N].
///
///   W(n, k) = scales(k / G, n) (q(k, n) - zero(k / G, n))
///
/// Bits 4 i to 4 i + 3 of word (r, n) of qweight are q(8 r + i, n); of word (g, c) of qzeros, zero(g, 8 c + i), or one less.
QuantizedMatrix convert_gptq(const Tensor& qweight, const Tensor& qzeros, const Tensor& scales, const GptqOptions& options = {});

/// compressed-tensors ("pack-quantized"): weight_packed i32 [N, K / 8], weight_scale [N, K / G], weight_zero_point i32
/// [ceil(N / 8), K / G], or null if symmetric.
///
///   W(n, k) = weight_scale(n, k / G) (q(n, k) - zero(n, k / G))
///
/// Bits 4 i to 4 i + 3 of word (n, c) of weight_packed are q(n, 8 c + i), and of word (r, g) of weight_zero_point, zero(8 r + i, g): the
/// signed numbers of the definition plus 8.
QuantizedMatrix convert_compressed_tensors(const Tensor& weight_packed, const Tensor& weight_scale,
                                           const Tensor* weight_zero_point = nullptr);

}  // namespace tw
