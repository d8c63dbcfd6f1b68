#include "runtime/tune.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <tuple>

#include "runtime/dry_run.hpp"
#include "runtime/format.hpp"
#include "runtime/gpu.hpp"
#include "runtime/jit.hpp"
#include "runtime/recording.hpp"
#include "runtime/tuned.hpp"
#include "tilewave/error.hpp"

namespace tw {
namespace {

constexpr double kBurstMs = 1;           // launches between two events: long compared with the cost of the events
constexpr int kMostLaunches = 128;       // per burst
constexpr double kWarmUpMs = 100;        // until the GPU's clock is stable
constexpr double kMeasurementMs = 1500;  // at most, if that leaves kLeastRounds
constexpr int kLeastRounds = 5;
constexpr double kHopeless = 2;        // a candidate this many times slower than the fastest is dropped
constexpr std::size_t kFinalists = 3;  // in addition to the standard

using Work = std::function<void()>;
using Timer = std::function<std::vector<double>(const std::vector<Work>&)>;

double quantile(std::vector<double> values, double fraction) {
  std::sort(values.begin(), values.end());
  const double position = fraction * static_cast<double>(values.size() - 1);
  const auto below = static_cast<std::size_t>(position);
  const std::size_t above = std::min(below + 1, values.size() - 1);
  return values[below] + (position - static_cast<double>(below)) * (values[above] - values[below]);
}
double median(std::vector<double> values) { return quantile(std::move(values), 0.5); }

/// Times with events. The first function runs once more to keep the GPU busy while the host enqueues the rest, so that nothing waits for
/// the host.
std::vector<double> time_by_events(const Stream& stream, const std::vector<Work>& works) {
  std::vector<std::pair<Event, Event>> events;
  works.front()();
  for (const Work& work : works) {
    auto& [begin, end] = events.emplace_back(Event(stream.device()), Event(stream.device()));
    begin.record(stream);
    work();
    end.record(stream);
  }
  std::vector<double> milliseconds;
  for (const auto& [begin, end] : events) milliseconds.push_back(Event::milliseconds(begin, end));
  return milliseconds;
}

/// A candidate that works.
struct Contender {
  TuneCandidate* candidate;
  double once = 0;   ///< milliseconds of one launch, roughly
  int launches = 1;  ///< per burst
  std::optional<Graph> burst = {};
};

/// How the candidates of one problem are launched and timed.
class Measurement {
 public:
  Measurement(const TuneProblem& problem, const TuneOptions& options, const Stream& stream)
      : problem_(problem), options_(options), stream_(stream) {
    timer_ = options.timer ? options.timer : [stream](const std::vector<Work>& works) { return time_by_events(stream, works); };
  }

  void say(const std::string& text) const {
    if (options_.progress) options_.progress(text);
  }

  /// Launches the candidate for the first time. False if it does not work.
  bool try_first(TuneCandidate& candidate) const {
    try {
      problem_.launch(candidate.point);
      stream_.synchronize();
      if (problem_.check) candidate.problem = problem_.check(candidate.point);
      return candidate.problem.empty();
    } catch (const std::exception& error) {
      candidate.problem = error.what();
    }
    try {
      stream_.synchronize();
    } catch (const std::exception& error) {  // this process can no longer use the device
      throw Error(tw::format("tune {}: the candidate {} stopped the device: {}", problem_.name, candidate.point.text(), error.what()));
    }
    return false;
  }

  /// Fills in Contender::once, which includes the host's part of a launch.
  void estimate(std::vector<Contender>& contenders) const {
    std::vector<Work> works;
    for (const Contender& c : contenders) works.emplace_back([this, &c] { problem_.launch(c.candidate->point); });
    using Clock = std::chrono::steady_clock;
    const auto deadline = Clock::now() + std::chrono::duration<double, std::milli>(stream_.device().is_cuda() ? kWarmUpMs : 0);
    while (Clock::now() < deadline) {
      for (const Work& work : works) work();
      stream_.synchronize();
    }
    for (int round = 0; round < 3; ++round) {
      const std::vector<double> times = timer_(works);
      for (std::size_t i = 0; i < times.size(); ++i) {
        double& once = contenders[i].once;
        once = round == 0 ? times[i] : std::min(once, times[i]);
      }
    }
  }

  /// False if the candidate's launches cannot be captured.
  bool capture(Contender& contender) const {
    contender.launches = static_cast<int>(std::clamp(std::ceil(kBurstMs / std::max(contender.once, 1e-4)), 1.0, double{kMostLaunches}));
    try {
      contender.burst = Graph::capture(stream_, [launch = problem_.launch, point = contender.candidate->point, n = contender.launches] {
        for (int i = 0; i < n; ++i) launch(point);
      });
      return true;
    } catch (const std::exception& error) {
      contender.candidate->problem = error.what();
      return false;
    }
  }

  /// The milliseconds per launch of each contender in each round. The order within a round is random, so that changes of the device's speed
  /// affect all contenders alike.
  std::vector<std::vector<double>> measure(const std::vector<const Contender*>& contenders, int rounds) {
    double expected = 0;
    for (const Contender* c : contenders) expected += c->once * c->launches;
    rounds = std::clamp(static_cast<int>(kMeasurementMs / std::max(expected, 1e-3)), std::min(kLeastRounds, rounds), rounds);
    std::vector<std::vector<double>> samples(contenders.size());
    std::vector<std::size_t> order(contenders.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    for (int round = 0; round < rounds; ++round) {
      std::shuffle(order.begin(), order.end(), random_);
      std::vector<Work> works;
      for (const std::size_t i : order) works.emplace_back([this, c = contenders[i]] { c->burst->replay(stream_); });
      const std::vector<double> times = timer_(works);
      for (std::size_t i = 0; i < order.size(); ++i) samples[order[i]].push_back(times[i] / contenders[order[i]]->launches);
    }
    return samples;
  }

 private:
  const TuneProblem& problem_;
  const TuneOptions& options_;
  Stream stream_;
  Timer timer_;
  std::mt19937 random_{std::random_device{}()};
};

bool same(const std::optional<TunePoint>& standard, const TunePoint& point) { return standard && *standard == point; }

/// "bm=64,bn=32: did not compile ...; bm=..."
std::string problems_of(const std::vector<TuneCandidate>& candidates) {
  std::string text;
  for (const TuneCandidate& c : candidates) text += tw::format("\n  {}: {}", c.point.text(), c.problem);
  return text;
}

}  // namespace

std::vector<int> every(int first, int last, int step) {
  if (step <= 0) throw InvalidArgument(tw::format("every: step is {}; it must be positive", step));
  std::vector<int> values;
  for (std::int64_t value = first; value <= last; value += step) values.push_back(static_cast<int>(value));
  return values;
}

int TunePoint::operator[](std::string_view name) const {
  if (names_ != nullptr) {
    const auto found = std::find(names_->begin(), names_->end(), name);
    if (found != names_->end()) return values_[static_cast<std::size_t>(found - names_->begin())];
  }
  throw InvalidArgument(
      tw::format("tune: there is no range \"{}\"; there are: {}", name, names_ != nullptr ? tw::join(*names_, ", ") : std::string()));
}

std::string TunePoint::text() const {
  std::string text;
  for (std::size_t i = 0; i < values_.size(); ++i) text += tw::format("{}{}={}", i > 0 ? "," : "", (*names_)[i], values_[i]);
  return text;
}

TuneSpace::TuneSpace(std::vector<TuneRange> ranges, std::function<bool(const TunePoint&)> valid)
    : ranges_(std::move(ranges)), valid_(std::move(valid)) {
  if (ranges_.empty()) throw InvalidArgument("tune: the space has no ranges; at least one is needed");
  auto names = std::make_shared<std::vector<std::string>>();
  for (const TuneRange& range : ranges_) {
    if (range.name.empty()) throw InvalidArgument("tune: a range has an empty name");
    if (std::find(names->begin(), names->end(), range.name) != names->end())
      throw InvalidArgument(tw::format("tune: two ranges are called \"{}\"; names must be unique", range.name));
    if (range.values.empty()) throw InvalidArgument(tw::format("tune: range \"{}\" has no values; at least one is needed", range.name));
    names->push_back(range.name);
  }
  names_ = std::move(names);
}

std::vector<TunePoint> TuneSpace::points() const {
  std::vector<TunePoint> points;
  std::vector<std::size_t> at(ranges_.size(), 0);
  for (bool more = true; more;) {
    TunePoint point;
    point.names_ = names_;
    for (std::size_t i = 0; i < at.size(); ++i) point.values_.push_back(ranges_[i].values[at[i]]);
    if (!valid_ || valid_(point)) points.push_back(std::move(point));
    std::size_t range = at.size();
    for (more = false; range > 0 && !more; --range) {
      more = ++at[range - 1] < ranges_[range - 1].values.size();
      if (!more) at[range - 1] = 0;
    }
  }
  return points;
}

std::optional<TunePoint> TuneSpace::find(const std::vector<int>& values) const {
  if (values.size() != ranges_.size()) return {};
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::vector<int>& known = ranges_[i].values;
    if (std::find(known.begin(), known.end(), values[i]) == known.end()) return {};
  }
  TunePoint point;
  point.names_ = names_;
  point.values_ = values;
  if (valid_ && !valid_(point)) return {};
  return point;
}

std::string TuneSpace::text() const {
  std::string text;
  for (const TuneRange& range : ranges_)
    text += tw::format("{}{} {{{}}}", text.empty() ? "" : ", ", range.name, tw::join(range.values, ", "));
  return text;
}

std::vector<TuneCandidate> tune_candidates(const TuneSpace& space, const TuneProblem& problem, int most) {
  if (most < 1) throw InvalidArgument(tw::format("tune {}: candidates is {}; at least 1 is needed", problem.name, most));
  std::vector<TuneCandidate> candidates;
  for (TunePoint& point : space.points()) candidates.push_back({.point = std::move(point)});
  if (candidates.empty()) throw InvalidArgument(tw::format("tune {}: no point of the space is valid: {}", problem.name, space.text()));
  if (problem.standard &&
      std::none_of(candidates.begin(), candidates.end(), [&](const TuneCandidate& c) { return c.point == *problem.standard; }))
    candidates.push_back({.point = *problem.standard});
  const auto wanted = static_cast<std::size_t>(most);
  std::vector<TuneCandidate> chosen;
  if (problem.predict) {
    for (TuneCandidate& c : candidates) c.predicted = problem.predict(c.point);
    std::stable_sort(candidates.begin(), candidates.end(), [](const auto& a, const auto& b) { return a.predicted < b.predicted; });
    for (std::size_t i = 0; i < candidates.size(); ++i)
      if (i < wanted || same(problem.standard, candidates[i].point)) chosen.push_back(candidates[i]);
  } else {
    const std::size_t count = std::min(wanted, candidates.size());
    std::set<std::size_t> picked;
    for (std::size_t i = 0; i < count; ++i) picked.insert(i * candidates.size() / count);
    for (std::size_t i = 0; i < candidates.size(); ++i)
      if (picked.contains(i) || same(problem.standard, candidates[i].point)) chosen.push_back(candidates[i]);
  }
  return chosen;
}

std::vector<KernelSpec> kernels_of(const std::function<void()>& launch) {
  std::vector<KernelSpec> specs;
  const RecordLaunches recording(specs);
  launch();
  return specs;
}

std::vector<KernelSpec> kernels_of_candidates(const TuneProblem& problem, std::vector<TuneCandidate>& candidates) {
  std::vector<KernelSpec> specs;
  for (TuneCandidate& candidate : candidates) {
    try {
      const std::vector<KernelSpec> own = kernels_of([&] { problem.launch(candidate.point); });
      specs.insert(specs.end(), own.begin(), own.end());
    } catch (const std::exception& error) {
      candidate.problem = error.what();
    }
  }
  return specs;
}

void compile_candidates(const std::vector<KernelSpec>& specs, const Stream& stream, const std::function<void(std::string_view)>& progress) {
  compile_ahead(unique_kernels(specs), architecture(Gpu::get(stream.device().index).compute_capability()),
                [&](std::size_t done, std::size_t all) {
                  if (progress) progress(tw::format("compiling {} of {} kernels", std::min(done + 1, all), all));
                });
}

TuneResult tune(const TuneSpace& space, const TuneProblem& problem, const TuneOptions& options) {
  if (problem.name.empty()) throw InvalidArgument("tune: the problem's name is empty");
  if (!problem.launch) throw InvalidArgument(tw::format("tune {}: the problem has no launch", problem.name));
  if (options.rounds < 1) throw InvalidArgument(tw::format("tune {}: rounds is {}; at least 1 is needed", problem.name, options.rounds));
  const Stream stream = options.stream ? *options.stream : Stream::standard(Device::cpu());
  TuneResult result{.best = {}, .candidates = tune_candidates(space, problem, options.candidates)};
  std::vector<TuneCandidate>& candidates = result.candidates;
  if (options.keep) require_tuned_folder();  // fail before minutes of work
  Measurement measurement(problem, options, stream);
  if (stream.device().is_cuda()) compile_candidates(kernels_of_candidates(problem, candidates), stream, options.progress);

  // The standard first: the results of the others are compared with its own.
  std::vector<TuneCandidate*> order;
  for (TuneCandidate& c : candidates) order.push_back(&c);
  std::stable_partition(order.begin(), order.end(), [&](const TuneCandidate* c) { return same(problem.standard, c->point); });
  std::vector<Contender> working;
  for (std::size_t i = 0; i < order.size(); ++i) {
    measurement.say(tw::format("first launches: {} of {}: {}", i + 1, order.size(), order[i]->point.text()));
    if (order[i]->problem.empty() && measurement.try_first(*order[i])) working.push_back({.candidate = order[i]});
  }
  if (!working.empty()) measurement.estimate(working);
  double fastest = std::numeric_limits<double>::infinity();
  for (const Contender& c : working) fastest = std::min(fastest, c.once);
  std::erase_if(working, [&](const Contender& c) {
    if (c.once <= kHopeless * fastest || same(problem.standard, c.candidate->point)) return false;
    c.candidate->milliseconds = c.once;
    c.candidate->problem = tw::format("its first launches took {:.1f} times as long as the fastest's", c.once / fastest);
    return true;
  });
  std::erase_if(working, [&](Contender& c) { return !measurement.capture(c); });
  if (working.empty()) throw Error(tw::format("tune {}: no candidate works:{}", problem.name, problems_of(candidates)));

  std::vector<const Contender*> contenders;
  for (const Contender& c : working) contenders.push_back(&c);
  measurement.say(tw::format("timing {} candidates", contenders.size()));
  const std::vector<std::vector<double>> first = measurement.measure(contenders, (options.rounds + 1) / 2);
  for (std::size_t i = 0; i < contenders.size(); ++i) contenders[i]->candidate->milliseconds = median(first[i]);

  // The minimum of many measured times is biased by chance, so the best few are measured again together with the standard.
  std::stable_sort(contenders.begin(), contenders.end(),
                   [](const Contender* a, const Contender* b) { return a->candidate->milliseconds < b->candidate->milliseconds; });
  const auto is_standard = [&](const Contender* c) { return same(problem.standard, c->candidate->point); };
  std::vector<const Contender*> finalists;
  for (const Contender* c : contenders)
    if (is_standard(c) || finalists.size() < kFinalists) finalists.push_back(c);
  measurement.say(tw::format("timing the best {} again", finalists.size()));
  const std::vector<std::vector<double>> second = measurement.measure(finalists, options.rounds);
  std::size_t best = 0;
  std::optional<std::size_t> standard;
  for (std::size_t i = 0; i < finalists.size(); ++i) {
    finalists[i]->candidate->milliseconds = median(second[i]);
    if (is_standard(finalists[i])) standard = i;
    if (finalists[i]->candidate->milliseconds < finalists[best]->candidate->milliseconds) best = i;
  }
  if (standard && best != *standard) {
    std::vector<double> gains;  // round by round, because disturbances of a round affect both
    for (std::size_t round = 0; round < second[best].size(); ++round) gains.push_back(second[*standard][round] / second[best][round]);
    if (median(gains) < options.least_gain || quantile(gains, 0.25) <= 1) best = *standard;
  }
  result.best = finalists[best]->candidate->point;
  result.milliseconds = finalists[best]->candidate->milliseconds;
  if (standard) result.standard_milliseconds = finalists[*standard]->candidate->milliseconds;
  if (options.keep) keep_tuned(stream.device(), problem.name, {result.best.text(), result.best.values()});
  return result;
}

std::optional<TunePoint> tuned(const TuneSpace& space, std::string_view name, Device device) {
  const TunedChoices& choices = tuned_choices(device);
  const auto found = choices.find(name);
  return found == choices.end() ? std::nullopt : space.find(found->second.values);
}

}  // namespace tw
