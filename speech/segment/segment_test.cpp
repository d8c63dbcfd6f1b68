#include "speech/segment/segment.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "tests/expect_error.hpp"
#include "tests/support.hpp"
#include "tilewave/error.hpp"

namespace tw::speech {
namespace {

using test::expect_error;

constexpr int kRate = 16000;

std::int64_t at(double seconds) { return std::llround(seconds * kRate); }

/// `seconds` of steady noise of `level` dB of full scale.
std::vector<float> noise(double seconds, double level) {
  std::mt19937 engine(7);
  std::normal_distribution<float> normal(0, static_cast<float>(std::pow(10, level / 20)));
  std::vector<float> samples(at(seconds));
  for (float& x : samples) x = normal(engine);
  return samples;
}

/// Adds sound from `begin` to `end`, in seconds: a vowel's buzz whose loudness goes up and down four times a second, as syllables do.
void speak(std::vector<float>& samples, double begin, double end, double gain = 0.1) {
  for (std::int64_t i = at(begin); i < at(end); ++i) {
    const double t = static_cast<double>(i) / kRate, phase = 2 * 3.14159265358979 * 140 * t;
    const double syllable = 0.55 + 0.45 * std::cos(2 * 3.14159265358979 * 4 * (t - begin));
    samples[i] += static_cast<float>(gain * syllable * (std::sin(phase) + std::sin(3 * phase) + std::sin(11 * phase)));
  }
}

/// Order, lengths and bounds hold for all inputs.
void expect_valid(const std::vector<Segment>& segments, std::size_t size, double longest = 30) {
  std::int64_t end = 0;
  for (const Segment& s : segments) {
    EXPECT_GE(s.begin, end);
    EXPECT_LT(s.begin, s.end);
    EXPECT_LE(s.end - s.begin, at(longest));
    end = s.end;
  }
  EXPECT_LE(end, static_cast<std::int64_t>(size));
}

bool covered(const std::vector<Segment>& segments, double begin, double end) {
  std::int64_t next = at(begin);
  for (const Segment& s : segments)
    if (s.begin <= next && next < s.end) next = s.end;
  return next >= at(end);
}

TEST(Segments, SilenceAndFaintSteadyNoiseGiveNone) {
  for (const double seconds : {0.0, 0.005, 1.0, 65.0}) EXPECT_TRUE(cut_at_silences(std::vector<float>(at(seconds))).empty()) << seconds;
  EXPECT_TRUE(cut_at_silences(std::vector<float>(100000, 0.25F)).empty());  // a sound card's constant
  for (const double level : {-90.0, -70.0, -55.0}) EXPECT_TRUE(cut_at_silences(noise(40, level)).empty()) << level;
  EXPECT_TRUE(cut_at_silences(std::vector<float>(1, 1.0F)).empty());
}

TEST(Segments, AClickIsNoSpeech) {
  std::vector<float> samples = noise(10, -80);
  for (int i = 0; i < 50; ++i) samples[at(5) + i] = i % 2 == 0 ? 0.5F : -0.5F;
  EXPECT_TRUE(cut_at_silences(samples).empty());
}

TEST(Segments, OneUtteranceIsOneSegmentWithMargins) {
  std::vector<float> samples = noise(12, -65);
  speak(samples, 3, 5);
  speak(samples, 6.5, 8);  // after a pause of 1.5 s
  const std::vector<Segment> segments = cut_at_silences(samples);
  ASSERT_EQ(segments.size(), 1u);
  EXPECT_NEAR(static_cast<double>(segments[0].begin) / kRate, 2.8, 0.03);
  EXPECT_NEAR(static_cast<double>(segments[0].end) / kRate, 8.2, 0.03);
}

TEST(Segments, LongPausesAreLeftOut) {
  std::vector<float> samples = noise(20, -65);
  speak(samples, 0, 3);
  speak(samples, 8, 9);
  speak(samples, 17, 20);
  const std::vector<Segment> segments = cut_at_silences(samples);
  ASSERT_EQ(segments.size(), 3u);
  expect_valid(segments, samples.size());
  EXPECT_EQ(segments[0].begin, 0);
  EXPECT_NEAR(static_cast<double>(segments[0].end) / kRate, 3.2, 0.03);
  EXPECT_NEAR(static_cast<double>(segments[1].begin) / kRate, 7.8, 0.03);
  EXPECT_NEAR(static_cast<double>(segments[1].end) / kRate, 9.2, 0.03);
  EXPECT_EQ(segments[2].end, static_cast<std::int64_t>(samples.size()));
}

TEST(Segments, DigitalSilenceNearbyDoesNotMakeNoiseSpeech) {
  // Recordings in noise, joined with nothing at all between them: what is pause in one is not speech because of zeros elsewhere.
  std::vector<float> samples;
  for (int i = 0; i < 6; ++i) {
    std::vector<float> part = noise(5, -63);
    speak(part, 1, 2);
    speak(part, 3.5, 4);
    samples.insert(samples.end(), part.begin(), part.end());
    samples.insert(samples.end(), at(3), 0.0F);
  }
  const std::vector<Segment> segments = cut_at_silences(samples);
  expect_valid(segments, samples.size());
  ASSERT_EQ(segments.size(), 6u);
  for (int i = 0; i < 6; ++i) {
    EXPECT_NEAR(static_cast<double>(segments[static_cast<std::size_t>(i)].begin) / kRate, 8 * i + 0.8, 0.03);
    EXPECT_NEAR(static_cast<double>(segments[static_cast<std::size_t>(i)].end) / kRate, 8 * i + 4.2, 0.03);
  }
}

TEST(Segments, QuietSpeechIsKept) {
  std::vector<float> quiet(at(6));  // peaks at -55 dB, in digital silence
  speak(quiet, 2, 4, 0.001);
  EXPECT_TRUE(covered(cut_at_silences(quiet), 2, 4));
  std::vector<float> noisy = noise(20, -40);  // 10 dB above loud noise: nothing may be taken for a pause
  speak(noisy, 8, 10, 0.15);
  EXPECT_TRUE(covered(cut_at_silences(noisy), 8, 10));
  std::vector<float> word(at(0.3));  // a recording cut to one word
  speak(word, 0, 0.3, 0.002);
  const std::vector<Segment> segments = cut_at_silences(word);
  ASSERT_EQ(segments.size(), 1u);
  EXPECT_EQ(segments[0], (Segment{0, at(0.3)}));
}

TEST(Segments, WhatFitsIsNotCut) {
  for (const double seconds : {29.0, 29.9, 30.0}) {
    std::vector<float> samples(at(seconds));
    speak(samples, 0, seconds);
    EXPECT_EQ(cut_at_silences(samples), (std::vector<Segment>{{0, at(seconds)}})) << seconds;
    // In silence its margins shrink, so that it still fits.
    std::vector<float> in_silence(at(40));
    speak(in_silence, 5, 5 + seconds - 0.05);
    const std::vector<Segment> segments = cut_at_silences(in_silence);
    EXPECT_EQ(segments.size(), 1u) << seconds;
    expect_valid(segments, in_silence.size());
    EXPECT_TRUE(covered(segments, 5, 5 + seconds - 0.05)) << seconds;
  }
}

TEST(Segments, LongSpeechIsCutInItsLongestPause) {
  std::vector<float> samples = noise(50, -65);
  for (const auto& [begin, end] : {std::pair{0.0, 8.0}, {9.0, 15.0}, {15.8, 24.0}, {24.4, 33.0}, {33.3, 50.0}}) speak(samples, begin, end);
  const std::vector<Segment> segments = cut_at_silences(samples);
  expect_valid(segments, samples.size());
  ASSERT_EQ(segments.size(), 3u);
  // The pause at 8 s is longer, but in the segment's first third.
  EXPECT_NEAR(static_cast<double>(segments[0].end) / kRate, 15.2, 0.03);
  EXPECT_NEAR(static_cast<double>(segments[1].begin) / kRate, 15.6, 0.03);
  EXPECT_NEAR(static_cast<double>(segments[1].end) / kRate, 33.15, 0.03);
  EXPECT_EQ(segments[1].end, segments[2].begin);
}

TEST(Segments, WithoutPausesTheQuietestPlaceIsCut) {
  std::vector<float> samples = noise(45, -20);
  for (std::int64_t i = at(26); i < at(26.3); ++i) samples[i] *= 0.3F;
  for (std::int64_t i = at(12); i < at(12.3); ++i) samples[i] *= 0.3F;  // not in the last third
  const std::vector<Segment> segments = cut_at_silences(samples);
  ASSERT_EQ(segments.size(), 2u);
  EXPECT_EQ(segments[0].begin, 0);
  EXPECT_NEAR(static_cast<double>(segments[0].end) / kRate, 26.15, 0.1);
  EXPECT_EQ(segments[0].end, segments[1].begin);
  EXPECT_EQ(segments[1].end, static_cast<std::int64_t>(samples.size()));
}

TEST(Segments, NothingLoudIsLostFromRandomSound) {
  std::mt19937_64 engine = test::random_engine();
  std::uniform_real_distribution<double> uniform(0, 1);
  for (int repeat = 0; repeat < 8; ++repeat) {
    std::vector<float> samples = noise(20 + 130 * uniform(engine), -80 + 25 * uniform(engine));
    std::vector<std::pair<double, double>> spoken;
    const double seconds = static_cast<double>(samples.size()) / kRate;
    for (double t = 3 * uniform(engine); t < seconds - 0.1;) {
      const double end = std::min(seconds, t + 0.2 + 12 * uniform(engine) * uniform(engine));
      speak(samples, t, end);
      spoken.emplace_back(t, end);
      t = end + 4 * uniform(engine) * uniform(engine);
    }
    const std::vector<Segment> segments = cut_at_silences(samples);
    expect_valid(segments, samples.size());
    for (const auto& [begin, end] : spoken) EXPECT_TRUE(covered(segments, begin, end - 1e-3)) << begin << " to " << end;
    EXPECT_EQ(cut_at_silences(samples), segments);
  }
}

TEST(Segments, AnHourOfBursts) {
  std::vector<float> samples(at(3600));
  std::vector<float> burst(at(1.5));
  speak(burst, 0, 1.5);
  for (int i = 0; i < 1200; ++i) std::copy(burst.begin(), burst.end(), samples.begin() + at(3 * i));
  const std::vector<Segment> segments = cut_at_silences(samples);
  expect_valid(segments, samples.size());
  for (int i = 0; i < 1200; ++i) ASSERT_TRUE(covered(segments, 3 * i, 3 * i + 1.49)) << i;
  EXPECT_LT(segments.size(), 360u);  // joined, but for each tenth one on its own at worst
}

TEST(Segments, OtherRatesAndLengths) {
  std::vector<float> samples(at(20));
  speak(samples, 0, 20);
  const std::vector<Segment> segments = cut_at_silences(samples, {.longest_seconds = 3, .join_below_seconds = 1});
  expect_valid(segments, samples.size(), 3);
  EXPECT_TRUE(covered(segments, 0, 20));
  // A pause as long as a segment is left out, whatever may be joined.
  std::vector<float> pause(at(9));
  speak(pause, 0, 2.9);
  speak(pause, 6, 8.9);
  EXPECT_EQ(cut_at_silences(pause, {.longest_seconds = 3, .join_below_seconds = 60}).size(), 2u);
  const std::vector<Segment> same = cut_at_silences(samples, {.sampling_rate = 8000});  // 40 s then
  expect_valid(same, samples.size(), 15);
  EXPECT_TRUE(covered(same, 0, 20));
}

TEST(Segments, OptionsOutOfRangeAreRefused) {
  expect_error<InvalidArgument>([] { cut_at_silences({}, {.sampling_rate = 0}); }, {"sampling_rate is 0", "from 1000 to 768000"});
  expect_error<InvalidArgument>([] { cut_at_silences({}, {.longest_seconds = 0.5}); }, {"longest_seconds is 0.5", "from 1 to 3600"});
  expect_error<InvalidArgument>([] { cut_at_silences({}, {.join_below_seconds = 0}); }, {"join_below_seconds is 0", "from 0.3 to 3600"});
  expect_error<InvalidArgument>([] { cut_at_silences({}, {.margin_seconds = NAN}); }, {"margin_seconds is nan", "from 0 to 1"});
}

}  // namespace
}  // namespace tw::speech
