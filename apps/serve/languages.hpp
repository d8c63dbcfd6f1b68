#pragma once

#include <string_view>

namespace tw::serve {

/// The English name, in lower case, of a language by its ISO 639-1 code, such as "en" (and of Hawaiian and Cantonese, "haw" and "yue",
/// which that standard does not have and OpenAI's models do). "" for anything else.
std::string_view language_name(std::string_view code);

}  // namespace tw::serve
