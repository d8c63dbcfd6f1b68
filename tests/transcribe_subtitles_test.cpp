// Subtitle files stay valid whatever a model says.

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <regex>
#include <string>
#include <vector>

#include "apps/formats/subtitles.hpp"

namespace {

using tw::formats::SubtitleFormat;
using tw::formats::subtitles;
using Segments = std::vector<tw::speech::TranscriptSegment>;

TEST(Subtitles, OddTexts) {
  const struct {
    const char* text;
    const char *srt, *vtt;
  } cases[] = {
      {"one\n\n2\n00:00:00,000 --> 00:00:01,000\nnine", "one 2 00:00:00,000 -> 00:00:01,000 nine",
       "one 2 00:00:00,000 --&gt; 00:00:01,000 nine"},
      {"a ----> b -> c > d", "a -> b -> c > d", "a ----&gt; b -&gt; c &gt; d"},
      {" \t one \r\n two\f\v", "one two", "one two"},
      {"\033[31mred\x7F \xC2\x9B"
       "31m\xC2\x85\xE2\x80\xA8"
       "end",
       "[31mred 31m end", "[31mred 31m end"},
      {"<i>&lt;", "<i>&lt;", "&lt;i&gt;&amp;lt;"},
      {"\xFF\xC3", "\xEF\xBF\xBD\xEF\xBF\xBD", "\xEF\xBF\xBD\xEF\xBF\xBD"},
      {"\xC3\xA9t\xC3\xA9", "\xC3\xA9t\xC3\xA9", "\xC3\xA9t\xC3\xA9"},
  };
  for (const auto& each : cases) {
    const Segments segments{{.begin = 1, .end = 2.5, .text = each.text, .tokens = {}}};
    EXPECT_EQ(subtitles(segments, SubtitleFormat::srt), std::string("1\n00:00:01,000 --> 00:00:02,500\n") + each.srt + "\n\n");
    EXPECT_EQ(subtitles(segments, SubtitleFormat::vtt), std::string("WEBVTT\n\n00:00:01.000 --> 00:00:02.500\n") + each.vtt + "\n\n");
  }
}

TEST(Subtitles, Csv) {
  const Segments segments{{.begin = 0, .end = 1.2345, .text = "six, \"seven\"\nnine", .tokens = {}},
                          {.begin = 1.2345, .end = 2, .text = " ", .tokens = {}},
                          {.begin = 3600, .end = 3599, .text = "\xC3\xA9", .tokens = {}}};
  EXPECT_EQ(subtitles(segments, SubtitleFormat::csv), "start,end,text\n0,1235,\"six, \"\"seven\"\" nine\"\n3600000,3600001,\"\xC3\xA9\"\n");
  EXPECT_EQ(subtitles({}, SubtitleFormat::csv), "start,end,text\n");
}

TEST(Subtitles, Lrc) {
  const Segments segments{{.begin = 0.019, .end = 1, .text = "six\nseven [laughs] [", .tokens = {}},
                          {.begin = 1, .end = 2, .text = "", .tokens = {}},
                          {.begin = 59.9996, .end = 61, .text = "[00:01.00] <00:02.00> nine", .tokens = {}},
                          {.begin = 6000, .end = 6001, .text = "one", .tokens = {}}};
  EXPECT_EQ(subtitles(segments, SubtitleFormat::lrc),
            "[by:tilewave]\n[00:00.01] six seven [laughs] [\n[01:00.00] (00:01.00] (00:02.00> nine\n[100:00.00] one\n");
}

TEST(Subtitles, SegmentsWithoutTextHaveNoEntry) {
  Segments segments(4);
  segments[1].text = " \n\x01";
  segments[2].text = "one";
  EXPECT_EQ(subtitles(segments, SubtitleFormat::srt), "1\n00:00:00,000 --> 00:00:00,001\none\n\n");
  EXPECT_EQ(subtitles({}, SubtitleFormat::vtt), "WEBVTT\n\n");
  EXPECT_EQ(subtitles({}, SubtitleFormat::srt), "");
}

TEST(Subtitles, OddTimes) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN(), kInfinity = std::numeric_limits<double>::infinity();
  const struct {
    double begin, end;
    const char* times;
  } cases[] = {
      {0.0004, 0.0005, "00:00:00.000 --> 00:00:00.001"},
      {59.9996, 3599.9996, "00:01:00.000 --> 01:00:00.000"},
      {360000, 3600000.25, "100:00:00.000 --> 1000:00:00.250"},
      {5, 4, "00:00:05.000 --> 00:00:05.001"},
      {-1, kNan, "00:00:00.000 --> 00:00:00.001"},
      {kNan, 1, "00:00:00.000 --> 00:00:01.000"},
      {1, kInfinity, "00:00:01.000 --> 277777:46:40.000"},
      {1e300, 1e300, "277777:46:40.000 --> 277777:46:40.001"},
  };
  for (const auto& each : cases) {
    const Segments segments{{.begin = each.begin, .end = each.end, .text = "one", .tokens = {}}};
    EXPECT_EQ(subtitles(segments, SubtitleFormat::vtt), std::string("WEBVTT\n\n") + each.times + "\none\n\n");
  }
  // Entries begin in order.
  const Segments back{{.begin = 5, .end = 6, .text = "one", .tokens = {}}, {.begin = 2, .end = 3, .text = "two", .tokens = {}}};
  EXPECT_EQ(subtitles(back, SubtitleFormat::vtt), "WEBVTT\n\n00:00:05.000 --> 00:00:06.000\none\n\n00:00:05.000 --> 00:00:05.001\ntwo\n\n");
}

}  // namespace
