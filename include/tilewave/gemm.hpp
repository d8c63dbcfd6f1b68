#pragma once

#include <optional>

#include "tilewave/tensor.hpp"

namespace tw {

enum class Activation {
  none,
  relu,       ///< max(x, 0)
  gelu_erf,   ///< x Phi(x)
  gelu_tanh,  ///< 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))
  silu,       ///< x / (1 + exp(-x))
  swiglu      ///< silu(even column) * next column: gate and up interleaved in B's columns (g0 u0 g1 u1 ...); D has N / 2 columns
};

/// GemmOptions::splits: every SM gets an equal share of all tiles' steps along K (stream-K).
inline constexpr int kStreamK = -1;

struct GemmOptions {
  float alpha = 1;
  float beta = 0;                ///< if not 0, D's old value is read as C
  const Tensor* bias = nullptr;  ///< [N], of D's dtype and contiguous; added to every row
  Activation activation = Activation::none;
  const Tensor* residual = nullptr;  ///< D's shape and dtype, any strides; added after the activation. May be D itself
  /// fp8: f32 factors of A and B, both or none, of any strides. A scalar, [1], is multiplied into alpha. One for each row of A, [M, 1], and
  /// one for each column of B, [1, N], are multiplied into the sums; either may be a scalar. Block scales, one for each 128 of K, are
  /// a_scale [M, ceil(K / 128)] and b_scale [ceil(K / 128), ceil(N / 128)]; each sum of 128 products is scaled and then accumulated in f32.
  const Tensor* a_scale = nullptr;
  const Tensor* b_scale = nullptr;
  std::optional<Stream> stream = {};  ///< default: the device's standard stream
  int config = -1;                    ///< index of a configuration, for tuning; -1: the tuned or else the heuristic's choice
  /// GPU, f16 and bf16: number of K splits, or kStreamK; 0: the heuristic's choice. Ignored where K is not divided: for swiglu, and for an
  /// A stored [K, M].
  int splits = 0;
  /// B, such as a model's weight, was complete before the previous launch on the stream: a GPU may read it while that launch still runs.
  bool constant_b = false;
};

/// D = activation(alpha A B + beta D + bias) + residual, accumulated in f32 (int8: in i32) and rounded once.
///
/// `a`: [M, K] or [batch, M, K]; `b`: [K, N] or [batch, K, N]; `d`: [M, N], or [batch, M, N] if a or b has a batch. An operand without a
/// batch is used for all. All on the stream's device. Any strides: pass a transposed operand as a transposed view. With a weight stored [N,
/// K] the usual "NT" product is gemm(x, w.transpose(0, 1), y). Sizes may be 0: K = 0 gives activation(beta D + bias) + residual.
///
///   a, b       d                  accumulation
///   f32        f32                on the CPU f32; on a GPU tf32, without the low 13 bits of operands, or exact: tilewave/f32_products.hpp
///   f16, bf16  same               f32
///   fp8        bf16, f32 or fp8   on the CPU f32; on a GPU about 14 bits, in the tensor cores; with block scales f32 after every 128 of K
///   i8         i32                i32, exact while |sum| < 2^31; without alpha, beta, bias, activation and residual
///
/// fp8 is fp8_e4m3 or fp8_e5m2: a, b and d each may be either. A D of fp8 is rounded to the nearest, numbers beyond the type's largest, 448
/// or 57344, to that; it takes neither beta, nor bias, nor a residual. swiglu takes neither beta nor a residual. Block scales are for
/// fp8_e4m3; they take no batch, alpha, beta, bias, activation or residual, and a D of bf16. Scales of rows and columns take no batch.
///
/// Fast on a GPU: M x K and N x K operands of any dtype, and K x M, K x N of the 16-bit ones, with 16-byte aligned bases and leading
/// strides. Everything else runs a slower variant. M up to 16 with a weight stored [N, K] runs kernels that read the weight once.
///
/// Enqueues on the stream and returns (on the CPU: done when it returns). Throws InvalidArgument for shapes, dtypes, strides or devices
/// that do not fit, with nothing written; CompileError, DeviceError.
void gemm(const Tensor& a, const Tensor& b, const Tensor& d, const GemmOptions& options = {});

/// The same into a new row-major tensor; options.beta must be 0.
Tensor matmul(const Tensor& a, const Tensor& b, const GemmOptions& options = {});

}  // namespace tw
