#pragma once

#include "kernels/mamba2/checks.hpp"
#include "kernels/mamba2/chunks.hpp"

// Checks of operands that the five steps and their gradients have in common. All throw InvalidArgument.

namespace tw::kernels::mamba2 {

/// A contiguous tensor with this shape: what one of the steps gives another. `dims` names the dimensions.
inline void check_between(const char* op, NamedTensor t, const Shape& shape, const char* dims, Device device) {
  require(t.tensor->shape() == shape && t.tensor->is_contiguous(), "{}: {} is {}; it must be contiguous, [{}]: {}", op, t.name, *t.tensor,
          tw::join(shape, ", "), dims);
  check_operand(op, t.name, *t.tensor, t.tensor->dtype(), device);
}
inline void check_f32_between(const char* op, NamedTensor t, const Shape& shape, const char* dims, Device device) {
  check_between(op, t, shape, dims, device);
  check_operand(op, t.name, *t.tensor, DType::f32, device);
}

inline constexpr const char *kOfSteps = "[batch, nheads, nchunks, chunk_size]", *kOfStates = "[batch, nchunks, nheads, headdim, dstate]",
                            *kOfProducts = "[batch, nchunks, ngroups, chunk_size, chunk_size]";

/// The chunk size of a tensor with chunks of `seqlen` steps.
inline std::int64_t checked_chunk_size(const char* op, NamedTensor t, int rank, const char* dims) {
  require(t.tensor->rank() == rank, "{}: {} is {}; it must be {}", op, t.name, *t.tensor, dims);
  const std::int64_t size = t.tensor->shape(rank - 1);
  require(size >= 16 && size <= kLargestChunk && size % 16 == 0, "{}: {} is {}; its chunk_size must be a multiple of 16 from 16 to {}", op,
          t.name, *t.tensor, kLargestChunk);
  return size;
}

inline void check_16_bits(const char* op, NamedTensor t) {
  require(t.tensor->dtype() == DType::f16 || t.tensor->dtype() == DType::bf16, "{}: {} is {}; f16 and bf16 are supported", op, t.name,
          *t.tensor);
}

/// Numbers of chunks and heads together, and of steps, are ints.
inline void check_counts(const char* op, std::int64_t batch, std::int64_t chunks, std::int64_t heads, std::int64_t chunk_size) {
  const std::int64_t of_batch = std::max<std::int64_t>(batch, 1) * std::max<std::int64_t>(heads, 1);
  require(batch <= kLargestExtent && heads <= kLargestExtent && of_batch <= kLargestExtent && chunks <= kLargestExtent / of_batch &&
              chunks <= kLargestExtent / chunk_size,
          "{}: the batch is {}, nchunks {} and nheads {}; their product, and nchunks * chunk_size, must be at most {}", op, batch, chunks,
          heads, kLargestExtent);
}

/// dt and da_cumsum of x's steps.
inline void check_steps(const char* op, const Tensor& x, const Tensor& dt, const Tensor& sums) {
  const std::int64_t size = checked_chunk_size(op, {"dA_cumsum", &sums}, 4, kOfSteps);
  const Shape shape{x.shape(0), x.shape(2), ceil_div(x.shape(1), size), size};
  check_counts(op, shape[0], shape[2], shape[1], size);
  check_f32_between(op, {"dA_cumsum", &sums}, shape, kOfSteps, x.device());
  check_f32_between(op, {"dt", &dt}, shape, kOfSteps, x.device());
}

/// chunk_cumsum's operands. sums and sizes: of its outputs' shape, or their gradients.
ChunkCumsumCall checked_cumsum(const char* op, const Tensor& dt, const Tensor& a, NamedTensor sums, NamedTensor sizes,
                               const auto& options) {
  const Device device = dt.device();
  require(is_float(dt.dtype()), "{}: dt is {}; f32, f16 and bf16 are supported", op, dt);
  require(dt.rank() == 3, "{}: dt is {}; it must be [batch, seqlen, nheads]", op, dt);
  check_operand(op, "dt", dt, dt.dtype(), device);
  check_extents(op, "dt", dt);
  const Shape per_head{dt.shape(2)};
  check_f32(op, {"A", &a}, per_head, device);
  check_f32(op, {"dt_bias", options.dt_bias}, per_head, device);
  const std::int64_t size = checked_chunk_size(op, sums, 4, kOfSteps);
  const Shape shape{dt.shape(0), dt.shape(2), ceil_div(dt.shape(1), size), size};
  check_counts(op, shape[0], shape[2], shape[1], size);
  check_f32_between(op, sums, shape, kOfSteps, device);
  check_f32_between(op, sizes, shape, kOfSteps, device);
  if (options.seq_idx != nullptr) check_seq_idx(op, *options.seq_idx, {dt.shape(0), dt.shape(1)}, device);
  return {.dt = dt,
          .rate = as_column(a),
          .bias = options.dt_bias != nullptr ? as_column(*options.dt_bias) : Tensor(),
          .seq_idx = options.seq_idx != nullptr ? *options.seq_idx : Tensor(),
          .sums = *sums.tensor,
          .sizes = *sizes.tensor,
          .size = checked_step_size(op, options)};
}

/// States of chunks that are passed on. Their dtype and layout are checked elsewhere.
inline void check_states(const char* op, NamedTensor t) {
  const Tensor& states = *t.tensor;
  require(states.rank() == 5, "{}: {} is {}; it must be {}", op, t.name, states, kOfStates);
  check_counts(op, states.shape(0), states.shape(1), states.shape(2), 1);
  require(elements_of_state(states) <= kLargestExtent, "{}: {} is {}; headdim * dstate must be at most {}", op, t.name, states,
          kLargestExtent);
}

/// bmm_chunk's operands. cb: its output, or that one's gradient.
inline void check_products(const char* op, const Tensor& c, const Tensor& b, NamedTensor cb) {
  check_16_bits(op, {"C", &c});
  require(c.rank() == 4 && c.shape(3) >= 1, "{}: C is {}; it must be [batch, seqlen, ngroups, dstate], with a dstate of at least 1", op, c);
  check_operand(op, "C", c, c.dtype(), c.device());
  check_extents(op, "C", c);
  check_like(op, {"B", &b}, {"C", &c});
  const std::int64_t size = checked_chunk_size(op, cb, 5, kOfProducts), chunks = ceil_div(c.shape(1), size);
  check_counts(op, c.shape(0), chunks, c.shape(2), size);
  check_f32_between(op, cb, {c.shape(0), chunks, c.shape(2), size, size}, kOfProducts, c.device());
}

/// chunk_scan's operands.
inline void check_scan(const char* op, const Tensor& cb, const Tensor& x, const Tensor& dt, const Tensor& da_cumsum, const Tensor& c,
                       const Tensor& states) {
  check_16_bits(op, {"x", &x});
  check_inputs(op, x);
  check_keys(op, "C", c, x);
  check_steps(op, x, dt, da_cumsum);
  const std::int64_t chunks = da_cumsum.shape(2), size = da_cumsum.shape(3);
  check_f32_between(op, {"CB", &cb}, {x.shape(0), chunks, c.shape(2), size, size}, kOfProducts, x.device());
  check_between(op, {"states", &states}, {x.shape(0), chunks, x.shape(2), x.shape(3), c.shape(3)}, kOfStates, x.device());
  check_operand(op, "states", states, x.dtype(), x.device());
}

}  // namespace tw::kernels::mamba2
