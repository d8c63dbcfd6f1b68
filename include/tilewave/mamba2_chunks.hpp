#pragma once

#include <limits>
#include <optional>

#include "tilewave/tensor.hpp"

// Mamba-2's scan (tilewave/mamba2.hpp) in five steps, as Dao and Gu, "Transformers are SSMs", 2024 (arXiv 2405.21060), section 6, divide
// it: for programs that need what lies between them, such as the states of all chunks. tw::mamba2() is faster. mamba_ssm calls the steps
// chunk_cumsum, chunk_state, state_passing, bmm_chunk and chunk_scan.
//
// A chunk has chunk_size steps, a multiple of 16, up to 256; nchunks is seqlen / chunk_size, rounded up. With G = dA_cumsum, i and j steps
// of one chunk, and L = chunk_size:
//
//   dt_i = clamp(softplus(dt_i + dt_bias))     G_i = sum over j <= i of dt_j A
//   added = sum over i of exp(G_L - G_i) dt_i x_i B_i^T
//   h' = exp(G_L) h + added                    h: the state before a chunk
//   CB(i, j) = C_i B_j
//   y_i = (exp(G_i) h C_i + sum over j <= i of CB(i, j) exp(G_i - G_j) dt_j x_j + D x_i) silu(z_i)
//
//   tw::mamba2_chunk_cumsum(dt, a, da_cumsum, sizes, {.dt_bias = &bias, .dt_softplus = true});
//   tw::mamba2_chunk_state(b, x, sizes, da_cumsum, added);
//   tw::mamba2_state_passing(added, da_cumsum.select(3, chunk_size - 1), states, {.final_states = &final});
//   tw::mamba2_bmm_chunk(c, b, cb);
//   tw::mamba2_chunk_scan(cb, x, sizes, da_cumsum, c, states, y, {.d = &skip, .z = &gate});
//
// Of f16 and bf16, products are computed on tensor cores, of operands in the dtype, and summed up in f32. What lies between the steps is
// contiguous. Other tensors have any strides; those of outputs must not overlap. All functions enqueue on the stream and return (on the
// CPU: done when they return). They throw InvalidArgument for operands that do not fit, with nothing written; CompileError, DeviceError.
// Each step has its gradients, mamba2_..._backward(); mamba2_backward() computes those of all five together. Sums are added up in a fixed
// order: the same input gives the same bits. In f16, gradients of states and of CB beyond 65504 become infinite where they are operands of
// products, and what has decayed below 6e-5 loses digits.

namespace tw {

struct Mamba2ChunkCumsumOptions {
  const Tensor* dt_bias = nullptr;                        ///< f32 [nheads]; null: 0
  bool dt_softplus = false;                               ///< dt = log(1 + exp(dt + dt_bias)), else dt + dt_bias
  float dt_min = 0;                                       ///< the least step size, at least 0
  float dt_max = std::numeric_limits<float>::infinity();  ///< the largest step size
  /// i32 [batch, seqlen], any strides: a step whose number differs from that of the step before it begins with a state of 0. Its decay is
  /// that of A = -infinity, so that the other steps need no seq_idx.
  const Tensor* seq_idx = nullptr;
  std::optional<Stream> stream = {};  ///< default: the device's standard stream
};

/// dt: [batch, seqlen, nheads], f32, f16 or bf16; a: A, f32 [nheads]. da_cumsum and dt_out, the step sizes: f32 [batch, nheads, nchunks,
/// chunk_size]. Steps beyond the sequence's end have dt_out = 0, and the last step's sum. The logarithm of a step's decay, dt A, is
/// raised to -110.9 where it is less. Its exponential is 0 in f32 either way, and the sums stay finite even where A is -infinity.
void mamba2_chunk_cumsum(const Tensor& dt, const Tensor& a, const Tensor& da_cumsum, const Tensor& dt_out,
                         const Mamba2ChunkCumsumOptions& options = {});

struct Mamba2ChunkCumsumBackwardOptions {
  const Tensor* dt_bias = nullptr;  ///< this and the next four: those of the forward call
  bool dt_softplus = false;
  float dt_min = 0;
  float dt_max = std::numeric_limits<float>::infinity();
  const Tensor* seq_idx = nullptr;
  const Tensor* da = nullptr;         ///< if given, A's gradient: f32 [nheads]
  const Tensor* d_dt_bias = nullptr;  ///< if given, dt_bias' gradient, with dt_bias only: f32 [nheads]
  std::optional<Stream> stream = {};  ///< default: the device's standard stream
};

/// Gradients of mamba2_chunk_cumsum(). d_da_cumsum and d_dt_out: those of its outputs, f32 [batch, nheads, nchunks, chunk_size]; d_dt:
/// dt's, of its shape and dtype. With dg_j the sum of d_da_cumsum over i >= j, the step sizes have the gradient d_dt_out + A dg, which
/// passes through the clamp and softplus, and A's is the sum of dt dg. dg is 0 where the logarithm of a step's decay was raised to -110.9.
void mamba2_chunk_cumsum_backward(const Tensor& dt, const Tensor& a, const Tensor& d_da_cumsum, const Tensor& d_dt_out, const Tensor& d_dt,
                                  const Mamba2ChunkCumsumBackwardOptions& options = {});

/// What each chunk adds to the state. b: B, [batch, seqlen, ngroups, dstate], f16 or bf16; x: [batch, seqlen, nheads, headdim], of that
/// dtype; dt and da_cumsum: mamba2_chunk_cumsum()'s. states: f32 [batch, nchunks, nheads, headdim, dstate]. nheads is a multiple of
/// ngroups: neighbouring heads share B. headdim and dstate are 1 to 256.
void mamba2_chunk_state(const Tensor& b, const Tensor& x, const Tensor& dt, const Tensor& da_cumsum, const Tensor& states,
                        const std::optional<Stream>& stream = {});

/// Gradients of mamba2_chunk_state(). d_states: that of its output, f32, which is rounded to x's dtype; db and dx: of b's and x's shape and
/// dtype; d_dt and d_da_cumsum: f32, of dt's shape.
void mamba2_chunk_state_backward(const Tensor& b, const Tensor& x, const Tensor& dt, const Tensor& da_cumsum, const Tensor& d_states,
                                 const Tensor& db, const Tensor& dx, const Tensor& d_dt, const Tensor& d_da_cumsum,
                                 const std::optional<Stream>& stream = {});

struct Mamba2StatePassingOptions {
  const Tensor* initial_states = nullptr;  ///< f32 [batch, nheads, headdim, dstate], contiguous; null: 0
  const Tensor* final_states = nullptr;    ///< if given, the states after the last chunk; may be `initial_states`
  std::optional<Stream> stream = {};       ///< default: the device's standard stream
};

/// The state before each chunk. states: what each chunk adds, f32 [batch, nchunks, nheads, headdim, dstate]; da_chunk_cumsum: the last of
/// each chunk's sums, f32 [batch, nheads, nchunks], any strides. passed: f32, f16 or bf16, of states' shape. nchunks may be 0.
void mamba2_state_passing(const Tensor& states, const Tensor& da_chunk_cumsum, const Tensor& passed,
                          const Mamba2StatePassingOptions& options = {});

struct Mamba2StatePassingBackwardOptions {
  const Tensor* d_final_states = nullptr;    ///< f32 [batch, nheads, headdim, dstate], contiguous; null: 0
  const Tensor* d_initial_states = nullptr;  ///< if given, the initial states' gradient; may be `d_final_states`
  std::optional<Stream> stream = {};         ///< default: the device's standard stream
};

/// Gradients of mamba2_state_passing(). passed: its output, the state before each chunk; d_passed: f32, its gradient; d_states: f32, the
/// gradient of what each chunk adds, that is of the state after the chunk. d_da_chunk_cumsum: f32 [batch, nheads, nchunks], contiguous.
void mamba2_state_passing_backward(const Tensor& passed, const Tensor& da_chunk_cumsum, const Tensor& d_passed, const Tensor& d_states,
                                   const Tensor& d_da_chunk_cumsum, const Mamba2StatePassingBackwardOptions& options = {});

struct Mamba2BmmChunkOptions {
  bool causal = false;                ///< CB(i, j) with j > i is 0, and mostly not computed
  std::optional<Stream> stream = {};  ///< default: the device's standard stream
};

/// The products of all steps of a chunk with each other. c and b: [batch, seqlen, ngroups, dstate], both f16 or bf16, dstate at least 1.
/// cb: f32 [batch, nchunks, ngroups, chunk_size, chunk_size], element (i, j) the product of c's step i and b's step j; 0 beyond the
/// sequence's end.
void mamba2_bmm_chunk(const Tensor& c, const Tensor& b, const Tensor& cb, const Mamba2BmmChunkOptions& options = {});

/// Gradients of mamba2_bmm_chunk(). d_cb: that of CB, f32, which is rounded to c's dtype. It is not used beyond the sequence's end and,
/// with `causal`, above the diagonal. dc and db: of c's shape and dtype.
void mamba2_bmm_chunk_backward(const Tensor& c, const Tensor& b, const Tensor& d_cb, const Tensor& dc, const Tensor& db,
                               const Mamba2BmmChunkOptions& options = {});

struct Mamba2ChunkScanOptions {
  const Tensor* d = nullptr;          ///< D: f32 [nheads] or [nheads, headdim]; null: 0
  const Tensor* z = nullptr;          ///< the gate: x's shape and dtype; null: none
  const Tensor* ungated = nullptr;    ///< if given, the outputs before the gate: x's shape and dtype
  std::optional<Stream> stream = {};  ///< default: the device's standard stream
};

/// The outputs. cb: mamba2_bmm_chunk()'s; x, y: [batch, seqlen, nheads, headdim], f16 or bf16; c and states, the state before each chunk:
/// [batch, seqlen, ngroups, dstate] and [batch, nchunks, nheads, headdim, dstate], of x's dtype; dt and da_cumsum: mamba2_chunk_cumsum()'s.
/// cb is not read above the diagonal, except for elements of no use. headdim and dstate are 1 to 256.
void mamba2_chunk_scan(const Tensor& cb, const Tensor& x, const Tensor& dt, const Tensor& da_cumsum, const Tensor& c, const Tensor& states,
                       const Tensor& y, const Mamba2ChunkScanOptions& options = {});

struct Mamba2ChunkScanBackwardOptions {
  const Tensor* d = nullptr;          ///< D of the forward call
  const Tensor* z = nullptr;          ///< its gate; then `ungated` and `dz` must be given
  const Tensor* ungated = nullptr;    ///< its outputs before the gate
  const Tensor* dd = nullptr;         ///< if given, D's gradient, with D only: of its shape
  const Tensor* dz = nullptr;         ///< z's gradient, with z only: of its shape and dtype
  std::optional<Stream> stream = {};  ///< default: the device's standard stream
};

/// Gradients of mamba2_chunk_scan(), dy being that of y. d_cb, d_dt, d_da_cumsum and d_states: f32, of the shapes of cb, dt, da_cumsum and
/// states, contiguous; d_cb is 0 above the diagonal. dx and dc: of x's and c's shape and dtype. Between the gate and the rest, gradients
/// are rounded to x's dtype.
void mamba2_chunk_scan_backward(const Tensor& cb, const Tensor& x, const Tensor& dt, const Tensor& da_cumsum, const Tensor& c,
                                const Tensor& states, const Tensor& dy, const Tensor& d_cb, const Tensor& dx, const Tensor& d_dt,
                                const Tensor& d_da_cumsum, const Tensor& dc, const Tensor& d_states,
                                const Mamba2ChunkScanBackwardOptions& options = {});

}  // namespace tw
