#include "apps/serve/http.hpp"

#include <algorithm>

namespace tw::serve {

namespace {

char lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

}  // namespace

std::string_view HttpRequest::header(std::string_view name) const {
  for (const auto& [key, value] : headers)
    if (std::equal(key.begin(), key.end(), name.begin(), name.end(), [](char a, char b) { return lower(a) == lower(b); })) return value;
  return "";
}

}  // namespace tw::serve
