#include "tilewave/speech_engine.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/dry_run.hpp"
#include "speech/glm_asr/model.hpp"
#include "speech/scheduler.hpp"
#include "tests/expect_error.hpp"
#include "tests/support.hpp"

namespace tw::speech {
namespace {

const std::string kEngineModel = std::string(TILEWAVE_SOURCE_DIR) + "/assets/digits";
const std::string kTinyModel = std::string(TILEWAVE_SOURCE_DIR) + "/tests/data/glm_asr/gqa";

/// The eight recordings of digits, of 2 to 40 s.
const std::vector<std::vector<float>>& digit_recordings() {
  static const std::vector<std::vector<float>> all = [] {
    std::vector<std::vector<float>> read;
    for (int i = 1; i <= 8; ++i)
      read.push_back(read_audio(std::string(TILEWAVE_SOURCE_DIR) + "/tests/data/digits/digits-" + std::to_string(i) + ".flac"));
    return read;
  }();
  return all;
}

/// What Transcriber makes of each recording alone.
const std::vector<Transcript>& alone(const TranscribeOptions& options = {.logprobs = true}) {
  static const std::vector<Transcript> all = [&] {
    const Transcriber transcriber(kEngineModel);
    std::vector<Transcript> transcripts;
    for (const std::vector<float>& samples : digit_recordings()) transcripts.push_back(transcriber.transcribe(samples, options));
    return transcripts;
  }();
  return all;
}

std::vector<std::vector<int>> tokens_of(const Transcript& transcript) {
  std::vector<std::vector<int>> all;
  for (const TranscriptSegment& segment : transcript.segments) all.push_back(segment.tokens);
  return all;
}

/// Requests and how they ended.
struct Ended {
  std::vector<std::optional<Completion>> completions;
  std::vector<std::size_t> order;  ///< in which they ended

  explicit Ended(std::size_t count) : completions(count) {}

  Request request(std::size_t index, const std::vector<float>& samples, TranscribeOptions options = {}, std::uint64_t client = 0) {
    return {samples, std::move(options), client, [this, index](Completion completion) {
              EXPECT_FALSE(completions[index].has_value()) << "ended twice";
              completions[index] = std::move(completion);
              order.push_back(index);
            }};
  }
  bool cancelled(std::size_t index) const {
    try {
      if (completions.at(index).value().error) std::rethrow_exception(completions[index]->error);
    } catch (const Cancelled&) {
      return true;
    }
    return false;
  }
};

void run_all(Engine& engine) {
  while (engine.step()) {
  }
}

void expect_idle(const Engine& engine) {
  const EngineStatus status = engine.status();
  EXPECT_EQ(status.waiting, 0u);
  EXPECT_EQ(status.running, 0u);
  EXPECT_EQ(status.sequences, 0u);
  EXPECT_EQ(status.cache_tokens_used, 0);
}

TEST(Engine, ManyRequestsGiveWhatEachGivesAlone) {
  for (const auto& [batch, cache_tokens] : {std::pair{16, 0}, {3, 0}, {16, 1024}}) {
    SCOPED_TRACE(batch);
    EngineStatus most;
    std::map<EngineStage, int> largest;
    Engine engine(kEngineModel, {}, {.batch = batch, .cache_tokens = cache_tokens, .on_stage = [&](EngineStage stage, double, int count) {
                                       largest[stage] = std::max(largest[stage], count);
                                     }});
    const std::size_t count = 12;
    Ended ended(count);
    std::vector<std::string> heard(count);
    std::size_t submitted = 0;
    bool more = true;
    while (more || submitted < count) {  // three join every other step
      for (int i = 0; i < 3 && submitted < count; ++i, ++submitted) {
        TranscribeOptions options{.logprobs = true};
        options.on_text = [&heard, submitted](std::size_t file, std::string_view text) {
          EXPECT_EQ(file, 0u);
          heard[submitted] += text;
        };
        engine.submit(ended.request(submitted, digit_recordings()[submitted % digit_recordings().size()], options, submitted % 3));
      }
      engine.step();
      more = engine.step();
      const EngineStatus status = engine.status();
      most.sequences = std::max(most.sequences, status.sequences);
      most.cache_tokens_used = std::max(most.cache_tokens_used, status.cache_tokens_used);
      EXPECT_LE(status.cache_tokens_used, status.cache_tokens);
      EXPECT_LE(status.sequences, static_cast<std::size_t>(batch));
    }
    EXPECT_GT(most.sequences, 1u);
    EXPECT_GE(largest[EngineStage::decode], static_cast<int>(most.sequences));
    EXPECT_LE(largest[EngineStage::decode], batch);
    EXPECT_GT(most.cache_tokens_used, 0);
    for (std::size_t i = 0; i < count; ++i) {
      SCOPED_TRACE(i);
      const Completion& completion = ended.completions[i].value();
      const Transcript& expected = alone()[i % alone().size()];
      EXPECT_EQ(completion.error, nullptr);
      EXPECT_EQ(completion.transcript.text, expected.text);
      EXPECT_EQ(heard[i], expected.text);
      EXPECT_EQ(tokens_of(completion.transcript), tokens_of(expected));
      EXPECT_EQ(completion.transcript.prompt_tokens, expected.prompt_tokens);
      for (std::size_t n = 0; n < expected.segments.size(); ++n)
        EXPECT_EQ(completion.transcript.segments[n].logprobs, expected.segments[n].logprobs);
      EXPECT_GT(completion.times.first_text, completion.times.waiting);
      EXPECT_GE(completion.times.total, completion.times.first_text);
    }
    expect_idle(engine);
  }
}

TEST(Engine, LogprobsAreOfTheTokens) {
  for (const Transcript& transcript : alone()) {
    for (const TranscriptSegment& segment : transcript.segments) {
      ASSERT_EQ(segment.logprobs.size(), segment.tokens.size());
      ASSERT_EQ(segment.token_texts.size(), segment.tokens.size());
      std::string text;
      for (const std::string& part : segment.token_texts) text += part;
      EXPECT_NE(text.find(segment.text), std::string::npos);
      // The text is right, so the model is sure of most of it.
      const double sum = std::accumulate(segment.logprobs.begin(), segment.logprobs.end(), 0.0);
      EXPECT_GT(sum / static_cast<double>(segment.tokens.size()), -0.2);
      for (const float x : segment.logprobs) EXPECT_LE(x, 0.0f);
    }
  }
}

// Against the model's scores, of random weights: no token is sure.
TEST(Engine, TheFirstLogprobIsThatOfThePrefillsScores) {
  const std::vector<float>& samples = digit_recordings()[2];
  const Stream stream = Stream::standard(Device::cpu());
  LoadOptions options;
  const GlmAsr model = GlmAsr::load(kTinyModel, options, stream);
  const std::span<const float> window[] = {samples};
  const MelFeatures mel = model.mel.extract(window);
  const Tensor audio[] = {
      model.encoder.encode(mel.features, stream).select(0, 0).slice(0, 0, GlmAsrConfig::embeddings(mel.real_frames[0]))};
  const std::vector<int> prompt = model.prompt(model.config.prompt, static_cast<int>(audio[0].shape(0)));
  models::KvCache cache = model.decoder.make_cache(static_cast<int>(prompt.size()), stream);
  const Tensor scores = model.decoder.prefill(model.embed(prompt, audio, stream), cache, stream);
  double sum = 0;
  for (std::int64_t i = 0; i < scores.shape(1); ++i) sum += std::exp(scores.at({0, i}));
  const Transcript transcript = Transcriber(kTinyModel).transcribe(samples, {.max_new_tokens = 1, .ignore_end = true, .logprobs = true});
  const TranscriptSegment& segment = transcript.segments.at(0);
  EXPECT_NEAR(segment.logprobs.at(0), scores.at({0, segment.tokens.at(0)}) - std::log(sum), 1e-5);
}

TEST(Engine, ACacheForLittleMoreThanOneSequenceIsEnough) {
  std::int64_t least = 0;
  for (const Transcript& transcript : alone()) least = std::max(least, transcript.prompt_tokens);
  least = (least + 100) / 64 * 64 + 64;
  Engine engine(kEngineModel, {}, {.cache_tokens = least});
  Ended ended(8);
  for (std::size_t i = 0; i < 8; ++i) engine.submit(ended.request(i, digit_recordings()[i], {.max_new_tokens = 100}));
  run_all(engine);
  for (std::size_t i = 0; i < 8; ++i) EXPECT_EQ(ended.completions[i].value().transcript.text, alone()[i].text);
  expect_idle(engine);
  test::expect_error<InvalidArgument>(
      [&] { engine.submit(ended.request(0, digit_recordings()[0], {.max_new_tokens = 1 << 20})); },
      {"may need", "tokens of the key-value cache, with max_new_tokens 1048576; it holds " + std::to_string(least)});
}

// As on a GPU.
TEST(Scheduler, PromptsTogetherLeaveTheTextAsItIs) {
  LoadOptions options;
  const Stream stream = Stream::standard(Device::cpu());
  const GlmAsr model = GlmAsr::load(kEngineModel, options, stream);
  int most = 0;
  Scheduler scheduler(
      model, options, stream, model.decoder.make_pool(8 * 1024, stream),
      {.batch = 7, .windows = 8, .prefill_tokens = 700, .prompts_together = true, .on_stage = [&](EngineStage stage, double, int count) {
         if (stage == EngineStage::prefill) most = std::max(most, count);
       }});
  std::vector<std::string> texts(8);
  int longest = 0;
  for (std::size_t i = 0; i < texts.size(); ++i) {
    const std::span<const float> recordings[] = {digit_recordings()[i]};
    std::unique_ptr<Job> job = Job::prepare(model, recordings, {});
    for (const Item& item : job->items) longest = std::max(longest, item.prompt_tokens);
    job->on_done = [&, i](Job& ended, std::exception_ptr error) {
      EXPECT_EQ(error, nullptr);
      texts[i] = ended.files.front().text;
    };
    scheduler.add(std::move(job));
  }
  while (scheduler.step()) {
  }
  for (std::size_t i = 0; i < texts.size(); ++i) EXPECT_EQ(texts[i], alone()[i].text) << i;
  EXPECT_GT(most, longest);
  EXPECT_LE(most, 700);
}

// Memory that another stream frees could be overwritten before kernels have read it. On a GPU with other work that gave wrong words.
TEST(Scheduler, MemoryIsAllocatedInTheOrderOfItsStream) {
  const DryRun loading(typical_gpu("sm_90a"));
  LoadOptions options;
  options.device = loading.device();
  const Stream stream(options.device);
  const GlmAsr model = GlmAsr::load(kEngineModel, options, stream);
  const DryRun running(typical_gpu("sm_90a"));
  Scheduler scheduler(model, options, stream, model.decoder.make_pool(8 * 1024, stream),
                      {.batch = 8, .windows = 8, .prefill_tokens = 4096, .prompts_together = true});
  std::size_t ended = 0;
  for (std::size_t i = 0; i < 4; ++i) {
    const std::span<const float> recordings[] = {digit_recordings()[i]};
    std::unique_ptr<Job> job = Job::prepare(model, recordings, {.max_new_tokens = 3, .ignore_end = true});
    job->on_done = [&](Job&, std::exception_ptr error) { ended += error == nullptr; };
    scheduler.add(std::move(job));
  }
  while (scheduler.step()) {
  }
  EXPECT_EQ(ended, 4u);
  EXPECT_GT(scheduler.timings().decode_steps, 0);
  EXPECT_EQ(running.allocation_streams(), std::set<void*>{stream.native()});
}

TEST(Engine, LongPromptsInPiecesLeaveTheTextAsItIs) {
  Engine engine(kEngineModel, {}, {.prefill_tokens = 48});
  std::vector<std::vector<std::vector<int>>> tokens;
  for (const bool together : {false, true}) {
    Ended ended(8);
    for (std::size_t i = 0; i < 8; ++i) {
      engine.submit(ended.request(i, digit_recordings()[i]));
      if (!together) run_all(engine);
    }
    run_all(engine);
    for (std::size_t i = 0; i < 8; ++i) {
      EXPECT_EQ(ended.completions[i].value().transcript.text, alone()[i].text);
      tokens.push_back(tokens_of(ended.completions[i]->transcript));
    }
  }
  for (std::size_t i = 0; i < 8; ++i) EXPECT_EQ(tokens[i], tokens[8 + i]);
}

TEST(Engine, CancelledRequestsMakeRoom) {
  Engine engine(kEngineModel, {}, {.batch = 2});
  Ended ended(5);
  std::vector<Engine::Id> ids;
  std::stop_source stop;
  for (std::size_t i = 0; i < 5; ++i)
    ids.push_back(engine.submit(ended.request(i, digit_recordings()[i], {.cancel = i == 3 ? stop.get_token() : std::stop_token()})));
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(engine.step());
  EXPECT_GT(engine.status().running, 0u);
  engine.cancel(ids[0]);  // decoding
  engine.cancel(ids[4]);  // waiting
  stop.request_stop();
  engine.cancel(12345);
  EXPECT_TRUE(engine.step());
  for (const std::size_t i : {0u, 3u, 4u}) EXPECT_TRUE(ended.cancelled(i)) << i;
  run_all(engine);
  for (const std::size_t i : {1u, 2u}) EXPECT_EQ(ended.completions[i].value().transcript.text, alone()[i].text);
  engine.cancel(ids[1]);  // it has ended
  EXPECT_FALSE(engine.step());
  expect_idle(engine);
}

TEST(Engine, RefusesMoreThanItsQueueHolds) {
  Engine engine(kEngineModel, {}, {.queue = 3});
  Ended ended(4);
  for (std::size_t i = 0; i < 3; ++i) engine.submit(ended.request(i, digit_recordings()[2]));
  EXPECT_EQ(engine.status().waiting, 3u);
  test::expect_error<QueueFull>([&] { engine.submit(ended.request(3, digit_recordings()[2])); }, {"3 requests wait already"});
  engine.step();  // begins the first
  EXPECT_EQ(engine.status().waiting, 2u);
  engine.submit(ended.request(3, digit_recordings()[2]));
  run_all(engine);
  EXPECT_EQ(ended.order.size(), 4u);
}

TEST(Engine, ClientsTakeTurns) {
  Engine engine(kEngineModel, {}, {.batch = 1});
  Ended ended(9);
  for (std::size_t i = 0; i < 8; ++i) engine.submit(ended.request(i, digit_recordings()[2], {}, 7));
  engine.step();
  engine.submit(ended.request(8, digit_recordings()[2], {}, 9));
  run_all(engine);
  const auto place = std::find(ended.order.begin(), ended.order.end(), 8u) - ended.order.begin();
  EXPECT_LE(place, 3);
  std::erase(ended.order, 8u);
  EXPECT_TRUE(std::is_sorted(ended.order.begin(), ended.order.end()));  // each client's in order
}

TEST(Engine, WhatACallbackMayDo) {
  Engine engine(kEngineModel);
  Ended ended(3);
  Request first = ended.request(0, digit_recordings()[2]);
  first.on_done = [&, done = first.on_done](Completion completion) {
    done(std::move(completion));
    engine.submit(ended.request(1, digit_recordings()[4]));
    EXPECT_EQ(engine.status().waiting, 1u);
  };
  engine.submit(std::move(first));
  TranscribeOptions throwing;
  throwing.on_text = [](std::size_t, std::string_view) { throw std::runtime_error("from a callback"); };
  engine.submit(ended.request(2, digit_recordings()[2], throwing));
  run_all(engine);
  EXPECT_EQ(ended.completions[0].value().transcript.text, alone()[2].text);
  EXPECT_EQ(ended.completions[1].value().transcript.text, alone()[4].text);
  test::expect_error<std::runtime_error>([&] { std::rethrow_exception(ended.completions[2].value().error); }, {"from a callback"});
  expect_idle(engine);
}

TEST(Engine, BadRequestsAreRefusedAtOnce) {
  Engine engine(kEngineModel);
  Ended ended(1);
  std::vector<float> nan(16000, 0.1f);
  nan[8000] = std::nanf("");
  test::expect_error<InvalidArgument>([&] { engine.submit(ended.request(0, nan)); }, {"nan at 0.500 s"});
  test::expect_error<InvalidArgument>([&] { engine.submit(ended.request(0, {}, {.max_new_tokens = 0})); }, {"max_new_tokens is 0"});
  test::expect_error<InvalidArgument>([&] { engine.submit(ended.request(0, {}, {.top_p = 2})); }, {"top_p is 2"});
  EXPECT_FALSE(engine.step());
  engine.submit(ended.request(0, {}));  // no audio, no text
  run_all(engine);
  EXPECT_EQ(ended.completions[0].value().error, nullptr);
  EXPECT_EQ(ended.completions[0]->transcript.text, "");
  test::expect_error<InvalidArgument>([] { Engine(kEngineModel, {}, {.batch = 17}); }, {"batch is 17; it must be from 1 to 16"});
  test::expect_error<InvalidArgument>([] { Engine(kEngineModel, {}, {.cache_tokens = -1}); }, {"cache_tokens is -1"});
  test::expect_error<InvalidArgument>([] { Engine(kEngineModel, {}, {.prefill_tokens = -1}); }, {"prefill_tokens is -1"});
}

TEST(Engine, EndsWhatHasNotEndedWhenItIsDestroyed) {
  Ended ended(3);
  {
    Engine engine(kEngineModel);
    for (std::size_t i = 0; i < 2; ++i) engine.submit(ended.request(i, digit_recordings()[i]));
    engine.step();
    engine.submit(ended.request(2, digit_recordings()[2]));
  }
  for (std::size_t i = 0; i < 3; ++i) EXPECT_TRUE(ended.cancelled(i));
}

TEST(Engine, RunsInAThreadOfItsOwn) {
  Engine engine(kEngineModel);
  std::jthread thread([&](const std::stop_token& stop) { engine.run(stop); });
  std::atomic<int> right = 0;
  std::vector<std::jthread> clients;
  for (std::size_t client = 0; client < 6; ++client) {
    clients.emplace_back([&, client] {
      for (std::size_t i = 0; i < 3; ++i) {
        std::mutex mutex;
        std::condition_variable done;
        std::optional<std::string> text;
        engine.submit({digit_recordings()[client + i % 2], {}, client, [&](Completion completion) {
                         const std::lock_guard lock(mutex);
                         text = completion.transcript.text;
                         done.notify_one();
                       }});
        std::unique_lock lock(mutex);
        done.wait(lock, [&] { return text.has_value(); });
        right += *text == alone()[client + i % 2].text;
      }
    });
  }
  clients.clear();
  EXPECT_EQ(right, 18);
  thread.request_stop();
  thread.join();
  expect_idle(engine);
}

#if !defined(__SANITIZE_ADDRESS__)  // whose quarantine grows
std::int64_t resident_pages() {
  std::ifstream file("/proc/self/statm");
  std::int64_t size = 0, resident = 0;
  file >> size >> resident;
  return resident;
}

// TILEWAVE_TEST_RECORDINGS=1000 takes half a minute.
TEST(Engine, ManyRecordingsLeaveTheMemoryAsItIs) {
  const char* const given = std::getenv("TILEWAVE_TEST_RECORDINGS");
  const int recordings = given != nullptr ? std::stoi(given) : 96;
  Engine engine(kTinyModel);
  std::size_t ended = 0;
  std::int64_t after_warmup = 0;
  for (int i = 0; i < recordings; ++i) {
    const std::vector<float>& all = digit_recordings()[2];
    const std::size_t length = 4000 + 61 * static_cast<std::size_t>(i % 100);
    engine.submit({{all.begin(), all.begin() + static_cast<std::ptrdiff_t>(length)},
                   {.max_new_tokens = 2 + i % 5, .ignore_end = true},
                   static_cast<std::uint64_t>(i % 7),
                   [&](const Completion& completion) { ended += completion.error == nullptr; }});
    if (i % 8 == 7) run_all(engine);
    if (i == 39) after_warmup = resident_pages();
  }
  EXPECT_EQ(ended, static_cast<std::size_t>(recordings));
  EXPECT_LE(resident_pages() - after_warmup, 512) << "pages of 4 KB";
  expect_idle(engine);
}
#endif

}  // namespace
}  // namespace tw::speech
