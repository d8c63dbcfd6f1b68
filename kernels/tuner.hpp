#pragma once

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "kernels/variant.hpp"
#include "runtime/tuned.hpp"
#include "tilewave/device.hpp"
#include "tilewave/tune.hpp"

// Shared by the tunable families. The search and the timing are in tilewave/tune.hpp.

namespace tw {

/// One set of a problem's operands.
struct TuneOperands {
  std::function<void(const TunePoint&)> launch;
  Tensor result;           ///< the output of a launch
  std::int64_t bytes = 0;  ///< total size of the operands
};

/// A family's problem: the arguments of tune(), without operands.
struct FamilyProblem {
  std::string name;  ///< the key under which the family looks up tuned values
  TuneSpace space;
  TunePoint standard;                               ///< the heuristic's choice
  std::function<double(const TunePoint&)> predict;  ///< in any unit
  /// Makes operands with random numbers from `seed`.
  std::function<TuneOperands(const Stream& stream, std::uint64_t seed)> prepare;
};

/// Whether operands are in the GPU's cache when a launch is timed.
enum class TuneMemory {
  cold,  ///< several sets of operands are used in turn, too many for the cache, like the weights of a model
  hot    ///< one set
};

/// The problem with operands on the stream's device. The results of every candidate are compared with those of the standard.
TuneProblem with_operands(const FamilyProblem& problem, const Stream& stream, std::uint64_t seed, TuneMemory memory = TuneMemory::cold);

/// Without operands: for tune_candidates().
TuneProblem without_operands(const FamilyProblem& problem);

/// The tuned values for a problem on the device, or null. `key()` returns the problem's name; it is called only if the device has tuned
/// values.
template <class Key>
const std::vector<int>* tuned_values(Device device, Key key) {
  const TunedChoices& choices = tuned_choices(device);
  if (choices.empty()) return nullptr;
  const auto found = choices.find(key());
  return found == choices.end() ? nullptr : &found->second.values;
}

/// The index of the configuration for which `values_of(config)` is `values`, or -1: the stored values may come from another version, which
/// had other configurations.
template <class Configs, class ValuesOf>
int find_config(const Configs& configs, const std::vector<int>& values, ValuesOf values_of) {
  const auto found = std::find_if(configs.begin(), configs.end(), [&](const auto& config) { return values_of(config) == values; });
  return found == configs.end() ? -1 : static_cast<int>(found - configs.begin());
}

/// The space that consists of exactly these points, for families with a short list of configurations.
TuneSpace space_of(const std::vector<std::string>& names, const std::vector<std::vector<int>>& points);

/// The point with these values. Throws Error if it is not in the space.
TunePoint point_of(const TuneSpace& space, const std::vector<int>& values);

/// The number of the device's SMs or CPU threads. For a GPU that this machine does not have it is an H200's, so that predictions work
/// without a GPU.
int units_of(Device device);

/// An operand for FamilyProblem::prepare.
Tensor random_operand(Shape shape, DType dtype, std::uint64_t seed, const Stream& stream);

/// For TuneOperands::bytes.
std::int64_t bytes_of(std::initializer_list<const Tensor*> tensors);

/// A family whose heuristic looks at tuned choices first.
struct TunableFamily {
  std::string name;
  std::span<const ShapeKey> shape;
  std::vector<DType> dtypes;  ///< dtypes that can be tuned
  /// Throws InvalidArgument for a problem that the device does not support.
  FamilyProblem (*problem)(const ShapeValues& shape, DType dtype, Device device);
};

/// All tunable families. Each has a line in registry.cpp.
std::vector<TunableFamily> tunable_families();

}  // namespace tw
