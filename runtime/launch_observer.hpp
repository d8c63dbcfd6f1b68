#pragma once

#include <utility>

#include "tilewave/kernel.hpp"

namespace tw {

/// Told of each kernel that its thread launches on a GPU, before and after it is enqueued.
class LaunchObserver {
 public:
  virtual ~LaunchObserver() = default;
  virtual void launch_begin(const KernelSpec& kernel, const Stream& stream) = 0;
  virtual void launch_end(const KernelSpec& kernel, const Stream& stream) = 0;
};

/// The calling thread's, or null.
inline LaunchObserver*& launch_observer() {
  static thread_local LaunchObserver* current = nullptr;
  return current;
}

/// Sets the thread's observer of launches for its own lifetime.
class ObserveLaunches {
 public:
  explicit ObserveLaunches(LaunchObserver* observer) : before_(std::exchange(launch_observer(), observer)) {}
  ~ObserveLaunches() { launch_observer() = before_; }
  ObserveLaunches(const ObserveLaunches&) = delete;
  ObserveLaunches& operator=(const ObserveLaunches&) = delete;

 private:
  LaunchObserver* before_;
};

}  // namespace tw
