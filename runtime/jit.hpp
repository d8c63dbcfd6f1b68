#pragma once

#include <functional>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "tilewave/kernel.hpp"

namespace tw {

/// The name of the generated entry point.
inline constexpr const char* kEntryPoint = "kern";

/// The inputs of a kernel's compilation: the generated text, and every embedded file that it includes, directly or indirectly.
struct ProgramText {
  std::string text;
  std::vector<const EmbeddedFile*> headers;  ///< in the order of their first inclusion
};

/// Throws InvalidArgument for an invalid spec.
ProgramText assemble(const KernelSpec& spec);

/// The compiler's options.
std::vector<std::string> compile_options(std::string_view arch);

/// The file name of `program` in a cache folder (`compiler`: "NVRTC 13.0") or in a pack (`compiler` empty, because a pack works on machines
/// with another NVRTC, or none).
std::string cache_key(const ProgramText& program, std::string_view arch, std::string_view compiler);

/// Reads registers, spills, static shared memory and performance losses from the compiler's log into `kernel`.
void read_log(std::string_view log, CompiledKernel& kernel);

/// Calls work(0) to work(count - 1) on `threads` threads (0: one per core). The first exception is thrown after the others have completed.
void for_each_in_parallel(std::size_t count, int threads, const std::function<void(std::size_t)>& work);

/// Called with how many of the missing kernels have been compiled, and how many were missing; by one thread at a time.
using CompileProgress = std::function<void(std::size_t done, std::size_t all)>;

/// Compiles those of `specs` that neither the cache nor a pack has, on all cores, so that launches find them. A kernel that does not
/// compile is left to its launch, which says why; so are all without NVRTC. `progress` is not called if none is missing. After a stop
/// request no further kernel is begun.
void compile_ahead(const std::vector<KernelSpec>& specs, std::string_view arch, const CompileProgress& progress = {},
                   const std::stop_token& stop = {});

/// The tensor-core instruction that occurs most often in `ptx`, or "".
std::string find_tensor_core_instruction(std::string_view ptx);

}  // namespace tw
