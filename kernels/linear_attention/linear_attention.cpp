#include "tilewave/linear_attention.hpp"

#include <algorithm>
#include <cmath>
#include <initializer_list>

#include "kernels/check.hpp"
#include "kernels/linear_attention/call.hpp"
#include "kernels/rows.hpp"
#include "kernels/workspace.hpp"

namespace tw {

namespace {

using namespace kernels;
using namespace kernels::linear_attention;

constexpr std::int64_t kLargestDim = 256;

/// What all functions of the family are given.
struct Arguments {
  const char* op;
  const Tensor &q, &k, &v;
  std::optional<float> scale;
  const Tensor* g;
  const Tensor* cu_seqlens;
  const std::optional<Stream>& stream;
};

struct Checked {
  Call call;
  float scale;
  Shape state_shape;
};

std::int64_t checked_sequences(const Arguments& a, Device device) {
  if (a.cu_seqlens == nullptr) return a.q.shape(0);
  const Tensor& cu = *a.cu_seqlens;
  require(cu.rank() == 1 && cu.dtype() == DType::i32 && cu.is_contiguous() && cu.shape(0) >= 1,
          "{}: cu_seqlens is {}; it must be i32[sequences + 1], contiguous", a.op, cu);
  check_operand(a.op, "cu_seqlens", cu, DType::i32, device);
  require(a.q.shape(0) == 1, "{}: q is {}; with cu_seqlens the batch must be 1", a.op, a.q);
  if (!device.is_cuda()) {
    std::int64_t before = 0;
    for (std::int64_t n = 0; n < cu.shape(0); ++n) {
      const std::int64_t offset = cu.data<std::int32_t>()[n];
      require(offset >= before && offset <= a.q.shape(1), "{}: cu_seqlens[{}] is {}; it must be from {} to the number of steps, {}", a.op,
              n, offset, before, a.q.shape(1));
      before = offset;
    }
  }
  return cu.shape(0) - 1;
}

/// A tensor of states, if it is given.
void check_state(const char* op, NamedTensor t, const Shape& shape, Device device) {
  if (t.tensor == nullptr) return;
  require(t.tensor->shape() == shape, "{}: {} is {}; it must be f32[{}]", op, t.name, *t.tensor, tw::join(shape, ", "));
  check_operand(op, t.name, *t.tensor, DType::f32, device);
}

/// An operand with `like`'s shape, dtype and device.
void check_like(const char* op, NamedTensor t, NamedTensor like) {
  require(t.tensor->shape() == like.tensor->shape(), "{}: {} is {}; it must have {}'s shape, {}", op, t.name, *t.tensor, like.name,
          *like.tensor);
  check_operand(op, t.name, *t.tensor, like.tensor->dtype(), like.tensor->device());
}

Checked check(const Arguments& a) {
  const auto& [op, q, k, v, scale, g, cu_seqlens, stream] = a;
  const Device device = q.device();
  require(is_float(q.dtype()), "{}: q is {}; f32, f16 and bf16 are supported", op, q);
  require(q.rank() == 4, "{}: q is {}; it must be [batch, seqlen, heads, Dk]", op, q);
  require(q.shape(3) >= 1 && q.shape(3) <= kLargestDim, "{}: q is {}; its last dimension must be 1 to {}", op, q, kLargestDim);
  check_operand(op, "q", q, q.dtype(), device);
  check_like(op, {"k", &k}, {"q", &q});
  require(v.rank() == 4 && v.shape(0) == q.shape(0) && v.shape(1) == q.shape(1),
          "{}: v is {}; it must be [batch, seqlen, heads of v, Dv], with the batch and seqlen of q, {}", op, v, q);
  require(v.shape(3) >= 1 && v.shape(3) <= kLargestDim, "{}: v is {}; its last dimension must be 1 to {}", op, v, kLargestDim);
  require(q.shape(2) > 0 ? v.shape(2) % q.shape(2) == 0 : v.shape(2) == 0, "{}: v is {}; its heads must be a multiple of q's, {}", op, v,
          q);
  check_operand(op, "v", v, q.dtype(), device);
  for (const NamedTensor& t : {NamedTensor{"q", &q}, NamedTensor{"v", &v}}) check_extents(op, t.name, *t.tensor);
  const std::int64_t sequences = checked_sequences(a, device), heads = v.shape(2);
  require((q.shape(0) * q.shape(1) + (sequences + 1) * kChunk) <= kLargestExtent && sequences * heads <= kLargestExtent,
          "{}: q is {} and v {}; batch * seqlen and sequences * heads must be at most {}", op, q, v, kLargestExtent);

  Checked checked{.call = {}, .scale = scale.value_or(1.0f / std::sqrt(static_cast<float>(q.shape(3)))), .state_shape = {}};
  require(std::isfinite(checked.scale), "{}: scale is {}; it must be finite", op, checked.scale);
  checked.state_shape = {sequences, heads, q.shape(3), v.shape(3)};
  Call& call = checked.call;
  if (g != nullptr) {
    const Shape per_step{q.shape(0), q.shape(1), heads}, per_head{heads};
    require(g->shape() == per_step || g->shape() == per_head, "{}: g is {}; it must be f32[{}] or f32[{}]", op, *g,
            tw::join(per_step, ", "), heads);
    check_operand(op, "g", *g, DType::f32, device);
    call.g = g->rank() == 1 ? Tensor::borrow(g->data(), {q.shape(0), heads, q.shape(1)}, DType::f32, device, {0, g->stride(0), 0})
                            : g->transpose(1, 2);
  }
  call.cu_seqlens = cu_seqlens != nullptr ? cu_seqlens->data<std::int32_t>() : nullptr;
  call.sequences = static_cast<int>(sequences);
  call.length = static_cast<int>(q.shape(1));
  call.heads = static_cast<int>(heads);
  call.stream = checked_stream(op, stream, device);
  return checked;
}

void check_written(const char* op, std::initializer_list<NamedTensor> outputs, std::initializer_list<NamedTensor> inputs) {
  for (const NamedTensor& output : outputs) {
    if (output.tensor == nullptr) continue;
    check_output(op, output.name, *output.tensor);
    check_disjoint(op, output, inputs);
    for (const NamedTensor& other : outputs)
      if (&other < &output) check_disjoint(op, output, {other});
  }
}

Tensor by_head(const Tensor& t) { return t.transpose(1, 2); }

/// Without steps there is nothing for the copy engine. Everything else runs step by step.
bool in_chunks(const Checked& c, const Tensor& q) {
  return q.dtype() != DType::f32 && c.call.length > 0 && chunks_fit(c.call.stream, std::max(q.shape(3), c.state_shape[3]));
}
/// Whether states and outputs are computed in one walk.
bool walks(const char* op, const Checked& c, int config, std::int64_t dim, std::int64_t columns) {
  require(config >= -1 && config <= 1, "{}: config is {}; it must be -1 to 1", op, config);
  require(config < 1 || dim <= kWalkedDim, "{}: config is 1 and a head has {} columns; a walk supports up to {}", op, dim, kWalkedDim);
  require(config < 1 || walk_fits(c.call.stream), "{}: config is 1; on GPUs a walk is for Hopper's target, sm_90a", op);
  return config >= 0 ? config == 1 : dim <= kWalkedDim && walk_fits(c.call.stream) && walk_pays(c.call, columns);
}
bool has_states(const Checked& c) { return c.call.sequences > 0 && c.call.heads > 0; }

}  // namespace

void linear_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const LinearAttentionOptions& options) {
  constexpr const char* op = "linear_attention";
  const Checked c = check({op, q, k, v, options.scale, options.g, options.cu_seqlens, options.stream});
  check_like(op, {"o", &o}, {"v", &v});
  check_state(op, {"initial_state", options.initial_state}, c.state_shape, q.device());
  check_state(op, {"final_state", options.final_state}, c.state_shape, q.device());
  check_written(op, {{"o", &o}, {"final_state", options.final_state}},
                {{"q", &q}, {"k", &k}, {"v", &v}, {"g", options.g}, {"cu_seqlens", options.cu_seqlens}});
  check_disjoint(op, {"o", &o}, {{"initial_state", options.initial_state}});
  if (options.final_state && options.initial_state)
    check_in_place(op, {"final_state", options.final_state}, {"initial_state", options.initial_state});
  const bool one_walk = walks(op, c, options.config, q.shape(3), v.shape(3));
  if (!has_states(c)) return;

  const Tensor in_q = by_head(q), in_k = by_head(k), in_v = by_head(v), out = by_head(o);
  const RecurrencePass pass{in_q, in_k, in_v, options.initial_state, options.final_state, out, c.scale};
  if (q.dtype() == DType::f32 && options.config != 0 && f32_walks(c.call, q.shape(3))) return run_walk(c.call, run_decay(c.call), pass);
  if (!in_chunks(c, q)) return run_recurrence(c.call, pass);
  const Decay decay = run_decay(c.call);
  if (one_walk) return run_walk(c.call, decay, pass);
  const Tensor states = run_states(c.call, decay, {in_k, in_v, options.initial_state, options.final_state});
  run_outputs(c.call, decay, {in_q, in_k, in_v, states, StateForm::as_stored, out, c.scale, c.scale});
}

void linear_attention_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& state,
                           const LinearAttentionStepOptions& options) {
  constexpr const char* op = "linear_attention_step";
  const Checked c = check({op, q, k, v, options.scale, options.g, nullptr, options.stream});
  check_like(op, {"o", &o}, {"v", &v});
  check_state(op, {"state", &state}, c.state_shape, q.device());
  check_written(op, {{"o", &o}, {"state", &state}}, {{"q", &q}, {"k", &k}, {"v", &v}, {"g", options.g}});
  if (!has_states(c)) return;
  run_recurrence(c.call, {by_head(q), by_head(k), by_head(v), &state, &state, by_head(o), c.scale});
}

void linear_attention_backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& d_o, const Tensor& dq, const Tensor& dk,
                               const Tensor& dv, const LinearAttentionBackwardOptions& options) {
  constexpr const char* op = "linear_attention_backward";
  const Checked c = check({op, q, k, v, options.scale, options.g, options.cu_seqlens, options.stream});
  const Device device = q.device();
  check_like(op, {"d_o", &d_o}, {"v", &v});
  check_like(op, {"dq", &dq}, {"q", &q});
  check_like(op, {"dk", &dk}, {"k", &k});
  check_like(op, {"dv", &dv}, {"v", &v});
  const NamedTensor states[] = {
      {"initial_state", options.initial_state}, {"d_final_state", options.d_final_state}, {"d_initial_state", options.d_initial_state}};
  for (const NamedTensor& t : states) check_state(op, t, c.state_shape, device);
  if (options.dg != nullptr) {
    const Shape per_step{v.shape(0), v.shape(1), v.shape(2)};
    require(options.g != nullptr, "{}: dg is {}, but g is not given", op, *options.dg);
    require(options.dg->shape() == per_step, "{}: dg is {}; it must be f32[{}]", op, *options.dg, tw::join(per_step, ", "));
    check_operand(op, "dg", *options.dg, DType::f32, device);
  }
  check_written(
      op, {{"dq", &dq}, {"dk", &dk}, {"dv", &dv}, {"dg", options.dg}, states[2]},
      {{"q", &q}, {"k", &k}, {"v", &v}, {"d_o", &d_o}, {"g", options.g}, {"cu_seqlens", options.cu_seqlens}, states[0], states[1]});
  // Each gradient's q has the columns of q or v.
  const bool one_walk = walks(op, c, options.config, std::max(q.shape(3), v.shape(3)), std::min(q.shape(3), v.shape(3)));
  if (!has_states(c)) return;

  const Call& call = c.call;
  const Tensor in_q = by_head(q), in_k = by_head(k), in_v = by_head(v), in_do = by_head(d_o);
  const Tensor out_dq = by_head(dq), out_dk = by_head(dk), out_dv = by_head(dv);
  // Heads of v that share one of q and k have gradients of their own, which are added up.
  const bool shared = q.shape(2) != v.shape(2);
  const auto of_each_head = [&](const Tensor& out) {
    return shared ? by_head(workspace({q.shape(0), q.shape(1), v.shape(2), q.shape(3)}, q.dtype(), call.stream)) : out;
  };
  const Tensor each_dq = of_each_head(out_dq), each_dk = of_each_head(out_dk);
  Tensor final;  // for dg
  if (options.dg && options.d_final_state) final = workspace(c.state_shape, DType::f32, call.stream);
  const Tensor* const final_state = options.dg && options.d_final_state ? &final : nullptr;
  // In f32 what a step gives its own dq and dk is kept out of dg, where it would cancel.
  const bool own_apart = options.dg != nullptr && q.dtype() == DType::f32;
  // Each gradient is linear attention of other operands: of dq with the same states, transposed; of dk and dv from the last step to the
  // first, with the states' gradients.
  const bool chunks = in_chunks(c, q);
  const Decay decay = chunks ? run_decay(call) : Decay{};
  if (chunks && !one_walk) {
    {
      const Tensor state = run_states(call, decay, {in_k, in_v, options.initial_state, final_state});
      run_outputs(call, decay, {in_do, in_v, in_k, state, StateForm::transposed, each_dq, c.scale, c.scale});
    }
    const Tensor d_state = run_states(call, decay, {in_q, in_do, options.d_final_state, options.d_initial_state, c.scale, true});
    run_outputs(call, decay, {in_v, in_do, in_q, d_state, StateForm::transposed, each_dk, c.scale, 1, true});
    run_outputs(call, decay, {in_k, in_q, in_do, d_state, StateForm::as_stored, out_dv, c.scale, 1, true});
  } else {
    const auto run = [&](const RecurrencePass& pass) { chunks ? run_walk(call, decay, pass) : run_recurrence(call, pass); };
    const auto transposed = [](const Tensor* t) { return t != nullptr ? t->transpose(2, 3) : Tensor(); };
    const auto given = [](const Tensor& t) { return t.rank() == 4 ? &t : nullptr; };
    const Tensor initial = transposed(options.initial_state), last = transposed(final_state), d_final = transposed(options.d_final_state);
    run({in_do, in_v, in_k, given(initial), given(last), each_dq, c.scale, 1, false, !own_apart});
    run({in_v, in_do, in_q, given(d_final), nullptr, each_dk, 1, c.scale, true, !own_apart});
    run({in_k, in_q, in_do, options.d_final_state, options.d_initial_state, out_dv, 1, c.scale, true});
  }
  if (options.dg != nullptr) {
    const GateNumbers numbers = own_apart ? run_own_steps(call, in_q, in_k, in_v, in_do, c.scale, each_dq, each_dk)
                                          : run_gate_products(call, in_q, in_k, each_dq, each_dk);
    run_gate_gradients(call, numbers, final_state, options.d_final_state, by_head(*options.dg));
  }
  if (shared && call.length > 0) {
    run_sum_of_heads(call, each_dq, out_dq);
    run_sum_of_heads(call, each_dk, out_dk);
  }
}

}  // namespace tw
