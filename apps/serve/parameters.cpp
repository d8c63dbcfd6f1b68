#include "apps/serve/parameters.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "apps/serve/error.hpp"
#include "apps/serve/languages.hpp"
#include "models/json.hpp"
#include "models/one_line.hpp"
#include "models/tokenizer/utf8.hpp"
#include "runtime/format.hpp"
#include "tilewave/error.hpp"

namespace tw::serve {

namespace {

using nlohmann::json;

constexpr std::size_t kMostText = 65536;  // bytes of a field other than the file

[[noreturn]] void refuse(const std::string& field, const std::string& message, const std::string& code = "invalid_value") {
  throw ApiError(400, message, field, code);
}

[[noreturn]] void not_allowed(const std::string& field, std::string_view value, const std::string& allowed) {
  refuse(field, tw::format("{} is {}; it must be {}", field, models::in_quotes(value), allowed));
}

std::string lower(std::string_view text) {
  std::string result(text);
  for (char& c : result)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  return result;
}

bool parse_flag(const std::string& field, std::string_view text) {
  const std::string word = lower(text);
  if (word == "true" || word == "1") return true;
  if (word != "false" && word != "0") not_allowed(field, text, "true or false");
  return false;
}

ResponseFormat parse_format(const std::string& field, std::string_view text) {
  static const std::map<std::string, ResponseFormat, std::less<>> kFormats = {{"json", ResponseFormat::json},
                                                                              {"text", ResponseFormat::text},
                                                                              {"srt", ResponseFormat::srt},
                                                                              {"verbose_json", ResponseFormat::verbose_json},
                                                                              {"vtt", ResponseFormat::vtt}};
  if (text == "diarized_json")
    refuse(field, "response_format is \"diarized_json\"; this server cannot tell speakers apart", "unsupported_value");
  const auto found = kFormats.find(text);
  if (found == kFormats.end()) not_allowed(field, text, "json, text, srt, verbose_json or vtt");
  return found->second;
}

/// A number of a chunking strategy, which is text in a form of its own and a number in JSON.
void check_number(const std::string& field, const json& value, double least, double most) {
  if (value.is_string()) {
    parse_number(field, value.get_ref<const std::string&>(), least, most);
  } else if (!value.is_number() || value.get<double>() < least || value.get<double>() > most) {
    refuse(field, tw::format("{} is {}; it must be a number from {} to {}", field, models::brief(value), least, most));
  }
}

/// Checks an object that describes voice activity detection. Its numbers are OpenAI's detector's, and change nothing here.
void check_strategy(const std::string& field, const json& strategy) {
  constexpr double kHour = 3600e3;
  if (!strategy.is_object())
    refuse(field, tw::format("{} is {}; it must be auto or an object of type server_vad", field, models::brief(strategy)));
  if (!strategy.contains("type"))
    refuse(field + ".type", tw::format("{}.type is missing; it must be server_vad", field), "missing_required_parameter");
  for (const auto& [key, value] : strategy.items()) {
    const std::string name = tw::format("{}.{}", field, models::one_line(key));
    if (key == "type") {
      if (value != "server_vad") refuse(name, tw::format("{} is {}; it must be \"server_vad\"", name, models::brief(value)));
    } else if (key == "threshold") {
      check_number(name, value, 0, 1);
    } else if (key == "prefix_padding_ms" || key == "silence_duration_ms") {
      check_number(name, value, 0, kHour);
    } else {
      refuse(name, tw::format("{} is unknown; allowed are type, threshold, prefix_padding_ms and silence_duration_ms", name),
             "unknown_parameter");
    }
  }
}

/// A field's name without the brackets at its end, and what is between them.
struct FieldName {
  std::string name;
  std::optional<std::string> bracket;
};

FieldName parse_name(const std::string& name) {
  const std::size_t open = name.find('[');
  if (open == std::string::npos || !name.ends_with(']')) return {name, {}};
  return {name.substr(0, open), name.substr(open + 1, name.size() - open - 2)};
}

bool is_index(const std::string& text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
}

/// Reads the fields of one form.
class FormReader {
 public:
  TranscriptionParameters read(std::span<const FormPart> form) {
    for (const FormPart& part : form) {
      if (part.name == "file") {
        require_once("file");
        parameters_.file = part.content;
      } else {
        read(parse_name(part.name), part.content);
      }
    }
    check_together();
    return std::move(parameters_);
  }

 private:
  void read(const FieldName& field, std::string_view text) {
    static const std::set<std::string, std::less<>> kScalars = {"model",  "language",        "prompt", "temperature",
                                                                "stream", "response_format", "file",   "chunking_strategy"};
    static const std::set<std::string, std::less<>> kLists = {"include",  "timestamp_granularities",  "languages",
                                                              "keywords", "known_speaker_references", "known_speaker_names"};
    const bool scalar = kScalars.contains(field.name), list = kLists.contains(field.name);
    if (!scalar && !list) return;
    const std::string& name = field.name;
    if (text.size() > kMostText) refuse(name, tw::format("{} has {} bytes; at most {} are allowed", name, text.size(), kMostText));
    std::string repaired;
    models::append_repaired(repaired, text);
    if (repaired != text) refuse(name, tw::format("{} is not valid UTF-8", name));
    if (list) {
      if (field.bracket && !is_index(*field.bracket))
        refuse(name, tw::format("{}[{}] is unknown; {} is a list", name, models::one_line(*field.bracket), name), "unknown_parameter");
      return read_list(name, text);
    }
    if (name == "chunking_strategy" && field.bracket) {
      if (!strategy_.emplace(*field.bracket, std::string(text)).second)
        refuse_twice(tw::format("{}.{}", name, models::one_line(*field.bracket)));
      return;
    }
    if (field.bracket) refuse(name, tw::format("{} is a single value, not a list", name));
    require_once(name);
    read_value(name, text);
  }

  void read_value(const std::string& name, std::string_view text) {
    if (name == "model") parameters_.model = text;
    if (name == "language") parameters_.language = parse_language(name, text);
    if (name == "prompt") parameters_.prompt = text;
    if (name == "temperature") parameters_.temperature = parse_number(name, text, 0, 1);
    if (name == "stream") parameters_.stream = parse_flag(name, text);
    if (name == "response_format") parameters_.format = parse_format(name, text);
    if (name == "chunking_strategy" && text != "auto") {
      json strategy;
      try {
        strategy = models::parse_json(text, name);
      } catch (const FileError&) {
        not_allowed(name, text, "auto or a JSON object of type server_vad");
      }
      check_strategy(name, strategy);
      parameters_.vad = true;
    }
  }

  void read_list(const std::string& name, std::string_view text) {
    seen_.insert(name);
    if (name == "include") {
      if (text != "logprobs") not_allowed(name, text, "logprobs");
      parameters_.logprobs = true;
    } else if (name == "timestamp_granularities") {
      if (text == "word")
        refuse(name, "timestamp_granularities has \"word\"; the model cannot align words with the audio, so only segment is supported",
               "unsupported_value");
      if (text != "segment") not_allowed(name, text, "segment");
    } else if (name == "languages") {
      parse_language(name, text);
    } else if (name.starts_with("known_speaker")) {
      refuse(name, tw::format("{} is not supported: this server cannot tell speakers apart", name), "unsupported_parameter");
    }
  }

  void check_together() {
    if (!seen_.contains("file")) refuse("file", "file is missing; it must be the audio file", "missing_required_parameter");
    if (parameters_.model.empty()) refuse("model", "model is missing; it must be the name of a model", "missing_required_parameter");
    if (seen_.contains("chunking_strategy") && !strategy_.empty()) refuse_twice("chunking_strategy");
    if (!strategy_.empty()) {
      check_strategy("chunking_strategy", strategy_);
      parameters_.vad = true;
    }
    if (seen_.contains("timestamp_granularities") && parameters_.format != ResponseFormat::verbose_json)
      refuse("timestamp_granularities", "timestamp_granularities needs response_format verbose_json");
    if (parameters_.logprobs && parameters_.format != ResponseFormat::json)
      refuse("include", "include has \"logprobs\"; this needs response_format json", "unsupported_value");
    if (parameters_.stream && (parameters_.format == ResponseFormat::srt || parameters_.format == ResponseFormat::vtt))
      refuse("stream", "stream is true; this needs response_format json, text or verbose_json", "unsupported_value");
  }

  void require_once(const std::string& name) {
    if (!seen_.insert(name).second) refuse_twice(name);
  }

  [[noreturn]] static void refuse_twice(const std::string& name) { refuse(name, tw::format("{} is given more than once", name)); }

  TranscriptionParameters parameters_;
  std::set<std::string> seen_;
  json strategy_ = json::object();  ///< from fields chunking_strategy[...]
};

}  // namespace

double parse_number(const std::string& field, std::string_view text, double least, double most) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !(value >= least && value <= most))
    not_allowed(field, text, tw::format("a number from {} to {}", least, most));
  return value;
}

std::string parse_language(const std::string& field, std::string_view code) {
  const std::string_view name = language_name(lower(code));
  if (name.empty())
    refuse(field, tw::format("{} is {}; it must be a code of ISO 639-1, such as en", field, models::in_quotes(code)),
           "invalid_language_format");
  return std::string(name);
}

TranscriptionParameters parse_parameters(std::span<const FormPart> form) { return FormReader().read(form); }

}  // namespace tw::serve
