// Bytes of an audio file: decode_audio gives finite samples or an Error, and the same through a pipe.
#include <fcntl.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <optional>

#include "speech/audio/audio.hpp"
#include "speech/audio/av_module.hpp"
#include "tilewave/error.hpp"

namespace {

// A few bytes can hold hours of silence; ten seconds reach all of the code.
constexpr tw::speech::AudioOptions kOptions = {.longest_seconds = 10};

std::optional<std::vector<float>> decoded(const std::function<std::vector<float>()>& decode) {
  try {
    return decode();
  } catch (const tw::Error&) {
    return {};
  }
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  if (!tw::speech::av_module_problem().empty()) std::abort();  // else nothing that FFmpeg reads would be tried
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto samples = decoded([&] { return tw::speech::decode_audio({reinterpret_cast<const char*>(data), size}, "fuzz", kOptions); });
  if (samples)
    for (const float x : *samples)
      if (!std::isfinite(x)) std::abort();
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) std::abort();
  if (fcntl(ends[1], F_SETPIPE_SZ, 1 << 20) >= static_cast<int>(size)) {
    if (write(ends[1], data, size) != static_cast<ssize_t>(size)) std::abort();
    close(ends[1]);
    if (decoded([&] { return tw::speech::load_audio_stream(ends[0], "fuzz", kOptions); }) != samples) std::abort();
  } else {
    close(ends[1]);
  }
  close(ends[0]);
  return 0;
}
