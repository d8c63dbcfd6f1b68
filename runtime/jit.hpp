#pragma once

#include <string>
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

/// The tensor-core instruction that occurs most often in `ptx`, or "".
std::string find_tensor_core_instruction(std::string_view ptx);

}  // namespace tw
