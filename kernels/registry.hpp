#pragma once

#include <string>
#include <vector>

#include "tilewave/kernel.hpp"

namespace tw {

/// A kernel that `tilewave kernels` lists, shows and compiles ahead of time.
struct RegisteredKernel {
  std::string family;
  KernelSpec spec;
};

/// Every family's instantiations that are worth having ahead of time (others compile at first use). Adding a family adds a line to
/// registry.cpp.
std::vector<RegisteredKernel> registered_kernels();

}  // namespace tw
