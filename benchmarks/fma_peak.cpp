#include "benchmarks/harness.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <chrono>

namespace tw::bench {
namespace {

constexpr long kSteps = 2'000'000;
// Independent sums: the latency of a fused multiply-add (4 or 5 cycles) times the two that start per cycle, rounded up.
constexpr int kChains = 12;

/// FLOPs done, and a value that keeps the compiler from dropping them.
struct Work {
  double flops;
  float value;
};

#if defined(__x86_64__)
__attribute__((target("avx512f"))) Work fma_avx512() {
  __m512 sums[kChains];
  for (auto& sum : sums) sum = _mm512_set1_ps(1.0f);
  const __m512 factor = _mm512_set1_ps(0.999999f);
  for (long step = 0; step < kSteps; ++step) {
    for (auto& sum : sums) sum = _mm512_fmadd_ps(sum, factor, factor);
  }
  __m512 total = sums[0];
  for (int i = 1; i < kChains; ++i) total = _mm512_add_ps(total, sums[i]);
  alignas(64) float values[16];
  _mm512_store_ps(values, total);
  return {2.0 * 16 * kChains * kSteps, values[0]};
}

__attribute__((target("avx2,fma"))) Work fma_avx2() {
  __m256 sums[kChains];
  for (auto& sum : sums) sum = _mm256_set1_ps(1.0f);
  const __m256 factor = _mm256_set1_ps(0.999999f);
  for (long step = 0; step < kSteps; ++step) {
    for (auto& sum : sums) sum = _mm256_fmadd_ps(sum, factor, factor);
  }
  __m256 total = sums[0];
  for (int i = 1; i < kChains; ++i) total = _mm256_add_ps(total, sums[i]);
  alignas(32) float values[8];
  _mm256_store_ps(values, total);
  return {2.0 * 8 * kChains * kSteps, values[0]};
}
#endif

using Loop = Work (*)();

/// Null where no loop is written for this CPU.
Loop widest_loop() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return fma_avx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return fma_avx2;
#endif
  return nullptr;
}

}  // namespace

double measure_fma_peak() {
  const Loop loop = widest_loop();
  if (loop == nullptr) return 0;
  double best = 0;
  volatile float sink = 0;
  for (int repeat = 0; repeat < 10; ++repeat) {
    const auto begin = std::chrono::steady_clock::now();
    const Work work = loop();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    sink = work.value;
    best = std::max(best, work.flops / seconds.count() * 1e-9);
  }
  static_cast<void>(sink);
  return best;
}

}  // namespace tw::bench
