#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tw::serve {

/// A field of a form.
struct FormPart {
  std::string name;
  std::optional<std::string> filename;  ///< as the client wrote it: for messages, never for paths
  std::string content_type;             ///< "": none
  std::string_view content;             ///< in the parsed body, which must live as long
};

struct MultipartLimits {
  std::size_t parts = 256;
  std::size_t header_bytes = 8192;  ///< of one part
};

/// The parts of a body of type multipart/form-data (RFC 7578, RFC 2046), without copying their contents. `content_type` is the request's
/// header. Text before the first boundary and after the last is ignored. A file's name may be quoted with backslashes (RFC 2183) or with
/// percent signs as browsers do, or be in filename* (RFC 5987), which counts more.
///
/// Throws ApiError: 415 for another type, 400 for a missing or invalid boundary, a part without a name, a header that cannot be read, a
/// body without its last boundary (as when it was cut off), and more parts or longer headers than `limits` allow.
std::vector<FormPart> parse_multipart(std::string_view content_type, std::string_view body, const MultipartLimits& limits = {});

}  // namespace tw::serve
