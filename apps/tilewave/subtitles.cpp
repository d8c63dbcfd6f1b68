#include "apps/tilewave/subtitles.hpp"

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "models/tokenizer/utf8.hpp"
#include "runtime/format.hpp"

namespace tw::cli {
namespace {

/// Milliseconds from the beginning of the recording. NaN becomes 0; times are limited to 30 years.
std::int64_t milliseconds(double seconds) {
  constexpr double kMost = 1e9;  // 30 years
  return seconds > 0 ? static_cast<std::int64_t>(std::min(seconds, kMost) * 1000 + 0.5) : 0;
}

std::string time_text(std::int64_t ms, char point) {
  return tw::format("{:02}:{:02}:{:02}{}{:03}", ms / 3600000, ms / 60000 % 60, ms / 1000 % 60, point, ms % 1000);
}

/// `text` as one line of valid UTF-8. Control characters and line ends count as white space, and white space becomes a single space.
std::string on_one_line(std::string_view text) {
  std::string valid, line;
  models::append_repaired(valid, text);
  bool space = false;
  for (std::size_t at = 0; at < valid.size();) {
    const std::size_t begin = at;
    const char32_t c = models::next_character(valid, at);
    if (c <= 0x20 || (c >= 0x7F && c < 0xA0) || c == 0x2028 || c == 0x2029) {
      space = !line.empty();
      continue;
    }
    if (space) line += ' ';
    space = false;
    line.append(valid, begin, at - begin);
  }
  return line;
}

/// Escapes text. WebVTT has names for its special characters. SubRip has no escapes: its arrow, which would turn a line of text into a time
/// line, loses all dashes but one.
std::string without_markup(const std::string& line, SubtitleFormat format) {
  std::string result;
  for (const char c : line) {
    if (format == SubtitleFormat::srt) {
      if (c == '>')
        while (result.ends_with("--")) result.pop_back();
      result += c;
    } else if (c == '&') {
      result += "&amp;";
    } else if (c == '<') {
      result += "&lt;";
    } else if (c == '>') {
      result += "&gt;";
    } else {
      result += c;
    }
  }
  return result;
}

}  // namespace

std::string subtitles(std::span<const speech::TranscriptSegment> segments, SubtitleFormat format) {
  const char point = format == SubtitleFormat::vtt ? '.' : ',';
  std::string file = format == SubtitleFormat::vtt ? "WEBVTT\n\n" : "";
  std::int64_t earliest = 0;
  int number = 0;
  for (const speech::TranscriptSegment& segment : segments) {
    const std::string text = without_markup(on_one_line(segment.text), format);
    if (text.empty()) continue;
    const std::int64_t begin = std::max(milliseconds(segment.begin), earliest), end = std::max(milliseconds(segment.end), begin + 1);
    earliest = begin;
    if (format == SubtitleFormat::srt) file += tw::format("{}\n", ++number);
    file += tw::format("{} --> {}\n{}\n\n", time_text(begin, point), time_text(end, point), text);
  }
  return file;
}

}  // namespace tw::cli
