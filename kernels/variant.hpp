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

/// A number that a family's problem has, by the name that the command line knows it by: {"M", "rows of A and D"}.
struct ShapeKey {
  const char* name;
  const char* what;
  std::optional<std::int64_t> standard = {};  ///< its value where none is given; without one it must be
};

/// Values of a family's keys.
class ShapeValues {
 public:
  /// Of "M=4096,N=4096". Throws InvalidArgument, which names the keys, for one that is unknown, missing, given twice or no number from 0 to
  /// 2^30.
  ShapeValues(std::string_view text, std::span<const ShapeKey> keys);

  std::int64_t operator[](std::string_view name) const;
  int integer(std::string_view name) const { return static_cast<int>((*this)[name]); }
  /// All of them, in the keys' order: "M=4096,N=4096,batch=1".
  std::string text() const;

 private:
  std::vector<std::pair<std::string, std::int64_t>> values_;
};

/// The keys for people: "M, N, K, batch (1)".
std::string key_list(std::span<const ShapeKey> keys);

/// An instantiation of a family's kernel.
struct KernelVariant {
  KernelSpec spec;
  Analysis (*analyze)(const ShapeValues& shape);  ///< throws InvalidArgument for a shape that the kernel is not for; may be null
};

inline std::vector<KernelSpec> specs_of(const std::vector<KernelVariant>& variants) {
  std::vector<KernelSpec> specs;
  for (const KernelVariant& variant : variants) specs.push_back(variant.spec);
  return specs;
}

}  // namespace tw
