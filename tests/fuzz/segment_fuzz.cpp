// Options, and a recording described by stretches of three bytes each: a length of up to 250 ms, a level, and what kind of sound it is.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "speech/segment/segment.hpp"

namespace {

constexpr int kRate = 1000;  // ten samples a step: the segmenter's own work shows, not the sums'
constexpr std::size_t kStretches = 4096;

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 4) return 0;
  const tw::speech::SegmentOptions options = {.sampling_rate = kRate,
                                              .longest_seconds = 1 + data[0] / 4.0,
                                              .join_below_seconds = 0.3 + data[1] / 50.0,
                                              .margin_seconds = data[2] / 255.0};
  const std::size_t stretches = std::min((size - 3) / 3, kStretches);
  std::vector<float> samples;
  std::vector<std::int64_t> loud;  // samples in the middle of long loud stretches
  std::uint32_t state = 1;
  for (std::size_t i = 0; i < stretches; ++i) {
    const std::uint8_t* const stretch = data + 3 + 3 * i;
    const float level = std::pow(10.0F, -static_cast<float>(stretch[1]) / 51);  // down to -100 dB
    const std::int64_t length = stretch[0];
    const bool noise = stretch[2] % 4 != 0;
    if (noise && length >= 120 && level > 0.1F) loud.push_back(std::ssize(samples) + length / 2);
    for (std::int64_t k = 0; k < length; ++k) {
      state = state * 1664525u + 1013904223u;
      samples.push_back(!noise ? level : static_cast<float>(static_cast<std::int32_t>(state)) / 2147483648.0F * level);
    }
  }
  const std::vector<tw::speech::Segment> segments = tw::speech::cut_at_silences(samples, options);
  const auto longest = static_cast<std::int64_t>(options.longest_seconds * kRate);
  std::int64_t end = 0;
  for (const tw::speech::Segment& s : segments) {
    if (s.begin < end || s.end <= s.begin || s.end - s.begin > longest) std::abort();
    end = s.end;
  }
  if (end > std::ssize(samples)) std::abort();
  for (const std::int64_t at : loud)
    if (std::none_of(segments.begin(), segments.end(), [&](const tw::speech::Segment& s) { return s.begin <= at && at < s.end; }))
      std::abort();
  return 0;
}
