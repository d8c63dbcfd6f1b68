#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "speech/audio/stream_resampler.hpp"
#include "speech/live/agreement.hpp"
#include "tests/expect_error.hpp"
#include "tests/support.hpp"
#include "tilewave/speech_live.hpp"

namespace tw::speech {
namespace {

using test::expect_error;
using Kind = LiveEvent::Kind;
using LiveSamples = std::vector<float>;

TEST(LocalAgreement, EndsAtWords) {
  const auto agreed = [](std::string_view a, std::string_view b) { return std::string(a.substr(0, agreed_length(a, b))); };
  EXPECT_EQ(agreed("", "six"), "");
  EXPECT_EQ(agreed("six", "six"), "six");
  EXPECT_EQ(agreed("six", "sixty"), "");
  EXPECT_EQ(agreed("six", "six seven"), "six");
  EXPECT_EQ(agreed("six seven", "six eight"), "six");
  EXPECT_EQ(agreed("six se", "six seven"), "six");
  EXPECT_EQ(agreed("six, seven", "six seven"), "");
  EXPECT_EQ(agreed("今天天气好", "今天天汽"), "今天天");  // the last characters have a byte in common
  EXPECT_EQ(agreed("ab今", "ab天"), "ab");
  EXPECT_EQ(agreed("café", "cafè"), "");
}

TEST(LocalAgreement, TakesNothingBack) {
  LocalAgreement agreement;
  EXPECT_EQ(agreement.add("two"), "");
  EXPECT_EQ(agreement.tentative(), "two");
  EXPECT_EQ(agreement.add("zero"), "");
  EXPECT_EQ(agreement.add("zero one"), "zero");
  EXPECT_EQ(agreement.tentative(), " one");
  EXPECT_EQ(agreement.add("zero one two"), " one");
  // A hypothesis without words that are out, twice: the text waits for one that has them.
  EXPECT_EQ(agreement.add("zero nine two four"), "");
  EXPECT_EQ(agreement.tentative(), "");
  EXPECT_EQ(agreement.add("zero nine two four"), "");
  EXPECT_EQ(agreement.add("zero"), "");
  EXPECT_EQ(agreement.add("zero one two four"), "");
  EXPECT_EQ(agreement.tentative(), " two four");
  EXPECT_EQ(agreement.add("zero one two four"), " two four");
  EXPECT_EQ(agreement.rest("zero one two four five"), " five");
  EXPECT_EQ(agreement.rest("zero nine two four five"), "");
}

TEST(StreamResampler, PiecesGiveWhatTheWholeGives) {
  auto random = test::random_engine();
  for (const int rate : {8000, 16000, 24000, 44100, 48000}) {
    StreamResampler resampler(rate);
    for (int round = 0; round < 2; ++round) {  // the second one after finish()
      LiveSamples samples(static_cast<std::size_t>(rate) + random() % 1000);
      for (std::size_t n = 0; n < samples.size(); ++n)
        samples[n] = static_cast<float>(0.5 * std::sin(0.05 * static_cast<double>(n)) + 0.3 * std::sin(0.4 * static_cast<double>(n)));
      LiveSamples pieces;
      for (std::size_t at = 0; at < samples.size();) {
        const std::size_t count = std::min<std::size_t>(random() % 3000, samples.size() - at);
        const LiveSamples piece = resampler.feed(std::span(samples).subspan(at, count));
        pieces.insert(pieces.end(), piece.begin(), piece.end());
        at += count;
        EXPECT_GE(static_cast<double>(pieces.size()) / 16000, static_cast<double>(at) / rate - 0.13) << rate;
      }
      const LiveSamples last = resampler.finish(), whole = resample(samples, rate);
      pieces.insert(pieces.end(), last.begin(), last.end());
      ASSERT_NEAR(static_cast<double>(pieces.size()), static_cast<double>(whole.size()), 1) << rate;
      for (std::size_t n = 0; n < std::min(pieces.size(), whole.size()); ++n)
        ASSERT_NEAR(pieces[n], whole[n], 1e-4) << rate << " Hz, " << n;
      EXPECT_TRUE(resampler.finish().empty());
    }
  }
  expect_error<InvalidArgument>([] { StreamResampler resampler(999); }, {"sampling_rate is 999 Hz; 1000 to 768000 are allowed"});
}

LiveSamples recording(int number) {
  return read_audio(std::string(TILEWAVE_SOURCE_DIR) + "/tests/data/digits/digits-" + std::to_string(number) + ".flac");
}

const char* const kSpoken[] = {"", "zero one two four eight three three", "six five nine four", "zero four three eight eight eight",
                               "seven"};

/// Faint noise, as of a quiet room.
LiveSamples pause(double seconds) {
  LiveSamples samples(static_cast<std::size_t>(seconds * 16000));
  std::mt19937 random(1);
  for (float& sample : samples) sample = std::uniform_real_distribution<float>(-1e-4f, 1e-4f)(random);
  return samples;
}

void operator+=(LiveSamples& samples, const LiveSamples& more) { samples.insert(samples.end(), more.begin(), more.end()); }

/// The engine runs where a test says so, which makes the order of everything the same in each run.
class LiveTranscription : public testing::Test {
 protected:
  static constexpr std::size_t kQueue = 8;

  static void SetUpTestSuite() {
    shared_engine() =
        std::make_unique<Engine>(std::string(TILEWAVE_SOURCE_DIR) + "/assets/digits", LoadOptions{}, EngineOptions{.queue = kQueue});
  }
  static void TearDownTestSuite() { shared_engine().reset(); }
  static std::unique_ptr<Engine>& shared_engine() {
    static std::unique_ptr<Engine> engine;
    return engine;
  }

  ~LiveTranscription() override {
    live.reset();
    run();
  }

  static Engine& engine() { return *shared_engine(); }
  static void run() {
    while (engine().step()) {
    }
  }
  static std::size_t in_engine() { return engine().status().waiting + engine().status().running; }

  void start(LiveOptions options) {
    options.on_request = [this](const Completion& completion) { ended.push_back(completion); };
    live = std::make_unique<LiveTranscriber>(engine(), std::move(options), [this](const LiveEvent& event) { events.push_back(event); });
  }
  static LiveOptions without_detection() {
    LiveOptions options;
    options.voice_activity.reset();
    return options;
  }

  /// In pieces of 0.5 s; the engine has done its work before the next.
  void feed_and_run(const LiveSamples& samples) {
    constexpr std::size_t kPiece = 8000;
    for (std::size_t at = 0; at < samples.size(); at += kPiece) {
      live->feed(std::span(samples).subspan(at, std::min(kPiece, samples.size() - at)));
      run();
    }
  }

  std::string joined(Kind kind, std::uint64_t utterance, const char* separator = "") const {
    std::string text;
    for (const LiveEvent& event : events)
      if (event.kind == kind && event.utterance == utterance) text += (text.empty() ? "" : separator) + event.text;
    return text;
  }
  std::vector<const LiveEvent*> of_kind(Kind kind) const {
    std::vector<const LiveEvent*> all;
    for (const LiveEvent& event : events)
      if (event.kind == kind) all.push_back(&event);
    return all;
  }

  std::vector<LiveEvent> events;
  std::vector<Completion> ended;  // requests
  std::unique_ptr<LiveTranscriber> live;
};

TEST_F(LiveTranscription, TextComesDuringSpeech) {
  start(without_detection());
  feed_and_run(recording(2));
  const std::size_t before = events.size();
  ASSERT_GE(before, 3u);
  EXPECT_EQ(of_kind(Kind::partial).size(), before);
  std::string so_far = joined(Kind::partial, 1);
  EXPECT_TRUE(std::string(kSpoken[2]).starts_with(so_far)) << so_far;
  EXPECT_GE(so_far.size(), std::string("six five").size()) << so_far;

  EXPECT_TRUE(live->commit());
  EXPECT_EQ(live->waiting(), 1u);
  run();
  live->wait();
  EXPECT_EQ(live->waiting(), 0u);
  EXPECT_EQ(events[before].kind, Kind::ended);
  EXPECT_EQ(events.back().kind, Kind::completed);
  EXPECT_EQ(events.back().text, kSpoken[2]);
  EXPECT_EQ(events.back().transcript.text, kSpoken[2]);
  EXPECT_EQ(joined(Kind::partial, 1), kSpoken[2]);
  EXPECT_EQ(events.back().begin, 0);
  EXPECT_NEAR(events.back().end, static_cast<double>(recording(2).size()) / 16000, 1e-9);
  ASSERT_FALSE(events.back().transcript.segments.empty());
  EXPECT_GT(events.back().transcript.prompt_tokens, 0);
  EXPECT_FALSE(live->commit());
}

TEST_F(LiveTranscription, EachStretchOfSpeechIsAnUtterance) {
  LiveOptions options;
  options.partial_seconds = 0.8;
  options.voice_activity->silence_seconds = 1.2;  // more than the pauses in the recordings
  start(options);
  LiveSamples samples = pause(1);
  samples += recording(2);
  const auto first_end = static_cast<double>(samples.size()) / 16000;
  samples += pause(2);
  const auto second_begin = static_cast<double>(samples.size()) / 16000;
  samples += recording(4);
  samples += pause(2);
  feed_and_run(samples);
  EXPECT_FALSE(live->commit()) << "nothing is left";

  std::vector<Kind> kinds;
  for (const LiveEvent& event : events)
    if (event.kind != Kind::partial) kinds.push_back(event.kind);
  EXPECT_EQ(kinds, (std::vector{Kind::started, Kind::ended, Kind::completed, Kind::started, Kind::ended, Kind::completed}));
  EXPECT_EQ(joined(Kind::completed, 1), kSpoken[2]);
  EXPECT_EQ(joined(Kind::partial, 1), kSpoken[2]);
  EXPECT_EQ(joined(Kind::completed, 2), kSpoken[4]);
  EXPECT_EQ(joined(Kind::partial, 2), kSpoken[4]);
  const auto completed = of_kind(Kind::completed);
  EXPECT_GT(completed[0]->begin, 0.2);
  EXPECT_LT(completed[0]->end, first_end + 0.5);
  EXPECT_GT(completed[1]->begin, second_begin - 0.5);
  for (const LiveEvent* event : completed) {
    ASSERT_FALSE(event->transcript.segments.empty());
    EXPECT_GE(event->transcript.segments.front().begin, event->begin);
    EXPECT_LE(event->transcript.segments.back().end, event->end + 1e-6);
    EXPECT_NEAR(event->transcript.duration, event->end - event->begin, 1e-9);
  }
}

TEST_F(LiveTranscription, CommitEndsSpeechThatGoesOn) {
  start({});
  LiveSamples samples = pause(1);
  samples += recording(4);
  live->feed(samples);
  ASSERT_FALSE(events.empty());
  EXPECT_EQ(events[0].kind, Kind::started);
  live->commit();
  run();
  EXPECT_EQ(events.back().kind, Kind::completed);
  EXPECT_EQ(joined(Kind::completed, 1), kSpoken[4]);
}

TEST_F(LiveTranscription, AHypothesisAtATime) {
  start(without_detection());
  live->feed(recording(1));
  EXPECT_EQ(in_engine(), 1u);
  live->feed(recording(2));
  EXPECT_EQ(in_engine(), 1u);
  live->commit();
  run();
  ASSERT_EQ(ended.size(), 2u) << "a hypothesis, which is cancelled, and the utterance";
  EXPECT_EQ(std::ranges::count_if(ended, [](const Completion& request) { return request.error != nullptr; }), 1);
  EXPECT_EQ(joined(Kind::completed, 1), std::string(kSpoken[1]) + " " + kSpoken[2]);

  LiveOptions none = without_detection();
  none.partial_seconds = 0;
  start(none);
  live->feed(recording(1));
  EXPECT_EQ(in_engine(), 0u);
}

TEST_F(LiveTranscription, CutsLongUtterancesAtPauses) {
  LiveOptions options = without_detection();
  options.piece_seconds = 8;
  options.partial_seconds = 5;
  start(options);
  LiveSamples samples;
  std::string text;
  for (const int number : {1, 3, 2}) {
    samples += recording(number);
    samples += pause(0.5);
    text += (text.empty() ? "" : " ") + std::string(kSpoken[number]);
  }
  feed_and_run(samples);
  live->commit();
  run();
  EXPECT_EQ(joined(Kind::completed, 1), text);
  EXPECT_EQ(joined(Kind::partial, 1), text);
  for (const Completion& request : ended) EXPECT_LE(request.transcript.duration, 8.6);
  const auto& segments = events.back().transcript.segments;
  ASSERT_GE(segments.size(), 3u);
  for (std::size_t n = 1; n < segments.size(); ++n) EXPECT_GE(segments[n].begin, segments[n - 1].end - 1e-6);

  // Silence is dropped on the way, and does not count as audio that waits.
  options.waiting_seconds = 60;
  start(options);
  for (int n = 0; n < 70; ++n) live->feed(pause(1));
  live->feed(recording(4));
  live->commit();
  run();
  EXPECT_EQ(events.back().text, kSpoken[4]);
  EXPECT_EQ(events.back().begin, 0);
  EXPECT_LE(ended.back().transcript.duration, 9);
}

TEST_F(LiveTranscription, TakesAnyRate) {
  const LiveSamples samples = recording(2);
  for (const int rate : {24000, 48000}) {
    events.clear();
    LiveOptions options = without_detection();
    options.sampling_rate = rate;
    start(options);
    LiveSamples other;  // linear interpolation: good enough for the words
    for (std::size_t n = 0; static_cast<double>(n + 1) * 16000 / rate + 1 < static_cast<double>(samples.size()); ++n) {
      const double at = static_cast<double>(n) * 16000 / rate;
      const auto before = static_cast<std::size_t>(at);
      const auto part = static_cast<float>(at - static_cast<double>(before));
      other.push_back(samples[before] * (1 - part) + samples[before + 1] * part);
    }
    live->feed(other);
    EXPECT_TRUE(live->commit());
    EXPECT_NEAR(live->position(), static_cast<double>(samples.size()) / 16000, 0.01);
    run();
    EXPECT_EQ(joined(Kind::completed, 1), kSpoken[2]) << rate;
    live.reset();
  }
}

TEST_F(LiveTranscription, ClearForgets) {
  start(without_detection());
  live->feed(recording(2));
  EXPECT_GT(live->uncommitted(), 1);
  live->clear();
  EXPECT_EQ(live->uncommitted(), 0);
  EXPECT_FALSE(live->commit());
  run();
  EXPECT_TRUE(events.empty());
  live->feed(LiveSamples(1599));
  EXPECT_FALSE(live->commit()) << "less than 0.1 s";
  live->clear();
  live->feed(recording(4));
  EXPECT_TRUE(live->commit());
  run();
  EXPECT_EQ(events.back().text, kSpoken[4]);
  EXPECT_NEAR(events.back().begin, static_cast<double>(recording(2).size() + 1599) / 16000, 1e-9) << "times go on";

  start({});
  events.clear();
  LiveSamples samples = pause(1);
  samples += recording(2);
  live->feed(samples);
  live->clear();
  EXPECT_FALSE(live->commit());
  run();
  EXPECT_TRUE(std::ranges::none_of(events, [](const LiveEvent& event) { return event.utterance == 2 || event.kind == Kind::completed; }) ||
              of_kind(Kind::completed).size() == of_kind(Kind::ended).size());
}

TEST_F(LiveTranscription, ConfigureEndsWhatGoesOn) {
  start(without_detection());
  live->feed(recording(4));
  LiveOptions options = without_detection();
  options.transcribe.max_new_tokens = 400;
  live->configure(options);
  EXPECT_GT(live->uncommitted(), 0) << "the prompt and so on change in the middle of an utterance";
  options.sampling_rate = 24000;
  live->configure(options);
  EXPECT_EQ(live->uncommitted(), 0);
  options.sampling_rate = 16000;
  options.voice_activity.emplace();
  live->configure(options);
  live->feed(pause(1));
  live->feed(recording(4));
  live->feed(pause(1));
  run();
  ASSERT_EQ(of_kind(Kind::completed).size(), 2u);
  ASSERT_EQ(of_kind(Kind::started).size(), 1u);
  EXPECT_EQ(joined(Kind::completed, 2), kSpoken[4]);
  EXPECT_GT(of_kind(Kind::started)[0]->begin, static_cast<double>(recording(4).size()) / 16000 + 0.2);

  options.voice_activity->threshold = 2;
  EXPECT_THROW(live->configure(options), InvalidArgument);
  live->feed(recording(4));
  EXPECT_TRUE(live->commit());
}

TEST_F(LiveTranscription, NothingComesAfterTheEnd) {
  start(without_detection());
  live->feed(recording(1));
  live->commit();
  live->feed(recording(2));
  const std::size_t before = events.size();
  live.reset();
  run();
  EXPECT_EQ(events.size(), before);
  ASSERT_GE(ended.size(), 2u);
  for (const Completion& request : ended) EXPECT_THROW(std::rethrow_exception(request.error), Cancelled);
}

TEST_F(LiveTranscription, AFullQueueFailsAnUtterance) {
  LiveOptions options = without_detection();
  options.partial_seconds = 0;
  start(options);
  for (std::size_t n = 0; n <= kQueue; ++n) {
    live->feed(pause(0.2));
    EXPECT_TRUE(live->commit());
  }
  EXPECT_TRUE(of_kind(Kind::failed).empty()) << "utterances end in order";
  run();
  EXPECT_EQ(of_kind(Kind::completed).size(), kQueue);
  ASSERT_EQ(events.back().kind, Kind::failed);
  EXPECT_THROW(std::rethrow_exception(events.back().error), QueueFull);
}

TEST_F(LiveTranscription, RefusesTooMuchAudio) {
  LiveOptions options = without_detection();
  options.partial_seconds = 0;
  options.waiting_seconds = 60;
  options.waiting_utterances = 2;
  start(options);
  const LiveSamples samples = pause(25);
  live->feed(samples);
  EXPECT_TRUE(live->commit());
  live->feed(samples);
  expect_error<TooMuchAudio>([&] { live->feed(samples); },
                             {"live transcription: 50.0 s of audio wait for their text, and 25.0 s more were given; 60.0 s are allowed"});
  EXPECT_NEAR(live->uncommitted(), 25, 1e-9) << "none of it was taken";
  EXPECT_TRUE(live->commit());
  expect_error<TooMuchAudio>([&] { live->feed(pause(0.1)); }, {"live transcription: 2 utterances wait for their text already"});
  run();
  live->feed(samples);
  EXPECT_NEAR(live->uncommitted(), 25, 1e-9);
}

TEST_F(LiveTranscription, RefusesBadOptionsAndSamples) {
  const auto refused = [&](auto change, const std::string& message) {
    LiveOptions options;
    change(options);
    expect_error<InvalidArgument>([&] { start(options); }, {message});
  };
  refused([](LiveOptions& options) { options.partial_seconds = 0.01; },
          "live transcription: partial_seconds is 0.01; it must be 0.1 to 10");
  refused([](LiveOptions& options) { options.piece_seconds = test::kNaN; }, "live transcription: piece_seconds is nan; it must be 5 to 60");
  refused([](LiveOptions& options) { options.waiting_seconds = 1; }, "live transcription: waiting_seconds is 1; it must be 60 to 86400");
  refused([](LiveOptions& options) { options.waiting_utterances = 0; },
          "live transcription: waiting_utterances is 0; it must be 1 to 1000000");
  refused([](LiveOptions& options) { options.sampling_rate = 0; }, "sampling_rate is 0 Hz; 1000 to 768000 are allowed");
  start({});
  const LiveSamples samples = {0, test::kNaN};
  expect_error<InvalidArgument>([&] { live->feed(samples); }, {"live transcription: sample 1 is nan; samples must be finite"});
  EXPECT_EQ(live->position(), 0);

  LiveOptions bad = without_detection();
  bad.transcribe.temperature = -1;
  start(bad);
  live->feed(recording(4));
  live->commit();
  run();
  ASSERT_EQ(of_kind(Kind::failed).size(), 1u);
  EXPECT_THROW(std::rethrow_exception(events.back().error), InvalidArgument);
}

}  // namespace
}  // namespace tw::speech
