#include <algorithm>
#include <tuple>
#include <utility>

#include "kernels/attention/cache.hpp"
#include "kernels/attention/call.hpp"
#include "kernels/attention/combine.hpp"
#include "kernels/attention/tuning.hpp"
#include "kernels/check.hpp"
#include "kernels/rows.hpp"
#include "kernels/workspace.hpp"
#include "tilewave/elementwise.hpp"

namespace tw {

namespace {

using namespace kernels::attention;
using detail::AttentionCall;
using kernels::workspace;

constexpr const char* kOp = "attention_decode";
/// Combine's parts.
constexpr int kMostSplits = 128;
/// Queries of the heads that share keys that are one tile, whose keys are divided.
constexpr std::int64_t kMostRows = 64;
constexpr std::int64_t kMostKeys = std::int64_t{1} << 29;

void check_new_keys(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& o, const CacheOptions& cache,
                    AttentionCall& call) {
  require(!cache.new_k == !cache.new_v, "{}: {} is given without {}; both are needed, or none", kOp, cache.new_k ? "new_k" : "new_v",
          cache.new_k ? "new_v" : "new_k");
  const Device device = o.device();
  require(!cache.cu_seqlens_new || cache.new_k, "{}: cu_seqlens_new is given without new_k", kOp);
  const bool packed = cache.cu_seqlens_new != nullptr;
  call.cu_added = check_integers(kOp, "cu_seqlens_new", cache.cu_seqlens_new, call.batch + 1, device);
  if (cache.new_k) {
    require(cache.seqlens != nullptr, "{}: new_k is given without seqlens, which say where it goes", kOp);
    for (const auto& [name, tensor, into] : {std::tuple{"new_k", cache.new_k, &k_cache}, std::tuple{"new_v", cache.new_v, &v_cache}}) {
      check_operand(kOp, name, *tensor, q.dtype(), device);
      require(tensor->rank() == (packed ? 3 : 4), "{}: {} is {}; it must be {}", kOp, name, *tensor,
              packed ? "[total_new, kv_heads, head_dim], with cu_seqlens_new" : "[batch, seqlen_new, kv_heads, head_dim]");
      const std::int64_t seqlen_new = cache.new_k->shape(packed ? 0 : 1);
      Shape expected{call.batch, seqlen_new, into->shape(2), into->shape(3)};
      if (packed) expected.erase(expected.begin());
      require(tensor->shape() == expected, "{}: {} is {}; it must be [{}]", kOp, name, *tensor, tw::join(expected, ", "));
      const std::int64_t step = tensor->stride(tensor->rank() - 1);
      require(step == 1, "{}: {} is {} with stride {} in its last dimension; it must be contiguous", kOp, name, *tensor, step);
      kernels::check_extents(kOp, name, *tensor);
      require(packed || seqlen_new <= call.keys, "{}: {} is {}; a sequence of the cache holds {} tokens", kOp, name, *tensor, call.keys);
      check_output(kOp, into == &k_cache ? "k_cache" : "v_cache", *into);
    }
    call.keys_added = static_cast<int>(cache.new_k->shape(packed ? 0 : 1));
  }
  require(!cache.rotary_cos == !cache.rotary_sin, "{}: {} is given without {}; both are needed, or none", kOp,
          cache.rotary_cos ? "rotary_cos" : "rotary_sin", cache.rotary_cos ? "rotary_sin" : "rotary_cos");
  if (!cache.rotary_cos) return;
  const Tensor &cos = *cache.rotary_cos, &sin = *cache.rotary_sin;
  require(!cache.cu_seqlens_q && !cache.cu_seqlens_new, "{}: rotary_cos is given with {}; packed tokens are rotated by rope()", kOp,
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

/// Waits for the stream, reads lengths, sequence and page numbers, and throws InvalidArgument for the first one that leads outside the
/// cache or the rotary table. Of the block table only the pages that a sequence uses.
void check_contents(const AttentionCall& call, const CacheOptions& cache) {
  call.stream.synchronize();
  const auto on_host = [](const Tensor* t) { return t ? t->to(Device::cpu()) : Tensor(); };
  const auto value = [](const Tensor& t, std::int64_t at) { return std::int64_t{t.data<std::int32_t>()[at]}; };
  const Tensor seqlens = on_host(cache.seqlens), batch_idx = on_host(cache.batch_idx), leftpad = on_host(cache.leftpad);
  const Tensor block_table = on_host(cache.block_table), cu_new = on_host(cache.cu_seqlens_new);
  const std::int64_t capacity = call.keys, entries = call.k.shape(0), rows = cache.block_table ? call.page_tables : entries;
  if (cache.cu_seqlens_q) check_offsets(kOp, "cu_seqlens_q", *cache.cu_seqlens_q, call.q.shape(2), "queries");
  if (cache.cu_seqlens_new) check_offsets(kOp, "cu_seqlens_new", *cache.cu_seqlens_new, call.keys_added, "new keys");
  for (std::int64_t b = 0; b < call.batch; ++b) {
    const std::int64_t added = cache.cu_seqlens_new ? value(cu_new, b + 1) - value(cu_new, b) : call.keys_added;
    const std::int64_t seqlen = cache.seqlens ? value(seqlens, b) : capacity, all = seqlen + added;
    require(seqlen >= 0 && all <= capacity, "{}: seqlens[{}] is {}; with {} new tokens it must be 0 to {}, so that the cache holds all",
            kOp, b, seqlen, added, capacity - added);
    const std::int64_t row = cache.batch_idx ? value(batch_idx, b) : b;
    require(row >= 0 && row < rows, "{}: batch_idx[{}] is {}; it must be 0 to {}, one of {}", kOp, b, row, rows - 1,
            cache.block_table ? "the block table's rows" : "the cache's sequences");
    const std::int64_t pad = cache.leftpad ? value(leftpad, b) : 0;
    require(pad >= 0 && pad <= seqlen, "{}: leftpad[{}] is {}; it must be 0 to {}, the sequence's length", kOp, b, pad, seqlen);
    if (cache.rotary_cos) {
      const std::int64_t positions = cache.rotary_cos->shape(0), rotated = queries_advance(call) ? call.q.shape(2) : 1;
      const std::int64_t needed = seqlen - pad + std::max<std::int64_t>(call.keys_added, rotated);
      require(needed <= positions, "{}: rotary_cos has {} positions; sequence {} needs {}, with seqlens {} and leftpad {}", kOp, positions,
              b, needed, seqlen, pad);
    }
    for (std::int64_t page = 0; cache.block_table && page * call.page_size < all; ++page) {
      const std::int64_t number = value(block_table, row * block_table.shape(1) + page);
      require(number >= 0 && number < entries, "{}: block_table[{}, {}] is {}; it must be 0 to {}, one of the cache's pages", kOp, row,
              page, number, entries - 1);
    }
  }
}

/// Checked, and new keys still to be appended.
AttentionCall check(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& o, const CacheOptions& cache,
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
  AttentionCall call = check_common({kOp, "k_cache", "v_cache"}, packed ? as_batch(q) : q, k_cache, v_cache, packed ? as_batch(o) : o,
                                    batch, lse_shape, options);
  require(!options.mask, "{}: mask is given; it is not supported with a cache", kOp);
  const std::int64_t rows = q.shape(0) * q.shape(1) * (packed ? 1 : q.shape(2));
  constexpr std::int64_t most = (std::int64_t{1} << 29) / kMostSplits;  // counted for each part
  require(rows <= most, "{}: q is {}, which is {} rows; they are limited to {}", kOp, q, rows, most);

  const auto integers = [&](const char* name, const Tensor* t, std::int64_t size) {
    return check_integers(kOp, name, t, size, o.device());
  };
  call.used_k = integers("seqlens", cache.seqlens, batch);
  call.k_batch = integers("batch_idx", cache.batch_idx, batch);
  call.k_begin = integers("leftpad", cache.leftpad, batch);
  call.cu_q = integers("cu_seqlens_q", cache.cu_seqlens_q, batch + 1);
  if (paged) {
    const Tensor& table = *cache.block_table;
    const std::int64_t page_size = k_cache.shape(1);
    check_operand(kOp, "block_table", table, DType::i32, o.device());
    require(table.rank() == 2 && (cache.batch_idx || table.shape(0) == batch) && (table.stride(1) == 1 || table.shape(1) <= 1),
            "{}: block_table is {}; it must be i32[{}, pages], or with batch_idx i32[tables, pages], a sequence's pages side by side", kOp,
            table, batch);
    require(page_size > 0, "{}: k_cache is {}; its page_size must be 1 or more", kOp, k_cache);
    require(batch == 0 || table.shape(0) > 0, "{}: block_table is {}; it must have a sequence", kOp, table);
    require(table.shape(1) <= kMostKeys / page_size, "{}: block_table is {}; with pages of {} a sequence is limited to {} tokens", kOp,
            table, page_size, kMostKeys);
    call.keys = static_cast<int>(table.shape(1) * page_size);
    call.pages = table.data<std::int32_t>();
    call.pages_stride = table.stride(0);
    call.page_tables = static_cast<int>(table.shape(0));
    call.page_size = static_cast<int>(page_size);
  } else {
    require(cache.batch_idx || k_cache.shape(0) == batch, "{}: k_cache is {}; without batch_idx its batch must be that of {}, {}", kOp,
            k_cache, packed ? "cu_seqlens_q" : "q", batch);
  }
  check_new_keys(q, k_cache, v_cache, o, cache, call);
  check_memory(q, k_cache, v_cache, o, cache, options);
  require(cache.num_splits >= 0 && cache.num_splits <= kMostSplits,
          "{}: num_splits is {}; it must be 1 to {}, or 0 for a number that suits the device", kOp, cache.num_splits, kMostSplits);
  if (options.check_contents || !o.device().is_cuda()) check_contents(call, cache);
  return call;
}

/// A tensor [batch, seqlen, heads, dim] whose memory is [batch, heads, seqlen, dim].
Tensor by_head_workspace(const Tensor& like, const Stream& stream) {
  return workspace({like.shape(0), like.shape(2), like.shape(1), like.shape(3)}, like.dtype(), stream).transpose(1, 2);
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
  call.splits = cache.num_splits > 0 ? cache.num_splits : tuned_splits(call, static_cast<int>(call.q.shape(2)));
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
  AttentionCall call = check(q, k_cache, v_cache, o, cache, options);
  Tensor rotated = q;
  if (cache.new_k) {
    if (cache.rotary_cos && q.numel() > 0) rotated = by_head_workspace(q, call.stream);
    append(call, cache, rotated);
  }
  if (o.numel() == 0 || call.batch == 0) return;
  const Tensor gathered = call.pages && !reads_pages(call) ? gather_pages(call) : Tensor();
  if (cache.cu_seqlens_q) return run(call);  // where a sequence's queries end is not known here
  if (q.shape(1) * (q.shape(2) / k_cache.shape(2)) <= kMostRows) return run_split(call, rotated, o, cache, options);
  call.q = rotated.transpose(1, 2);
  run(call);
}

}  // namespace tw
