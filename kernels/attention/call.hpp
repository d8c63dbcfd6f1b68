#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>

#include "kernels/check.hpp"
#include "tilewave/detail/attention_call.hpp"

// From the public functions to the kernels.

namespace tw::kernels::attention {

using detail::AttentionCall, detail::KeyBlocks;

/// A form of attention, as messages call it and its arguments.
struct Form {
  const char* op;
  const char *q_dims = "[batch, seqlen, heads, head_dim]", *kv_dims = q_dims;  ///< of q and o, of k and v
  const char *k = "k", *v = "v";
  const Tensor* cu_seqlens_q = nullptr;  ///< if given, q and o are packed: [total, heads, dim]
  bool packed_keys = false;
  const char* without_dropout = nullptr;  ///< why it takes no dropout
  const char* without_blocks = nullptr;   ///< why it takes no blocks
  const char* without_qv = nullptr;       ///< why it takes no qv
  /// Whether k and v are a cache: all queries of a sequence and all heads that share keys have the same blocks. Then its form checks them,
  /// once the capacity is known.
  bool cache = false;
  bool f32_on_gpu = false;
  bool fp8 = false;  ///< whether q, k and v may be e4m3

  /// tw::require() with the name of the form before the message.
  template <class... Args>
  void require(bool condition, fmt::format_string<Args...> message, Args&&... args) const {
    if (!condition) throw InvalidArgument(tw::format("{}: {}", op, detail::format_arguments(message, fmt::make_format_args(args...))));
  }

  /// The elements of an argument that must be contiguous, T[shape] and on the device; null if it is not given.
  template <class T>
  T* elements(const NamedTensor& argument, const Shape& shape, Device device) const {
    const auto& [name, t] = argument;
    if (t == nullptr) return nullptr;
    check_operand(op, name, *t, dtype_of<T>, device);
    require(t->shape() == shape && t->is_contiguous(), "{} is {}; it must be contiguous, {}[{}]", name, *t, name_of(dtype_of<T>),
            tw::join(shape, ", "));
    return t->data<T>();
  }
};

/// Checks the options of dropout and sets the call's.
void set_dropout(const Form& form, AttentionCall& call, const AttentionOptions& options, Device device);

/// Checks the mask, and sets the call's. Of a cache the capacity must be known.
void check_mask(const Form& form, AttentionCall& call, const Tensor& mask);

/// Checks which blocks of keys are attended to, and sets the call's.
void check_blocks(const Form& form, AttentionCall& call, const AttentionBlocks& blocks);

/// Packed sequences, [total, heads, dim], as one of a batch.
Tensor as_batch(const Tensor& t);

/// What all forms check. q and o are [batch, seqlen_q, heads, dim], k and v [batch, seqlen_k, kv_heads, dim] with a batch of their own, or
/// packed; `inputs`: more tensors that the call reads. Throws InvalidArgument.
AttentionCall check_common(const Form& form, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o,
                           const AttentionOptions& options, std::initializer_list<NamedTensor> inputs = {});

/// The form of packed sequences, and their tensors as messages call them: null where they are not given.
Form varlen_form(const char* op, const PackedSequences& sequences);
std::array<NamedTensor, 4> tensors_of(const PackedSequences& sequences);
/// check_common() and the tensors of `sequences`.
AttentionCall check_varlen(const Form& form, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o,
                           const PackedSequences& sequences, const AttentionOptions& options);
/// What they hold, where it is checked.
void check_varlen_contents(const Form& form, const AttentionCall& call, const PackedSequences& sequences, const AttentionOptions& options);

/// Whether to read what arguments hold on the device: then the stream's work is done.
bool contents_are_checked(const AttentionCall& call, const AttentionOptions& options);

/// Throws InvalidArgument unless `cu_seqlens`, i32 on any device, does not decrease and stays within 0 and `total`, the number of `what`,
/// and `used`, if given, is at most what each sequence has. `masked`: how many the mask has, which no sequence exceeds; 1: any number.
void check_offsets(const Form& form, const NamedTensor& cu_seqlens, std::int64_t total, const char* what, const NamedTensor& used = {},
                   std::int64_t masked = 1);

/// No user-defined rule.
inline constexpr auto kNoUserRule = [](auto&) {};

/// Enqueues a checked call, or runs it.
void run(const AttentionCall& call);
void run_on_cpu(const AttentionCall& call);
void run_listed_on_cpu(const AttentionCall& call);
void run_query_values_on_cpu(const AttentionCall& call);
void run_on_gpu(const AttentionCall& call);
void run_on_gpu(const AttentionCall& call, const AttentionConfig& config);
/// The keys that one sequence of a call reads: [begin, end) of k[batch].
struct KeyRange {
  std::int64_t batch, begin, end;
};
/// attention() by products of f32 and a softmax between them, through scores in memory, at most `most_scores` at once: for a GPU, whose own
/// kernel rounds the weights of keys to 16 bits. Works on any device. `ranges`: one for each sequence, or none if sequence b reads all of
/// k[b]. No pages.
void run_in_f32(const AttentionCall& call, std::int64_t most_scores = std::int64_t{64} << 20, std::span<const KeyRange> ranges = {});

/// attention() of e4m3.
void run_in_fp8(AttentionCall call);
/// Converts q, k and v of e4m3 to o's dtype, in memory that lives as long as the call.
void widen(AttentionCall& call);

/// Memory for the transposed values [batch, head, key, dim] of e4m3: [batch, head, dim, keys and padding].
Tensor values_workspace(const Tensor& v, const Stream& stream);
/// Enqueues what writes all of it: TransposeValues. Works on any device.
void transpose_values(const Tensor& v, const Tensor& to, const Stream& stream);

/// Has the tiles of packed sequences listed before they are taken, on a GPU and where they are so many that it pays. The result must
/// outlive the launch of the call.
Tensor list_packed_tiles(AttentionCall& call);

/// Enqueues what fills in `tiles`, i32[at least as many as there are, PackedTile::numbers], where a tile has `tile_rows` queries.
void packed_tiles(const AttentionCall& call, int tile_rows, const Tensor& tiles);

// attention_decode()

/// Checked, and new keys still to be appended.
AttentionCall check_decode(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const CacheOptions& cache,
                           const AttentionOptions& options);

/// Whether the CPU attends to keys and values where they lie, in f32: up to 8 queries share them and see all of them, without other rules.
/// The call's rows are queries that share keys.
bool takes_few_queries(const AttentionCall& call);
void run_few_queries_on_cpu(const AttentionCall& call);

enum class DecodeWith { kernel, f32_products };
void run_decode(AttentionCall call, const Tensor& q, const Tensor& o, const CacheOptions& cache, const AttentionOptions& options,
                DecodeWith with);
/// What follows append() in f32 on a GPU: run_in_f32() after waiting for the lengths. Works on any device.
void run_decode_in_f32(AttentionCall call, const CacheOptions& cache, const Tensor& rotated_q);

/// Makes the queries of all heads that share keys the rows of the call's q, and of its qv if there is one. `q`, `qv`: [batch, seqlen,
/// heads, dim], in memory the queries of a head before those of the next.
void share_keys(AttentionCall& call, const Tensor& q, const Tensor& qv = {});

/// Whether the kernel can read the call's pages where they lie: whole pages of a multiple of 16 tokens, which is what it copies at once,
/// from the first token on.
bool reads_pages(const AttentionCall& call);

/// Copies the tokens in use of a cache, paged or of e4m3, to contiguous memory, as o's dtype, and makes the call one without pages. The
/// memory lives as long as what is returned.
Tensor gather_tokens(AttentionCall& call);

/// Writes the new keys and values of `cache` into the call's, and rotates its queries into `rotated_q` where there is a table and a query:
/// one launch for all of it. What does not fit into the cache is dropped, as is what wrong lengths or numbers would lead outside.
void append(const AttentionCall& call, const CacheOptions& cache, const Tensor& rotated_q);

/// Whether each query is rotated by its own position; else by that of the first new key.
inline bool queries_advance(const AttentionCall& call) { return call.upper || call.lower || call.chunk > 0; }

/// Results of attention over parts of the keys, all contiguous and f32, and where they go; checked.
struct CombineCall {
  Tensor parts;                  ///< [splits, batch, heads, seqlen_q, value_dim], each divided by its own sum
  Tensor part_lse;               ///< [splits, batch, heads, seqlen_q]: -infinity of a part without keys, whose result may be anything
  Tensor o;                      ///< [batch, seqlen_q, heads, value_dim]
  const Tensor* lse = nullptr;   ///< [batch, heads, seqlen_q], f32
  const Tensor* sink = nullptr;  ///< [heads], f32
  bool sink_in_lse = true;       ///< whether lse includes the sink, as o does
};

/// o and lse of all keys together. A row without any has o = 0 and lse = -infinity, or the sink.
void combine(const CombineCall& call, const Stream& stream);

}  // namespace tw::kernels::attention
