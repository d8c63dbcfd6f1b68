#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "tilewave/speech.hpp"

// Transcripts in the JSON that OpenAI defines.

namespace tw::formats {

/// The tokens of all segments, each with `token` (the text that it completes), `bytes` (of that text) and `logprob`. Needs
/// TranscribeOptions::logprobs.
nlohmann::ordered_json token_logprobs(const speech::Transcript& transcript);

/// Counts of tokens: of the prompts (text and audio), and of the generated text.
nlohmann::ordered_json token_usage(const speech::Transcript& transcript);

/// What a transcript does not say about itself.
struct VerboseJsonOptions {
  std::string language = "unknown";  ///< in English and in lower case
  double temperature = 0;
};

/// `verbose_json`: the text, and each segment with its times and measures of confidence. avg_logprob needs TranscribeOptions::logprobs and
/// is 0 without. `seek` is the segment's begin in units of 10 ms. no_speech_prob is 0: the models have no such output, and silence makes no
/// segments.
nlohmann::ordered_json verbose_json(const speech::Transcript& transcript, const VerboseJsonOptions& options = {});

/// Bytes of `text` per byte of it that zlib compresses it to, as Whisper computes it: a text that repeats itself exceeds 2.4. 0 for "".
double compression_ratio(std::string_view text);

/// `value` on one line, with U+FFFD in place of bytes that are not UTF-8.
std::string json_text(const nlohmann::ordered_json& value);

}  // namespace tw::formats
