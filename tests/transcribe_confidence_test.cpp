// How probable tokens were, as a terminal shows it.

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "apps/formats/confidence.hpp"

namespace {

using tw::formats::Confidence;
using tw::formats::confidence_spans;
using tw::speech::Transcript;
using tw::speech::TranscriptSegment;

struct Token {
  std::string text;
  double probability;
};

TranscriptSegment segment(const std::vector<Token>& tokens) {
  TranscriptSegment result;
  for (const Token& token : tokens) {
    result.token_texts.push_back(token.text);
    result.logprobs.push_back(static_cast<float>(std::log(token.probability)));
  }
  return result;
}

/// "r:text|y:text": r below 50 %, y below 90 %, g above, ? unknown.
std::string spans(const std::vector<TranscriptSegment>& segments) {
  Transcript transcript;
  transcript.segments = segments;
  std::string all;
  for (const auto& [text, confidence] : confidence_spans(transcript)) {
    all += all.empty() ? "" : "|";
    all += "ryg?"[static_cast<int>(confidence)];
    all += ":" + text;
  }
  return all;
}

TEST(ConfidenceSpans, TokensOfEqualConfidenceAreOneSpan) {
  EXPECT_EQ(spans({segment({{" one", 0.95}, {" two", 0.99}, {" three", 0.51}, {" four", 0.89}, {" five", 0.4}, {" six", 1}})}),
            "g:one two|y: three four|r: five|g: six");
  EXPECT_EQ(spans({segment({{"one", 0}})}), "r:one");
}

TEST(ConfidenceSpans, SegmentsAreJoinedAsTheirTextIs) {
  EXPECT_EQ(spans({segment({{" one", 1}, {" \n", 0.1}}), segment({}), segment({{"two ", 1}, {" ", 1}, {"three", 0.6}})}),
            "g:one two|y:  three");
}

TEST(ConfidenceSpans, ACharacterOfSeveralTokensHasTheLowest) {
  // A token that ends within a character has no text, and the one that completes it has all of it.
  EXPECT_EQ(spans({segment({{"a", 1}, {"", 0.3}, {"\xC3\xA9t", 1}, {"b", 1}, {"", 0.6}})}), "g:a|r:\xC3\xA9t|g:b");
}

TEST(ConfidenceSpans, WithoutProbabilitiesItIsUnknown) {
  TranscriptSegment plain;
  plain.text = "one two";
  EXPECT_EQ(spans({plain, segment({{" three", 1}})}), "?:one two|g: three");
  EXPECT_EQ(spans({}), "");
}

}  // namespace
