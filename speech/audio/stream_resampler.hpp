#pragma once

#include <memory>
#include <span>
#include <vector>

namespace tw::speech {

/// resample() for audio that arrives in pieces.
class StreamResampler {
 public:
  /// From `rate` Hz to kSamplingRate. Throws InvalidArgument unless it is 1000 to 768000.
  explicit StreamResampler(int rate);
  ~StreamResampler();
  StreamResampler(StreamResampler&&) noexcept;
  StreamResampler& operator=(StreamResampler&&) noexcept;

  /// The next samples, which must be finite. The result lags behind them by 40 ms or less, 0.12 s at 8000 Hz.
  std::vector<float> feed(std::span<const float> samples);
  /// The rest of the result. feed() begins anew afterwards.
  std::vector<float> finish();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tw::speech
