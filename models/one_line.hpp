#pragma once

#include <string>
#include <string_view>

namespace tw::models {

/// Text from a file, prepared for a message: control characters as \x0A, cut to about 200 bytes.
std::string one_line(std::string_view text);

/// The same in quotes, for names.
std::string in_quotes(std::string_view text);

}  // namespace tw::models
