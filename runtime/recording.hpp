#pragma once

#include <utility>
#include <vector>

#include "tilewave/kernel.hpp"

namespace tw {

/// If not null, the calling thread's GPU launches are appended to this list instead of being executed.
inline std::vector<KernelSpec>*& recorded_launches() {
  static thread_local std::vector<KernelSpec>* recorded = nullptr;
  return recorded;
}

/// Records this thread's launches for the lifetime of the object.
class RecordLaunches {
 public:
  explicit RecordLaunches(std::vector<KernelSpec>& into) : before_(std::exchange(recorded_launches(), &into)) {}
  ~RecordLaunches() { recorded_launches() = before_; }
  RecordLaunches(const RecordLaunches&) = delete;
  RecordLaunches& operator=(const RecordLaunches&) = delete;

 private:
  std::vector<KernelSpec>* before_;
};

}  // namespace tw
