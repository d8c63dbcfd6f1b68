#pragma once

#include <cstddef>
#include <cstdint>

// The interface of libtilewave_av.so, a module that decodes audio through FFmpeg's libraries. It is loaded when a file needs it
// (speech/audio/av_module.hpp), for two reasons:
// - libavcodec brings 130 other libraries, of 170 MB. As a dependency they would take 0.1 s and 26 MB of every start of the program.
// - Distributions build FFmpeg under the GPL. So Tilewave's own libraries do not need it, and a bundle does not hold it.
// Plain C types only: the module and the program may be built apart.

namespace tw::speech {

/// A file's bytes.
struct AvInput {
  void* self;
  std::int64_t size;
  /// Reads up to `count` bytes from position `at` on; fewer only at the end, or if reading failed.
  std::int64_t (*read)(void* self, std::int64_t at, void* to, std::int64_t count);
};

/// Takes the audio.
struct AvOutput {
  void* self;
  /// Interleaved samples of `frames` moments at `rate` Hz. Returns false to end the decoding.
  bool (*take)(void* self, const float* samples, std::size_t frames, int channels, int rate);
};

enum class AvResult : int {
  done,     ///< the output has everything, or ended the decoding
  unknown,  ///< no container that is read
  failed    ///< the message says why
};

/// Decodes the best audio stream of `input` to `output`, up to its end or until `output` ends it. Reads nothing but `input`, whatever the
/// file refers to. `message` has `message_size` bytes. The number in its name changes with the interface.
using AvDecode = AvResult(const AvInput* input, const AvOutput* output, char* message, std::size_t message_size);
inline constexpr const char* kAvDecodeName = "tilewave_av_decode_1";
inline constexpr const char* kAvModuleName = "libtilewave_av.so";

}  // namespace tw::speech
