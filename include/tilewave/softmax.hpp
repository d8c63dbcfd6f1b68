#pragma once

#include <optional>

#include "tilewave/tensor.hpp"

namespace tw {

struct SoftmaxOptions {
  float scale = 1;                    ///< positive and finite
  std::optional<Stream> stream = {};  ///< default: the device's standard stream
};

/// y = softmax(scale x) over the last dimension: exp(scale (x - max)) / sum of exp(scale (x - max)), where max is the row's maximum. In
/// f32, rounded once.
///
/// `x`, `y`: 1 to 4 dimensions, one shape, any strides, f32, f16 or bf16 each; y may be x. Rows of any length. As in PyTorch an element of
/// -infinity gives 0, and a row with a NaN or +infinity, or with nothing but -infinity, is NaN in every element.
///
/// Enqueues on the stream and returns (on the CPU: done when it returns). Throws InvalidArgument for shapes, dtypes, strides or devices
/// that do not fit, with nothing written; CompileError, DeviceError.
void softmax(const Tensor& x, const Tensor& y, const SoftmaxOptions& options = {});

}  // namespace tw
