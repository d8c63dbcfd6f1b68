#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "speech/audio/bytes.hpp"

namespace tw::speech {

/// The position of a WAV file's samples, and a rewritten header for libsndfile. libsndfile trusts the file's own header, and would stop
/// early where the writer did not know a size.
struct WavView {
  std::string header;      ///< up to the samples, with their format and with `shown` as their size
  std::int64_t begin = 0;  ///< the samples' position in the file
  std::int64_t shown = 0;  ///< their bytes: as promised by the header, or fewer if the file is shorter; for a pipe the maximum
  std::optional<std::uint64_t> promised;  ///< their bytes according to the file's header, if known
};

/// Walks through the chunks of a RIFF, RIFX or RF64 file up to the samples, never back. A size of 0 in a header that was never completed,
/// and those that are written where the size is not known (about 4 GiB by ffmpeg, 0x7FFFF000 by sox, 0x80000000 by arecord, 0x7FFFFFFF)
/// promise nothing: the samples end with the file. Throws FileError, which begins with `name`, for a file without format or samples.
WavView view_wav(Bytes& file, const std::string& name);

}  // namespace tw::speech
