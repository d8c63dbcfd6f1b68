// The only file that includes prometheus-cpp.
#include "apps/serve/metrics.hpp"

#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <mutex>
#include <system_error>

namespace tw::serve {

namespace {

using prometheus::Counter;
using prometheus::Gauge;
using prometheus::Histogram;
using Buckets = Histogram::BucketBoundaries;

const Buckets kSeconds = {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500};
const Buckets kStageSeconds = {0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5};
const Buckets kBatch = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024};

struct StageSeries {
  Histogram& seconds;
  Histogram& batch;
};

/// The process's memory; 0 where /proc is not.
double resident_bytes() {
  double total = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> total >> resident;
  return resident * static_cast<double>(sysconf(_SC_PAGESIZE));
}

double open_descriptors() {
  std::error_code error;
  const std::filesystem::directory_iterator entries("/proc/self/fd", error);
  // The iteration has one open itself.
  return error ? 0 : static_cast<double>(std::distance(begin(entries), end(entries))) - 1;
}

}  // namespace

struct Metrics::State {
  prometheus::Registry registry;

  prometheus::Family<Counter>& counters(const char* name, const char* help) {
    return prometheus::BuildCounter().Name(name).Help(help).Register(registry);
  }
  prometheus::Family<Gauge>& gauges(const char* name, const char* help) {
    return prometheus::BuildGauge().Name(name).Help(help).Register(registry);
  }
  prometheus::Family<Histogram>& histograms(const char* name, const char* help) {
    return prometheus::BuildHistogram().Name(name).Help(help).Register(registry);
  }

  prometheus::Family<Counter>& requests = counters("tilewave_requests_total", "Requests answered, by route and status.");
  prometheus::Family<Histogram>& request_seconds =
      histograms("tilewave_request_seconds", "From a request's first byte to the last byte of its answer.");
  prometheus::Family<Counter>& refusals =
      counters("tilewave_refused_total", "Requests and connections refused before they were processed.");
  Gauge& connections = gauges("tilewave_connections", "Open connections, WebSockets included.").Add({});
  Gauge& websockets = gauges("tilewave_websockets", "Open WebSockets.").Add({});

  prometheus::Family<Counter>& transcriptions = counters("tilewave_transcriptions_total", "Requests of the engine that have ended.");
  Counter& completed = transcriptions.Add({{"result", "completed"}});
  Counter& cancelled = transcriptions.Add({{"result", "cancelled"}});
  Counter& failed = transcriptions.Add({{"result", "failed"}});
  Counter& audio_seconds = counters("tilewave_audio_seconds_total", "Seconds of audio transcribed.").Add({});
  Counter& tokens = counters("tilewave_tokens_total", "Tokens generated, without those that end a segment.").Add({});
  Histogram& waiting = histograms("tilewave_waiting_seconds", "From queueing a request to its first stage.").Add({}, kSeconds);
  Histogram& first_text = histograms("tilewave_first_text_seconds", "From queueing a request to its first token.").Add({}, kSeconds);
  Histogram& total = histograms("tilewave_transcription_seconds", "From queueing a request to its end.").Add({}, kSeconds);

  prometheus::Family<Histogram>& stage_seconds = histograms("tilewave_stage_seconds", "Seconds of one batch in one stage.");
  prometheus::Family<Histogram>& batch_size = histograms(
      "tilewave_batch_size", "What one batch holds: windows (features, encoder), tokens of prompts (prefill), sequences (decode).");
  StageSeries stages[4] = {series("features"), series("encoder"), series("prefill"), series("decode")};
  Histogram& audio = stage_seconds.Add({{"stage", "audio"}}, kStageSeconds);  // of one file, on a thread of the server

  std::mutex mutex;  // of the gauges below, which are set for each text
  Gauge& queue = gauges("tilewave_queue_length", "Requests that wait in the engine.").Add({});
  Gauge& running = gauges("tilewave_running", "Requests that the engine processes.").Add({});
  Gauge& sequences = gauges("tilewave_sequences", "Segments in the decoding batch.").Add({});
  Gauge& cache = gauges("tilewave_cache_tokens", "Tokens that the key-value cache can hold.").Add({});
  Gauge& cache_used = gauges("tilewave_cache_tokens_used", "Tokens in the pages of the key-value cache that are in use.").Add({});
  prometheus::Family<Gauge>& gpu = gauges("tilewave_gpu_memory_bytes", "Memory of the GPU in use, by all programs, and in total.");
  Gauge& resident = gauges("process_resident_memory_bytes", "Resident memory size in bytes.").Add({});
  Gauge& descriptors = gauges("process_open_fds", "Number of open file descriptors.").Add({});

  StageSeries series(const char* stage) {
    return {stage_seconds.Add({{"stage", stage}}, kStageSeconds), batch_size.Add({{"stage", stage}}, kBatch)};
  }
};

Metrics::Metrics() : state_(std::make_unique<State>()) {
  const double now = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  state_->gauges("process_start_time_seconds", "Start time of the process since the Unix epoch in seconds.").Add({}).Set(now);
}
Metrics::~Metrics() = default;

void Metrics::finished(const speech::Completion& completion) {
  state_->waiting.Observe(completion.times.waiting);
  state_->total.Observe(completion.times.total);
  if (completion.times.first_text > 0) state_->first_text.Observe(completion.times.first_text);
  if (completion.error) {
    try {
      std::rethrow_exception(completion.error);
    } catch (const speech::Cancelled&) {
      state_->cancelled.Increment();
    } catch (...) {
      state_->failed.Increment();
    }
    return;
  }
  state_->completed.Increment();
  state_->audio_seconds.Increment(completion.transcript.duration);
  std::size_t tokens = 0;
  for (const speech::TranscriptSegment& segment : completion.transcript.segments) tokens += segment.tokens.size();
  state_->tokens.Increment(static_cast<double>(tokens));
}

void Metrics::decoded(double seconds) { state_->audio.Observe(seconds); }

void Metrics::stage(speech::EngineStage stage, double seconds, int count) {
  const StageSeries& series = state_->stages[static_cast<int>(stage)];
  series.seconds.Observe(seconds);
  series.batch.Observe(count);
}

void Metrics::answered(std::string_view route, int status, double seconds) {
  const std::string name(route);
  state_->requests.Add({{"route", name}, {"status", std::to_string(status)}}).Increment();
  state_->request_seconds.Add({{"route", name}}, kSeconds).Observe(seconds);
}

void Metrics::refused(std::string_view reason) { state_->refusals.Add({{"reason", std::string(reason)}}).Increment(); }
void Metrics::connections(int change) { state_->connections.Increment(change); }
void Metrics::websockets(int change) { state_->websockets.Increment(change); }

std::string Metrics::text(const speech::Engine* engine) {
  const std::lock_guard lock(state_->mutex);
  if (engine != nullptr) {
    const speech::EngineStatus status = engine->status();
    state_->queue.Set(static_cast<double>(status.waiting));
    state_->running.Set(static_cast<double>(status.running));
    state_->sequences.Set(static_cast<double>(status.sequences));
    state_->cache.Set(static_cast<double>(status.cache_tokens));
    state_->cache_used.Set(static_cast<double>(status.cache_tokens_used));
    if (const Device device = engine->options().device; device.is_cuda()) {
      for (const DeviceInfo& info : find_devices().devices) {
        if (info.device != device) continue;
        state_->gpu.Add({{"kind", "used"}}).Set(static_cast<double>(info.total_memory - info.free_memory));
        state_->gpu.Add({{"kind", "total"}}).Set(static_cast<double>(info.total_memory));
      }
    }
  }
  state_->resident.Set(resident_bytes());
  state_->descriptors.Set(open_descriptors());
  return prometheus::TextSerializer().Serialize(state_->registry.Collect());
}

}  // namespace tw::serve
