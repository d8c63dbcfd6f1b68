#pragma once

#include <fmt/core.h>

#include <cstdio>
#include <string>
#include <string_view>
#include <type_traits>

// Text with numbers and names in it, as the fmt library makes it. fmt is header-only here, so that users of the library do not need it; but
// its code is compiled in format.cpp alone: in each of a hundred files it would take three seconds.

namespace tw {

namespace detail {
std::string format_arguments(fmt::string_view text, fmt::format_args arguments);
void print_arguments(std::FILE* file, fmt::string_view text, fmt::format_args arguments);
}  // namespace detail

/// fmt::format. Called by its full name: std::format has the same one.
template <class... Args>
std::string format(fmt::format_string<Args...> text, Args&&... arguments) {
  return detail::format_arguments(text, fmt::make_format_args(arguments...));
}

/// fmt::print. Throws std::system_error when the file cannot be written.
template <class... Args>
void print(std::FILE* file, fmt::format_string<Args...> text, Args&&... arguments) {
  detail::print_arguments(file, text, fmt::make_format_args(arguments...));
}
template <class... Args>
void print(fmt::format_string<Args...> text, Args&&... arguments) {
  detail::print_arguments(stdout, text, fmt::make_format_args(arguments...));
}

/// Integers or strings with a separator between them.
template <class Range>
std::string join(const Range& values, std::string_view separator) {
  std::string text;
  bool first = true;
  for (const auto& value : values) {
    if (!first) text += separator;
    first = false;
    if constexpr (std::is_integral_v<std::remove_cvref_t<decltype(value)>>)
      text += std::to_string(value);
    else
      text += value;
  }
  return text;
}

}  // namespace tw
