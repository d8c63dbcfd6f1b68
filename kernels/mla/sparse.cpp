#include "kernels/check.hpp"
#include "kernels/mla/call.hpp"
#include "kernels/mla/decode.tile.hpp"
#include "kernels/rows.hpp"
#include "tilewave/mla.hpp"

namespace tw {

namespace {

using namespace kernels::mla;

constexpr const char* kOp = "mla_sparse";

/// The cache as [pages, page_size, columns], of one token a page where that gives the same addresses: then no index is divided.
Tensor as_pages(const Tensor& kv) {
  const bool pages = kv.rank() == 3;
  if (pages && (kv.shape(1) == 1 || kv.stride(0) != kv.shape(1) * kv.stride(1))) return kv;
  const std::int64_t tokens = pages ? kv.shape(0) * kv.shape(1) : kv.shape(0), stride = kv.stride(-2);
  return Tensor::borrow(kv.data(), {tokens, 1, kv.shape(-1)}, kv.dtype(), kv.device(), {stride, stride, kv.stride(-1)});
}

/// An f32 output for each row, or null.
float* row_results(const char* name, const Tensor* t, const Shape& shape, Device device) {
  if (!t) return nullptr;
  check_operand(kOp, name, *t, DType::f32, device);
  require(t->shape() == shape && t->is_contiguous(), "{}: {} is {}; it must be f32[{}], contiguous", kOp, name, *t, tw::join(shape, ", "));
  return t->data<float>();
}

Call check(const Tensor& q, const Tensor& kv, const Tensor& indices, const Tensor& o, const MlaSparseOptions& options) {
  const Device device = o.device();
  require(q.dtype() == DType::bf16 || q.dtype() == DType::f16, "{}: q is {}; bf16 and f16 are supported", kOp, q);
  check_operand(kOp, "q", q, q.dtype(), device);
  check_operand(kOp, "o", o, q.dtype(), device);
  require(q.rank() == 3 && q.shape(2) == kMlaKeyDim, "{}: q is {}; it must be [tokens, heads, 576]", kOp, q);
  const std::int64_t tokens = q.shape(0), heads = q.shape(1);
  const Shape expected{tokens, heads, kMlaLatentDim};
  require(o.shape() == expected, "{}: o is {}; it must be {}[{}]", kOp, o, name_of(q.dtype()), tw::join(expected, ", "));
  check_columns(kOp, "q", q);
  check_columns(kOp, "o", o);
  require(kv.rank() == 2 || kv.rank() == 3, "{}: kv is {}; it must be [kv_tokens, columns] or [pages, page_size, columns]", kOp, kv);
  const Tensor pages = as_pages(kv);
  check_rows(kOp, "kv", pages, {tokens, q.dtype(), device}, "pages, page_size");
  require(pages.shape(0) * pages.shape(1) <= kernels::kLargestExtent, "{}: kv is {}; it is limited to {} tokens", kOp, kv,
          kernels::kLargestExtent);
  require(tokens_apart(pages), "{}: kv is {} with strides [{}]; pages must be a whole number of tokens apart", kOp, kv,
          tw::join(kv.strides(), ", "));
  check_operand(kOp, "indices", indices, DType::i32, device);
  require(indices.rank() == 2 && indices.shape(0) == tokens, "{}: indices is {}; it must be i32[{}, topk]", kOp, indices, tokens);
  check_columns(kOp, "indices", indices);
  require(indices.shape(1) <= kMostTokens, "{}: indices is {}; a list is limited to {} entries", kOp, indices, kMostTokens);
  const float scale = check_scale(kOp, options.scale);
  check_num_splits(kOp, options.num_splits);
  Call call{.kv = pages,
            .heads = static_cast<int>(heads),
            .seqlen_q = 1,
            .capacity = static_cast<int>(indices.shape(1)),
            .causal = false,
            .scale = scale,
            .indices = &indices,
            .stream = checked_stream(kOp, options.stream, device)};
  if (const Tensor* const lengths = options.topk_length) {
    check_operand(kOp, "topk_length", *lengths, DType::i32, device);
    require(lengths->shape() == Shape{tokens} && lengths->is_contiguous(), "{}: topk_length is {}; it must be i32[{}], contiguous", kOp,
            *lengths, tokens);
    call.seqlens = lengths->data<std::int32_t>();
  }
  if (const Tensor* const sink = options.sink) {
    check_operand(kOp, "sink", *sink, DType::f32, device);
    require(sink->shape() == Shape{heads} && sink->is_contiguous(), "{}: sink is {}; it must be f32[{}], contiguous", kOp, *sink, heads);
    call.sink = sink->data<float>();
  }
  call.lse = row_results("lse", options.lse, {tokens, heads}, device);
  call.max_logits = row_results("max_logits", options.max_logits, {tokens, heads}, device);
  check_output(kOp, "o", o);
  const NamedTensor outputs[] = {{"o", &o}, {"lse", options.lse}, {"max_logits", options.max_logits}};
  for (const NamedTensor& output : outputs) {
    if (!output.tensor) continue;
    check_disjoint(kOp, output,
                   {{"q", &q}, {"kv", &kv}, {"indices", &indices}, {"topk_length", options.topk_length}, {"sink", options.sink}});
  }
  if (options.lse) check_disjoint(kOp, {"lse", options.lse}, {{"o", &o}});
  if (options.max_logits) check_disjoint(kOp, {"max_logits", options.max_logits}, {{"o", &o}, {"lse", options.lse}});
  return call;
}

}  // namespace

void mla_sparse(const Tensor& q, const Tensor& kv, const Tensor& indices, const Tensor& o, const MlaSparseOptions& options) {
  const Call call = check(q, kv, indices, o, options);
  if (o.numel() == 0) return;
  const auto one_token = [](const Tensor& t) {
    return Tensor::borrow(t.data(), {t.shape(0), 1, t.shape(1), t.shape(2)}, t.dtype(), t.device(),
                          {t.stride(0), t.stride(0), t.stride(1), t.stride(2)});
  };
  const auto rows = [&](const Tensor* t) {
    return t ? Tensor::borrow(t->data(), {q.shape(0), q.shape(1), 1}, DType::f32, t->device()) : Tensor();
  };
  const Tensor lse = rows(options.lse), max_logits = rows(options.max_logits);
  run_in_splits(call, one_token(q), one_token(o),
                {.count = options.num_splits,
                 .longest = call.capacity,
                 .lse = options.lse ? &lse : nullptr,
                 .sink = options.sink,
                 .max_logits = options.max_logits ? &max_logits : nullptr});
}

}  // namespace tw
