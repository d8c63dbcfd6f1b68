#pragma once

#include <initializer_list>
#include <optional>

#include "runtime/format.hpp"
#include "tilewave/tensor.hpp"

/// Formats a tensor as Tensor::describe(). Checks pass the tensor, not its text: building the text before every check would take most of a
/// call's time.
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

/// The checks of every operand: on `device`, of `dtype`, with memory that is aligned to its elements. Throws InvalidArgument.
void check_operand(const char* op, const char* argument, const Tensor& tensor, DType dtype, Device device);

/// A bias, if one is given: contiguous, [count]. Throws InvalidArgument.
void check_bias(const char* op, const Tensor* bias, std::int64_t count, DType dtype, Device device);

/// The stream of a call on the device, by default the standard one. Throws InvalidArgument for another device's.
Stream checked_stream(const char* op, const std::optional<Stream>& stream, Device device);

/// An output must not map two indices to the same memory. Throws InvalidArgument.
void check_output(const char* op, const char* argument, const Tensor& tensor);

/// Whether an element of `a` and an element of `b` have a byte in common. Interleaved tensors, such as views of one
/// [batch, seqlen, 3, heads, dim] tensor, do not. Reads no memory. Also returns true if the strides are so irregular that the search is
/// given up.
bool share_memory(const Tensor& a, const Tensor& b);

/// A tensor of a call and its name in messages; null if the call has none.
struct NamedTensor {
  const char* name;
  const Tensor* tensor;
};

/// Throws InvalidArgument if `output` shares memory with one of `others` (inputs or outputs), because elements would be overwritten before
/// they are read, or written twice.
void check_disjoint(const char* op, NamedTensor output, std::initializer_list<NamedTensor> others);

/// The same for an input that the output may replace: they must either share no memory, or be the same view (in place), with the same
/// shape, strides and element size. Then every element is read before it is written.
void check_in_place(const char* op, NamedTensor output, NamedTensor input);

}  // namespace tw
