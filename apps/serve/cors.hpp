#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "apps/serve/http.hpp"

namespace tw::serve {

/// Which pages of other origins may use the server (https://fetch.spec.whatwg.org/#http-cors-protocol).
class Cors {
 public:
  Cors() = default;  ///< none
  /// Origins such as "https://example.org", or "*" for all. Throws InvalidArgument for anything else.
  explicit Cors(std::vector<std::string> origins);

  /// Whether the page that sends a request may read the answer. Requests without an Origin do not come from a page of another origin.
  bool allow(std::string_view origin) const;

  /// What an answer to `request` says about it.
  Headers headers(const HttpRequest& request) const;
  /// The answer to a preflight request for a path with these methods.
  Headers preflight(const HttpRequest& request, std::string_view methods) const;

  /// Whether a WebSocket may be opened: browsers let every page try, so the server has to look. From no page, the server's own, or one of
  /// the origins.
  bool allow_websocket(const HttpRequest& request) const;

 private:
  std::vector<std::string> origins_;
  bool all_ = false;
};

}  // namespace tw::serve
