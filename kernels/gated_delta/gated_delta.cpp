#include "tilewave/gated_delta.hpp"

#include <cmath>
#include <utility>

#include "kernels/check.hpp"
#include "kernels/gated_delta/call.hpp"
#include "kernels/workspace.hpp"

namespace tw {
namespace kernels::gated_delta {
namespace {

/// The largest Dk of gates of channels, and the largest Dv of their gradients.
constexpr std::int64_t kLargestDim = 128;

}  // namespace

void check_state(const Call& call, const char* name, const Tensor& state) {
  check_operand(call.op, name, state, DType::f32, call.o.device());
  const Shape shape{call.sequences(), call.heads(), call.dim(), call.values()};
  require(state.shape() == shape, "{}: {} is {}; it must be [{}, {}, {}, {}]", call.op, name, state, shape[0], shape[1], shape[2],
          shape[3]);
}

Call check_inputs(const char* op, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta, const NamedTensor& like_v,
                  const GatedDeltaOptions& options) {
  const Tensor& o = *like_v.tensor;
  const Device device = o.device();
  require(is_float(q.dtype()), "{}: q is {}; f32, f16 and bf16 are supported", op, q);
  for (const NamedTensor t : {NamedTensor{"q", &q}, {"k", &k}, {"v", &v}, like_v}) {
    check_operand(op, t.name, *t.tensor, q.dtype(), device);
    require(t.tensor->rank() == 4, "{}: {} is {}; it must be [batch, seqlen, heads, dim]", op, t.name, *t.tensor);
    check_extents(op, t.name, *t.tensor);
  }
  require(q.shape(3) >= 1 && q.shape(3) <= kMostDims, "{}: q is {}; its last dimension must be 1 to {}", op, q, kMostDims);
  require(k.shape() == q.shape(), "{}: k is {}; it must have q's shape, {}", op, k, q);
  require(v.shape(0) == q.shape(0) && v.shape(1) == q.shape(1), "{}: v is {}; its batch and seqlen must be those of q, {}", op, v, q);
  require(q.shape(2) >= 1 && v.shape(2) % q.shape(2) == 0, "{}: v is {}; its heads must be a multiple of those of q, {}", op, v, q);
  require(o.shape() == v.shape(), "{}: {} is {}; it must have v's shape, {}", op, like_v.name, o, v);
  const Shape of_tokens{v.shape(0), v.shape(1), v.shape(2)};
  require(beta.dtype() == q.dtype() || beta.dtype() == DType::f32, "{}: beta is {}; it must be of q's dtype, {}, or f32", op, beta,
          name_of(q.dtype()));
  check_operand(op, "beta", beta, beta.dtype(), device);
  require(beta.shape() == of_tokens, "{}: beta is {}; it must be [{}, {}, {}]", op, beta, of_tokens[0], of_tokens[1], of_tokens[2]);
  Call call;
  call.op = op;
  call.q = q;
  call.k = k;
  call.v = v;
  call.beta = beta;
  call.o = o;
  if (options.g != nullptr) {
    check_operand(op, "g", *options.g, DType::f32, device);
    const Shape of_channels{v.shape(0), v.shape(1), v.shape(2), q.shape(3)};
    require(options.g->shape() == of_tokens || options.g->shape() == of_channels, "{}: g is {}; it must be [{}] or [{}]", op, *options.g,
            tw::join(of_tokens, ", "), tw::join(of_channels, ", "));
    require(options.g->rank() == 3 || q.shape(3) <= kLargestDim, "{}: g is {}; gates of channels are for keys of up to {} dimensions", op,
            *options.g, kLargestDim);
    call.g = *options.g;
  }
  if (options.cu_seqlens != nullptr) {
    const Tensor& offsets = *options.cu_seqlens;
    check_operand(op, "cu_seqlens", offsets, DType::i32, device);
    require(offsets.rank() == 1 && offsets.shape(0) >= 2 && offsets.is_contiguous(),
            "{}: cu_seqlens is {}; it must be [sequences + 1], contiguous, of at least one sequence", op, offsets);
    require(q.shape(0) == 1, "{}: q is {}; with cu_seqlens its batch must be 1", op, q);
    call.cu_seqlens = offsets;
  }
  call.scale = options.scale ? *options.scale : 1.0f / std::sqrt(static_cast<float>(q.shape(3)));
  require(std::isfinite(call.scale), "{}: scale is {}; it must be finite", op, call.scale);
  call.normalise = options.normalise_qk;
  call.stream = checked_stream(op, options.stream, device);
  const std::int64_t chunks = (v.shape(1) + kChunk - 1) / kChunk * v.shape(0) + call.sequences();
  require(chunks * kChunk <= kLargestExtent && chunks * std::max<std::int64_t>(v.shape(2), 1) <= kLargestExtent,
          "{}: v is {}, which is {} chunks of {} heads; they are limited to {}", op, v, chunks, v.shape(2), kLargestExtent / kChunk);
  return call;
}

Call check(const char* op, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta, const Tensor& o,
           const GatedDeltaOptions& options, const StateNames& names) {
  Call call = check_inputs(op, q, k, v, beta, {"o", &o}, options);
  check_output(op, "o", o);
  check_disjoint(op, {"o", &o},
                 {{"q", &q},
                  {"k", &k},
                  {"v", &v},
                  {"beta", &beta},
                  {"g", options.g},
                  {names.initial, options.initial_state},
                  {"cu_seqlens", options.cu_seqlens}});
  if (options.initial_state != nullptr) {
    check_state(call, names.initial, *options.initial_state);
    call.initial_state = *options.initial_state;
  }
  if (options.final_state != nullptr) {
    check_state(call, names.final, *options.final_state);
    check_output(op, names.final, *options.final_state);
    check_disjoint(op, {names.final, options.final_state},
                   {{"q", &q}, {"k", &k}, {"v", &v}, {"beta", &beta}, {"g", options.g}, {"cu_seqlens", options.cu_seqlens}, {"o", &o}});
    if (options.initial_state != nullptr) check_in_place(op, {names.final, options.final_state}, {names.initial, options.initial_state});
    call.final_state = *options.final_state;
  }
  return call;
}

}  // namespace kernels::gated_delta

void gated_delta_rule(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta, const Tensor& o,
                      const GatedDeltaOptions& options) {
  using namespace kernels::gated_delta;
  Call call = check("gated_delta_rule", q, k, v, beta, o, options);
  if (call.sequences() == 0 || call.heads() == 0 || call.values() == 0 || (call.length() == 0 && !call.final_state)) return;
  const bool on_gpu = call.stream.device().is_cuda();
  // The tensor cores would round f32 operands.
  if (on_gpu && (q.dtype() == DType::f32 || !chunks_fit(call))) return steps_on_gpu(call);
  on_gpu ? chunks_on_gpu(std::move(call)) : chunks_on_cpu(std::move(call));
}

void gated_delta_rule_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta, const Tensor& state, const Tensor& o,
                           const GatedDeltaStepOptions& options) {
  using namespace kernels::gated_delta;
  const Call call = check("gated_delta_rule_step", q, k, v, beta, o,
                          {.g = options.g,
                           .scale = options.scale,
                           .normalise_qk = options.normalise_qk,
                           .initial_state = &state,
                           .final_state = &state,
                           .stream = options.stream},
                          {"state", "state"});
  if (v.numel() == 0) return;
  call.stream.device().is_cuda() ? steps_on_gpu(call) : steps_on_cpu(call);
}

void gated_delta_rule_backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta, const Tensor& d_o, const Tensor& dq,
                               const Tensor& dk, const Tensor& dv, const Tensor& d_beta, const GatedDeltaBackwardOptions& options) {
  using namespace kernels::gated_delta;
  constexpr const char* op = "gated_delta_rule_backward";
  Call call = check_inputs(op, q, k, v, beta, {"d_o", &d_o},
                           {.g = options.g,
                            .scale = options.scale,
                            .normalise_qk = options.normalise_qk,
                            .cu_seqlens = options.cu_seqlens,
                            .stream = options.stream});
  const bool on_gpu = call.stream.device().is_cuda();
  require(!on_gpu || q.dtype() != DType::f32, "{}: q is {}; on a GPU f16 and bf16 are supported, because tensor cores would round f32", op,
          q);
  require(!call.gates_of_channels() || v.shape(3) <= kLargestDim,
          "{}: v is {}; with gates of channels its last dimension must be at most {}", op, v, kLargestDim);
  struct Output {
    NamedTensor gradient, of;
  };
  for (const auto& [gradient, of] :
       {Output{{"dq", &dq}, {"q", &q}}, {{"dk", &dk}, {"k", &k}}, {{"dv", &dv}, {"v", &v}}, {{"d_beta", &d_beta}, {"beta", &beta}}}) {
    check_operand(op, gradient.name, *gradient.tensor, of.tensor->dtype(), d_o.device());
    require(gradient.tensor->shape() == of.tensor->shape(), "{}: {} is {}; it must have {}'s shape, {}", op, gradient.name,
            *gradient.tensor, of.name, *of.tensor);
  }
  if (options.dg != nullptr) {
    require(options.g != nullptr, "{}: dg is {}, but g is not given", op, *options.dg);
    check_operand(op, "dg", *options.dg, DType::f32, d_o.device());
    require(options.dg->shape() == options.g->shape(), "{}: dg is {}; it must have g's shape, {}", op, *options.dg, *options.g);
  }
  const NamedTensor states[] = {
      {"initial_state", options.initial_state}, {"d_final_state", options.d_final_state}, {"d_initial_state", options.d_initial_state}};
  for (const NamedTensor& state : states)
    if (state.tensor != nullptr) check_state(call, state.name, *state.tensor);
  const NamedTensor outputs[] = {{"dq", &dq}, {"dk", &dk}, {"dv", &dv}, {"d_beta", &d_beta}, {"dg", options.dg}, states[2]};
  for (const NamedTensor& output : outputs) {
    if (output.tensor == nullptr) continue;
    check_output(op, output.name, *output.tensor);
    check_disjoint(op, output,
                   {{"q", &q},
                    {"k", &k},
                    {"v", &v},
                    {"beta", &beta},
                    {"d_o", &d_o},
                    {"g", options.g},
                    {"cu_seqlens", options.cu_seqlens},
                    states[0],
                    states[1]});
    for (const NamedTensor& other : outputs)
      if (&other < &output) check_disjoint(op, output, {other});
  }
  const auto copied = [](const Tensor* t) { return t != nullptr ? std::optional(*t) : std::nullopt; };
  call.initial_state = copied(options.initial_state);
  Gradient gradient{.d_o = d_o,
                    .dq = dq,
                    .dk = dk,
                    .dv = dv,
                    .d_beta = d_beta,
                    .dg = copied(options.dg),
                    .d_final_state = copied(options.d_final_state),
                    .d_initial_state = copied(options.d_initial_state)};
  if (call.sequences() == 0 || call.heads() == 0 || call.values() == 0) return;
  on_gpu ? gradients_on_gpu(std::move(call), std::move(gradient)) : gradients_on_cpu(std::move(call), std::move(gradient));
}

}  // namespace tw
