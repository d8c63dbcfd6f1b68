#include "apps/serve/url.hpp"

#include <algorithm>

namespace tw::serve {

namespace {

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

std::optional<std::string> decoded(std::string_view text, bool plus_is_space) {
  std::string result;
  for (std::size_t i = 0; i < text.size(); ++i) {
    char c = text[i];
    if (c == '%') {
      const int high = i + 2 < text.size() ? hex_digit(text[i + 1]) : -1;
      const int low = i + 2 < text.size() ? hex_digit(text[i + 2]) : -1;
      if (high < 0 || low < 0) return {};
      c = static_cast<char>(high * 16 + low);
      i += 2;
    } else if (c == '+' && plus_is_space) {
      c = ' ';
    }
    if (c == '\0') return {};
    result += c;
  }
  return result;
}

}  // namespace

std::optional<Target> parse_target(std::string_view target) {
  for (const std::string_view scheme : {"http://", "https://"}) {
    if (!target.starts_with(scheme)) continue;
    target.remove_prefix(std::min(target.find_first_of("/?", scheme.size()), target.size()));
  }
  target = target.substr(0, target.find('#'));
  const std::size_t mark = target.find('?');
  std::optional<std::string> path = decoded(target.substr(0, mark), false);
  if (!path || !path->starts_with('/')) return {};
  Target result{std::move(*path), {}};
  std::string_view query = mark == std::string_view::npos ? "" : target.substr(mark + 1);
  while (!query.empty()) {
    const std::string_view pair = query.substr(0, query.find('&'));
    query.remove_prefix(std::min(pair.size() + 1, query.size()));
    if (pair.empty()) continue;
    const std::size_t equals = pair.find('=');
    std::optional<std::string> name = decoded(pair.substr(0, equals), true);
    std::optional<std::string> value = equals == std::string_view::npos ? std::string() : decoded(pair.substr(equals + 1), true);
    if (!name || !value) return {};
    result.query.emplace_back(std::move(*name), std::move(*value));
  }
  return result;
}

}  // namespace tw::serve
