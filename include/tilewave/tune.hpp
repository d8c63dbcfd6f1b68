#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tilewave/launch.hpp"

// Finds the fastest tile sizes, stages and other values of a kernel for one problem by timing it, and keeps them:
//
//   const tw::TuneSpace space({{"bm", {64, 128}}, {"bn", tw::every(32, 256, 32)}, {"stages", tw::every(2, 8)}},
//                             [](const tw::TunePoint& p) { return p["stages"] * (p["bm"] + p["bn"]) * 128 <= 200 * 1024; });
//   const auto launch = [&](const tw::TunePoint& p) { ... };  // the kernel with p["bm"], p["bn"] and p["stages"], on `stream`
//   const std::string name = "my_matmul f16 M=4096,N=4096,K=4096";
//   const tw::TuneResult result = tw::tune(space, {.name = name, .launch = launch}, {.stream = stream});
//
//   if (const auto kept = tw::tuned(space, name, stream.device())) launch(*kept);  // later, in this process or another

namespace tw {

/// A parameter and the values to choose from.
struct TuneRange {
  std::string name;
  std::vector<int> values;
};

/// first, first + step, ... up to `last`.
std::vector<int> every(int first, int last, int step = 1);

/// A value for each range of a space.
class TunePoint {
 public:
  /// Throws InvalidArgument, which lists the names, for one that is no range's.
  int operator[](std::string_view name) const;
  /// In the order of the ranges.
  const std::vector<int>& values() const { return values_; }
  /// "bm=128,bn=256,stages=4".
  std::string text() const;
  friend bool operator==(const TunePoint& a, const TunePoint& b) { return a.values_ == b.values_; }

 private:
  friend class TuneSpace;
  std::shared_ptr<const std::vector<std::string>> names_;
  std::vector<int> values_;
};

/// All combinations of values from named ranges that a rule allows.
class TuneSpace {
 public:
  /// Throws InvalidArgument for no range, one without values, and names that are empty or not unique. Without a rule all are valid.
  explicit TuneSpace(std::vector<TuneRange> ranges, std::function<bool(const TunePoint&)> valid = {});

  /// The valid points; the last range varies fastest.
  std::vector<TunePoint> points() const;
  /// The point of these values, or nothing if they are not in the ranges or not valid.
  std::optional<TunePoint> find(const std::vector<int>& values) const;
  /// The ranges for people: "bm {64, 128}, stages {2, 3, 4}".
  std::string text() const;

 private:
  std::vector<TuneRange> ranges_;
  std::function<bool(const TunePoint&)> valid_;
  std::shared_ptr<const std::vector<std::string>> names_;
};

/// What is tuned.
struct TuneProblem {
  /// The kernel and everything that the best values depend on: element types, extents, layouts. Kept values are found by it.
  std::string name;
  /// Enqueues the kernel with these values on the stream. Called many times, also while the stream is captured into a graph: it must not
  /// allocate or synchronise.
  std::function<void(const TunePoint&)> launch;
  /// The expected time in any unit: the candidates are the points that have the least. Without it they are spread evenly over the space.
  std::function<double(const TunePoint&)> predict = {};
  /// What is used without tuning. It is always a candidate, and kept unless another is faster in a second measurement.
  std::optional<TunePoint> standard = {};
  /// Says what is wrong with a candidate's results, or nothing if they are right. Called once for each candidate, the standard first, when
  /// it has run.
  std::function<std::string(const TunePoint&)> check = {};
};

/// A point that was worth trying.
struct TuneCandidate {
  TunePoint point;
  double predicted = 0;      ///< what TuneProblem::predict said
  double milliseconds = 0;   ///< the median; 0: not timed
  std::string problem = {};  ///< why it was not timed to the end: it did not compile, did not launch, was far slower
};

struct TuneOptions {
  std::optional<Stream> stream = {};  ///< default: the CPU's
  int candidates = 16;                ///< to compile and time, at most
  int rounds = 31;                    ///< of the second measurement; the first takes half of them
  double least_gain = 1.01;           ///< the standard is replaced by what is so many times as fast
  bool keep = true;                   ///< in the device's file, for tuned(); one for each device, driver and compiler version
  /// Told what is being done, "timing 12 candidates".
  std::function<void(std::string_view)> progress = {};
  /// Runs all of these and returns the milliseconds of each. Default: events on the stream.
  std::function<std::vector<double>(const std::vector<std::function<void()>>&)> timer = {};
};

struct TuneResult {
  TunePoint best;
  double milliseconds = 0;                     ///< of the best
  double standard_milliseconds = 0;            ///< 0: there is no standard, or it failed
  std::vector<TuneCandidate> candidates = {};  ///< the best prediction first

  /// How many times as fast the best is as the standard: 1 where that was kept.
  double gain() const { return standard_milliseconds > 0 ? standard_milliseconds / milliseconds : 1; }
};

/// The points of the space that tune() times: the `most` with the best predictions, and the standard. Throws InvalidArgument for a space
/// without a valid point.
std::vector<TuneCandidate> tune_candidates(const TuneSpace& space, const TuneProblem& problem, int most);

/// Compiles the candidates' kernels in parallel (on a GPU), times them interleaved, holds the fastest against the standard in a second
/// measurement, and keeps the best. A candidate that does not compile or launch, or whose results are wrong, is left out and reported in
/// its `problem`. Throws InvalidArgument for a space without a valid point, an empty name or no launch; Error if no candidate works or the
/// result cannot be kept; nothing is kept then.
TuneResult tune(const TuneSpace& space, const TuneProblem& problem, const TuneOptions& options = {});

/// What tune() kept for the problem of that name on the device, or nothing; also if it is not a valid point of the space any more.
std::optional<TunePoint> tuned(const TuneSpace& space, std::string_view name, Device device);

/// The kernels that `launch` would run on a GPU. They are neither compiled nor run.
std::vector<KernelSpec> kernels_of(const std::function<void()>& launch);

/// Launches a kernel on a GPU by the text of its type, which may be made from values that are known at run time alone: no template is
/// instantiated for them. `source`: the embedded file that defines it. `Params` are those of any instantiation that differs in tile sizes
/// only; `bind` fills them in as for launch().
template <class Params, class Bind>
void launch_type(std::string_view type, std::string_view source, const Stream& stream, const TileGrid& grid, Bind bind) {
  detail::launch_named<Params>(detail::named_kernel(type, source), stream, grid, bind);
}

}  // namespace tw
