#include "tilewave/indexer.hpp"

#include <algorithm>

#include "kernels/check.hpp"
#include "kernels/indexer/kernels.hpp"
#include "kernels/rows.hpp"

namespace tw {

namespace {

using kernels::check_extents;
using kernels::kLargestExtent;
using kernels::indexer::Call;

constexpr int kMostSplits = 1024;

void check_contiguous_columns(const char* op, const char* name, const Tensor& t) {
  require(t.stride(-1) == 1 || t.shape(-1) <= 1, "{}: {} is {} with stride {} in its last dimension; it must be contiguous", op, name, t,
          t.stride(-1));
  check_extents(op, name, t);
}

void check_num_splits(const char* op, int num_splits) {
  require(num_splits >= 0 && num_splits <= kMostSplits, "{}: num_splits is {}; it must be 1 to {}, or 0 for a number that suits the device",
          op, num_splits, kMostSplits);
}

/// An i32 vector, or null.
const std::int32_t* integers(const char* op, const char* name, const Tensor* t, std::int64_t count, Device device) {
  if (!t) return nullptr;
  check_operand(op, name, *t, DType::i32, device);
  require(t->shape() == Shape{count} && t->is_contiguous(), "{}: {} is {}; it must be i32[{}], contiguous", op, name, *t, count);
  return t->data<std::int32_t>();
}

Call check(const Tensor& q, const Tensor& k, const Tensor& weights, const Tensor& scores, const IndexerOptions& options) {
  constexpr const char* op = "indexer_scores";
  const Device device = scores.device();
  const bool fp8 = q.dtype() == DType::fp8_e4m3;
  require(fp8 || q.dtype() == DType::bf16 || q.dtype() == DType::f16, "{}: q is {}; fp8_e4m3, bf16 and f16 are supported", op, q);
  check_operand(op, "q", q, q.dtype(), device);
  check_operand(op, "k", k, q.dtype(), device);
  check_operand(op, "weights", weights, DType::f32, device);
  check_operand(op, "scores", scores, DType::f32, device);
  require(q.rank() == 3 && q.shape(1) >= 1 && q.shape(1) <= kIndexerHeads && q.shape(2) == kIndexerDim,
          "{}: q is {}; it must be [queries, heads, {}], with 1 to {} heads", op, q, kIndexerDim, kIndexerHeads);
  require(k.rank() == 2 && k.shape(1) == kIndexerDim, "{}: k is {}; it must be [keys, {}]", op, k, kIndexerDim);
  const std::int64_t queries = q.shape(0), keys = k.shape(0);
  require(weights.shape() == Shape{queries, q.shape(1)}, "{}: weights is {}; for q {} it must be f32[{}, {}]", op, weights, q, queries,
          q.shape(1));
  require(scores.shape() == Shape{queries, keys}, "{}: scores is {}; it must be f32[{}, {}]", op, scores, queries, keys);
  check_contiguous_columns(op, "q", q);
  check_contiguous_columns(op, "k", k);
  check_contiguous_columns(op, "scores", scores);
  check_num_splits(op, options.num_splits);
  Call call{.q = q, .k = k, .weights = weights, .scores = scores};
  require((options.k_scale != nullptr) == fp8, "{}: q is {}, {}", op, q,
          fp8 ? "but k_scale is missing; keys of fp8_e4m3 need scales" : "but there is a k_scale; only keys of fp8_e4m3 have scales");
  if (fp8) {
    const Tensor& scale = *options.k_scale;
    check_operand(op, "k_scale", scale, DType::f32, device);
    require(scale.shape() == Shape{keys} && scale.is_contiguous(), "{}: k_scale is {}; it must be f32[{}], contiguous", op, scale, keys);
    call.scales = Tensor::borrow(scale.data(), {1, keys}, DType::f32, device);
  }
  call.starts = integers(op, "starts", options.starts, queries, device);
  call.ends = integers(op, "ends", options.ends, queries, device);
  check_output(op, "scores", scores);
  check_disjoint(
      op, {"scores", &scores},
      {{"q", &q}, {"k", &k}, {"weights", &weights}, {"k_scale", options.k_scale}, {"starts", options.starts}, {"ends", options.ends}});
  call.queries = static_cast<int>(queries);
  call.keys = static_cast<int>(keys);
  call.causal = options.causal;
  call.clear = options.clear;
  call.splits = options.num_splits;
  call.stream = checked_stream(op, options.stream, device);
  return call;
}

/// The first two dimensions as one. They need not follow each other in memory if one of them is 1.
Tensor flat(const char* op, const char* name, const Tensor& t) {
  const std::int64_t batch = t.shape(0), count = t.shape(1);
  require(batch <= 1 || count <= 1 || t.stride(0) == count * t.stride(1),
          "{}: {} is {} with strides [{}]; the queries of all sequences must be equally far apart", op, name, t,
          tw::join(t.strides(), ", "));
  Shape shape{batch * count}, strides{count <= 1 ? t.stride(0) : t.stride(1)};
  for (std::size_t dim = 2; dim < t.shape().size(); ++dim) {
    shape.push_back(t.shape()[dim]);
    strides.push_back(t.strides()[dim]);
  }
  return Tensor::borrow(t.data(), shape, t.dtype(), t.device(), strides);
}

Call check_paged(const Tensor& q, const Tensor& k_cache, const Tensor& weights, const Tensor& block_table, const Tensor& scores,
                 const IndexerPagedOptions& options) {
  constexpr const char* op = "indexer_scores_paged";
  const Device device = scores.device();
  require(q.dtype() == DType::fp8_e4m3, "{}: q is {}; fp8_e4m3 is supported", op, q);
  check_operand(op, "q", q, q.dtype(), device);
  require(k_cache.dtype() == DType::u8 || k_cache.dtype() == DType::fp8_e4m3, "{}: k_cache is {}; it must be u8 or fp8_e4m3", op, k_cache);
  check_operand(op, "k_cache", k_cache, k_cache.dtype(), device);
  check_operand(op, "weights", weights, DType::f32, device);
  check_operand(op, "block_table", block_table, DType::i32, device);
  check_operand(op, "scores", scores, DType::f32, device);
  require(q.rank() == 4 && q.shape(2) >= 1 && q.shape(2) <= kIndexerHeads && q.shape(3) == kIndexerDim,
          "{}: q is {}; it must be [batch, seqlen_q, heads, {}], with 1 to {} heads", op, q, kIndexerDim, kIndexerHeads);
  const std::int64_t batch = q.shape(0), queries = q.shape(1);
  const Shape page{k_cache.rank() > 0 ? k_cache.shape(0) : 0, kIndexerPage, kIndexerKeyBytes};
  require(k_cache.shape() == page, "{}: k_cache is {}; it must be [pages, {}, {}]", op, k_cache, kIndexerPage, kIndexerKeyBytes);
  require(k_cache.stride(2) == 1 && k_cache.stride(1) == kIndexerKeyBytes && k_cache.stride(0) % 4 == 0 &&
              reinterpret_cast<std::uintptr_t>(k_cache.data()) % 4 == 0,
          "{}: k_cache is {} with strides [{}]; a page must be contiguous, and its memory a multiple of 4 bytes", op, k_cache,
          tw::join(k_cache.strides(), ", "));
  require(weights.shape() == Shape{batch, queries, q.shape(2)}, "{}: weights is {}; for q {} it must be f32[{}, {}, {}]", op, weights, q,
          batch, queries, q.shape(2));
  require(scores.rank() == 3 && scores.shape(0) == batch && scores.shape(1) == queries, "{}: scores is {}; it must be f32[{}, {}, columns]",
          op, scores, batch, queries);
  require(block_table.rank() == 2 && block_table.shape(0) == batch && (block_table.stride(1) == 1 || block_table.shape(1) <= 1),
          "{}: block_table is {}; it must be i32[{}, pages], a sequence's pages side by side", op, block_table, batch);
  for (const auto& [name, t] : {std::pair{"q", &q}, std::pair{"scores", &scores}}) check_contiguous_columns(op, name, *t);
  check_extents(op, "k_cache", k_cache);
  check_extents(op, "block_table", block_table);
  require(batch * queries <= kLargestExtent, "{}: q is {}; batch times seqlen_q is limited to {}", op, q, kLargestExtent);
  check_num_splits(op, options.num_splits);
  check_output(op, "scores", scores);
  check_disjoint(op, {"scores", &scores},
                 {{"q", &q}, {"k_cache", &k_cache}, {"weights", &weights}, {"block_table", &block_table}, {"seqlens", options.seqlens}});
  const std::int64_t pages = k_cache.shape(0), held = pages == 0 ? 0 : block_table.shape(1) * kIndexerPage;
  Call call{.q = flat(op, "q", q), .weights = flat(op, "weights", weights), .scores = flat(op, "scores", scores)};
  if (pages > 0) {
    call.k =
        Tensor::borrow(k_cache.data(), {pages, kIndexerPage, kIndexerDim}, DType::fp8_e4m3, device, {k_cache.stride(0), kIndexerDim, 1});
    call.scales = Tensor::borrow(static_cast<char*>(k_cache.data()) + kIndexerPage * kIndexerDim, {pages, kIndexerPage}, DType::f32, device,
                                 {k_cache.stride(0) / 4, 1});
  } else {  // nothing is read, but a tensor map must describe some memory
    call.k = Tensor::borrow(q.data(), {1, 1, kIndexerDim}, DType::fp8_e4m3, device);
    call.scales = Tensor::borrow(scores.data(), {1, 1}, DType::f32, device);
  }
  const Tensor* const seqlens = options.seqlens;
  call.by_query = seqlens && seqlens->rank() == 2;
  if (call.by_query) {
    require(seqlens->shape() == Shape{batch, queries} && seqlens->is_contiguous(),
            "{}: seqlens is {}; it must be i32[{}] or i32[{}, {}], contiguous", op, *seqlens, batch, batch, queries);
    const Tensor by_row = seqlens->reshape({batch * queries});
    call.ends = integers(op, "seqlens", &by_row, batch * queries, device);
  } else {
    call.ends = integers(op, "seqlens", seqlens, batch, device);
  }
  call.pages = block_table.data<std::int32_t>();
  call.pages_stride = block_table.stride(0);
  call.batch = static_cast<int>(batch);
  call.queries = static_cast<int>(queries);
  call.keys = static_cast<int>(std::min(held, scores.shape(2)));
  call.causal = options.causal && !call.by_query;
  call.clear = options.clear;
  call.splits = options.num_splits;
  call.stream = checked_stream(op, options.stream, device);
  return call;
}

}  // namespace

void indexer_scores(const Tensor& q, const Tensor& k, const Tensor& weights, const Tensor& scores, const IndexerOptions& options) {
  const Call call = check(q, k, weights, scores, options);
  if (scores.numel() > 0) kernels::indexer::run(call);
}

void indexer_scores_paged(const Tensor& q, const Tensor& k_cache, const Tensor& weights, const Tensor& block_table, const Tensor& scores,
                          const IndexerPagedOptions& options) {
  const Call call = check_paged(q, k_cache, weights, block_table, scores, options);
  if (scores.numel() > 0) kernels::indexer::run(call);
}

}  // namespace tw
