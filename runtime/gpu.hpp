#pragma once

// Per-GPU state for the life of the process: the primary context, the memory pool, a private stream and the counters of dynamic tile
// schedulers.

#include <cstddef>
#include <mutex>
#include <vector>

#include "runtime/cuda_driver.hpp"
#include "runtime/target.hpp"

namespace tw {

/// Indices from here on are GPUs of dry runs: runtime/dry_run.hpp. No machine has so many real ones.
inline constexpr int kFirstDryRunGpu = 64, kMostDryRunGpus = 64, kMostGpus = kFirstDryRunGpu + kMostDryRunGpus;

/// What a launch may count in device memory.
inline constexpr int kLaunchCounters = 512;

class Gpu {
 public:
  /// The GPU with that index, opened at first use. Throws DeviceError if it does not exist or cannot be used.
  static Gpu& get(int index);
  /// The same if it has been opened already, otherwise null.
  static Gpu* find_open(int index);

  int index() const { return index_; }
  /// The driver that opened it.
  const cuda::Driver& driver() const { return driver_; }
  cuda::Context context() const { return context_; }
  cuda::MemoryPool pool() const { return pool_; }
  int multiprocessors() const { return multiprocessors_; }
  ComputeCapability compute_capability() const { return compute_capability_; }
  /// A kernel may start while the one before it in the stream finishes (programmatic dependent launch).
  bool launches_overlap() const { return compute_capability_.major >= 9; }

  /// kLaunchCounters u32 in device memory. They are 0 whenever no kernel that uses them is running. Works during stream capture.
  unsigned* take_counter();
  void give_back_counter(unsigned* counter);

 private:
  explicit Gpu(int index);

  int index_;
  const cuda::Driver& driver_ = cuda::driver();
  cuda::Device device_ = 0;
  cuda::Context context_ = nullptr;
  cuda::MemoryPool pool_ = nullptr;
  cuda::Stream stream_ = nullptr;  // for the runtime's own work, never captured
  int multiprocessors_ = 0;
  ComputeCapability compute_capability_;

  std::mutex counters_mutex_;
  std::vector<unsigned*> free_counters_;
};

/// Makes a GPU's primary context the calling thread's current one, and restores another library's context at its end. A thread without a
/// context keeps ours: setting it at every launch would cost as much as the launch's other checks together.
class CurrentContext {
 public:
  /// Throws DeviceError where the thread has another driver than the GPU: its DryRun is over.
  explicit CurrentContext(const Gpu& gpu);
  ~CurrentContext();
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

 private:
  cuda::Context restore_ = nullptr;
};

/// Lets this thread make calls that stream capture forbids (loading modules, allocating) while one of its streams is being captured.
class RelaxedCapture {
 public:
  RelaxedCapture();
  ~RelaxedCapture();
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cuda::CaptureMode previous_ = cuda::CaptureMode::relaxed;
};

/// Whether launches on `stream` are being recorded into a graph.
bool is_capturing(cuda::Stream stream);

}  // namespace tw
