#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "tilewave/dtype.hpp"

namespace tw {

/// Copies elements of `element_bytes` between two strided arrays of one shape on the CPU. Strides count elements. The arrays must not
/// overlap.
void copy_strided(void* to, std::span<const std::int64_t> to_strides, const void* from, std::span<const std::int64_t> from_strides,
                  std::span<const std::int64_t> shape, std::size_t element_bytes);

/// Converts `count` dense elements on the CPU, rounding once, to nearest even. See Tensor::to(DType).
void convert_elements(void* to, DType to_dtype, const void* from, DType from_dtype, std::int64_t count);

/// One element as double.
double element_as_double(const void* element, DType dtype);

}  // namespace tw
