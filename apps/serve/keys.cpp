#include "apps/serve/keys.hpp"

#include <algorithm>
#include <fstream>

#include "runtime/format.hpp"
#include "tilewave/error.hpp"

namespace tw::serve {

namespace {

std::string_view trimmed(std::string_view text) {
  const auto blank = [](char c) { return c == ' ' || c == '\t' || c == '\r'; };
  while (!text.empty() && blank(text.front())) text.remove_prefix(1);
  while (!text.empty() && blank(text.back())) text.remove_suffix(1);
  return text;
}

/// 1 if they are equal. It reads all of `given`, whatever differs.
unsigned equal(std::string_view key, std::string_view given) {
  unsigned difference = key.size() == given.size() ? 0 : 1;
  for (std::size_t i = 0; i < given.size(); ++i)
    difference |= static_cast<unsigned char>(key[i % key.size()]) ^ static_cast<unsigned char>(given[i]);
  return difference == 0 ? 1 : 0;
}

}  // namespace

ApiKeys ApiKeys::read(const std::filesystem::path& file) {
  std::ifstream in(file);
  if (!in) throw FileError(tw::format("{}: cannot be read", file.string()));
  std::vector<std::string> keys;
  std::string line;
  for (int number = 1; std::getline(in, line); ++number) {
    const std::string_view key = trimmed(line);
    if (key.empty() || key.front() == '#') continue;
    if (!std::all_of(key.begin(), key.end(), [](char c) { return c > ' ' && c < 0x7F; }))
      throw FileError(tw::format("{}: line {}: a key may only have printable ASCII characters without spaces", file.string(), number));
    keys.emplace_back(key);
  }
  if (in.bad()) throw FileError(tw::format("{}: cannot be read", file.string()));
  if (keys.empty()) throw FileError(tw::format("{}: has no API key", file.string()));
  return ApiKeys(std::move(keys));
}

bool ApiKeys::contain(std::string_view key) const {
  unsigned found = 0;  // all keys are compared: the time does not tell which one is right
  for (const std::string& known : keys_) found |= equal(known, key);
  return found != 0;
}

std::string_view api_key(const HttpRequest& request) {
  const std::string_view authorization = request.header("Authorization");
  constexpr std::string_view kBearer = "bearer ", kProtocol = "openai-insecure-api-key.";
  const auto same = [](char a, char b) { return (a >= 'A' && a <= 'Z' ? a - 'A' + 'a' : a) == b; };
  if (authorization.size() > kBearer.size() &&
      std::equal(kBearer.begin(), kBearer.end(), authorization.begin(), [&](char b, char a) { return same(a, b); }))
    return trimmed(authorization.substr(kBearer.size()));
  std::string_view protocols = request.header("Sec-WebSocket-Protocol");
  while (!protocols.empty()) {
    const std::string_view protocol = protocols.substr(0, protocols.find(','));
    protocols.remove_prefix(std::min(protocol.size() + 1, protocols.size()));
    if (trimmed(protocol).starts_with(kProtocol)) return trimmed(protocol).substr(kProtocol.size());
  }
  return "";
}

}  // namespace tw::serve
