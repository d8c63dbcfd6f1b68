#include <algorithm>
#include <tuple>
#include <utility>

#include "kernels/attention/append.hpp"
#include "kernels/attention/cache_contents.hpp"
#include "kernels/attention/checks.hpp"
#include "kernels/attention/combine.hpp"
#include "kernels/attention/gather.hpp"
#include "kernels/attention/run.hpp"
#include "kernels/check.hpp"
#include "kernels/rows.hpp"
#include "kernels/workspace.hpp"
#include "tilewave/elementwise.hpp"

namespace tw {

namespace {

using namespace kernels::attention;
using kernels::workspace;
using detail::as_batch;
using detail::AttentionCall;
using detail::check_common;

constexpr const char* kOp = "attention_decode";
/// Combine's parts.
constexpr int kMostSplits = 128;
/// Queries of the heads that share keys that are one tile, whose keys are divided; and the fewest keys that are worth a part.
constexpr std::int64_t kMostRows = 64;
constexpr int kPartKeys = 128;
constexpr std::int64_t kMostKeys = std::int64_t{1} << 29;

/// A vector of lengths, offsets or numbers.
void check_integers(const char* name, const Tensor* t, std::int64_t size, Device device) {
  if (!t) return;
  check_operand(kOp, name, *t, DType::i32, device);
  require(t->shape() == Shape{size} && t->is_contiguous(), "{}: {} is {}; it must be contiguous, i32[{}]", kOp, name, *t, size);
}

void check_new_keys(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& o, const CacheOptions& cache,
                    const CacheExtents& extents) {
  require(!cache.new_k == !cache.new_v, "{}: {} is given without {}; both are needed, or none", kOp, cache.new_k ? "new_k" : "new_v",
          cache.new_k ? "new_v" : "new_k");
  const Device device = o.device();
  require(!cache.cu_seqlens_new || cache.new_k, "{}: cu_seqlens_new is given without new_k", kOp);
  check_integers("cu_seqlens_new", cache.cu_seqlens_new, extents.batch + 1, device);
  if (cache.new_k) {
    const bool packed = cache.cu_seqlens_new != nullptr;
    require(cache.seqlens != nullptr, "{}: new_k is given without seqlens, which say where it goes", kOp);
    for (const auto& [name, tensor, into] : {std::tuple{"new_k", cache.new_k, &k_cache}, std::tuple{"new_v", cache.new_v, &v_cache}}) {
      check_operand(kOp, name, *tensor, q.dtype(), device);
      require(tensor->rank() == (packed ? 3 : 4), "{}: {} is {}; it must be {}", kOp, name, *tensor,
              packed ? "[total_new, kv_heads, head_dim], with cu_seqlens_new" : "[batch, seqlen_new, kv_heads, head_dim]");
      const std::int64_t seqlen_new = cache.new_k->shape(packed ? 0 : 1);
      Shape expected{extents.batch, seqlen_new, into->shape(2), into->shape(3)};
      if (packed) expected.erase(expected.begin());
      require(tensor->shape() == expected, "{}: {} is {}; it must be [{}]", kOp, name, *tensor, tw::join(expected, ", "));
      const std::int64_t step = tensor->stride(tensor->rank() - 1);
      require(step == 1, "{}: {} is {} with stride {} in its last dimension; it must be contiguous", kOp, name, *tensor, step);
      kernels::check_extents(kOp, name, *tensor);
      require(packed || seqlen_new <= extents.capacity, "{}: {} is {}; a sequence of the cache holds {} tokens", kOp, name, *tensor,
              extents.capacity);
      check_output(kOp, into == &k_cache ? "k_cache" : "v_cache", *into);
    }
  }
  require(!cache.rotary_cos == !cache.rotary_sin, "{}: {} is given without {}; both are needed, or none", kOp,
          cache.rotary_cos ? "rotary_cos" : "rotary_sin", cache.rotary_cos ? "rotary_sin" : "rotary_cos");
  if (!cache.rotary_cos) return;
  const Tensor &cos = *cache.rotary_cos, &sin = *cache.rotary_sin;
  require(!cache.cu_seqlens_q && !cache.cu_seqlens_new, "{}: rotary_cos is given with {}; packed tokens are turned by rope()", kOp,
          cache.cu_seqlens_q ? "cu_seqlens_q" : "cu_seqlens_new");
  require(cache.new_k && cache.new_k->shape(1) > 0, "{}: rotary_cos is given without new keys, whose positions it is for", kOp);
  require(cos.dtype() == q.dtype() || cos.dtype() == DType::f32, "{}: rotary_cos is {}; it must be of q's dtype, {}, or f32", kOp, cos,
          name_of(q.dtype()));
  check_operand(kOp, "rotary_cos", cos, cos.dtype(), device);
  check_operand(kOp, "rotary_sin", sin, cos.dtype(), device);
  require(cos.rank() == 2 && cos.shape(0) > 0 && cos.shape(1) > 0 && 2 * cos.shape(1) <= q.shape(3),
          "{}: rotary_cos is {}; it must be [positions, rotary_dim / 2], with positions and a rotary_dim of 2 to {}", kOp, cos, q.shape(3));
  kernels::check_extents(kOp, "rotary_cos", cos);
  require(sin.shape() == cos.shape(), "{}: rotary_sin is {}; it must have rotary_cos's shape, {}", kOp, sin, cos);
}

/// What check_common() does not check: what is written, the caches among it when there are new keys, shares no memory with what is read.
void check_memory(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& o, const CacheOptions& cache,
                  const AttentionOptions& options) {
  const NamedTensor k{"k_cache", cache.new_k ? &k_cache : nullptr}, v{"v_cache", cache.new_k ? &v_cache : nullptr};
  for (const NamedTensor& output : {NamedTensor{"o", &o}, {"lse", options.lse}, k, v}) {
    check_disjoint(kOp, output,
                   {{"seqlens", cache.seqlens},
                    {"batch_idx", cache.batch_idx},
                    {"leftpad", cache.leftpad},
                    {"block_table", cache.block_table},
                    {"cu_seqlens_q", cache.cu_seqlens_q},
                    {"cu_seqlens_new", cache.cu_seqlens_new},
                    {"new_k", cache.new_k},
                    {"new_v", cache.new_v},
                    {"rotary_cos", cache.rotary_cos},
                    {"rotary_sin", cache.rotary_sin}});
  }
  for (const NamedTensor& output : {k, v})
    check_disjoint(kOp, output, {{"q", &q}, {"alibi_slopes", options.alibi_slopes}, {"sink", options.sink}});
  check_disjoint(kOp, v, {k});
}

/// Checked, and new keys still to be appended. q, o and lse are those of the caller.
struct Call {
  AttentionCall attention;
  CacheExtents extents;
};

Call check(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& o, const CacheOptions& cache,
           const AttentionOptions& options) {
  const bool paged = cache.block_table != nullptr, packed = cache.cu_seqlens_q != nullptr;
  for (const auto& [name, tensor] : {std::pair{"q", &q}, std::pair{"o", &o}})
    require(tensor->rank() == (packed ? 3 : 4), "{}: {} is {}; it must be {}", kOp, name, *tensor,
            packed ? "[total_q, heads, head_dim], with cu_seqlens_q" : "[batch, seqlen_q, heads, head_dim]");
  for (const auto& [name, tensor] : {std::pair{"k_cache", &k_cache}, std::pair{"v_cache", &v_cache}})
    require(tensor->rank() == 4, "{}: {} is {}; it must be {}", kOp, name, *tensor,
            paged ? "[pages, page_size, kv_heads, head_dim]" : "[cache_batch, capacity, kv_heads, head_dim]");
  if (packed)
    require(cache.cu_seqlens_q->rank() == 1 && cache.cu_seqlens_q->shape(0) >= 1, "{}: cu_seqlens_q is {}; it must be i32[batch + 1]", kOp,
            *cache.cu_seqlens_q);
  const std::int64_t batch = packed ? cache.cu_seqlens_q->shape(0) - 1 : q.shape(0);
  const Shape lse_shape = packed ? Shape{q.shape(1), q.shape(0)} : Shape{q.shape(0), q.shape(2), q.shape(1)};
  Call call{check_common({kOp, "k_cache", "v_cache"}, packed ? as_batch(q) : q, k_cache, v_cache, packed ? as_batch(o) : o, batch,
                         lse_shape, options),
            {}};
  require(!options.mask, "{}: mask is given; it is not supported with a cache", kOp);
  const std::int64_t rows = q.shape(0) * q.shape(1) * (packed ? 1 : q.shape(2));
  constexpr std::int64_t most = (std::int64_t{1} << 29) / kMostSplits;  // counted for each part
  require(rows <= most, "{}: q is {}, which is {} rows; they are limited to {}", kOp, q, rows, most);

  const Device device = o.device();
  CacheExtents& extents = call.extents;
  extents.batch = batch;
  extents.entries = k_cache.shape(0);
  extents.capacity = k_cache.shape(1);
  extents.seqlen_q = q.shape(packed ? 0 : 1);
  extents.queries_advance = options.causal || options.window_left >= 0 || options.window_right >= 0;
  check_integers("seqlens", cache.seqlens, extents.batch, device);
  check_integers("batch_idx", cache.batch_idx, extents.batch, device);
  check_integers("leftpad", cache.leftpad, extents.batch, device);
  check_integers("cu_seqlens_q", cache.cu_seqlens_q, extents.batch + 1, device);
  if (paged) {
    const Tensor& table = *cache.block_table;
    check_operand(kOp, "block_table", table, DType::i32, device);
    require(table.rank() == 2 && (cache.batch_idx || table.shape(0) == extents.batch) && (table.stride(1) == 1 || table.shape(1) <= 1),
            "{}: block_table is {}; it must be i32[{}, pages], or with batch_idx i32[tables, pages], a sequence's pages side by side", kOp,
            table, extents.batch);
    extents.tables = table.shape(0);
    extents.page_size = k_cache.shape(1);
    require(extents.page_size > 0, "{}: k_cache is {}; its page_size must be 1 or more", kOp, k_cache);
    require(extents.batch == 0 || extents.tables > 0, "{}: block_table is {}; it must have a sequence", kOp, table);
    require(table.shape(1) <= kMostKeys / extents.page_size, "{}: block_table is {}; with pages of {} a sequence is limited to {} tokens",
            kOp, table, extents.page_size, kMostKeys);
    extents.capacity = table.shape(1) * extents.page_size;
    call.attention.pages = table.data<std::int32_t>();
    call.attention.pages_stride = table.stride(0);
    call.attention.page_tables = static_cast<int>(extents.tables);
    call.attention.page_size = static_cast<int>(extents.page_size);
  } else {
    require(cache.batch_idx || extents.entries == extents.batch, "{}: k_cache is {}; without batch_idx its batch must be that of {}, {}",
            kOp, k_cache, packed ? "cu_seqlens_q" : "q", extents.batch);
  }
  check_new_keys(q, k_cache, v_cache, o, cache, extents);
  check_memory(q, k_cache, v_cache, o, cache, options);
  extents.seqlen_new = cache.new_k ? cache.new_k->shape(cache.cu_seqlens_new ? 0 : 1) : 0;
  require(cache.num_splits >= 0 && cache.num_splits <= kMostSplits,
          "{}: num_splits is {}; it must be 1 to {}, or 0 for a number that suits the device", kOp, cache.num_splits, kMostSplits);
  if (options.check_contents || !device.is_cuda()) check_cache_contents(kOp, cache, extents, call.attention.stream);

  const auto integers = [](const Tensor* t) { return t ? t->data<std::int32_t>() : nullptr; };
  call.attention.keys = static_cast<int>(extents.capacity);
  call.attention.used_k = integers(cache.seqlens);
  call.attention.keys_added = static_cast<int>(extents.seqlen_new);
  call.attention.k_batch = integers(cache.batch_idx);
  call.attention.k_begin = integers(cache.leftpad);
  call.attention.cu_q = integers(cache.cu_seqlens_q);
  call.attention.cu_added = integers(cache.cu_seqlens_new);
  return call;
}

/// A tensor [batch, seqlen, heads, dim] whose memory is [batch, heads, seqlen, dim].
Tensor by_head_workspace(const Tensor& like, const Stream& stream) {
  return workspace({like.shape(0), like.shape(2), like.shape(1), like.shape(3)}, like.dtype(), stream).transpose(1, 2);
}

/// New keys and values into the cache; gives the queries, turned if there is a table.
Tensor append_new(const Call& call, const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const CacheOptions& cache) {
  if (!cache.new_k) return q;
  AppendCall append;
  append.new_k = cache.cu_seqlens_new ? as_batch(*cache.new_k) : *cache.new_k;
  append.new_v = cache.cu_seqlens_new ? as_batch(*cache.new_v) : *cache.new_v;
  append.k_cache = k_cache;
  append.v_cache = v_cache;
  append.seqlens = call.attention.used_k;
  append.batch_idx = call.attention.k_batch;
  append.leftpad = call.attention.k_begin;
  append.block_table = call.attention.pages;
  append.block_table_stride = call.attention.pages_stride;
  append.tables = call.attention.page_tables;
  append.cu_new = call.attention.cu_added;
  append.batch = call.attention.batch;
  append.capacity = call.extents.capacity;
  append.rotary_cos = cache.rotary_cos;
  append.rotary_sin = cache.rotary_sin;
  append.pairing = cache.rotary_pairing;
  append.queries_advance = call.extents.queries_advance;
  append.q = q;
  append.turned_q = cache.rotary_cos && q.numel() > 0 ? by_head_workspace(q, call.attention.stream) : q;
  kernels::attention::append(append, call.attention.stream);
  return append.turned_q;
}

/// Whether a head's queries and the next head's follow each other, as rows of one tile.
bool heads_follow(const Tensor& t) { return t.shape(1) == 1 || t.shape(2) == 1 || t.stride(2) == t.shape(1) * t.stride(1); }
/// [batch, kv_heads, heads that share keys * seqlen, dim] of [batch, seqlen, heads, dim].
Tensor as_rows(const Tensor& t, std::int64_t kv_heads) {
  const std::int64_t seqlen = t.shape(1), together = t.shape(2) / kv_heads;
  return Tensor::borrow(t.data(), {t.shape(0), kv_heads, together * seqlen, t.shape(3)}, t.dtype(), t.device(),
                        {t.stride(0), together * t.stride(2), seqlen == 1 ? t.stride(2) : t.stride(1), t.stride(3)});
}

/// Rows are the queries of all heads that share keys, so that these are read once; their keys are divided among blocks.
void run_split(AttentionCall& call, const Tensor& q, const Tensor& o, const CacheOptions& cache, const AttentionOptions& options) {
  const std::int64_t batch = q.shape(0), seqlen_q = q.shape(1), heads = q.shape(2), kv_heads = call.k.shape(1);
  Tensor rows = q;
  if (!heads_follow(q)) {
    rows = by_head_workspace(q, call.stream);
    cast(q, rows, {.stream = call.stream});
  }
  call.q = as_rows(rows, kv_heads);
  call.split = true;
  call.heads_together = static_cast<int>(heads / kv_heads);
  call.queries = static_cast<int>(seqlen_q);
  call.splits = cache.num_splits > 0 ? cache.num_splits
                                     : decode_splits(static_cast<int>(batch * kv_heads), call.keys, kPartKeys,
                                                     std::max(1, device_info(call.stream.device()).units), kMostSplits);
  if (call.splits == 1 && heads_follow(o)) {
    call.o = as_rows(o, kv_heads);
    call.lse_stride_batch = heads * seqlen_q;
    call.lse_stride_head = heads / kv_heads * seqlen_q;
    return run(call);
  }
  const std::int64_t numbers = call.splits * o.numel(), dim = o.shape(3);
  const Tensor memory = workspace({numbers + numbers / dim}, DType::f32, call.stream);  // one: to ask for it takes the host a while
  const Tensor parts = Tensor::borrow(memory.data(), {call.splits, batch, heads, seqlen_q, dim}, DType::f32, o.device());
  const Tensor part_lse = Tensor::borrow(memory.data<float>() + numbers, {call.splits, batch, heads, seqlen_q}, DType::f32, o.device());
  call.partial = parts.reshape({call.splits * batch, kv_heads, heads / kv_heads * seqlen_q, dim});
  call.lse = part_lse.data<float>();
  call.lse_stride_batch = heads * seqlen_q;
  call.lse_stride_head = heads / kv_heads * seqlen_q;
  call.sink = nullptr;
  run(call);
  combine({.parts = parts, .part_lse = part_lse, .o = o, .lse = options.lse, .sink = options.sink}, call.stream);
}

}  // namespace

void attention_decode(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& o, const CacheOptions& cache,
                      const AttentionOptions& options) {
  Call call = check(q, k_cache, v_cache, o, cache, options);
  const Tensor turned = append_new(call, q, k_cache, v_cache, cache);
  if (o.numel() == 0 || call.attention.batch == 0) return;
  const Tensor gathered = call.attention.pages && !reads_pages(call.attention) ? gather_pages(call.attention) : Tensor();
  if (cache.cu_seqlens_q) return run(call.attention);  // where a sequence's queries end is not known here
  if (q.shape(1) * (q.shape(2) / k_cache.shape(2)) <= kMostRows) return run_split(call.attention, turned, o, cache, options);
  call.attention.q = turned.transpose(1, 2);
  run(call.attention);
}

}  // namespace tw
