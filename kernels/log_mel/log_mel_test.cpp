// log_mel() against a direct transform in double, on the CPU and, where there is one, on a GPU; bad inputs.

#include "tilewave/log_mel.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "kernels/log_mel/reference.hpp"
#include "runtime/format.hpp"
#include "tests/expect_error.hpp"
#include "tests/support.hpp"

namespace tw::kernels::log_mel {
namespace {

using namespace tw::test;

class LogMelKernel : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override { skip_unless_present(device); }
  int pick(int low, int high) { return low + static_cast<int>(random() % static_cast<unsigned>(high - low + 1)); }
  Tensor on_device(const Tensor& t) const { return device.is_cuda() ? t.to(device) : t; }

  /// Triangles of `taps` weights or fewer anywhere, and one filter without weights.
  Tensor filters_of(int bins, int n_fft, int taps) {
    const int powers = n_fft / 2 + 1;
    const Tensor filters = Tensor::zeros({bins, powers}, DType::f32, Stream::standard(Device::cpu()));
    for (int bin = 1; bin < bins; ++bin) {
      const int count = pick(1, taps), first = bin == 1 ? powers - count : pick(0, powers - count);
      for (int n = 0; n < count; ++n)
        filters.data<float>()[bin * powers + first + n] = 0.01f * static_cast<float>(std::min(n + 1, count - n));
    }
    return filters;
  }

  struct Errors {
    double l2, largest;  ///< relative to the reference's norm; absolute
  };
  /// `value(i)`: sample i. After the first `count` samples the window is zero.
  template <class Value>
  Errors errors(int windows, int frames, int n_fft, int hop, int bins, int taps, int count, Value value) {
    const Tensor filters = filters_of(bins, n_fft, taps);
    std::vector<float> samples;
    for (int i = 0; i < windows * count; ++i) samples.push_back(value(i));
    const Tensor x = on_device(Tensor::from<float>(samples, {windows, count}));
    const Stream stream = Stream::standard(device);
    const Tensor features = Tensor::poisoned({windows, frames, bins}, DType::f32, stream);
    tw::log_mel(x, LogMelTables::make(filters, stream), features, {.hop = hop});
    const Tensor host = features.to(Device::cpu());
    const std::vector<double> weights(filters.data<float>(), filters.data<float>() + filters.numel());
    double difference = 0, norm = 0, largest = 0;
    for (int window = 0; window < windows; ++window) {
      const std::vector<double> own(samples.begin() + window * count, samples.begin() + (window + 1) * count);
      const std::vector<double> expected = reference(own, weights, n_fft, hop, frames, bins);
      for (std::size_t i = 0; i < expected.size(); ++i) {
        const double error = host.data<float>()[static_cast<std::size_t>(window) * expected.size() + i] - expected[i];
        difference += error * error;
        norm += expected[i] * expected[i];
        largest = error == error ? std::max(largest, std::abs(error)) : kInf;
      }
    }
    return {std::sqrt(difference / norm), largest};
  }
  float noise() { return std::uniform_real_distribution<float>(-1, 1)(random); }

  const Device device = GetParam();
  std::mt19937_64 random = random_engine();
};

INSTANTIATE_TEST_SUITE_P(Ops, LogMelKernel, testing::ValuesIn(kDevices), device_name);

// The bounds of README.md.
TEST_P(LogMelKernel, NoiseOfAnyShape) {
  struct Case {
    int windows, frames, n_fft, hop, bins, taps, samples;
  };
  // One tile of frames, one more and one less; chunks of bins; windows that end early or are empty; every hop; windows barely long enough.
  for (const Case& c : {Case{1, 32, 400, 160, 128, 10, 32 * 160}, Case{2, 33, 400, 160, 80, 3, 2000}, Case{1, 31, 400, 7, 129, 201, 31 * 7},
                        Case{3, 2, 400, 101, 1, 1, 202}, Case{1, 40, 512, 400, 257, 20, 40 * 400}, Case{1, 1, 400, 400, 5, 30, 400},
                        Case{1, 5, 512, 160, 128, 10, 0}, Case{2, 70, 400, 80, 13, 8, 1}}) {
    const Errors e = errors(c.windows, c.frames, c.n_fft, c.hop, c.bins, c.taps, c.samples, [&](int) { return noise(); });
    SCOPED_TRACE(tw::format("[{}, {}, {}], n_fft {}, hop {}, {} samples", c.windows, c.frames, c.bins, c.n_fft, c.hop, c.samples));
    EXPECT_LT(e.l2, 1e-6);
    EXPECT_LT(e.largest, 1e-4);
  }
}

TEST_P(LogMelKernel, BinsFarBelowTheLargestKeepTheirDigits) {
  // A tone: the window's leakage falls to the floor of 80 dB.
  const Errors tone = errors(1, 64, 400, 160, 128, 10, 64 * 160, [](int i) { return static_cast<float>(std::sin(0.37 * i)); });
  EXPECT_LT(tone.l2, 1e-5);
  EXPECT_LT(tone.largest, 1e-4);
  const Errors clicks = errors(1, 64, 400, 160, 128, 10, 64 * 160, [](int i) { return i % 701 == 0 ? 1.0f : 0.0f; });
  EXPECT_LT(clicks.l2, 1e-6);
  const Errors faint = errors(1, 64, 400, 160, 128, 10, 64 * 160, [&](int) { return 1e-5f * noise(); });
  EXPECT_LT(faint.l2, 1e-6);
}

TEST_P(LogMelKernel, EveryWindowHasItsOwnMaximum) {
  const Stream stream = Stream::standard(device);
  const LogMelTables tables = LogMelTables::make(filters_of(128, 400, 10), stream);
  const int frames = 100, count = frames * 160;
  std::vector<float> samples(static_cast<std::size_t>(3 * count));
  for (int i = 0; i < count; ++i) samples[i] = noise(), samples[2 * count + i] = 1e-4f * noise();
  const Tensor x = on_device(Tensor::from<float>(samples, {3, count}));
  const Tensor all = Tensor::poisoned({3, frames, 128}, DType::f32, stream), one = Tensor::poisoned({1, frames, 128}, DType::f32, stream);
  tw::log_mel(x, tables, all);
  for (int window = 0; window < 3; ++window) {
    tw::log_mel(x.slice(0, window, window + 1), tables, one);
    EXPECT_EQ(max_difference(all.slice(0, window, window + 1), one), 0) << window;
  }
  // Silence: every bin is log10(1e-10).
  const Tensor silence = Tensor::from<float>(std::vector<float>(frames * 128, -1.5f), {1, frames, 128});
  EXPECT_LT(max_difference(all.slice(0, 1, 2).to(Device::cpu()), silence), 1e-6);
}

TEST_P(LogMelKernel, NaNOfASampleReachesItsFrames) {
  const Stream stream = Stream::standard(device);
  std::vector<float> samples(16000);
  for (float& x : samples) x = noise();
  samples[8000] = kNaN;
  const Tensor features = Tensor::poisoned({1, 100, 128}, DType::f32, stream);
  Tensor filters = filters_of(128, 400, 10);
  tw::log_mel(on_device(Tensor::from<float>(samples, {1, 16000})), LogMelTables::make(filters, stream), features);
  const Tensor host = features.to(Device::cpu());
  EXPECT_TRUE(std::isnan(host.at({0, 50, 5})));
  EXPECT_TRUE(std::isfinite(host.at({0, 40, 5})));
}

TEST_P(LogMelKernel, BadInput) {
  const Stream stream = Stream::standard(device);
  const Tensor filters = filters_of(128, 400, 10);
  const LogMelTables tables = LogMelTables::make(filters, stream);
  const Tensor x = Tensor::zeros({2, 16000}, DType::f32, stream), y = Tensor::zeros({2, 100, 128}, DType::f32, stream);
  const auto refused = [&](auto call, std::initializer_list<std::string_view> parts) { expect_error<InvalidArgument>(call, parts); };
  refused([&] { tw::log_mel(x, tables, y, {.hop = 0}); }, {"log_mel: hop is 0", "1 to n_fft, 400"});
  refused([&] { tw::log_mel(x, tables, y, {.hop = 159}); }, {"log_mel: samples is", "[2, up to 15900]"});
  refused([&] { tw::log_mel(x.slice(0, 0, 1), tables, y); }, {"log_mel: samples is", "[2, up to 16000]"});
  refused([&] { tw::log_mel(x, tables, y.slice(2, 0, 64)); }, {"log_mel: features is", "contiguous, [windows, frames, 128]"});
  refused(
      [&] {
        tw::log_mel(x.slice(1, 0, 160), tables, Tensor::zeros({2, 1, 128}, DType::f32, stream));
      },
      {"log_mel: features is", "n_fft / 2"});
  refused([&] { tw::log_mel(Tensor::zeros({2, 16000}, DType::f16, stream), tables, y); }, {"log_mel: samples is f16", "f32"});
  refused([&] { tw::log_mel(y.reshape({2, 12800}), tables, y); }, {"log_mel: features", "samples"});
  refused(
      [&] {
        LogMelTables::make(Tensor::zeros({80, 200}, DType::f32, Stream::standard(Device::cpu())), stream);
      },
      {"log_mel: filters is", "n_fft of 398", "400 and 512"});
  refused([&] { LogMelTables::make(Tensor::zeros({1025, 201}, DType::f32, Stream::standard(Device::cpu())), stream); }, {"1 to 1024 bins"});
  EXPECT_EQ(max_difference(y, Tensor::zeros({2, 100, 128}, DType::f32, stream)), 0);
}

}  // namespace
}  // namespace tw::kernels::log_mel
