#pragma once

#include <memory>
#include <vector>

#include "runtime/gpu.hpp"
#include "tilewave/device.hpp"

namespace tw {

/// A queue. Empty on the CPU.
struct Stream::State {
  Gpu* gpu = nullptr;  ///< null on the CPU
  cuda::Stream native = nullptr;
  bool owned = false;
  unsigned* counter = nullptr;  ///< kLaunchCounters zeros in device memory, for the kernels in this queue

  State() = default;
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  ~State();
};

/// The runtime's access to the private parts of a Stream.
struct StreamAccess {
  static cuda::Stream native(const Stream& stream) { return stream.state_->native; }
  /// The counters for one launch: the first two are a dynamic schedule's. Launches in one queue never overlap, so they share them. A
  /// captured launch gets its own, because its graph may be replayed concurrently with other work. Kernels leave zeros.
  static unsigned* counter_for_launch(const Stream& stream);
};

/// Resources that a captured graph keeps for its kernels as long as it exists.
struct Captured {
  struct Workspace {
    std::shared_ptr<void> memory;
    std::size_t bytes;
    cuda::Stream stream;  ///< the stream whose launches use it
  };
  std::vector<unsigned*> counters;
  std::vector<Workspace> memory;
};
/// The resources of the calling thread's current Graph::capture; null outside one.
Captured*& captured();

/// Workspace for the next launches on `stream`: like allocate(), but also works while the stream is being captured. It then lives as long
/// as the graph.
std::shared_ptr<void> allocate_workspace(std::size_t bytes, const Stream& stream);

/// Sets every byte, in the stream's order.
void fill_bytes(void* memory, std::size_t bytes, unsigned char value, const Stream& stream);

}  // namespace tw
