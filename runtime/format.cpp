#include "runtime/format.hpp"

#include <fmt/format.h>

namespace tw::detail {

std::string format_arguments(fmt::string_view text, fmt::format_args arguments) { return fmt::vformat(text, arguments); }

void print_arguments(std::FILE* file, fmt::string_view text, fmt::format_args arguments) { fmt::vprint(file, text, arguments); }

}  // namespace tw::detail
