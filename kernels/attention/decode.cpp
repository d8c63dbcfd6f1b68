#include <algorithm>

#include "kernels/attention/call.hpp"
#include "kernels/attention/variants.hpp"
#include "kernels/rows.hpp"
#include "kernels/workspace.hpp"
#include "tilewave/elementwise.hpp"

namespace tw {

namespace {

using namespace kernels::attention;
using kernels::workspace;

constexpr const char* kOp = "attention_decode";
/// Queries of the heads that share keys that are one tile, whose keys are divided.
constexpr std::int64_t kTileRows = 64;
constexpr std::int64_t kMostKeys = std::int64_t{1} << 29;

/// Where the cache's pages are.
void check_pages(const Form& form, AttentionCall& call, const Tensor& k_cache, const CacheOptions& cache) {
  const Tensor& table = *cache.block_table;
  const std::int64_t page_size = k_cache.shape(1);
  check_operand(kOp, "block_table", table, DType::i32, k_cache.device());
  form.require(table.rank() == 2 && (cache.batch_idx || table.shape(0) == call.batch) && (table.stride(1) == 1 || table.shape(1) <= 1),
               "block_table is {}; it must be i32[{}, pages], or with batch_idx i32[tables, pages], a sequence's pages side by side", table,
               call.batch);
  form.require(page_size > 0, "k_cache is {}; its page_size must be 1 or more", k_cache);
  form.require(call.batch == 0 || table.shape(0) > 0, "block_table is {}; it must have a sequence", table);
  form.require(table.shape(1) <= kMostKeys / page_size, "block_table is {}; with pages of {} a sequence is limited to {} tokens", table,
               page_size, kMostKeys);
  call.keys = static_cast<int>(table.shape(1) * page_size);
  call.pages = table.data<std::int32_t>();
  call.pages_stride = table.stride(0);
  call.page_tables = static_cast<int>(table.shape(0));
  call.page_size = static_cast<int>(page_size);
}

void check_both(const Form& form, const NamedTensor& a, const NamedTensor& b) {
  form.require(!a.tensor == !b.tensor, "{} is given without {}; both are needed, or none", a.tensor ? a.name : b.name,
               a.tensor ? b.name : a.name);
}

void check_new_keys(const Form& form, AttentionCall& call, const NamedTensor& k_cache, const NamedTensor& v_cache,
                    const CacheOptions& cache) {
  const bool packed = cache.cu_seqlens_new != nullptr;
  form.require(cache.seqlens != nullptr, "new_k is given without seqlens, which say where it goes");
  for (const auto& [name, t, into] : {std::tuple{"new_k", cache.new_k, k_cache}, std::tuple{"new_v", cache.new_v, v_cache}}) {
    check_operand(kOp, name, *t, call.q.dtype(), call.o.device());
    form.require(t->rank() == (packed ? 3 : 4), "{} is {}; it must be {}", name, *t,
                 packed ? "[total_new, kv_heads, head_dim], with cu_seqlens_new" : "[batch, seqlen_new, kv_heads, head_dim]");
    call.keys_added = static_cast<int>(cache.new_k->shape(packed ? 0 : 1));
    Shape expected{call.batch, call.keys_added, into.tensor->shape(2), into.tensor->shape(3)};
    if (packed) expected.erase(expected.begin());
    form.require(t->shape() == expected, "{} is {}; it must be [{}]", name, *t, tw::join(expected, ", "));
    form.require(t->stride(-1) == 1, "{} is {} with stride {} in its last dimension; it must be contiguous", name, *t, t->stride(-1));
    kernels::check_extents(kOp, name, *t);
    form.require(packed || call.keys_added <= call.keys, "{} is {}; a sequence of the cache holds {} tokens", name, *t, call.keys);
    check_output(kOp, into.name, *into.tensor);
  }
}

void check_rotary(const Form& form, const AttentionCall& call, const CacheOptions& cache) {
  const Tensor &cos = *cache.rotary_cos, &sin = *cache.rotary_sin;
  const DType dtype = call.q.dtype();
  const std::int64_t head_dim = call.q.shape(3);
  form.require(!cache.cu_seqlens_q && !cache.cu_seqlens_new, "rotary_cos is given with {}; packed tokens are rotated by rope()",
               cache.cu_seqlens_q ? "cu_seqlens_q" : "cu_seqlens_new");
  form.require(call.keys_added > 0, "rotary_cos is given without new keys, whose positions it is for");
  form.require(!call.descaled, "rotary_cos is given; it is not supported with q of fp8_e4m3");
  form.require(cos.dtype() == dtype || cos.dtype() == DType::f32, "rotary_cos is {}; it must be of q's dtype, {}, or f32", cos,
               name_of(dtype));
  check_operand(kOp, "rotary_cos", cos, cos.dtype(), call.o.device());
  check_operand(kOp, "rotary_sin", sin, cos.dtype(), call.o.device());
  form.require(cos.rank() == 2 && cos.shape(0) > 0 && cos.shape(1) > 0 && 2 * cos.shape(1) <= head_dim,
               "rotary_cos is {}; it must be [positions, rotary_dim / 2], with positions and a rotary_dim of 2 to {}", cos, head_dim);
  kernels::check_extents(kOp, "rotary_cos", cos);
  form.require(sin.shape() == cos.shape(), "rotary_sin is {}; it must have rotary_cos's shape, {}", sin, cos);
}

/// Reads lengths, sequence and page numbers, and throws InvalidArgument for the first one that leads outside the cache or the rotary table.
/// Of the block table only the pages that a sequence uses.
void check_contents(const Form& form, const AttentionCall& call, const CacheOptions& cache) {
  const auto on_host = [](const Tensor* t) { return t ? t->to(Device::cpu()) : Tensor(); };
  const auto value = [](const Tensor& t, std::int64_t at, std::int64_t otherwise) {
    return t.data() ? std::int64_t{t.data<std::int32_t>()[at]} : otherwise;
  };
  const Tensor seqlens = on_host(cache.seqlens), batch_idx = on_host(cache.batch_idx), leftpad = on_host(cache.leftpad);
  const Tensor block_table = on_host(cache.block_table), cu_new = on_host(cache.cu_seqlens_new);
  const std::int64_t capacity = call.keys, entries = call.k.shape(0), rows = call.pages ? call.page_tables : entries;
  if (cache.cu_seqlens_q) check_offsets(form, {"cu_seqlens_q", cache.cu_seqlens_q}, call.q.shape(2), "queries", {}, call.mask_queries);
  if (cache.cu_seqlens_new) check_offsets(form, {"cu_seqlens_new", cache.cu_seqlens_new}, call.keys_added, "new keys");
  for (std::int64_t b = 0; b < call.batch; ++b) {
    const std::int64_t added = value(cu_new, b + 1, call.keys_added) - value(cu_new, b, 0);
    const std::int64_t seqlen = value(seqlens, b, capacity), row = value(batch_idx, b, b), pad = value(leftpad, b, 0);
    form.require(seqlen >= 0 && seqlen + added <= capacity,
                 "seqlens[{}] is {}; with {} new tokens it must be 0 to {}, so that the cache holds all", b, seqlen, added,
                 capacity - added);
    form.require(row >= 0 && row < rows, "batch_idx[{}] is {}; it must be 0 to {}, one of {}", b, row, rows - 1,
                 call.pages ? "the block table's rows" : "the cache's sequences");
    form.require(pad >= 0 && pad <= seqlen, "leftpad[{}] is {}; it must be 0 to {}, the sequence's length", b, pad, seqlen);
    if (cache.rotary_cos) {
      const std::int64_t positions = cache.rotary_cos->shape(0), rotated = queries_advance(call) ? call.q.shape(2) : 1;
      const std::int64_t needed = seqlen - pad + std::max<std::int64_t>(call.keys_added, rotated);
      form.require(needed <= positions, "rotary_cos has {} positions; sequence {} needs {}, with seqlens {} and leftpad {}", positions, b,
                   needed, seqlen, pad);
    }
    for (std::int64_t page = 0; call.pages && page * call.page_size < seqlen + added; ++page) {
      const std::int64_t number = value(block_table, row * block_table.shape(1) + page, 0);
      form.require(number >= 0 && number < entries, "block_table[{}, {}] is {}; it must be 0 to {}, one of the cache's pages", row, page,
                   number, entries - 1);
    }
  }
}

}  // namespace

AttentionCall kernels::attention::check_decode(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o,
                                               const CacheOptions& cache, const AttentionOptions& options) {
  const NamedTensor k_cache{"k_cache", &k}, v_cache{"v_cache", &v}, seqlens{"seqlens", cache.seqlens};
  const NamedTensor batch_idx{"batch_idx", cache.batch_idx}, leftpad{"leftpad", cache.leftpad};
  const NamedTensor block_table{"block_table", cache.block_table}, cu_seqlens_q{"cu_seqlens_q", cache.cu_seqlens_q};
  const NamedTensor cu_seqlens_new{"cu_seqlens_new", cache.cu_seqlens_new}, new_k{"new_k", cache.new_k}, new_v{"new_v", cache.new_v};
  const NamedTensor cos{"rotary_cos", cache.rotary_cos}, sin{"rotary_sin", cache.rotary_sin};
  const auto inputs = {seqlens, batch_idx, leftpad, block_table, cu_seqlens_q, cu_seqlens_new, new_k, new_v, cos, sin};
  const bool packed = cache.cu_seqlens_q != nullptr, paged = cache.block_table != nullptr;
  const Form form{.op = kOp,
                  .q_dims = packed ? "[total_q, heads, head_dim], with cu_seqlens_q" : "[batch, seqlen_q, heads, head_dim]",
                  .kv_dims = paged ? "[pages, page_size, kv_heads, head_dim]" : "[cache_batch, capacity, kv_heads, head_dim]",
                  .k = k_cache.name,
                  .v = v_cache.name,
                  .cu_seqlens_q = cache.cu_seqlens_q,
                  .without_dropout = "a cache",
                  .cache = true,
                  .f32_on_gpu = !packed,
                  .fp8 = true};
  AttentionCall call = check_common(form, q, k, v, o, options, inputs);
  const std::int64_t rows = call.q.numel() / call.q.shape(3), most = (std::int64_t{1} << 29) / kMostSplits;  // counted for each part
  form.require(rows <= most, "q is {}, which is {} rows; they are limited to {}", q, rows, most);
  const auto integers = [&](const NamedTensor& t, std::int64_t size) { return form.elements<std::int32_t>(t, {size}, o.device()); };
  call.used_k = integers(seqlens, call.batch);
  call.k_batch = integers(batch_idx, call.batch);
  call.k_begin = integers(leftpad, call.batch);
  call.cu_added = integers(cu_seqlens_new, call.batch + 1);
  if (paged) check_pages(form, call, k, cache);
  form.require(paged || cache.batch_idx || k.shape(0) == call.batch, "k_cache is {}; without batch_idx its batch must be that of {}, {}", k,
               packed ? "cu_seqlens_q" : "q", call.batch);
  if (options.mask) check_mask(form, call, *options.mask);
  if (options.blocks) check_blocks(form, call, *options.blocks);
  check_both(form, new_k, new_v);
  form.require(!cache.cu_seqlens_new || cache.new_k, "cu_seqlens_new is given without new_k");
  if (cache.new_k) {
    check_new_keys(form, call, k_cache, v_cache, cache);
    for (const NamedTensor& written : {k_cache, v_cache}) {
      check_disjoint(kOp, written, inputs);
      check_disjoint(
          kOp, written,
          {{"q", &q}, {"qv", options.qv}, {"alibi_slopes", options.alibi_slopes}, {"sink", options.sink}, {"mask", options.mask}});
      check_disjoint(kOp, written, {{"q_descale", options.q_descale}, {"k_descale", options.k_descale}, {"v_descale", options.v_descale}});
      if (const AttentionBlocks* const blocks = options.blocks)
        check_disjoint(kOp, written,
                       {{"blocks.mask", blocks->mask}, {"blocks.indices", blocks->indices}, {"blocks.counts", blocks->counts}});
    }
    check_disjoint(kOp, v_cache, {k_cache});
  }
  check_both(form, cos, sin);
  if (cache.rotary_cos) check_rotary(form, call, cache);
  form.require(cache.num_splits >= 0 && cache.num_splits <= kMostSplits,
               "num_splits is {}; it must be 1 to {}, or 0 for a number that suits the device", cache.num_splits, kMostSplits);
  if (contents_are_checked(call, options)) check_contents(form, call, cache);
  return call;
}

namespace {

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
void run_split(AttentionCall& call, const Tensor& q, const Tensor& o, int splits, const AttentionOptions& options) {
  const auto rows_of = [&](const Tensor& t) {
    if (t.numel() == 0 || heads_follow(t)) return t;
    const Tensor rows = by_head_workspace(t, call.stream);
    cast(t, rows, {.stream = call.stream});
    return rows;
  };
  const Tensor rows = rows_of(q), qv_rows = options.qv ? rows_of(*options.qv) : Tensor();
  share_keys(call, rows, qv_rows);
  const bool few = heads_follow(o) && takes_few_queries(call);
  call.splits = few ? 1 : splits;
  if (call.splits == 1 && heads_follow(o)) {
    call.o = as_rows(o, call.k.shape(1));
    return few ? run_few_queries_on_cpu(call) : run(call);
  }
  const std::int64_t numbers = call.splits * o.numel(), dim = o.shape(3);
  const Tensor memory = workspace({numbers + numbers / dim}, DType::f32, call.stream);  // one: to ask for it takes the host a while
  const Shape shape{call.splits, q.shape(0), q.shape(2), q.shape(1)};
  const Tensor parts = Tensor::borrow(memory.data(), {shape[0], shape[1], shape[2], shape[3], dim}, DType::f32, o.device());
  const Tensor part_lse = Tensor::borrow(memory.data<float>() + numbers, shape, DType::f32, o.device());
  call.partial = parts.reshape({shape[0] * shape[1], call.q.shape(1), call.q.shape(2), dim});
  call.lse = part_lse.data<float>();
  call.sink = nullptr;
  run(call);
  combine({.parts = parts, .part_lse = part_lse, .o = o, .lse = options.lse, .sink = options.sink}, call.stream);
}

}  // namespace

void kernels::attention::share_keys(AttentionCall& call, const Tensor& q, const Tensor& qv) {
  call.q = as_rows(q, call.k.shape(1));
  if (qv.numel() > 0) call.qv = as_rows(qv, call.k.shape(1));
  call.split = true;
  call.heads_together = static_cast<int>(q.shape(2) / call.k.shape(1));
  call.queries = static_cast<int>(q.shape(1));
  call.lse_stride_batch = q.shape(1) * q.shape(2);
  call.lse_stride_head = call.q.shape(2);
}

void kernels::attention::run_decode(AttentionCall call, const Tensor& q, const Tensor& o, const CacheOptions& cache,
                                    const AttentionOptions& options, DecodeWith with) {
  Tensor rotated = q;
  if (cache.new_k) {
    if (cache.rotary_cos && q.numel() > 0) rotated = by_head_workspace(q, call.stream);
    append(call, cache, rotated);
  }
  if (o.numel() == 0 || call.batch == 0) return;
  if (with == DecodeWith::f32_products) return run_decode_in_f32(call, cache, rotated);
  const Tensor gathered = call.descaled || (call.pages && !reads_pages(call)) ? gather_tokens(call) : Tensor();
  if (call.descaled) {
    widen(call);
    rotated = call.q.transpose(1, 2);
  }
  if (cache.cu_seqlens_q) return run(call);  // where a sequence's queries end is not known here
  const std::int64_t rows = q.shape(1) * (q.shape(2) / call.k.shape(1));
  // Of more rows than one tile has, the keys are divided only where there are too few tiles for the device.
  const int splits = cache.num_splits > 0 ? cache.num_splits : tuned_splits(call, static_cast<int>(rows));
  if (rows <= kTileRows || (splits > 1 && !call.blocks)) return run_split(call, rotated, o, splits, options);
  call.q = rotated.transpose(1, 2);
  run(call);
}

void attention_decode(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& o, const CacheOptions& cache,
                      const AttentionOptions& options) {
  const AttentionCall call = check_decode(q, k_cache, v_cache, o, cache, options);
  const bool f32_on_gpu = call.q.dtype() == DType::f32 && call.stream.device().is_cuda();
  const detail::ScopedSmMargin margin(call.sm_margin);
  run_decode(call, q, o, cache, options, f32_on_gpu ? DecodeWith::f32_products : DecodeWith::kernel);
}

int decode_plan(const DecodeProblem& problem, Device device) {
  constexpr const char* kPlan = "decode_plan";
  for (const auto& [name, value] : {std::pair{"batch", problem.batch},
                                    {"seqlen_q", problem.seqlen_q},
                                    {"heads", problem.heads},
                                    {"kv_heads", problem.kv_heads},
                                    {"seqlen_k", problem.seqlen_k},
                                    {"attention_chunk", std::int64_t{problem.attention_chunk}},
                                    {"sm_margin", std::int64_t{problem.sm_margin}}})
    require(value >= 0 && value <= kMostKeys, "{}: {} is {}; it must be 0 to 2^29", kPlan, name, value);
  require(problem.heads == 0 || (problem.kv_heads > 0 && problem.heads % problem.kv_heads == 0),
          "{}: heads is {}; it must be a multiple of kv_heads, {}", kPlan, problem.heads, problem.kv_heads);
  const int sms = std::max(1, device_info(device).units), margin = device.is_cuda() ? problem.sm_margin : 0;
  require(margin < sms, "{}: sm_margin is {}; it must be less than the {} SMs of {}", kPlan, margin, sms, device.name());
  const std::int64_t sequences = problem.batch * problem.kv_heads;
  require(sequences <= kMostKeys, "{}: batch is {} and kv_heads {}; their product is limited to 2^29", kPlan, problem.batch,
          problem.kv_heads);
  if (problem.heads == 0) return 1;
  const std::int64_t rows = problem.seqlen_q * (problem.heads / problem.kv_heads);
  return planned_splits(sequences, rows, problem.seqlen_k, problem.attention_chunk, sms - margin);
}

}  // namespace tw
