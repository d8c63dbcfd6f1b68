#pragma once

#include <array>
#include <optional>

#include "tilewave/tensor.hpp"

// Native sparse attention (NSA; Yuan et al., arXiv 2502.11089). A query token attends to compressed keys, one for each block of tokens, to
// the blocks whose compressed keys score best, and to a window of its last tokens; gates add up the three results.
//
//   tw::nsa_compressed(q, k_cmp, v_cmp, o_cmp, {.lse = &lse});         // k_cmp, v_cmp: means of blocks of 64 keys and values
//   tw::nsa_select(q, k_cmp, lse, block_indices);
//   tw::nsa_selected(q, k, v, block_indices, o_slc);
//   tw::attention(q, k, v, o_swa, {.causal = true, .window_left = 511});
//   tw::nsa_combine(o, {&o_cmp, &o_slc, &o_swa}, {&g_cmp, &g_slc, &g_swa});

namespace tw {

/// The most slots of a token's list of blocks.
inline constexpr std::int64_t kNsaSlots = 256;

/// Integer tensors are i32 and contiguous. All tensors are on the device of q.
struct NsaOptions {
  int block_size = 64;                   ///< tokens of a block: 32, or a multiple of 64
  float scale = 0;                       ///< softmax scale; 0: 1 / sqrt(head_dim)
  const Tensor* block_counts = nullptr;  ///< nsa_selected(): [batch, seqlen, kv_heads]: only so many slots of a list count
  const Tensor* cu_seqlens = nullptr;    ///< [sequences + 1]: q is packed, its batch is 1, and so are k and v
  const Tensor* cu_seqlens_k = nullptr;  ///< nsa_compressed(), nsa_select(): the same for compressed keys; needed with cu_seqlens
  const Tensor* seqlens = nullptr;       ///< [batch]: tokens of each sequence, those of q included: k and v are caches
  const Tensor* lse = nullptr;           ///< output, f32 [batch, seqlen, heads], contiguous: natural log of the softmax denominator,
                                         ///< -infinity if a query sees no key
  std::optional<Stream> stream = {};     ///< default: the device's standard stream
};

/// Attention of each token over the blocks of keys that it selects: o = softmax(scale q K^T) V over the keys n of these blocks with n at
/// most the token's position.
///
/// `q`: [batch, seqlen, heads, head_dim]; `k`: [batch, keys, kv_heads, head_dim]; `v`: [batch, keys, kv_heads, value_dim]; `o`: [batch,
/// seqlen, heads, value_dim]. heads is kv_heads times 1 to 64; the query heads of a group share their keys and their selection.
/// `block_indices`: i32 [batch, seqlen, kv_heads, slots], up to kNsaSlots: block b has the keys b * block_size to (b + 1) * block_size - 1
/// of the token's sequence. head_dim and value_dim are multiples of 8 up to 128. bf16 or f16, on a CPU also f32; accumulation in f32. The
/// last dimension must be contiguous; 16-byte aligned rows are fast.
///
/// The last token of q is the last of its sequence: token i has the position keys - seqlen + i; with seqlens, seqlens[b] - seqlen + i; in
/// packed sequences i, counted in its sequence. Decoding is q of one token for each sequence, with seqlens. Keys after a sequence's end may
/// hold anything.
///
/// The order of a list does not matter. An entry that names no block, or one that begins after the token, selects nothing, and memory is
/// not read for it; a block that is named several times counts once. block_counts are clamped to 0 to `slots`. A token that selects nothing
/// gives 0. Offsets and lengths that are wrong are clamped to the tensors. Rows of o and lse of tokens that belong to no packed sequence
/// are not written.
///
/// Enqueues on the stream and returns (on the CPU: done when it returns). Deterministic. Throws InvalidArgument for shapes, dtypes, strides
/// or devices that do not fit, with nothing written; CompileError, DeviceError.
void nsa_selected(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& block_indices, const Tensor& o,
                  const NsaOptions& options = {});

/// Attention over compressed keys: key c stands for the tokens c * block_size to (c + 1) * block_size - 1 of its sequence, and a token sees
/// it if all of these are at its position or before. Otherwise as nsa_selected(), without lists.
///
/// `k`: [batch, blocks, kv_heads, head_dim], `v` likewise, for example means of blocks; a last block that is incomplete may be left out.
/// Without seqlens, token i has the position i. A token that sees no compressed key gives 0.
void nsa_compressed(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const NsaOptions& options = {});

/// Gradients of nsa_selected() with respect to q, k and v: the scores are computed again from q, k and `lse`.
///
/// `q`, `k`, `v`, `block_indices`, `options`: those of the forward call, without seqlens; options.lse is ignored. `o`, `lse`: its results.
/// `d_o`: the gradient of o, of its shape. `dq`, `dk`, `dv`: outputs of the shapes of q, k and v. All tensors but lse have q's dtype, and
/// their last dimension is contiguous. Sums are in f32. Tokens that select nothing and keys that no token sees have gradients of 0. Rows of
/// packed tensors that belong to no sequence are not written.
///
/// Takes memory for the tokens of each block, 4 bytes for each pair of token and block, for the f32 sums of parts of these lists, and a
/// byte for each block and eight tokens. Enqueues and returns (on the CPU: done when it returns). Deterministic. Throws as nsa_selected().
void nsa_selected_backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& block_indices, const Tensor& o,
                           const Tensor& lse, const Tensor& d_o, const Tensor& dq, const Tensor& dk, const Tensor& dv,
                           const NsaOptions& options = {});

/// Gradients of nsa_compressed().
void nsa_compressed_backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& lse, const Tensor& d_o,
                             const Tensor& dq, const Tensor& dk, const Tensor& dv, const NsaOptions& options = {});

/// Options of nsa_select().
struct NsaSelectOptions {
  int block_size = 64;
  float scale = 0;                           ///< as in nsa_compressed()
  int initial_blocks = 1, local_blocks = 2;  ///< the first blocks of a sequence, and the last ones up to the token's own, are always taken
  const Tensor* cu_seqlens = nullptr;        ///< as NsaOptions
  const Tensor* cu_seqlens_k = nullptr;
  const Tensor* seqlens = nullptr;
  std::optional<Stream> stream = {};
};

/// Selects blocks of keys for each token and head of keys: those whose compressed keys have the largest weights in nsa_compressed(), added
/// up over the query heads of the group.
///
/// `q`, `k`: those of nsa_compressed(), `lse`: its result, f32 [batch, seqlen, heads], contiguous. `block_indices`: output, i32 [batch,
/// seqlen, kv_heads, slots], contiguous, up to kNsaSlots.
///
/// A list has the token's own block first, if there are local blocks, then the others that are always taken, then those with the largest
/// sums; equal ones are in the order of the sequence, and the first are taken if not all fit. Blocks that begin after the token are never
/// taken. Blocks whose last token is after the query have a sum of 0. What is left of a list is -1.
///
/// Sums are in f32, in memory of up to 512 MiB, or of what one head of keys needs, 4 bytes for each token and block. Enqueues and returns
/// (on the CPU: done when it returns). Deterministic. Throws as nsa_selected().
void nsa_select(const Tensor& q, const Tensor& k, const Tensor& lse, const Tensor& block_indices, const NsaSelectOptions& options = {});

/// o = the sum over the branches n of gates[n] outputs[n].
///
/// `outputs`: [batch, seqlen, heads, value_dim], of o's shape and dtype; `gates`: [batch, seqlen, heads], f32 or o's dtype, of any strides.
/// A null output is left out with its gate. o may be one of the outputs. f32, f16 or bf16; the sum is in f32 and rounded once.
///
/// Enqueues and returns (on the CPU: done when it returns). Throws as nsa_selected().
void nsa_combine(const Tensor& o, std::array<const Tensor*, 3> outputs, std::array<const Tensor*, 3> gates,
                 const std::optional<Stream>& stream = {});

}  // namespace tw
