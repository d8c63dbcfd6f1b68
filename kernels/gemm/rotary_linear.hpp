#pragma once

#include "tilewave/gemm.hpp"
#include "tilewave/tensor.hpp"

namespace tw::kernels::gemm {

struct RotaryLinearOptions {
  const Tensor* bias = nullptr;  ///< [N]
  const Tensor& cos;             ///< f32 [at least positions, rotary_dim / 2], contiguous
  const Tensor& sin;
  int positions;  ///< of a sequence: row r is at position r % positions
  int heads;      ///< that are rotated: the first ones
  int head_dim;
  Stream stream;
};

/// Whether rotary_linear() has a kernel: those of Hopper GPUs, for f16 and bf16, heads of 64 or 128, a rotary_dim that is a multiple of 16.
bool has_rotary_linear(DType dtype, int head_dim, int rotary_dim, const Stream& stream);

/// y = x weight^T + bias with rotary position embedding of the first heads, as rope() does it with half-split pairs: the projection to
/// queries, keys and values in one kernel, which rounds once.
///
/// `x`: [rows, K]; `weight`: [N, K]; `y`: [rows, N], N a multiple of head_dim; contiguous. Throws InvalidArgument where that is not so or
/// has_rotary_linear() is false, CompileError and DeviceError.
void rotary_linear(const Tensor& x, const Tensor& weight, const Tensor& y, const RotaryLinearOptions& options);

}  // namespace tw::kernels::gemm
