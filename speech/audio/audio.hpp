#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tw::speech {

/// Samples per second of everything that load_audio and decode_audio return, and that the models take.
inline constexpr int kSamplingRate = 16000;

struct AudioOptions {
  /// Longer audio is refused: a few kilobytes of FLAC can hold hours of silence. A week takes 39 GB.
  double longest_seconds = 7 * 24 * 3600.0;
};

/// The audio of `file`: mono samples at 16 kHz, where integer formats have [-1, 1] (resampling may overshoot a little). Channels are
/// averaged, then soxr resamples in its high quality.
///
/// Formats, told by content and never by name: WAV (PCM of 8 to 32 bits, float, A-law, mu-law and what else libsndfile reads in one), FLAC,
/// OGG (Vorbis, Opus), MP3 and AIFF, with 1 to 1024 channels of 1000 to 768000 Hz. A named pipe is read to its end first.
///
/// Throws FileError, a line that begins with the file's name, for: a file that cannot be read, a folder, a device; an empty file; one of
/// another format (with the ffmpeg command that converts it); audio without samples; samples that are NaN, infinite or beyond 1e10; damaged
/// audio; audio over `options.longest_seconds`; and truncated audio: fewer samples than the header of a WAV, AIFF or FLAC file promises, or
/// an incomplete last page of OGG. Text from part of a recording looks like text from all of it, so nothing is cut off silently. A WAV
/// written to a pipe, whose sizes are 0 or placeholders of about 2 or 4 GiB, is read up to its end. MP3 has no length to hold it against:
/// it is read as far as it goes. Throws OutOfMemory when the samples do not fit. Memory follows the samples that are there, not what a
/// header says.
std::vector<float> load_audio(const std::string& file, const AudioOptions& options = {});

/// The same of a file's bytes; `name` begins the messages.
std::vector<float> decode_audio(std::string_view bytes, const std::string& name, const AudioOptions& options = {});

}  // namespace tw::speech
