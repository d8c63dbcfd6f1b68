#pragma once

#include <string>
#include <string_view>

#include "tilewave/device.hpp"

namespace tw {

struct ComputeCapability {
  int major = 0, minor = 0;
  friend bool operator==(const ComputeCapability&, const ComputeCapability&) = default;
};

/// Why kernels cannot run on the GPU; empty if they can.
std::string target_problem(std::string_view gpu_name, ComputeCapability gpu);

/// The target with the fastest kernels for the GPU.
GpuTarget best_target(ComputeCapability gpu);

/// The target that set_gpu_target() set.
GpuTarget standard_gpu_target();

/// Throws InvalidArgument if the GPU cannot run kernels that are compiled for `target`.
void require_target(GpuTarget target, Device device, ComputeCapability gpu);

/// The architecture to compile for: "sm_80", "sm_90a", "sm_100a".
std::string architecture(ComputeCapability gpu);

/// The default target for an architecture of `tilewave kernels compile --arch`. Throws InvalidArgument if it is unknown or older than 8.0.
GpuTarget target_of_architecture(std::string_view arch);

/// The maximum shared memory per block, in bytes.
int max_shared_bytes(std::string_view arch);

/// The variant of a target that fits a launch's tensors.
struct TargetVariant {
  int index;         ///< unique, less than kTargetVariants
  const char* text;  ///< the C++ type: "tw::sm_90a::Target<true, true>"
};
inline constexpr int kTargetVariants = 8;

/// `loads`, `stores`: all tensors that are loaded, or stored, can be copied by TMA (sm_90a) or in whole 16-byte pieces (cuda).
TargetVariant target_variant(GpuTarget target, bool loads, bool stores);

}  // namespace tw
