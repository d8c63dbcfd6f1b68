#include "kernels/attention/ladder.hpp"

#include <type_traits>

#include "kernels/attention/ladder.tile.hpp"
#include "runtime/format.hpp"
#include "tilewave/attention.hpp"
#include "tilewave/detail/attention_call.hpp"
#include "tilewave/gemm.hpp"
#include "tilewave/launch.hpp"
#include "tilewave/softmax.hpp"

namespace tw::kernels::attention {

namespace {

/// launch<Kernel<T>>() for the call's dtype T. f32 is for the CPU: a GPU's tensor cores take V as it lies in 16 bits only.
template <template <class> class Kernel, class Bind>
void launch_for_dtype(const LadderCall& call, const TileGrid& grid, Bind bind) {
  if (call.q.dtype() == DType::bf16) return launch<Kernel<bf16>>(call.stream, grid, bind);
  if (call.q.dtype() == DType::f32 && !call.stream.device().is_cuda()) return launch_cpu<Kernel<float>>(grid, bind);
  throw InvalidArgument(tw::format("attention ladder: q is {}; bf16 is supported, and f32 on the CPU", name_of(call.q.dtype())));
}

/// [batch, seqlen, heads, head_dim], as tw::attention() takes it.
Tensor by_row(const Tensor& t) { return t.transpose(1, 2); }

detail::AttentionCall checked(const LadderCall& call) {
  return detail::check_attention(by_row(call.q), by_row(call.k), by_row(call.v), by_row(call.o),
                                 {.causal = call.causal, .stream = call.stream});
}

void mask_scores(const LadderCall& call) {
  const int heads = static_cast<int>(call.scores.shape(0)), seqlen = static_cast<int>(call.scores.shape(1));
  using Any = CausalMask<bf16>;
  const TileGrid grid{.m = ceil_div(seqlen, Any::tile_rows), .n = ceil_div(seqlen, Any::tile_cols), .batch = heads};
  launch_for_dtype<CausalMask>(call, grid, [&](auto& bind, auto& p) {
    bind(p.from, call.scores);
    bind(p.to, call.scores);
  });
}

/// The formula, an op at a time, with all scores in memory.
void run_naive(const LadderCall& call) {
  const auto heads = [&](const Tensor& t) { return t.reshape({t.shape(0) * t.shape(1), t.shape(2), t.shape(3)}); };
  tw::gemm(heads(call.q), heads(call.k).transpose(1, 2), call.scores, {.stream = call.stream});
  if (call.causal) mask_scores(call);
  softmax(call.scores, call.scores, {.scale = checked(call).scale, .stream = call.stream});
  tw::gemm(call.scores, heads(call.v), heads(call.o), {.stream = call.stream});
}

template <class Ideas>
struct Fused {
  template <class T>
  using Kernel = FusedAttention<T, kLadderHeadDim, Ideas>;
};
template <class Ideas>
void run_fused(const LadderCall& ladder_call) {
  const detail::AttentionCall call = checked(ladder_call);
  launch_for_dtype<Fused<Ideas>::template Kernel>(ladder_call, detail::attention_grid(call, Ideas::rows), [&](auto& bind, auto& p) {
    bind(p.q, call.q);
    bind(p.k, call.k);
    bind(p.v, call.v);
    bind(p.o, call.o);
    p.scale_log2 = call.scale * kLog2E;
    p.causal = call.upper;
  });
}

void run_product(const LadderCall& call) {
  tw::attention(by_row(call.q), by_row(call.k), by_row(call.v), by_row(call.o), {.causal = call.causal, .stream = call.stream});
}

}  // namespace

std::span<const Rung> ladder() {
  static constexpr Rung kLadder[] = {{"naive", run_naive},
                                     {"fa1", run_fused<OnlineSoftmax>},
                                     {"fa2", run_fused<LessBesides>},
                                     {"fa3-overlap", run_fused<ScoresAhead>},
                                     {"fa3-lazy", run_fused<LazyRescale>},
                                     {"fa3-order", run_fused<LongTilesFirst>},
                                     {"tilewave", run_product}};
  return kLadder;
}

std::vector<KernelSpec> ladder_kernels() {
  std::vector<KernelSpec> specs = {make_spec(kernel_info<CausalMask<bf16>>, true, true)};
  const auto add = [&]<class... Ideas>(std::type_identity<Ideas>...) {
    (specs.push_back(make_spec(kernel_info<FusedAttention<bf16, kLadderHeadDim, Ideas>>, true, true)), ...);
  };
  add(std::type_identity<OnlineSoftmax>{}, std::type_identity<LessBesides>{}, std::type_identity<ScoresAhead>{},
      std::type_identity<LazyRescale>{}, std::type_identity<LongTilesFirst>{});
  return specs;
}

}  // namespace tw::kernels::attention
