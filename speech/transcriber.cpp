#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "models/nvtx_ranges.hpp"
#include "models/sampling.hpp"
#include "speech/audio/audio.hpp"
#include "speech/glm_asr/model.hpp"
#include "speech/repetition.hpp"
#include "speech/segment/segment.hpp"
#include "speech/text_stream.hpp"
#include "tilewave/speech.hpp"
#include "tilewave/topk.hpp"

#include "runtime/format.hpp"

namespace tw::speech {

namespace {

using Clock = std::chrono::steady_clock;
using models::KvCache;

/// Maximum number of sequences in a batch of the decoder. The same kernels (for small M) serve all batches up to this size, so the size
/// does not change results.
constexpr int kLargestBatch = 16;
/// Number of windows to encode together on a GPU. On the CPU one at a time uses the caches best.
constexpr std::int64_t kEncoderBatch = 8;

/// Adds its own lifetime to a sum.
class Stopwatch {
 public:
  explicit Stopwatch(double& seconds) : seconds_(seconds) {}
  ~Stopwatch() { seconds_ += std::chrono::duration<double>(Clock::now() - begin_).count(); }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  double& seconds_;
  Clock::time_point begin_ = Clock::now();
};

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

/// A piece of audio that becomes one prompt.
struct Item {
  std::size_t file;
  std::size_t segment;  ///< in the file's transcript
  std::span<const float> samples;
};

/// An item while its text is produced.
struct Running {
  const Item* item;
  TranscriptSegment* result;
  KvCache cache;
  models::StreamDecoder decoder;
  std::string pending;  ///< text that is passed on after the items before it
  int next = 0;         ///< the token that was sampled last
  bool done = false;
};

bool is_finite(const Tensor& tensor) {
  const Tensor host = tensor.to(Device::cpu()).to(DType::f32);
  return std::all_of(host.data<float>(), host.data<float>() + host.numel(), [](float x) { return std::isfinite(x); });
}

void check(const TranscribeOptions& options) {
  if (options.max_new_tokens < 1 || options.max_new_tokens > 1 << 20)
    throw InvalidArgument(tw::format("max_new_tokens is {}; it must be from 1 to {}", options.max_new_tokens, 1 << 20));
  if (options.batch < 1 || options.batch > kLargestBatch)
    throw InvalidArgument(tw::format("batch is {}; it must be from 1 to {}", options.batch, kLargestBatch));
  models::check({options.temperature, options.top_p, options.seed});
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

  double seconds(std::int64_t samples) const { return static_cast<double>(samples) / model.config.mel.sampling_rate; }

  /// Cuts `files` into items, and writes their begins and ends to `transcripts`.
  std::vector<Item> cut(std::span<const std::span<const float>> files, Segmentation segmentation,
                        std::vector<Transcript>& transcripts) const {
    std::vector<Item> items;
    for (std::size_t file = 0; file < files.size(); ++file) {
      const std::span<const float> samples = files[file];
      const auto bad = std::find_if(samples.begin(), samples.end(), [](float x) { return !std::isfinite(x); });
      if (bad != samples.end())
        throw InvalidArgument(tw::format("samples of file {}: {} at {:.3f} s", file, *bad, seconds(bad - samples.begin())));
      transcripts[file].duration = seconds(std::ssize(samples));
      std::vector<Segment> segments;
      if (segmentation == Segmentation::automatic)
        segments = cut_at_silences(samples, {.longest_seconds = model.config.segment_seconds});
      else if (!samples.empty())
        segments = {{0, std::ssize(samples)}};
      // A recording that fits one window is passed whole, as in the reference implementation: silence around speech affects the model.
      const bool whole = segments.size() == 1 && std::ssize(samples) <= model.mel.window_samples();
      for (const Segment& segment : segments) {
        const auto part = samples.subspan(static_cast<std::size_t>(segment.begin), static_cast<std::size_t>(segment.end - segment.begin));
        items.push_back({file, transcripts[file].segments.size(), whole ? samples : part});
        TranscriptSegment& result = transcripts[file].segments.emplace_back();
        result.begin = seconds(segment.begin);
        result.end = seconds(segment.end);
      }
    }
    return items;
  }

  /// The audio embeddings of the windows of some items.
  std::vector<std::vector<Tensor>> encode(std::span<const Item> items, const TranscribeOptions& options, Timings& timings) const {
    std::vector<std::span<const float>> windows;
    std::vector<std::size_t> owner;
    const auto longest = static_cast<std::size_t>(model.mel.window_samples());
    for (std::size_t i = 0; i < items.size(); ++i) {
      for (std::size_t begin = 0; begin < items[i].samples.size(); begin += longest) {
        windows.push_back(items[i].samples.subspan(begin, std::min(longest, items[i].samples.size() - begin)));
        owner.push_back(i);
      }
    }
    std::vector<std::vector<Tensor>> embeddings(items.size());
    const std::size_t together = stream.device().is_cuda() ? kEncoderBatch : 1;
    for (std::size_t first = 0; first < windows.size(); first += together) {
      stop_if_cancelled(options);
      const std::size_t count = std::min(together, windows.size() - first);
      MelFeatures mel;
      {
        const Stopwatch watch(timings.features);
        const Stream host = Stream::standard(Device::cpu());
        const models::Stage stage("features", host);
        const models::Operators run(host);
        run("mel", mel.features, {},
            [&] { mel = model.mel.extract(std::span<const std::span<const float>>(windows).subspan(first, count)); });
      }
      const Stopwatch watch(timings.encoder);
      const Tensor all = model.encoder.encode(mel.features, stream);
      for (std::size_t k = 0; k < count; ++k) {
        const int real = GlmAsrConfig::embeddings(mel.real_frames[k]);
        embeddings[owner[first + k]].push_back(all.select(0, static_cast<std::int64_t>(k)).slice(0, 0, real));
      }
      stream.synchronize();
    }
    return embeddings;
  }

  static void stop_if_cancelled(const TranscribeOptions& options) {
    if (options.cancel.stop_requested()) throw Cancelled("transcribe: cancelled");
  }

  /// The next token for each row of `logits`; -1 if its largest score is not finite. Row i belongs to running[rows[i]].
  std::vector<int> draw(const Tensor& logits, std::span<const Running* const> rows, const TranscribeOptions& options) const {
    const models::Stage stage("sampling", stream);
    const models::Operators run(stream);
    std::vector<int> ids;
    if (options.temperature == 0) {
      const Tensor indices = Tensor::empty({logits.shape(0)}, DType::i32, stream);
      const Tensor largest = Tensor::empty({logits.shape(0)}, logits.dtype(), stream);
      run("argmax", largest, {.reads = {&logits, &indices}}, [&] { argmax(logits, indices, {.values = &largest, .stream = stream}); });
      stream.synchronize();
      const Tensor host = indices.to(Device::cpu()), scores = largest.to(Device::cpu());
      ids.assign(host.data<std::int32_t>(), host.data<std::int32_t>() + rows.size());
      for (std::size_t i = 0; i < rows.size(); ++i)
        if (!std::isfinite(scores.at({static_cast<std::int64_t>(i)}))) ids[i] = -1;
      return ids;
    }
    stream.synchronize();
    Tensor host;
    run("copy", host, {.reads = {&logits}}, [&] { host = logits.to(Device::cpu()).to(DType::f32); });
    const auto vocabulary = static_cast<std::size_t>(logits.shape(1));
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const std::span<const float> scores(host.data<float>() + i * vocabulary, vocabulary);
      if (!std::all_of(scores.begin(), scores.end(), [](float x) { return std::isfinite(x); })) {
        ids.push_back(-1);
        continue;
      }
      const std::uint64_t sequence = (static_cast<std::uint64_t>(rows[i]->item->file) << 32) + rows[i]->item->segment;
      ids.push_back(models::sample(scores, {options.temperature, options.top_p, options.seed}, sequence, rows[i]->result->tokens.size()));
    }
    return ids;
  }

  /// The error for numbers that are not finite after `stage`; text from them would be nonsense.
  [[noreturn]] void fail(const Running& running, const std::string& stage) const {
    throw Error(
        tw::format("transcribe: {} gave scores that are NaN or infinite, for {:.1f} to {:.1f} s of file {}: the checkpoint's weights "
                   "are damaged, or {} cannot hold what the model computes",
                   stage, running.result->begin, running.result->end, running.item->file, name_of(*options.dtype)));
  }

  /// Processes a sampled token: it ends the item or becomes its next token.
  void accept(Running& running, int id, const TranscribeOptions& options) const {
    TranscriptSegment& result = *running.result;
    const auto& ends = model.config.end_tokens;
    if (!options.ignore_end && std::find(ends.begin(), ends.end(), id) != ends.end()) {
      running.done = true;
    } else {
      result.tokens.push_back(id);
      running.next = id;
      running.pending += running.decoder.push(id);
      if (const std::size_t cycle = options.ignore_end ? 0 : repeated_cycle(result.tokens); cycle > 0) {
        running.done = result.repetition = true;
      } else if (std::ssize(result.tokens) >= options.max_new_tokens || running.cache.length >= running.cache.capacity()) {
        running.done = true;
        result.truncated = !options.ignore_end;
      }
    }
    if (running.done) running.pending += running.decoder.finish();
  }

  std::string_view prompt_text(const TranscribeOptions& options) const {
    return options.prompt.empty() ? model.config.prompt : options.prompt;
  }

  /// Throws InvalidArgument if the item's prompt leaves no room in the model's context.
  void require_room(const Item& item, const TranscribeOptions& options) const {
    const std::int64_t samples = std::ssize(item.samples), window = model.mel.window_samples(), hop = model.mel.options().hop;
    int places = 0;
    for (std::int64_t begin = 0; begin < samples; begin += window)
      places += GlmAsrConfig::embeddings((std::min(window, samples - begin) + hop - 1) / hop);
    const std::size_t length = model.prompt(prompt_text(options), places).size();
    const int context = model.decoder.config().max_positions;
    if (length >= static_cast<std::size_t>(context))
      throw InvalidArgument(
          tw::format("{:.1f} s of audio make a prompt of {} tokens; the model's context is {}. Cut at silences, longer audio fits",
                     seconds(samples), length, context));
  }

  Running start(const Item& item, std::span<const Tensor> audio, Transcript& transcript, const TranscribeOptions& options,
                Timings& timings) const {
    int places = 0;
    for (const Tensor& window : audio) places += static_cast<int>(window.shape(0));
    const std::vector<int> prompt = model.prompt(prompt_text(options), places);
    const int context = model.decoder.config().max_positions, length = static_cast<int>(prompt.size());
    Running running{&item,
                    &transcript.segments[item.segment],
                    model.decoder.make_cache(std::min(context, length + options.max_new_tokens), stream),
                    models::StreamDecoder(model.tokenizer, {.skip_special_tokens = true}),
                    {}};
    const Tensor logits = model.decoder.prefill(model.embed(prompt, audio, stream), running.cache, stream);
    timings.prompt_tokens += length;
    const Running* const rows[] = {&running};
    const int id = draw(logits, rows, options)[0];
    if (id < 0) {
      const bool heard = std::all_of(audio.begin(), audio.end(), [](const Tensor& window) { return is_finite(window); });
      fail(running, heard ? "the prefill" : "the encoder");
    }
    accept(running, id, options);
    return running;
  }
};

Transcriber::Transcriber(const std::filesystem::path& directory, const LoadOptions& options)
    : state_(std::make_unique<State>(directory, options)) {}
Transcriber::~Transcriber() = default;
Transcriber::Transcriber(Transcriber&&) noexcept = default;
Transcriber& Transcriber::operator=(Transcriber&&) noexcept = default;

const LoadOptions& Transcriber::options() const { return state_->options; }

ModelSize Transcriber::size() const {
  const GlmAsr& model = state_->model;
  const auto each = static_cast<std::int64_t>(size_of(*state_->options.dtype));
  const models::LlamaConfig& d = model.decoder.config();
  const std::int64_t kv = std::int64_t{d.kv_heads} * d.head_dim, decode = model.decoder.bytes_per_step();
  const std::int64_t embedding = model.decoder.tied() ? 0 : each * d.vocabulary * d.hidden;
  const EncoderSize encoder = model.encoder.size();
  return {decode + embedding + encoder.weight_bytes, decode, each * 2 * kv * d.layers, encoder.flops};
}

Transcript Transcriber::transcribe(std::span<const float> samples, const TranscribeOptions& options) const {
  const std::span<const float> files[] = {samples};
  return std::move(transcribe(files, options).files.front());
}

Transcripts Transcriber::transcribe(std::span<const std::span<const float>> files, const TranscribeOptions& options) const {
  check(options);
  const State& state = *state_;
  const OneAtATime lock(state_->mutex, state_->holder);
  const WithNvtx ranges;
  const ScopedF32Products products(state.options.f32_products);
  Transcripts result;
  result.files.resize(files.size());
  std::vector<Item> items;
  {
    const Stopwatch watch(result.timings.features);
    items = state.cut(files, options.segmentation, result.files);
  }
  for (const Item& item : items) state.require_room(item, options);
  std::vector<TextStream> streams(files.size());
  // Progress counts seconds of the recordings, including silence.
  std::vector<double> begins;
  double all = 0;
  for (const Transcript& file : result.files) begins.push_back(std::exchange(all, all + file.duration));
  const auto done_after = [&](const Item& item) {
    const Item* next = &item + 1;
    if (next == items.data() + items.size()) return all;
    return begins[next->file] + (next->file == item.file ? result.files[item.file].segments[item.segment].end : 0);
  };

  for (std::size_t first = 0; first < items.size(); first += static_cast<std::size_t>(options.batch)) {
    const std::span<const Item> group =
        std::span(items).subspan(first, std::min(items.size() - first, static_cast<std::size_t>(options.batch)));
    const std::vector<std::vector<Tensor>> audio = state.encode(group, options, result.timings);
    std::vector<Running> running;
    running.reserve(group.size());
    std::size_t front = 0;  // the first whose text is not complete
    // Passes on the text of the first incomplete segment, and of later ones that have been completed in the meantime.
    const auto emit = [&] {
      while (front < running.size()) {
        Running& r = running[front];
        Transcript& transcript = result.files[r.item->file];
        const std::string added = streams[r.item->file].push(std::exchange(r.pending, {}));
        transcript.text += added;
        if (options.on_text && !added.empty()) options.on_text(r.item->file, added);
        if (!r.done) return;
        streams[r.item->file].end_segment();
        transcript.truncated = transcript.truncated || r.result->truncated;
        if (options.on_progress) options.on_progress(done_after(*r.item), all);
        ++front;
      }
    };
    {
      const Stopwatch watch(result.timings.prefill);
      for (std::size_t i = 0; i < group.size(); ++i) {
        State::stop_if_cancelled(options);
        running.push_back(state.start(group[i], audio[i], result.files[group[i].file], options, result.timings));
        emit();
      }
    }
    const Stopwatch watch(result.timings.decode);
    while (front < running.size()) {
      State::stop_if_cancelled(options);
      std::vector<Running*> active;
      std::vector<int> ids;
      std::vector<KvCache*> caches;
      for (Running& r : running) {
        if (r.done) continue;
        active.push_back(&r);
        ids.push_back(r.next);
        caches.push_back(&r.cache);
      }
      const Tensor logits = state.model.decoder.decode(ids, caches, state.stream);
      ++result.timings.decode_steps;
      const std::vector<int> drawn = state.draw(logits, {const_cast<const Running* const*>(active.data()), active.size()}, options);
      for (std::size_t i = 0; i < active.size(); ++i) {
        if (drawn[i] < 0) state.fail(*active[i], tw::format("decoding step {}", active[i]->result->tokens.size()));
        state.accept(*active[i], drawn[i], options);
      }
      emit();
    }
    for (Running& r : running) {
      TextStream text;
      r.result->text = text.push(state.model.tokenizer.decode(r.result->tokens, {.skip_special_tokens = true}));
    }
  }
  return result;
}

std::vector<float> read_audio(const std::string& file) { return load_audio(file); }
std::vector<float> read_audio_stream(int descriptor, const std::string& name) { return load_audio_stream(descriptor, name); }
std::vector<float> read_audio(std::string_view bytes, const std::string& name) { return decode_audio(bytes, name); }

}  // namespace tw::speech
