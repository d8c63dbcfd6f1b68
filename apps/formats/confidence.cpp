#include "apps/formats/confidence.hpp"

#include <algorithm>
#include <cmath>
#include <string_view>
#include <utility>

#include "speech/text_stream.hpp"

namespace tw::formats {
namespace {

Confidence confidence_of(float logprob) {
  const double probability = std::exp(static_cast<double>(logprob));
  return probability < 0.5 ? Confidence::low : probability < 0.9 ? Confidence::medium : Confidence::high;
}

class Spans {
 public:
  void add(std::string_view text, Confidence confidence) {
    const std::string added = stream_.push(text);
    if (added.empty()) return;
    if (all.empty() || all.back().confidence != confidence) all.push_back({"", confidence});
    all.back().text += added;
  }
  void end_segment() { stream_.end_segment(); }

  std::vector<ConfidenceSpan> all;

 private:
  speech::TextStream stream_;
};

}  // namespace

std::vector<ConfidenceSpan> confidence_spans(const speech::Transcript& transcript) {
  Spans spans;
  for (const speech::TranscriptSegment& segment : transcript.segments) {
    const std::size_t tokens = std::min(segment.logprobs.size(), segment.token_texts.size());
    Confidence lowest = Confidence::high;  // of tokens since the last whole character
    for (std::size_t i = 0; i < tokens; ++i) {
      lowest = std::min(lowest, confidence_of(segment.logprobs[i]));
      if (segment.token_texts[i].empty()) continue;
      spans.add(segment.token_texts[i], lowest);
      lowest = Confidence::high;
    }
    if (tokens == 0) spans.add(segment.text, Confidence::unknown);
    spans.end_segment();
  }
  return std::move(spans.all);
}

}  // namespace tw::formats
