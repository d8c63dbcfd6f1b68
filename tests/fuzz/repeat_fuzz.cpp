// Long inputs of few bytes, to find what takes more time or memory than their length allows: a parser's number, a count of two bytes, and a
// text before, a text that is repeated, and a text after it, with zero bytes between them. To be run with -timeout=10 -rss_limit_mb=2048.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "models/json.hpp"
#include "models/safetensors.hpp"
#include "models/tokenizer.hpp"
#include "tilewave/error.hpp"

namespace {

constexpr std::size_t kLongest = 1 << 20;

void read_safetensors(const std::string& header) {
  std::string file(8, '\0');
  for (std::size_t i = 0; i < 8; ++i) file[i] = static_cast<char>(header.size() >> (8 * i) & 0xFF);
  file += header;
  tw::models::SafeTensors::parse(std::as_bytes(std::span(file)), "input");
}

void use_tokenizer(const std::string& json, std::string_view text) {
  const auto tokenizer = tw::models::Tokenizer::parse(json, "input");
  tokenizer.decode(tokenizer.encode(text, {.parse_special_tokens = true, .add_special_tokens = true}));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 3) return 0;
  std::string_view rest(reinterpret_cast<const char*>(data) + 3, size - 3);
  const auto next = [&] {
    const std::string_view part = rest.substr(0, rest.find('\0'));
    rest.remove_prefix(std::min(rest.size(), part.size() + 1));
    return part;
  };
  const std::string_view before = next(), unit = next(), after = next();
  const std::size_t count = std::min<std::size_t>(data[1] | data[2] << 8, kLongest / std::max<std::size_t>(unit.size(), 1));
  std::string text(before);
  // In the repeated text "#" is the number of the repetition, so that keys, ids and contents differ.
  for (std::size_t i = 0; i < count && text.size() < kLongest; ++i) {
    for (const char c : unit) c == '#' ? void(text += std::to_string(i)) : void(text += c);
  }
  text += after;
  try {
    switch (data[0] % 4) {
      case 0:
        tw::models::parse_json(text, "input");
        break;
      case 1:
        read_safetensors(text);
        break;
      case 2:  // a repetition in a tokenizer.json, and a short text
        use_tokenizer(text, rest.empty() ? std::string_view("The <|user|> it's a  b\n 12") : rest);
        break;
      default:  // a repetition in a text
        use_tokenizer(std::string(rest), text);
    }
  } catch (const tw::FileError&) {
  }
  return 0;
}
