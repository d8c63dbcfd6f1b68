#pragma once

#include <cmath>
#include <initializer_list>

#include "kernels/check.hpp"
#include "kernels/mamba2/step_size.tile.hpp"
#include "tilewave/tensor.hpp"

// Checks of operands that the family's functions have in common. All throw InvalidArgument.

namespace tw::kernels::mamba2 {

inline constexpr std::int64_t kLargestDim = 256;

/// An operand with `like`'s shape, dtype and device.
inline void check_like(const char* op, NamedTensor t, NamedTensor like) {
  require(t.tensor->shape() == like.tensor->shape(), "{}: {} is {}; it must have {}'s shape, {}", op, t.name, *t.tensor, like.name,
          *like.tensor);
  check_operand(op, t.name, *t.tensor, like.tensor->dtype(), like.tensor->device());
}

/// A gradient that is optional, of an input that must be given with it.
inline void check_gradient_of(const char* op, NamedTensor gradient, NamedTensor of) {
  if (gradient.tensor == nullptr) return;
  require(of.tensor != nullptr, "{}: {} is {}, but {} is not given", op, gradient.name, *gradient.tensor, of.name);
  check_like(op, gradient, of);
}

/// A tensor of f32 with this shape, if it is given.
inline void check_f32(const char* op, NamedTensor t, const Shape& shape, Device device) {
  if (t.tensor == nullptr) return;
  require(t.tensor->shape() == shape, "{}: {} is {}; it must be f32[{}]", op, t.name, *t.tensor, tw::join(shape, ", "));
  check_operand(op, t.name, *t.tensor, DType::f32, device);
}

/// x, [batch, seqlen, nheads, headdim].
inline void check_inputs(const char* op, const Tensor& x) {
  require(x.rank() == 4, "{}: x is {}; it must be [batch, seqlen, nheads, headdim]", op, x);
  require(x.shape(3) >= 1 && x.shape(3) <= kLargestDim, "{}: x is {}; its headdim must be 1 to {}", op, x, kLargestDim);
  check_operand(op, "x", x, x.dtype(), x.device());
}

/// B or C, [batch, seqlen, ngroups, dstate], for heads of x.
inline void check_keys(const char* op, const char* name, const Tensor& b, const Tensor& x) {
  require(b.rank() == 4 && b.shape(0) == x.shape(0) && b.shape(1) == x.shape(1),
          "{}: {} is {}; it must be [batch, seqlen, ngroups, dstate], with the batch and seqlen of x, {}", op, name, b, x);
  require(b.shape(3) >= 1 && b.shape(3) <= kLargestDim, "{}: {} is {}; its dstate must be 1 to {}", op, name, b, kLargestDim);
  require(b.shape(2) > 0 ? x.shape(2) % b.shape(2) == 0 : x.shape(2) == 0, "{}: {} is {}; x's heads must be a multiple of its groups, {}",
          op, name, b, x);
  check_operand(op, name, b, x.dtype(), x.device());
}

/// D, f32 [nheads] or [nheads, headdim], as [nheads, headdim].
inline Tensor checked_skip(const char* op, const Tensor& d, const Tensor& x) {
  const Shape of_heads{x.shape(2)}, of_dims{x.shape(2), x.shape(3)};
  require(d.shape() == of_heads || d.shape() == of_dims, "{}: D is {}; it must be f32[{}] or f32[{}]", op, d, x.shape(2),
          tw::join(of_dims, ", "));
  check_operand(op, "D", d, DType::f32, x.device());
  return Tensor::borrow(d.data(), of_dims, DType::f32, d.device(), {d.stride(0), d.rank() == 2 ? d.stride(1) : 0});
}

/// seq_idx, i32 [batch, seqlen].
inline void check_seq_idx(const char* op, const Tensor& seq_idx, const Shape& shape, Device device) {
  require(seq_idx.shape() == shape, "{}: seq_idx is {}; it must be i32[{}]", op, seq_idx, tw::join(shape, ", "));
  check_operand(op, "seq_idx", seq_idx, DType::i32, device);
}

/// `options`: of any function with step sizes.
StepSize checked_step_size(const char* op, const auto& options) {
  require(options.dt_min >= 0 && std::isfinite(options.dt_min), "{}: dt_min is {}; it must be finite and at least 0", op, options.dt_min);
  require(options.dt_max >= options.dt_min, "{}: dt_max is {}; it must be at least dt_min, {}", op, options.dt_max, options.dt_min);
  return {options.dt_softplus, options.dt_min, options.dt_max};
}

/// Outputs share memory neither with inputs nor with each other.
inline void check_written(const char* op, std::initializer_list<NamedTensor> outputs, std::initializer_list<NamedTensor> inputs) {
  for (const NamedTensor& output : outputs) {
    if (output.tensor == nullptr) continue;
    check_output(op, output.name, *output.tensor);
    check_disjoint(op, output, inputs);
    for (const NamedTensor& other : outputs)
      if (&other < &output) check_disjoint(op, output, {other});
  }
}

}  // namespace tw::kernels::mamba2
