#include "apps/serve/base64.hpp"

#include <array>
#include <cstdint>

#include "apps/serve/error.hpp"
#include "models/one_line.hpp"
#include "runtime/format.hpp"

namespace tw::serve {

namespace {

constexpr std::uint8_t kNone = 64;

constexpr std::array<std::uint8_t, 256> kValues = [] {
  std::array<std::uint8_t, 256> values{};
  values.fill(kNone);
  constexpr std::string_view kDigits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  for (std::size_t n = 0; n < kDigits.size(); ++n) values[static_cast<unsigned char>(kDigits[n])] = static_cast<std::uint8_t>(n);
  return values;
}();

}  // namespace

std::string decode_base64(std::string_view text, const std::string& field) {
  const auto refuse = [&](const std::string& why) {
    throw ApiError(400, tw::format("{} is not Base64: {}", field, why), field, "invalid_base64");
  };
  if (text.size() % 4 != 0) refuse(tw::format("it has {} characters, which is no multiple of 4", text.size()));
  std::string_view digits = text;
  for (int padding = 0; padding < 2 && digits.ends_with('='); ++padding) digits.remove_suffix(1);
  std::string bytes;
  bytes.reserve(text.size() / 4 * 3);
  std::uint32_t bits = 0;
  int count = 0;  // of bits
  for (std::size_t at = 0; at < digits.size(); ++at) {
    const std::uint8_t value = kValues[static_cast<unsigned char>(digits[at])];
    if (value == kNone) refuse(tw::format("byte {} is {}", at, models::in_quotes(digits.substr(at, 1))));
    bits = bits << 6 | value;
    count += 6;
    if (count < 8) continue;
    count -= 8;
    bytes += static_cast<char>(bits >> count & 0xFF);
  }
  if ((bits & ((1u << count) - 1)) != 0) refuse(tw::format("byte {} has bits that belong to no byte", digits.size() - 1));
  return bytes;
}

}  // namespace tw::serve
