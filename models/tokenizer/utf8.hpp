#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace tw::models {

/// The character of valid UTF-8 that begins at byte `at`, which moves behind it.
char32_t next_character(std::string_view text, std::size_t& at);
/// Where the character before byte `at` begins.
std::size_t previous_character(std::string_view text, std::size_t at);
void append_utf8(std::string& text, char32_t character);

/// Whether the bytes at the end of a text may be the beginning of a character that is still to come.
enum class Utf8End { final, open };
/// Appends `bytes` to `text`; each maximal part of a character that is not complete becomes U+FFFD. Returns how many bytes were used: all
/// of them, but for the beginning of a character at an open end.
std::size_t append_repaired(std::string& text, std::string_view bytes, Utf8End end = Utf8End::final);

/// Unicode's White_Space.
bool is_white_space(char32_t character);
/// \w of Unicode's regular expressions (UTS 18): Alphabetic, marks, decimal digits, connectors, joiners.
bool is_word_character(char32_t character);
/// Of the general categories Nd, Nl and No.
bool is_numeric(char32_t character);

}  // namespace tw::models
