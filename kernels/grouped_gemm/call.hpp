#pragma once

#include "tilewave/grouped_gemm.hpp"

namespace tw::kernels::grouped_gemm {

/// A checked call of grouped_gemm(), whose result has elements.
struct Call {
  const Tensor& a;  ///< [M, K]
  Tensor b;         ///< [groups, N, K]
  const Tensor& offsets;
  const Tensor& d;
  const GroupedGemmOptions& options;
  Stream stream;
  Tensor a_scale = {};  ///< fp8: [M, ceil(K / 128)]
  Tensor b_scale = {};  ///< fp8: [groups, ceil(N / 128), ceil(K / 128)]

  bool block_scaled() const { return a.dtype() == DType::fp8_e4m3; }
  int groups() const { return static_cast<int>(b.shape(0)); }
  int m() const { return static_cast<int>(a.shape(0)); }
  int n() const { return static_cast<int>(b.shape(1)); }
  int k() const { return static_cast<int>(a.shape(1)); }
};

/// A checked call of k_grouped_gemm(), whose result has elements.
struct DepthCall {
  Tensor a;         ///< [K, M]
  const Tensor& b;  ///< [K, N]
  const Tensor& offsets;
  const Tensor& d;  ///< [groups, M, N]
  const KGroupedGemmOptions& options;
  Stream stream;

  int groups() const { return static_cast<int>(d.shape(0)); }
  int m() const { return static_cast<int>(d.shape(1)); }
  int n() const { return static_cast<int>(d.shape(2)); }
  int k() const { return static_cast<int>(b.shape(0)); }
};

void run_on_cpu(const Call& call);
void run_on_cpu(const DepthCall& call);
void run_on_gpu(const Call& call);
void run_on_gpu(const DepthCall& call);

}  // namespace tw::kernels::grouped_gemm
