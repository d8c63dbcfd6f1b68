#pragma once

#include <string>
#include <string_view>

namespace tw::serve {

/// The bytes that `text` is the Base64 of: RFC 4648, section 4, with padding, and without anything else, such as line breaks. Throws
/// ApiError 400, which names `field` and the first byte that is wrong.
std::string decode_base64(std::string_view text, const std::string& field);

}  // namespace tw::serve
