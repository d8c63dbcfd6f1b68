#pragma once

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "kernels/variant.hpp"
#include "runtime/tuned.hpp"
#include "tilewave/device.hpp"
#include "tilewave/tune.hpp"

// What the tunable families share: tilewave/tune.hpp does the searching and the timing.

namespace tw {

/// One set of a problem's operands.
struct TuneOperands {
  std::function<void(const TunePoint&)> launch;
  Tensor result;           ///< what a launch writes
  std::int64_t bytes = 0;  ///< of all operands
};

/// A family's problem: what tune() wants, but for its operands.
struct FamilyProblem {
  std::string name;  ///< what the family's heuristic asks for
  TuneSpace space;
  TunePoint standard;                               ///< the heuristic's choice
  std::function<double(const TunePoint&)> predict;  ///< in any unit
  /// Makes operands of numbers that follow from `seed`.
  std::function<TuneOperands(const Stream& stream, std::uint64_t seed)> prepare;
};

/// How a problem's operands lie when it is timed.
enum class TuneMemory {
  cold,  ///< so many sets in turn that none is in a GPU's cache when it is used again, as weights in a model
  hot    ///< one set
};

/// The problem with operands on the stream's device. Every candidate's results are held against the standard's.
TuneProblem with_operands(const FamilyProblem& problem, const Stream& stream, std::uint64_t seed, TuneMemory memory = TuneMemory::cold);

/// Without operands: for tune_candidates().
TuneProblem without_operands(const FamilyProblem& problem);

/// The values that are kept for a problem on the device, or null. `key()` names the problem; it is not called where nothing is kept at all.
template <class Key>
const std::vector<int>* tuned_values(Device device, Key key) {
  const TunedChoices& choices = tuned_choices(device);
  if (choices.empty()) return nullptr;
  const auto found = choices.find(key());
  return found == choices.end() ? nullptr : &found->second.values;
}

/// The index of the configuration for which `values_of(config)` is `values`, or -1: what was kept may be of another version's list.
template <class Configs, class ValuesOf>
int find_config(const Configs& configs, const std::vector<int>& values, ValuesOf values_of) {
  const auto found = std::find_if(configs.begin(), configs.end(), [&](const auto& config) { return values_of(config) == values; });
  return found == configs.end() ? -1 : static_cast<int>(found - configs.begin());
}

/// A space of exactly these points: for families that have a short list of them.
TuneSpace space_of(const std::vector<std::string>& names, const std::vector<std::vector<int>>& points);

/// The point of these values; throws Error if the space does not have it.
TunePoint point_of(const TuneSpace& space, const std::vector<int>& values);

/// The device's SMs, or threads; of a GPU that this machine does not have, an H200's: what is predicted there is arithmetic.
int units_of(Device device);

/// A CPU of cpu_threads() threads at round figures: to compare candidates by their analyses.
DeviceModel cpu_for_comparison();

/// An operand for FamilyProblem::prepare.
Tensor random_operand(Shape shape, DType dtype, std::uint64_t seed, const Stream& stream);

/// For TuneOperands::bytes.
std::int64_t bytes_of(std::initializer_list<const Tensor*> tensors);

/// A family whose heuristic looks at tuned choices first.
struct TunableFamily {
  std::string name;
  std::span<const ShapeKey> shape;
  std::vector<DType> dtypes;  ///< that it is tuned for
  /// Throws InvalidArgument for a problem that the device cannot do.
  FamilyProblem (*problem)(const ShapeValues& shape, DType dtype, Device device);
};

/// Every family that has choices. Adding one adds a line to registry.cpp.
std::vector<TunableFamily> tunable_families();

}  // namespace tw
