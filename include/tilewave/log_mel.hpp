#pragma once

#include <optional>

#include "tilewave/tensor.hpp"

namespace tw {

/// What log_mel() computes with, on a device.
struct LogMelTables {
  Tensor roots;    ///< f32 [n_fft, 2]: cos(2 pi n / n_fft), -sin(2 pi n / n_fft)
  Tensor hann;     ///< f32 [n_fft]: (1 - cos(2 pi n / n_fft)) / 2
  Tensor first;    ///< i32 [mel_bins]: of each filter the first bin k that it may weigh
  Tensor weights;  ///< f32 [taps, mel_bins]: the weights of the bins from `first` on

  int n_fft() const { return static_cast<int>(hann.shape(0)); }
  int mel_bins() const { return static_cast<int>(first.shape(0)); }

  /// `filters`: f32 [mel_bins, n_fft / 2 + 1] on the CPU, contiguous, 1 to 1024 bins. log_mel() is the faster the fewer neighbouring
  /// weights of a filter are not 0. Throws InvalidArgument for another tensor, and for an n_fft that log_mel() does not support.
  static LogMelTables make(const Tensor& filters, const Stream& stream);
};

struct LogMelOptions {
  int hop = 160;                      ///< samples from one frame to the next: 1 to n_fft
  std::optional<Stream> stream = {};  ///< default: the device's standard stream
};

/// Whether log_mel() has a transform of this length: 400 and 512.
bool supports_log_mel(int n_fft);

/// The log-mel spectrogram of Whisper's feature extractor, in f32. A window of frames * hop samples, mirrored by n_fft / 2 at both ends, is
/// cut into frames of n_fft every `hop`. Of each frame x
///
///     power[k] = |DFT(x * hann)[k]|^2, k <= n_fft / 2
///     mel[m]   = log10(max(sum_k filter[m, k] power[k], 1e-10))
///     features = (max(mel, M - 8) + 4) / 4, M the largest mel of the window
///
/// `samples`: f32 [windows, n], n at most frames * hop, with contiguous rows; a window's other samples are 0. `features`: f32 [windows,
/// frames, mel_bins], contiguous, with frames * hop > n_fft / 2. All on one device. The error of a transform is 1e-7 of its largest value,
/// so bins far below their frame's largest lose digits: README.md of kernels/log_mel has the figures.
///
/// Enqueues on the stream and returns (on the CPU: done when it returns). Throws InvalidArgument for shapes, dtypes, strides or devices
/// that do not fit, with nothing written; CompileError, DeviceError.
void log_mel(const Tensor& samples, const LogMelTables& tables, const Tensor& features, const LogMelOptions& options = {});

}  // namespace tw
