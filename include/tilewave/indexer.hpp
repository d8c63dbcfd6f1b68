#pragma once

#include <cstdint>
#include <optional>

#include "tilewave/tensor.hpp"

// The lightning indexer of DeepSeek-V3.2 (DeepSeek sparse attention): small heads score every key for every query, and attention then looks
// at the best keys only.
//
//   tw::indexer_scores(q, k, weights, scores, {.k_scale = &k_scale, .starts = &starts, .ends = &ends});
//   tw::topk(scores, 2048, values, indices, {.starts = &starts, .ends = &ends});  // fewer than 2048 keys: -1
//   tw::mla_sparse(queries, kv, indices, o);

namespace tw {

/// Elements of an indexer's head, and its heads at most.
inline constexpr std::int64_t kIndexerDim = 128, kIndexerHeads = 128;
/// Keys of a page, and the bytes that each takes: 128 of e4m3 and a scale in f32.
inline constexpr std::int64_t kIndexerPage = 64, kIndexerKeyBytes = kIndexerDim + 4;

/// All tensors are on the device of q.
struct IndexerOptions {
  const Tensor* k_scale = nullptr;    ///< f32 [keys], contiguous: needed for fp8_e4m3, not allowed otherwise
  const Tensor* starts = nullptr;     ///< i32 [queries], contiguous: the first key that a query sees; null: 0
  const Tensor* ends = nullptr;       ///< i32 [queries], contiguous: the key after the last; null: `keys`
  bool causal = false;                ///< query i sees at most the first keys - queries + i + 1 keys
  bool clear = true;                  ///< write -infinity where a query does not see the key. If false these scores are left as they are
  int num_splits = 0;                 ///< splits of the keys that run in parallel, up to 1024; 0: a number that suits the device
  std::optional<Stream> stream = {};  ///< default: the device's standard stream
};

/// scores[i, j] = k_scale[j] * sum over heads h of weights[i, h] * max(0, q[i, h, :] . k[j, :]) for starts[i] <= j < ends[i], otherwise
/// -infinity.
///
/// `q`: [queries, heads, 128], 1 to 128 heads; 16, 32, 64 and 128 use all of the device. `k`: [keys, 128], of q's dtype: fp8_e4m3, bf16 or
/// f16. `weights`: f32 [queries, heads], of any sign; scales of q belong there. `scores`: f32 [queries, keys]. The last dimensions of q, k
/// and scores must be contiguous; 16-byte aligned rows are fast. Products and sums are in f32; the tensor cores of Hopper GPUs keep about
/// 14 bits of sums of fp8 products.
///
/// Ranges may be empty (starts >= ends), in any order, and are clipped to 0 and `keys`. Keys that no query sees may hold anything.
///
/// Enqueues and returns (on the CPU: done when it returns). Deterministic. Throws InvalidArgument for shapes, dtypes, strides or devices
/// that do not fit, with nothing written; CompileError, DeviceError.
void indexer_scores(const Tensor& q, const Tensor& k, const Tensor& weights, const Tensor& scores, const IndexerOptions& options = {});

/// Options of indexer_scores_paged(). Integer tensors are i32. All tensors are on the device of q.
struct IndexerPagedOptions {
  const Tensor* seqlens = nullptr;  ///< [batch], contiguous: keys of each sequence, the new ones included; null: as many as fit. Or
                                    ///< [batch, seqlen_q]: the keys that each query sees
  bool causal = true;  ///< query i of a sequence sees the first seqlen - seqlen_q + i + 1 keys; if false, all. Not used where each
                       ///< query has a length
  bool clear = true;   ///< as IndexerOptions::clear
  int num_splits = 0;  ///< as IndexerOptions::num_splits
  std::optional<Stream> stream = {};  ///< default: the device's standard stream
};

/// The same for decoding, with keys in pages: scores[b, i, j] for query i and key j of sequence b.
///
/// `q`: fp8_e4m3 [batch, seqlen_q, heads, 128]; `weights`: f32 [batch, seqlen_q, heads]; `scores`: f32 [batch, seqlen_q, columns], where
/// `columns` is at least the longest length. `k_cache`: u8 or fp8_e4m3 [pages, 64, 132]. A page holds its 64 keys, 128 bytes of e4m3 each,
/// and after them the 64 scales in f32; its memory is contiguous, and pages are any multiple of 4 bytes apart (of 16: fast). Key j of
/// sequence b is key j % 64 of page block_table[b, j / 64]; `block_table`: i32 [batch, pages of a sequence].
///
/// Lengths are clipped to 0, to `columns` and to what a row of the table holds. Scores of keys on pages that do not exist are -infinity,
/// and memory is not read for them. Pages and keys that are not in use may hold anything.
///
/// Enqueues and returns (on the CPU: done when it returns). Deterministic. Throws InvalidArgument for shapes, dtypes, strides or devices
/// that do not fit, with nothing written; CompileError, DeviceError.
void indexer_scores_paged(const Tensor& q, const Tensor& k_cache, const Tensor& weights, const Tensor& block_table, const Tensor& scores,
                          const IndexerPagedOptions& options = {});

}  // namespace tw
