#include "speech/segment/segment.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <optional>

#include "runtime/format.hpp"
#include "speech/audio/audio.hpp"
#include "tilewave/error.hpp"

namespace tw::speech {
namespace {

constexpr int kStepsPerSecond = 100;
constexpr double kQuietest = -100;     // dB of full scale: a step of 16-bit samples is -90
constexpr double kAlwaysSilent = -70;  // dB
constexpr double kAlwaysActive = -45;  // dB: speech cannot be distinguished from steady noise of this level
constexpr double kAboveNoise = 6;      // dB: steady white noise varies by 1 dB from step to step, speech by 30
constexpr int kNoiseReach = 5 * kStepsPerSecond;
constexpr int kNoiseNeeds = 1 * kStepsPerSecond;
constexpr double kNoiseShare = 0.1;    // of the steps: even fast speech has that many pauses and closures
constexpr std::size_t kSteady = 3;     // dB: noise stays that close to its level
constexpr double kSteadyShare = 0.25;  // of the audible steps: speech alone, which varies by 30 dB, has fewer
constexpr int kRunPause = 3 * kStepsPerSecond / 10;
constexpr int kShortestRun = 5;  // a click affects the levels of three steps
constexpr int kShortestCutPause = 2 * kStepsPerSecond / 10;

/// Steps [begin, end).
struct Run {
  std::int64_t begin, end;
};

void check(const SegmentOptions& o) {
  const auto require = [](bool valid, const char* name, double value, const char* allowed) {
    if (!valid) throw InvalidArgument(tw::format("segments: {} is {}; it must be {}", name, value, allowed));
  };
  require(o.sampling_rate >= 1000 && o.sampling_rate <= 768000, "sampling_rate", o.sampling_rate, "from 1000 to 768000");
  require(o.longest_seconds >= 1 && o.longest_seconds <= 3600, "longest_seconds", o.longest_seconds, "from 1 to 3600");
  require(o.join_below_seconds >= 0.3 && o.join_below_seconds <= 3600, "join_below_seconds", o.join_below_seconds, "from 0.3 to 3600");
  require(o.margin_seconds >= 0 && o.margin_seconds <= 1, "margin_seconds", o.margin_seconds, "from 0 to 1");
}

/// The variance of the 30 ms around each step: without the mean, since many sound cards add a constant.
std::vector<double> powers(std::span<const float> samples, std::size_t step) {
  struct Sums {
    double x = 0, xx = 0, n = 0;
  };
  const std::size_t steps = (samples.size() + step - 1) / step;
  std::vector<Sums> sums(steps);
  for (std::size_t i = 0; i < steps; ++i) {
    const std::span<const float> part = samples.subspan(i * step, std::min(step, samples.size() - i * step));
    for (const double x : part) {
      sums[i].x += x;
      sums[i].xx += x * x;
    }
    sums[i].n = static_cast<double>(part.size());
  }
  std::vector<double> result(steps);
  for (std::size_t i = 0; i < steps; ++i) {
    Sums around;
    for (std::size_t j = i == 0 ? 0 : i - 1; j < std::min(i + 2, steps); ++j) {
      around.x += sums[j].x;
      around.xx += sums[j].xx;
      around.n += sums[j].n;
    }
    const double mean = around.x / around.n;
    result[i] = std::max(around.xx / around.n - mean * mean, 0.0);
  }
  return result;
}

/// The number of steps for each level, in bins of 1 dB from kQuietest up; the last bin is 0 dB and more.
using Histogram = std::array<int, 101>;

/// The level that kNoiseShare of the steps in bins from `first` on stay below.
std::size_t noise_bin(const Histogram& histogram, std::size_t first, int steps) {
  std::size_t bin = first;
  for (double below = histogram[bin]; below <= kNoiseShare * steps; below += histogram[bin]) ++bin;
  return bin;
}

/// The noise among these steps, in dB: rule 1 of the header.
double noise_level(const Histogram& histogram) {
  constexpr std::size_t kFirstHeard = static_cast<std::size_t>(kAlwaysSilent - kQuietest);
  const auto count = [&](std::size_t from, std::size_t to) { return std::accumulate(histogram.begin() + from, histogram.begin() + to, 0); };
  const int heard = count(kFirstHeard, histogram.size());
  if (heard >= kNoiseNeeds) {
    const std::size_t bin = noise_bin(histogram, kFirstHeard, heard);
    const int near = count(bin - kSteady, std::min(bin + kSteady + 1, histogram.size()));
    if (near >= kSteadyShare * heard) return kQuietest + static_cast<double>(bin);
  }
  return kQuietest + static_cast<double>(noise_bin(histogram, 0, count(0, histogram.size())));
}

/// Whether each step may be speech: rule 1 of the header.
std::vector<char> active_steps(const std::vector<double>& power) {
  const std::int64_t steps = static_cast<std::int64_t>(power.size());
  const auto level = [&](std::int64_t i) { return 10 * std::log10(std::max(power[i], 1e-10)); };
  Histogram histogram{};  // of the levels within the window
  const auto bin = [&](std::int64_t i) { return static_cast<std::size_t>(std::clamp(std::floor(level(i) - kQuietest), 0.0, 100.0)); };
  std::int64_t begin = 0, end = 0;  // the steps counted
  std::vector<char> active(power.size());
  for (std::int64_t i = 0; i < steps; ++i) {
    for (; end < std::min(i + kNoiseReach + 1, steps); ++end) ++histogram[bin(end)];
    for (; begin < i - kNoiseReach; ++begin) --histogram[bin(begin)];
    double threshold = kAlwaysSilent;
    if (end - begin >= kNoiseNeeds) threshold = std::clamp(noise_level(histogram) + kAboveNoise, kAlwaysSilent, kAlwaysActive);
    active[i] = level(i) > threshold;
  }
  return active;
}

/// Runs of active steps with pauses below kRunPause, without clicks: rule 2.
std::vector<Run> find_runs(const std::vector<char>& active) {
  std::vector<Run> runs;
  std::int64_t count = 0;  // active steps of the last run
  const auto drop_click = [&] {
    if (!runs.empty() && count < kShortestRun) runs.pop_back();
  };
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(active.size()); ++i) {
    if (!active[i]) continue;
    if (count == 0 || i - runs.back().end >= kRunPause) {
      if (count > 0) drop_click();
      runs.push_back({i, i});
      count = 0;
    }
    runs.back().end = i + 1;
    ++count;
  }
  if (count > 0) drop_click();
  return runs;
}

/// Where to cut an island whose segment begins at sample `begin`: the steps of the pause; empty (begin == end) without a pause.
class Cutter {
 public:
  Cutter(const std::vector<double>& power, const std::vector<char>& active, std::int64_t step, std::int64_t longest)
      : power_(power), active_(active), step_(step), longest_(longest) {}

  Run cut(std::int64_t begin) const {
    const std::optional<Run> pause = longest_pause((begin + longest_ / 3) / step_ + 1, (begin + longest_) / step_);
    if (pause) return *pause;
    return quietest((begin + longest_ * 2 / 3) / step_ + 1, (begin + longest_) / step_);
  }

 private:
  /// The longest pause whose middle is in steps [first, last]; the last one of equal length.
  std::optional<Run> longest_pause(std::int64_t first, std::int64_t last) const {
    const std::int64_t steps = static_cast<std::int64_t>(active_.size());
    std::int64_t at = first;
    while (at > 0 && !active_[at - 1]) --at;
    std::optional<Run> best;
    for (; at <= last && at < steps; ++at) {
      if (active_[at]) continue;
      Run pause{at, at};
      while (pause.end < steps && !active_[pause.end]) ++pause.end;
      at = pause.end;
      const std::int64_t length = pause.end - pause.begin, middle = (pause.begin + pause.end) / 2;
      if (length < kShortestCutPause || middle < first || middle > last) continue;
      if (!best || length >= best->end - best->begin) best = pause;
    }
    return best;
  }

  /// The middle of the quietest kShortestCutPause steps, from `first` to `last`.
  Run quietest(std::int64_t first, std::int64_t last) const {
    std::int64_t best = first;
    double least = 0;
    for (std::int64_t middle = first; middle <= last; ++middle) {
      double sum = 0;
      const std::int64_t from = middle - kShortestCutPause / 2;
      for (std::int64_t i = std::max<std::int64_t>(from, 0); i < std::min<std::int64_t>(from + kShortestCutPause, std::ssize(power_)); ++i)
        sum += power_[i];
      if (middle == first || sum <= least) {
        best = middle;
        least = sum;
      }
    }
    return {best, best};
  }

  const std::vector<double>& power_;
  const std::vector<char>& active_;
  std::int64_t step_, longest_;
};

/// Rules 2 to 4 on the steps of `samples` that are active.
std::vector<Segment> cut(std::int64_t size, const std::vector<double>& power, const std::vector<char>& active,
                         const SegmentOptions& options) {
  const std::int64_t step = options.sampling_rate / kStepsPerSecond;
  const auto in_samples = [&](double seconds) { return static_cast<std::int64_t>(seconds * options.sampling_rate); };
  const std::int64_t longest = in_samples(options.longest_seconds), margin = in_samples(options.margin_seconds);

  // At most a third of a segment, so that it can be cut outside the pause in which it begins.
  const std::int64_t join_below = in_samples(std::min(options.join_below_seconds, options.longest_seconds / 3));

  std::vector<char> speech(active.size());  // active and not a click
  std::vector<Segment> islands;             // rule 3, without margins
  for (const Run& run : find_runs(active)) {
    std::copy(active.begin() + run.begin, active.begin() + run.end, speech.begin() + run.begin);
    const Segment island{run.begin * step, std::min(run.end * step, size)};
    if (!islands.empty() && island.begin - islands.back().end < join_below)
      islands.back().end = island.end;
    else
      islands.push_back(island);
  }

  const Cutter cutter(power, speech, step, longest);
  std::vector<Segment> segments;
  for (std::size_t i = 0; i < islands.size(); ++i) {
    const Segment& island = islands[i];
    const std::int64_t before = i == 0 ? island.begin : (island.begin - islands[i - 1].end) / 2;
    const std::int64_t after = i + 1 == islands.size() ? size - island.end : (islands[i + 1].begin - island.end) / 2;
    // Speech that fits into one segment is not cut for the sake of its margins.
    const std::int64_t room = island.end - island.begin <= longest ? (longest - (island.end - island.begin)) / 2 : margin;
    std::int64_t begin = island.begin - std::min({margin, before, room});
    while (island.end - begin > longest) {
      const Run pause = cutter.cut(begin);
      const std::int64_t middle = (pause.begin + pause.end) / 2 * step;
      segments.push_back({begin, std::min(pause.begin * step + margin, middle)});
      begin = std::max(pause.end * step - margin, middle);
    }
    segments.push_back({begin, island.end + std::min({margin, after, longest - (island.end - begin)})});
  }
  return segments;
}

}  // namespace

std::vector<Segment> cut_at_silences(std::span<const float> samples, const SegmentOptions& options) {
  check(options);
  const std::vector<double> power = powers(samples, static_cast<std::size_t>(options.sampling_rate / kStepsPerSecond));
  return cut(std::ssize(samples), power, active_steps(power), options);
}

std::vector<Segment> cut_at_speech(std::span<const float> samples, const SegmentOptions& options) {
  check(options);
  if (options.sampling_rate != kSamplingRate)
    throw InvalidArgument(
        tw::format("segments: sampling_rate is {}; voice activity is detected at {} only", options.sampling_rate, kSamplingRate));
  constexpr std::int64_t kStep = kSamplingRate / kStepsPerSecond;
  const std::vector<double> power = powers(samples, kStep);
  std::vector<char> active(power.size());
  // Without margins and with all pauses, which rules 2 to 4 judge.
  for (const Segment& span : detect_speech(samples, {.prefix_seconds = 0, .suffix_seconds = 0, .silence_seconds = 0.1}))
    std::fill(active.begin() + span.begin / kStep, active.begin() + std::min((span.end + kStep - 1) / kStep, std::ssize(active)), char{1});
  return cut(std::ssize(samples), power, active, options);
}

std::vector<Segment> segments_of(std::span<const float> samples, Segmentation segmentation, double longest_seconds) {
  switch (segmentation) {
    case Segmentation::automatic:
      return cut_at_silences(samples, {.longest_seconds = longest_seconds});
    case Segmentation::vad:
      return cut_at_speech(samples, {.longest_seconds = longest_seconds});
    case Segmentation::none:
      break;
  }
  if (samples.empty()) return {};
  return {{0, std::ssize(samples)}};
}

}  // namespace tw::speech
