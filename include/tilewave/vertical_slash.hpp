#pragma once

#include <optional>

#include "tilewave/tensor.hpp"

// Vertical-slash sparse attention (MInference; Jiang et al. 2024, arXiv 2407.02490): causal attention of long prompts, where a head attends
// to some columns, keys that all later queries see, and some slashes, distances at which each query sees a key.
//
//   tw::vertical_slash_attention(q, k, v, vertical, slash, o);

namespace tw {

struct VerticalSlashOptions {
  int query_block = 64;               ///< queries that share blocks of keys: 64, as in MInference, or 128, which is faster where slashes
                                      ///< are close together
  float scale = 0;                    ///< softmax scale; 0: 1 / sqrt(head_dim)
  const Tensor* seqlens = nullptr;    ///< i32 [batch], contiguous: tokens of each sequence, the first ones; null: all
  const Tensor* lse = nullptr;        ///< output, f32 [batch, heads, seqlen], contiguous: natural log of the softmax denominator, -infinity
                                      ///< if a query sees no key
  std::optional<Stream> stream = {};  ///< default: the device's standard stream
};

/// The lists of vertical_slash_index(): outputs, i32 and contiguous, where blocks is ceil(seqlen / query_block). Entries of a list after
/// its count are 0.
struct VerticalSlashLists {
  const Tensor& block_count;   ///< [batch, heads, blocks]
  const Tensor& block_offset;  ///< [batch, heads, blocks, slashes]: the first keys of blocks of query_block keys, ascending
  const Tensor& column_count;  ///< [batch, heads, blocks]
  const Tensor& column_index;  ///< [batch, heads, blocks, columns]: keys, ascending
};

/// Attention of each block of queries over the blocks of keys and the columns that vertical_slash_index() lists for it, with a causal mask:
/// o = softmax(scale q K^T) V over these keys, each counted once.
///
/// `q`: [batch, seqlen, heads, head_dim]; `k`: [batch, seqlen, kv_heads, head_dim]; `v`: [batch, seqlen, kv_heads, value_dim]; `o`: [batch,
/// seqlen, heads, value_dim]. heads is a multiple of kv_heads. head_dim and value_dim are multiples of 8 up to 256. bf16 or f16, on a CPU
/// also f32; accumulation in f32. The last dimension must be contiguous; on a GPU 16-byte aligned rows are fast.
///
/// `vertical`: i32 [batch, heads, columns], keys; up to 65536 columns. `slash`: i32 [batch, heads, slashes], distances: that of query i and
/// key j is i - j. Both contiguous, in any order; numbers outside 0 to seqlen - 1 are ignored, and one that is there twice counts once.
///
/// A query that sees no key, or that comes after its sequence's end, gives 0. Keys after a sequence's end may hold anything. Lengths that
/// are wrong are clamped to seqlen.
///
/// Takes memory for a copy of each query head's columns of k and v, and for lists, up to 64 MB for some of the heads at a time. Enqueues on
/// the stream and returns (on the CPU: done when it returns). Deterministic. Throws InvalidArgument for shapes, dtypes, strides or devices
/// that do not fit, with nothing written; CompileError, DeviceError.
void vertical_slash_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& vertical, const Tensor& slash,
                              const Tensor& o, const VerticalSlashOptions& options = {});

/// Lists, for each block of B = options.query_block queries of `seqlen`, the blocks of B keys that hold its slashes, and the columns that
/// these do not hold (convert_vertical_slash_indexes of MInference).
///
/// `vertical`, `slash`: as vertical_slash_attention() takes them. For the queries [end - B, end) a slash of distance d < end needs the keys
/// [end - B - d, end - d), or [0, B) where these begin before key 0. From the largest distance on, a slash whose keys begin in the last
/// range or where it ends extends it by B keys, unless it holds them all; another slash begins a range of its own. So the blocks of a list
/// do not overlap, they begin anywhere, they hold more keys than the slashes, and the last one may reach past `end`; a causal mask is part
/// of the meaning. Columns are those before `end`. A block of queries that begins after its sequence's end has empty lists.
///
/// options.scale and options.lse are not used. Enqueues and returns. Deterministic. Throws as vertical_slash_attention().
void vertical_slash_index(const Tensor& vertical, const Tensor& slash, std::int64_t seqlen, const VerticalSlashLists& lists,
                          const VerticalSlashOptions& options = {});

}  // namespace tw
