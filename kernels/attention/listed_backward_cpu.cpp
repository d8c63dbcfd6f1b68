#include "kernels/attention/key_blocks.hpp"
#include "tilewave/launch.hpp"

// attention_backward() with lists of blocks on the CPU.

namespace tw::kernels::attention {

namespace {

using CpuBackwardRules =
    Rules<Optional<Softcap, Use::runtime>, Optional<Alibi, Use::runtime>, Optional<MaskTensor, Use::runtime>, Band<true, true, true>>;

/// Tiles that divide all blocks.
template <class T, int kHeadDim>
void gradients(const BackwardCall& call) {
  static constexpr AttentionConfig kConfig{.head_dim = kHeadDim,
                                           .value_dim = kHeadDim,
                                           .rows = detail::kCpuListedRows,
                                           .keys = detail::kCpuListedKeys,
                                           .stages = 1,
                                           .form = kRagged | kListed,
                                           .dropout = Use::runtime};
  if (has_keys(call)) {
    with_query_lists(call, kConfig.rows, kConfig.keys, {}, [](const BackwardCall& some) {
      launch_cpu<KeyGradients<T, kConfig, CpuBackwardRules, Gradients::keys_and_values>>(
          key_gradients_grid(some, kConfig.keys), [&](auto& bind, auto& p) { fill_key_gradients<CpuBackwardRules>(bind, p, some); });
    });
  }
  if (has_queries(call)) {
    with_key_lists(call, kConfig.rows, kConfig.keys, {}, [](const BackwardCall& some) {
      launch_cpu<QueryGradient<T, kConfig, CpuBackwardRules>>(detail::attention_grid(some.forward, kConfig.rows), [&](auto& bind, auto& p) {
        fill_query_gradient<CpuBackwardRules>(bind, p, some);
      });
    });
  }
}

/// Wider tiles than needed take longer.
template <class T>
void run_dtype(const BackwardCall& call) {
  call.dq.shape(3) > 128 || call.dv.shape(3) > 128 ? gradients<T, 256>(call) : gradients<T, 128>(call);
}

}  // namespace

void listed_gradients_on_cpu(const BackwardCall& call) {
  switch (call.dq.dtype()) {
    case DType::f16:  // there for completeness: one size for all is quicker to build
      return gradients<f16, 256>(call);
    case DType::bf16:
      return run_dtype<bf16>(call);
    default:
      return run_dtype<float>(call);
  }
}

}  // namespace tw::kernels::attention
