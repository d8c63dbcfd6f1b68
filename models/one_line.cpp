#include "models/one_line.hpp"

#include <iterator>

#include "runtime/format.hpp"

namespace tw::models {

std::string one_line(std::string_view text) {
  constexpr std::size_t kMost = 200;
  const bool cut = text.size() > kMost;
  if (cut) {
    std::size_t end = kMost;
    while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;  // not inside a UTF-8 character
    text = text.substr(0, end);
  }
  std::string line;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7F) {
      line += tw::format("\\x{:02X}", byte);
    } else {
      line += c;
    }
  }
  return cut ? line + "..." : line;
}

std::string in_quotes(std::string_view text) { return '"' + one_line(text) + '"'; }

}  // namespace tw::models
