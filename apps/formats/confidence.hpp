#pragma once

#include <string>
#include <vector>

#include "tilewave/speech.hpp"

namespace tw::formats {

/// How probable a token was: below 50 %, below 90 %, or higher. Unknown without TranscribeOptions::logprobs.
enum class Confidence { low, medium, high, unknown };

struct ConfidenceSpan {
  std::string text;  ///< whole characters
  Confidence confidence;
};

/// The text of a transcript in spans of equal confidence. A character that takes several tokens has the lowest of theirs.
std::vector<ConfidenceSpan> confidence_spans(const speech::Transcript& transcript);

}  // namespace tw::formats
