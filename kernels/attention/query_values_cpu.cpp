#include "kernels/attention/call.hpp"

// attention() with qv on the CPU.

namespace tw::kernels::attention {

namespace {

/// One size for all: the kernel is quicker to build.
template <class T>
void run_dtype(const detail::AttentionCall& call) {
  using List = detail::CpuRules<>;
  static constexpr AttentionConfig kConfig = detail::cpu_config(256, 64, detail::kCpuKeys, kQueryValues);
  launch_cpu<Attention<T, kConfig, List>>(detail::attention_grid(call, kConfig.rows), [&](auto& bind, auto& p) {
    detail::fill_attention<List>(bind, p, call, kConfig.keys, kNoUserRule);
  });
}

}  // namespace

void run_query_values_on_cpu(const detail::AttentionCall& call) {
  switch (call.q.dtype()) {
    case DType::f16:
      return run_dtype<f16>(call);
    case DType::bf16:
      return run_dtype<bf16>(call);
    default:
      return run_dtype<float>(call);
  }
}

}  // namespace tw::kernels::attention
