#include "speech/scheduler.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "models/observe.hpp"
#include "models/sampling.hpp"
#include "runtime/format.hpp"
#include "speech/repetition.hpp"
#include "speech/segment/segment.hpp"
#include "tilewave/topk.hpp"

namespace tw::speech {

using models::KvCache;
using models::KvPool;

namespace {

using Clock = Job::Clock;

double since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

double seconds(const GlmAsr& model, std::int64_t samples) { return static_cast<double>(samples) / model.config.mel.sampling_rate; }

std::string_view prompt_text(const GlmAsr& model, const TranscribeOptions& options) {
  return options.prompt.empty() ? model.config.prompt : options.prompt;
}

/// The tokens that stand for that many samples.
int audio_tokens(const GlmAsr& model, std::int64_t samples) {
  const std::int64_t window = model.mel.window_samples(), hop = model.mel.options().hop;
  int tokens = 0;
  for (std::int64_t begin = 0; begin < samples; begin += window)
    tokens += GlmAsrConfig::embeddings((std::min(window, samples - begin) + hop - 1) / hop);
  return tokens;
}

void check(const TranscribeOptions& options) {
  if (options.max_new_tokens < 1 || options.max_new_tokens > 1 << 20)
    throw InvalidArgument(tw::format("max_new_tokens is {}; it must be from 1 to {}", options.max_new_tokens, 1 << 20));
  models::check({options.temperature, options.top_p, options.seed});
}

bool is_finite(const Tensor& tensor) {
  const Tensor host = tensor.to(Device::cpu()).to(DType::f32);
  return std::all_of(host.data<float>(), host.data<float>() + host.numel(), [](float x) { return std::isfinite(x); });
}

/// ln softmax(scores)[id]
float log_probability(std::span<const float> scores, int id) {
  const double largest = *std::max_element(scores.begin(), scores.end());
  double sum = 0;
  for (const float x : scores) sum += std::exp(x - largest);
  return static_cast<float>(scores[static_cast<std::size_t>(id)] - largest - std::log(sum));
}

}  // namespace

/// An item while its text is produced.
struct Scheduler::Sequence {
  Job* job;
  std::size_t index;  ///< of the item
  int most_tokens;    ///< in the cache, at the end
  KvCache cache;
  models::StreamDecoder decoder;
  std::vector<Tensor> audio = {};  ///< the windows' embeddings
  std::int64_t encoded = 0;        ///< samples whose windows are in it
  Tensor prompt = {};              ///< embeddings of the whole prompt
  int next = 0;                    ///< the token that was sampled last
  bool done = false;

  const Item& item() const { return job->items[index]; }
  TranscriptSegment& result() const { return job->files[item().file].segments[item().segment]; }
  /// Pages that it may still need.
  int pages_left() const { return KvPool::pages_for(most_tokens) - static_cast<int>(cache.pages().size()); }
};

std::unique_ptr<Job> Job::prepare(const GlmAsr& model, std::span<const std::span<const float>> recordings,
                                  const TranscribeOptions& options) {
  check(options);
  auto job = std::make_unique<Job>();
  job->options = options;
  const int words = static_cast<int>(model.prompt(prompt_text(model, options), 0).size());  // the prompt without audio
  job->files.resize(recordings.size());
  job->streams_.resize(recordings.size());
  const int context = model.decoder.config().max_positions;
  for (std::size_t file = 0; file < recordings.size(); ++file) {
    const std::span<const float> samples = recordings[file];
    const auto bad = std::find_if(samples.begin(), samples.end(), [](float x) { return !std::isfinite(x); });
    if (bad != samples.end())
      throw InvalidArgument(tw::format("samples of file {}: {} at {:.3f} s", file, *bad, seconds(model, bad - samples.begin())));
    Transcript& transcript = job->files[file];
    transcript.duration = seconds(model, std::ssize(samples));
    job->begins_.push_back(std::exchange(job->seconds_, job->seconds_ + transcript.duration));
    const std::vector<Segment> segments = segments_of(samples, options.segmentation, model.config.segment_seconds);
    // A recording that fits one window is passed whole, as in the reference implementation: silence around speech affects the model.
    const bool whole = segments.size() == 1 && std::ssize(samples) <= model.mel.window_samples();
    for (const Segment& segment : segments) {
      const auto part = samples.subspan(static_cast<std::size_t>(segment.begin), static_cast<std::size_t>(segment.end - segment.begin));
      Item item{file, transcript.segments.size(), whole ? samples : part, 0};
      const int heard = audio_tokens(model, std::ssize(item.samples));
      item.prompt_tokens = words + heard;
      transcript.audio_tokens += heard;
      transcript.prompt_tokens += item.prompt_tokens;
      if (item.prompt_tokens >= context)
        throw InvalidArgument(
            tw::format("{:.1f} s of audio make a prompt of {} tokens; the model's context is {}. Cut at silences, longer audio fits",
                       seconds(model, std::ssize(item.samples)), item.prompt_tokens, context));
      job->most_tokens = std::max(job->most_tokens, std::min(context, item.prompt_tokens + options.max_new_tokens));
      job->items.push_back(item);
      TranscriptSegment& result = transcript.segments.emplace_back();
      result.begin = seconds(model, segment.begin);
      result.end = seconds(model, segment.end);
    }
  }
  job->pending_.resize(job->items.size());
  job->done_.resize(job->items.size());
  return job;
}

Scheduler::Scheduler(const GlmAsr& model, const LoadOptions& loaded, const Stream& stream, std::shared_ptr<KvPool> pool,
                     const Options& options)
    : model_(model), loaded_(loaded), stream_(stream), pool_(std::move(pool)), graphs_(*pool_), options_(options) {}
Scheduler::~Scheduler() = default;

void Scheduler::require_room(const Job& job) const {
  if (KvPool::pages_for(job.most_tokens) > pool_->pages())
    throw InvalidArgument(tw::format("a segment may need {} tokens of the key-value cache, with max_new_tokens {}; it holds {}",
                                     job.most_tokens, job.options.max_new_tokens, pool_->pages() * KvPool::kPageTokens));
}

Job* Scheduler::add(std::unique_ptr<Job> job) {
  // A client that comes later begins with the smallest share, not with none.
  double smallest = 0;
  for (auto share = shares_.begin(); share != shares_.end(); ++share)
    smallest = share == shares_.begin() ? share->second : std::min(smallest, share->second);
  shares_.try_emplace(job->client, smallest);
  return jobs_.emplace_back(std::move(job)).get();
}

void Scheduler::end(Job* job, std::exception_ptr error) {
  for (Sequences* sequences : {&encoding_, &ready_, &running_})
    std::erase_if(*sequences, [&](const auto& sequence) { return sequence->job == job; });
  const auto found = std::find_if(jobs_.begin(), jobs_.end(), [&](const auto& each) { return each.get() == job; });
  if (found == jobs_.end()) return;
  const std::unique_ptr<Job> ended = std::move(*found);
  jobs_.erase(found);
  if (std::none_of(jobs_.begin(), jobs_.end(), [&](const auto& each) { return each->client == ended->client; }))
    shares_.erase(ended->client);
  if (ended->on_done) ended->on_done(*ended, std::move(error));
}

void Scheduler::end_all(std::span<Sequence* const> sequences, std::exception_ptr error) {
  std::vector<Job*> ended;
  for (const Sequence* sequence : sequences)
    if (std::find(ended.begin(), ended.end(), sequence->job) == ended.end()) ended.push_back(sequence->job);
  for (Job* job : ended) end(job, error);
}

std::size_t Scheduler::waiting() const {
  return static_cast<std::size_t>(std::count_if(jobs_.begin(), jobs_.end(), [](const auto& job) { return job->selected == 0; }));
}

bool Scheduler::step() {
  stop_cancelled();
  select();
  encode();
  prefill();
  decode();
  return !jobs_.empty();
}

void Scheduler::stop_cancelled() {
  std::vector<Job*> cancelled, empty;
  for (const auto& job : jobs_) {
    if (job->options.cancel.stop_requested())
      cancelled.push_back(job.get());
    else if (job->items.empty())
      empty.push_back(job.get());
  }
  for (Job* job : cancelled) end(job, std::make_exception_ptr(Cancelled("transcribe: cancelled")));
  for (Job* job : empty) end(job, nullptr);
}

/// The oldest job with items left of the client that got least.
Job* Scheduler::next_job() {
  Job* best = nullptr;
  for (const auto& job : jobs_) {
    if (job->selected == job->items.size()) continue;
    if (best == nullptr || shares_.at(job->client) < shares_.at(best->client)) best = job.get();
  }
  return best;
}

/// Selects items while there is room for them in the batch, and so many more that none of its places stays empty.
void Scheduler::select() {
  const auto ahead = [&] { return static_cast<int>(encoding_.size() + ready_.size()); };
  while (ahead() < options_.windows && ahead() + static_cast<int>(running_.size()) < options_.batch + options_.windows) {
    Job* const job = next_job();
    if (job == nullptr) return;
    const std::size_t index = job->selected++;
    if (index == 0) job->begun = Clock::now();
    const Item& item = job->items[index];
    shares_.at(job->client) += seconds(model_, std::ssize(item.samples));
    const int most = std::min(model_.decoder.config().max_positions, item.prompt_tokens + job->options.max_new_tokens);
    encoding_.push_back(std::make_unique<Sequence>(
        Sequence{job, index, most, KvCache(pool_), models::StreamDecoder(model_.tokenizer, {.skip_special_tokens = true})}));
  }
}

void Scheduler::note(EngineStage stage, double& sum, Clock::time_point begin, int count) {
  const double spent = since(begin);
  sum += spent;
  if (options_.on_stage) options_.on_stage(stage, spent, count);
}

/// Encodes the next windows, those of the sequence that was selected first before the others'.
void Scheduler::encode() {
  if (encoding_.empty()) return;
  const auto longest = static_cast<std::int64_t>(model_.mel.window_samples());
  std::vector<std::span<const float>> windows;
  std::vector<Sequence*> owners;
  for (const auto& sequence : encoding_) {
    const std::span<const float> samples = sequence->item().samples;
    for (std::int64_t begin = sequence->encoded; begin < std::ssize(samples) && std::ssize(windows) < options_.windows; begin += longest) {
      windows.push_back(
          samples.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(std::min(longest, std::ssize(samples) - begin))));
      owners.push_back(sequence.get());
    }
  }
  try {
    const int count = static_cast<int>(windows.size());
    MelFeatures mel;
    const Clock::time_point begin = Clock::now();
    {
      const models::Stage stage("features", model_.mel.stream());
      const models::Operators run(model_.mel.stream());
      run("mel", mel.features, {}, [&] { mel = model_.mel.extract(windows); });
    }
    note(EngineStage::features, timings_.features, begin, count);
    const Clock::time_point encoder_begin = Clock::now();
    const Tensor all = model_.encoder.encode(mel.features, stream_);
    for (std::size_t k = 0; k < windows.size(); ++k) {
      const int real = GlmAsrConfig::embeddings(mel.real_frames[k]);
      owners[k]->audio.push_back(all.select(0, static_cast<std::int64_t>(k)).slice(0, 0, real));
      owners[k]->encoded += std::ssize(windows[k]);
    }
    stream_.synchronize();
    note(EngineStage::encoder, timings_.encoder, encoder_begin, count);
  } catch (...) {
    return end_all(owners, std::current_exception());
  }
  const auto rest = std::stable_partition(encoding_.begin(), encoding_.end(),
                                          [](const auto& sequence) { return sequence->encoded == std::ssize(sequence->item().samples); });
  std::move(encoding_.begin(), rest, std::back_inserter(ready_));
  encoding_.erase(encoding_.begin(), rest);
}

/// Whether all sequences with pages can still come to their ends, one after the other, if `growing` takes that many pages more (Dijkstra's
/// banker's algorithm). So none ever waits for pages that only it could free.
bool Scheduler::safe(const Sequence* growing, int pages) const {
  int available = pool_->free_pages() - pages;
  if (available < 0) return false;
  struct Need {
    int left, held;
  };
  std::vector<Need> needs;
  for (const Sequences* sequences : {&ready_, &running_}) {
    for (const auto& sequence : *sequences) {
      const int held = static_cast<int>(sequence->cache.pages().size()), more = sequence.get() == growing ? pages : 0;
      if (held + more > 0) needs.push_back({sequence->pages_left() - more, held + more});
    }
  }
  std::sort(needs.begin(), needs.end(), [](const Need& a, const Need& b) { return a.left < b.left; });
  for (const Need& need : needs) {
    if (need.left > available) return false;
    available += need.held;
  }
  return true;
}

/// Makes room for the next piece of a prompt, or for the next prompts that are processed together, of at most `tokens` tokens unless it is
/// one. None: until others end there is no room.
std::vector<Scheduler::Sequence*> Scheduler::next_prompts(int tokens) {
  const auto reserve = [&](Sequence& sequence, int end) {
    if (!safe(&sequence, KvPool::pages_for(end) - static_cast<int>(sequence.cache.pages().size()))) return false;
    return sequence.cache.reserve(end);
  };
  Sequence& first = *ready_.front();
  const int length = first.item().prompt_tokens;
  // Where the pieces of a long prompt end depends on nothing but the prompt.
  const int end = std::min(length, first.cache.length + options_.prefill_tokens);
  if (!reserve(first, end)) return {};
  std::vector<Sequence*> rows{&first};
  if (!options_.prompts_together || end < length || first.cache.length > 0) return rows;
  int shortest = length, longest = length;
  for (std::size_t i = 1; i < ready_.size() && running_.size() + rows.size() < static_cast<std::size_t>(options_.batch); ++i) {
    Sequence& next = *ready_[i];
    shortest = std::min(shortest, next.item().prompt_tokens);
    longest = std::max(longest, next.item().prompt_tokens);
    if (4 * shortest < 3 * longest || (static_cast<int>(rows.size()) + 1) * longest > tokens) break;
    if (!reserve(next, next.item().prompt_tokens)) break;
    rows.push_back(&next);
  }
  return rows;
}

void Scheduler::prefill() {
  int tokens = 0;
  while (!ready_.empty() && static_cast<int>(running_.size()) < options_.batch && tokens < options_.prefill_tokens) {
    const std::vector<Sequence*> rows = next_prompts(options_.prefill_tokens - tokens);
    if (rows.empty()) return;
    std::vector<int> drawn;
    try {
      const Clock::time_point begin = Clock::now();
      std::vector<Tensor> pieces;
      std::vector<KvCache*> caches;
      int added = 0;
      for (Sequence* sequence : rows) {
        if (sequence->prompt.numel() == 0) {
          int places = 0;
          for (const Tensor& window : sequence->audio) places += static_cast<int>(window.shape(0));
          const std::vector<int> prompt = model_.prompt(prompt_text(model_, sequence->job->options), places);
          sequence->prompt = model_.embed(prompt, sequence->audio, stream_);
        }
        const int end = std::min(sequence->item().prompt_tokens, sequence->cache.capacity());
        added += end - sequence->cache.length;
        pieces.push_back(sequence->prompt.slice(0, sequence->cache.length, end));
        caches.push_back(&sequence->cache);
      }
      const Tensor logits = model_.decoder.prefill(pieces, caches, stream_);
      tokens += added;
      timings_.prompt_tokens += added;
      const bool more = rows.front()->cache.length < rows.front()->item().prompt_tokens;
      if (!more) drawn = draw(logits, rows);
      note(EngineStage::prefill, timings_.prefill, begin, added);
      if (more) continue;
    } catch (...) {
      end_all(rows, std::current_exception());
      continue;
    }
    std::map<Job*, std::exception_ptr> failed;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      Sequence& sequence = *rows[i];
      if (drawn[i] < 0) {
        const bool heard =
            std::all_of(sequence.audio.begin(), sequence.audio.end(), [](const Tensor& window) { return is_finite(window); });
        failed.try_emplace(sequence.job, not_finite(sequence, heard ? "the prefill" : "the encoder"));
        continue;
      }
      sequence.audio.clear();
      sequence.prompt = {};
      accept(sequence, drawn[i]);
    }
    std::vector<Job*> touched;
    for (const Sequence* sequence : rows)
      if (std::find(touched.begin(), touched.end(), sequence->job) == touched.end()) touched.push_back(sequence->job);
    const auto rest = ready_.begin() + std::ssize(rows);
    for (auto sequence = ready_.begin(); sequence != rest; ++sequence)
      if (!(*sequence)->done) running_.push_back(std::move(*sequence));
    ready_.erase(ready_.begin(), rest);
    finish(touched, failed);
  }
}

/// Ends the jobs that failed, and passes on what the others have.
void Scheduler::finish(std::span<Job* const> jobs, const std::map<Job*, std::exception_ptr>& failed) {
  for (Job* job : jobs) {
    if (const auto found = failed.find(job); found != failed.end())
      end(job, found->second);
    else
      emit(*job);
  }
}

void Scheduler::decode() {
  std::vector<Sequence*> rows;
  std::vector<int> ids;
  std::vector<KvCache*> caches;
  for (const auto& sequence : running_) {
    const int tokens = sequence->cache.length + 1;
    const int pages = KvPool::pages_for(tokens) - static_cast<int>(sequence->cache.pages().size());
    if (pages > 0 && !safe(sequence.get(), pages)) continue;  // until others end
    sequence->cache.reserve(tokens);
    rows.push_back(sequence.get());
    ids.push_back(sequence->next);
    caches.push_back(&sequence->cache);
  }
  if (rows.empty()) return;
  std::vector<int> drawn;
  try {
    const Clock::time_point begin = Clock::now();
    drawn = draw(model_.decoder.decode(ids, caches, stream_, stream_.device().is_cuda() ? &graphs_ : nullptr), rows);
    ++timings_.decode_steps;
    note(EngineStage::decode, timings_.decode, begin, static_cast<int>(rows.size()));
  } catch (...) {
    return end_all(rows, std::current_exception());
  }
  std::vector<Job*> touched;
  std::map<Job*, std::exception_ptr> failed;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    Job* const job = rows[i]->job;
    if (drawn[i] < 0)
      failed.try_emplace(job, not_finite(*rows[i], tw::format("decoding step {}", rows[i]->result().tokens.size())));
    else
      accept(*rows[i], drawn[i]);
    if (std::find(touched.begin(), touched.end(), job) == touched.end()) touched.push_back(job);
  }
  std::erase_if(running_, [](const auto& sequence) { return sequence->done; });
  finish(touched, failed);
}

/// The next token for each row of `logits`; -1 if its largest score is not finite.
std::vector<int> Scheduler::draw(const Tensor& logits, std::span<Sequence* const> rows) {
  const models::Stage stage("sampling", stream_);
  const models::Operators run(stream_);
  // In one piece of memory, since every copy from a GPU takes a while.
  const auto count = logits.shape(0), words = count * static_cast<std::int64_t>(size_of(logits.dtype()) + 3) / 4;
  const Tensor both = Tensor::empty({count + words}, DType::i32, stream_), host = Tensor::empty(both.shape(), DType::i32);
  const auto in = [&](const Tensor& memory, std::int64_t at, DType dtype) {
    return Tensor::borrow(memory.data<std::int32_t>() + at, {count}, dtype, memory.device());
  };
  const Tensor indices = in(both, 0, DType::i32), largest = in(both, count, logits.dtype());
  run("argmax", largest, {.reads = {&logits, &indices}}, [&] { argmax(logits, indices, {.values = &largest, .stream = stream_}); });
  host.copy_from(both, stream_);
  stream_.synchronize();
  const Tensor scores = in(host, count, logits.dtype());
  std::vector<int> ids(host.data<std::int32_t>(), host.data<std::int32_t>() + rows.size());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const TranscribeOptions& options = rows[i]->job->options;
    const auto row = static_cast<std::int64_t>(i);
    if (!std::isfinite(scores.at({row}))) {
      ids[i] = -1;
      continue;
    }
    if (options.temperature == 0 && !options.logprobs) continue;
    Tensor copy;
    run("copy", copy, {.reads = {&logits}}, [&] { copy = logits.slice(0, row, row + 1).to(Device::cpu()).to(DType::f32); });
    const std::span<const float> all(copy.data<float>(), static_cast<std::size_t>(copy.numel()));
    // Scores of -infinity are no choice, but NaN hides behind any maximum.
    if (!std::all_of(all.begin(), all.end(), [](float x) { return std::isfinite(x); })) {
      ids[i] = -1;
      continue;
    }
    TranscriptSegment& result = rows[i]->result();
    if (options.temperature > 0) {
      const std::uint64_t sequence = (static_cast<std::uint64_t>(rows[i]->item().file) << 32) + rows[i]->item().segment;
      ids[i] = models::sample(all, {options.temperature, options.top_p, options.seed}, sequence, result.tokens.size());
    }
    if (options.logprobs) result.logprobs.push_back(log_probability(all, ids[i]));
  }
  return ids;
}

/// The error for numbers that are not finite after `stage`; text from them would be nonsense.
std::exception_ptr Scheduler::not_finite(const Sequence& sequence, const std::string& stage) const {
  return std::make_exception_ptr(
      Error(tw::format("transcribe: {} gave scores that are NaN or infinite, for {:.1f} to {:.1f} s of file {}: the checkpoint's weights "
                       "are damaged, or {} cannot hold what the model computes",
                       stage, sequence.result().begin, sequence.result().end, sequence.item().file, name_of(*loaded_.dtype))));
}

/// Processes a sampled token: it ends the item or becomes its next token.
void Scheduler::accept(Sequence& sequence, int id) {
  Job& job = *sequence.job;
  const TranscribeOptions& options = job.options;
  TranscriptSegment& result = sequence.result();
  std::string& pending = job.pending_[sequence.index];
  const auto& ends = model_.config.end_tokens;
  if (!options.ignore_end && std::find(ends.begin(), ends.end(), id) != ends.end()) {
    sequence.done = true;
    result.logprobs.resize(options.logprobs ? result.tokens.size() : 0);  // without the end token's
  } else {
    result.tokens.push_back(id);
    sequence.next = id;
    const std::string text = sequence.decoder.push(id);
    pending += text;
    if (options.logprobs) result.token_texts.push_back(text);
    if (job.first_text == Clock::time_point{}) job.first_text = Clock::now();
    if (const std::size_t cycle = options.ignore_end ? 0 : repeated_cycle(result.tokens); cycle > 0) {
      sequence.done = result.repetition = true;
    } else if (std::ssize(result.tokens) >= options.max_new_tokens || sequence.cache.length >= sequence.most_tokens) {
      sequence.done = true;
      result.truncated = !options.ignore_end;
    }
  }
  if (!sequence.done) return;
  const std::string rest = sequence.decoder.finish();
  pending += rest;
  if (!result.token_texts.empty()) result.token_texts.back() += rest;
  TextStream text;
  result.text = text.push(model_.tokenizer.decode(result.tokens, {.skip_special_tokens = true}));
  job.done_[sequence.index] = true;
}

/// Passes on the text of the job's first incomplete item, and of later ones that have been completed in the meantime. Ends the job after
/// the last.
void Scheduler::emit(Job& job) {
  try {
    while (job.front_ < job.items.size()) {
      const Item& item = job.items[job.front_];
      Transcript& transcript = job.files[item.file];
      TextStream& stream = job.streams_[item.file];
      const std::string added = stream.push(std::exchange(job.pending_[job.front_], {}));
      transcript.text += added;
      if (job.options.on_text && !added.empty()) job.options.on_text(item.file, added);
      if (!job.done_[job.front_]) return;
      stream.end_segment();
      transcript.truncated = transcript.truncated || transcript.segments[item.segment].truncated;
      const bool last = ++job.front_ == job.items.size();
      if (!job.options.on_progress) continue;
      const Item& next = job.items[job.front_ - (last ? 1 : 0)];
      const bool within = !last && next.file == item.file;
      job.options.on_progress(last ? job.seconds_ : job.begins_[next.file] + (within ? transcript.segments[item.segment].end : 0),
                              job.seconds_);
    }
  } catch (...) {
    return end(&job, std::current_exception());
  }
  end(&job, nullptr);
}

}  // namespace tw::speech
