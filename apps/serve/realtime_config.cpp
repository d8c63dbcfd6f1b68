#include "apps/serve/realtime_config.hpp"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "apps/serve/json_fields.hpp"
#include "apps/serve/models.hpp"
#include "apps/serve/parameters.hpp"
#include "apps/serve/transcriptions.hpp"

namespace tw::serve {

namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr std::size_t kMostText = 65536;  // bytes of a field
constexpr const char* kLogprobs = "item.input_audio_transcription.logprobs";

struct NamedFormat {
  PcmFormat format;
  const char* name;       // in the current dialect
  const char* beta_name;  // in the other
};

constexpr NamedFormat kFormats[] = {{PcmFormat::pcm16, "audio/pcm", "pcm16"},
                                    {PcmFormat::g711_ulaw, "audio/pcmu", "g711_ulaw"},
                                    {PcmFormat::g711_alaw, "audio/pcma", "g711_alaw"}};

const NamedFormat& named(PcmFormat format) { return *std::ranges::find(kFormats, format, &NamedFormat::format); }

class ConfigReader {
 public:
  ConfigReader(RealtimeConfig config, const Service& service) : config_(std::move(config)), service_(service) {}

  RealtimeConfig read(const json& session) {
    const JsonFields fields(session, "session",
                            {"type", "audio", "include", "input_audio_format", "input_audio_noise_reduction", "input_audio_transcription",
                             "turn_detection", "modalities", "client_secret"});
    if (const json* type = fields.find("type"); type && *type != "transcription")
      refuse_value("session.type", *type, "\"transcription\": this server does not speak");
    if (const json* audio = fields.find("audio")) {
      const JsonFields audio_fields(*audio, "session.audio", {"input"});
      if (const json* input = audio_fields.find("input")) read_input(*input);
    }
    if (const json* format = fields.find("input_audio_format")) read_beta_format(*format);
    read_common(fields, "input_audio_noise_reduction", "input_audio_transcription");
    if (const json* include = fields.find("include")) read_include(*include);
    return std::move(config_);
  }

 private:
  void read_input(const json& input) {
    const JsonFields fields(input, "session.audio.input", {"format", "noise_reduction", "transcription", "turn_detection"});
    if (const json* format = fields.find("format")) read_format(*format);
    read_common(fields, "noise_reduction", "transcription");
  }

  void read_common(const JsonFields& fields, std::string_view noise_reduction, std::string_view transcription) {
    if (const json* value = fields.find(noise_reduction)) check_noise_reduction(*value, fields.path_of(noise_reduction));
    if (const json* value = fields.find(transcription)) read_transcription(*value, fields.path_of(transcription));
    if (const json* value = fields.find("turn_detection")) read_turn_detection(*value, fields.path_of("turn_detection"));
  }

  void read_format(const json& format) {
    const std::string path = "session.audio.input.format";
    const JsonFields fields(format, path, {"type", "rate"});
    const json* type = fields.find("type");
    const auto found = type ? std::ranges::find_if(kFormats, [&](const NamedFormat& each) { return *type == each.name; }) : kFormats;
    if (found == std::end(kFormats)) refuse_value(fields.path_of("type"), *type, "\"audio/pcm\", \"audio/pcmu\" or \"audio/pcma\"");
    config_.format = found->format;
    config_.rate = found->format == PcmFormat::pcm16 ? 24000 : 8000;
    const json* rate = fields.find("rate");
    if (!rate) return;
    if (found->format == PcmFormat::pcm16 ? *rate != 24000 && *rate != 16000 : *rate != 8000)
      refuse_value(fields.path_of("rate"), *rate, found->format == PcmFormat::pcm16 ? "24000 or 16000" : "8000 for this type");
    config_.rate = rate->get<int>();
  }

  void read_beta_format(const json& format) {
    const auto found = std::ranges::find_if(kFormats, [&](const NamedFormat& each) { return format == each.beta_name; });
    if (found == std::end(kFormats)) refuse_value("session.input_audio_format", format, "\"pcm16\", \"g711_ulaw\" or \"g711_alaw\"");
    config_.format = found->format;
    config_.rate = found->format == PcmFormat::pcm16 ? 24000 : 8000;
  }

  // The model hears noise as it is; a client need not know.
  static void check_noise_reduction(const json& value, const std::string& path) {
    if (value.is_null()) return;
    const JsonFields fields(value, path, {"type", "strength"});
    fields.number("strength", 0, 1);
    if (const json* type = fields.find("type"); type && *type != "near_field" && *type != "far_field")
      refuse_value(fields.path_of("type"), *type, "\"near_field\" or \"far_field\"");
  }

  void read_transcription(const json& value, const std::string& path) {
    if (value.is_null()) {
      config_.model = config_.language = config_.prompt = "";
      return;
    }
    const JsonFields fields(value, path, {"model", "language", "languages", "prompt", "delay", "keywords"});
    for (const char* name : {"delay", "keywords"})
      if (fields.find(name))
        refuse_field(fields.path_of(name), tw::format("{} is not supported by this model", fields.path_of(name)), "unsupported_parameter");
    if (std::optional<std::string> model = fields.text("model", kMostText)) {
      require_model(service_, *model, fields.path_of("model"));
      config_.model = std::move(*model);
    }
    if (std::optional<std::string> language = fields.text("language", kMostText)) {
      if (!language->empty()) parse_language(fields.path_of("language"), *language);
      config_.language = std::move(*language);
    }
    if (const json* languages = fields.find("languages")) {
      if (!languages->is_array()) refuse_value(fields.path_of("languages"), *languages, "an array of strings", "invalid_type");
      for (const json& each : *languages) {
        if (!each.is_string()) refuse_value(fields.path_of("languages"), each, "an array of strings", "invalid_type");
        parse_language(fields.path_of("languages"), each.get_ref<const std::string&>());
      }
    }
    if (std::optional<std::string> prompt = fields.text("prompt", kMostText)) config_.prompt = std::move(*prompt);
  }

  void read_turn_detection(const json& value, const std::string& path) {
    if (value.is_null()) {
      config_.turn_detection.reset();
      return;
    }
    const JsonFields fields(value, path,
                            {"type", "threshold", "prefix_padding_ms", "silence_duration_ms", "create_response", "interrupt_response",
                             "idle_timeout_ms", "eagerness"});
    if (const json* type = fields.find("type"); type && *type != "server_vad")
      refuse_value(fields.path_of("type"), *type, "\"server_vad\", or turn_detection null",
                   *type == "semantic_vad" ? "unsupported_value" : "invalid_value");
    if (fields.find("eagerness"))
      refuse_field(fields.path_of("eagerness"),
                   tw::format("{} is only for semantic_vad, which is not supported", fields.path_of("eagerness")), "unsupported_parameter");
    // These are about responses. A session for transcription has none.
    fields.check_boolean("create_response");
    fields.check_boolean("interrupt_response");
    if (const json* timeout = fields.find("idle_timeout_ms"); timeout && !timeout->is_null()) fields.number("idle_timeout_ms", 0, 1e9);
    ServerVad vad = config_.turn_detection.value_or(ServerVad{});
    vad.threshold = fields.number("threshold", 0, 1).value_or(vad.threshold);
    vad.prefix_padding_ms = fields.number("prefix_padding_ms", 0, 5000).value_or(vad.prefix_padding_ms);
    vad.silence_duration_ms = fields.number("silence_duration_ms", 100, 10000).value_or(vad.silence_duration_ms);
    config_.turn_detection = vad;
  }

  void read_include(const json& include) {
    const std::string allowed = tw::format("an array of \"{}\"", kLogprobs);
    if (!include.is_array() && !include.is_null()) refuse_value("session.include", include, allowed, "invalid_type");
    config_.logprobs = false;
    for (const json& each : include) {
      if (each != kLogprobs) refuse_value("session.include", each, allowed);
      config_.logprobs = true;
    }
  }

  RealtimeConfig config_;
  const Service& service_;
};

ordered_json or_null(const std::string& text) { return text.empty() ? ordered_json() : ordered_json(text); }

}  // namespace

RealtimeConfig updated(RealtimeConfig config, const json& session, const Service& service) {
  return ConfigReader(std::move(config), service).read(session);
}

ordered_json session_object(const RealtimeConfig& config, const Service& service, const std::string& id, RealtimeDialect dialect) {
  ordered_json turn_detection;
  if (const std::optional<ServerVad>& vad = config.turn_detection)
    turn_detection = {{"type", "server_vad"},
                      {"threshold", vad->threshold},
                      {"prefix_padding_ms", std::llround(vad->prefix_padding_ms)},
                      {"silence_duration_ms", std::llround(vad->silence_duration_ms)}};
  ordered_json transcription = {
      {"model", config.model.empty() ? service.model : config.model}, {"language", or_null(config.language)}, {"prompt", config.prompt}};
  ordered_json include;
  if (config.logprobs) include = {kLogprobs};
  if (dialect == RealtimeDialect::beta)
    return {{"id", id},
            {"object", "realtime.transcription_session"},
            {"input_audio_format", named(config.format).beta_name},
            {"input_audio_transcription", std::move(transcription)},
            {"turn_detection", std::move(turn_detection)},
            {"input_audio_noise_reduction", nullptr},
            {"include", std::move(include)}};
  ordered_json format = {{"type", named(config.format).name}};
  if (config.format == PcmFormat::pcm16) format["rate"] = config.rate;
  return {{"id", id},
          {"object", "realtime.transcription_session"},
          {"type", "transcription"},
          {"audio",
           {{"input",
             {{"format", std::move(format)},
              {"transcription", std::move(transcription)},
              {"noise_reduction", nullptr},
              {"turn_detection", std::move(turn_detection)}}}}},
          {"include", std::move(include)}};
}

speech::LiveOptions live_options(const RealtimeConfig& config, const Service& service) {
  speech::LiveOptions options;
  options.sampling_rate = config.rate;
  options.voice_activity.reset();
  if (const std::optional<ServerVad>& vad = config.turn_detection) {
    options.voice_activity = speech::VoiceActivityOptions{
        .threshold = vad->threshold, .prefix_seconds = vad->prefix_padding_ms / 1000, .silence_seconds = vad->silence_duration_ms / 1000};
    options.voice_activity->suffix_seconds = std::min(options.voice_activity->suffix_seconds, options.voice_activity->silence_seconds);
  }
  options.transcribe.prompt = instruction(service, config.prompt);
  options.transcribe.logprobs = config.logprobs;
  options.waiting_seconds = std::clamp(service.limits.audio_seconds, 60.0, options.waiting_seconds);
  return options;
}

}  // namespace tw::serve
