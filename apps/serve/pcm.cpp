#include "apps/serve/pcm.hpp"

#include <cstddef>
#include <cstdint>

#include "apps/serve/error.hpp"
#include "runtime/format.hpp"

namespace tw::serve {

namespace {

// G.711 has a sign, three bits of exponent and four of mantissa. Both laws are given here in units of a 16-bit sample.
int ulaw_sample(std::uint8_t code) {
  code = static_cast<std::uint8_t>(~code);
  const int exponent = code >> 4 & 7, mantissa = code & 15;
  const int size = (((mantissa << 3) + 0x84) << exponent) - 0x84;
  return code & 0x80 ? -size : size;
}

int alaw_sample(std::uint8_t code) {
  code ^= 0x55;
  const int exponent = code >> 4 & 7, mantissa = (code & 15) << 4;
  const int size = exponent == 0 ? mantissa + 8 : (mantissa + 0x108) << (exponent - 1);
  return code & 0x80 ? size : -size;
}

}  // namespace

std::vector<float> decode_pcm(std::string_view bytes, PcmFormat format, const std::string& field) {
  const auto byte = [&](std::size_t at) { return static_cast<std::uint8_t>(bytes[at]); };
  constexpr float kFullScale = 32768;
  std::vector<float> samples;
  if (format == PcmFormat::pcm16) {
    if (bytes.size() % 2 != 0)
      throw ApiError(400, tw::format("{} has {} bytes; samples of 16 bits need an even number", field, bytes.size()), field,
                     "invalid_value");
    samples.resize(bytes.size() / 2);
    for (std::size_t n = 0; n < samples.size(); ++n)
      samples[n] = static_cast<float>(static_cast<std::int16_t>(byte(2 * n) | byte(2 * n + 1) << 8)) / kFullScale;
    return samples;
  }
  samples.resize(bytes.size());
  for (std::size_t n = 0; n < samples.size(); ++n)
    samples[n] = static_cast<float>(format == PcmFormat::g711_ulaw ? ulaw_sample(byte(n)) : alaw_sample(byte(n))) / kFullScale;
  return samples;
}

}  // namespace tw::serve
