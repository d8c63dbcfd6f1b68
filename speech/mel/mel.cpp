#include "speech/mel/mel.hpp"

#include <algorithm>
#include <cmath>
#include <complex>
#include <kissfft/kissfft.hh>
#include <numbers>

#include "runtime/format.hpp"
#include "tilewave/detail/parallel.hpp"

namespace tw::speech {

/// A triangle's weights of the power spectrum's bins [first, first + weights.size()); all others are 0.
struct MelFilter {
  int first = 0;
  std::vector<double> weights;
};

namespace {

constexpr double kHighestFrequency = 8000;  // of the filters, in Hz, at any sampling rate
constexpr double kSmallest = 1e-10;         // below it a bin counts as silent
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

/// A thread's state for processing frames. Each thread has its own transform: with a factor of 7 or more kissfft's functions write to a
/// buffer in it, although they are const.
struct Scratch {
  std::vector<double> x;
  std::vector<std::complex<double>> spectrum;
  kissfft<double> transform;
};

}  // namespace

struct LogMel::Constants {
  explicit Constants(const MelOptions& o) : options(o), filters(make_filters(o)), hann(o.n_fft), transform(o.n_fft / 2, /*inverse=*/false) {
    for (int i = 0; i < o.n_fft; ++i) hann[i] = (1 - std::cos(2 * std::numbers::pi * i / o.n_fft)) / 2;
  }

  /// log10 of the mel bins of the frame centred on sample `centre`, with `samples` followed by zeros up to the window's end.
  void frame(std::span<const float> samples, std::int64_t window_samples, std::int64_t centre, Scratch& scratch, float* mel) const {
    std::vector<double>& x = scratch.x;
    std::vector<std::complex<double>>& spectrum = scratch.spectrum;
    const std::int64_t size = static_cast<std::int64_t>(samples.size());
    const std::int64_t begin = centre - options.n_fft / 2;
    for (int i = 0; i < options.n_fft; ++i) {
      std::int64_t at = std::abs(begin + i);
      if (at >= window_samples) at = 2 * (window_samples - 1) - at;
      x[i] = at < size ? samples[at] * hann[i] : 0;
    }
    scratch.transform.transform_real(x.data(), spectrum.data());
    // The power spectrum overwrites x. The first element holds the two real bins, 0 and n_fft / 2.
    const int half = options.n_fft / 2;
    for (int k = 1; k < half; ++k) x[k] = std::norm(spectrum[k]);
    x[0] = spectrum[0].real() * spectrum[0].real();
    x[half] = spectrum[0].imag() * spectrum[0].imag();
    for (int m = 0; m < options.mel_bins; ++m) {
      double sum = 0;
      const MelFilter& filter = filters[m];
      for (std::size_t k = 0; k < filter.weights.size(); ++k) sum += filter.weights[k] * x[filter.first + k];
      mel[m] = static_cast<float>(std::log10(std::max(sum, kSmallest)));
    }
  }

  MelOptions options;
  std::vector<MelFilter> filters;
  std::vector<double> hann;
  kissfft<double> transform;  // complex, of half the length, for transform_real; only copied from
};

LogMel::LogMel(const MelOptions& options) {
  check(options);
  constants_ = std::make_unique<const Constants>(options);
}
LogMel::~LogMel() = default;
LogMel::LogMel(LogMel&&) noexcept = default;
LogMel& LogMel::operator=(LogMel&&) noexcept = default;

const MelOptions& LogMel::options() const { return constants_->options; }
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
  const std::int64_t longest = window_samples(), frames = window_frames();
  const int bins = options().mel_bins, hop = options().hop, n_fft = options().n_fft;
  MelFeatures result;
  for (std::size_t i = 0; i < windows.size(); ++i) {
    const std::int64_t size = static_cast<std::int64_t>(windows[i].size());
    if (size > longest) throw InvalidArgument(tw::format("log-mel: window {} has {} samples; at most {} are allowed", i, size, longest));
    result.real_frames.push_back((size + hop - 1) / hop);
  }
  result.features = Tensor::empty({static_cast<std::int64_t>(windows.size()), frames, bins}, DType::f32);
  float* const features = result.features.data<float>();

  constexpr std::int64_t kPiece = 64;  // frames of one task: under a millisecond
  const std::int64_t pieces = (frames + kPiece - 1) / kPiece;
  detail::parallel_for(static_cast<long>(static_cast<std::int64_t>(windows.size()) * pieces), [&](long task) {
    const std::span<const float> samples = windows[task / pieces];
    Scratch scratch{std::vector<double>(n_fft), std::vector<std::complex<double>>(n_fft / 2), constants_->transform};
    const std::int64_t first = task % pieces * kPiece;
    for (std::int64_t i = first; i < std::min(first + kPiece, frames); ++i) {
      float* const mel = features + (task / pieces * frames + i) * bins;
      const std::int64_t centre = i * hop;
      // Only padding, as in most of a short segment's window. Near the window's end mirrored samples may reach into it.
      if (centre - n_fft / 2 >= static_cast<std::int64_t>(samples.size()) && centre + n_fft / 2 <= longest)
        std::fill_n(mel, bins, static_cast<float>(std::log10(kSmallest)));
      else
        constants_->frame(samples, longest, centre, scratch, mel);
    }
  });
  detail::parallel_for(static_cast<long>(windows.size()), [&](long window) {
    const std::span<float> mel(features + window * frames * bins, frames * bins);
    const float floor = *std::max_element(mel.begin(), mel.end()) - kDynamicRange;
    for (float& value : mel) value = (std::max(value, floor) + 4) / 4;
  });
  return result;
}

}  // namespace tw::speech
