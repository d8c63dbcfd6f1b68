#include "kernels/mla/sparse_backward.hpp"

#include <algorithm>

#include "kernels/attention/delta.tile.hpp"
#include "kernels/check.hpp"
#include "kernels/generic_tiles.hpp"
#include "kernels/mla/call.hpp"
#include "kernels/mla/listed_gradients.tile.hpp"
#include "kernels/mla/sparse_gradients.tile.hpp"
#include "kernels/rows.hpp"
#include "kernels/workspace.hpp"
#include "runtime/stream.hpp"
#include "tilewave/elementwise.hpp"
#include "tilewave/gemm.hpp"
#include "tilewave/gemm_with.hpp"
#include "tilewave/launch.hpp"
#include "tilewave/mla.hpp"

// Gradients of attention over listed keys. With P the weights of a token's heads, [heads, entries], K the rows that its list names, and V
// their first 512 columns:
//
//   dP = dO V^T    dS = scale P (dP - rowsum(dO o))    dq = dS K    dkv = [dS; P]^T [q; dO]
//
// where dO has columns of 0 beyond 512 in the last product. In parts, K, P, dS and the rows of dkv are in memory, for some tokens at a
// time.

namespace tw {

namespace kernels::mla {

namespace {

constexpr const char* kOp = "mla_sparse_backward";

/// Memory of the tokens that are worked on at a time. They must fill a GPU several times over, and launches cost time.
constexpr std::int64_t kMostBytes = std::int64_t{512} << 20;

struct GradientCall {
  Tensor q, kv, indices, o, lse, d_o, dq;
  Tensor sum;  ///< f32 [kv_tokens, 576]
  const std::int32_t* lengths;
  float scale;
  bool deterministic;
  Stream stream;

  int tokens() const { return static_cast<int>(q.shape(0)); }
  int heads() const { return static_cast<int>(q.shape(1)); }
  int topk() const { return static_cast<int>(indices.shape(1)); }
};

/// What tokens at a time need.
struct Parts {
  Tensor keys;     ///< [tokens, entries, 576]
  Tensor stacked;  ///< [tokens, 2 heads, 576]: queries, then gradients of outputs
  Tensor both;     ///< [tokens, 2 heads, entries]: gradients of scores, then weights
  Tensor rows;     ///< [tokens, entries, 576]: what is added to rows of kv
};

void fill_rows(auto& rows, const GradientCall& c, int first) {
  rows.indices = c.indices.data<std::int32_t>();
  rows.stride = c.indices.stride(0);
  rows.lengths = c.lengths;
  rows.topk = c.topk(), rows.kv_tokens = static_cast<int>(c.kv.shape(0));
  rows.first = first;
}

template <class T>
void run_tokens(const GradientCall& c, int first, const Tensor& lse_log2, const Tensor& delta, const Parts& parts) {
  const int tokens = static_cast<int>(parts.keys.shape(0)), entries = static_cast<int>(parts.keys.shape(1)), heads = c.heads();
  const auto of_tokens = [&](const Tensor& t) { return t.slice(0, first, first + tokens); };
  const Tensor q = of_tokens(c.q), d_o = of_tokens(c.d_o);
  const auto tiles = [](int count, int size) { return (count + size - 1) / size; };
  launch<CopyListed<T>>(c.stream, {.m = tiles(entries, CopyListed<T>::R), .batch = tokens}, [&](auto& bind, auto& p) {
    bind(p.in, c.kv);
    bind(p.out, parts.keys);
    fill_rows(p.rows, c, first);
  });
  launch<StackRows<T>>(c.stream, {.m = tiles(heads, StackRows<T>::R), .batch = tokens}, [&](auto& bind, auto& p) {
    bind(p.q, q);
    bind(p.d_o, d_o);
    bind(p.of_q, parts.stacked.slice(1, 0, heads));
    bind(p.of_o, parts.stacked.slice(1, heads, 2 * heads));
  });
  const Tensor ds = parts.both.slice(1, 0, heads), weights = parts.both.slice(1, heads, 2 * heads);
  const Tensor values = parts.keys.slice(2, 0, kMlaLatentDim);
  const std::int64_t of_first = std::int64_t{first} * heads;
  gemm_with<ListedWeights<T>, T>(q, parts.keys.transpose(1, 2),
                                 [&](auto& bind, auto& p) {
                                   bind(p.weights, weights);
                                   p.lse_log2 = lse_log2.data<float>() + of_first;
                                   p.heads = heads;
                                   p.scale_log2 = c.scale * kLog2E;
                                 },
                                 {.stream = c.stream});
  gemm_with<ListedScoreGradients<T>, T>(d_o, values.transpose(1, 2),
                                        [&](auto& bind, auto& p) {
                                          bind(p.weights, weights);
                                          bind(p.ds, ds);
                                          p.delta = delta.data<float>() + of_first;
                                          p.heads = heads;
                                          p.scale = c.scale;
                                        },
                                        {.stream = c.stream});
  tw::gemm(ds, parts.keys, of_tokens(c.dq), {.stream = c.stream});
  tw::gemm(parts.both.transpose(1, 2), parts.stacked, parts.rows, {.stream = c.stream});
  // In one tile entries are added in order; tiles add in any order.
  constexpr int kSome = 128;
  using Add = AddListed<T>;
  const int count = c.deterministic ? tokens * entries : kSome;
  launch<Add>(c.stream, {.m = tiles(kMlaKeyDim, Add::kCols), .n = tiles(tokens * entries, count)}, [&](auto& bind, auto& p) {
    bind(p.in, parts.rows);
    bind(p.out, c.sum);
    fill_rows(p.rows, c, first);
    p.tokens = tokens, p.entries = entries, p.count = count;
  });
}

/// All gradients by one kernel, whose additions to dkv come in any order.
template <class T>
void run_together(const GradientCall& c, const Tensor& lse_log2, const Tensor& delta) {
  using Kernel = ListedGradients<T, 64>;
  launch<Kernel>(c.stream, {.m = (c.heads() + kRows - 1) / kRows, .batch = c.tokens()}, [&](auto& bind, auto& p) {
    bind(p.q, c.q);
    bind(p.d_o, c.d_o);
    bind(p.kv, c.kv);
    bind(p.dq, c.dq);
    bind(p.dkv, c.sum);
    fill_rows(p.listed, c, 0);
    p.lse_log2 = lse_log2.data<float>(), p.delta = delta.data<float>();
    p.heads = c.heads();
    p.scale = c.scale, p.scale_log2 = c.scale * kLog2E;
  });
}

template <class T>
void run_as(GradientForm form, const GradientCall& c) {
  const std::int64_t heads = c.heads(), entries = (c.topk() + 15) / 16 * 16;  // also rows of 32 bytes, which TMA loads
  const Tensor lse_log2 = workspace({c.tokens(), heads}, DType::f32, c.stream),
               delta = workspace({c.tokens(), heads}, DType::f32, c.stream);
  using Delta = attention::Delta<T, 4, kMlaLatentDim>;
  const auto one_batch = [](const Tensor& t) {
    return Tensor::borrow(t.data(), {1, t.shape(0), t.shape(1), t.shape(2)}, t.dtype(), t.device(),
                          {t.shape(0) * t.stride(0), t.stride(0), t.stride(1), t.stride(2)});
  };
  launch<Delta>(c.stream, {.m = static_cast<int>((heads + 3) / 4), .n = c.tokens()}, [&](auto& bind, auto& p) {
    bind(p.o, one_batch(c.o));
    bind(p.d_o, one_batch(c.d_o));
    bind(p.dq_sum, nullptr);
    p.lse = c.lse.template data<float>();
    p.lse_log2 = lse_log2.data<float>(), p.delta = delta.data<float>();
    p.turns = nullptr, p.turn_queries = 1;
    p.heads = c.tokens(), p.queries = p.padded = static_cast<int>(heads);
    p.packed = {};
  });
  if (form == GradientForm::together) return run_together<T>(c, lse_log2, delta);
  const std::int64_t of_token = 2 * (2 * entries * kMlaKeyDim + 2 * heads * kMlaKeyDim + 2 * heads * entries);
  const std::int64_t together = std::clamp<std::int64_t>(kMostBytes / of_token, 1, c.tokens());
  const auto memory = [&](std::int64_t rows, std::int64_t columns) { return workspace({together, rows, columns}, dtype_of<T>, c.stream); };
  const Parts parts{memory(entries, kMlaKeyDim), memory(2 * heads, kMlaKeyDim), memory(2 * heads, entries), memory(entries, kMlaKeyDim)};
  for (std::int64_t first = 0; first < c.tokens(); first += together) {
    const std::int64_t count = std::min(together, c.tokens() - first);
    const auto some = [&](const Tensor& t) { return t.slice(0, 0, count); };
    run_tokens<T>(c, static_cast<int>(first), lse_log2, delta, {some(parts.keys), some(parts.stacked), some(parts.both), some(parts.rows)});
  }
}

}  // namespace

GradientForm gradient_form(const Stream& stream, bool deterministic) {
  const bool together = !deterministic && stream.device().is_cuda() && generic_shared_bytes(stream) == 0;
  return together ? GradientForm::together : GradientForm::in_parts;
}

void run_sparse_backward(GradientForm form, const Tensor& q, const Tensor& kv, const Tensor& indices, const Tensor& o, const Tensor& lse,
                         const Tensor& d_o, const Tensor& dq, const Tensor& dkv, const MlaSparseBackwardOptions& options) {
  const std::int32_t* const lengths = options.topk_length ? options.topk_length->data<std::int32_t>() : nullptr;
  const Stream stream = options.stream.value_or(Stream::standard(q.device()));
  const float scale = check_scale(kOp, options.scale);
  const GradientCall call{q, kv, indices, o, lse, d_o, dq, dkv, lengths, scale, options.deterministic, stream};
  q.dtype() == DType::f16 ? run_as<f16>(form, call) : run_as<bf16>(form, call);
}

}  // namespace kernels::mla

void mla_sparse_backward(const Tensor& q, const Tensor& kv, const Tensor& indices, const Tensor& o, const Tensor& lse, const Tensor& d_o,
                         const Tensor& dq, const Tensor& dkv, const MlaSparseBackwardOptions& options) {
  using namespace kernels::mla;
  const Device device = dq.device();
  const DType dtype = q.dtype();
  require(dtype == DType::bf16 || dtype == DType::f16, "{}: q is {}; bf16 and f16 are supported", kOp, q);
  require(q.rank() == 3 && q.shape(2) == kMlaKeyDim, "{}: q is {}; it must be [tokens, heads, 576]", kOp, q);
  require(kv.rank() == 2 && kv.shape(1) == kMlaKeyDim, "{}: kv is {}; it must be {}[kv_tokens, 576]", kOp, kv, name_of(dtype));
  const std::int64_t tokens = q.shape(0), heads = q.shape(1);
  const struct {
    NamedTensor tensor;
    Shape shape;
  } operands[] = {{{"q", &q}, q.shape()},
                  {{"kv", &kv}, kv.shape()},
                  {{"o", &o}, {tokens, heads, kMlaLatentDim}},
                  {{"d_o", &d_o}, {tokens, heads, kMlaLatentDim}},
                  {{"dq", &dq}, q.shape()}};
  for (const auto& [operand, shape] : operands) {
    check_operand(kOp, operand.name, *operand.tensor, dtype, device);
    require(operand.tensor->shape() == shape, "{}: {} is {}; it must be {}[{}]", kOp, operand.name, *operand.tensor, name_of(dtype),
            tw::join(shape, ", "));
    check_columns(kOp, operand.name, *operand.tensor);
  }
  require(dkv.dtype() == DType::f32 || dkv.dtype() == dtype, "{}: dkv is {}; f32 and {} are allowed", kOp, dkv, name_of(dtype));
  check_operand(kOp, "dkv", dkv, dkv.dtype(), device);
  require(dkv.shape() == kv.shape() && dkv.is_contiguous(), "{}: dkv is {}; it must have kv's shape, [{}], contiguous", kOp, dkv,
          tw::join(kv.shape(), ", "));
  check_operand(kOp, "indices", indices, DType::i32, device);
  require(indices.rank() == 2 && indices.shape(0) == tokens, "{}: indices is {}; it must be i32[{}, topk]", kOp, indices, tokens);
  check_columns(kOp, "indices", indices);
  check_operand(kOp, "lse", lse, DType::f32, device);
  require(lse.shape() == Shape{tokens, heads} && lse.is_contiguous(), "{}: lse is {}; it must be f32[{}, {}], contiguous", kOp, lse, tokens,
          heads);
  if (const Tensor* const given = options.topk_length) {
    check_operand(kOp, "topk_length", *given, DType::i32, device);
    require(given->shape() == Shape{tokens} && given->is_contiguous(), "{}: topk_length is {}; it must be i32[{}], contiguous", kOp, *given,
            tokens);
  }
  check_scale(kOp, options.scale);
  const Stream stream = checked_stream(kOp, options.stream, device);
  check_output(kOp, "dq", dq);
  for (const NamedTensor& output : {NamedTensor{"dq", &dq}, NamedTensor{"dkv", &dkv}}) {
    check_disjoint(
        kOp, output,
        {{"q", &q}, {"kv", &kv}, {"indices", &indices}, {"o", &o}, {"lse", &lse}, {"d_o", &d_o}, {"topk_length", options.topk_length}});
  }
  check_disjoint(kOp, {"dkv", &dkv}, {{"dq", &dq}});
  const Tensor sum = dkv.dtype() == DType::f32 ? dkv : kernels::workspace(dkv.shape(), DType::f32, stream);
  if (sum.numel() > 0) fill_bytes(sum.data(), static_cast<std::size_t>(sum.numel()) * sizeof(float), 0, stream);
  if (indices.numel() == 0) {
    // An empty product: 0.
    if (dq.numel() > 0) gemm(d_o.slice(2, 0, 0), kv.slice(0, 0, 0), dq, {.stream = stream});
  } else if (q.numel() > 0) {
    run_sparse_backward(gradient_form(stream, options.deterministic), q, kv, indices, o, lse, d_o, dq, sum, options);
  }
  if (dkv.dtype() != DType::f32 && dkv.numel() > 0) cast(sum, dkv, {.stream = stream});
}

}  // namespace tw
