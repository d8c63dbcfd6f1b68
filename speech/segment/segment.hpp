#pragma once

#include <span>
#include <vector>

#include "tilewave/speech.hpp"
#include "tilewave/voice_activity.hpp"

namespace tw::speech {

struct SegmentOptions {
  int sampling_rate = 16000;      ///< of the samples, in Hz
  double longest_seconds = 30;    ///< of a segment
  double join_below_seconds = 2;  ///< a shorter pause does not split a segment, unless it would be too long
  double margin_seconds = 0.2;    ///< of the pause kept before and after speech, for faint beginnings and ends
};

/// The parts of `samples` (finite, about [-1, 1]) that may hold speech, in order and without overlap, each of at most longest_seconds.
///
/// 1. Level: the variance of 30 ms around each 10 ms step, in dB of full scale. Noise: the level that a tenth of the steps within 5 s on
///    both sides stay below. Steps below -70 dB do not count if the others have a steady level (a quarter of them within 3 dB): zeros
///    between recordings say nothing about the noise in these. A step is active above noise + 6 dB, at least above -70 dB, and always above
///    -45 dB: loud sound is kept even when it is steady. Where less than 1 s lies within reach, noise cannot be told from speech and -70 dB
///    decides alone.
/// 2. Active steps with pauses below 0.3 s make a run; a run of fewer than five active steps is a click and no speech.
/// 3. Runs with pauses below join_below_seconds, or a third of longest_seconds if that is less, make an island. Longer pauses are dropped,
///    except for the margins.
/// 4. An island of more than longest_seconds is cut from the left, in the middle of its longest pause (of at least 0.2 s) that lies
///    between a third and all of longest_seconds from the segment's begin; without one, in the quietest 0.2 s of the last third.
///
/// So a short recording of speech is one segment, and no sound that may be speech is dropped. Silence and faint steady noise give no
/// segment. The result depends only on the samples. Throws InvalidArgument for options out of range: a sampling rate of 1000 to
/// 768000 Hz, longest_seconds of 1 to 3600, join_below_seconds of 0.3 to 3600, margin_seconds of 0 to 1.
std::vector<Segment> cut_at_silences(std::span<const float> samples, const SegmentOptions& options = {});

/// The same with another rule 1: the steps that detect_speech() takes for speech are active. The sampling rate must be 16 kHz.
std::vector<Segment> cut_at_speech(std::span<const float> samples, const SegmentOptions& options = {});

/// The segments that a recording at 16 kHz is transcribed in; with Segmentation::none all of it is one, unless it is empty.
std::vector<Segment> segments_of(std::span<const float> samples, Segmentation segmentation, double longest_seconds);

}  // namespace tw::speech
