#pragma once

#include <optional>

#include "tilewave/tensor.hpp"

namespace tw {

struct CausalConv1dOptions {
  const Tensor* bias = nullptr;           ///< [C], of the weight's dtype, any stride; default: zeros
  const Tensor* initial_state = nullptr;  ///< [N, C, width - 1], of x's dtype, any strides, oldest input first; default: zeros
  const Tensor* final_state = nullptr;  ///< output, of the same shape: the last width - 1 inputs of each sequence, of its initial state too
  const Tensor* cu_seqlens = nullptr;   ///< i32 [N + 1], contiguous, ascending from 0 to S: N sequences one after the other, B is 1
  bool silu = false;                    ///< y = z * sigmoid(z) instead of z
  std::optional<Stream> stream = {};    ///< default: the device's standard stream
};

/// Depthwise causal convolution over time, as before the recurrence of Mamba and Gated DeltaNet:
///   z[b, t, c] = bias[c] + sum over k of weight[c, k] x[b, t - width + 1 + k, c],   y = z, or silu(z)
///
/// `x`, `y`: [B, S, C], f32, f16 or bf16, any strides; fast if C is the innermost dimension. `weight`: [C, width], width 2 to 4, of x's
/// dtype or f32, any strides. Sums are f32 and rounded once. N is B, or the number of sequences of `cu_seqlens`, whose elements are not
/// checked: they are clamped to S.
///
/// Enqueues on the stream and returns (on the CPU: done when it returns). Throws InvalidArgument for shapes, dtypes, strides or devices
/// that do not fit, with nothing written; CompileError, DeviceError.
void causal_conv1d(const Tensor& x, const Tensor& weight, const Tensor& y, const CausalConv1dOptions& options = {});

struct CausalConv1dUpdateOptions {
  const Tensor* bias = nullptr;       ///< as in CausalConv1dOptions
  bool silu = false;                  ///< as there
  std::optional<Stream> stream = {};  ///< default: the device's standard stream
};

/// The next tokens of a batch, in generation: causal_conv1d() of x [B, S, C] after `state` [B, C, width - 1], which then holds the last
/// inputs. S is 1 to 16.
void causal_conv1d_update(const Tensor& x, const Tensor& state, const Tensor& weight, const Tensor& y,
                          const CausalConv1dUpdateOptions& options = {});

struct CausalConv1dBackwardOptions {
  const Tensor* bias = nullptr;  ///< those of causal_conv1d()
  const Tensor* initial_state = nullptr;
  const Tensor* cu_seqlens = nullptr;
  bool silu = false;
  const Tensor* d_final_state = nullptr;    ///< the final state's gradient, of its shape; default: zeros
  const Tensor* d_weight = nullptr;         ///< output, of the weight's shape and dtype
  const Tensor* d_bias = nullptr;           ///< output, [C], of the weight's dtype
  const Tensor* d_initial_state = nullptr;  ///< output, as the initial state
  std::optional<Stream> stream = {};        ///< default: the device's standard stream
};

/// The gradients of causal_conv1d() for `dy`, the gradient of y: dx, and those of the outputs that are given. Of x's shape and dtype, any
/// strides. The same inputs give the same bits in every run.
void causal_conv1d_backward(const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& dx,
                            const CausalConv1dBackwardOptions& options = {});

}  // namespace tw
