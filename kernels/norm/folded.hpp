#pragma once

#include "tilewave/tensor.hpp"

// A layer norm as a part of the linear layer that follows. With y = (x - mean) s gamma + beta and s = 1 / sqrt(variance + epsilon),
//
//   y W^T + b = s (x - mean) (W gamma)^T + b + beta W^T.
//
// If the mean of each row of W gamma is taken from it, the product no longer depends on the mean of x. So the norm becomes a scale for each
// row of the product.

namespace tw::kernels::norm {

/// The longest rows of both functions.
inline constexpr std::int64_t kLongestFolded = 8192;

/// scales = 1 / sqrt(variance + epsilon) of x's rows. `x`: [rows, K], f32, f16 or bf16; `scales`: f32 [rows]; contiguous. Enqueues on the
/// stream. Throws InvalidArgument, CompileError and DeviceError.
void row_scales(const Tensor& x, float epsilon, const Tensor& scales, const Stream& stream);

/// Puts a norm's weight and shift into the linear layer that follows, in place. `weight`: [N, K]; `bias`: [N]; `gamma`, `beta`: [K];
/// contiguous, of one dtype: f32, f16 or bf16. The arithmetic is f32's, and each result is rounded once.
void fold_norm(const Tensor& weight, const Tensor& bias, const Tensor& gamma, const Tensor& beta, const Stream& stream);

}  // namespace tw::kernels::norm
