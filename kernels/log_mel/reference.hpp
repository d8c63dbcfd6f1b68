#pragma once

#include <algorithm>
#include <cmath>
#include <complex>
#include <cstdint>
#include <numbers>
#include <vector>

namespace tw::kernels::log_mel {

/// The features of a window of frames * hop samples, [frames, bins]: `samples`, then zeros. `filters`: [bins, n_fft / 2 + 1].
inline std::vector<double> reference(const std::vector<double>& samples, const std::vector<double>& filters, int n_fft, int hop, int frames,
                                     int bins) {
  const std::int64_t window = std::int64_t{frames} * hop;
  const auto sample = [&](std::int64_t at) {
    at = std::abs(at);
    if (at >= window) at = 2 * (window - 1) - at;
    return at < static_cast<std::int64_t>(samples.size()) ? samples[static_cast<std::size_t>(at)] : 0.0;
  };
  const int powers = n_fft / 2 + 1;
  std::vector<std::complex<double>> roots;
  for (int n = 0; n < n_fft; ++n) roots.push_back(std::polar(1.0, -2 * std::numbers::pi * n / n_fft));
  std::vector<double> mel, x(static_cast<std::size_t>(n_fft)), power(static_cast<std::size_t>(powers));
  for (std::int64_t frame = 0; frame < frames; ++frame) {
    for (int n = 0; n < n_fft; ++n) x[n] = sample(frame * hop + n - n_fft / 2) * (1 - roots[n].real()) / 2;
    for (int k = 0; k < powers; ++k) {
      std::complex<double> sum = 0;
      for (int n = 0; n < n_fft; ++n) sum += x[n] * roots[n * k % n_fft];
      power[k] = std::norm(sum);
    }
    for (int bin = 0; bin < bins; ++bin) {
      double sum = 0;
      for (int k = 0; k < powers; ++k) sum += filters[bin * powers + k] * power[k];
      mel.push_back(std::log10(std::max(sum, 1e-10)));
    }
  }
  const double largest = mel.empty() ? 0 : *std::max_element(mel.begin(), mel.end());
  for (double& value : mel) value = (std::max(value, largest - 8) + 4) / 4;
  return mel;
}

}  // namespace tw::kernels::log_mel
