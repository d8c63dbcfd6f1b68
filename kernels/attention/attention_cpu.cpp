#include "kernels/attention/run.hpp"

namespace tw::kernels::attention {

namespace {

template <class T>
void run_dtype(const detail::AttentionCall& call) {
  const auto run = [&]<int D>() {
    if (call.q.shape(2) <= detail::kCpuFewRows)
      detail::run_attention_cpu<T, D, D, detail::kCpuFewRows>(call, kNoUserRule);
    else
      detail::run_attention_cpu<T, D, D, detail::kCpuRows>(call, kNoUserRule);
  };
  call.q.shape(3) <= 128 && call.v.shape(3) <= 128 ? run.template operator()<128>() : run.template operator()<256>();
}

}  // namespace

void run_cpu(const detail::AttentionCall& call) {
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
