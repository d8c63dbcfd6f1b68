#pragma once

#include <optional>

#include "tilewave/rope.hpp"
#include "tilewave/tensor.hpp"

namespace tw {

/// What all forms of attention take. Query i of a sequence stands beside key i + diagonal, where the diagonal is seqlen_k - seqlen_q: the
/// last query beside the last key (FlashAttention's convention).
///
/// The score of query i and key j is s = scale q_i k_j; then, each where it is given: s = softcap tanh(s / softcap), s -= slope |i +
/// diagonal - j|, s += mask; then -infinity where `causal`, the window or a boolean mask hides the key.
struct AttentionOptions {
  float scale = 0;                        ///< softmax scale; 0: 1 / sqrt(head_dim)
  bool causal = false;                    ///< query i sees keys j <= i + diagonal
  std::optional<int> causal_offset = {};  ///< the diagonal, instead; 0 is what PyTorch's is_causal means
  int window_left = -1;                   ///< query i sees keys j >= i + diagonal - window_left; -1: all
  int window_right = -1;                  ///< and keys j <= i + diagonal + window_right; -1: all. `causal` is 0
  float softcap = 0;                      ///< 0: none
  const Tensor* alibi_slopes = nullptr;   ///< f32 [heads] or [batch, heads]
  const Tensor* sink = nullptr;           ///< f32 [heads]: the logit of a key without a value, in the denominator only
  const Tensor* mask = nullptr;           ///< bool (true: seen), or f32 or q's dtype (added), [batch, heads, seqlen_q, seqlen_k], each of
                                          ///< them or 1; fewer dimensions are the last ones
  const Tensor* lse = nullptr;  ///< output, f32 [batch, heads, seqlen_q], contiguous: natural log of the softmax denominator, -infinity
                                ///< where no key is seen
  bool check_contents = false;  ///< on a GPU: wait, look at lengths, offsets and page numbers that lie on the device, and throw
                                ///< InvalidArgument for wrong ones. Without, wrong ones are clamped to memory that may be touched
  std::optional<Stream> stream = {};  ///< default: the device's standard stream
};

/// O = softmax(S) V, exact, in O(seqlen) memory.
///
/// `q`: [batch, seqlen_q, heads, head_dim]; `k`: [batch, seqlen_k, kv_heads, head_dim]; `v`: [batch, seqlen_k, kv_heads, value_dim]; `o`:
/// [batch, seqlen_q, heads, value_dim]. heads is a multiple of kv_heads: query head h uses key head h / (heads / kv_heads). head_dim and
/// value_dim are multiples of 8 up to 256; 64, 96, 128, 192 and 256, and 192 with 128, are computed as they are, others as the next of
/// these. bf16 or f16 on CPU and GPU, f32 on the CPU; accumulation in f32. The last dimension is contiguous; on a GPU 16-byte aligned rows
/// are fast. A query that sees no key gives 0. seqlen_k may be 0.
///
/// Enqueues on the stream and returns (on the CPU: done when it returns). Deterministic. Throws InvalidArgument for shapes, dtypes, strides
/// or devices that do not fit, with nothing written; CompileError, DeviceError.
void attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const AttentionOptions& options = {});

/// Where the sequences of a packed batch lie: i32, on the tensors' device.
struct PackedSequences {
  Tensor cu_seqlens_q;                ///< [batch + 1]: sequence b has the queries cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1
  Tensor cu_seqlens_k;                ///< [batch + 1], likewise its keys
  const Tensor* seqused_q = nullptr;  ///< [batch]: of its queries only so many, the first ones
  const Tensor* seqused_k = nullptr;  ///< [batch]: of its keys only so many, the first ones
};

/// attention() of sequences of different lengths, one behind the other.
///
/// `q`: [total_q, heads, head_dim]; `k`: [total_k, kv_heads, head_dim]; `v`: [total_k, kv_heads, value_dim]; `o`: [total_q, heads,
/// value_dim]; options.lse: [heads, total_q]; options.mask is not supported. Lengths may be 0. Rows of `o` that belong to no sequence are
/// not written. On a GPU the offsets are not known to the host: see AttentionOptions::check_contents.
void attention_varlen(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const PackedSequences& sequences,
                      const AttentionOptions& options = {});

/// What attention_decode() takes besides: all i32, on the tensors' device.
struct CacheOptions {
  const Tensor* seqlens = nullptr;      ///< [batch]: tokens in the cache before this call; null: it is full
  const Tensor* batch_idx = nullptr;    ///< [batch]: maps a sequence to the cache's, or to a row of the block table; null: the identity
  const Tensor* leftpad = nullptr;      ///< [batch]: so many of a sequence's first tokens do not count
  const Tensor* block_table = nullptr;  ///< [tables, pages of a sequence]: the cache is paged, and these are the pages in order
  /// [batch + 1]: q, o and options.lse are packed as in attention_varlen(); sequence b has the queries cu_seqlens_q[b] to
  /// cu_seqlens_q[b + 1] - 1
  const Tensor* cu_seqlens_q = nullptr;
  /// [batch + 1]: new_k and new_v are packed, [total_new, kv_heads, ...]
  const Tensor* cu_seqlens_new = nullptr;
  const Tensor* new_k = nullptr;       ///< [batch, seqlen_new, kv_heads, head_dim]: appended to the cache first
  const Tensor* new_v = nullptr;       ///< [batch, seqlen_new, kv_heads, value_dim]
  const Tensor* rotary_cos = nullptr;  ///< [positions, rotary_dim / 2], as in rope(): q and new_k are turned first. Not with packed ones
  const Tensor* rotary_sin = nullptr;
  RopePairing rotary_pairing = RopePairing::half_split;
  int num_splits = 0;  ///< parts of a sequence's keys that are worked on at once; 0: decode_splits()
};

/// Attention of few queries against a cache of keys and values ("flash decoding").
///
/// `q`: [batch, seqlen_q, heads, head_dim]; `k_cache`: [cache_batch, capacity, kv_heads, head_dim] or, with a block table, [pages,
/// page_size, kv_heads, head_dim]; `v_cache` likewise with value_dim; `o` and options.lse as in attention(). Pages whose size is not a
/// multiple of 16, and pages with leftpad, are slower: the keys and values in use are first copied to contiguous memory.
/// New keys and values are written into the caches at seqlens[b], seqlens[b] + 1, ...; what does not fit is dropped (on the CPU, and with
/// check_contents, refused). The sequence's keys are then seqlens[b] + seqlen_new, and seqlen_q queries stand at their end. Rotary position
/// of new key i: seqlens[b] - leftpad[b] + i; of query i the same with `causal` or a window, else that of new key 0. options.mask is not
/// supported.
///
/// The keys of a sequence are dealt to several blocks of the GPU; their results, in f32, are combined by a second kernel. Enqueues and
/// returns. Throws as attention() does.
void attention_decode(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& o, const CacheOptions& cache,
                      const AttentionOptions& options = {});

/// Into how many parts the keys of `sequences` (batch times kv_heads times tiles of queries) are split so that `multiprocessors` are
/// busy: the fewest that reach 0.96 of what the best number of up to `most` does, each part at least `block` keys.
int decode_splits(int sequences, int seqlen_k, int block, int multiprocessors, int most = 128);

}  // namespace tw
