#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/variant.hpp"

namespace tw {

/// A kernel that `tilewave kernels` can list, print, compile ahead of time and analyse.
struct RegisteredKernel {
  std::string family;
  KernelSpec spec;
  std::span<const ShapeKey> shape;                ///< the arguments of `analyze`
  Analysis (*analyze)(const ShapeValues& shape);  ///< null if the configuration is not built for the analysis target
};

/// The kernels that are worth compiling ahead of time; others are compiled at first use. Each family has a line in registry.cpp.
std::vector<RegisteredKernel> registered_kernels();

/// The same for an architecture and a target. On the generic target the tiles of products depend on the architecture's shared memory.
std::vector<RegisteredKernel> registered_kernels(std::string_view arch, GpuTarget target);

}  // namespace tw
