#pragma once

#include "tilewave/tensor.hpp"

namespace tw::kernels::gemm {

/// Whether swiglu_linear() has a kernel for so many rows: those of Hopper GPUs, for f16 and bf16. Few rows have none: there gemm() has
/// kernels that read the weight faster.
bool has_swiglu_linear(DType dtype, std::int64_t rows, const Stream& stream);

/// y = silu(x gate^T) x up^T, elementwise, in one kernel that rounds once: what swiglu() makes of the product with both, which it does not
/// write.
///
/// `x`: [rows, K]; `weight`: [2 N, K], the rows of gate and after them those of up; `y`: [rows, N]; contiguous. Throws InvalidArgument
/// where that is not so or has_swiglu_linear() is false, CompileError and DeviceError.
void swiglu_linear(const Tensor& x, const Tensor& weight, const Tensor& y, const Stream& stream);

}  // namespace tw::kernels::gemm
