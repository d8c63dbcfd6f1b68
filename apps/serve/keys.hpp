#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "apps/serve/http.hpp"

namespace tw::serve {

/// The API keys that a server accepts.
class ApiKeys {
 public:
  ApiKeys() = default;  ///< none: every client is served
  explicit ApiKeys(std::vector<std::string> keys) : keys_(std::move(keys)) {}

  /// Reads a file with one key in each line. Empty lines and lines that begin with # are skipped. Throws FileError for a file that cannot
  /// be read, has no key, or has a key with characters that no header can carry.
  static ApiKeys read(const std::filesystem::path& file);

  bool empty() const { return keys_.empty(); }

  /// Whether `key` is one of them. The time depends on the length of `key`, not on how much of it is right.
  bool contain(std::string_view key) const;

 private:
  std::vector<std::string> keys_;
};

/// The key that a request brings: in "Authorization: Bearer KEY", or, since browsers cannot set that for a WebSocket, as OpenAI's
/// subprotocol "openai-insecure-api-key.KEY". "" if there is none.
std::string_view api_key(const HttpRequest& request);

}  // namespace tw::serve
