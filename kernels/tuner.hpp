#pragma once

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "kernels/variant.hpp"
#include "runtime/tuned.hpp"
#include "tilewave/device.hpp"

namespace tw {

/// One of the ways to do a problem.
struct TuneCandidate {
  TunedChoice choice;
  Analysis analysis;
  std::int64_t shared_bytes = 0;  ///< of a block on a GPU
};

/// A problem on a device, and all ways to do it.
struct TuneProblem {
  std::string key;  ///< as in TunedChoices: what the family's heuristic asks for
  std::vector<TuneCandidate> candidates;
  /// Makes operands of numbers that follow from `seed`; what it returns launches a candidate on the stream. The operands live as long.
  std::function<std::function<void(const TuneCandidate&)>(const Stream& stream, std::uint64_t seed)> prepare;
};

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

/// An operand for TuneProblem::prepare.
Tensor random_operand(Shape shape, DType dtype, std::uint64_t seed, const Stream& stream);

/// A family whose heuristic looks at tuned choices first.
struct TunableFamily {
  std::string name;
  std::span<const ShapeKey> shape;
  std::vector<DType> dtypes;  ///< that it is tuned for
  /// Throws InvalidArgument for a problem that the device cannot do.
  TuneProblem (*problem)(const ShapeValues& shape, DType dtype, Device device);
};

/// Every family that has choices. Adding one adds a line to registry.cpp.
std::vector<TunableFamily> tunable_families();

/// What becomes of a candidate before anything is timed.
struct Prospect {
  double seconds = 0;   ///< its roofline
  std::string dropped;  ///< why it is not worth timing; empty: it is
};

/// One for each candidate: those that do not fit the device's shared memory are dropped, and those that even at the device's peaks take
/// over twice as long as the best can.
std::vector<Prospect> prospects(const TuneProblem& problem, const DeviceModel& device);

}  // namespace tw
