#pragma once

#include <optional>

#include "tilewave/tensor.hpp"

namespace tw {

struct TransposeOptions {
  std::optional<Stream> stream = {};  ///< default: the device's standard stream
};

/// y[..., n, m] = x[..., m, n]: the last two dimensions change places in memory (Tensor::transpose changes them in a view, without a copy).
///
/// `x`: [M, N] or [batch, M, N]; `y`: [N, M] or [batch, N, M]; of one dtype, any of them; elements are moved as bits. Any strides; fast
/// where the last dimension of both is contiguous, on a GPU also with bases and strides of whole 4 bytes. Not in place. Extents are limited
/// to 2^30.
///
/// Enqueues on the stream and returns (on the CPU: done when it returns). Throws InvalidArgument for shapes, dtypes, strides or devices
/// that do not fit, with nothing written; CompileError, DeviceError.
void transpose(const Tensor& x, const Tensor& y, const TransposeOptions& options = {});

}  // namespace tw
