#include "kernels/attention/run.hpp"

namespace tw::kernels::attention {

namespace {

template <class T>
void run_dtype(const detail::AttentionCall& call) {
  const bool few = call.q.shape(2) <= 16;
  if (call.q.shape(3) <= 128 && call.v.shape(3) <= 128)
    few ? detail::run_attention_cpu<T, 128, 128, 16>(call, kNoUserRule) : detail::run_attention_cpu<T, 128, 128, 64>(call, kNoUserRule);
  else
    few ? detail::run_attention_cpu<T, 256, 256, 16>(call, kNoUserRule) : detail::run_attention_cpu<T, 256, 256, 64>(call, kNoUserRule);
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
