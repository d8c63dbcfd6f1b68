#pragma once

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

/// An output must not map two indices to one element; one without elements cannot. Throws InvalidArgument.
void check_output(const char* op, const char* argument, const Tensor& tensor);

}  // namespace tw
