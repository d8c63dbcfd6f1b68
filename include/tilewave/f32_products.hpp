#pragma once

namespace tw {

/// How a GPU multiplies f32 operands, in gemm(), conv1d(), conv2d() and attention().
enum class F32Products {
  tf32,  ///< tensor cores drop the low 13 bits of each operand: an error of up to 2^-9 of a product
  /// Every operand is split into two tf32 numbers, and three products of them are added: an error of up to 2^-20 of a product, and of 2^-23
  /// of a sum for every eight products that tensor cores add. Takes more than three times as long, and memory for three times the operands.
  /// For comparisons with the CPU.
  exact
};

/// Sets how the products that this thread asks for are done, as long as it lives. Without one it is tf32. On the CPU products of f32 are
/// always exact.
class ScopedF32Products {
 public:
  explicit ScopedF32Products(F32Products products);
  ~ScopedF32Products();
  ScopedF32Products(const ScopedF32Products&) = delete;
  ScopedF32Products& operator=(const ScopedF32Products&) = delete;

 private:
  F32Products before_;
};

/// This thread's current choice.
F32Products f32_products();

}  // namespace tw
