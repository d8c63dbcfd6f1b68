#include "kernels/attention/decode.hpp"

#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>

#include "kernels/attention/append.hpp"
#include "kernels/attention/cache_contents.hpp"
#include "kernels/attention/combine.hpp"
#include "kernels/check.hpp"
#include "kernels/rows.hpp"
#include "tilewave/tile/math.tile.hpp"

namespace tw {

namespace {

using namespace kernels::attention;
using kernels::kLargestExtent;

constexpr const char* kOp = "attention_decode";
/// Combine's parts.
constexpr int kMostSplits = 128;
/// Rows of queries and heads of a group that a block of the main kernel has at most, and the fewest keys that are worth a part: about what
/// a block has in flight.
constexpr int kTileRows = 64, kPartKeys = 128;

/// A checked call.
struct Call {
  const Tensor &q, &k_cache, &v_cache, &o;
  const CacheOptions& cache;
  const AttentionOptions& options;
  CacheExtents extents;
  Stream stream;

  bool paged() const { return cache.block_table != nullptr; }
};

void check_tensors(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& o, bool paged) {
  const Device device = o.device();
  const DType dtype = q.dtype();
  require(dtype == DType::bf16 || dtype == DType::f16 || (dtype == DType::f32 && !device.is_cuda()),
          "{}: q is {}; bf16 and f16 are supported, and f32 on the CPU", kOp, q);
  struct Argument {
    const char* name;
    const Tensor& tensor;
    const char* what;
  };
  const char* const of_queries = "[batch, seqlen_q, heads, head_dim]";
  const char* const of_cache = paged ? "[pages, page_size, kv_heads, head_dim]" : "[cache_batch, capacity, kv_heads, head_dim]";
  const Argument arguments[] = {{"q", q, of_queries}, {"k_cache", k_cache, of_cache}, {"v_cache", v_cache, of_cache}, {"o", o, of_queries}};
  for (const auto& [name, tensor, what] : arguments) {
    require(tensor.rank() == 4, "{}: {} is {}; it must be {}", kOp, name, tensor, what);
    check_operand(kOp, name, tensor, dtype, device);
    kernels::check_extents(kOp, name, tensor);
    const std::int64_t dim = tensor.shape(3);
    require(dim >= 8 && dim <= 256 && dim % 8 == 0, "{}: {} is {}; its last dimension must be a multiple of 8 up to 256", kOp, name,
            tensor);
    require(tensor.stride(3) == 1, "{}: {} is {} with stride {} in its last dimension; it must be contiguous", kOp, name, tensor,
            tensor.stride(3));
  }
  check_output(kOp, "o", o);
  require(k_cache.shape(3) == q.shape(3), "{}: k_cache is {}; its head_dim must be q's, {}", kOp, k_cache, q.shape(3));
  for (int dim = 0; dim < 3; ++dim)
    require(v_cache.shape(dim) == k_cache.shape(dim), "{}: v_cache is {}; but for the last dimension it must have k_cache's shape, {}", kOp,
            v_cache, k_cache);
  const Shape of_o{q.shape(0), q.shape(1), q.shape(2), v_cache.shape(3)};
  require(o.shape() == of_o, "{}: o is {}; it must be [{}, {}, {}, {}]", kOp, o, of_o[0], of_o[1], of_o[2], of_o[3]);
  require(q.shape(2) == 0 || (k_cache.shape(2) > 0 && q.shape(2) % k_cache.shape(2) == 0),
          "{}: q has {} heads and k_cache {}; q's must be a multiple of k_cache's", kOp, q.shape(2), k_cache.shape(2));
  const std::int64_t rows = q.shape(0) * q.shape(1) * q.shape(2);
  // Counted with the heads of a last, incomplete tile, and for each of 128 parts.
  constexpr std::int64_t most = kLargestExtent / kMostSplits;
  require(q.shape(0) <= most && q.shape(0) * q.shape(1) <= most && rows <= most, "{}: q is {}, which is {} rows; they are limited to {}",
          kOp, q, rows, most);
  for (const Argument& argument : {arguments[0], arguments[1], arguments[2]})
    require(o.data() != argument.tensor.data() || o.numel() == 0 || argument.tensor.numel() == 0, "{}: o is {}'s memory", kOp,
            argument.name);
}

/// A vector of lengths, offsets or numbers.
void check_integers(const char* name, const Tensor* t, std::int64_t batch, Device device) {
  if (!t) return;
  check_operand(kOp, name, *t, DType::i32, device);
  require(t->shape() == Shape{batch} && t->is_contiguous(), "{}: {} is {}; it must be contiguous, i32[{}]", kOp, name, *t, batch);
}

void check_new_keys(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& o, const CacheOptions& cache,
                    std::int64_t capacity) {
  require(!cache.new_k == !cache.new_v, "{}: {} is given without {}; both are needed, or none", kOp, cache.new_k ? "new_k" : "new_v",
          cache.new_k ? "new_v" : "new_k");
  const Device device = o.device();
  if (cache.new_k) {
    require(cache.seqlens != nullptr, "{}: new_k is given without seqlens, which say where it goes", kOp);
    for (const auto& [name, tensor, into] : {std::tuple{"new_k", cache.new_k, &k_cache}, std::tuple{"new_v", cache.new_v, &v_cache}}) {
      check_operand(kOp, name, *tensor, q.dtype(), device);
      require(tensor->rank() == 4, "{}: {} is {}; it must be [batch, seqlen_new, kv_heads, head_dim]", kOp, name, *tensor);
      const std::int64_t seqlen_new = cache.new_k->shape(1);
      const Shape expected{q.shape(0), seqlen_new, into->shape(2), into->shape(3)};
      require(tensor->shape() == expected, "{}: {} is {}; it must be [{}, {}, {}, {}]", kOp, name, *tensor, expected[0], expected[1],
              expected[2], expected[3]);
      require(tensor->stride(3) == 1, "{}: {} is {} with stride {} in its last dimension; it must be contiguous", kOp, name, *tensor,
              tensor->stride(3));
      require(seqlen_new <= capacity, "{}: {} is {}; a sequence of the cache holds {} tokens", kOp, name, *tensor, capacity);
      check_output(kOp, into == &k_cache ? "k_cache" : "v_cache", *into);
    }
    require(k_cache.data() != v_cache.data() || k_cache.numel() == 0, "{}: v_cache is k_cache's memory", kOp);
  }
  require(!cache.rotary_cos == !cache.rotary_sin, "{}: {} is given without {}; both are needed, or none", kOp,
          cache.rotary_cos ? "rotary_cos" : "rotary_sin", cache.rotary_cos ? "rotary_sin" : "rotary_cos");
  if (!cache.rotary_cos) return;
  const Tensor &cos = *cache.rotary_cos, &sin = *cache.rotary_sin;
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

void check_options(const Tensor& q, const Tensor& o, const AttentionOptions& options) {
  const Device device = o.device();
  require(options.scale >= 0 && std::isfinite(options.scale),
          "{}: scale is {}; it must be positive and finite, or 0 for 1 / sqrt(head_dim)", kOp, options.scale);
  require(options.softcap >= 0 && std::isfinite(options.softcap), "{}: softcap is {}; it must be positive and finite, or 0 for none", kOp,
          options.softcap);
  constexpr int furthest = 1 << 30;
  require(!options.causal_offset || (*options.causal_offset >= -furthest && *options.causal_offset <= furthest),
          "{}: causal_offset is {}; it must lie within +-2^30", kOp, options.causal_offset.value_or(0));
  for (const auto& [name, window] : {std::pair{"window_left", options.window_left}, std::pair{"window_right", options.window_right}})
    require(window >= -1 && window <= furthest, "{}: {} is {}; it must be 0 to 2^30, or -1 for all", kOp, name, window);
  require(!options.mask, "{}: mask is given; it is not supported with a cache", kOp);
  if (options.alibi_slopes) {
    const Tensor& slopes = *options.alibi_slopes;
    check_operand(kOp, "alibi_slopes", slopes, DType::f32, device);
    require(slopes.shape() == Shape{q.shape(2)} || slopes.shape() == (Shape{q.shape(0), q.shape(2)}),
            "{}: alibi_slopes is {}; it must be f32[{}] or f32[{}, {}]", kOp, slopes, q.shape(2), q.shape(0), q.shape(2));
  }
  if (options.sink) {
    check_operand(kOp, "sink", *options.sink, DType::f32, device);
    require(options.sink->shape() == Shape{q.shape(2)} && options.sink->is_contiguous(), "{}: sink is {}; it must be contiguous, f32[{}]",
            kOp, *options.sink, q.shape(2));
  }
  if (options.lse) {
    check_operand(kOp, "lse", *options.lse, DType::f32, device);
    require(options.lse->shape() == Shape{q.shape(0), q.shape(2), q.shape(1)} && options.lse->is_contiguous(),
            "{}: lse is {}; it must be contiguous, f32[{}, {}, {}]", kOp, *options.lse, q.shape(0), q.shape(2), q.shape(1));
  }
}

Call check(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& o, const CacheOptions& cache,
           const AttentionOptions& options) {
  const Device device = o.device();
  check_tensors(q, k_cache, v_cache, o, cache.block_table != nullptr);
  CacheExtents extents;
  extents.batch = q.shape(0);
  extents.entries = k_cache.shape(0);
  extents.capacity = k_cache.shape(1);
  extents.seqlen_q = q.shape(1);
  extents.queries_advance = options.causal || options.window_left >= 0 || options.window_right >= 0;
  check_integers("seqlens", cache.seqlens, extents.batch, device);
  check_integers("batch_idx", cache.batch_idx, extents.batch, device);
  check_integers("leftpad", cache.leftpad, extents.batch, device);
  if (cache.block_table) {
    const Tensor& table = *cache.block_table;
    check_operand(kOp, "block_table", table, DType::i32, device);
    require(table.rank() == 2 && table.shape(0) == extents.batch && (table.stride(1) == 1 || table.shape(1) <= 1),
            "{}: block_table is {}; it must be i32[{}, pages], a sequence's pages side by side", kOp, table, extents.batch);
    require(!cache.batch_idx && !cache.leftpad, "{}: {} is given with a block_table; it is for a cache without pages", kOp,
            cache.batch_idx ? "batch_idx" : "leftpad");
    extents.page_size = k_cache.shape(1);
    require(extents.page_size > 0 && extents.page_size % 16 == 0, "{}: k_cache is {}; its page_size must be a multiple of 16", kOp,
            k_cache);
    require(table.shape(1) <= kLargestExtent / extents.page_size,
            "{}: block_table is {}; with pages of {} a sequence is limited to {} tokens", kOp, table, extents.page_size, kLargestExtent);
    extents.capacity = table.shape(1) * extents.page_size;
  } else {
    require(cache.batch_idx || extents.entries == extents.batch, "{}: k_cache is {}; without batch_idx its batch must be q's, {}", kOp,
            k_cache, extents.batch);
  }
  check_new_keys(q, k_cache, v_cache, o, cache, extents.capacity);
  extents.seqlen_new = cache.new_k ? cache.new_k->shape(1) : 0;
  check_options(q, o, options);
  require(cache.num_splits >= 0 && cache.num_splits <= kMostSplits,
          "{}: num_splits is {}; it must be 1 to {}, or 0 for a number that suits the device", kOp, cache.num_splits, kMostSplits);
  const Stream stream = options.stream ? *options.stream : Stream::standard(device);
  require(stream.device() == device, "{}: the stream is on {}, the tensors on {}", kOp, stream.device().name(), device.name());
  if (options.check_contents || !device.is_cuda()) check_cache_contents(kOp, cache, extents, stream);
  return {q, k_cache, v_cache, o, cache, options, extents, stream};
}

const std::int32_t* integers(const Tensor* t) { return t ? t->data<std::int32_t>() : nullptr; }

/// New keys and values into the cache; the queries, turned if there is a table.
Tensor append_new(const Call& call) {
  const CacheOptions& cache = call.cache;
  if (!cache.new_k) return call.q;
  AppendCall append;
  append.new_k = *cache.new_k;
  append.new_v = *cache.new_v;
  append.k_cache = call.k_cache;
  append.v_cache = call.v_cache;
  append.seqlens = integers(cache.seqlens);
  append.batch_idx = integers(cache.batch_idx);
  append.leftpad = integers(cache.leftpad);
  append.block_table = integers(cache.block_table);
  append.block_table_stride = call.paged() ? cache.block_table->stride(0) : 0;
  append.capacity = call.extents.capacity;
  append.rotary_cos = cache.rotary_cos;
  append.rotary_sin = cache.rotary_sin;
  append.pairing = cache.rotary_pairing;
  append.queries_advance = call.extents.queries_advance;
  append.q = call.q;
  append.turned_q = cache.rotary_cos ? Tensor::empty(call.q.shape(), call.q.dtype(), call.stream) : call.q;
  kernels::attention::append(append, call.stream);
  return append.turned_q;
}

DecodeCall decode_call(const Call& call, const Tensor& q) {
  const CacheOptions& cache = call.cache;
  DecodeCall decode;
  decode.q = q;
  decode.k_cache = call.k_cache;
  decode.v_cache = call.v_cache;
  decode.batch = static_cast<int>(q.shape(0));
  decode.seqlen_q = static_cast<int>(q.shape(1));
  decode.heads = static_cast<int>(q.shape(2));
  decode.head_dim = static_cast<int>(q.shape(3));
  decode.kv_heads = static_cast<int>(call.k_cache.shape(2));
  decode.value_dim = static_cast<int>(call.v_cache.shape(3));
  decode.group = decode.heads / decode.kv_heads;
  decode.seqlens = integers(cache.seqlens);
  decode.leftpad = integers(cache.leftpad);
  decode.batch_idx = integers(cache.batch_idx);
  decode.block_table = integers(cache.block_table);
  decode.block_table_stride = call.paged() ? cache.block_table->stride(0) : 0;
  decode.page_size = static_cast<int>(call.extents.page_size);
  decode.capacity = static_cast<int>(call.extents.capacity);
  decode.seqlen_new = static_cast<int>(call.extents.seqlen_new);
  decode.scale = call.options.scale > 0 ? call.options.scale : 1 / std::sqrt(static_cast<float>(decode.head_dim));
  decode.options = call.options;
  decode.stream = call.stream;
  const int rows = decode.seqlen_q * decode.group;
  const int tiles = decode.batch * decode.kv_heads * ceil_div(rows, kTileRows);
  decode.splits = cache.num_splits > 0
                      ? cache.num_splits
                      : decode_splits(tiles, decode.capacity, kPartKeys, std::max(1, device_info(call.stream.device()).units), kMostSplits);
  decode.parts = Tensor::empty({decode.splits, decode.batch, decode.kv_heads, rows, decode.value_dim}, DType::f32, call.stream);
  decode.part_lse = Tensor::empty({decode.splits, decode.batch, decode.kv_heads, rows}, DType::f32, call.stream);
  return decode;
}

}  // namespace

void attention_decode(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& o, const CacheOptions& cache,
                      const AttentionOptions& options) {
  const Call call = check(q, k_cache, v_cache, o, cache, options);
  const Tensor turned = append_new(call);
  if (o.numel() == 0) return;
  const DecodeCall decode = decode_call(call, turned);
  run_decode(decode);
  combine({.parts = decode.parts, .part_lse = decode.part_lse, .o = o, .lse = options.lse, .sink = options.sink}, call.stream);
}

}  // namespace tw
