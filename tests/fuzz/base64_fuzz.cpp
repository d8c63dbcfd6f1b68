// Any Base64 is refused by the name of its field, or decoded to bytes that are written as the same text again; and any bytes are refused as
// samples, or become samples from -1 to 1.

#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "apps/serve/base64.hpp"
#include "apps/serve/error.hpp"
#include "apps/serve/pcm.hpp"

namespace {

using namespace tw::serve;

void require(bool condition) {
  if (!condition) std::abort();
}

std::string encoded(std::string_view bytes) {
  static constexpr char kDigits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string text;
  for (std::size_t at = 0; at < bytes.size(); at += 3) {
    std::uint32_t bits = 0;
    for (std::size_t n = 0; n < 3; ++n) bits = bits << 8 | (at + n < bytes.size() ? static_cast<unsigned char>(bytes[at + n]) : 0u);
    for (std::size_t digit = 0; digit < 4; ++digit) text += at + digit > bytes.size() ? '=' : kDigits[bits >> (18 - 6 * digit) & 63];
  }
  return text;
}

void decode(std::string_view bytes, PcmFormat format) {
  try {
    const std::vector<float> samples = decode_pcm(bytes, format, "audio");
    require(samples.size() == (format == PcmFormat::pcm16 ? bytes.size() / 2 : bytes.size()));
    for (const float sample : samples) require(sample >= -1 && sample <= 1);
  } catch (const ApiError& error) {
    require(error.status == 400 && error.param == "audio" && format == PcmFormat::pcm16 && bytes.size() % 2 == 1);
  }
}

}  // namespace

/// A text that may be Base64.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  require(decode_base64(encoded(input), "audio") == input);
  std::string bytes;
  try {
    bytes = decode_base64(input, "audio");
  } catch (const ApiError& error) {
    require(error.status == 400 && error.param == "audio" && error.code == "invalid_base64" && std::string_view(error.what()).size() < 200);
    return 0;
  }
  require(encoded(bytes) == input);
  for (const PcmFormat format : {PcmFormat::pcm16, PcmFormat::g711_ulaw, PcmFormat::g711_alaw}) decode(bytes, format);
  return 0;
}
