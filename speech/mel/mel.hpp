#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "tilewave/device.hpp"
#include "tilewave/tensor.hpp"

namespace tw::speech {

/// A feature extractor's configuration: sampling_rate, n_fft, hop_length, feature_size, chunk_length. The defaults are GLM-ASR's.
struct MelOptions {
  int sampling_rate = 16000;  ///< of the samples, in Hz
  int n_fft = 400;            ///< samples of a frame: the transform's length
  int hop = 160;              ///< samples from one frame to the next
  int mel_bins = 128;
  int window_seconds = 30;  ///< audio that one window holds

  friend bool operator==(const MelOptions&, const MelOptions&) = default;
};

struct MelFeatures {
  Tensor features;                        ///< f32 [windows, frames, mel_bins], row-major: what conv1d takes
  std::vector<std::int64_t> real_frames;  ///< of each window, those centred inside the audio: ceil(samples / hop)
};

/// The log-mel spectrogram of Whisper's feature extractor. A window's samples, followed by zeros up to its full length and mirrored by
/// n_fft / 2 at both ends, are cut into frames of n_fft every `hop`; the frame centred on the window's end is omitted. Of each
/// frame x
///
///     power[k] = |DFT(x * hann)[k]|^2, k <= n_fft / 2, hann[i] = (1 - cos(2 pi i / n_fft)) / 2
///     mel[m]   = log10(max(sum_k filter[m, k] power[k], 1e-10))
///     result   = (max(mel, M - 8) + 4) / 4, M the largest mel of the window
///
/// with triangular filters from 0 to 8000 Hz, equally spaced on the mel scale of Slaney's Auditory Toolbox and of area 1. Computed in
/// double on the CPU, or in f32 on a GPU (tw::log_mel). Safe to use from any number of threads; the result does not depend on their number.
class LogMel {
 public:
  /// Computes window and filters. Throws InvalidArgument for options out of range: n_fft even and from 16 to 65536, hop from 1 to n_fft, 1
  /// to 1024 bins, a sampling rate of 1000 to 768000 Hz, windows of 1 to 600 s, longer than n_fft / 2 samples and a multiple of hop.
  ///
  /// `stream`: of the device that computes the features and then holds them. If log_mel() does not support n_fft, it is the CPU instead.
  explicit LogMel(const MelOptions& options = {}, const Stream& stream = Stream::standard(Device::cpu()));
  ~LogMel();
  LogMel(LogMel&&) noexcept;
  LogMel& operator=(LogMel&&) noexcept;

  const MelOptions& options() const;
  const Stream& stream() const;         ///< that features are computed on
  std::int64_t window_samples() const;  ///< sampling_rate * window_seconds
  std::int64_t window_frames() const;   ///< window_samples / hop

  /// Cuts `samples` into windows, the last of which may be short. None give no windows.
  MelFeatures extract(std::span<const float> samples) const;
  /// One window of each of `windows`, of at most window_samples() samples, else InvalidArgument. An empty one is a window of zeros.
  MelFeatures extract(std::span<const std::span<const float>> windows) const;

  /// The filters' weights: f32 [mel_bins, n_fft / 2 + 1] on the CPU.
  Tensor filters() const;

 private:
  struct Constants;
  class OnGpu;
  Tensor extract_on_cpu(std::span<const std::span<const float>> windows) const;
  std::unique_ptr<const Constants> constants_;
  std::unique_ptr<OnGpu> gpu_;  ///< null: features are computed on the CPU
};

}  // namespace tw::speech
