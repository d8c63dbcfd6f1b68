#pragma once

#include <optional>

#include "tilewave/tensor.hpp"

namespace tw {

struct NormOptions {
  float epsilon = 1e-5f;              ///< positive and finite, or 0
  const Tensor* weight = nullptr;     ///< [N], of x's dtype or f32, any stride; default: ones
  const Tensor* bias = nullptr;       ///< the same, of weight's dtype if both are given; layer_norm() only; default: zeros
  const Tensor* residual = nullptr;   ///< x's shape and dtype: h = x + residual is normalised instead of x
  const Tensor* sum = nullptr;        ///< output, x's shape and dtype: h; may be x or the residual. Needs a residual
  std::optional<Stream> stream = {};  ///< default: the device's standard stream
};

/// y = (h - mean(h)) / sqrt(var(h) + epsilon) * weight + bias over the last dimension, N long; h is x, or x + residual. Statistics are f32:
/// first the mean, then the mean of the squared distances from it. The rest is computed in f32 and rounded once.
///
/// `x`, `y`: 1 to 4 dimensions, one shape, any strides, f32, f16 or bf16 each; y may be x, or the residual. Rows of any length. h is first
/// rounded to x's dtype, whether it is stored or not, so the result is the same as with separate operations. A NaN or an infinity makes its
/// whole row NaN.
///
/// Enqueues on the stream and returns (on the CPU: done when it returns). Throws InvalidArgument for shapes, dtypes, strides or devices
/// that do not fit, with nothing written; CompileError, DeviceError.
void layer_norm(const Tensor& x, const Tensor& y, const NormOptions& options = {});

/// y = h / sqrt(mean(h^2) + epsilon) * weight. Like layer_norm(), but as in Llama models the normalised row is rounded to x's dtype before
/// it is multiplied by the weight (in f32) and rounded to y's dtype. An infinity gives NaN in its own element and 0 in the rest of the row,
/// as in the formula.
void rms_norm(const Tensor& x, const Tensor& y, const NormOptions& options = {});

}  // namespace tw
