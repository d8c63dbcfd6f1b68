#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <numeric>
#include <optional>
#include <thread>
#include <utility>

#include "models/nvtx_ranges.hpp"
#include "speech/audio/audio.hpp"
#include "speech/glm_asr/model.hpp"
#include "speech/scheduler.hpp"
#include "tilewave/speech.hpp"

#include "runtime/format.hpp"

namespace tw::speech {

namespace {

/// Maximum number of sequences in a batch of the decoder. The same kernels (for small M) serve all batches up to this size, so the size
/// does not change results.
constexpr int kLargestBatch = 16;

/// A lock that remembers its thread, because a second attempt by the same thread would deadlock.
class OneAtATime {
 public:
  OneAtATime(std::mutex& mutex, std::atomic<std::thread::id>& holder) : holder_(holder) {
    if (holder.load() == std::this_thread::get_id())
      throw Error("transcribe: called from a callback of the same Transcriber, which is at work; use another one there, or wait");
    lock_ = std::unique_lock(mutex);
    holder.store(std::this_thread::get_id());
  }
  ~OneAtATime() { holder_.store({}); }
  OneAtATime(const OneAtATime&) = delete;
  OneAtATime& operator=(const OneAtATime&) = delete;

 private:
  std::unique_lock<std::mutex> lock_;
  std::atomic<std::thread::id>& holder_;
};

/// Under a profiler that takes NVTX ranges, passes them to it.
class WithNvtx {
 public:
  WithNvtx() {
    if (const Nvtx* nvtx = find_nvtx()) observing_.emplace(&ranges_.emplace(*nvtx, models::observer()));
  }

 private:
  std::optional<models::NvtxRanges> ranges_;
  std::optional<models::Observing> observing_;
};

/// A cache for the `batch` longest segments of a job, each with its longest text.
std::shared_ptr<models::KvPool> make_pool(const GlmAsr& model, const Job& job, int batch, const Stream& stream) {
  const int context = model.decoder.config().max_positions;
  std::vector<std::int64_t> pages;
  for (const Item& item : job.items)
    pages.push_back(models::KvPool::pages_for(std::min(context, item.prompt_tokens + job.options.max_new_tokens)));
  std::sort(pages.rbegin(), pages.rend());
  if (std::ssize(pages) > batch) pages.resize(static_cast<std::size_t>(batch));
  return model.decoder.make_pool(std::reduce(pages.begin(), pages.end()) * models::KvPool::kPageTokens, stream);
}

}  // namespace

struct Transcriber::State {
  LoadOptions options;
  Stream stream;
  GlmAsr model;
  std::mutex mutex;
  std::atomic<std::thread::id> holder = {};  ///< the thread that holds the mutex

  State(const std::filesystem::path& directory, const LoadOptions& given)
      : options(given), stream(given.device), model(GlmAsr::load(directory, options, stream)) {}
};

Transcriber::Transcriber(const std::filesystem::path& directory, const LoadOptions& options)
    : state_(std::make_unique<State>(directory, options)) {}
Transcriber::~Transcriber() = default;
Transcriber::Transcriber(Transcriber&&) noexcept = default;
Transcriber& Transcriber::operator=(Transcriber&&) noexcept = default;

const LoadOptions& Transcriber::options() const { return state_->options; }
ModelSize Transcriber::size() const { return state_->model.size(); }

Transcript Transcriber::transcribe(std::span<const float> samples, const TranscribeOptions& options) const {
  const std::span<const float> files[] = {samples};
  return std::move(transcribe(files, options).files.front());
}

Transcripts Transcriber::transcribe(std::span<const std::span<const float>> files, const TranscribeOptions& options) const {
  if (options.batch < 1 || options.batch > kLargestBatch)
    throw InvalidArgument(tw::format("batch is {}; it must be from 1 to {}", options.batch, kLargestBatch));
  const State& state = *state_;
  const OneAtATime lock(state_->mutex, state_->holder);
  const WithNvtx ranges;
  const ScopedF32Products products(state.options.f32_products);
  const auto begin = std::chrono::steady_clock::now();
  std::unique_ptr<Job> job = Job::prepare(state.model, files, options);
  const double cutting = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  Transcripts result;
  std::exception_ptr error;
  job->on_done = [&](Job& ended, std::exception_ptr problem) {
    result.files = std::move(ended.files);
    error = std::move(problem);
  };
  Scheduler scheduler(state.model, state.options, state.stream, make_pool(state.model, *job, options.batch, state.stream),
                      {.batch = options.batch,
                       .windows = encoder_windows(state.stream.device()),
                       .prefill_tokens = prefill_tokens(state.stream.device()),
                       .prompts_together = state.stream.device().is_cuda()});
  scheduler.add(std::move(job));
  while (scheduler.step()) {
  }
  if (error) std::rethrow_exception(error);
  result.timings = scheduler.timings();
  result.timings.features += cutting;
  return result;
}

std::vector<float> read_audio(const std::string& file) { return load_audio(file); }
std::vector<float> read_audio_stream(int descriptor, const std::string& name) { return load_audio_stream(descriptor, name); }
std::vector<float> read_audio(std::string_view bytes, const std::string& name) { return decode_audio(bytes, name); }

}  // namespace tw::speech
