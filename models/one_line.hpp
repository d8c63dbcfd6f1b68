#pragma once

#include <string>
#include <string_view>

namespace tw::models {

/// Text out of a file, made fit for a message: control characters as \x0A, and no more than about 200 bytes of it.
std::string one_line(std::string_view text);

/// The same in quotes, for names.
std::string in_quotes(std::string_view text);

}  // namespace tw::models
