#pragma once

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
/// gives 0. Offsets and lengths that are wrong are clamped to the tensors.
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

}  // namespace tw
