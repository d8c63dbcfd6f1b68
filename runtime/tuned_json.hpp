#pragma once

// The text of a file of tuned choices.

#include <string>
#include <string_view>

#include "runtime/tuned.hpp"

namespace tw {

/// The choices in a file's text; none if it is damaged, or another device's or compiler's.
TunedChoices parse_tuned(std::string_view text, std::string_view device, std::string_view compiler);

std::string format_tuned(const TunedChoices& choices, std::string_view device, std::string_view compiler);

}  // namespace tw
