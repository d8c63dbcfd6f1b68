#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/variant.hpp"

namespace tw {

/// A kernel that `tilewave kernels` lists, shows, compiles ahead of time and analyses.
struct RegisteredKernel {
  std::string family;
  KernelSpec spec;
  std::span<const ShapeKey> shape;                ///< what `analyze` wants to know
  Analysis (*analyze)(const ShapeValues& shape);  ///< null if the configuration is not built for the analysis target
};

/// Every family's instantiations that are worth having ahead of time (others compile at first use). Adding a family adds a line to
/// registry.cpp.
std::vector<RegisteredKernel> registered_kernels();

/// The same for an architecture and a target: on the generic one products have other tiles, which follow from the shared memory.
std::vector<RegisteredKernel> registered_kernels(std::string_view arch, GpuTarget target);

}  // namespace tw
