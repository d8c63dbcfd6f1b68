#include "apps/formats/subtitles.hpp"

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "models/tokenizer/utf8.hpp"
#include "runtime/format.hpp"

namespace tw::formats {
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

/// Escapes text. WebVTT has names for its special characters, and CSV doubles quotation marks. The others have no escapes: SubRip's arrow,
/// which would turn a line of text into a time line, loses all dashes but one, and a bracket before a digit, which a player of lyrics takes
/// for a time, becomes a parenthesis.
std::string without_markup(const std::string& line, SubtitleFormat format) {
  std::string result;
  for (std::size_t i = 0; i < line.size(); ++i) {
    const char c = line[i];
    if (format == SubtitleFormat::srt) {
      if (c == '>')
        while (result.ends_with("--")) result.pop_back();
      result += c;
    } else if (format == SubtitleFormat::csv) {
      result.append(c == '"' ? 2 : 1, c);
    } else if (format == SubtitleFormat::lrc) {
      const bool time = (c == '[' || c == '<') && i + 1 < line.size() && line[i + 1] >= '0' && line[i + 1] <= '9';
      result += time ? '(' : c;
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

const char* head_of(SubtitleFormat format) {
  switch (format) {
    case SubtitleFormat::vtt:
      return "WEBVTT\n\n";
    case SubtitleFormat::csv:
      return "start,end,text\n";
    case SubtitleFormat::lrc:
      return "[by:tilewave]\n";
    case SubtitleFormat::srt:
      break;
  }
  return "";
}

}  // namespace

std::string subtitles(std::span<const speech::TranscriptSegment> segments, SubtitleFormat format) {
  std::string file = head_of(format);
  std::int64_t earliest = 0;
  int number = 0;
  for (const speech::TranscriptSegment& segment : segments) {
    const std::string text = without_markup(on_one_line(segment.text), format);
    if (text.empty()) continue;
    const std::int64_t begin = std::max(milliseconds(segment.begin), earliest), end = std::max(milliseconds(segment.end), begin + 1);
    earliest = begin;
    ++number;
    switch (format) {
      case SubtitleFormat::srt:
        file += tw::format("{}\n{} --> {}\n{}\n\n", number, time_text(begin, ','), time_text(end, ','), text);
        break;
      case SubtitleFormat::vtt:
        file += tw::format("{} --> {}\n{}\n\n", time_text(begin, '.'), time_text(end, '.'), text);
        break;
      case SubtitleFormat::csv:
        file += tw::format("{},{},\"{}\"\n", begin, end, text);
        break;
      case SubtitleFormat::lrc:
        file += tw::format("[{:02}:{:02}.{:02}] {}\n", begin / 60000, begin / 1000 % 60, begin / 10 % 100, text);
        break;
    }
  }
  return file;
}

}  // namespace tw::formats
