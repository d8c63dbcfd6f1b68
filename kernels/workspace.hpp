#pragma once

#include <memory>
#include <utility>

#include "runtime/stream.hpp"
#include "tilewave/tensor.hpp"

namespace tw::kernels {

/// Memory for one call. While the stream is captured, the graph owns it.
inline Tensor workspace(Shape shape, DType dtype, const Stream& stream) {
  std::int64_t elements = 1;
  for (const std::int64_t extent : shape) elements *= extent;
  const std::shared_ptr<void> memory = allocate_workspace(static_cast<std::size_t>(elements) * size_of(dtype), stream);
  return Tensor::borrow(memory.get(), std::move(shape), dtype, stream.device(), {}, memory);
}

/// Zeros for one launch on a GPU whose tiles wait for each other; the kernel leaves zeros behind.
inline constexpr int kMostCounters = kLaunchCounters - 2;
inline unsigned* counters(const Stream& stream) { return StreamAccess::counter_for_launch(stream) + 2; }

}  // namespace tw::kernels
