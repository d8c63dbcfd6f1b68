#pragma once

#include <optional>

#include "tilewave/tensor.hpp"

namespace tw {

struct SwigluOptions {
  std::optional<Stream> stream = {};  ///< default: the device's standard stream
};

/// y = silu(gate) * up, silu(x) = x / (1 + exp(-x)), in f32, rounded once (Shazeer, arXiv 2002.05202).
///
/// `gate`, `up`, `y`: 1 to 4 dimensions, one shape, any strides, f32, f16 or bf16; gate and up have the same dtype, y any of them. y may be
/// gate or up. For the two halves of one tensor [.., 2 I] pass views: x.slice(-1, 0, I) and x.slice(-1, I, 2 * I). NaN stays NaN; a gate of
/// -infinity gives NaN, as in the formula.
///
/// Enqueues on the stream and returns (on the CPU: done when it returns). Throws InvalidArgument for shapes, dtypes, strides or devices
/// that do not fit, with nothing written; CompileError, DeviceError.
void swiglu(const Tensor& gate, const Tensor& up, const Tensor& y, const SwigluOptions& options = {});

/// The same for alternating columns, g0 u0 g1 u1 ...: `x` is [.., 2 I], `y` [.., I]. y must not share x's memory.
void swiglu_interleaved(const Tensor& x, const Tensor& y, const SwigluOptions& options = {});

}  // namespace tw
