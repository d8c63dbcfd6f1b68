#include "models/tensor_checks.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "tilewave/dtype.hpp"

namespace tw::models {

namespace {

/// Looks at the bits: an exponent of ones is infinity if the mantissa is 0, and else NaN.
template <class Bits>
NotFinite look(const Tensor& tensor, Bits exponent) {
  NotFinite found;
  const auto* bits = static_cast<const Bits*>(tensor.data());
  const std::int64_t count = tensor.numel();
  const Bits mantissa = static_cast<Bits>(exponent & -exponent) - 1;
  for (std::int64_t i = 0; i < count; ++i) {
    if ((bits[i] & exponent) != exponent) continue;
    if (found.first < 0) found.first = i;
    ++((bits[i] & mantissa) == 0 ? found.infinities : found.nans);
  }
  return found;
}

}  // namespace

NotFinite find_not_finite(const Tensor& tensor) {
  switch (tensor.dtype()) {
    case DType::f32:
      return look<std::uint32_t>(tensor, 0x7F800000u);
    case DType::f16:
      return look<std::uint16_t>(tensor, 0x7C00u);
    case DType::bf16:
      return look<std::uint16_t>(tensor, 0x7F80u);
    default:
      return {};
  }
}

Difference compare(const Tensor& a, const Tensor& b) {
  const Tensor x = a.to(DType::f32), y = b.to(DType::f32);
  double distance = 0, norm = 0;
  Difference result;
  for (std::int64_t i = 0; i < x.numel(); ++i) {
    const double mine = x.data<float>()[i], theirs = y.data<float>()[i], difference = mine - theirs;
    distance += difference * difference;
    norm += theirs * theirs;
    result.largest = std::isfinite(difference) ? std::max(result.largest, std::abs(difference)) : std::numeric_limits<double>::infinity();
  }
  result.relative_l2 = distance == 0 ? 0 : std::sqrt(distance / norm);
  if (!std::isfinite(result.largest) || !std::isfinite(result.relative_l2)) {
    result.relative_l2 = result.largest = std::numeric_limits<double>::infinity();
  }
  return result;
}

}  // namespace tw::models
