#include "speech/mel/mel.hpp"

#include <algorithm>
#include <cmath>
#include <mutex>
#include <numbers>

#include "runtime/format.hpp"
#include "runtime/pinned.hpp"
#include "speech/mel/fft.hpp"
#include "tilewave/detail/parallel.hpp"
#include "tilewave/log_mel.hpp"
#include "tilewave/tile/cpu/library.tile.hpp"

namespace tw::speech {

/// A triangle's weights of the power spectrum's bins [first, first + weights.size()); all others are 0.
struct MelFilter {
  int first = 0;
  std::vector<double> weights;
};

namespace {

constexpr double kHighestFrequency = 8000;  // of the filters, in Hz, at any sampling rate
constexpr double kSmallest = 1e-10;         // below it a bin counts as silent
constexpr float kSilence = -10;             // its logarithm
constexpr float kDynamicRange = 8;          // decades below a window's maximum that are distinguished

// The mel scale of Slaney's Auditory Toolbox: linear up to 1000 Hz (15 mel), then 27 mel for a factor of 6.4.
double hertz_from_mel(double mel) { return mel < 15 ? mel * 200 / 3 : 1000 * std::exp((mel - 15) * std::log(6.4) / 27); }
double mel_from_hertz(double hertz) { return hertz < 1000 ? hertz * 3 / 200 : 15 + std::log(hertz / 1000) * 27 / std::log(6.4); }

std::vector<MelFilter> make_filters(const MelOptions& options) {
  std::vector<double> corners(options.mel_bins + 2);
  for (int i = 0; i < options.mel_bins + 2; ++i)
    corners[i] = hertz_from_mel(mel_from_hertz(kHighestFrequency) * i / (options.mel_bins + 1));
  std::vector<MelFilter> filters(options.mel_bins);
  const int half = options.n_fft / 2;
  const double nyquist = options.sampling_rate / 2;  // whole Hz, as in the reference implementation
  for (int m = 0; m < options.mel_bins; ++m) {
    const double left = corners[m], top = corners[m + 1], right = corners[m + 2];
    MelFilter& filter = filters[m];
    for (int k = 0; k <= half; ++k) {
      const double hertz = nyquist * k / half;
      const double height = std::min((hertz - left) / (top - left), (right - hertz) / (right - top));
      if (height <= 0) continue;
      if (filter.weights.empty()) filter.first = k;
      filter.weights.push_back(height * 2 / (right - left));
    }
  }
  return filters;
}

void check(const MelOptions& o) {
  const auto require = [](bool valid, const char* name, int value, const std::string& allowed) {
    if (!valid) throw InvalidArgument(tw::format("log-mel: {} is {}; it must be {}", name, value, allowed));
  };
  require(o.sampling_rate >= 1000 && o.sampling_rate <= 768000, "sampling_rate", o.sampling_rate, "from 1000 to 768000");
  require(o.n_fft >= 16 && o.n_fft <= 65536 && o.n_fft % 2 == 0, "n_fft", o.n_fft, "even and from 16 to 65536");
  require(o.hop >= 1 && o.hop <= o.n_fft, "hop", o.hop, tw::format("from 1 to n_fft, {}", o.n_fft));
  require(o.mel_bins >= 1 && o.mel_bins <= 1024, "mel_bins", o.mel_bins, "from 1 to 1024");
  require(o.window_seconds >= 1 && o.window_seconds <= 600, "window_seconds", o.window_seconds, "from 1 to 600");
  const int samples = o.sampling_rate * o.window_seconds;
  require(samples % o.hop == 0, "hop", o.hop, tw::format("a divisor of a window's {} samples", samples));
  require(o.n_fft / 2 < samples, "n_fft", o.n_fft, tw::format("less than twice a window's {} samples", samples));
}

/// Samples [begin, begin + count) of a window: `samples`, then zeros up to `window` samples, mirrored at both ends.
std::vector<float> mirrored(std::span<const float> samples, std::int64_t window, std::int64_t begin, std::int64_t count) {
  std::vector<float> result(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) {
    std::int64_t at = std::abs(begin + i);
    if (at >= window) at = 2 * (window - 1) - at;
    if (at >= 0 && at < std::ssize(samples)) result[i] = samples[at];
  }
  return result;
}

/// log10 of positive numbers that are not subnormal, to 4e-16 of their logarithm to base 2; NaN of NaN and infinity.
template <class Lanes>
void log10(typename Lanes::Numbers& x) {
  using Numbers = typename Lanes::Numbers;
  using Bits = typename Lanes::Bits;
  // x = 2^e m with sqrt(1/2) <= m < sqrt(2); ln m = 2 artanh(s), s = (m - 1) / (m + 1), whose series ends below 2^-60.
  constexpr std::uint64_t kRootHalf = 0x3fe6a09e667f3bcd, kExponent = std::uint64_t{1} << 52;
  constexpr int kBias = 1024;  // makes e positive
  const Bits above = reinterpret_cast<Bits>(x) - kRootHalf + kBias * kExponent;
  const Numbers m = reinterpret_cast<Numbers>((above & (kExponent - 1)) + kRootHalf);
  // An integer added to the bits of 2^52 is added to its value.
  const Numbers e = reinterpret_cast<Numbers>((above >> 52) + (1023 + 52) * kExponent) - (0x1p52 + kBias);
  const Numbers s = (m - 1) / (m + 1), s2 = s * s;
  Numbers series = {};
  for (int k = 21; k >= 1; k -= 2) series = series * s2 + 1.0 / k;
  x = e * (std::numbers::ln2 / std::numbers::ln10) + s * series * (2 / std::numbers::ln10) + (x - x);
}

}  // namespace

struct LogMel::Constants {
  explicit Constants(const MelOptions& o) : options(o), filters(make_filters(o)), hann(o.n_fft), fft(o.n_fft) {
    for (int i = 0; i < o.n_fft; ++i) hann[i] = (1 - std::cos(2 * std::numbers::pi * i / o.n_fft)) / 2;
  }

  /// log10 of the mel bins of `count` frames, the first of which begins at `x`. Samples for `count` rounded up to a multiple of kMostLanes
  /// must be there. Returns the largest.
  float frames(const float* x, int count, float* mel) const {
#if defined(__x86_64__)
    if (cpu::vector_bytes() >= 32) return frames_avx2(x, count, mel);
#endif
    return frames_with<TwoLanes>(x, count, mel);
  }
  static constexpr int kMostLanes = FourLanes::count;

  MelOptions options;
  std::vector<MelFilter> filters;
  std::vector<double> hann;
  FftPlan fft;

 private:
#if defined(__x86_64__)
  [[gnu::target("avx2,fma"), gnu::flatten]] float frames_avx2(const float* x, int count, float* mel) const {
    return frames_with<FourLanes>(x, count, mel);
  }
#endif

  /// The same for several frames at a time.
  template <class Lanes>
  float frames_with(const float* x, int count, float* mel) const {
    constexpr int kLanes = Lanes::count;
    const int hop = options.hop, bins = options.mel_bins, n_fft = options.n_fft;
    PowerSpectra<Lanes> spectra(fft);
    float largest = kSilence;
    for (; count > 0; count -= kLanes, x += kLanes * hop, mel += kLanes * bins) {
      const int used = std::min(kLanes, count);
      if (std::all_of(x, x + (kLanes - 1) * hop + n_fft, [](float sample) { return sample == 0; })) {
        std::fill_n(mel, used * bins, kSilence);  // as in most of a short segment's window
        continue;
      }
      for (int i = 0; i < n_fft; i += 2) {
        auto& pair = spectra.signals()[i / 2];
        for (int lane = 0; lane < kLanes; ++lane) {
          pair.re[lane] = x[lane * hop + i] * hann[i];
          pair.im[lane] = x[lane * hop + i + 1] * hann[i + 1];
        }
      }
      const auto* const power = spectra.run();
      for (int m = 0; m < bins; ++m) {
        typename Lanes::Numbers sum = {};
        const MelFilter& filter = filters[m];
        for (std::size_t k = 0; k < filter.weights.size(); ++k) sum += filter.weights[k] * power[filter.first + k].re;
        sum = sum < kSmallest ? typename Lanes::Numbers{} + kSmallest : sum;
        log10<Lanes>(sum);
        for (int lane = 0; lane < used; ++lane) {
          mel[lane * bins + m] = static_cast<float>(sum[lane]);
          largest = std::max(largest, mel[lane * bins + m]);
        }
      }
    }
    return largest;
  }
};

/// What tw::log_mel() takes.
class LogMel::OnGpu {
 public:
  OnGpu(const Stream& on, const Tensor& filters, int hop) : stream(on), tables_(LogMelTables::make(filters, on)), hop_(hop) {}

  const Stream stream;

  /// Features of `frames` each.
  Tensor features(std::span<const std::span<const float>> windows, std::int64_t frames) {
    const std::int64_t count = std::ssize(windows);
    std::int64_t longest = 0;
    for (const std::span<const float> window : windows) longest = std::max(longest, std::ssize(window));
    const Tensor uploaded = Tensor::empty({count, longest}, DType::f32, stream);
    const std::lock_guard lock(mutex_);
    uploaded.copy_from(staged(windows, longest), stream);
    const Tensor result = Tensor::empty({count, frames, tables_.mel_bins()}, DType::f32, stream);
    log_mel(uploaded, tables_, result, {.hop = hop_, .stream = stream});
    stream.synchronize();
    return result;
  }

 private:
  /// The windows side by side in memory that the GPU copies from fastest, each followed by zeros up to `longest`.
  Tensor staged(std::span<const std::span<const float>> windows, std::int64_t longest) {
    const std::int64_t count = std::ssize(windows);
    if (count * longest > room_) {
      memory_ = allocate_pinned(static_cast<std::size_t>(count * longest) * sizeof(float), stream.device());
      room_ = count * longest;
    }
    if (count * longest == 0) return Tensor::empty({count, longest}, DType::f32);
    const Tensor all = Tensor::borrow(memory_.get(), {count, longest}, DType::f32, Device::cpu());
    constexpr std::int64_t kPiece = 1 << 15;  // samples of one task, some ten microseconds
    const std::int64_t pieces = (longest + kPiece - 1) / kPiece;
    detail::parallel_for(static_cast<long>(count * pieces), [&](long task) {
      const std::span<const float> window = windows[task / pieces];
      const std::int64_t begin = task % pieces * kPiece, end = std::min(begin + kPiece, longest);
      const std::int64_t first = std::min(begin, std::ssize(window)), last = std::min(end, std::ssize(window));
      float* const row = all.data<float>() + task / pieces * longest;
      std::copy(window.data() + first, window.data() + last, row + first);
      std::fill(row + std::max(begin, last), row + end, 0.0f);
    });
    return all;
  }

  LogMelTables tables_;
  int hop_;
  std::mutex mutex_;  // of what follows, until the GPU has read it
  std::shared_ptr<void> memory_;
  std::int64_t room_ = 0;  // samples
};

LogMel::LogMel(const MelOptions& options, const Stream& stream) {
  check(options);
  constants_ = std::make_unique<const Constants>(options);
  if (stream.device().is_cuda() && supports_log_mel(options.n_fft)) gpu_ = std::make_unique<OnGpu>(stream, filters(), options.hop);
}
LogMel::~LogMel() = default;
LogMel::LogMel(LogMel&&) noexcept = default;
LogMel& LogMel::operator=(LogMel&&) noexcept = default;

const MelOptions& LogMel::options() const { return constants_->options; }
const Stream& LogMel::stream() const {
  static const Stream& cpu = *new Stream(Stream::standard(Device::cpu()));
  return gpu_ ? gpu_->stream : cpu;
}
std::int64_t LogMel::window_samples() const { return std::int64_t{options().sampling_rate} * options().window_seconds; }
std::int64_t LogMel::window_frames() const { return window_samples() / options().hop; }

MelFeatures LogMel::extract(std::span<const float> samples) const {
  std::vector<std::span<const float>> windows;
  const std::size_t longest = static_cast<std::size_t>(window_samples());
  for (std::size_t begin = 0; begin < samples.size(); begin += longest)
    windows.push_back(samples.subspan(begin, std::min(longest, samples.size() - begin)));
  return extract(windows);
}

MelFeatures LogMel::extract(std::span<const std::span<const float>> windows) const {
  const std::int64_t longest = window_samples();
  const int hop = options().hop;
  MelFeatures result;
  for (std::size_t i = 0; i < windows.size(); ++i) {
    const std::int64_t size = static_cast<std::int64_t>(windows[i].size());
    if (size > longest) throw InvalidArgument(tw::format("log-mel: window {} has {} samples; at most {} are allowed", i, size, longest));
    result.real_frames.push_back((size + hop - 1) / hop);
  }
  result.features = gpu_ ? gpu_->features(windows, window_frames()) : extract_on_cpu(windows);
  return result;
}

Tensor LogMel::filters() const {
  const std::int64_t bins = options().mel_bins, powers = options().n_fft / 2 + 1;
  const Tensor all = Tensor::zeros({bins, powers}, DType::f32, Stream::standard(Device::cpu()));
  for (std::int64_t m = 0; m < bins; ++m) {
    const MelFilter& filter = constants_->filters[m];
    for (std::int64_t k = 0; k < std::ssize(filter.weights); ++k)
      all.data<float>()[m * powers + filter.first + k] = static_cast<float>(filter.weights[k]);
  }
  return all;
}

Tensor LogMel::extract_on_cpu(std::span<const std::span<const float>> windows) const {
  const std::int64_t longest = window_samples(), frames = window_frames();
  const int bins = options().mel_bins, hop = options().hop, n_fft = options().n_fft;
  const Tensor result = Tensor::empty({std::ssize(windows), frames, bins}, DType::f32);
  float* const features = result.data<float>();

  constexpr std::int64_t kPiece = 64;  // frames of one task: under a millisecond
  const std::int64_t pieces = (frames + kPiece - 1) / kPiece;
  std::vector<float> largest(static_cast<std::size_t>(std::ssize(windows) * pieces));
  detail::parallel_for(static_cast<long>(largest.size()), [&](long task) {
    const std::int64_t first = task % pieces * kPiece, count = std::min(kPiece, frames - first);
    const std::int64_t needed = (count + Constants::kMostLanes - 1) * hop + n_fft;
    const std::vector<float> x = mirrored(windows[task / pieces], longest, first * hop - n_fft / 2, needed);
    float* const mel = features + (task / pieces * frames + first) * bins;
    largest[task] = constants_->frames(x.data(), static_cast<int>(count), mel);
  });
  detail::parallel_for(static_cast<long>(largest.size()), [&](long task) {
    const auto of_window = largest.begin() + task / pieces * pieces;
    const float floor = *std::max_element(of_window, of_window + pieces) - kDynamicRange;
    const std::int64_t first = task % pieces * kPiece, count = std::min(kPiece, frames - first);
    float* const mel = features + (task / pieces * frames + first) * bins;
    for (std::int64_t i = 0; i < count * bins; ++i) mel[i] = (std::max(mel[i], floor) + 4) / 4;
  });
  return result;
}

}  // namespace tw::speech
