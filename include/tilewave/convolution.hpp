#pragma once

#include <array>
#include <optional>

#include "tilewave/gemm.hpp"
#include "tilewave/tensor.hpp"

namespace tw {

struct Conv2dOptions {
  // {along H, along W}
  std::array<std::int64_t, 2> stride = {1, 1};    ///< at least 1
  std::array<std::int64_t, 2> padding = {0, 0};   ///< rows and columns of zeros on either side, at least 0
  std::array<std::int64_t, 2> dilation = {1, 1};  ///< distance of neighbouring taps, at least 1
  const Tensor* bias = nullptr;                   ///< [F], of x's dtype and contiguous
  Activation activation = Activation::none;       ///< any but swiglu
  std::optional<Stream> stream = {};              ///< default: the device's standard stream
  int config = -1;  ///< GPU: index into kernels::convolution::configs(), for tuning; -1: the tuned or else the heuristic's choice
};

struct Conv1dOptions {
  std::int64_t stride = 1;                   ///< at least 1
  std::int64_t padding = 0;                  ///< zeros on either side, at least 0
  std::int64_t dilation = 1;                 ///< distance of neighbouring taps, at least 1
  const Tensor* bias = nullptr;              ///< [F], of x's dtype and contiguous
  Activation activation = Activation::none;  ///< any but swiglu
  std::optional<Stream> stream = {};         ///< default: the device's standard stream
  int config = -1;                           ///< as in Conv2dOptions
};

/// y[n, oh, ow, f] = activation(bias[f] + sum over kh, kw, c of x[n, oh SH + kh DH - PH, ow SW + kw DW - PW, c] w[f, kh, kw, c]). x is 0
/// outside the image. This is the cross-correlation of torch.conv2d, without groups. Accumulated in f32 and rounded once.
///
/// `x`: [N, H, W, C]; `w`: [F, KH, KW, C]; `y`: [N, OH, OW, F] with OH = floor((H + 2 PH - DH (KH - 1) - 1) / SH) + 1, OW likewise. All of
/// one dtype (f32, f16, bf16), on the stream's device. Any strides: pass other storage orders as transposed views. N, F and C may be 0 (C =
/// 0 gives activation(bias)). The kernel must fit into the padded image, as in PyTorch.
///
/// f32 is exact f32 arithmetic on the CPU. On a GPU it is tf32, without the low 13 bits, or exact: tilewave/f32_products.hpp.
///
/// Fast on a GPU: x and y dense along their channels; weights dense along C, or along F for the 16-bit types; 16-byte aligned bases and
/// other strides; convolution strides up to 8. Everything else (such as PyTorch's NCHW) runs a slower variant.
///
/// Enqueues on the stream and returns (on the CPU: done when it returns). Throws InvalidArgument for shapes, dtypes, strides or devices
/// that do not fit, with nothing written; CompileError, DeviceError.
void conv2d(const Tensor& x, const Tensor& w, const Tensor& y, const Conv2dOptions& options = {});

/// The same in one dimension: x [N, L, C], w [F, K, C], y [N, OL, F].
void conv1d(const Tensor& x, const Tensor& w, const Tensor& y, const Conv1dOptions& options = {});

}  // namespace tw
