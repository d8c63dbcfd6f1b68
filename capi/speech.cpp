#include <algorithm>
#include <cstring>
#include <span>
#include <stop_token>

#include "capi/status.hpp"
#include "tilewave/speech.hpp"

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

namespace {

constexpr std::size_t kMostSamples = std::size_t{7 * 24 * 3600} * 16000;  // as of files

template <class T>
T& required(const char* argument, T* pointer) {
  if (pointer == nullptr) throw InvalidArgument(std::string(argument) + " is null");
  return *pointer;
}

tw_status transcribe(const tw_transcriber* transcriber, const tw_transcribe_options* given, tw_transcript** result, auto read) noexcept {
  bool cancelled = false;
  const tw_status status = guard([&] {
    required("transcriber", transcriber);
    required("transcript", result);
    const tw_transcribe_options c = known("options", given);
    if (c.segmentation != TW_SEGMENTATION_AUTOMATIC && c.segmentation != TW_SEGMENTATION_NONE)
      throw InvalidArgument("options.segmentation is " + std::to_string(static_cast<int>(c.segmentation)) + "; see tw_segmentation");
    speech::TranscribeOptions options;
    options.segmentation = c.segmentation == TW_SEGMENTATION_NONE ? speech::Segmentation::none : speech::Segmentation::automatic;
    if (c.prompt != nullptr) options.prompt = c.prompt;
    if (c.max_new_tokens != 0) options.max_new_tokens = c.max_new_tokens;
    if (c.batch != 0) options.batch = c.batch;
    if (c.top_p != 0) options.top_p = c.top_p;
    options.temperature = c.temperature;
    options.seed = c.seed;
    std::stop_source stop;
    options.cancel = stop.get_token();
    if (c.on_text != nullptr) {
      options.on_text = [&](std::size_t, std::string_view text) {
        if (c.on_text(c.user, text.data(), text.size()) != 0) stop.request_stop();
      };
    }
    const auto samples = read();
    try {
      *result = new tw_transcript{transcriber->transcriber.transcribe(samples, options)};
    } catch (const speech::Cancelled&) {
      cancelled = true;
      throw;
    }
  });
  return cancelled ? TW_CANCELLED : status;
}

}  // namespace

tw_status tw_transcriber_load(const char* model, const tw_load_options* given, tw_transcriber** transcriber) {
  return guard([&] {
    required("model", model);
    required("transcriber", transcriber);
    const tw_load_options c = known("options", given);
    speech::LoadOptions options;
    options.device = tw::Device::parse(c.device != nullptr ? c.device : "auto");
    if (c.dtype != nullptr && std::string_view(c.dtype) != "auto") options.dtype = tw::parse_dtype(c.dtype);
    if (c.weights != nullptr) options.weights = tw::parse_weight_layout(c.weights);
    if (c.progress != nullptr) options.progress = [&](std::int64_t done, std::int64_t all) { c.progress(c.user, done, all); };
    if (c.mmproj != nullptr) options.mmproj = c.mmproj;
    *transcriber = new tw_transcriber{speech::Transcriber(model, options)};
  });
}

void tw_transcriber_free(tw_transcriber* transcriber) { delete transcriber; }

tw_status tw_transcribe_file(const tw_transcriber* transcriber, const char* file, const tw_transcribe_options* options,
                             tw_transcript** transcript) {
  return transcribe(transcriber, options, transcript, [&] { return speech::read_audio(std::string(&required("file", file))); });
}

tw_status tw_transcribe_samples(const tw_transcriber* transcriber, const float* samples, size_t count, const tw_transcribe_options* options,
                                tw_transcript** transcript) {
  return transcribe(transcriber, options, transcript, [&] {
    if (count > kMostSamples)
      throw InvalidArgument("count is " + std::to_string(count) + "; at most " + std::to_string(kMostSamples) +
                            " samples, a week, are allowed");
    if (count > 0) required("samples", samples);
    return std::span(samples, count);
  });
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
