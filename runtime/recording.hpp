#pragma once

#include <utility>
#include <vector>

#include "tilewave/kernel.hpp"

namespace tw {

/// Where the calling thread's launches on GPUs are noted instead of being done; null: they are done.
inline std::vector<KernelSpec>*& recorded_launches() {
  static thread_local std::vector<KernelSpec>* recorded = nullptr;
  return recorded;
}

/// While it lives, launches of this thread are noted.
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
