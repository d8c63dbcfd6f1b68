#pragma once

#include <cstdint>
#include <optional>

#include "tilewave/rope.hpp"
#include "tilewave/tensor.hpp"

// Multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434) in its absorbed form, for decoding. A token's keys and values are one
// latent vector that all heads share; what makes keys and values of it for each head is multiplied into the queries and the output instead.
//
//   tw::mla_append(latent, rotary, kv_cache, {.seqlens = &before, .block_table = &block_table, .rotary_cos = &cos, .rotary_sin = &sin});
//   tw::mla_decode(q, kv_cache, o, {.seqlens = &seqlens, .block_table = &block_table, .scale = scale});
//
// and tw::mla_sparse(q, kv_cache, indices, o) where each token has a list of the keys that it sees.

namespace tw {

/// The columns of a cached token. The latent ones are both key and value; the rotary ones are part of the key only.
inline constexpr std::int64_t kMlaLatentDim = 512, kMlaRotaryDim = 64, kMlaKeyDim = kMlaLatentDim + kMlaRotaryDim;

/// Bytes of a token in a cache of 8 bits: 512 of e4m3, four scales in f32, one for each 128 columns, and 64 columns in bf16: FlashMLA's.
inline constexpr std::int64_t kMlaFp8Bytes = kMlaLatentDim + 4 * 4 + kMlaRotaryDim * 2;

/// Integer tensors are i32. All tensors are on the device of q.
struct MlaOptions {
  const Tensor* seqlens = nullptr;      ///< [batch]: tokens of each sequence, the new ones included; null: the cache is full
  const Tensor* block_table = nullptr;  ///< [batch, pages of a sequence]: the cache is paged, and these are the pages in order
  float scale = 0;                      ///< softmax scale; 0: 1 / sqrt(576). Models set it: DeepSeek-V3 has 192^-0.5 with YaRN's factor
  bool causal = true;                   ///< token i of q sees the first seqlen - seqlen_q + i + 1 keys; if false, all
  const Tensor* lse = nullptr;          ///< output, f32 [batch, heads, seqlen_q], contiguous: natural log of the softmax denominator,
                                        ///< -infinity if a query sees no key
  std::int64_t max_seqlen = 0;  ///< no sequence is longer, which helps to choose splits; 0: the capacity. Longer ones are still right
  int num_splits = 0;           ///< splits of a sequence's keys that run in parallel, up to 128; 0: mla_splits()
  bool check_contents = false;  ///< on a GPU: wait, check lengths and page numbers on the device, and throw InvalidArgument for wrong ones.
                                ///< If false, wrong ones are clamped to valid memory
  std::optional<Stream> stream = {};  ///< default: the device's standard stream
};

/// o = softmax(scale q K^T) V, where a token's row of the cache is its key, and the first 512 columns of it are its value.
///
/// `q`: [batch, seqlen_q, heads, 576], 512 columns for the latent part and 64 with the rotary embedding; `o`: [batch, seqlen_q, heads,
/// 512]. `kv_cache`: [batch, capacity, 576] or, with a block table, [pages, page_size, 576]: token t of sequence b is token t % page_size
/// of page block_table[b, t / page_size]. Pages may be of any size and in any order; sizes that are a multiple of 64 are copied faster. If
/// page_size is not a multiple of 16, pages must be a whole number of tokens apart in memory. bf16 or f16; accumulation in f32. The last
/// dimension must be contiguous; 16-byte aligned rows are fast. The cache after a sequence's length, and pages that it does not use, may
/// hold anything. A query that sees no key gives 0.
///
/// With q in bf16 the cache may also be of 8 bits: u8 or fp8_e4m3 with 656 columns, kMlaFp8Bytes. Column c of the key is then the e4m3
/// number c times scale c / 128, rounded to bf16. Its memory and strides are multiples of 16 bytes.
///
/// Lengths that are negative or exceed the capacity (with pages: the table's columns times page_size) and pages that do not exist are
/// refused on the CPU, with nothing written. On a GPU see check_contents.
///
/// The keys of a sequence are split over several blocks of the GPU, and a second kernel combines their f32 results. Enqueues and returns
/// (on the CPU: done when it returns). Deterministic. Throws InvalidArgument for shapes, dtypes, strides or devices that do not fit, with
/// nothing written; CompileError, DeviceError.
void mla_decode(const Tensor& q, const Tensor& kv_cache, const Tensor& o, const MlaOptions& options = {});

/// The number of splits that mla_decode() chooses for `batch` sequences of up to `max_seqlen` tokens and `rows` = heads * seqlen_q rows, on
/// `multiprocessors` SMs: enough for all SMs to be busy, each with at least 128 keys.
int mla_splits(std::int64_t batch, std::int64_t rows, std::int64_t max_seqlen, int multiprocessors);

/// Options of mla_sparse(). All tensors are on the device of q, and contiguous.
struct MlaSparseOptions {
  const Tensor* topk_length = nullptr;  ///< i32 [tokens]: only so many entries of a token's list count; null: all
  float scale = 0;                      ///< softmax scale; 0: 1 / sqrt(576)
  const Tensor* sink = nullptr;         ///< f32 [heads]: exp(sink) is added to the softmax denominator of o, but not to lse
  const Tensor* lse = nullptr;          ///< output, f32 [tokens, heads]: natural log of the sum of exp(logit), -infinity without keys
  const Tensor* max_logits = nullptr;   ///< output, f32 [tokens, heads]: the largest logit, scale q k; -infinity without keys
  int num_splits = 0;                   ///< splits of a list that run in parallel, up to 128; 0: mla_splits()
  std::optional<Stream> stream = {};    ///< default: the device's standard stream
};

/// Sparse attention of DeepSeek-V3.2 (DSA): as mla_decode(), but each query token sees the keys that its list names, in prefilling and in
/// decoding.
///
/// `q`: [tokens, heads, 576]; `o`: [tokens, heads, 512]; `indices`: i32 [tokens, topk], of any topk. `kv`: [kv_tokens, 576], or [pages,
/// page_size, 576], where index page * page_size + t is token t of the page; its dtypes and strides are those of mla_decode()'s cache, the
/// one of 8 bits included, and pages must be a whole number of tokens apart in memory. The tokens of several sequences are rows of one
/// call: their lists name tokens of one `kv`.
///
/// An entry that is not in 0 to kv_tokens - 1, such as -1, selects nothing, and memory is not read for it. A token that is listed several
/// times counts as often. The order of a list changes only roundings. Tokens that no list names may hold anything. A query that sees no
/// key gives 0. Trailing entries that select nothing take as much time as others: leave them out by `topk_length`, which is clamped to 0
/// to topk.
///
/// The lists of few tokens are split over several blocks of the GPU, and a second kernel combines their f32 results. Enqueues and returns
/// (on the CPU: done when it returns). Deterministic. Throws InvalidArgument for shapes, dtypes, strides or devices that do not fit, with
/// nothing written; CompileError, DeviceError.
void mla_sparse(const Tensor& q, const Tensor& kv, const Tensor& indices, const Tensor& o, const MlaSparseOptions& options = {});

/// Options of mla_sparse_backward(). All tensors are on the device of q, and contiguous.
struct MlaSparseBackwardOptions {
  const Tensor* topk_length = nullptr;  ///< i32 [tokens]: as MlaSparseOptions::topk_length
  float scale = 0;                      ///< softmax scale; 0: 1 / sqrt(576)
  bool deterministic = false;           ///< on a GPU: add to a row of dkv in the order of tokens and entries, which takes longer
  std::optional<Stream> stream = {};    ///< default: the device's standard stream
};

/// Gradients of mla_sparse() with respect to q and kv, where kv is one matrix of bf16 or f16 and there is no sink. That of a row of kv is
/// the gradient of the key, with that of the value added to its first 512 columns, summed over all entries of all lists that name it.
///
/// `q`, `kv` [kv_tokens, 576], `indices`, options: those of the forward call. `o`, `lse`: its results. `d_o`: the gradient of o, of its
/// shape. `dq`: output, of q's shape and dtype; `dkv`: output, of kv's shape, contiguous, in f32 or of kv's dtype. The last dimension of
/// all is contiguous; on a GPU 16-byte aligned rows are fast. Scores are computed again from q, kv and lse. Weights and the gradients of
/// scores are rounded to q's dtype, sums are in f32. Rows of kv that no list names have a gradient of 0, as have queries that see no key.
///
/// On Hopper GPUs one kernel computes all. With options.deterministic, on other GPUs and on the CPU what is added to a row of dkv is
/// rounded to q's dtype first, and takes memory of 512 MB, or of one token's list if that is more. Both take memory of dkv in f32 where dkv
/// is not. Enqueues and returns (on the CPU: done when it returns). The last bits of dkv vary from run to run unless options.deterministic.
/// Throws as mla_sparse().
void mla_sparse_backward(const Tensor& q, const Tensor& kv, const Tensor& indices, const Tensor& o, const Tensor& lse, const Tensor& d_o,
                         const Tensor& dq, const Tensor& dkv, const MlaSparseBackwardOptions& options = {});

/// Options of mla_append(). Integer tensors are i32. All tensors are on the device of the cache.
struct MlaAppendOptions {
  const Tensor* seqlens = nullptr;      ///< [batch]: tokens of each sequence before this call; null: none
  const Tensor* block_table = nullptr;  ///< [batch, pages of a sequence]: as MlaOptions::block_table
  const Tensor* rotary_cos = nullptr;   ///< [positions, 32] of the cache's dtype or f32, as in rope(); null: nothing is rotated
  const Tensor* rotary_sin = nullptr;
  RopePairing rotary_pairing = RopePairing::interleaved;  ///< DeepSeek's
  bool check_contents = false;                            ///< as MlaOptions::check_contents
  std::optional<Stream> stream = {};                      ///< default: the device's standard stream
};

/// Writes new tokens into a latent cache: token i of sequence b becomes token seqlens[b] + i, whose row is latent[b, i] followed by
/// rotary[b, i], rotated by the table's row seqlens[b] + i (in f32, rounded once).
///
/// `latent`: [batch, seqlen_new, 512]; `rotary`: [batch, seqlen_new, 64]; `kv_cache`: as in mla_decode(), of any page size and strides.
/// bf16 or f16, all of one dtype; the last dimension must be contiguous. Queries are rotated by rope(), with RopeOptions::offsets =
/// seqlens.
///
/// On the CPU, and with check_contents, tokens that do not fit and pages that do not exist are refused, with nothing written. Otherwise
/// those tokens are dropped. Positions beyond the rotary table have its last row.
///
/// Enqueues and returns (on the CPU: done when it returns). Throws InvalidArgument for shapes, dtypes, strides or devices that do not fit,
/// with nothing written; CompileError, DeviceError.
void mla_append(const Tensor& latent, const Tensor& rotary, const Tensor& kv_cache, const MlaAppendOptions& options = {});

}  // namespace tw
