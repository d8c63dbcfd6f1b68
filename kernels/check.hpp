#pragma once

#include <initializer_list>

#include "runtime/format.hpp"
#include "tilewave/tensor.hpp"

/// In messages a tensor is what Tensor::describe() says. It is passed itself: a text that is made before every check, for a message that is
/// hardly ever wanted, would take most of a call's time.
template <>
struct fmt::formatter<tw::Tensor> : tw::TextFormatter {
  auto format(const tw::Tensor& tensor, fmt::format_context& context) const { return put(tensor.describe(), context); }
};

namespace tw {

/// Throws InvalidArgument with the formatted message unless `condition` holds.
template <class... Args>
void require(bool condition, fmt::format_string<Args...> message, Args&&... args) {
  if (!condition) throw InvalidArgument(detail::format_arguments(message, fmt::make_format_args(args...)));
}

/// What every operand of every op must be: on `device`, of `dtype`, with memory behind it that is aligned to its elements. Throws
/// InvalidArgument.
void check_operand(const char* op, const char* argument, const Tensor& tensor, DType dtype, Device device);

/// An output must not map two indices to the same memory. Throws InvalidArgument.
void check_output(const char* op, const char* argument, const Tensor& tensor);

/// Whether an element of `a` and an element of `b` have a byte in common. Tensors that interleave, such as the parts of one
/// [batch, seqlen, 3, heads, dim] tensor, do not. Pointer arithmetic only; where the strides are so irregular that the search for a common
/// byte is given up, the answer is true.
bool share_memory(const Tensor& a, const Tensor& b);

/// A call's tensor and what messages call it; null where the call has none.
struct NamedTensor {
  const char* name;
  const Tensor* tensor;
};

/// Throws InvalidArgument when `output` shares memory with one of `others`, inputs or outputs: some elements would be overwritten before
/// they are read, or written twice.
void check_disjoint(const char* op, NamedTensor output, std::initializer_list<NamedTensor> others);

/// Likewise for an input that the output may replace: the two must not share memory, or be the same view (in place), with the same shape,
/// strides and element size. Then every element is read before it is written.
void check_in_place(const char* op, NamedTensor output, NamedTensor input);

}  // namespace tw
