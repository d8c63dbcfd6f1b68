#include "speech/mel/mel.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <complex>
#include <filesystem>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <numbers>
#include <random>
#include <string>

#include "models/json.hpp"
#include "speech/mel/fft.hpp"
#include "tests/expect_error.hpp"
#include "tests/support.hpp"
#include "tilewave/device.hpp"
#include "tilewave/log_mel.hpp"

namespace tw::speech {
namespace {

using test::expect_error;

/// tools/goldens/mel.py's signals, by the same integer arithmetic.
std::vector<float> signal(std::int64_t size, const std::function<std::int64_t(std::int64_t i, std::int64_t noise)>& value) {
  std::vector<float> samples(size);
  std::uint32_t state = 1;
  for (std::int64_t i = 0; i < size; ++i) {
    state = state * 1664525u + 1013904223u;
    samples[i] = static_cast<float>(value(i, static_cast<std::int64_t>(state >> 16) - 32768)) / 32768;
  }
  return samples;
}

std::vector<float> noise(std::int64_t size) {
  return signal(size, [](std::int64_t, std::int64_t noise) { return noise; });
}

std::map<std::string, std::vector<float>> signals() {
  using I = std::int64_t;
  const auto rounded_down = [](I a, I b) { return (a - (a % b + b) % b) / b; };
  std::map<std::string, std::vector<float>> all;
  all["noise"] = noise(480000);
  all["short noise"] = noise(48000);
  all["a few samples"] = noise(100);
  all["silence"] = std::vector<float>(480000);
  all["faint noise"] = signal(480000, [&](I, I noise) { return rounded_down(noise, 16384); });
  all["triangle"] = signal(480000, [](I i, I) { return std::abs(i % 36 - 18) * 3000 - 27000; });
  all["clicks"] = signal(480000, [](I i, I) { return i % 7001 == 0 ? 32767 : 0; });
  all["noise after silence"] = signal(480000, [&](I i, I noise) { return i < 160000 ? 0 : rounded_down(noise, 8); });
  const std::vector<float> longer = noise(500000);
  all["second window"] = std::vector<float>(longer.begin() + 480000, longer.end());
  return all;
}

TEST(LogMel, ValuesAreThoseOfTheWhisperFeatureExtractor) {
  if (!std::filesystem::exists(TILEWAVE_SOURCE_DIR)) GTEST_SKIP() << "skipped: the sources are not there";
  const nlohmann::json golden = models::load_json(TILEWAVE_SOURCE_DIR "/tests/data/mel/golden.json");
  const std::map<std::string, std::vector<float>> inputs = signals();
  ASSERT_EQ(golden["cases"].size(), inputs.size());
  const LogMel log_mel;
  for (const nlohmann::json& expected : golden["cases"]) {
    const std::string name = expected["name"];
    const MelFeatures mel = log_mel.extract(inputs.at(name));
    ASSERT_EQ(mel.features.shape(), (Shape{1, 3000, 128})) << name;
    EXPECT_EQ(mel.real_frames, std::vector<std::int64_t>{expected["real_frames"]}) << name;
    double largest = 0;
    for (std::size_t i = 0; i < golden["frames"].size(); ++i) {
      for (std::int64_t bin = 0; bin < 128; ++bin) {
        const double difference = mel.features.at({0, golden["frames"][i], bin}) - expected["values"][i][bin].get<double>();
        largest = std::max(largest, std::abs(difference));
      }
    }
    EXPECT_LT(largest, 1e-4) << name;
  }
}

/// Features of every signal, one after the other, against those of the CPU in double; the bound of the golden values.
void expect_features_of_the_cpu(const std::function<Tensor(std::span<const float> samples)>& features) {
  const LogMel log_mel;
  for (const auto& [name, samples] : signals()) {
    EXPECT_LT(max_difference(features(samples).to(Device::cpu()), log_mel.extract(samples).features), 1e-4) << name;
  }
}

TEST(LogMel, TheKernelGivesTheSameFeatures) {
  const LogMelTables tables = LogMelTables::make(LogMel().filters(), Stream::standard(Device::cpu()));
  expect_features_of_the_cpu([&](std::span<const float> samples) {
    const Tensor x = Tensor::from<float>(samples, {1, std::ssize(samples)}), y = Tensor::poisoned({1, 3000, 128}, DType::f32);
    log_mel(x, tables, y);
    return y;
  });
}

TEST(LogMel, FeaturesOfAGpuAreThoseOfTheCpu_cuda) {
  skip_without_cuda();
  const LogMel log_mel({}, Stream(Device::cuda()));
  expect_features_of_the_cpu([&](std::span<const float> samples) {
    const Tensor features = log_mel.extract(samples).features;
    EXPECT_TRUE(features.device().is_cuda());
    return features;
  });
  const std::vector<float> samples = noise(60000);
  const std::span<const float> view(samples);
  const std::vector<std::span<const float>> segments = {view.first(1), view.subspan(100, 50000), {}};
  const MelFeatures all = log_mel.extract(segments), expected = LogMel().extract(segments);
  EXPECT_EQ(all.real_frames, expected.real_frames);
  EXPECT_LT(max_difference(all.features.to(Device::cpu()), expected.features), 1e-4);
  EXPECT_EQ(log_mel.extract(std::span<const float>()).features.shape(), (Shape{0, 3000, 128}));
}

TEST(LogMel, AudioIsCutIntoWindowsEachOnItsOwn) {
  const LogMel log_mel;
  const std::vector<float> samples = noise(2 * 480000 + 161);
  const MelFeatures all = log_mel.extract(samples);
  ASSERT_EQ(all.features.shape(), (Shape{3, 3000, 128}));
  EXPECT_EQ(all.real_frames, (std::vector<std::int64_t>{3000, 3000, 2}));
  const std::span<const float> view(samples);
  for (int window = 0; window < 3; ++window) {
    const MelFeatures one = log_mel.extract(view.subspan(window * 480000, window < 2 ? 480000 : 161));
    EXPECT_EQ(max_difference(all.features.slice(0, window, window + 1), one.features), 0) << window;
  }
}

TEST(LogMel, WindowsOfSegmentsAreThoseOfTheSegmentsAlone) {
  const LogMel log_mel;
  const std::vector<float> samples = noise(60000);
  const std::span<const float> view(samples);
  const std::vector<std::span<const float>> segments = {view.first(1), view.subspan(100, 50000), {}};
  const MelFeatures batch = log_mel.extract(segments);
  EXPECT_EQ(batch.real_frames, (std::vector<std::int64_t>{1, 313, 0}));
  for (int i = 0; i < 2; ++i) EXPECT_EQ(max_difference(batch.features.slice(0, i, i + 1), log_mel.extract(segments[i]).features), 0) << i;
  // A window of zeros: every bin is the smallest, log10(1e-10), and so the largest, too.
  EXPECT_EQ(max_difference(batch.features.slice(0, 2, 3), log_mel.extract(std::vector<float>(480000)).features), 0);
  EXPECT_EQ(batch.features.at({2, 1234, 5}), -1.5);
}

/// The largest difference from a direct transform, relative to the largest power, of `length` random numbers.
template <class Lanes>
double error_of_power_spectra(int length, std::mt19937_64& random) {
  const FftPlan plan(length);
  PowerSpectra<Lanes> spectra(plan);
  std::vector<std::array<double, Lanes::count>> x(length);
  for (int i = 0; i < length; ++i) {
    for (int lane = 0; lane < Lanes::count; ++lane) {
      x[i][lane] = std::uniform_real_distribution<double>(-1, 1)(random);
      auto& pair = spectra.signals()[i / 2];
      (i % 2 == 0 ? pair.re : pair.im)[lane] = x[i][lane];
    }
  }
  const auto* const power = spectra.run();
  double largest = 0, error = 0;
  for (int k = 0; k <= length / 2; ++k) {
    for (int lane = 0; lane < Lanes::count; ++lane) {
      std::complex<double> sum = 0;
      for (int i = 0; i < length; ++i) sum += std::polar(x[i][lane], -2 * std::numbers::pi * (std::int64_t{i} * k % length) / length);
      largest = std::max(largest, std::norm(sum));
      error = std::max(error, std::abs(power[k].re[lane] - std::norm(sum)));
    }
  }
  return error / largest;
}

TEST(LogMel, PowerSpectraAreThoseOfADirectTransform) {
  std::mt19937_64 random = test::random_engine();
  // Powers of 2 and 4 alone, every radix of its own, prime factors that are not, and several of one kind.
  for (const int length : {4, 6, 8, 16, 18, 34, 100, 202, 400, 402, 882, 1022, 1024}) {
    EXPECT_LT(error_of_power_spectra<TwoLanes>(length, random), 1e-13) << length;
    EXPECT_LT(error_of_power_spectra<FourLanes>(length, random), 1e-13) << length;
  }
}

// Half of n_fft has a prime factor of 7 or more: the transform then needs a buffer. tests/mel_threads.cpp looks for races.
TEST(LogMel, TheNumberOfThreadsDoesNotChangeValues) {
  const int threads = cpu_threads();
  for (const int n_fft : {402, 434, 882, 1022}) {
    const LogMel log_mel({.n_fft = n_fft, .window_seconds = 10});
    const std::vector<float> samples = noise(160000);
    set_cpu_threads(1);
    const Tensor expected = log_mel.extract(samples).features;
    set_cpu_threads(4);
    for (int repeat = 0; repeat < 5; ++repeat) EXPECT_EQ(max_difference(log_mel.extract(samples).features, expected), 0) << n_fft;
  }
  set_cpu_threads(threads);
}

TEST(LogMel, NoSamplesGiveNoWindows) {
  const MelFeatures mel = LogMel().extract(std::span<const float>());
  EXPECT_EQ(mel.features.shape(), (Shape{0, 3000, 128}));
  EXPECT_TRUE(mel.real_frames.empty());
}

TEST(LogMel, AToneShowsInItsBinAlone) {
  std::vector<float> samples(16000);
  for (std::size_t i = 0; i < samples.size(); ++i)
    samples[i] = static_cast<float>(0.5 * std::sin(2 * 3.14159265358979 * 1000 * static_cast<double>(i) / 16000));
  const LogMel log_mel({.mel_bins = 80, .window_seconds = 1});
  const MelFeatures mel = log_mel.extract(samples);
  ASSERT_EQ(mel.features.shape(), (Shape{1, 100, 80}));
  // 8000 Hz is 45.25 mel; 80 triangles have their tops at 45.25 / 81 * (bin + 1), so 1000 Hz, 15 mel, lies next to the top of bin 26,
  // at 15.08.
  for (std::int64_t bin = 0; bin < 80; ++bin)
    EXPECT_LE(mel.features.at({0, 50, bin}), mel.features.at({0, 50, 26}) - (std::abs(bin - 26) > 3 ? 0.5 : 0)) << bin;
}

TEST(LogMel, OptionsOutOfRangeAreRefused) {
  expect_error<InvalidArgument>([] { LogMel({.n_fft = 401}); }, {"n_fft is 401", "even and from 16 to 65536"});
  expect_error<InvalidArgument>([] { LogMel({.hop = 0}); }, {"hop is 0", "from 1 to n_fft, 400"});
  expect_error<InvalidArgument>([] { LogMel({.hop = 7}); }, {"hop is 7", "a divisor of a window's 480000 samples"});
  expect_error<InvalidArgument>([] { LogMel({.mel_bins = 1 << 30}); }, {"mel_bins is 1073741824", "from 1 to 1024"});
  expect_error<InvalidArgument>([] { LogMel({.sampling_rate = -1}); }, {"sampling_rate is -1"});
  expect_error<InvalidArgument>([] { LogMel({.window_seconds = 2000000000}); }, {"window_seconds is 2000000000"});
  expect_error<InvalidArgument>([] { LogMel({.sampling_rate = 1000, .n_fft = 2000, .hop = 100, .window_seconds = 1}); }, {"n_fft is 2000"});
  const std::vector<float> longer(480001);
  const std::vector<std::span<const float>> windows = {longer};
  expect_error<InvalidArgument>([&] { LogMel().extract(windows); }, {"window 0 has 480001 samples", "480000"});
}

}  // namespace
}  // namespace tw::speech
