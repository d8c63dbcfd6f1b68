// Subtitles of any texts and times can be read back: entry by entry, with as many lines as an entry has.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <regex>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "apps/tilewave/subtitles.hpp"

namespace {

using tw::cli::SubtitleFormat;

void require(bool condition) {
  if (!condition) std::abort();
}

std::string line_of(std::istringstream& file) {
  std::string line;
  require(static_cast<bool>(std::getline(file, line)));
  return line;
}

/// Whether it is the line of times that `format` has, hours of two digits and more.
bool is_times(const std::string& line, SubtitleFormat format) {
  static const std::regex srt("\\d\\d+:[0-5]\\d:[0-5]\\d,\\d{3} --> \\d\\d+:[0-5]\\d:[0-5]\\d,\\d{3}");
  static const std::regex vtt("\\d\\d+:[0-5]\\d:[0-5]\\d\\.\\d{3} --> \\d\\d+:[0-5]\\d:[0-5]\\d\\.\\d{3}");
  return line.size() < 80 && std::regex_match(line, format == SubtitleFormat::srt ? srt : vtt);
}

void check(const std::string& text, SubtitleFormat format) {
  std::istringstream file(text);
  if (format == SubtitleFormat::vtt) {
    require(line_of(file) == "WEBVTT");
    require(line_of(file).empty());
  }
  for (int number = 1; file.peek() != std::char_traits<char>::eof(); ++number) {
    if (format == SubtitleFormat::srt) require(line_of(file) == std::to_string(number));
    require(is_times(line_of(file), format));
    const std::string words = line_of(file);
    require(!words.empty() && words.find("-->") == std::string::npos);
    for (const char c : words) require(static_cast<unsigned char>(c) >= 0x20 && c != 0x7F);
    if (format == SubtitleFormat::vtt) require(words.find_first_of("<>") == std::string::npos);
    require(line_of(file).empty());
  }
}

}  // namespace

/// Segments of two times, eight bytes each, and a text that a byte 0xFE ends, which UTF-8 does not have.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::string_view left(reinterpret_cast<const char*>(data), size);
  std::vector<tw::speech::TranscriptSegment> segments;
  while (left.size() >= 2 * sizeof(double)) {
    tw::speech::TranscriptSegment& segment = segments.emplace_back();
    std::memcpy(&segment.begin, left.data(), sizeof(double));
    std::memcpy(&segment.end, left.data() + sizeof(double), sizeof(double));
    left.remove_prefix(2 * sizeof(double));
    segment.text = left.substr(0, left.find('\xFE'));
    left.remove_prefix(std::min(left.size(), segment.text.size() + 1));
  }
  check(tw::cli::subtitles(segments, SubtitleFormat::srt), SubtitleFormat::srt);
  check(tw::cli::subtitles(segments, SubtitleFormat::vtt), SubtitleFormat::vtt);
  return 0;
}
