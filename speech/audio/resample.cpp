#include <soxr.h>

#include <cmath>

#include "runtime/format.hpp"
#include "speech/audio/audio.hpp"
#include "tilewave/speech.hpp"

namespace tw::speech {

std::vector<float> resample(std::span<const float> samples, int rate) {
  constexpr int kLowest = 1000, kHighest = 768000;  // as of files
  if (rate < kLowest || rate > kHighest)
    throw InvalidArgument(tw::format("resample: rate is {} Hz; {} to {} are allowed", rate, kLowest, kHighest));
  if (rate == kSamplingRate || samples.empty()) return {samples.begin(), samples.end()};
  for (std::size_t n = 0; n < samples.size(); ++n)
    if (!std::isfinite(samples[n])) throw InvalidArgument(tw::format("resample: sample {} is {}; samples must be finite", n, samples[n]));
  const std::size_t numerator = kSamplingRate, denominator = static_cast<std::size_t>(rate);
  std::vector<float> out(samples.size() / denominator * numerator +
                         (samples.size() % denominator * numerator + denominator - 1) / denominator);
  const soxr_io_spec_t io = soxr_io_spec(SOXR_FLOAT32_I, SOXR_FLOAT32_I);
  const soxr_quality_spec_t quality = soxr_quality_spec(SOXR_HQ, 0);
  std::size_t used = 0, made = 0;
  if (const soxr_error_t error = soxr_oneshot(rate, kSamplingRate, 1, samples.data(), samples.size(), &used, out.data(), out.size(), &made,
                                              &io, &quality, nullptr))
    throw Error(tw::format("soxr: {}", soxr_strerror(error)));
  out.resize(made);
  return out;
}

}  // namespace tw::speech
