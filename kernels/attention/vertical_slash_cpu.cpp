#include "kernels/attention/vertical_slash.hpp"

// Vertical-slash sparse attention on the CPU.

namespace tw::kernels::attention {

namespace {

template <class T, int kHeadDim>
void run_sizes(const VerticalSlashCall& call) {
  using List = detail::CpuRules<>;
  static constexpr AttentionConfig kConfig =
      detail::cpu_config(kHeadDim, detail::kCpuListedRows, detail::kCpuListedKeys, kListed | kColumns);
  with_slash_lists(call, kConfig.rows, kConfig.keys, [](const AttentionCall& some) {
    launch_cpu<Attention<T, kConfig, List>>(detail::attention_grid(some, kConfig.rows), [&](auto& bind, auto& p) {
      detail::fill_attention<List>(bind, p, some, kConfig.keys, kNoUserRule);
    });
  });
}

}  // namespace

void run_vertical_slash_on_cpu(const VerticalSlashCall& call) {
  const Tensor& q = call.attention.q;
  switch (q.dtype()) {
    case DType::f16:  // one size for all is quicker to build
      return run_sizes<f16, 256>(call);
    case DType::bf16:
      return std::max(q.shape(3), call.attention.v.shape(3)) > 128 ? run_sizes<bf16, 256>(call) : run_sizes<bf16, 128>(call);
    default:
      return run_sizes<float, 256>(call);
  }
}

}  // namespace tw::kernels::attention
