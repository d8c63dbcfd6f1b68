// Bytes of an audio file: decode_audio gives finite samples or an Error.
#include <cmath>
#include <cstdint>
#include <cstdlib>

#include "speech/audio/audio.hpp"
#include "tilewave/error.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    // A few bytes can hold hours of silence; ten seconds reach all of the code.
    const std::vector<float> samples =
        tw::speech::decode_audio({reinterpret_cast<const char*>(data), size}, "fuzz", {.longest_seconds = 10});
    for (const float x : samples)
      if (!std::isfinite(x)) std::abort();
  } catch (const tw::Error&) {
  }
  return 0;
}
