#include "kernels/attention/backward.hpp"
#include "tilewave/launch.hpp"

namespace tw::kernels::attention {

namespace {

/// Tests at run time cost less than a copy of the kernels for each list.
using CpuBackwardRules =
    Rules<Optional<Softcap, Use::runtime>, Optional<Alibi, Use::runtime>, Optional<MaskTensor, Use::runtime>, Band<true, true, true>>;

/// A tile shares what is packed for a product: the queries of a step among 128 keys, and the reverse.
constexpr AttentionConfig config_of(int head_dim, int queries, int keys) {
  return {
      .head_dim = head_dim, .value_dim = head_dim, .rows = queries, .keys = keys, .stages = 1, .form = kRagged, .dropout = Use::runtime};
}

template <class T, int kHeadDim>
void key_gradients(const BackwardCall& call) {
  constexpr AttentionConfig kConfig = config_of(kHeadDim, 64, 128);
  launch_cpu<KeyGradients<T, kConfig, CpuBackwardRules, Gradients::keys_and_values>>(
      key_gradients_grid(call, kConfig.keys), [&](auto& bind, auto& p) { fill_key_gradients<CpuBackwardRules>(bind, p, call); });
}
template <class T, int kHeadDim>
void query_gradient(const BackwardCall& call) {
  constexpr AttentionConfig kConfig = config_of(kHeadDim, 128, 64);
  launch_cpu<QueryGradient<T, kConfig, CpuBackwardRules>>(detail::attention_grid(call.forward, kConfig.rows), [&](auto& bind, auto& p) {
    fill_query_gradient<CpuBackwardRules>(bind, p, call);
  });
}

template <class T, int kHeadDim>
void mask_gradient(const BackwardCall& call) {
  constexpr AttentionConfig kConfig = config_of(kHeadDim, 128, 64);
  launch_cpu<MaskGradient<T, cpu::AnyFloat, kConfig, CpuBackwardRules>>(
      mask_gradient_grid(call, kConfig), [&](auto& bind, auto& p) { fill_mask_gradient<CpuBackwardRules>(bind, p, call); });
}

/// Calls f.operator()<T, kHeadDim>() for the call's type and a width that holds its heads.
template <class F>
void with_sizes(const BackwardCall& call, F f) {
  const bool wide = call.dq.shape(3) > 128 || call.dv.shape(3) > 128;
  switch (call.dq.dtype()) {
    case DType::f16:  // there for completeness: one size for all is quicker to build
      return f.template operator()<f16, 256>();
    case DType::bf16:
      return wide ? f.template operator()<bf16, 256>() : f.template operator()<bf16, 128>();
    default:
      return wide ? f.template operator()<float, 256>() : f.template operator()<float, 128>();
  }
}

}  // namespace

void key_gradients_on_cpu(const BackwardCall& call) {
  with_sizes(call, [&]<class T, int kHeadDim>() { key_gradients<T, kHeadDim>(call); });
}
void query_gradient_on_cpu(const BackwardCall& call) {
  with_sizes(call, [&]<class T, int kHeadDim>() { query_gradient<T, kHeadDim>(call); });
}
void mask_gradient_on_cpu(const BackwardCall& call) {
  with_sizes(call, [&]<class T, int kHeadDim>() { mask_gradient<T, kHeadDim>(call); });
}

}  // namespace tw::kernels::attention
