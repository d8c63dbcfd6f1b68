#pragma once

#include "kernels/mamba2/chunks.hpp"

// The launches of the gradients of the scan's five steps, for the steps' own functions and mamba2_backward(). Operands have been checked.

namespace tw::kernels::mamba2 {

/// Gradients of step sizes, and of their sums times A: f32 [batch, head, chunk, step].
struct StepGradients {
  Tensor sizes, sums;
};

/// chunk_cumsum's. `call` has the gradients of its outputs as sums and sizes. Those of A and dt_bias, da and d_bias, may be null.
void run_cumsum_gradients(const Stream& stream, const ChunkCumsumCall& call, const Tensor& d_dt, const Tensor* da, const Tensor* d_bias);

/// chunk_state's dx. `call.states`: the gradient of what each chunk adds, in x's dtype, here and in the next.
void run_added_input_gradients(const Stream& stream, const ChunkCall& call, const Tensor& dx);
/// chunk_state's dB, in its dtype or in f32, and gradients of steps. With d_decays, which is of the chunks' last sums, `to` has the
/// gradients of other steps, to which all are added.
void run_added_key_gradients(const Stream& stream, const ChunkCall& call, const Tensor& db, const StepGradients& to,
                             const Tensor* d_decays = nullptr);

struct StatePassingGradientsCall {
  Tensor passed, sums, d_passed;                          ///< as in StatePassingCall; d_passed is f32
  Tensor d_states = {}, rounded = {};                     ///< of what each chunk adds: f32, and passed's dtype; either may have no memory
  Tensor d_decays = {};                                   ///< f32 [batch, head, chunk], contiguous
  const Tensor *d_final = nullptr, *d_initial = nullptr;  ///< f32 [batch, head, dim, state], contiguous, or null
};
void run_passing_gradients(const Stream& stream, const StatePassingGradientsCall& call);

struct ProductGradientsCall {
  Tensor d_cb;                     ///< f32 [batch, chunk, group, step, step]
  Tensor values, out;              ///< B and dC, or C and dB
  bool causal;                     ///< as in ChunkProductsCall
  const Tensor* addend = nullptr;  ///< f32; if given, it is added to the gradient
};
void run_product_gradients_of_c(const Stream& stream, const ProductGradientsCall& call);
void run_product_gradients_of_b(const Stream& stream, const ProductGradientsCall& call);

/// dz, and du, the gradient of the outputs before the gate, which `ungated` has.
Tensor run_gate_gradients(const Stream& stream, const Tensor& x, const Tensor& z, const Tensor& ungated, const Tensor& dy,
                          const Tensor& dz);
/// dD, f32 [head] or [head, dim]: the sums of x du over steps.
void run_skip_gradients(const Stream& stream, const Tensor& x, const Tensor& du, const Tensor& dd);
/// chunk_scan's dx, of a call with du as x and dx as y. With the gradient of what each chunk adds as states, in x's dtype, and B as keys,
/// it is the sum of chunk_scan's and chunk_state's.
void run_scan_input_gradients(const Stream& stream, const ChunkCall& call);
/// The gradient of the state before each chunk, of a call with du as x and that gradient as states, f32.
void run_scan_state_gradients(const Stream& stream, const ChunkCall& call);
/// chunk_scan's dC, in its dtype or in f32, dCB, and gradients of steps.
void run_scan_key_gradients(const Stream& stream, const ChunkCall& call, const Tensor& du, const Tensor& dc, const Tensor& d_cb,
                            const StepGradients& to);

}  // namespace tw::kernels::mamba2
