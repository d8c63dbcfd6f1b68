#include "tilewave/mla.hpp"

#include <algorithm>

#include "kernels/attention/call.hpp"
#include "kernels/check.hpp"
#include "kernels/mla/call.hpp"
#include "kernels/mla/decode.tile.hpp"
#include "kernels/rows.hpp"
#include "kernels/workspace.hpp"
#include "tilewave/attention.hpp"
#include "tilewave/device.hpp"
#include "tilewave/elementwise.hpp"
#include "tilewave/reduce.hpp"

namespace tw {

namespace {

using namespace kernels::mla;
using kernels::workspace;

constexpr const char* kOp = "mla_decode";
/// Keys of a split, at least: two blocks.
constexpr int kSplitKeys = 128;

/// Whether the heads of a token and the next token's follow each other, as rows of one matrix.
bool tokens_follow(const Tensor& t) { return t.shape(1) == 1 || t.shape(2) == 1 || t.stride(1) == t.shape(2) * t.stride(2); }
Tensor as_rows(const Tensor& t) {
  return Tensor::borrow(t.data(), {t.shape(0), t.shape(1) * t.shape(2), t.shape(3)}, t.dtype(), t.device(),
                        {t.stride(0), t.shape(2) == 1 ? t.stride(1) : t.stride(2), t.stride(3)});
}

Call check(const Tensor& q, const Tensor& kv, const Tensor& o, const MlaOptions& options) {
  const Device device = o.device();
  require(q.dtype() == DType::bf16 || q.dtype() == DType::f16, "{}: q is {}; bf16 and f16 are supported", kOp, q);
  check_operand(kOp, "q", q, q.dtype(), device);
  check_operand(kOp, "o", o, q.dtype(), device);
  require(q.rank() == 4 && q.shape(3) == kMlaKeyDim, "{}: q is {}; it must be [batch, seqlen_q, heads, 576]", kOp, q);
  const Shape expected{q.shape(0), q.shape(1), q.shape(2), kMlaLatentDim};
  require(o.shape() == expected, "{}: o is {}; it must be {}[{}]", kOp, o, name_of(q.dtype()), tw::join(expected, ", "));
  check_columns(kOp, "q", q);
  check_columns(kOp, "o", o);
  require(q.shape(1) * q.shape(2) <= kernels::kLargestExtent, "{}: q is {}; heads times seqlen_q is limited to {}", kOp, q,
          kernels::kLargestExtent);
  const float scale = check_scale(kOp, options.scale);
  check_num_splits(kOp, options.num_splits);
  require(options.max_seqlen >= 0, "{}: max_seqlen is {}; it must be positive, or 0 for the capacity", kOp, options.max_seqlen);
  Call call{.heads = static_cast<int>(q.shape(2)),
            .seqlen_q = static_cast<int>(q.shape(1)),
            .causal = options.causal,
            .scale = scale,
            .stream = checked_stream(kOp, options.stream, device)};
  const CacheOf cache = check_cache(kOp, kv, {q.shape(0), q.dtype(), device}, options.seqlens, options.block_table);
  require(options.block_table == nullptr || kv.shape(1) % 16 == 0 || tokens_apart(kv),
          "{}: kv_cache is {} with strides [{}]; if page_size is not a multiple of 16, pages must be a whole number of tokens apart", kOp,
          kv, tw::join(kv.strides(), ", "));
  call.kv = kv;
  call.capacity = cache.capacity;
  call.seqlens = cache.seqlens;
  call.pages = cache.pages;
  call.pages_stride = cache.pages_stride;
  check_output(kOp, "o", o);
  const NamedTensor inputs[] = {{"q", &q}, {"kv_cache", &kv}, {"seqlens", options.seqlens}, {"block_table", options.block_table}};
  for (const NamedTensor& input : inputs) check_disjoint(kOp, {"o", &o}, {input});
  if (const Tensor* const lse = options.lse) {
    check_operand(kOp, "lse", *lse, DType::f32, device);
    const Shape shape{q.shape(0), q.shape(2), q.shape(1)};
    require(lse->shape() == shape && lse->is_contiguous(), "{}: lse is {}; it must be f32[{}], contiguous", kOp, *lse,
            tw::join(shape, ", "));
    for (const NamedTensor& input : inputs) check_disjoint(kOp, {"lse", lse}, {input, {"o", &o}});
    call.lse = lse->data<float>();
  }
  call.q = q;
  if (!device.is_cuda() || options.check_contents) {
    call.stream.synchronize();
    check_cache_contents(kOp, kv, cache, options.seqlens, options.block_table, 0);
  }
  return call;
}

}  // namespace

int mla_splits(std::int64_t batch, std::int64_t rows, std::int64_t max_seqlen, int multiprocessors) {
  require(batch >= 0 && rows >= 0 && max_seqlen >= 0, "mla_splits: batch is {}, rows {} and max_seqlen {}; they must not be negative",
          batch, rows, max_seqlen);
  const std::int64_t tiles = batch * ((rows + kernels::mla::kRows - 1) / kernels::mla::kRows);
  constexpr std::int64_t kMany = 1 << 20;  // more tiles than that keep any device busy
  return decode_splits(static_cast<int>(std::min(tiles, kMany)), static_cast<int>(std::min(max_seqlen, kMostTokens)), kSplitKeys,
                       multiprocessors, kMostSplits);
}

void mla_decode(const Tensor& q, const Tensor& kv_cache, const Tensor& o, const MlaOptions& options) {
  const Call call = check(q, kv_cache, o, options);
  if (o.numel() == 0) return;
  const std::int64_t longest = options.max_seqlen > 0 ? std::min<std::int64_t>(options.max_seqlen, call.capacity) : call.capacity;
  run_in_splits(call, q, o, {.count = options.num_splits, .longest = longest, .lse = options.lse});
}

namespace kernels::mla {

void run_in_splits(Call call, const Tensor& q, const Tensor& o, const Splits& splits) {
  Tensor rows = q;
  if (!tokens_follow(q)) {
    rows = workspace(q.shape(), q.dtype(), call.stream);
    cast(q, rows, {.stream = call.stream});
  }
  call.q = as_rows(rows);
  const bool on_gpu = call.stream.device().is_cuda();
  call.splits = splits.count;
  if (call.splits == 0)
    call.splits = on_gpu ? mla_splits(q.shape(0), q.shape(1) * q.shape(2), splits.longest, std::max(1, device_info(o.device()).units)) : 1;
  if (call.splits == 1 && tokens_follow(o)) {
    call.o = as_rows(o);
    return run(call);
  }
  const Shape shape{call.splits, q.shape(0), q.shape(2), q.shape(1)};
  const std::int64_t parts_rows = shape[0] * shape[1] * shape[2] * shape[3];
  const Tensor memory = workspace({parts_rows * (kMlaLatentDim + 1 + (splits.max_logits ? 1 : 0))}, DType::f32, call.stream);
  float* next = memory.data<float>();
  const auto part = [&](const Shape& of, std::int64_t columns) {
    const Tensor t = Tensor::borrow(next, of, DType::f32, o.device());
    next += parts_rows * columns;
    return t;
  };
  const Tensor parts = part({shape[0], shape[1], shape[2], shape[3], kMlaLatentDim}, kMlaLatentDim), part_lse = part(shape, 1);
  call.partial = parts.reshape({shape[0] * shape[1], shape[2] * shape[3], kMlaLatentDim});
  call.lse = part_lse.data<float>();
  call.sink = nullptr;
  if (splits.max_logits) call.max_logits = next;
  run(call);
  attention::combine({.parts = parts, .part_lse = part_lse, .o = o, .lse = splits.lse, .sink = splits.sink, .sink_in_lse = false},
                     call.stream);
  if (splits.max_logits) reduce(Reduction::max, part(shape, 1), *splits.max_logits, {.dim = 0, .stream = call.stream});
}

}  // namespace kernels::mla

}  // namespace tw
