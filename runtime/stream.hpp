#pragma once

#include <memory>
#include <vector>

#include "runtime/gpu.hpp"
#include "tilewave/device.hpp"

namespace tw {

/// A queue. On the CPU there is nothing in it.
struct Stream::State {
  Gpu* gpu = nullptr;  ///< null on the CPU
  cuda::Stream native = nullptr;
  bool owned = false;
  unsigned* counter = nullptr;  ///< two zeros in device memory, for the dynamic scheduler of the kernels in this queue

  State() = default;
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  ~State();
};

/// What the runtime, but no user, reads from a Stream.
struct StreamAccess {
  static cuda::Stream native(const Stream& stream) { return stream.state_->native; }
  /// The counter for one launch of a dynamic schedule. Launches in one queue share one, since they never overlap; one that is being
  /// captured gets its own, since its graph may be replayed beside other work.
  static unsigned* counter_for_launch(const Stream& stream);
};

/// What a graph that is being captured keeps for its kernels until it goes.
struct Captured {
  std::vector<unsigned*> counters;
  std::vector<std::shared_ptr<void>> memory;
};
/// That of the calling thread's Graph::capture; null outside one.
Captured*& captured();

/// Memory that the launches which follow on `stream` pass results through: as allocate(), but also while the stream is being captured; it
/// then lives as long as the graph.
std::shared_ptr<void> allocate_workspace(std::size_t bytes, const Stream& stream);

}  // namespace tw
