#pragma once

#include <cstddef>
#include <string>

namespace tw {

struct HostMemory {
  std::size_t total = 0;      ///< bytes
  std::size_t available = 0;  ///< bytes available without swapping
};

/// The machine's current memory; 0 if unknown.
HostMemory host_memory();

/// "Intel(R) Xeon(R) Platinum 8480C", or the architecture's name.
std::string host_cpu_name();

/// Bytes of the last-level cache, 0 if unknown.
std::size_t host_cache_bytes();

}  // namespace tw
