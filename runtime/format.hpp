#pragma once

#include <fmt/core.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <string_view>
#include <type_traits>

// Formatted text, with the fmt library. fmt is header-only here, so that users of the library do not need it. Its code is compiled only in
// format.cpp: in each of a hundred files it would take three seconds.

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

/// Base of formatters for types that convert themselves to text.
struct TextFormatter {
  constexpr auto parse(fmt::format_parse_context& context) { return context.begin(); }
  static auto put(const std::string& text, fmt::format_context& context) { return std::copy(text.begin(), text.end(), context.out()); }
};

/// A range of integers or strings with a separator between them, as an argument of the functions above or as a string of its own. The text
/// is built lazily; the range must live until then.
template <class Range>
struct Joined {
  const Range& values;
  std::string_view separator;

  operator std::string() const {  // NOLINT(google-explicit-constructor): it stands for the text
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
};
template <class Range>
Joined<Range> join(const Range& values, std::string_view separator) {
  return {values, separator};
}

}  // namespace tw

template <class Range>
struct fmt::formatter<tw::Joined<Range>> : tw::TextFormatter {
  auto format(const tw::Joined<Range>& joined, fmt::format_context& context) const { return put(std::string(joined), context); }
};
