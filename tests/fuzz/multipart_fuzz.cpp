// Any form is refused with a message, or its parts are in the body and mean the same when they are written again.

#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "apps/serve/error.hpp"
#include "apps/serve/multipart.hpp"

namespace {

using tw::serve::FormPart;

void require(bool condition) {
  if (!condition) std::abort();
}

/// `text` between quotation marks.
std::string quoted(const std::string& text) {
  std::string result = "\"";
  for (const char c : text) {
    constexpr const char* kDigits = "0123456789ABCDEF";
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\')
      result += std::string("\\") + c;
    else if (byte < 0x20 || c == '%')
      result += std::string("%") + kDigits[byte / 16] + kDigits[byte % 16];
    else
      result += c;
  }
  return result + '"';
}

std::string written(const std::vector<FormPart>& parts, const std::string& boundary) {
  std::string body;
  for (const FormPart& part : parts) {
    body += "--" + boundary + "\r\nContent-Disposition: form-data; name=" + quoted(part.name);
    if (part.filename) body += "; filename=" + quoted(*part.filename);
    body += "\r\n\r\n" + std::string(part.content) + "\r\n";
  }
  return body + "--" + boundary + "--\r\n";
}

}  // namespace

/// A line with the Content-Type, and the body.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const std::size_t line = input.find('\n');
  if (line == std::string_view::npos) return 0;
  const std::string body(input.substr(line + 1));
  std::vector<FormPart> parts;
  try {
    parts = tw::serve::parse_multipart(input.substr(0, line), body);
  } catch (const tw::serve::ApiError& error) {
    require(error.status == 400 || error.status == 415);
    require(!tw::serve::error_json(error).empty());
    return 0;
  }
  for (const FormPart& part : parts)
    require(part.content.data() >= body.data() && part.content.data() + part.content.size() <= body.data() + body.size());
  std::string boundary = "x";
  while (body.find(boundary) != std::string::npos && boundary.size() < 70) boundary += 'x';
  if (body.find(boundary) != std::string::npos) return 0;
  const std::string again = written(parts, boundary);
  const std::vector<FormPart> same =
      tw::serve::parse_multipart("multipart/form-data; boundary=" + boundary, again, {.header_bytes = 1 << 20});
  require(same.size() == parts.size());
  for (std::size_t i = 0; i < parts.size(); ++i)
    require(same[i].name == parts[i].name && same[i].filename == parts[i].filename && same[i].content == parts[i].content);
  return 0;
}
