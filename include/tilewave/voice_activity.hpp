#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

// Where speech is in audio, in the library tilewave_speech. It needs no checkpoint.

namespace tw::speech {

/// Samples [begin, end).
struct Segment {
  std::int64_t begin = 0;
  std::int64_t end = 0;

  friend bool operator==(const Segment&, const Segment&) = default;
};

struct VoiceActivityOptions {
  /// 0 to 1: sound is speech where it is likelier than this. Higher, more speech is missed and less noise is taken for speech.
  double threshold = 0.5;
  /// 0 to 5: added before speech that was detected, for faint beginnings.
  double prefix_seconds = 0.3;
  /// 0 to silence_seconds: added after speech that was detected, for faint ends.
  double suffix_seconds = 0.2;
  /// 0.1 to 10: a shorter pause does not end speech.
  double silence_seconds = 0.5;
};

/// A decision of VoiceActivityDetector.
struct VoiceEvent {
  enum class Kind { started, stopped };
  Kind kind = Kind::started;
  std::int64_t sample = 0;  ///< where speech starts, with the prefix, or stops, with the suffix: counted from the first sample ever fed

  friend bool operator==(const VoiceEvent&, const VoiceEvent&) = default;
};

/// Detects speech in a stream of mono audio at 16 kHz, with a small recurrent network on the spectrum: speech/segment/README.md has what it
/// finds in noise. Started and stopped events take turns, beginning with started, and their samples never decrease. The
/// decisions depend on the samples and not on how they are cut into pieces. Memory does not grow with the stream's length. One thread at a
/// time.
///
///     VoiceActivityDetector detector;
///     for (each piece of audio)
///       for (const VoiceEvent& event : detector.feed(piece)) ...
///     for (const VoiceEvent& event : detector.finish()) ...
class VoiceActivityDetector {
 public:
  /// Throws InvalidArgument for options out of range.
  explicit VoiceActivityDetector(const VoiceActivityOptions& options = {});
  ~VoiceActivityDetector();
  VoiceActivityDetector(VoiceActivityDetector&&) noexcept;
  VoiceActivityDetector& operator=(VoiceActivityDetector&&) noexcept;

  /// The next samples, in about [-1, 1]; returns what was decided. A started event comes about 0.15 s after speech began, a stopped event
  /// about silence_seconds after it ended, and the first event not before 0.3 s. Throws InvalidArgument, and takes none of the samples, if
  /// one is not finite.
  std::vector<VoiceEvent> feed(std::span<const float> samples);

  /// Decides about the last samples, and ends speech that goes on. feed() may continue the stream afterwards: the count of samples and what
  /// is known about the noise stay.
  std::vector<VoiceEvent> finish();

  bool speaking() const;          ///< whether the last event was started
  std::int64_t position() const;  ///< the number of samples fed
  /// No later event will name a sample before this one. While nobody is speaking, audio before it may be dropped.
  std::int64_t horizon() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// The speech in a whole recording, by the same detector: mono samples at 16 kHz, in about [-1, 1]. The spans are in order and do not
/// overlap. Throws InvalidArgument for options out of range and for samples that are
/// not finite.
std::vector<Segment> detect_speech(std::span<const float> samples, const VoiceActivityOptions& options = {});

}  // namespace tw::speech
