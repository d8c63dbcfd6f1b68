#pragma once

#include <optional>

#include "tilewave/tensor.hpp"

namespace tw {

enum class Activation {
  none,
  relu,       ///< max(x, 0)
  gelu_erf,   ///< x Phi(x)
  gelu_tanh,  ///< 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))
  silu        ///< x / (1 + exp(-x))
};

struct GemmOptions {
  float alpha = 1;
  float beta = 0;                ///< not 0: D is read first, as C
  const Tensor* bias = nullptr;  ///< [N], of A's dtype and contiguous; added to every row
  Activation activation = Activation::none;
  const Tensor* residual = nullptr;   ///< D's shape and dtype, any strides; added after the activation
  std::optional<Stream> stream = {};  ///< default: the device's standard stream
  int config = -1;                    ///< GPU: index into kernels::gemm::configs() instead of the heuristic's choice; for tuning
};

/// D = activation(alpha A B + beta D + bias) + residual, accumulated in f32 and rounded once.
///
/// `a`: [M, K] or [batch, M, K]; `b`: [K, N] or [batch, K, N]; `d`: [M, N], or [batch, M, N] when a or b has a batch (an operand without
/// one is used for all). All of one dtype (f32, f16, bf16), on the stream's device. Any strides: a transposed operand is a transposed view,
/// so with a weight stored [N, K] the usual "NT" product is gemm(x, w.transpose(0, 1), y). Zero sizes are fine: K = 0 gives activation(beta
/// D + bias) + residual.
///
/// f32 is exact f32 arithmetic on the CPU; on a GPU it is tf32: tensor cores drop the low 13 bits of each operand. Fast on a GPU: M x K and
/// N x K operands of any dtype, and K x M, K x N of the 16-bit ones, with 16-byte aligned bases and leading strides; everything else runs a
/// slower variant.
///
/// Enqueues on the stream and returns (on the CPU: done when it returns). Throws InvalidArgument for shapes, dtypes, strides or devices
/// that do not fit, with nothing written; CompileError, DeviceError.
void gemm(const Tensor& a, const Tensor& b, const Tensor& d, const GemmOptions& options = {});

/// The same into a new row-major tensor; options.beta must be 0.
Tensor matmul(const Tensor& a, const Tensor& b, const GemmOptions& options = {});

}  // namespace tw
