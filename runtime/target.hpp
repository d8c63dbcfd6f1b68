#pragma once

#include <string>
#include <string_view>

#include "tilewave/device.hpp"

namespace tw {

struct ComputeCapability {
  int major = 0, minor = 0;
  friend bool operator==(const ComputeCapability&, const ComputeCapability&) = default;
};

/// Why kernels cannot run on a GPU, or nothing.
std::string target_problem(std::string_view gpu_name, ComputeCapability gpu);

/// The one that kernels are fastest with.
GpuTarget best_target(ComputeCapability gpu);

/// What set_gpu_target() was given last.
GpuTarget standard_gpu_target();

/// Throws InvalidArgument where a GPU cannot run kernels that are compiled for `target`.
void require_target(GpuTarget target, Device device, ComputeCapability gpu);

/// What the compiler is asked for: "sm_80", "sm_90a", "sm_100a".
std::string architecture(ComputeCapability gpu);

/// The target of an architecture as `tilewave kernels compile --arch` takes it. Throws InvalidArgument for one below 8.0 or unknown.
GpuTarget target_of_architecture(std::string_view arch);

/// The shared memory that a block can have.
int max_shared_bytes(std::string_view arch);

/// A target as a device and the tensors of a launch ask for it.
struct TargetVariant {
  int index;         ///< less than kTargetVariants: tells variants apart
  const char* text;  ///< the C++ type: "tw::sm_90a::Target<true, true>"
};
inline constexpr int kTargetVariants = 8;

/// `loads`, `stores`: every tensor that is loaded, or stored, can be copied in tiles: by TMA, or in whole pieces of 16 bytes.
TargetVariant target_variant(GpuTarget target, bool loads, bool stores);

}  // namespace tw
