#pragma once

#include <span>
#include <string>

#include "tilewave/speech.hpp"

namespace tw::cli {

enum class SubtitleFormat { srt, vtt };

/// A file with an entry for each segment that has text, valid whatever that text and the times are: an entry is one line of UTF-8, without
/// control characters and without what would read as a time line; entries begin in order and last 1 ms at least.
std::string subtitles(std::span<const speech::TranscriptSegment> segments, SubtitleFormat format);

}  // namespace tw::cli
