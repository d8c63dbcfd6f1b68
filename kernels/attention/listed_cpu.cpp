#include "kernels/attention/key_blocks.hpp"

// attention() with lists of blocks on the CPU.

namespace tw::kernels::attention {

namespace {

template <class T, int kHeadDim>
void run_sizes(const detail::AttentionCall& call) {
  using List = detail::CpuRules<>;
  static constexpr AttentionConfig kConfig = detail::cpu_config(kHeadDim, detail::kCpuListedRows, detail::kCpuListedKeys, kListed);
  with_lists(call, kConfig.rows, kConfig.keys, [](const AttentionCall& some) {
    launch_cpu<Attention<T, kConfig, List>>(detail::attention_grid(some, kConfig.rows), [&](auto& bind, auto& p) {
      detail::fill_attention<List>(bind, p, some, kConfig.keys, kNoUserRule);
    });
  });
}

/// Wider tiles than needed take longer.
template <class T>
void run_dtype(const detail::AttentionCall& call) {
  call.q.shape(3) > 128 || call.v.shape(3) > 128 ? run_sizes<T, 256>(call) : run_sizes<T, 128>(call);
}

}  // namespace

void run_listed_on_cpu(const detail::AttentionCall& call) {
  switch (call.q.dtype()) {
    case DType::f16:  // there for completeness: one size for all is quicker to build
      return run_sizes<f16, 256>(call);
    case DType::bf16:
      return run_dtype<bf16>(call);
    default:
      return run_dtype<float>(call);
  }
}

}  // namespace tw::kernels::attention
