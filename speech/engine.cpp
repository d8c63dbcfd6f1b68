#include "tilewave/speech_engine.hpp"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "runtime/format.hpp"
#include "speech/scheduler.hpp"

namespace tw::speech {

namespace {

constexpr std::chrono::seconds kIdle{1};  // after which memory is given back

using Clock = Job::Clock;

double between(Clock::time_point begin, Clock::time_point end) { return std::chrono::duration<double>(end - begin).count(); }

EngineOptions checked(EngineOptions options, Device device) {
  const int most = device.is_cuda() ? 256 : 16;
  if (options.batch == 0) options.batch = device.is_cuda() ? 64 : 16;
  if (options.batch < 1 || options.batch > most)
    throw InvalidArgument(tw::format("batch is {}; it must be from 1 to {}, or 0 for a size that suits the device", options.batch, most));
  if (options.cache_tokens == 0) options.cache_tokens = std::int64_t{1024} * options.batch;
  if (options.cache_tokens < 1 || options.cache_tokens > 1 << 30)
    throw InvalidArgument(tw::format("cache_tokens is {}; it must be from 1 to {}", options.cache_tokens, 1 << 30));
  if (options.prefill_tokens == 0) options.prefill_tokens = prefill_tokens(device);
  if (options.prefill_tokens < 1)
    throw InvalidArgument(
        tw::format("prefill_tokens is {}; it must be 1 or more, or 0 for a number that suits the device", options.prefill_tokens));
  return options;
}

/// Also checks the options before anything is loaded.
GlmAsr load(const std::filesystem::path& model, LoadOptions& options, const Stream& stream, const EngineOptions& engine) {
  checked(engine, options.device);
  return GlmAsr::load(model, options, stream);
}

}  // namespace

struct Engine::State {
  /// A request on its way to the scheduler.
  struct Submitted {
    Id id;
    std::unique_ptr<Job> job;
  };

  State(const std::filesystem::path& directory, const LoadOptions& given, const EngineOptions& engine)
      : load_options(given),
        stream(given.device),
        model(load(directory, load_options, stream, engine)),
        options(checked(engine, given.device)),
        pool(model.decoder.make_pool(options.cache_tokens, stream)),
        scheduler(model, load_options, stream, pool,
                  {.batch = options.batch,
                   .windows = encoder_windows(given.device),
                   .prefill_tokens = options.prefill_tokens,
                   .prompts_together = given.device.is_cuda(),
                   .on_stage = options.on_stage}) {
    status.cache_tokens = std::int64_t{pool->pages()} * models::KvPool::kPageTokens;
  }

  LoadOptions load_options;
  Stream stream;
  GlmAsr model;
  EngineOptions options;
  std::shared_ptr<models::KvPool> pool;
  Scheduler scheduler;
  std::map<Id, Job*> jobs;  ///< in the scheduler; used by step() alone

  mutable std::mutex mutex;  ///< of what follows
  std::condition_variable_any changed;
  Id next_id = 1;
  std::vector<Submitted> inbox;
  std::set<Id> cancelled;
  EngineStatus status;  ///< after the last step; waiting without the inbox
};

Engine::Engine(const std::filesystem::path& model, const LoadOptions& load, const EngineOptions& options)
    : state_(std::make_unique<State>(model, load, options)) {}

Engine::~Engine() {
  const auto ended = [] { return std::make_exception_ptr(Cancelled("engine: the engine was destroyed")); };
  while (!state_->jobs.empty()) state_->scheduler.end(state_->jobs.begin()->second, ended());
  for (State::Submitted& submitted : std::exchange(state_->inbox, {})) submitted.job->on_done(*submitted.job, ended());
}

Engine::Id Engine::submit(Request request) {
  State& state = *state_;
  const auto refuse_if_full = [&] {
    if (const std::size_t waiting = state.status.waiting + state.inbox.size(); waiting >= state.options.queue)
      throw QueueFull(tw::format("engine: {} requests wait already", waiting));
  };
  {
    const std::lock_guard lock(state.mutex);
    refuse_if_full();
  }
  const Clock::time_point submitted = Clock::now();
  const auto samples = std::make_shared<const std::vector<float>>(std::move(request.samples));
  const std::span<const float> recordings[] = {*samples};
  std::unique_ptr<Job> job = Job::prepare(state.model, recordings, request.options);
  state.scheduler.require_room(*job);
  job->client = request.client;

  const std::lock_guard lock(state.mutex);
  refuse_if_full();
  const Id id = state.next_id++;
  job->on_done = [&state, id, samples, submitted, on_done = std::move(request.on_done)](Job& ended, std::exception_ptr error) {
    state.jobs.erase(id);
    const auto after = [&](Clock::time_point time) { return time == Clock::time_point{} ? 0 : between(submitted, time); };
    const double total = between(submitted, Clock::now());
    const RequestTimes times{
        .waiting = ended.selected > 0 ? after(ended.begun) : total, .first_text = after(ended.first_text), .total = total};
    if (on_done) on_done({std::move(ended.files.front()), std::move(error), times});
  };
  state.inbox.push_back({id, std::move(job)});
  state.changed.notify_all();
  return id;
}

void Engine::cancel(Id id) {
  const std::lock_guard lock(state_->mutex);
  if (id == 0 || id >= state_->next_id) return;
  state_->cancelled.insert(id);
  state_->changed.notify_all();
}

bool Engine::step() {
  State& state = *state_;
  std::vector<State::Submitted> submitted;
  std::set<Id> cancelled;
  {
    const std::lock_guard lock(state.mutex);
    submitted = std::exchange(state.inbox, {});
    cancelled = std::exchange(state.cancelled, {});
    state.status.waiting += submitted.size();  // until the step is done
  }
  for (State::Submitted& each : submitted) state.jobs[each.id] = state.scheduler.add(std::move(each.job));
  for (const Id id : cancelled)
    if (const auto found = state.jobs.find(id); found != state.jobs.end())
      state.scheduler.end(found->second, std::make_exception_ptr(Cancelled("engine: the request was cancelled")));
  bool more = false;
  {
    const ScopedF32Products products(state.load_options.f32_products);
    more = state.scheduler.step();
  }
  const std::lock_guard lock(state.mutex);
  state.status.waiting = state.scheduler.waiting();
  state.status.running = state.scheduler.jobs() - state.status.waiting;
  state.status.sequences = state.scheduler.sequences();
  state.status.cache_tokens_used = std::int64_t{state.pool->pages() - state.pool->free_pages()} * models::KvPool::kPageTokens;
  return more || !state.inbox.empty();
}

void Engine::run(std::stop_token stop) {
  while (!stop.stop_requested()) {
    if (step()) continue;
    const auto has_work = [&] { return !state_->inbox.empty(); };
    std::unique_lock lock(state_->mutex);
    if (state_->changed.wait_for(lock, stop, kIdle, has_work) || stop.stop_requested()) continue;
    lock.unlock();
    release_host_memory();
    lock.lock();
    state_->changed.wait(lock, stop, has_work);
  }
}

EngineStatus Engine::status() const {
  const std::lock_guard lock(state_->mutex);
  EngineStatus status = state_->status;
  status.waiting += state_->inbox.size();
  return status;
}

const LoadOptions& Engine::options() const { return state_->load_options; }
ModelSize Engine::size() const { return state_->model.size(); }

}  // namespace tw::speech
