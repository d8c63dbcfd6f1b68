#pragma once

#include <optional>

#include "tilewave/rope.hpp"
#include "tilewave/tensor.hpp"

namespace tw {

/// Which blocks of keys each block of queries attends to. Scores of other blocks are -infinity and are not computed. Block i of queries is
/// queries i query_block, ..., (i + 1) query_block - 1 of a sequence, and the last block may be shorter; the same for keys.
///
/// Either `mask` or `indices` is given. Tensors are on the device of q, with any strides.
/// - Their batch may be 1: all sequences have the same blocks. Their heads may be q's, k's (query heads that share keys then share blocks)
///   or 1.
/// - query_blocks is ceil(seqlen_q / query_block) and key_blocks ceil(seqlen_k / key_block). For packed sequences both may be any number,
///   because the lengths are on the device: blocks beyond a tensor's extents are not attended to, and blocks beyond a sequence's end do not
///   exist.
/// - With a cache, heads are k's or 1, query_blocks is 1, for all queries of a sequence, and key_blocks is ceil(capacity / key_block). Keys
///   count from the first one after leftpad. query_block is not used.
///
/// A query without any block gives 0 and an lse of -infinity. Gradients of q, k and v are 0 where no block is selected.
struct AttentionBlocks {
  const Tensor* mask = nullptr;  ///< bool [batch, heads, query_blocks, key_blocks], true: attended to
  /// i32 [batch, heads, query_blocks, any number of entries]: blocks of keys in any order. Entries that are not from 0 to key_blocks - 1
  /// are ignored, and a block that is listed more than once counts once.
  const Tensor* indices = nullptr;
  /// i32 [batch, heads, query_blocks], with the extents of `indices`: how many entries of a list are used, the first ones, clamped to what
  /// there are. Null: all
  const Tensor* counts = nullptr;
  int query_block = 128, key_block = 128;  ///< queries and keys of a block: 64 or 128 each
};

/// Options of all forms of attention. Query i of a sequence is aligned with key i + diagonal. The diagonal is seqlen_k - seqlen_q, which
/// aligns the last query with the last key (FlashAttention's convention).
///
/// The score of query i and key j is s = scale q_i k_j; for e4m3 it is scale q_descale k_descale q_i k_j. Then follow, in this order, the
/// options that are set: s = softcap tanh(s / softcap), s -= slope |i + diagonal - j|, s += mask. Finally s is -infinity if `causal`, the
/// window, attention_chunk, a boolean mask or `blocks` hides the key.
struct AttentionOptions {
  float scale = 0;                        ///< softmax scale; 0: 1 / sqrt(head_dim), with qv 1 / sqrt(head_dim + value_dim)
  bool causal = false;                    ///< query i sees keys j <= i + diagonal
  std::optional<int> causal_offset = {};  ///< replaces the diagonal; 0 is the meaning of PyTorch's is_causal
  int window_left = -1;                   ///< query i sees keys j >= i + diagonal - window_left; -1: all
  int window_right = -1;                  ///< and keys j <= i + diagonal + window_right; -1: all. `causal` is the same as 0
  int attention_chunk = 0;                ///< C above 0: query i sees only keys j of its own chunk of C keys, those with
                                          ///< floor(j / C) = floor((i + diagonal) / C) (FlashAttention 3's meaning); at most 2^29. 0: all
  float softcap = 0;                      ///< 0: none
  const Tensor* alibi_slopes = nullptr;   ///< f32 [heads] or [batch, heads]
  const Tensor* sink = nullptr;           ///< f32 [heads]: the logit of a key without a value, in the denominator only
  /// bool (true: visible), or f32 or o's dtype (added). [batch, heads, seqlen_q, seqlen_k], where each extent may be 1; missing dimensions
  /// are the leading ones. For packed sequences the batch is the number of sequences, and seqlen_q and seqlen_k are at least the longest
  /// one's, which is checked where contents are; longer ones read the mask's last row or column. With a cache keys count from the first one
  /// after leftpad, and seqlen_k is the capacity.
  const Tensor* mask = nullptr;
  /// Only these blocks of scores, in addition to what causal, the window and the mask hide: in bf16 and f16, on a CPU also in f32. Null:
  /// all
  const AttentionBlocks* blocks = nullptr;
  /// Of q, k and v in e4m3, f32 [batch, kv_heads]: what stands for one in each tensor (FlashAttention 3's meaning); all positive. Null: 1.
  const Tensor *q_descale = nullptr, *k_descale = nullptr, *v_descale = nullptr;
  /// A second query of each row, of q's dtype and o's shape, that is multiplied by the values: s = scale (q_i k_j + qv_i v_j). It is how
  /// FlashAttention 3 takes latent attention, with keys of 64 columns and values of 256; with 512 see mla_decode(). Not of e4m3, and
  /// without gradients, user-defined rules and `blocks`. head_dim is up to 128.
  const Tensor* qv = nullptr;
  const Tensor* lse = nullptr;  ///< output, f32 [batch, heads, seqlen_q], contiguous: natural log of the softmax denominator, -infinity
                                ///< if a query sees no key
  float dropout = 0;            ///< the probability with which a weight is dropped, in [0, 1): see attention()
  std::int64_t dropout_seed = 0, dropout_offset = 0;
  const Tensor* dropout_state = nullptr;  ///< i64 [2] on the tensors' device, contiguous: replaces dropout_seed and dropout_offset. Read
                                          ///< when the kernel runs, so a CUDA graph can drop other weights each time it is launched
  bool check_contents = false;  ///< on a GPU: wait, check lengths, offsets and page numbers on the device, and throw InvalidArgument for
                                ///< wrong ones. If false, wrong ones are clamped to valid memory
  int sm_margin = 0;  ///< on a GPU: leave this many SMs to other work, such as communication; less than there are. The kernels that
                      ///< compute scores have blocks on the other SMs only
  std::optional<Stream> stream = {};  ///< default: the device's standard stream
};

/// O = softmax(S) V, exact, in O(seqlen) memory.
///
/// `q`: [batch, seqlen_q, heads, head_dim]; `k`: [batch, seqlen_k, kv_heads, head_dim]; `v`: [batch, seqlen_k, kv_heads, value_dim]; `o`:
/// [batch, seqlen_q, heads, value_dim]. heads is a multiple of kv_heads: query head h uses key head h / (heads / kv_heads). head_dim and
/// value_dim are multiples of 8 up to 256. 64, 96, 128, 192 and 256, and 192 with 128, have kernels of their own; others use the next
/// larger one. bf16, f16 or f32 (on a GPU only attention() and attention_decode()); accumulation in f32. The last dimension must be
/// contiguous; on a GPU 16-byte aligned rows are fast. A query that sees no key gives 0. seqlen_k may be 0.
///
/// With dropout, each weight is set to 0 with probability p = options.dropout, and otherwise divided by 1 - p; p is rounded to a multiple
/// of 1/256, but not to 0 or 1. LSE is that without dropout. Which weights are dropped depends on seed, offset, batch, head, query and key
/// only (Philox 4x32-10, one byte for a weight): it is the same in attention_backward(), on every device and for every tile size. In
/// attention_varlen() batch is the number of the sequence, and queries and keys are counted in it. Not in attention_decode(), and
/// not of e4m3.
///
/// q, k and v may be of e4m3, with o in bf16 or f16 and head dimensions that are multiples of 16. The descales multiply the
/// scores, as above, and the output (v_descale); query head h has those of its key head. On a Hopper GPU attention() has kernels for 64,
/// 128 and 256: weights are rounded to e4m3 too, relative to the row's largest. Above 128 columns, o of values of one sign is too small by
/// up to seqlen_k 2^-16 of itself, because tensor cores keep few bits of a sum of 8-bit products. Other targets convert q, k and v to o's
/// dtype, which is exact, and then compute in it.
///
/// Enqueues on the stream and returns (on the CPU: done when it returns). Deterministic. Throws InvalidArgument for shapes, dtypes, strides
/// or devices that do not fit, with nothing written; CompileError, DeviceError.
void attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const AttentionOptions& options = {});

/// Sets `mask`, bool [batch, heads, seqlen_q, seqlen_k], contiguous, to true for each weight that attention() with these options keeps, and
/// to false for each that it drops. Uses the options of dropout and the stream only. For tests and for looking at masks: O(seqlen^2)
/// memory. Throws as attention().
void attention_dropout_mask(const Tensor& mask, const AttentionOptions& options);

/// Options of attention_backward().
struct AttentionBackwardOptions {
  AttentionOptions forward = {};   ///< those of the attention() call, and the stream; `lse` is ignored
  const Tensor* d_sink = nullptr;  ///< output, f32 [heads]: the gradient of forward.sink
  /// Output, f32 or of the mask's dtype, of the mask's shape, contiguous: the gradient of forward.mask, which must be one that is added. An
  /// element is the sum over all scores to which the mask's element was added, always in the same order; it is 0 where none of them is
  /// visible, and beyond the lengths of packed sequences. Not with forward.blocks. It takes two more products for each score. An SM
  /// computes a tile of the mask, so a small mask occupies few SMs.
  const Tensor* d_mask = nullptr;
  bool deterministic = false;  ///< the same inputs give the same bits, on a GPU too, where this takes longer: see attention_backward()
};

/// Gradients of attention() with respect to q, k and v (and the sink and the mask), in O(seqlen) memory: the scores are computed again from
/// q, k and `lse`.
///
/// `q`, `k`, `v`: the inputs of attention(). `o`, `lse`: its results. `d_o`: the gradient of o, of its shape. `dq`, `dk`, `dv`: outputs of
/// the shapes of q, k and v. bf16 and f16, on a CPU also f32; all tensors but lse and the sink have q's dtype, and their last dimension is
/// contiguous. Sums are in f32. dk and dv are sums over the query heads that share a key head. Queries that see no key and keys that no
/// query sees have gradients of 0. On a GPU the tanh of a softcap has a relative error up to 2^-11.
///
/// dq is a sum over blocks of keys. On a Hopper GPU, up to 128 columns and without softcap, blocks add to it in an order that differs from
/// run to run, and so do its last bits, unless options.deterministic is set: then each block waits for its turn, or with
/// forward.blocks dq has a kernel of its own. dk, dv, and dq everywhere else, are deterministic.
///
/// Enqueues on the stream and returns (on the CPU: done when it returns). Throws InvalidArgument for shapes, dtypes, strides or devices
/// that do not fit, with nothing written; CompileError, DeviceError.
void attention_backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& lse, const Tensor& d_o,
                        const Tensor& dq, const Tensor& dk, const Tensor& dv, const AttentionBackwardOptions& options = {});

/// The offsets of the sequences in a packed batch: i32, on the tensors' device.
struct PackedSequences {
  Tensor cu_seqlens_q;                ///< [batch + 1]: sequence b has the queries cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1
  Tensor cu_seqlens_k;                ///< [batch + 1]: the same for its keys
  const Tensor* seqused_q = nullptr;  ///< [batch]: use only this many of its queries, the first ones
  const Tensor* seqused_k = nullptr;  ///< [batch]: use only this many of its keys, the first ones
};

/// attention() of packed sequences of different lengths.
///
/// `q`: [total_q, heads, head_dim]; `k`: [total_k, kv_heads, head_dim]; `v`: [total_k, kv_heads, value_dim]; `o`: [total_q, heads,
/// value_dim]; options.lse: [heads, total_q]. Lengths may be 0. Rows of `o` that belong to no sequence are not written. e4m3 is converted
/// to o's dtype first. On a GPU the offsets are not known to the host: see AttentionOptions::check_contents.
void attention_varlen(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const PackedSequences& sequences,
                      const AttentionOptions& options = {});

/// Gradients of attention_varlen() with respect to q, k and v (and the sink and the mask): attention_backward() of packed sequences.
///
/// `q`, `k`, `v`, `sequences`: the inputs of attention_varlen(). `o`, `lse`: its results, `lse` f32 [heads, total_q]. `d_o`: the gradient
/// of o, of its shape. `dq`, `dk`, `dv`: outputs of the shapes of q, k and v. Every row of them is written: those of queries and keys that
/// are not in use, because they belong to no sequence or lie after seqused_q or seqused_k, become 0. Rows that are not in use may hold
/// anything, and so may `o`, `d_o` and `lse` there. options.forward.check_contents is as in attention_varlen(). Data types, options,
/// determinism and errors are those of attention_backward().
void attention_varlen_backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& lse, const Tensor& d_o,
                               const Tensor& dq, const Tensor& dk, const Tensor& dv, const PackedSequences& sequences,
                               const AttentionBackwardOptions& options = {});

/// More options of attention_decode(). Integer tensors are i32; all tensors are on the device of q.
struct CacheOptions {
  const Tensor* seqlens = nullptr;      ///< [batch]: tokens in the cache before this call; null: it is full
  const Tensor* batch_idx = nullptr;    ///< [batch]: maps batch index to cache index, or to a row of the block table; null: the identity
  const Tensor* leftpad = nullptr;      ///< [batch]: the number of a sequence's first tokens to ignore
  const Tensor* block_table = nullptr;  ///< [tables, pages of a sequence]: the cache is paged, and these are the pages in order
  /// [batch + 1]: q, o and options.lse are packed as in attention_varlen(); sequence b has the queries cu_seqlens_q[b] to
  /// cu_seqlens_q[b + 1] - 1
  const Tensor* cu_seqlens_q = nullptr;
  /// [batch + 1]: new_k and new_v are packed, [total_new, kv_heads, ...]
  const Tensor* cu_seqlens_new = nullptr;
  const Tensor* new_k = nullptr;       ///< [batch, seqlen_new, kv_heads, head_dim]: appended to the cache first
  const Tensor* new_v = nullptr;       ///< [batch, seqlen_new, kv_heads, value_dim]
  const Tensor* rotary_cos = nullptr;  ///< [positions, rotary_dim / 2], as in rope(): q and new_k are rotated first. Not with packed ones
  const Tensor* rotary_sin = nullptr;
  RopePairing rotary_pairing = RopePairing::half_split;
  int num_splits = 0;  ///< splits of a sequence's keys that run in parallel; 0: decode_splits()
};

/// Attention of few queries against a cache of keys and values ("flash decoding").
///
/// `q`: [batch, seqlen_q, heads, head_dim]; `k_cache`: [cache_batch, capacity, kv_heads, head_dim] or, with a block table, [pages,
/// page_size, kv_heads, head_dim]; `v_cache` likewise with value_dim; `o` and options.lse as in attention(). Page sizes that are not a
/// multiple of 16, and pages with leftpad, are slower: the keys and values in use are first copied to contiguous memory.
///
/// New keys and values are written into the caches at seqlens[b], seqlens[b] + 1, ... Those that do not fit are dropped (on the CPU, and
/// with check_contents, refused). The sequence then has seqlens[b] + seqlen_new keys, and the seqlen_q queries are aligned with its end.
/// Rotary position of new key i: seqlens[b] - leftpad[b] + i. Query i has the same with `causal`, a window or attention_chunk, else that of
/// new key 0.
///
/// q, the caches and new keys may be of e4m3, as in attention(), but are not rotated: the tokens in use are converted to o's dtype in
/// memory of batch * capacity tokens first.
///
/// The keys of a sequence are split over several blocks of the GPU, and a second kernel combines their f32 results. Enqueues and returns;
/// in f32 on a GPU, which is for comparisons, it waits for the lengths, and cu_seqlens_q is not supported. Throws the same as attention().
void attention_decode(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& o, const CacheOptions& cache,
                      const AttentionOptions& options = {});

/// Calls of attention_decode() whose number of splits is chosen ahead, once for all layers of a model and steps that are alike.
struct DecodeProblem {
  std::int64_t batch = 0, seqlen_q = 1, heads = 0, kv_heads = 0;
  std::int64_t seqlen_k = 0;  ///< the longest sequence's, with new keys. attention_decode() itself knows only the cache's capacity
  int attention_chunk = 0, sm_margin = 0;  ///< as in AttentionOptions
};

/// The number of splits of each sequence's keys for such calls on `device`, 1 to 128: for CacheOptions::num_splits. 1 where keys are not
/// split. Throws InvalidArgument for negative numbers, and for heads that are no multiple of kv_heads; DeviceError.
int decode_plan(const DecodeProblem& problem, Device device);

/// The number of splits of the keys of `sequences` (batch times kv_heads times tiles of queries) on `multiprocessors` SMs: the fewest that
/// reach 0.96 of the utilisation of the best number up to `most`. Each split has at least `block` keys.
int decode_splits(int sequences, int seqlen_k, int block, int multiprocessors, int most = 128);

}  // namespace tw
