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

/// The audio of `file`: mono samples at 16 kHz, integer formats in [-1, 1] (resampling may overshoot a little). Channels are
/// averaged, then resampled with soxr at high quality.
///
/// Formats, detected by content and never by name: WAV (PCM of 8 to 32 bits, float, A-law, mu-law and whatever else libsndfile reads),
/// FLAC, OGG (Vorbis, Opus), MP3 and AIFF, with 1 to 1024 channels of 1000 to 768000 Hz. What libsndfile cannot read goes through FFmpeg's
/// libraries, if the module for them can be loaded (av/decoder.hpp): webm, m4a and mp4, AAC, and others that recorders write.
///
/// Throws FileError, a line that begins with the file's name, for: a file that cannot be read, a folder, a device; an empty file; one of
/// another format (with the ffmpeg command that converts it); audio without samples; samples that are NaN, infinite or beyond 1e10; damaged
/// audio; audio over `options.longest_seconds`; a read error, and a file that becomes shorter while it is read, with the time reached; and
/// truncated audio: fewer samples than the header of a WAV, AIFF or FLAC file promises, an incomplete last page of OGG, an incomplete last
/// frame of MP3 or fewer frames than its Xing, Info or VBRI header promises, an incomplete element of webm, box of mp4 or frame of AAC. A
/// partial transcript looks like a complete one, so nothing is cut off silently. These cannot be told from complete files: FLAC without a
/// length, and MP3 without such a header, that end between two frames; OGG that ends between two pages; a recording by a browser that ends
/// between two blocks; MPEG transport streams. A WAV written to a pipe, whose sizes are 0 or placeholders (wav_header.hpp), is read up to
/// its end. Throws OutOfMemory if the samples do not fit. Memory use follows the actual samples, not the header.
std::vector<float> load_audio(const std::string& file, const AudioOptions& options = {});

/// The same for an open file from its current position, or for a pipe, socket or terminal, up to its end. Messages begin with `name`. Only
/// the samples' memory grows with the length: WAV and FLAC are decoded as they arrive; the readers of the other formats look at the end
/// first, so these go through an unnamed temporary file in TMPDIR or /tmp. The descriptor stays open.
std::vector<float> load_audio_stream(int descriptor, const std::string& name, const AudioOptions& options = {});

/// The same for a file's bytes. Messages begin with `name`.
std::vector<float> decode_audio(std::string_view bytes, const std::string& name, const AudioOptions& options = {});

}  // namespace tw::speech
