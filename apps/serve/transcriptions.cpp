#include "apps/serve/transcriptions.hpp"

#include <chrono>
#include <exception>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <utility>
#include <vector>

#include "apps/formats/json.hpp"
#include "apps/formats/subtitles.hpp"
#include "apps/serve/models.hpp"
#include "apps/serve/multipart.hpp"
#include "apps/serve/parameters.hpp"
#include "speech/audio/audio.hpp"
#include "tilewave/error.hpp"

namespace tw::serve {

namespace {

using nlohmann::ordered_json;

/// How one request is answered.
struct AnswerOptions {
  ResponseFormat format = ResponseFormat::json;
  bool stream = false;
  bool logprobs = false;
  formats::VerboseJsonOptions verbose = {};
};

/// The answer to one request, written by the engine's callbacks. A stream begins with its first text, so that errors before it get their
/// status.
class Answer {
 public:
  Answer(std::shared_ptr<Responder> responder, AnswerOptions options) : responder_(std::move(responder)), options_(std::move(options)) {}

  void add(std::string_view text) { send_event({{"type", "transcript.text.delta"}, {"delta", text}}); }

  void finish(const speech::Completion& completion) {
    try {
      if (completion.error) std::rethrow_exception(completion.error);
      options_.stream ? finish_stream(completion.transcript) : send(completion.transcript);
    } catch (...) {
      fail(engine_error(std::current_exception()));
    }
  }

 private:
  void send(const speech::Transcript& transcript) {
    switch (options_.format) {
      case ResponseFormat::json: {
        ordered_json answer = {{"text", transcript.text}};
        if (options_.logprobs) answer["logprobs"] = formats::token_logprobs(transcript);
        answer["usage"] = formats::token_usage(transcript);
        return send_json(answer);
      }
      case ResponseFormat::verbose_json:
        return send_json(formats::verbose_json(transcript, options_.verbose));
      case ResponseFormat::text:
        return send_text(transcript.text + "\n");
      case ResponseFormat::srt:
        return send_text(formats::subtitles(transcript.segments, formats::SubtitleFormat::srt));
      case ResponseFormat::vtt:
        return send_text(formats::subtitles(transcript.segments, formats::SubtitleFormat::vtt));
    }
  }

  void send_json(const ordered_json& json) { responder_->send(200, {{"Content-Type", "application/json"}}, formats::json_text(json)); }
  void send_text(std::string text) { responder_->send(200, {{"Content-Type", "text/plain; charset=utf-8"}}, std::move(text)); }

  /// The last event has the whole text and, for verbose_json, what that has.
  void finish_stream(const speech::Transcript& transcript) {
    ordered_json done = {{"type", "transcript.text.done"}, {"text", transcript.text}};
    if (options_.logprobs) done["logprobs"] = formats::token_logprobs(transcript);
    if (options_.format == ResponseFormat::verbose_json) {
      ordered_json verbose = formats::verbose_json(transcript, options_.verbose);
      for (const char* name : {"language", "duration", "segments"}) done[name] = std::move(verbose[name]);
    }
    done["usage"] = formats::token_usage(transcript);
    send_event(done);
    end_stream();
  }

  void fail(const ApiError& error) {
    if (!begun_) return send_error(*responder_, error);
    ordered_json event = {{"type", "error"}};
    event.update(ordered_json::parse(error_json(error)));
    send_event(event);
    end_stream();
  }

  void send_event(const ordered_json& event) {
    // A proxy that gathers an answer before it passes it on would defeat the stream.
    if (!std::exchange(begun_, true))
      responder_->begin(200,
                        {{"Content-Type", "text/event-stream; charset=utf-8"}, {"Cache-Control", "no-cache"}, {"X-Accel-Buffering", "no"}});
    responder_->write("data: " + formats::json_text(event) + "\n\n");
  }

  void end_stream() {
    responder_->write("data: [DONE]\n\n");
    responder_->end();
  }

  std::shared_ptr<Responder> responder_;
  AnswerOptions options_;
  bool begun_ = false;
};

std::vector<float> decode(Service& service, std::string_view file) {
  const auto begin = std::chrono::steady_clock::now();
  const auto seconds = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(); };
  try {
    std::vector<float> samples = speech::decode_audio(file, "file", {.longest_seconds = service.limits.audio_seconds});
    service.metrics.decoded(seconds());
    return samples;
  } catch (const FileError& error) {
    service.metrics.decoded(seconds());
    throw ApiError(400, error.what(), "file", "invalid_file");
  }
}

}  // namespace

std::string instruction(const Service& service, std::string_view prompt) {
  constexpr std::string_view kPlace = "{prompt}";
  if (prompt.empty()) return "";
  std::string text = service.prompt_template;
  if (const std::size_t at = text.find(kPlace); at != std::string::npos) text.replace(at, kPlace.size(), prompt);
  return text;
}

Handler transcriptions_handler(Service& service) {
  return [&service](std::shared_ptr<const HttpRequest> request, const std::shared_ptr<Responder>& responder) {
    const std::vector<FormPart> form = parse_multipart(request->header("Content-Type"), request->body);
    const TranscriptionParameters parameters = parse_parameters(form);
    require_model(service, parameters.model);
    speech::Engine& engine = service.engine();

    speech::Request work;
    work.samples = decode(service, parameters.file);
    work.client = request->client;
    if (parameters.vad) work.options.segmentation = speech::Segmentation::vad;
    work.options.prompt = instruction(service, parameters.prompt);
    if (service.forced_tokens > 0) {
      work.options.ignore_end = true;
      work.options.max_new_tokens = service.forced_tokens;
    }
    work.options.temperature = parameters.temperature;
    if (parameters.temperature > 0) work.options.seed = std::random_device()();
    work.options.logprobs = parameters.logprobs || parameters.format == ResponseFormat::verbose_json;
    const auto answer = std::make_shared<Answer>(
        responder, AnswerOptions{.format = parameters.format,
                                 .stream = parameters.stream,
                                 .logprobs = parameters.logprobs,
                                 .verbose = {.language = parameters.language, .temperature = parameters.temperature}});
    if (parameters.stream) work.options.on_text = [answer](std::size_t, std::string_view text) { answer->add(text); };
    work.on_done = [answer, &service](const speech::Completion& completion) {
      service.metrics.finished(completion);
      answer->finish(completion);
    };
    request.reset();  // the upload's memory
    const speech::Engine::Id id = engine.submit(std::move(work));
    responder->on_gone([&engine, id] { engine.cancel(id); });
  };
}

}  // namespace tw::serve
