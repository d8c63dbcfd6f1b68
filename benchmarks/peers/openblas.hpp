#pragma once

// OpenBLAS's sgemm, as the peer of kernels/gemm on the CPU; found when the benchmark runs.

#include <string>

#include "tilewave/tensor.hpp"

namespace tw::bench {

class OpenBlas {
 public:
  /// Loads the library and sets its number of threads. False where it is missing; then `problem` says where it was looked for.
  bool open(std::string& problem, int threads = 1);

  /// "OpenBLAS 0.3.21 NO_LAPACKE DYNAMIC_ARCH NO_AFFINITY Zen MAX_THREADS=64".
  std::string version() const;

  /// d [M, N] = a [M, K] b [K, N], f32: row-major or transposed views.
  void sgemm(const Tensor& a, const Tensor& b, const Tensor& d) const;

 private:
  // cblas_sgemm with CBLAS_ORDER and CBLAS_TRANSPOSE as int; OpenBLAS's blasint is int in the builds that distributions ship as
  // libopenblas.so.0.
  using Sgemm = void(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float* a, int lda, const float* b,
                     int ldb, float beta, float* c, int ldc);
  Sgemm* sgemm_ = nullptr;
  void (*set_threads_)(int) = nullptr;
  char* (*config_)() = nullptr;
};

}  // namespace tw::bench
