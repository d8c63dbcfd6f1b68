#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tilewave/analyze.hpp"
#include "tilewave/kernel.hpp"

namespace tw {

/// A number that describes a family's problem, and its name on the command line: {"M", "rows of A and D"}.
struct ShapeKey {
  const char* name;
  const char* what;
  std::optional<std::int64_t> standard = {};  ///< the default; without one the value must be given
};

/// The values of a family's keys.
class ShapeValues {
 public:
  /// Parses "M=4096,N=4096". Throws InvalidArgument, which lists the keys, if a key is unknown, missing or given twice, or if a value is
  /// not a number from 0 to 2^30.
  ShapeValues(std::string_view text, std::span<const ShapeKey> keys);

  std::int64_t operator[](std::string_view name) const;
  int integer(std::string_view name) const { return static_cast<int>((*this)[name]); }
  /// All values in the order of the keys: "M=4096,N=4096,batch=1".
  std::string text() const;

 private:
  std::vector<std::pair<std::string, std::int64_t>> values_;
};

/// The keys as text: "M, N, K, batch (1)".
std::string key_list(std::span<const ShapeKey> keys);

/// A configuration of a family's kernel.
struct KernelVariant {
  KernelSpec spec;
  Analysis (*analyze)(const ShapeValues& shape);  ///< throws InvalidArgument for a shape that the kernel does not support; may be null
};

inline std::vector<KernelSpec> specs_of(const std::vector<KernelVariant>& variants) {
  std::vector<KernelSpec> specs;
  for (const KernelVariant& variant : variants) specs.push_back(variant.spec);
  return specs;
}

}  // namespace tw
