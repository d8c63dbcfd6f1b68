#include "kernels/attention/backward.hpp"

#include <algorithm>
#include <utility>

#include "kernels/attention/delta.tile.hpp"
#include "kernels/attention/heuristics.hpp"
#include "kernels/rows.hpp"
#include "kernels/workspace.hpp"
#include "tilewave/launch.hpp"

namespace tw {
namespace kernels::attention {

namespace {

constexpr const char* kOp = "attention_backward";

/// A tensor of the call that the forward pass does not have: of the dtype and the shape of one that it has.
void check_like(const Form& form, NamedTensor argument, NamedTensor like) {
  const auto& [name, t] = argument;
  check_operand(form.op, name, *t, like.tensor->dtype(), like.tensor->device());
  form.require(t->shape() == like.tensor->shape(), "{} is {}; it must have {}'s shape, {}", name, *t, like.name, *like.tensor);
  form.require(t->stride(3) == 1 || t->numel() == 0, "{} is {}; its last dimension must be contiguous", name, *t);
}

/// delta and lse_log2. Rows are read in pieces, so a tile is as wide as the next size.
template <class T, int R, int C>
void launch_delta(const BackwardCall& call) {
  const Tensor& delta = call.delta;
  const TileGrid grid{ceil_div(static_cast<int>(delta.shape(2)), R), static_cast<int>(delta.shape(0) * delta.shape(1))};
  launch<Delta<T, R, C>>(call.forward.stream, grid, [&](auto& bind, auto& p) {
    bind(p.o, call.forward.o);
    bind(p.d_o, call.d_o);
    bind(p.dq_sum, call.dq_sum.numel() > 0 ? &call.dq_sum : nullptr);
    p.turns = call.turns.numel() > 0 ? reinterpret_cast<u32*>(call.turns.template data<std::int32_t>()) : nullptr;
    p.turn_queries = call.turns.numel() > 0 ? static_cast<int>(delta.shape(2) / call.turns.shape(2)) : 1;
    p.lse = call.lse;
    p.lse_log2 = call.lse_log2.template data<float>();
    p.delta = delta.template data<float>();
    p.queries = static_cast<int>(call.forward.q.shape(2));
    p.heads = static_cast<int>(delta.shape(1));
    p.padded = static_cast<int>(delta.shape(2));
  });
}

template <class T, int R, int C>
void launch_scaled_sum(const BackwardCall& call) {
  const Tensor& sum = call.dq_sum;
  const TileGrid grid{ceil_div(static_cast<int>(sum.shape(2)), R), static_cast<int>(sum.shape(0) * sum.shape(1))};
  launch<ScaledSum<T, R, C>>(call.forward.stream, grid, [&](auto& bind, auto& p) {
    bind(p.sum, sum);
    bind(p.dq, call.dq);
    p.scale = call.forward.scale;
    p.heads = static_cast<int>(sum.shape(1));
  });
}

/// Calls f.operator()<T, R, C>() for the call's type and rows that hold its columns.
template <class F>
void with_rows(const BackwardCall& call, F f) {
  with_float_type(call.d_o.dtype(), [&]<class T>(std::type_identity<T>) {
    if (!call.forward.stream.device().is_cuda()) return f.template operator()<T, 16, 256>();
    const std::int64_t dim = std::max(call.dq.shape(3), call.d_o.shape(3));
    if constexpr (!is_same<T, float>) {
      if (dim <= 64) return f.template operator()<T, 64, 64>();
      if (dim <= 128) return f.template operator()<T, 32, 128>();
      f.template operator()<T, 16, 256>();
    }
  });
}

void run_sink_gradient(const BackwardCall& call) {
  constexpr int kQueries = 1024;
  launch<SinkGradient<kQueries>>(call.forward.stream, {static_cast<int>(call.forward.q.shape(1))}, [&](auto& bind, auto& p) {
    bind(p.lse_log2, call.lse_log2);
    bind(p.delta, call.delta);
    p.sink = call.forward.sink;
    p.d_sink = call.d_sink;
    p.batches = call.forward.q.numel() > 0 ? static_cast<int>(call.forward.q.shape(0)) : 0;
  });
}

}  // namespace

TileGrid key_gradients_grid(const BackwardCall& call, int tile_keys) {
  const int heads = static_cast<int>(call.dk.shape(0) * call.dk.shape(1));
  const auto bytes = [](const Tensor& t) { return t.numel() * static_cast<std::int64_t>(size_of(t.dtype())); };
  const std::int64_t passing = bytes(call.forward.q) + bytes(call.d_o) + bytes(call.dq_sum);
  const int group = heads_in_cache(passing / std::max(1, heads), heads);
  return {ceil_div(static_cast<int>(call.dk.shape(2)), tile_keys), group, heads / group};
}
int padded_queries(int queries) {
  constexpr int kMultiple = 128;
  return std::max(1, ceil_div(queries, kMultiple)) * kMultiple;
}

void run_delta(BackwardCall& call, bool adds_up) {
  const Tensor& q = call.forward.q;
  const std::int64_t batch = std::max<std::int64_t>(1, q.shape(0)), heads = std::max<std::int64_t>(1, q.shape(1));
  const Tensor memory = workspace({2, batch, heads, padded_queries(static_cast<int>(q.shape(2)))}, DType::f32, call.forward.stream);
  call.lse_log2 = memory.select(0, 0);
  call.delta = memory.select(0, 1);
  if (adds_up && q.numel() > 0) {
    call.dq_sum = workspace(call.dq.shape(), DType::f32, call.forward.stream);
    if (call.deterministic)
      call.turns = workspace({batch, heads, call.delta.shape(2) / all_gradients_config(call).rows}, DType::i32, call.forward.stream);
  }
  if (q.numel() > 0) with_rows(call, [&]<class T, int kRows, int kCols>() { launch_delta<T, kRows, kCols>(call); });
}
void run_scaled_sum(const BackwardCall& call) {
  with_rows(call, [&]<class T, int kRows, int kCols>() { launch_scaled_sum<T, kRows, kCols>(call); });
}

BackwardCall check_backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& lse, const Tensor& d_o,
                            const Tensor& dq, const Tensor& dk, const Tensor& dv, const AttentionBackwardOptions& options) {
  const Form form{.op = kOp};
  AttentionOptions forward = options.forward;
  forward.lse = nullptr;
  BackwardCall call{.forward = check_common(form, q, k, v, o, forward)};
  form.require(k.shape(0) == q.shape(0), "k is {}; its batch must be q's, {}", k, q.shape(0));
  const NamedTensor inputs[] = {{"q", &q}, {"k", &k}, {"v", &v}, {"o", &o}, {"lse", &lse}, {"d_o", &d_o}};
  const NamedTensor outputs[] = {{"dq", &dq}, {"dk", &dk}, {"dv", &dv}, {"d_sink", options.d_sink}};
  check_like(form, inputs[5], inputs[3]);
  for (int i = 0; i < 3; ++i) check_like(form, outputs[i], inputs[i]);
  call.lse = form.elements<float>(inputs[4], {q.shape(0), q.shape(2), q.shape(1)}, o.device());
  if (options.d_sink) form.require(forward.sink != nullptr, "d_sink is {}, but forward.sink is not given", *options.d_sink);
  call.d_sink = form.elements<float>(outputs[3], {q.shape(2)}, o.device());
  for (const NamedTensor& output : outputs) {
    if (output.tensor == nullptr) continue;
    check_output(kOp, output.name, *output.tensor);
    for (const NamedTensor& input : inputs) check_disjoint(kOp, output, {input});
    check_disjoint(kOp, output,
                   {{"forward.alibi_slopes", forward.alibi_slopes}, {"forward.sink", forward.sink}, {"forward.mask", forward.mask}});
    for (const NamedTensor& other : outputs)
      if (&other < &output) check_disjoint(kOp, output, {other});
  }
  call.deterministic = options.deterministic;
  call.d_o = d_o.transpose(1, 2);
  call.dq = dq.transpose(1, 2);
  call.dk = dk.transpose(1, 2);
  call.dv = dv.transpose(1, 2);
  return call;
}

}  // namespace kernels::attention

void attention_backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& lse, const Tensor& d_o,
                        const Tensor& dq, const Tensor& dk, const Tensor& dv, const AttentionBackwardOptions& options) {
  using namespace kernels::attention;
  BackwardCall call = check_backward(q, k, v, o, lse, d_o, dq, dk, dv, options);
  const bool cuda = call.forward.stream.device().is_cuda(), adds_up = adds_up_query_gradient(call);
  run_delta(call, adds_up);
  if (adds_up) {
    if (dk.numel() > 0) all_gradients_on_gpu(call);
    if (dq.numel() > 0) run_scaled_sum(call);
  } else {
    if (dk.numel() > 0) cuda ? key_gradients_on_gpu(call) : key_gradients_on_cpu(call);
    if (dq.numel() > 0) cuda ? query_gradient_on_gpu(call) : query_gradient_on_cpu(call);
  }
  if (options.d_sink) run_sink_gradient(call);
}

}  // namespace tw
