#pragma once

#include "tilewave/gemm.hpp"
#include "tilewave/tensor.hpp"

namespace tw::kernels::gemm {

/// Rotary position embedding of a projection's first heads, as rope() does it with half-split pairs.
struct Rotation {
  const Tensor& cos;  ///< f32 [at least positions, rotary_dim / 2], contiguous
  const Tensor& sin;
  int positions;  ///< of a sequence: row r is at position r % positions
  int heads;      ///< that are rotated
  int head_dim;   ///< 64 or 128; rotary_dim must be a multiple of 16: has_rotation()
};

struct NormedLinearOptions {
  const Tensor* row_scale = nullptr;  ///< f32 [rows]: row_scales() of x
  const Tensor* bias = nullptr;       ///< [N]
  Activation activation = Activation::none;
  const Rotation* rotation = nullptr;
  Stream stream;
};

/// Whether normed_linear() has kernels for the stream's target: those of Hopper GPUs, for 16-bit types.
bool has_normed_linear(DType dtype, const Stream& stream);
/// Whether it can rotate such heads.
bool has_rotation(int head_dim, int rotary_dim);

/// y = activation(row_scale (x weight^T) + bias), then rotated: all that follows a norm whose weight and shift fold_norm() has put into
/// `weight` and `bias`, in one kernel, which rounds once.
///
/// `x`: [rows, K]; `weight`: [N, K]; `y`: [rows, N]; contiguous, with rows that are multiples of 16 bytes; f16 or bf16. Throws
/// InvalidArgument where that is not so or has_normed_linear() is false, CompileError and DeviceError.
void normed_linear(const Tensor& x, const Tensor& weight, const Tensor& y, const NormedLinearOptions& options);

}  // namespace tw::kernels::gemm
