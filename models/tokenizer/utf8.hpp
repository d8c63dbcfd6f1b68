#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace tw::models {

/// The character of valid UTF-8 that begins at byte `at`; advances `at` past it.
char32_t next_character(std::string_view text, std::size_t& at);
/// The start of the character before byte `at`.
std::size_t previous_character(std::string_view text, std::size_t at);
void append_utf8(std::string& text, char32_t character);

/// Whether a text may end with an incomplete character.
enum class Utf8End { final, open };
/// Appends `bytes` to `text`; each maximal part of an incomplete character becomes U+FFFD. Returns the number of bytes used: all
/// of them, except for an incomplete character at an open end.
std::size_t append_repaired(std::string& text, std::string_view bytes, Utf8End end = Utf8End::final);

/// Unicode's White_Space.
bool is_white_space(char32_t character);
/// \w of Unicode's regular expressions (UTS 18): Alphabetic, marks, decimal digits, connectors, joiners.
bool is_word_character(char32_t character);
/// In one of the general categories Nd, Nl and No.
bool is_numeric(char32_t character);

}  // namespace tw::models
