#pragma once

#include <cstdint>

#include "tilewave/bitnet.hpp"

namespace tw::kernels::bitnet {

/// A checked call of ternary_gemm(), whose result has elements.
struct Call {
  const Tensor& x;         ///< [M, K] of i8
  const Tensor& x_scales;  ///< [M]
  const TernaryMatrix& weight;
  const Tensor& y;  ///< [M, N]
  const BitLinearOptions& options;
  Stream stream;

  std::int64_t m() const { return x.shape(0); }
  std::int64_t n() const { return y.shape(1); }
  std::int64_t k() const { return x.shape(1); }
};

void run_on_cpu(const Call& call);
void run_on_gpu(const Call& call);

// The other operations, checked, on tensors with elements.

void quantize_activations_on_cpu(const Tensor& x, const Tensor& values, const Tensor& scales);
void quantize_activations_on_gpu(const Tensor& x, const Tensor& values, const Tensor& scales, const Stream& stream);
void quantize_ternary_on_cpu(const Tensor& weight, const TernaryMatrix& out);
void quantize_ternary_on_gpu(const Tensor& weight, const TernaryMatrix& out, const Stream& stream);
/// Rows of `out` for those of `weight`, which may be a slice.
void unpack_on_cpu(const TernaryMatrix& weight, const Tensor& out);
void unpack_on_gpu(const TernaryMatrix& weight, const Tensor& out, const Stream& stream);

}  // namespace tw::kernels::bitnet
