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
  int dim = -1;                       ///< the dimension that goes; negative: from the last
  std::optional<Stream> stream = {};  ///< default: the device's standard stream
};

/// y = the sum, mean, largest, smallest or largest absolute value of x along one dimension.
///
/// `x`: 1 to 4 dimensions of f32, f16 or bf16, any strides. `y`: contiguous, of x's dtype or f32, x's shape with the dimension left out or
/// 1 in its place. Without elements a sum is 0 and a mean NaN; max, min and abs_max are an error. A NaN makes its result NaN. Extents are
/// limited to 2^30.
///
/// Accumulation is in f32 and of a fixed order, the same in every run on one kind of device: elements are dealt to some hundreds of partial
/// results (fewer for few elements), which are combined pairwise. Where few results are made of many elements, blocks share one: that takes
/// f32 memory from the stream, which a stream that is being captured into a graph cannot give (DeviceError). Without it go rows of less
/// than 16384 elements, columns of less than 128, and more results than keep the device busy.
///
/// Enqueues on the stream and returns (on the CPU: done when it returns). Throws InvalidArgument for shapes, dtypes, strides or devices
/// that do not fit, with nothing written; CompileError, DeviceError, OutOfMemory.
void reduce(Reduction reduction, const Tensor& x, const Tensor& y, const ReduceOptions& options = {});

}  // namespace tw
