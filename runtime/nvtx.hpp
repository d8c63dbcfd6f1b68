#pragma once

namespace tw {

/// Ranges for NVIDIA's profilers (NVTX, version 3). A profiler names its library in NVTX_INJECTION64_PATH; without that variable there is
/// nothing to call.
struct Nvtx {
  int (*push)(const char* name) = nullptr;  ///< null if the profiler takes no ranges
  int (*pop)() = nullptr;
};

/// The profiler's functions, looked for once per process; null without a profiler. Thread-safe, never throws.
const Nvtx* find_nvtx();

}  // namespace tw
