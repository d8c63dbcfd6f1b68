#include "apps/formats/json.hpp"

#include <zlib.h>

#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <numeric>
#include <utility>
#include <vector>

#include "tilewave/error.hpp"

namespace tw::formats {

namespace {

using Json = nlohmann::ordered_json;

double mean(const std::vector<float>& values) {
  return values.empty() ? 0 : std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

std::int64_t centiseconds(double seconds) {
  constexpr double kMost = 1e9;  // 30 years; and NaN becomes 0
  return seconds > 0 ? static_cast<std::int64_t>(std::min(seconds, kMost) * 100 + 0.5) : 0;
}

}  // namespace

double compression_ratio(std::string_view text) {
  if (text.empty()) return 0;
  uLongf size = compressBound(static_cast<uLong>(text.size()));
  std::vector<Bytef> compressed(size);
  if (compress(compressed.data(), &size, reinterpret_cast<const Bytef*>(text.data()), static_cast<uLong>(text.size())) != Z_OK)
    throw OutOfMemory("zlib: a text cannot be compressed");
  return static_cast<double>(text.size()) / static_cast<double>(size);
}

std::string json_text(const Json& value) { return value.dump(-1, ' ', false, Json::error_handler_t::replace); }

Json token_logprobs(const speech::Transcript& transcript) {
  Json tokens = Json::array();
  for (const speech::TranscriptSegment& segment : transcript.segments) {
    for (std::size_t i = 0; i < std::min(segment.logprobs.size(), segment.token_texts.size()); ++i) {
      const std::string& text = segment.token_texts[i];
      tokens.push_back({{"token", text}, {"bytes", std::vector<std::uint8_t>(text.begin(), text.end())}, {"logprob", segment.logprobs[i]}});
    }
  }
  return tokens;
}

Json token_usage(const speech::Transcript& transcript) {
  std::int64_t output = 0;
  for (const speech::TranscriptSegment& segment : transcript.segments) output += std::ssize(segment.tokens);
  return {{"type", "tokens"},
          {"input_tokens", transcript.prompt_tokens},
          {"input_token_details",
           {{"text_tokens", transcript.prompt_tokens - transcript.audio_tokens}, {"audio_tokens", transcript.audio_tokens}}},
          {"output_tokens", output},
          {"total_tokens", transcript.prompt_tokens + output}};
}

Json verbose_json(const speech::Transcript& transcript, const VerboseJsonOptions& options) {
  Json segments = Json::array();
  for (const speech::TranscriptSegment& segment : transcript.segments) {
    segments.push_back({{"id", segments.size()},
                        {"seek", centiseconds(segment.begin)},
                        {"start", segment.begin},
                        {"end", segment.end},
                        {"text", segment.text},
                        {"tokens", segment.tokens},
                        {"temperature", options.temperature},
                        {"avg_logprob", mean(segment.logprobs)},
                        {"compression_ratio", compression_ratio(segment.text)},
                        {"no_speech_prob", 0.0}});
  }
  return {
      {"task", "transcribe"},    {"language", options.language},    {"duration", transcript.duration},
      {"text", transcript.text}, {"segments", std::move(segments)}, {"usage", {{"type", "duration"}, {"seconds", transcript.duration}}}};
}

}  // namespace tw::formats
