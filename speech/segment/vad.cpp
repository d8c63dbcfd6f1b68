#include "speech/segment/vad.hpp"

#include <algorithm>
#include <cmath>
#include <deque>
#include <numbers>
#include <string>

#include "runtime/format.hpp"
#include "speech/audio/audio.hpp"
#include "tilewave/error.hpp"
#include "tilewave/voice_activity.hpp"

namespace tw::speech {
namespace {

// tools/train_vad.py computes the network's inputs in the same way.
constexpr int kVadFft = 512;
constexpr double kLowestHertz = 120, kHighestHertz = 6500;
constexpr float kQuietestBand = -90;  // dB of full scale
constexpr float kFloorFall = 0.1F;    // of the distance, per step: noise is found in a short pause
constexpr float kFloorRise = 0.03F;   // dB per step: a sentence of 10 s does not become noise
constexpr float kMeanRate = 0.01F;    // a time constant of 1 s
constexpr float kPeakFall = 0.02F;    // dB per step

/// The network's matrices as numbers.
struct Network {
  static constexpr int kRows = 3 * vad_weights::kHidden;
  float input[kRows][vad_weights::kInputs], recurrent[kRows][vad_weights::kHidden];

  Network() {
    for (int row = 0; row < kRows; ++row) {
      for (int i = 0; i < vad_weights::kInputs; ++i)
        input[row][i] = vad_weights::kInputScale[row] * static_cast<float>(vad_weights::kInput[row][i]);
      for (int i = 0; i < vad_weights::kHidden; ++i)
        recurrent[row][i] = vad_weights::kRecurrentScale[row] * static_cast<float>(vad_weights::kRecurrent[row][i]);
    }
  }
};

float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }

}  // namespace

SpeechLikelihood::SpeechLikelihood() : plan_(kVadFft), fft_(plan_) {
  for (int n = 0; n < kWindow; ++n) window_[n] = 0.5 - 0.5 * std::cos(2 * std::numbers::pi * (n + 0.5) / kWindow);
  const double lowest = std::log1p(kLowestHertz / 700), highest = std::log1p(kHighestHertz / 700);  // the mel scale
  for (int b = 0; b <= kBands; ++b) {
    const double hertz = 700 * std::expm1(lowest + (highest - lowest) * b / kBands);
    edges_[b] = static_cast<int>(std::lround(hertz * kVadFft / kSamplingRate));
    if (b > 0) edges_[b] = std::max(edges_[b], edges_[b - 1] + 1);
  }
}

SpeechLikelihood::Bands SpeechLikelihood::analyze(std::span<const float, kWindow> samples, int present) {
  double mean = 0;
  for (const float x : samples) mean += x;
  mean /= present;  // many sound cards add a constant
  auto* const signals = fft_.signals();
  for (int n = 0; n < kVadFft / 2; ++n) {
    const auto at = [&](int i) { return i < kWindow && samples[i] != 0 ? window_[i] * (samples[i] - mean) : 0.0; };
    signals[n].re = TwoLanes::Numbers{at(2 * n), 0};
    signals[n].im = TwoLanes::Numbers{at(2 * n + 1), 0};
  }
  const auto* const power = fft_.run();
  Bands bands;
  for (int b = 0; b < kBands; ++b) {
    double sum = 0;
    for (int k = edges_[b]; k < edges_[b + 1]; ++k) sum += power[k].re[0];
    const double scaled = sum / (edges_[b + 1] - edges_[b]) / (0.375 * kWindow);  // the mean square of the window is 0.375
    bands[b] = std::max(static_cast<float>(10 * std::log10(std::max(scaled, 1e-20))), kQuietestBand);
  }
  return bands;
}

void SpeechLikelihood::add(std::span<const float, kWindow> samples, int present, std::vector<double>& out) {
  const Bands bands = analyze(samples, present);
  if (begun_) return judge(bands, out);
  first_.push_back(bands);
  if (std::ssize(first_) == kFirstSteps) begin(out);
}

void SpeechLikelihood::begin(std::vector<double>& out) {
  begun_ = true;
  floor_ = first_[0];
  mean_ = {};
  for (const Bands& bands : first_) {
    for (int b = 0; b < kBands; ++b) {
      floor_[b] = std::min(floor_[b], bands[b]);
      mean_[b] += bands[b] / static_cast<float>(first_.size());
    }
  }
  peak_ = kQuietestBand;
  for (const Bands& bands : first_) judge(bands, out);
  first_ = {};
}

SpeechLikelihood::Inputs SpeechLikelihood::observe(const Bands& bands) {
  Inputs inputs;
  for (int b = 0; b < kBands; ++b) {
    const float above = bands[b] - floor_[b];
    floor_[b] += above < 0 ? kFloorFall * above : std::min(above, kFloorRise);
    mean_[b] += kMeanRate * (bands[b] - mean_[b]);
    inputs[b] = (bands[b] - floor_[b]) / 10;
    inputs[kBands + b] = (bands[b] - mean_[b]) / 10;
  }
  const float level = *std::max_element(bands.begin(), bands.end());
  peak_ = std::max(peak_ - kPeakFall, level);
  inputs[2 * kBands] = (level - peak_) / 10;
  return inputs;
}

/// A step of a gated recurrent unit (Cho et al. 2014), as PyTorch defines it, and the output's likelihood.
float SpeechLikelihood::run(const Inputs& inputs, Hidden& hidden) {
  static const Network network;
  std::array<float, Network::kRows> from_input, from_hidden;
  for (int row = 0; row < Network::kRows; ++row) {
    float a = vad_weights::kInputBias[row], b = vad_weights::kRecurrentBias[row];
    for (int i = 0; i < kInputs; ++i) a += network.input[row][i] * inputs[i];
    for (int i = 0; i < kHidden; ++i) b += network.recurrent[row][i] * hidden[i];
    from_input[row] = a;
    from_hidden[row] = b;
  }
  float score = vad_weights::kOutputBias;
  for (int i = 0; i < kHidden; ++i) {
    const float reset = sigmoid(from_input[i] + from_hidden[i]);
    const float update = sigmoid(from_input[kHidden + i] + from_hidden[kHidden + i]);
    const float fresh = std::tanh(from_input[2 * kHidden + i] + reset * from_hidden[2 * kHidden + i]);
    hidden[i] = (1 - update) * fresh + update * hidden[i];
    score += vad_weights::kOutput[i] * hidden[i];
  }
  return sigmoid(score);
}

void SpeechLikelihood::judge(const Bands& bands, std::vector<double>& out) {
  last_ = observe(bands);
  const float likelihood = run(last_, hidden_);
  const std::int64_t step = seen_++ - kAhead;  // that it is of
  if (step < given_) return;
  out.push_back(likelihood);
  ++given_;
}

void SpeechLikelihood::flush(std::vector<double>& out) {
  if (!begun_ && !first_.empty()) begin(out);
  Hidden hidden = hidden_;
  for (std::int64_t step = seen_ - kAhead; step < seen_; ++step) {
    const float likelihood = run(last_, hidden);
    if (step < given_) continue;
    out.push_back(likelihood);
    ++given_;
  }
}

namespace {

constexpr int kOnsetSteps = 5;    // speech begins with so many active steps: clicks are shorter,
constexpr int kOnsetWithin = 10;  // of so many

void check(const VoiceActivityOptions& o) {
  const auto require = [](bool valid, const char* name, double value, const std::string& allowed) {
    if (!valid) throw InvalidArgument(tw::format("voice activity: {} is {}; it must be {}", name, value, allowed));
  };
  require(o.threshold >= 0 && o.threshold <= 1, "threshold", o.threshold, "from 0 to 1");
  require(o.prefix_seconds >= 0 && o.prefix_seconds <= 5, "prefix_seconds", o.prefix_seconds, "from 0 to 5");
  require(o.silence_seconds >= 0.1 && o.silence_seconds <= 10, "silence_seconds", o.silence_seconds, "from 0.1 to 10");
  require(o.suffix_seconds >= 0 && o.suffix_seconds <= o.silence_seconds, "suffix_seconds", o.suffix_seconds,
          tw::format("from 0 to silence_seconds, {}", o.silence_seconds));
}

}  // namespace

struct VoiceActivityDetector::State {
  using Kind = VoiceEvent::Kind;
  using Events = std::vector<VoiceEvent>;
  static constexpr int kStep = SpeechLikelihood::kStep, kWindow = SpeechLikelihood::kWindow;
  static constexpr int kBefore = (kWindow - kStep) / 2;  // samples of a window before its step

  double threshold;
  std::int64_t prefix, suffix, silence;  // samples
  SpeechLikelihood likelihood = {};
  std::vector<float> kept = {};  // the samples [kept_begin, position)
  std::int64_t kept_begin = 0, position = 0;
  std::int64_t analyzed = 0, decided = 0;  // steps
  std::deque<std::int64_t> active = {};    // of the last kOnsetWithin steps, while nobody is speaking
  bool speaking = false;
  std::int64_t last_end = 0;  // the sample where the last active step ends, while somebody is speaking
  std::int64_t stopped_at = 0;
  std::vector<double> scores = {};

  explicit State(const VoiceActivityOptions& o) {
    check(o);
    const auto samples = [](double seconds) { return static_cast<std::int64_t>(std::llround(seconds * kSamplingRate)); };
    threshold = o.threshold;
    prefix = samples(o.prefix_seconds);
    suffix = samples(o.suffix_seconds);
    silence = samples(o.silence_seconds);
  }

  void feed(std::span<const float> samples, Events& events) {
    kept.insert(kept.end(), samples.begin(), samples.end());
    position += std::ssize(samples);
    while (analyzed * kStep - kBefore + kWindow <= position) analyze_next();
    const std::int64_t needed = std::clamp<std::int64_t>(analyzed * kStep - kBefore, kept_begin, position);
    kept.erase(kept.begin(), kept.begin() + (needed - kept_begin));
    kept_begin = needed;
    decide(events);
  }

  void finish(Events& events) {
    while (analyzed * kStep < position) analyze_next();
    likelihood.flush(scores);
    decide(events);
    if (speaking) stop(events);
    active.clear();
  }

  void analyze_next() {
    std::array<float, kWindow> window{};
    const std::int64_t from = analyzed++ * kStep - kBefore, begin = std::max(from, kept_begin), end = std::min(from + kWindow, position);
    std::copy(kept.begin() + (begin - kept_begin), kept.begin() + (end - kept_begin), window.begin() + (begin - from));
    likelihood.add(window, static_cast<int>(end - begin), scores);
  }

  void decide(Events& events) {
    for (const double score : scores) {
      const std::int64_t step = decided++, end = (step + 1) * kStep;
      const bool is_active = score > threshold;
      if (speaking) {
        if (is_active) last_end = end;
        if (end - last_end >= silence) stop(events);
        continue;
      }
      while (!active.empty() && active.front() <= step - kOnsetWithin) active.pop_front();
      if (is_active) active.push_back(step);
      if (std::ssize(active) < kOnsetSteps) continue;
      speaking = true;
      last_end = end;
      events.push_back({Kind::started, std::max(active.front() * kStep - prefix, stopped_at)});
      active.clear();
    }
    scores.clear();
  }

  void stop(Events& events) {
    speaking = false;
    stopped_at = std::min(last_end + suffix, position);
    events.push_back({Kind::stopped, stopped_at});
  }

  std::int64_t horizon() const {
    if (speaking) return std::min(last_end, position);
    return std::clamp((active.empty() ? decided : active.front()) * kStep - prefix, stopped_at, position);
  }
};

VoiceActivityDetector::VoiceActivityDetector(const VoiceActivityOptions& options) : state_(std::make_unique<State>(options)) {}
VoiceActivityDetector::~VoiceActivityDetector() = default;
VoiceActivityDetector::VoiceActivityDetector(VoiceActivityDetector&&) noexcept = default;
VoiceActivityDetector& VoiceActivityDetector::operator=(VoiceActivityDetector&&) noexcept = default;

std::vector<VoiceEvent> VoiceActivityDetector::feed(std::span<const float> samples) {
  const auto bad = std::find_if(samples.begin(), samples.end(), [](float x) { return !std::isfinite(x); });
  if (bad != samples.end())
    throw InvalidArgument(
        tw::format("voice activity: sample {} is {}; samples must be finite", state_->position + (bad - samples.begin()), *bad));
  std::vector<VoiceEvent> events;
  constexpr std::size_t kPiece = 1 << 14;  // so that little is copied of a long recording at a time
  for (std::size_t at = 0; at < samples.size(); at += kPiece)
    state_->feed(samples.subspan(at, std::min(kPiece, samples.size() - at)), events);
  return events;
}

std::vector<VoiceEvent> VoiceActivityDetector::finish() {
  std::vector<VoiceEvent> events;
  state_->finish(events);
  return events;
}

bool VoiceActivityDetector::speaking() const { return state_->speaking; }
std::int64_t VoiceActivityDetector::position() const { return state_->position; }
std::int64_t VoiceActivityDetector::horizon() const { return state_->horizon(); }

std::vector<Segment> detect_speech(std::span<const float> samples, const VoiceActivityOptions& options) {
  VoiceActivityDetector detector(options);
  std::vector<VoiceEvent> events = detector.feed(samples);
  const std::vector<VoiceEvent> rest = detector.finish();
  events.insert(events.end(), rest.begin(), rest.end());
  std::vector<Segment> spans;
  for (std::size_t i = 0; i + 1 < events.size(); i += 2) spans.push_back({events[i].sample, events[i + 1].sample});
  return spans;
}

}  // namespace tw::speech
