#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

namespace tw::cli {

/// Mono audio that arrives in pieces.
class AudioSource {
 public:
  AudioSource() = default;
  virtual ~AudioSource() = default;
  AudioSource(const AudioSource&) = delete;
  AudioSource& operator=(const AudioSource&) = delete;

  /// Samples in about [-1, 1], at most 0.1 s of them. None: no more have come in 0.1 s, or a signal. Throws Error if it fails.
  virtual std::vector<float> read() = 0;
  virtual bool ended() const = 0;
  virtual int sampling_rate() const { return 16000; }
  virtual bool lost_audio() { return false; }  ///< since the last call, because read() was not called in time
};

/// All of an audio file; "-" is standard input. Throws Error.
std::unique_ptr<AudioSource> open_recording(const std::string& file);
/// Raw samples, signed 16 bits, little-endian, as they arrive in a file, a FIFO or "-", standard input. Throws Error.
std::unique_ptr<AudioSource> open_pcm16(const std::string& file, int sampling_rate);
/// Throws Error if there is no such microphone, or if the program was built without ALSA.
std::unique_ptr<AudioSource> open_microphone(const std::string& name);

/// The names that open_microphone() takes.
std::vector<std::string> microphone_names();

}  // namespace tw::cli
