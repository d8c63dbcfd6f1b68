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
/// OGG (Vorbis, Opus), MP3 and AIFF, with 1 to 1024 channels of 1000 to 768000 Hz.
///
/// Throws FileError, a line that begins with the file's name, for: a file that cannot be read, a folder, a device; an empty file; one of
/// another format (with the ffmpeg command that converts it); audio without samples; samples that are NaN, infinite or beyond 1e10; damaged
/// audio; audio over `options.longest_seconds`; a read error, and a file that becomes shorter while it is read, with the time reached; and
/// truncated audio: fewer samples than the header of a WAV, AIFF or FLAC file promises, an incomplete last page of OGG, an incomplete last
/// frame of MP3 or fewer frames than its Xing, Info or VBRI header promises. Text from part of a recording looks like text from all of it,
/// so nothing is cut off silently. These cannot be told from whole files: FLAC without a length, and MP3 without such a header, that end
/// between two frames; OGG that ends between two pages. A WAV written to a pipe, whose sizes are 0 or placeholders (wav_header.hpp), is
/// read up to its end. Throws OutOfMemory when the samples do not fit. Memory follows the samples that are there, not what a header says.
std::vector<float> load_audio(const std::string& file, const AudioOptions& options = {});

/// The same of an open file from where it stands, or of a pipe, socket or terminal, up to its end; `name` begins the messages. Apart from
/// the samples, memory does not grow with the length: WAV and FLAC are decoded as they come; OGG, MP3 and AIFF, whose readers go to the end
/// first, go through a temporary file without a name in TMPDIR or /tmp. The descriptor stays open.
std::vector<float> load_audio_stream(int descriptor, const std::string& name, const AudioOptions& options = {});

/// The same of a file's bytes; `name` begins the messages.
std::vector<float> decode_audio(std::string_view bytes, const std::string& name, const AudioOptions& options = {});

}  // namespace tw::speech
