#include "speech/segment/vad.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <numbers>
#include <random>

#include "speech/audio/audio.hpp"
#include "speech/segment/segment.hpp"
#include "tests/expect_error.hpp"
#include "tests/support.hpp"
#include "tilewave/error.hpp"
#include "tilewave/voice_activity.hpp"

namespace tw::speech {
namespace {

using test::expect_error;
using Kind = VoiceEvent::Kind;
using Samples = std::vector<float>;

constexpr int kHertz = kSamplingRate;
constexpr VoiceActivityOptions kBare = {.prefix_seconds = 0, .suffix_seconds = 0, .silence_seconds = 0.3};

/// `seconds` of steady noise of `level` dB of full scale.
Samples hiss(double seconds, double level, unsigned seed = 3) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal(0, static_cast<float>(std::pow(10, level / 20)));
  Samples samples(static_cast<std::size_t>(seconds * kHertz));
  for (float& x : samples) x = normal(engine);
  return samples;
}

/// A bundled recording of digits, of a mean power of -30 dB or so while somebody is speaking.
const Samples& spoken() {
  static const Samples samples = load_audio(std::string(TILEWAVE_SOURCE_DIR) + "/assets/samples/digits-1.wav");
  return samples;
}

/// 5 s of noise, a recording in the same noise, and 5 s of noise; the recording is about 20 dB above it.
Samples in_noise(unsigned seed = 3) {
  Samples samples = hiss(10 + static_cast<double>(spoken().size()) / kHertz, -50, seed);
  for (std::size_t i = 0; i < spoken().size(); ++i) samples[5 * kHertz + i] += spoken()[i];
  return samples;
}

/// A piece at a time.
std::vector<VoiceEvent> stream(const Samples& samples, const std::function<std::size_t()>& piece,
                               const VoiceActivityOptions& options = {}) {
  VoiceActivityDetector detector(options);
  std::vector<VoiceEvent> events;
  std::int64_t horizon = 0;
  const auto take = [&](const std::vector<VoiceEvent>& more) {
    for (const VoiceEvent& event : more) {
      EXPECT_EQ(event.kind, events.size() % 2 == 0 ? Kind::started : Kind::stopped);
      EXPECT_GE(event.sample, events.empty() ? 0 : events.back().sample);
      EXPECT_GE(event.sample, horizon);
      EXPECT_LE(event.sample, detector.position());
      events.push_back(event);
    }
    EXPECT_EQ(detector.speaking(), events.size() % 2 == 1);
    EXPECT_GE(detector.horizon(), horizon);
    EXPECT_LE(detector.horizon(), detector.position());
    horizon = std::max(detector.horizon(), std::int64_t{0});
  };
  for (std::size_t at = 0; at < samples.size();) {
    const std::size_t count = std::min(piece(), samples.size() - at);
    take(detector.feed(std::span(samples).subspan(at, count)));
    at += count;
  }
  take(detector.finish());
  EXPECT_EQ(detector.position(), std::ssize(samples));
  EXPECT_FALSE(detector.speaking());
  return events;
}

double at(std::int64_t sample) { return static_cast<double>(sample) / kHertz; }

TEST(VoiceActivity, SpeechInNoiseIsFoundWhereItIs) {
  const std::vector<Segment> clean = detect_speech(spoken(), kBare), noisy = detect_speech(in_noise(), kBare);
  ASSERT_FALSE(clean.empty());
  ASSERT_FALSE(noisy.empty());
  EXPECT_NEAR(at(noisy.front().begin), 5 + at(clean.front().begin), 0.1);
  EXPECT_NEAR(at(noisy.back().end), 5 + at(clean.back().end), 0.15);
  // Noise that is louder than what cut_at_silences() takes for speech in any case.
  EXPECT_LT(at(noisy.front().begin), 8);
}

TEST(VoiceActivity, WhatIsNotSpeechGivesNoSpans) {
  for (const double seconds : {0.0, 0.005, 0.1, 20.0})
    EXPECT_TRUE(detect_speech(Samples(static_cast<std::size_t>(seconds * kHertz))).empty());
  EXPECT_TRUE(detect_speech(Samples(10 * kHertz, 0.25F)).empty());  // a sound card's constant
  for (const double level : {-80.0, -60.0, -40.0, -20.0}) EXPECT_TRUE(detect_speech(hiss(20, level)).empty()) << level;
  Samples clicks = hiss(20, -70);
  for (int i = 1; i < 19; ++i)
    for (int k = 0; k < 50; ++k) clicks[static_cast<std::size_t>(i * kHertz + k)] = k % 2 == 0 ? 0.5F : -0.5F;
  EXPECT_TRUE(detect_speech(clicks).empty());
  Samples chord = hiss(20, -70);
  for (std::size_t i = 0; i < chord.size(); ++i)
    for (const double hertz : {261.6, 329.6, 392.0})
      chord[i] += static_cast<float>(0.1 * std::sin(2 * std::numbers::pi * hertz * static_cast<double>(i) / kHertz));
  EXPECT_TRUE(detect_speech(chord).empty());
}

TEST(VoiceActivity, PiecesDoNotMatter) {
  std::mt19937_64 random = test::random_engine();
  const Samples samples = in_noise();
  const std::vector<VoiceEvent> whole = stream(samples, [&] { return samples.size(); });
  ASSERT_GE(whole.size(), 2u);
  EXPECT_EQ(stream(samples, [] { return std::size_t{1}; }), whole);
  EXPECT_EQ(stream(samples, [] { return std::size_t{320}; }), whole);
  EXPECT_EQ(stream(samples, [&] { return random() % 5000; }), whole);
  std::vector<Segment> spans;
  for (std::size_t i = 0; i < whole.size(); i += 2) spans.push_back({whole[i].sample, whole[i + 1].sample});
  EXPECT_EQ(detect_speech(samples), spans);
}

TEST(VoiceActivity, EventsComeInTime) {
  const Samples samples = in_noise();
  const std::vector<VoiceEvent> bare = stream(
      samples, [&] { return samples.size(); }, kBare);
  VoiceActivityDetector detector(kBare);
  std::size_t next = 0;
  for (std::size_t i = 0; i + 160 <= samples.size(); i += 160)
    for (const VoiceEvent& event : detector.feed(std::span(samples).subspan(i, 160))) {
      ASSERT_LT(next, bare.size());
      EXPECT_EQ(event, bare[next++]);
      const double delay = at(detector.position() - event.sample);
      EXPECT_GT(delay, 0);
      EXPECT_LT(delay, event.kind == Kind::started ? 0.2 : kBare.silence_seconds + 0.1);
    }
  EXPECT_EQ(next, bare.size());
}

TEST(VoiceActivity, MarginsAndPauses) {
  const Samples samples = in_noise();
  const std::vector<Segment> bare = detect_speech(samples, kBare);
  const std::vector<Segment> wide = detect_speech(samples, {.prefix_seconds = 0.25, .suffix_seconds = 0.1, .silence_seconds = 0.3});
  ASSERT_EQ(wide.size(), bare.size());
  for (std::size_t i = 0; i < bare.size(); ++i) {
    EXPECT_EQ(wide[i].begin, std::max(bare[i].begin - kHertz / 4, i == 0 ? 0 : wide[i - 1].end));
    EXPECT_EQ(wide[i].end, bare[i].end + kHertz / 10);
  }
  const std::vector<Segment> joined = detect_speech(samples, {.prefix_seconds = 0, .suffix_seconds = 0, .silence_seconds = 5});
  ASSERT_EQ(joined.size(), 1u);
  EXPECT_EQ(joined[0], (Segment{bare.front().begin, bare.back().end}));
  EXPECT_GT(bare.size(), 1u);
  EXPECT_TRUE(detect_speech(samples, {.threshold = 1}).empty());
  EXPECT_EQ(detect_speech(samples, {.threshold = 0}).size(), 1u);
}

TEST(VoiceActivity, FinishEndsSpeechAndTheStreamContinues) {
  const Samples samples = in_noise();
  const std::vector<VoiceEvent> all = stream(samples, [&] { return samples.size(); });
  const auto middle = static_cast<std::size_t>((all[0].sample + all[1].sample) / 2);
  VoiceActivityDetector detector;
  const std::vector<VoiceEvent> before = detector.feed(std::span(samples).first(middle)), end = detector.finish();
  EXPECT_EQ(before, (std::vector<VoiceEvent>{all[0]}));
  ASSERT_EQ(end.size(), 1u);
  EXPECT_EQ(end[0].kind, Kind::stopped);
  EXPECT_LE(end[0].sample, static_cast<std::int64_t>(middle));
  EXPECT_GT(end[0].sample, static_cast<std::int64_t>(middle) - 8000);
  EXPECT_TRUE(detector.finish().empty());
  const std::vector<VoiceEvent> after = detector.feed(std::span(samples).subspan(middle));
  ASSERT_GE(after.size(), 2u);
  EXPECT_EQ(after[0].kind, Kind::started);
  EXPECT_GE(after[0].sample, end[0].sample);
  EXPECT_NEAR(static_cast<double>(after.back().sample), static_cast<double>(all.back().sample), 1600);
}

TEST(VoiceActivity, BadInputIsRefused) {
  expect_error<InvalidArgument>([] { VoiceActivityDetector({.threshold = 1.5}); }, {"threshold is 1.5", "from 0 to 1"});
  expect_error<InvalidArgument>([] { VoiceActivityDetector({.prefix_seconds = NAN}); }, {"prefix_seconds is nan", "from 0 to 5"});
  expect_error<InvalidArgument>([] { VoiceActivityDetector({.silence_seconds = 0}); }, {"silence_seconds is 0", "from 0.1 to 10"});
  expect_error<InvalidArgument>([] { detect_speech({}, {.suffix_seconds = 1, .silence_seconds = 0.5}); },
                                {"suffix_seconds is 1", "silence_seconds, 0.5"});
  VoiceActivityDetector detector;
  detector.feed(Samples(100));
  Samples bad(100);
  bad[7] = INFINITY;
  expect_error<InvalidArgument>([&] { detector.feed(bad); }, {"sample 107 is inf"});
  EXPECT_EQ(detector.position(), 100);
}

TEST(VoiceActivity, SegmentsInNoiseHoldSpeechOnly) {
  Samples samples;
  for (unsigned i = 0; i < 4; ++i) {
    const Samples part = in_noise(i);
    samples.insert(samples.end(), part.begin(), part.end());
  }
  for (float& x : samples) x *= 3;  // the noise is now louder than -45 dB, which silence never is
  EXPECT_EQ(cut_at_silences(samples, {.longest_seconds = 12}).front().begin, 0);
  const std::vector<Segment> segments = segments_of(samples, Segmentation::vad, 12);
  ASSERT_EQ(segments.size(), 4u);
  const double each = at(std::ssize(samples)) / 4;
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_GT(at(segments[i].begin), each * static_cast<double>(i) + 5);
    EXPECT_LT(at(segments[i].end), each * static_cast<double>(i + 1) - 4.5);
  }
  for (const Segment& segment : segments_of(samples, Segmentation::vad, 2)) EXPECT_LE(segment.end - segment.begin, 2 * kHertz);
  EXPECT_EQ(segments_of(samples, Segmentation::automatic, 12), cut_at_silences(samples, {.longest_seconds = 12}));
  EXPECT_EQ(segments_of(samples, Segmentation::none, 12), (std::vector<Segment>{{0, std::ssize(samples)}}));
  EXPECT_TRUE(segments_of({}, Segmentation::none, 12).empty());
  expect_error<InvalidArgument>([] { cut_at_speech({}, {.sampling_rate = 8000}); }, {"sampling_rate is 8000", "16000"});
}

}  // namespace
}  // namespace tw::speech
