#pragma once

#include "tilewave/f32_products.hpp"
#include "tilewave/tensor.hpp"

namespace tw::kernels {

/// An operand's side in products of parts: the sum over k of a b becomes that of high high + low high + high low, three times as many.
enum class ProductSide { left, right };

/// The parts of an f32 tensor [.., K] side by side, [.., 3 K]: high, low, high of a left operand, high, high, low of a right one. All are
/// tf32 numbers, so tensor cores multiply them exactly. Up to 4 dimensions.
Tensor tf32_parts(const Tensor& x, ProductSide side, const Stream& stream);

/// Whether a call's products are to be made of parts.
inline bool wants_tf32_parts(const Tensor& operand) {
  return operand.dtype() == DType::f32 && operand.device().is_cuda() && f32_products() == F32Products::exact;
}

}  // namespace tw::kernels
