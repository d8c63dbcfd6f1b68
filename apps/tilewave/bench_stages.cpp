// tilewave bench transcribe --stages: the stages of the model at set sizes, as records of benchmarks/results.

#include "apps/tilewave/bench_stages.hpp"

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>

#include "apps/tilewave/output.hpp"
#include "benchmarks/harness.hpp"
#include "runtime/format.hpp"
#include "speech/glm_asr/model.hpp"
#include "tilewave/error.hpp"

namespace tw::cli {
namespace {

using Clock = std::chrono::steady_clock;
using models::KvCache;

// A window of 30 s makes a prompt of 421 tokens; 200 follow.
constexpr int kContext = 421, kNewTokens = 200, kLongContext = 4000;
constexpr int kMostWarmUp = 3;
/// A row whose samples take longer has fewer of them.
constexpr double kMostSeconds = 120;

/// The model's stages, as the rows below call them.
class Stages {
 public:
  Stages(const std::string& directory, speech::LoadOptions& options)
      : stream_(options.device), model_(speech::GlmAsr::load(directory, options, stream_)) {}

  int most_tokens() const { return model_.decoder.config().max_positions; }

  /// Some speech-like samples of `windows` windows.
  std::vector<float> samples(int windows) const {
    std::vector<float> noise(static_cast<std::size_t>(model_.mel.window_samples() * windows));
    std::uint32_t state = 12345;
    for (float& sample : noise) {
      state = 1664525 * state + 1013904223;
      sample = (static_cast<float>(state >> 8) / (1 << 24) - 0.5f) / 4;
    }
    return noise;
  }

  std::function<void()> mel() const {
    return [this, window = samples(1)] { model_.mel.extract(window); };
  }

  std::function<void()> encoder(int windows) const {
    Tensor features = model_.mel.extract(samples(windows)).features;
    if (stream_.device().is_cuda()) features = features.to(stream_.device());
    return [this, features] {
      model_.encoder.encode(features, stream_);
      stream_.synchronize();
    };
  }

  std::function<void()> prefill(int tokens) const {
    const auto sequence = std::make_shared<KvCache>(model_.decoder.make_cache(tokens, stream_));
    return [this, sequence, embeddings = prompt(tokens)] {
      sequence->length = 0;
      model_.decoder.prefill(embeddings, *sequence, stream_);
      stream_.synchronize();
    };
  }

  /// `steps` decoding steps of `batch` sequences whose contexts begin at `context`, after each call further on; after `room` tokens they
  /// begin again.
  std::function<void()> decode(int batch, int context, int room, int steps) const {
    struct Batch {
      std::vector<KvCache> sequences;
      models::DecodeGraphs graphs;  // of the sequences' pool
      std::vector<KvCache*> pointers = {};
      std::vector<int> ids = {};
    };
    std::vector<KvCache> caches = model_.decoder.make_caches(batch, context + room, stream_);
    const models::DecodeGraphs graphs(caches.front().pool());
    const auto all = std::make_shared<Batch>(Batch{std::move(caches), graphs});
    const Tensor embeddings = prompt(context);
    for (KvCache& sequence : all->sequences) {
      model_.decoder.prefill(embeddings, sequence, stream_);
      all->ids.push_back(static_cast<int>(all->ids.size()));
      all->pointers.push_back(&sequence);
    }
    stream_.synchronize();
    return [this, all, context, room, steps] {
      for (int step = 0; step < steps; ++step) {
        if (all->sequences[0].length == context + room)
          for (KvCache& sequence : all->sequences) sequence.length = context;
        model_.decoder.decode(all->ids, all->pointers, stream_, stream_.device().is_cuda() ? &all->graphs : nullptr);
      }
      stream_.synchronize();
    };
  }

 private:
  Tensor prompt(int tokens) const {
    std::vector<int> ids(static_cast<std::size_t>(tokens));
    for (int i = 0; i < tokens; ++i) ids[static_cast<std::size_t>(i)] = i % model_.config.decoder.vocabulary;
    return model_.decoder.embed(ids, stream_);
  }

  Stream stream_;
  speech::GlmAsr model_;
};

/// The milliseconds that `work` takes for one of the `count` units of a call.
bench::Timing time(const std::function<void()>& work, int samples, int count) {
  const auto seconds = [&] {
    const auto begin = Clock::now();
    work();
    return std::chrono::duration<double>(Clock::now() - begin).count();
  };
  work();  // may compile kernels
  double one = seconds();
  const int warm_up = std::min(kMostWarmUp, samples);
  for (int i = 1; i < warm_up && one * (samples + warm_up) < kMostSeconds; ++i) one = seconds();
  std::vector<double> times;
  double sum = 0;
  while (static_cast<int>(times.size()) < samples && (times.empty() || sum + one < kMostSeconds)) {
    times.push_back(seconds());
    sum += times.back();
  }
  for (double& each : times) each *= 1e3 / count;
  std::sort(times.begin(), times.end());
  const auto at = [&](double fraction) { return times[static_cast<std::size_t>(fraction * static_cast<double>(times.size() - 1) + 0.5)]; };
  const double median = times.size() % 2 == 1 ? at(0.5) : (times[times.size() / 2 - 1] + times[times.size() / 2]) / 2;
  return {median, at(0.1), at(0.9)};
}

class Rows {
 public:
  Rows(const StageBenchArguments& a, bench::Run& run, DType dtype) : a_(a), run_(run), dtype_(dtype) {
    if (a.model.weights != "plain") suffix_ = tw::format(", weights {}", a.model.weights);
  }

  /// `make` prepares the work; a call of it does `count` units. `limit_us`: the time that a unit takes at least. A row that does not fit
  /// the device is recorded as such.
  void add(const std::string& name, const std::function<std::function<void()>()>& make, double limit_us = 0, const char* bound = "",
           int count = 1, bench::Mode mode = bench::Mode::hot) {
    bench::Record record;
    record.family = "speech";
    record.case_name = name + suffix_;
    record.dtype = dtype_;
    record.mode = mode;
    record.unit = bench::kMicroseconds;
    record.limit = limit_us;
    record.bound = limit_us > 0 ? bound : "";
    try {
      record.ours = time(make(), a_.samples, count);
    } catch (const OutOfMemory& error) {
      record.config = tw::format("does not fit: {}", error.what());
    }
    run_.add(record);
  }

  void does_not_fit(const std::string& name, const std::string& why) {
    add(name, [&]() -> std::function<void()> { throw OutOfMemory(why); });
  }

 private:
  const StageBenchArguments& a_;
  bench::Run& run_;
  DType dtype_;
  std::string suffix_;  ///< of the cases' names
};

}  // namespace

int bench_stages(const StageBenchArguments& a) {
  std::optional<Output> output;
  if (!a.output.empty()) output.emplace(a.output);
  speech::LoadOptions options = load_options(a.model);
  const std::string directory = a.model.model.empty() ? default_model() : a.model.model;
  bench::Options bench_options;
  bench_options.device = options.device;
  bench_options.commit = a.commit;
  bench_options.table = a.json ? stderr : stdout;
  bench::Run run(bench_options);

  const speech::Transcriber whole(directory, options);
  options.dtype = whole.options().dtype;
  std::string source;
  const double bandwidth = read_bandwidth(options.device), flops = peak_flops(options.device, *options.dtype, source);
  const speech::ModelSize size = whole.size();
  const double window_us = size.encoder_flops / flops * 1e6;
  const auto memory_us = [&](double bytes) { return bytes / bandwidth * 1e6; };
  const auto decode_us = [&](int batch, int context) {
    return memory_us(static_cast<double>(size.decode_bytes) + static_cast<double>(size.cache_bytes) * batch * context);
  };
  const double prefill_memory = memory_us(static_cast<double>(size.decode_bytes));
  const double prefill_flops = size.decode_flops * kContext / flops * 1e6;
  const double prefill_us = std::max(prefill_memory, prefill_flops);
  const char* prefill_bound = prefill_flops > prefill_memory ? "arithmetic" : "memory";
  Rows rows(a, run, *options.dtype);
  tw::print(bench_options.table, "{}: {}; limits: {:.1f} GB/s (a large read), {:.2f} TFLOP/s ({})\n", options.device.name(),
            device_info(options.device).name, bandwidth * 1e-9, flops * 1e-12, source);

  const Stages stages(directory, options);
  if (!options.device.is_cuda()) {
    const bench::OneThread one;
    rows.add(
        "mel-1", [&] { return stages.mel(); }, 0, "", 1, bench::Mode::one_thread);
  }
  rows.add(options.device.is_cuda() ? "mel-1" : tw::format("mel-1, {} threads", cpu_threads()), [&] { return stages.mel(); });
  for (const int windows : a.windows)
    rows.add(
        tw::format("encoder-{}", windows), [&] { return stages.encoder(windows); }, window_us * windows, "arithmetic");
  const auto fits = [&](const std::string& name, int tokens) {
    if (tokens <= stages.most_tokens()) return true;
    rows.does_not_fit(name, tw::format("{} tokens; the model's context is {}", tokens, stages.most_tokens()));
    return false;
  };
  if (const std::string name = tw::format("prefill-{}", kContext); fits(name, kContext))
    rows.add(
        name, [&] { return stages.prefill(kContext); }, prefill_us, prefill_bound);
  const int steps = std::max(1, kNewTokens / a.samples);
  const auto decode = [&](int batch, int context) {
    const std::string name = tw::format("decode-{}, {} to {} tokens", batch, context, context + kNewTokens);
    if (fits(name, context + kNewTokens))
      rows.add(
          name, [&] { return stages.decode(batch, context, kNewTokens, steps); }, decode_us(batch, context + kNewTokens / 2), "memory",
          steps);
  };
  for (const int batch : a.batches) decode(batch, kContext);
  decode(1, kLongContext);

  speech::TranscribeOptions all;
  all.segmentation = speech::Segmentation::none;
  all.max_new_tokens = kNewTokens;
  all.ignore_end = true;
  rows.add(
      tw::format("30 s and {} tokens", kNewTokens), [&] { return [&, clip = stages.samples(1)] { whole.transcribe(clip, all); }; },
      window_us + prefill_us + (kNewTokens - 1) * decode_us(1, kContext + kNewTokens / 2), "memory");
  if (output) output->write(json_text(run.json()));
  if (a.json) print_json(run.json());
  return kOk;
}

}  // namespace tw::cli
