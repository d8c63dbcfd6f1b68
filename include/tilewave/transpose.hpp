#pragma once

#include <optional>

#include "tilewave/tensor.hpp"

namespace tw {

struct TransposeOptions {
  std::optional<Stream> stream = {};  ///< default: the device's standard stream
};

/// y[..., n, m] = x[..., m, n]: swaps the last two dimensions in memory (Tensor::transpose swaps them in a view, without a copy).
///
/// `x`: [M, N] or [batch, M, N]; `y`: [N, M] or [batch, N, M]; the same dtype, any of them; elements are moved as bits. Any strides. Fast
/// if the last dimension of both is contiguous and, on a GPU, bases and strides are multiples of 4 bytes. Not in place. Extents are limited
/// to 2^30.
///
/// Enqueues on the stream and returns (on the CPU: done when it returns). Throws InvalidArgument for shapes, dtypes, strides or devices
/// that do not fit, with nothing written; CompileError, DeviceError.
void transpose(const Tensor& x, const Tensor& y, const TransposeOptions& options = {});

}  // namespace tw
