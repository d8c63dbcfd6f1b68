#pragma once

#include <string>

namespace tw::test {

/// A lock on a file, held by any number of processes together (shared) or by one alone. One object for each process and file; released when
/// the process ends. Without effect where the file cannot be opened.
class ProcessLock {
 public:
  explicit ProcessLock(const std::string& path);
  ~ProcessLock();
  ProcessLock(const ProcessLock&) = delete;
  ProcessLock& operator=(const ProcessLock&) = delete;

  void share() { lock(false); }      ///< waits for the process that is alone
  void take_alone() { lock(true); }  ///< waits for all others
  bool is_open() const { return descriptor_ >= 0; }

 private:
  void lock(bool alone);

  std::string path_;
  int descriptor_ = -1;
};

/// What cuda_device() shares from when it has found a GPU until the process ends: what a program has allocated stays in its pools.
ProcessLock& gpu_lock();

/// While it lives this process has the GPU's memory alone among test programs; what its pools keep afterwards is given back. For a test
/// that takes all memory.
class AloneOnTheGpu {
 public:
  AloneOnTheGpu() { gpu_lock().take_alone(); }
  ~AloneOnTheGpu();
  AloneOnTheGpu(const AloneOnTheGpu&) = delete;
  AloneOnTheGpu& operator=(const AloneOnTheGpu&) = delete;
};

}  // namespace tw::test
