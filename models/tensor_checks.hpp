#pragma once

#include <cstdint>

#include "tilewave/tensor.hpp"

namespace tw::models {

struct NotFinite {
  std::int64_t nans = 0, infinities = 0;
  std::int64_t first = -1;  ///< the row-major index of the first of them; -1: all elements are finite
};
/// Looks for NaN and infinity in a row-major tensor on the CPU. Integers are finite.
NotFinite find_not_finite(const Tensor& tensor);

struct Difference {
  double relative_l2 = 0;  ///< |a - b| / |b|; infinite if b is 0 and a is not, or if any element of either is not finite
  double largest = 0;      ///< max |a - b|
};
/// Compares two row-major floating-point tensors of as many elements on the CPU.
Difference compare(const Tensor& a, const Tensor& b);

}  // namespace tw::models
