#pragma once

#include <optional>

#include "tilewave/tensor.hpp"

namespace tw {

struct GatedDeltaOptions {
  const Tensor* g = nullptr;              ///< [B, S, Hv] or [B, S, Hv, Dk] of f32, any strides: the logarithm of the decay of a head's
                                          ///< state, or of each of its Dk rows; at most 0, or -infinity, which forgets the state or
                                          ///< row before the token; default: zeros
  std::optional<float> scale = {};        ///< default: Dk^-0.5
  bool normalise_qk = false;              ///< divides each query and key by sqrt(|x|^2 + 1e-6)
  const Tensor* initial_state = nullptr;  ///< [N, Hv, Dk, Dv] of f32, any strides; default: zeros
  const Tensor* final_state = nullptr;    ///< output, of the same shape; may be the initial state
  const Tensor* cu_seqlens = nullptr;     ///< i32 [N + 1], contiguous, ascending from 0 to S: N sequences one after the other, B is 1
  std::optional<Stream> stream = {};      ///< default: the device's standard stream
};

/// The gated delta rule (Yang, Kautz and Hatamizadeh, "Gated Delta Networks", 2024), without `g` the delta rule. From token to token of
/// each sequence and head, with a state S [Dk, Dv]:
///   S = (I - beta k k^T) exp(g) S + beta k v^T,   o = scale S^T q
/// With a gate for each channel of a key, g [B, S, Hv, Dk], row c of S decays by exp(g_c): Kimi Delta Attention (Kimi Team, "Kimi Linear",
/// 2025).
///
/// `q`, `k`: [B, S, H, Dk]; `v`, `o`: [B, S, Hv, Dv], Hv a multiple of H: neighbouring heads share a query and a key. All of one dtype,
/// f32, f16 or bf16, any strides; fast if the last dimension is contiguous and all strides are multiples of 16 bytes. Dk is 1 to
/// 256, with gates of channels 1 to 128.
/// `beta`: [B, S, Hv], of that dtype or f32. N is B, or the number of sequences of `cu_seqlens`, whose elements are not checked: they are
/// clamped to S. Results are stable for keys whose |k|^2 beta is at most 2.
///
/// f16 and bf16 in chunks of 64 tokens, with products of 16-bit operands and sums in f32; states stay in f32. f32 on the CPU in chunks, on
/// a GPU token by token, exact but slow; so are Dk above 128 on GPUs with less than 160 KB of shared memory for a block.
///
/// Enqueues on the stream and returns (on the CPU: done when it returns). Throws InvalidArgument for shapes, dtypes, strides or devices
/// that do not fit, with nothing written; CompileError, DeviceError.
void gated_delta_rule(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta, const Tensor& o,
                      const GatedDeltaOptions& options = {});

struct GatedDeltaStepOptions {
  const Tensor* g = nullptr;  ///< as in GatedDeltaOptions
  std::optional<float> scale = {};
  bool normalise_qk = false;
  std::optional<Stream> stream = {};  ///< default: the device's standard stream
};

/// The next tokens of a batch, in generation: gated_delta_rule() of a few tokens that updates `state` [B, Hv, Dk, Dv] in place. In f32,
/// token by token, for any number of tokens.
void gated_delta_rule_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta, const Tensor& state, const Tensor& o,
                           const GatedDeltaStepOptions& options = {});

struct GatedDeltaBackwardOptions {
  const Tensor* g = nullptr;  ///< this and the following as in GatedDeltaOptions
  std::optional<float> scale = {};
  bool normalise_qk = false;
  const Tensor* initial_state = nullptr;
  const Tensor* cu_seqlens = nullptr;
  const Tensor* d_final_state = nullptr;    ///< gradient with respect to the final state; null: 0
  const Tensor* dg = nullptr;               ///< if given: the gates' gradients, f32 of g's shape, any strides
  const Tensor* d_initial_state = nullptr;  ///< if given: the initial state's gradient
  std::optional<Stream> stream = {};        ///< default: the device's standard stream
};

/// Gradients of gated_delta_rule() with respect to q, k, v and beta, and to g and the initial state if asked for. `d_o`: o's shape; `dq`,
/// `dk`, `dv`, `d_beta`: the shapes and dtypes of q, k, v and beta, any strides. Dk is 1 to 256; with gates of channels Dk and Dv are at
/// most 128. Gradients of a query or key that several heads share are their sum. Gradients of tokens after the last sequence's end are left
/// as they are. The gradient of a gate of -infinity is 0 up to rounding.
///
/// f16 and bf16 in chunks of 64 tokens as forward, with states and updates computed again; f32 on the CPU only. The same input gives the
/// same bits in every run.
///
/// Enqueues on the stream and returns (on the CPU: done when it returns). Throws InvalidArgument for shapes, dtypes, strides or devices
/// that do not fit, with nothing written; CompileError, DeviceError.
void gated_delta_rule_backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta, const Tensor& d_o, const Tensor& dq,
                               const Tensor& dk, const Tensor& dv, const Tensor& d_beta, const GatedDeltaBackwardOptions& options = {});

}  // namespace tw
