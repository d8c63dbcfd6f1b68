#pragma once

// A GPU that exists only by its properties: what a model would launch, found without a GPU.

#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/cuda_driver.hpp"
#include "runtime/target.hpp"
#include "tilewave/kernel.hpp"

namespace tw {

/// What the choice of kernels depends on.
struct GpuProperties {
  std::string name;  ///< tuned choices are stored by it
  ComputeCapability compute_capability;
  int multiprocessors = 0;
  std::size_t total_memory = 0;      ///< bytes
  std::size_t l2_bytes = 0;          ///< bytes
  std::size_t shared_per_block = 0;  ///< bytes
  friend bool operator==(const GpuProperties&, const GpuProperties&) = default;
};

/// Those of a GPU of this machine. Throws DeviceError.
GpuProperties gpu_properties(Device device);

/// Those of the most common data-centre or desktop GPU of an architecture: of an H200 for "sm_90a". Throws InvalidArgument for an
/// architecture that `tilewave kernels compile` does not know.
GpuProperties typical_gpu(std::string_view arch);

/// While it exists, its thread has a further GPU, device(). Memory there has addresses but no bytes: copies to it do nothing, copies from
/// it give zeros. Launches are recorded, those of a captured graph once. The thread must not use a real GPU meanwhile. What
/// it makes on this device may outlive it, but not be used then.
class DryRun {
 public:
  explicit DryRun(const GpuProperties& gpu);
  ~DryRun();
  DryRun(const DryRun&) = delete;
  DryRun& operator=(const DryRun&) = delete;

  Device device() const { return device_; }
  /// The kernels launched so far, each once, in the order of their first launch.
  const std::vector<KernelSpec>& kernels();
  /// The streams (Stream::native) in whose order memory was allocated so far. What one of them frees may be reused while kernels of another
  /// stream are still to read it.
  const std::set<void*>& allocation_streams() const { return allocation_streams_; }

 private:
  Device device_;
  std::vector<KernelSpec> launches_, kernels_;
  std::vector<KernelSpec>* launches_before_;
  std::set<void*> allocation_streams_;
  std::set<void*>* allocation_streams_before_;
  const cuda::Driver* driver_before_;
};

/// Whether the device is that of a DryRun. A model need not read weights for it.
bool is_dry_run(Device device);

/// `specs` without repetitions: a kernel is its type, target and source.
std::vector<KernelSpec> unique_kernels(const std::vector<KernelSpec>& specs);

}  // namespace tw
