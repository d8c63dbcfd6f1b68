#pragma once

#include <span>
#include <string>

#include "tilewave/speech.hpp"

namespace tw::formats {

enum class SubtitleFormat {
  srt,
  vtt,
  csv,  ///< start and end in milliseconds and quoted text, after a line that names them, as whisper.cpp writes it
  lrc   ///< [minutes:seconds.hundredths] text: lyrics, for music players
};

/// A file with an entry for each segment that has text. It is valid for any text and times: an entry is one line of UTF-8 without control
/// characters that cannot be read as a time, and entries are in order and last at least 1 ms.
std::string subtitles(std::span<const speech::TranscriptSegment> segments, SubtitleFormat format);

}  // namespace tw::formats
