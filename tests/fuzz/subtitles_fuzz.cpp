// Subtitles of any texts and times can be read back: entry by entry, with as many lines as an entry has. And verbose_json is JSON.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>
#include <regex>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "apps/formats/json.hpp"
#include "apps/formats/subtitles.hpp"

namespace {

using tw::formats::SubtitleFormat;

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

/// Of CSV and lyrics: each entry is a line.
void check_lines(const std::string& text, SubtitleFormat format) {
  static const std::regex csv("\\d+,\\d+,\"([^\"]|\"\")+\""), lrc("\\[\\d\\d+:[0-5]\\d\\.\\d\\d\\] [^ ].*");
  static const std::regex time("[\\[<]\\d");
  std::istringstream file(text);
  require(line_of(file) == (format == SubtitleFormat::csv ? "start,end,text" : "[by:tilewave]"));
  while (file.peek() != std::char_traits<char>::eof()) {
    const std::string line = line_of(file);
    for (const char c : line) require(static_cast<unsigned char>(c) >= 0x20 && c != 0x7F);
    if (line.size() > 1000) continue;  // std::regex needs stack for each character
    require(std::regex_match(line, format == SubtitleFormat::csv ? csv : lrc));
    if (format == SubtitleFormat::lrc) require(!std::regex_search(line.begin() + 1, line.end(), time));
  }
}

void check_json(const std::vector<tw::speech::TranscriptSegment>& segments) {
  tw::speech::Transcript transcript;
  transcript.segments = segments;
  for (const auto& segment : segments) transcript.text += segment.text;
  const nlohmann::json verbose = nlohmann::json::parse(tw::formats::json_text(tw::formats::verbose_json(transcript)));
  require(verbose["segments"].size() == segments.size());
  for (const auto& segment : verbose["segments"]) require(segment["compression_ratio"].is_number());
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
  check(tw::formats::subtitles(segments, SubtitleFormat::srt), SubtitleFormat::srt);
  check(tw::formats::subtitles(segments, SubtitleFormat::vtt), SubtitleFormat::vtt);
  for (const SubtitleFormat format : {SubtitleFormat::csv, SubtitleFormat::lrc})
    check_lines(tw::formats::subtitles(segments, format), format);
  check_json(segments);
  return 0;
}
