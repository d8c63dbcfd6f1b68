#include "apps/serve/cors.hpp"

#include <algorithm>

#include "runtime/format.hpp"
#include "tilewave/error.hpp"

namespace tw::serve {

namespace {

/// "example.org:8080" of "https://example.org:8080"; "" if it has another form.
std::string_view host_of(std::string_view origin) {
  for (const std::string_view scheme : {"http://", "https://"})
    if (origin.starts_with(scheme)) return origin.substr(scheme.size());
  return "";
}

}  // namespace

Cors::Cors(std::vector<std::string> origins) : origins_(std::move(origins)) {
  for (const std::string& origin : origins_) {
    if (origin == "*") {
      all_ = true;
    } else if (const std::string_view host = host_of(origin); host.empty() || host.find_first_of("/?#, \t\r\n") != std::string_view::npos) {
      throw InvalidArgument(tw::format("CORS origin {}: must be * or http(s)://HOST[:PORT], without a path", origin));
    }
  }
}

bool Cors::allow(std::string_view origin) const {
  return !origin.empty() && (all_ || std::find(origins_.begin(), origins_.end(), origin) != origins_.end());
}

Headers Cors::headers(const HttpRequest& request) const {
  if (origins_.empty()) return {};
  Headers headers;
  const std::string_view origin = request.header("Origin");
  if (allow(origin)) {
    headers.emplace_back("Access-Control-Allow-Origin", all_ ? "*" : std::string(origin));
    headers.emplace_back("Access-Control-Expose-Headers", "X-Request-Id, Retry-After");
  }
  if (!all_) headers.emplace_back("Vary", "Origin");
  return headers;
}

Headers Cors::preflight(const HttpRequest& request, std::string_view methods) const {
  Headers headers = this->headers(request);
  if (!allow(request.header("Origin"))) return headers;
  headers.emplace_back("Access-Control-Allow-Methods", methods);
  // OpenAI's client library sends a dozen headers of its own, which change with its version: whatever is asked for.
  if (const std::string_view asked = request.header("Access-Control-Request-Headers"); !asked.empty())
    headers.emplace_back("Access-Control-Allow-Headers", asked);
  headers.emplace_back("Access-Control-Max-Age", "86400");
  return headers;
}

bool Cors::allow_websocket(const HttpRequest& request) const {
  const std::string_view origin = request.header("Origin");
  return origin.empty() || allow(origin) || (!host_of(origin).empty() && host_of(origin) == request.header("Host"));
}

}  // namespace tw::serve
