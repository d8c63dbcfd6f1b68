#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <stop_token>

#include "capi/status.hpp"
#include "tilewave/speech.hpp"
#include "tilewave/speech_engine.hpp"

namespace speech = tw::speech;
using tw::InvalidArgument;
using tw::c_api::guard;
using tw::c_api::known;

struct tw_transcriber {
  speech::Transcriber transcriber;
};

struct tw_transcript {
  speech::Transcript transcript;
};

struct tw_audio {
  std::vector<float> samples;
};

struct tw_engine {
  speech::Engine engine;
  std::stop_source stop = {};
};

namespace {

constexpr std::size_t kMostSamples = std::size_t{7 * 24 * 3600} * 16000;  // as of files

template <class T>
T& required(const char* argument, T* pointer) {
  if (pointer == nullptr) throw InvalidArgument(std::string(argument) + " is null");
  return *pointer;
}

/// The C options without their callback.
speech::TranscribeOptions options_of(const tw_transcribe_options& c) {
  if (c.segmentation != TW_SEGMENTATION_AUTOMATIC && c.segmentation != TW_SEGMENTATION_NONE && c.segmentation != TW_SEGMENTATION_VAD)
    throw InvalidArgument("options.segmentation is " + std::to_string(static_cast<int>(c.segmentation)) + "; see tw_segmentation");
  speech::TranscribeOptions options;
  options.segmentation = c.segmentation == TW_SEGMENTATION_NONE  ? speech::Segmentation::none
                         : c.segmentation == TW_SEGMENTATION_VAD ? speech::Segmentation::vad
                                                                 : speech::Segmentation::automatic;
  if (c.prompt != nullptr) options.prompt = c.prompt;
  if (c.max_new_tokens != 0) options.max_new_tokens = c.max_new_tokens;
  if (c.batch != 0) options.batch = c.batch;
  if (c.top_p != 0) options.top_p = c.top_p;
  options.temperature = c.temperature;
  options.seed = c.seed;
  return options;
}

speech::LoadOptions load_options_of(const tw_load_options& c) {
  speech::LoadOptions options;
  options.device = tw::Device::parse(c.device != nullptr ? c.device : "auto");
  if (c.dtype != nullptr && std::string_view(c.dtype) != "auto") options.dtype = tw::parse_dtype(c.dtype);
  if (c.weights != nullptr) options.weights = tw::parse_weight_layout(c.weights);
  if (c.progress != nullptr) options.progress = [c](std::int64_t done, std::int64_t all) { c.progress(c.user, done, all); };
  if (c.mmproj != nullptr) options.mmproj = c.mmproj;
  return options;
}

/// guard(), with a status of their own for the exceptions of speech.
tw_status speech_guard(auto f) noexcept {
  std::optional<tw_status> own;
  const tw_status status = guard([&] {
    try {
      f();
    } catch (const speech::Cancelled&) {
      own = TW_CANCELLED;
      throw;
    } catch (const speech::QueueFull&) {
      own = TW_QUEUE_FULL;
      throw;
    }
  });
  return own.value_or(status);
}

tw_status transcribe(const tw_transcriber* transcriber, const tw_transcribe_options* given, tw_transcript** result, auto read) noexcept {
  return speech_guard([&] {
    required("transcriber", transcriber);
    required("transcript", result);
    const tw_transcribe_options c = known("options", given);
    speech::TranscribeOptions options = options_of(c);
    std::stop_source stop;
    options.cancel = stop.get_token();
    if (c.on_text != nullptr) {
      options.on_text = [&](std::size_t, std::string_view text) {
        if (c.on_text(c.user, text.data(), text.size()) != 0) stop.request_stop();
      };
    }
    const auto samples = read();
    *result = new tw_transcript{transcriber->transcriber.transcribe(samples, options)};
  });
}

std::span<const float> given_samples(const float* samples, size_t count) {
  if (count > kMostSamples)
    throw InvalidArgument("count is " + std::to_string(count) + "; at most " + std::to_string(kMostSamples) +
                          " samples, a week, are allowed");
  if (count > 0) required("samples", samples);
  return {samples, count};
}

}  // namespace

tw_status tw_transcriber_load(const char* model, const tw_load_options* given, tw_transcriber** transcriber) {
  return guard([&] {
    required("model", model);
    required("transcriber", transcriber);
    const tw_load_options c = known("options", given);
    *transcriber = new tw_transcriber{speech::Transcriber(model, load_options_of(c))};
  });
}

void tw_transcriber_free(tw_transcriber* transcriber) { delete transcriber; }

tw_status tw_transcribe_file(const tw_transcriber* transcriber, const char* file, const tw_transcribe_options* options,
                             tw_transcript** transcript) {
  return transcribe(transcriber, options, transcript, [&] { return speech::read_audio(std::string(&required("file", file))); });
}

tw_status tw_transcribe_samples(const tw_transcriber* transcriber, const float* samples, size_t count, const tw_transcribe_options* options,
                                tw_transcript** transcript) {
  return transcribe(transcriber, options, transcript, [&] { return given_samples(samples, count); });
}

void tw_transcript_free(tw_transcript* transcript) { delete transcript; }

const char* tw_transcript_text(const tw_transcript* transcript) { return transcript == nullptr ? "" : transcript->transcript.text.c_str(); }

size_t tw_transcript_segment_count(const tw_transcript* transcript) {
  return transcript == nullptr ? 0 : transcript->transcript.segments.size();
}

tw_status tw_transcript_segment_at(const tw_transcript* transcript, size_t index, tw_transcript_segment* segment) {
  return guard([&] {
    const auto& segments = required("transcript", transcript).transcript.segments;
    tw_transcript_segment c = known("segment", &required("segment", segment));
    if (index >= segments.size())
      throw InvalidArgument("index is " + std::to_string(index) + "; the transcript has " + std::to_string(segments.size()) + " segments");
    const speech::TranscriptSegment& from = segments[index];
    const std::size_t size = c.struct_size;
    c = {size, from.begin, from.end, from.text.c_str(), from.tokens.data(), from.tokens.size(), from.truncated, from.repetition};
    std::memcpy(segment, &c, std::min(size, sizeof c));
  });
}

tw_status tw_resample(const float* samples, size_t count, int32_t rate, float* out, size_t* out_count) {
  return guard([&] {
    std::size_t& capacity = required("out_count", out_count);
    if (count > 0) required("samples", samples);
    const std::vector<float> resampled = speech::resample({samples, count}, rate);
    if (resampled.size() > capacity)
      throw InvalidArgument("out_count is " + std::to_string(capacity) + "; there are " + std::to_string(resampled.size()) +
                            " samples at 16 kHz");
    if (!resampled.empty()) std::copy(resampled.begin(), resampled.end(), &required("out", out));
    capacity = resampled.size();
  });
}

tw_status tw_audio_read_file(const char* file, tw_audio** audio) {
  return guard([&] {
    required("file", file);
    required("audio", audio);
    *audio = new tw_audio{speech::read_audio(std::string(file))};
  });
}

tw_status tw_audio_read_bytes(const void* bytes, size_t count, const char* name, tw_audio** audio) {
  return guard([&] {
    const char* const chars = static_cast<const char*>(bytes);
    if (count > 0) required("bytes", chars);
    required("name", name);
    required("audio", audio);
    *audio = new tw_audio{speech::read_audio(std::string_view(chars, count), name)};
  });
}

const float* tw_audio_samples(const tw_audio* audio) { return audio == nullptr ? nullptr : audio->samples.data(); }
size_t tw_audio_sample_count(const tw_audio* audio) { return audio == nullptr ? 0 : audio->samples.size(); }
void tw_audio_free(tw_audio* audio) { delete audio; }

tw_status tw_engine_load(const char* model, const tw_load_options* load, const tw_engine_options* given, tw_engine** engine) {
  return guard([&] {
    required("model", model);
    required("engine", engine);
    const tw_engine_options c = known("options", given);
    speech::EngineOptions options;
    options.batch = c.batch;
    options.cache_tokens = c.cache_tokens;
    options.prefill_tokens = c.prefill_tokens;
    if (c.queue != 0) options.queue = c.queue;
    *engine = new tw_engine{speech::Engine(model, load_options_of(known("load", load)), options)};
  });
}

void tw_engine_free(tw_engine* engine) { delete engine; }

tw_status tw_engine_submit(tw_engine* engine, const float* samples, size_t count, const tw_transcribe_options* given, uint64_t client,
                           tw_on_done on_done, void* user, uint64_t* id) {
  return speech_guard([&] {
    required("engine", engine);
    if (on_done == nullptr) throw InvalidArgument("on_done is null");
    const tw_transcribe_options c = known("options", given);
    if (c.batch != 0) throw InvalidArgument("options.batch is " + std::to_string(c.batch) + "; an engine has tw_engine_options.batch");
    const std::span<const float> audio = given_samples(samples, count);
    speech::Request request;
    request.samples.assign(audio.begin(), audio.end());
    request.options = options_of(c);
    request.client = client;
    if (c.on_text != nullptr) {
      std::stop_source stop;
      request.options.cancel = stop.get_token();
      request.options.on_text = [c, stop](std::size_t, std::string_view text) mutable {
        if (c.on_text(c.user, text.data(), text.size()) != 0) stop.request_stop();
      };
    }
    request.on_done = [on_done, user](speech::Completion done) {
      tw_completion result = {};
      result.struct_size = sizeof result;
      result.status = speech_guard([&] {
        if (done.error) std::rethrow_exception(done.error);
        result.transcript = new tw_transcript{std::move(done.transcript)};
      });
      const std::string error = result.status == TW_OK ? "" : tw_last_error();  // a copy: the callback may call this library
      result.error = error.c_str();
      result.waiting = done.times.waiting;
      result.first_text = done.times.first_text;
      result.total = done.times.total;
      on_done(user, &result);
    };
    const std::uint64_t given_id = engine->engine.submit(std::move(request));
    if (id != nullptr) *id = given_id;
  });
}

tw_status tw_engine_cancel(tw_engine* engine, uint64_t id) {
  return guard([&] { required("engine", engine).engine.cancel(id); });
}

tw_status tw_engine_step(tw_engine* engine, int32_t* more) {
  return guard([&] {
    const bool left = required("engine", engine).engine.step();
    if (more != nullptr) *more = left;
  });
}

tw_status tw_engine_run(tw_engine* engine) {
  return guard([&] { required("engine", engine).engine.run(engine->stop.get_token()); });
}

tw_status tw_engine_stop(tw_engine* engine) {
  return guard([&] { required("engine", engine).stop.request_stop(); });
}

tw_status tw_engine_read_counters(const tw_engine* engine, tw_engine_counters* counters) {
  return guard([&] {
    const speech::EngineStatus status = required("engine", engine).engine.status();
    tw_engine_counters c = known("counters", &required("counters", counters));
    const std::size_t size = c.struct_size;
    c = {size, status.waiting, status.running, status.sequences, status.cache_tokens, status.cache_tokens_used};
    std::memcpy(counters, &c, std::min(size, sizeof c));
  });
}
