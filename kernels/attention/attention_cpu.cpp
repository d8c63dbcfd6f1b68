#include "kernels/attention/call.hpp"

namespace tw::kernels::attention {

namespace {

using detail::kCpuFewRows, detail::kCpuRows, detail::run_attention_cpu;

/// Of f32, where packing keys and values weighs most: that many queries share what is packed, if their tiles fit the cache.
constexpr int kManyRows = 2 * kCpuRows;

/// Whether tiles of kManyRows do hardly more rows than half as large ones, and are enough to go round.
bool takes_many_rows(const detail::AttentionCall& call) {
  const std::int64_t rows = call.q.shape(2), padded = (rows + kManyRows - 1) / kManyRows * kManyRows;
  return !call.ragged() && (padded - rows) * 8 <= rows && call.q.shape(0) * call.q.shape(1) * padded / kManyRows >= 2 * cpu_threads();
}

template <class T>
void run_dtype(const detail::AttentionCall& call) {
  const auto run = [&]<int D>() {
    if (call.q.shape(2) <= kCpuFewRows) return run_attention_cpu<T, D, kCpuFewRows>(call, kNoUserRule);
    if constexpr (is_same<T, float> && D <= 128) {
      if (takes_many_rows(call)) return run_attention_cpu<T, D, kManyRows>(call, kNoUserRule);
    }
    run_attention_cpu<T, D, kCpuRows>(call, kNoUserRule);
  };
  call.q.shape(3) <= 128 && call.v.shape(3) <= 128 ? run.template operator()<128>() : run.template operator()<256>();
}

}  // namespace

void run_on_cpu(const detail::AttentionCall& call) {
  switch (call.q.dtype()) {
    case DType::f16:  // there for completeness: one size for all is quicker to build
      return run_attention_cpu<f16, 256, kCpuFewRows>(call, kNoUserRule);
    case DType::bf16:
      return run_dtype<bf16>(call);
    default:
      return run_dtype<float>(call);
  }
}

}  // namespace tw::kernels::attention
