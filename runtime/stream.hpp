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

/// The calling thread's Graph::capture collects here the counters that the graph gives back in the end; null outside one.
std::vector<unsigned*>*& captured_counters();

}  // namespace tw
