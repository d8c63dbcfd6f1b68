#pragma once

#include <span>
#include <string>
#include <string_view>

#include "apps/serve/multipart.hpp"

namespace tw::serve {

enum class ResponseFormat { json, text, srt, verbose_json, vtt };

/// The fields of POST /v1/audio/transcriptions.
struct TranscriptionParameters {
  std::string_view file;  ///< its bytes, in the body
  std::string model;
  std::string language = "unknown";  ///< in English
  std::string prompt;
  double temperature = 0;
  ResponseFormat format = ResponseFormat::json;
  bool stream = false;
  bool logprobs = false;
  bool vad = false;  ///< the client wants its audio cut by voice activity detection
};

/// Reads and checks the fields. Lists may be named include[], include[0] or include; chunking_strategy may be JSON, or one field for each
/// member, chunking_strategy[type]. Fields that OpenAI does not define are ignored. Throws ApiError 400, which names the field, for values
/// that OpenAI does not allow, for a field twice, and for what the model cannot do: times of words and telling speakers apart.
TranscriptionParameters parse_parameters(std::span<const FormPart> form);

/// The number that `text` is; throws ApiError 400, which names `field`, if it is none or not from `least` to `most`.
double parse_number(const std::string& field, std::string_view text, double least, double most);

/// The English name of the language with the code `code`, in either case. Throws ApiError 400, which names `field`, if there is none.
std::string parse_language(const std::string& field, std::string_view code);

}  // namespace tw::serve
