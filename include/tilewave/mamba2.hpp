#pragma once

#include <limits>
#include <optional>

#include "tilewave/tensor.hpp"

// Mamba-2's selective state space, in the form of Dao and Gu, "Transformers are SSMs", 2024 (arXiv 2405.21060). Each head has a state h, a
// matrix [headdim, dstate] of f32, and one decay rate A:
//
//   dt = softplus(dt + dt_bias), clamped to [dt_min, dt_max]
//   h_t = exp(dt_t A) h_(t-1) + dt_t x_t B_t^T,   y_t = (h_t C_t + D x_t) silu(z_t)
//
//   tw::mamba2(x, dt, a, b, c, y, {.d = &skip, .z = &gate, .dt_bias = &bias, .dt_softplus = true, .final_states = &states});
//   tw::mamba2_step(x1, dt1, a, b1, c1, states, y1, {.d = &skip, .z = &gate1, .dt_bias = &bias, .dt_softplus = true});

namespace tw {

struct Mamba2Options {
  const Tensor* d = nullptr;                              ///< D: f32 [nheads] or [nheads, headdim]; null: 0
  const Tensor* z = nullptr;                              ///< the gate: x's shape and dtype; null: none
  const Tensor* dt_bias = nullptr;                        ///< f32 [nheads]; null: 0
  bool dt_softplus = false;                               ///< dt = log(1 + exp(dt + dt_bias)), else dt + dt_bias
  float dt_min = 0;                                       ///< the least step size, at least 0
  float dt_max = std::numeric_limits<float>::infinity();  ///< the largest step size
  const Tensor* initial_states = nullptr;                 ///< f32 [sequences, nheads, headdim, dstate], any strides; null: 0
  const Tensor* final_states = nullptr;                   ///< if given, the states after the last steps; may be `initial_states`
  /// i32 [sequences + 1], contiguous: batch is 1, and sequence n has the steps cu_seqlens[n] to cu_seqlens[n + 1] - 1, in ascending order.
  /// Offsets on a GPU are not checked, but clamped. The outputs of steps that belong to no sequence are left as they are.
  const Tensor* cu_seqlens = nullptr;
  /// i32 [batch, seqlen], any strides: a step whose number differs from that of the step before it begins with a state of 0. The initial
  /// state belongs to the first step's sequence, the final state to the last one's. Not together with cu_seqlens.
  const Tensor* seq_idx = nullptr;
  std::optional<Stream> stream = {};  ///< default: the device's standard stream
  /// For tuning: 2: all in one walk, of f16 and bf16 with dstate up to 128, on Hopper GPUs and the CPU; 0, 1: x dt, linear_attention() with
  /// this configuration, then D and z; -1: the heuristic's choice.
  int config = -1;
};

/// y = Mamba-2's scan of x, as above.
///
/// x, y: [batch, seqlen, nheads, headdim], f32, f16 or bf16; dt: [batch, seqlen, nheads], of that dtype or f32; a: A, f32 [nheads], usually
/// negative, may be -infinity; b, c: B and C, [batch, seqlen, ngroups, dstate], of x's dtype. nheads is a multiple of ngroups: neighbouring
/// heads share B and C. headdim and dstate are 1 to 256. Any strides; those of outputs must not overlap. seqlen may be 0. `sequences` is
/// the batch, or the number of packed sequences.
///
/// f16 and bf16 are computed in chunks of 64 steps on tensor cores, by linear_attention(): x dt is rounded to the dtype, operands of
/// products too, and sums are f32. f32 is computed step by step. A step size of 0 leaves the state as it is, also where A is -infinity.
///
/// Fast on a GPU: last dimensions contiguous, the other strides and the bases multiples of 16 bytes.
///
/// Enqueues on the stream and returns (on the CPU: done when it returns). Throws InvalidArgument for operands that do not fit, with nothing
/// written; CompileError, DeviceError.
void mamba2(const Tensor& x, const Tensor& dt, const Tensor& a, const Tensor& b, const Tensor& c, const Tensor& y,
            const Mamba2Options& options = {});

struct Mamba2StepOptions {
  const Tensor* d = nullptr;  ///< this and the following as in Mamba2Options
  const Tensor* z = nullptr;
  const Tensor* dt_bias = nullptr;
  bool dt_softplus = false;
  float dt_min = 0;
  float dt_max = std::numeric_limits<float>::infinity();
  /// i32 [batch], contiguous: the state of sequence n is states[state_indices[n]]. A sequence whose index is negative, or not below the
  /// number of states, is left out: its outputs stay as they are. Two sequences must not have the same state. Null: n.
  const Tensor* state_indices = nullptr;
  std::optional<Stream> stream = {};  ///< default: the device's standard stream
};

/// The next steps of a batch, in generation: mamba2() of a few steps that updates `states` in place. All arithmetic is f32.
///
/// x, y: [batch, seqlen, nheads, headdim]; dt, a, b, c as in mamba2(). states: [count, nheads, headdim, dstate] of f32 or x's dtype, any
/// strides, which is read and written once, for any number of steps; count is the batch unless there are state_indices.
void mamba2_step(const Tensor& x, const Tensor& dt, const Tensor& a, const Tensor& b, const Tensor& c, const Tensor& states,
                 const Tensor& y, const Mamba2StepOptions& options = {});

struct Mamba2BackwardOptions {
  const Tensor* d = nullptr;  ///< this and the following as in Mamba2Options
  const Tensor* z = nullptr;
  const Tensor* dt_bias = nullptr;
  bool dt_softplus = false;
  float dt_min = 0;
  float dt_max = std::numeric_limits<float>::infinity();
  const Tensor* initial_states = nullptr;
  const Tensor* cu_seqlens = nullptr;
  const Tensor* seq_idx = nullptr;
  const Tensor* d_final_states = nullptr;    ///< gradient with respect to the final states; null: 0
  const Tensor* da = nullptr;                ///< this and the following if given: A's gradient, f32 [nheads]
  const Tensor* dd = nullptr;                ///< D's gradient, f32, of its shape
  const Tensor* dz = nullptr;                ///< of z's shape and dtype; needed if z is given
  const Tensor* d_dt_bias = nullptr;         ///< f32 [nheads]
  const Tensor* d_initial_states = nullptr;  ///< f32, of their shape
  std::optional<Stream> stream = {};         ///< default: the device's standard stream
  /// For tuning: 2: the gradients of the scan's five steps, of f16 and bf16 without cu_seqlens; 0, 1: linear_attention_backward() with this
  /// configuration; -1: the five steps wherever 2 is possible.
  int config = -1;
};

/// Gradients of mamba2() with respect to x, dt, B and C, and to the others if asked for. dy: y's shape and dtype; dx, d_dt, db, dc: the
/// shapes and dtypes of x, dt, b and c, any strides. Options as in the forward pass.
///
/// States are computed again, and with z the outputs before the gate too. The same input gives the same bits in every run. A step size at
/// one of the limits passes its gradient on, one beyond them has none.
///
/// f16 and bf16 without cu_seqlens are computed in chunks of up to 256 steps, by the gradients of the scan's five steps: see
/// tilewave/mamba2_chunks.hpp, also for the range of f16. Sums over steps begin anew with each chunk. The call allocates 8 bytes for each
/// element of [batch, nchunks, nheads, headdim, dstate] and of [batch, nchunks, ngroups, 256, 256], 4 for each of B, and with z two tensors
/// of x's size.
///
/// f32 and packed sequences are computed by linear_attention_backward(). The decay's part of d_dt and A's gradient are then sums over all
/// later steps of C dC - B dB, its dg: small differences of larger numbers where the decay is strong, and of 16-bit numbers in 16 bits.
void mamba2_backward(const Tensor& x, const Tensor& dt, const Tensor& a, const Tensor& b, const Tensor& c, const Tensor& dy,
                     const Tensor& dx, const Tensor& d_dt, const Tensor& db, const Tensor& dc, const Mamba2BackwardOptions& options = {});

}  // namespace tw
