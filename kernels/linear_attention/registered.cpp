#include "kernels/check.hpp"
#include "kernels/linear_attention/call.hpp"
#include "kernels/linear_attention/decay.tile.hpp"
#include "kernels/linear_attention/recurrence.tile.hpp"
#include "kernels/linear_attention/states.tile.hpp"
#include "kernels/linear_attention/walk.tile.hpp"
#include "tilewave/analyze.hpp"
#include "tilewave/launch.hpp"

// The kernels that are worth compiling ahead of time, and their analysis.

namespace tw::kernels::linear_attention {

namespace {

/// A call on placeholders, with a gate for each step.
struct Problem {
  Problem(const ShapeValues& shape, DType dtype) {
    const std::int64_t batch = shape["batch"], seqlen = shape["seqlen"], heads = shape["heads"], shared = shape["shared"];
    const std::int64_t dk = shape["Dk"], dv = shape["Dv"];
    require(shared > 0 && heads % shared == 0, "shape: heads is {}; it must be a multiple of shared, {}", heads, shared);
    require(batch > 0 && seqlen > 0 && heads > 0, "shape: batch, seqlen and heads must be positive");
    require(dk > 0 && dk <= 128 && dv > 0 && dv <= 256, "shape: Dk is {} and Dv {}; the kernel supports 1 to 128 and 1 to 256", dk, dv);
    const auto by_head = [](const Tensor& t) { return t.transpose(1, 2); };
    q = by_head(placeholder({batch, seqlen, heads / shared, dk}, dtype));
    k = by_head(placeholder({batch, seqlen, heads / shared, dk}, dtype));
    v = by_head(placeholder({batch, seqlen, heads, dv}, dtype));
    o = by_head(placeholder({batch, seqlen, heads, dv}, dtype));
    state = placeholder({batch, heads, dk, dv}, DType::f32);
    call.g = by_head(placeholder({batch, seqlen, heads}, DType::f32));
    call.sequences = static_cast<int>(batch), call.length = static_cast<int>(seqlen), call.heads = static_cast<int>(heads);
    const Shape sums{heads, std::int64_t{call.chunks()} * kChunk};
    decay = {placeholder(sums, DType::f32), placeholder(sums, DType::f32)};
    states = placeholder(states_shape(call, dk, dv), dtype);
  }
  Tensor q, k, v, o, state, states;
  Call call;
  Decay decay;
};

using RegisteredDecay = ChunkDecay<kDecayHeads>;
Analysis analyze_decay(const ShapeValues& shape) {
  const Problem p(shape, DType::bf16);
  return analyze<RegisteredDecay>(decay_grid(p.call), [&](auto& bind, auto& params) { bind_decay(bind, params, p.call, p.decay); });
}

constexpr StatesKernel kStatesKernel{DType::bf16, kStatesColumns};
using RegisteredStates = States<bf16, kStatesColumns, kStages>;
Analysis analyze_states(const ShapeValues& shape) {
  const Problem p(shape, DType::bf16);
  const StatesPass pass{p.k, p.v, nullptr, &p.state};
  return analyze<RegisteredStates>(states_grid(p.call, pass, kStatesColumns), [&](auto& bind, auto& params) {
    bind_states(bind, params, p.call, p.decay, pass, p.states, kStatesColumns);
  });
}

template <StateForm kForm>
constexpr OutputsKernel kOutputsKernel{DType::bf16, 128, 128, kForm};
template <StateForm kForm>
using RegisteredOutputs = Outputs<bf16, 128, 128, kForm>;
template <StateForm kForm>
Analysis analyze_outputs(const ShapeValues& shape) {
  const Problem p(shape, DType::bf16);
  constexpr bool transposed = kForm == StateForm::transposed;
  if (transposed) require(shape["Dv"] <= 128, "shape: Dv is {}; the kernel supports up to 128", shape["Dv"]);
  const Tensor& keys = transposed ? p.v : p.k;
  const OutputsPass pass{transposed ? p.o : p.q, keys, transposed ? p.k : p.v, p.states, kForm, transposed ? p.q : p.o, 1, 1};
  return analyze<RegisteredOutputs<kForm>>(outputs_grid(p.call, pass, 128),
                                           [&](auto& bind, auto& params) { bind_outputs(bind, params, p.call, p.decay, pass); });
}

constexpr WalkKernel kWalkKernel{DType::bf16, 128, kWalkColumns};
using RegisteredWalk = Walk<bf16, 128, kWalkColumns, kWalkStages>;
Analysis analyze_walk(const ShapeValues& shape) {
  const Problem p(shape, DType::bf16);
  const RecurrencePass pass{p.q, p.k, p.v, nullptr, &p.state, p.o, 1};
  return analyze<RegisteredWalk>(walk_grid(p.call, pass, kWalkColumns),
                                 [&](auto& bind, auto& params) { bind_walk(bind, params, p.call, p.decay, pass); });
}

using RegisteredStep = Recurrence<bf16, 128, recurrence_columns(128), recurrence_warps(128)>;
Analysis analyze_step(const ShapeValues& shape) {
  const Problem p(shape, DType::bf16);
  const RecurrencePass pass{p.q, p.k, p.v, &p.state, &p.state, p.o, 1};
  return analyze<RegisteredStep>(recurrence_grid(p.call, pass, recurrence_columns(128)),
                                 [&](auto& bind, auto& params) { bind_recurrence(bind, params, p.call, pass); });
}

template <class Kernel>
KernelVariant named_variant(const std::string& type, const char* name, Analysis (*analyze)(const ShapeValues&)) {
  return {make_spec({type, Kernel::source, detail::tile_recorder<Kernel>()}, true, true, name), analyze};
}

}  // namespace

std::vector<KernelVariant> registered() {
  constexpr StateForm kAsStored = StateForm::as_stored, kTransposed = StateForm::transposed;
  return {
      {make_spec(kernel_info<RegisteredDecay>, true, true, "linear_attention_decay"), analyze_decay},
      named_variant<RegisteredStates>(type_of_states(kStatesKernel), "linear_attention_states_bf16", analyze_states),
      named_variant<RegisteredOutputs<kAsStored>>(type_of_outputs(kOutputsKernel<kAsStored>), "linear_attention_outputs_bf16_d128",
                                                  analyze_outputs<kAsStored>),
      named_variant<RegisteredOutputs<kTransposed>>(type_of_outputs(kOutputsKernel<kTransposed>),
                                                    "linear_attention_outputs_bf16_d128_transposed", analyze_outputs<kTransposed>),
      named_variant<RegisteredWalk>(type_of_walk(kWalkKernel), "linear_attention_walk_bf16_d128", analyze_walk),
      {make_spec(kernel_info<RegisteredStep>, true, true, "linear_attention_step_bf16_d128"), analyze_step},
  };
}

std::vector<KernelSpec> registered_generic() {
  std::vector<KernelSpec> specs;
  for (const KernelVariant& variant : registered()) {
    if (variant.spec.name.find("walk") != std::string::npos) continue;
    specs.push_back(for_target(variant.spec, GpuTarget::cuda));
  }
  return specs;
}

}  // namespace tw::kernels::linear_attention
