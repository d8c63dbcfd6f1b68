#include "kernels/attention/run.hpp"

namespace tw::kernels::attention {

namespace {

/// Of f32, where packing keys and values weighs most: that many queries share what is packed, if their tiles fit the cache.
constexpr int kManyRows = 2 * detail::kCpuRows;

/// Whether tiles of kManyRows do hardly more rows than half as large ones, and are enough to go round.
bool takes_many_rows(const detail::AttentionCall& call) {
  const std::int64_t rows = call.q.shape(2), padded = (rows + kManyRows - 1) / kManyRows * kManyRows;
  return !call.ragged() && (padded - rows) * 8 <= rows && call.q.shape(0) * call.q.shape(1) * padded / kManyRows >= 2 * cpu_threads();
}

template <class T>
void run_dtype(const detail::AttentionCall& call) {
  const auto run = [&]<int D>() {
    if (call.q.shape(2) <= detail::kCpuFewRows) return detail::run_attention_cpu<T, D, D, detail::kCpuFewRows>(call, kNoUserRule);
    if constexpr (is_same<T, float> && D <= 128) {
      if (takes_many_rows(call)) return detail::run_attention_cpu<T, D, D, kManyRows>(call, kNoUserRule);
    }
    detail::run_attention_cpu<T, D, D, detail::kCpuRows>(call, kNoUserRule);
  };
  call.q.shape(3) <= 128 && call.v.shape(3) <= 128 ? run.template operator()<128>() : run.template operator()<256>();
}

}  // namespace

void run_cpu(const detail::AttentionCall& call) {
  switch (call.q.dtype()) {
    case DType::f16:  // there for completeness: one size for all is quicker to build
      return detail::run_attention_cpu<f16, 256, 256, detail::kCpuFewRows>(call, kNoUserRule);
    case DType::bf16:
      return run_dtype<bf16>(call);
    default:
      return run_dtype<float>(call);
  }
}

}  // namespace tw::kernels::attention
