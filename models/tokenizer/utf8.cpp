#include "models/tokenizer/utf8.hpp"

#include <utf8proc.h>

#include <algorithm>

#include "models/tokenizer/unicode_additions.hpp"

namespace tw::models {

char32_t next_character(std::string_view text, std::size_t& at) {
  const auto byte = [&](std::size_t i) { return static_cast<char32_t>(static_cast<unsigned char>(text[at + i])); };
  const char32_t lead = byte(0);
  char32_t c = lead;
  std::size_t size = 1;
  if (lead >= 0xF0) {
    c = (lead & 0x07) << 18 | (byte(1) & 0x3F) << 12 | (byte(2) & 0x3F) << 6 | (byte(3) & 0x3F);
    size = 4;
  } else if (lead >= 0xE0) {
    c = (lead & 0x0F) << 12 | (byte(1) & 0x3F) << 6 | (byte(2) & 0x3F);
    size = 3;
  } else if (lead >= 0xC0) {
    c = (lead & 0x1F) << 6 | (byte(1) & 0x3F);
    size = 2;
  }
  at += size;
  return c;
}

std::size_t previous_character(std::string_view text, std::size_t at) {
  do {
    --at;
  } while ((static_cast<unsigned char>(text[at]) & 0xC0) == 0x80);
  return at;
}

void append_utf8(std::string& text, char32_t c) {
  const auto put = [&](char32_t byte) { text += static_cast<char>(byte); };
  if (c < 0x80) {
    put(c);
  } else if (c < 0x800) {
    put(0xC0 | c >> 6), put(0x80 | (c & 0x3F));
  } else if (c < 0x10000) {
    put(0xE0 | c >> 12), put(0x80 | (c >> 6 & 0x3F)), put(0x80 | (c & 0x3F));
  } else {
    put(0xF0 | c >> 18), put(0x80 | (c >> 12 & 0x3F)), put(0x80 | (c >> 6 & 0x3F)), put(0x80 | (c & 0x3F));
  }
}

std::size_t append_repaired(std::string& text, std::string_view bytes, Utf8End end) {
  std::size_t at = 0;
  while (at < bytes.size()) {
    const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(bytes[at + i]); };
    const unsigned lead = byte(0);
    if (lead < 0x80) {
      std::size_t ascii = 1;
      while (at + ascii < bytes.size() && byte(ascii) < 0x80) ++ascii;
      text.append(bytes, at, ascii);
      at += ascii;
      continue;
    }
    // The Unicode standard's table 3-7: the second byte has a range of its own after some leads.
    std::size_t size = 0;
    unsigned low = 0x80, high = 0xBF;
    if (lead >= 0xC2 && lead <= 0xDF) {
      size = 2;
    } else if (lead >= 0xE0 && lead <= 0xEF) {
      size = 3;
      if (lead == 0xE0) low = 0xA0;
      if (lead == 0xED) high = 0x9F;
    } else if (lead >= 0xF0 && lead <= 0xF4) {
      size = 4;
      if (lead == 0xF0) low = 0x90;
      if (lead == 0xF4) high = 0x8F;
    }
    std::size_t good = 1;
    while (good < size && at + good < bytes.size() && byte(good) >= low && byte(good) <= high) {
      ++good;
      low = 0x80;
      high = 0xBF;
    }
    if (good == size) {
      text.append(bytes, at, size);
    } else if (end == Utf8End::open && size > 0 && at + good == bytes.size()) {
      return at;
    } else {
      text += "\xEF\xBF\xBD";
    }
    at += good;
  }
  return at;
}

bool is_white_space(char32_t c) {
  return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 ||
         c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

namespace {

/// The general category, two letters.
std::string_view category_of(char32_t c) {
  const std::string_view category = utf8proc_category_string(static_cast<utf8proc_int32_t>(c));
  if (category != "Cn") return category;
  const auto* const addition = std::find_if(std::begin(kUnicodeAdditions), std::end(kUnicodeAdditions),
                                            [c](const UnicodeAddition& a) { return c >= a.first && c <= a.last; });
  return addition == std::end(kUnicodeAdditions) ? category : addition->category;
}

}  // namespace

bool is_word_character(char32_t c) {
  const std::string_view category = category_of(c);
  if (category[0] == 'L' || category[0] == 'M' || category == "Nd" || category == "Nl" || category == "Pc") return true;
  // Symbols that are Alphabetic, and the joiners.
  return (c >= 0x24B6 && c <= 0x24E9) || (c >= 0x1F130 && c <= 0x1F149) || (c >= 0x1F150 && c <= 0x1F169) ||
         (c >= 0x1F170 && c <= 0x1F189) || c == 0x200C || c == 0x200D;
}

bool is_numeric(char32_t c) { return category_of(c)[0] == 'N'; }

}  // namespace tw::models
