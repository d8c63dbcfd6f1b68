#pragma once

#include <optional>

#include "tilewave/tensor.hpp"

namespace tw {

enum class Reduction {
  sum,
  mean,
  max,
  min,
  abs_max  ///< the largest magnitude
};

struct ReduceOptions {
  int dim = -1;                       ///< the dimension to reduce; negative: from the last
  std::optional<Stream> stream = {};  ///< default: the device's standard stream
};

/// y = the sum, mean, largest, smallest or largest absolute value of x along one dimension.
///
/// `x`: 1 to 4 dimensions of f32, f16 or bf16, any strides. `y`: contiguous, of x's dtype or f32, x's shape with the dimension removed or
/// 1. Without elements a sum is 0 and a mean NaN; max, min and abs_max are an error. A NaN makes its result NaN. Extents are limited to
/// 2^30.
///
/// Accumulation is in f32, in the same order in every run on one kind of device: elements are distributed over some hundreds of partial
/// results (fewer for few elements), which are combined pairwise. If few results have many elements, several blocks share a result. This
/// needs f32 memory from the stream, so it is a DeviceError on a stream that is being captured into a graph. Not needed for rows of less
/// than 16384 elements, columns of less than 128, and enough results to keep the device busy.
///
/// Enqueues on the stream and returns (on the CPU: done when it returns). Throws InvalidArgument for shapes, dtypes, strides or devices
/// that do not fit, with nothing written; CompileError, DeviceError, OutOfMemory.
void reduce(Reduction reduction, const Tensor& x, const Tensor& y, const ReduceOptions& options = {});

}  // namespace tw
