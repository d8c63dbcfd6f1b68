#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tilewave/launch.hpp"

// Finds the fastest tile sizes, stages and other parameters of a kernel for one problem by timing it, and stores them:
//
//   const tw::TuneSpace space({{"bm", {64, 128}}, {"bn", tw::every(32, 256, 32)}, {"stages", tw::every(2, 8)}},
//                             [](const tw::TunePoint& p) { return p["stages"] * (p["bm"] + p["bn"]) * 128 <= 200 * 1024; });
//   const auto launch = [&](const tw::TunePoint& p) { ... };  // launches the kernel with p["bm"], p["bn"], p["stages"] on `stream`
//   const std::string name = "my_matmul f16 M=4096,N=4096,K=4096";
//   const tw::TuneResult result = tw::tune(space, {.name = name, .launch = launch}, {.stream = stream});
//
//   if (const auto kept = tw::tuned(space, name, stream.device())) launch(*kept);  // later, in this process or another

namespace tw {

/// A parameter and its possible values.
struct TuneRange {
  std::string name;
  std::vector<int> values;
};

/// first, first + step, ... up to `last`.
std::vector<int> every(int first, int last, int step = 1);

/// One value for each range of a space.
class TunePoint {
 public:
  /// The value of the range `name`. Throws InvalidArgument, which lists the names, for an unknown name.
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

/// The combinations of values from named ranges that satisfy a rule.
class TuneSpace {
 public:
  /// Without a rule all combinations are valid. Throws InvalidArgument if there are no ranges, a range has no values, or a name is empty or
  /// occurs twice.
  explicit TuneSpace(std::vector<TuneRange> ranges, std::function<bool(const TunePoint&)> valid = {});

  /// The valid points; the last range varies fastest.
  std::vector<TunePoint> points() const;
  /// The point with these values, or nothing if it is not in the space.
  std::optional<TunePoint> find(const std::vector<int>& values) const;
  /// The ranges as text: "bm {64, 128}, stages {2, 3, 4}".
  std::string text() const;

 private:
  std::vector<TuneRange> ranges_;
  std::function<bool(const TunePoint&)> valid_;
  std::shared_ptr<const std::vector<std::string>> names_;
};

/// What is tuned.
struct TuneProblem {
  /// Names the kernel and everything that the best values depend on: element types, extents, layouts. tuned() looks results up by it.
  std::string name;
  /// Enqueues the kernel with these values on the stream. Called many times, also while the stream is captured into a graph, so it must not
  /// allocate or synchronise.
  std::function<void(const TunePoint&)> launch;
  /// The expected time, in any unit. The points with the shortest times become candidates. Without it candidates are spread evenly over the
  /// space.
  std::function<double(const TunePoint&)> predict = {};
  /// The point that is used without tuning. It is always a candidate, and wins unless another one is faster in a second measurement.
  std::optional<TunePoint> standard = {};
  /// Describes what is wrong with a candidate's results; empty if they are right. Called once after each candidate has run, for the
  /// standard first.
  std::function<std::string(const TunePoint&)> check = {};
};

/// A point that tune() compiles and times.
struct TuneCandidate {
  TunePoint point;
  double predicted = 0;      ///< the result of TuneProblem::predict
  double milliseconds = 0;   ///< the median; 0: not timed
  std::string problem = {};  ///< why it was dropped: it did not compile or launch, gave wrong results, or was far slower
};

struct TuneOptions {
  std::optional<Stream> stream = {};  ///< default: the CPU's
  int candidates = 16;                ///< maximum number to compile and time
  int rounds = 31;                    ///< rounds of the second measurement; the first one has half as many
  double least_gain = 1.01;           ///< the standard is replaced only if another point is faster by this factor
  bool keep = true;                   ///< store the result for tuned(), in a file for this device, driver and compiler version
  /// Called with the current activity: "timing 12 candidates".
  std::function<void(std::string_view)> progress = {};
  /// Runs all functions and returns the milliseconds of each. Default: events on the stream.
  std::function<std::vector<double>(const std::vector<std::function<void()>>&)> timer = {};
};

struct TuneResult {
  TunePoint best;
  double milliseconds = 0;                     ///< of `best`
  double standard_milliseconds = 0;            ///< 0: there is no standard, or it failed
  std::vector<TuneCandidate> candidates = {};  ///< the one with the best prediction first

  /// The speed of `best` relative to the standard; 1 if the standard won.
  double gain() const { return standard_milliseconds > 0 ? standard_milliseconds / milliseconds : 1; }
};

/// The points that tune() times: the `most` points with the best predictions, and the standard. Throws InvalidArgument if the space has no
/// valid point.
std::vector<TuneCandidate> tune_candidates(const TuneSpace& space, const TuneProblem& problem, int most);

/// Compiles the candidates' kernels in parallel (on a GPU), times them interleaved, compares the fastest with the standard in a second
/// measurement, and stores the best. A candidate that does not compile or launch, or whose results are wrong, is skipped and reported in
/// its `problem`. Throws InvalidArgument if the space has no valid point, the name is empty or `launch` is missing, and Error if no
/// candidate works or the result cannot be stored. After an exception nothing has been stored.
TuneResult tune(const TuneSpace& space, const TuneProblem& problem, const TuneOptions& options = {});

/// The point that tune() stored for the problem `name` on the device. Nothing if there is none, or if it is no longer in the space.
std::optional<TunePoint> tuned(const TuneSpace& space, std::string_view name, Device device);

/// The kernels that `launch` would run on a GPU. Neither compiles nor runs them.
std::vector<KernelSpec> kernels_of(const std::function<void()>& launch);

/// Launches a kernel on a GPU by the text of its type, which may contain values known only at run time: no template is instantiated on the
/// host. `source`: the embedded file that defines it. `Params` may come from any instantiation that differs only in tile sizes; `bind`
/// fills them in as for launch().
template <class Params, class Bind>
void launch_type(std::string_view type, std::string_view source, const Stream& stream, const TileGrid& grid, Bind bind) {
  detail::launch_named<Params>(detail::named_kernel(type, source), stream, grid, bind);
}

}  // namespace tw
