#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "speech/mel/fft.hpp"
#include "speech/segment/vad_weights.hpp"

namespace tw::speech {

/// How likely each step of 10 ms is speech, by a small recurrent network: README.md. One pass, with constant memory.
class SpeechLikelihood {
 public:
  static constexpr int kStep = 160;    ///< samples at 16 kHz
  static constexpr int kWindow = 400;  ///< samples that the spectrum of a step is taken of, with the step in their middle

  SpeechLikelihood();

  /// Adds the next step: its window's samples, with zeros before the first and after the last that exist, of which there are `present`.
  /// Appends the likelihoods that are known now, in [0, 1]: kAhead steps later, and the first ones when the level of kFirstSteps is known.
  void add(std::span<const float, kWindow> samples, int present, std::vector<double>& out);
  /// Appends the likelihoods of all steps added so far, as if the last one went on. More may be added afterwards.
  void flush(std::vector<double>& out);

 private:
  static constexpr int kBands = 20;
  static constexpr int kFirstSteps = 30;
  static constexpr int kInputs = vad_weights::kInputs, kHidden = vad_weights::kHidden, kAhead = vad_weights::kAhead;
  static_assert(kInputs == 2 * kBands + 1);
  using Bands = std::array<float, kBands>;  ///< mean powers in dB of full scale
  using Inputs = std::array<float, kInputs>;
  using Hidden = std::array<float, kHidden>;

  Bands analyze(std::span<const float, kWindow> samples, int present);
  void begin(std::vector<double>& out);
  Inputs observe(const Bands& bands);
  static float run(const Inputs& inputs, Hidden& hidden);
  void judge(const Bands& bands, std::vector<double>& out);

  FftPlan plan_;
  PowerSpectra<TwoLanes> fft_;
  std::array<double, kWindow> window_{};
  std::array<int, kBands + 1> edges_{};  ///< bins of the spectrum
  bool begun_ = false;
  std::vector<Bands> first_;  ///< until begun_
  Bands floor_{}, mean_{};    ///< the bands' noise and mean level
  float peak_ = 0;            ///< the loudest band's recent level
  Inputs last_{};
  Hidden hidden_{};
  std::int64_t seen_ = 0, given_ = 0;  ///< steps that the network has seen, and likelihoods given
};

}  // namespace tw::speech
