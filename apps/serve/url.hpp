#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tw::serve {

/// What a request's target says.
struct Target {
  std::string path;                                        ///< decoded
  std::vector<std::pair<std::string, std::string>> query;  ///< decoded, in order
};

/// Decodes "/path?name=value&...", or an absolute URL of http or https. Null if it is malformed: no path, a bad percent escape, or a zero
/// byte.
std::optional<Target> parse_target(std::string_view target);

}  // namespace tw::serve
