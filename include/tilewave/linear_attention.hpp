#pragma once

#include <optional>

#include "tilewave/tensor.hpp"

// Linear attention with a decay: a recurrence over the steps of a sequence. Each head of v has a state S, a matrix [Dk, Dv] of f32.
//
//   S_t = exp(g_t) S_(t-1) + k_t v_t^T,   o_t = scale S_t^T q_t
//
// Without g it is linear attention, with one g for each head retention (RetNet), with one for each step and head simple gated linear
// attention (GLA) and the recurrence of Mamba-2, whose dt is a factor of v.
//
//   const tw::Tensor o = tw::Tensor::empty({batch, seqlen, heads, 128}, tw::DType::bf16, stream);
//   tw::linear_attention(q, k, v, o, {.g = &log_decay, .final_state = &state});
//   tw::linear_attention_step(q1, k1, v1, o1, state, {.g = &log_decay1});     // decoding goes on from the state

namespace tw {

/// The state's tensors are f32, [sequences, heads of v, Dk, Dv], with any strides: states [.., Dv, Dk] are passed as their transpose.
/// `sequences` is the batch, or the number of packed sequences.
struct LinearAttentionOptions {
  /// Of the outputs; default: 1 / sqrt(Dk).
  std::optional<float> scale = {};
  /// f32, the natural logarithm of the decay: [batch, seqlen, heads of v], or [heads of v] for every step; any strides. Null: no decay.
  /// Usually at most 0, but any finite value is allowed. -infinity forgets the state before the step.
  const Tensor* g = nullptr;
  const Tensor* initial_state = nullptr;  ///< null: 0
  const Tensor* final_state = nullptr;    ///< if given, the state after the last step; may be `initial_state` itself
  /// i32 [sequences + 1]: q, k, v and o have batch 1 and hold sequences one after the other. Sequence n has the steps cu_seqlens[n] to
  /// cu_seqlens[n + 1] - 1, in ascending order. Offsets on a GPU are not checked, but clamped to the tensors. The outputs of steps that
  /// belong to no sequence are left as they are.
  const Tensor* cu_seqlens = nullptr;
  std::optional<Stream> stream = {};  ///< default: the device's standard stream
  /// For tuning, of f16 and bf16: 0: the states before all chunks, then the outputs of all chunks; 1: both in one walk, up to Dk = 128 (of
  /// gradients also Dv), on Hopper GPUs and the CPU; -1: the heuristic's choice.
  int config = -1;
};

/// o = linear attention of q, k and v.
///
/// q, k: [batch, seqlen, heads, Dk]; v, o: [batch, seqlen, heads of v, Dv]. Heads of v are a multiple of q's, and as many neighbours share
/// a head of q and k. Dk and Dv are 1 to 256. f32, f16 or bf16, all of one dtype; any strides, of o without overlaps. seqlen may be 0.
///
/// f16 and bf16 are computed in chunks of 64 steps on tensor cores: products of 16-bit numbers, summed in f32, and the state is rounded to
/// the dtype before each chunk, so that one of f16 must stay below 65504. f32 is computed step by step, in f32, which takes longer.
///
/// Fast on a GPU: last dimensions contiguous, the other strides and the bases multiples of 16 bytes.
///
/// Enqueues on the stream and returns (on the CPU: done when it returns). Throws InvalidArgument for operands that do not fit, with nothing
/// written; CompileError, DeviceError.
void linear_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const LinearAttentionOptions& options = {});

struct LinearAttentionStepOptions {
  std::optional<float> scale = {};    ///< default: 1 / sqrt(Dk)
  const Tensor* g = nullptr;          ///< as LinearAttentionOptions::g
  std::optional<Stream> stream = {};  ///< default: the device's standard stream
};

/// The same for few steps, as decoding has them: `state` [batch, heads of v, Dk, Dv] is read and replaced. All arithmetic is in f32, for
/// every dtype. Any number of steps is right; each reads q, k and v, and all of them together read and write the state once.
void linear_attention_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& state,
                           const LinearAttentionStepOptions& options = {});

struct LinearAttentionBackwardOptions {
  std::optional<float> scale = {};
  const Tensor* g = nullptr;
  const Tensor* initial_state = nullptr;
  const Tensor* cu_seqlens = nullptr;
  const Tensor* d_final_state = nullptr;    ///< gradient with respect to the final state; null: 0
  const Tensor* dg = nullptr;               ///< if given: f32, [batch, seqlen, heads of v], any strides; also where g is [heads of v]
  const Tensor* d_initial_state = nullptr;  ///< if given: the initial state's gradient
  std::optional<Stream> stream = {};        ///< default: the device's standard stream
  int config = -1;                          ///< as LinearAttentionOptions::config
};

/// Gradients of linear_attention() with respect to q, k and v, and to g and the initial state if asked for. d_o: o's shape; dq, dk, dv:
/// the shapes of q, k and v; all of their dtype, any strides. Options as in the forward pass. Gradients of steps that belong to no sequence
/// are left as they are.
///
/// States are computed again. The same input gives the same bits in every run. dg is the sum over a step and those after it of
/// q dq - k dk, so where the decay is strong it is the small difference of larger numbers.
void linear_attention_backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& d_o, const Tensor& dq, const Tensor& dk,
                               const Tensor& dv, const LinearAttentionBackwardOptions& options = {});

}  // namespace tw
