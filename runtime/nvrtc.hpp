#pragma once

// NVIDIA's run-time compiler, loaded at run time: libnvrtc by dlopen, with our own declarations of the calls in use.

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace tw {

/// nvrtcResult; the values that the code distinguishes.
enum class NvrtcResult : int { success = 0, invalid_option = 5, compilation = 6 };

using NvrtcProgram = struct NvrtcProgramTag*;

// Each call: our name, its symbol, parameters. All return NvrtcResult.
#define TILEWAVE_NVRTC_CALLS(X)                                                                                  \
  X(version, nvrtcVersion, (int* major, int* minor))                                                             \
  X(create_program, nvrtcCreateProgram,                                                                          \
    (NvrtcProgram * program, const char* source, const char* name, int header_count, const char* const* headers, \
     const char* const* include_names))                                                                          \
  X(destroy_program, nvrtcDestroyProgram, (NvrtcProgram * program))                                              \
  X(compile_program, nvrtcCompileProgram, (NvrtcProgram program, int option_count, const char* const* options))  \
  X(get_ptx_size, nvrtcGetPTXSize, (NvrtcProgram program, std::size_t * bytes))                                  \
  X(get_ptx, nvrtcGetPTX, (NvrtcProgram program, char* ptx))                                                     \
  X(get_cubin_size, nvrtcGetCUBINSize, (NvrtcProgram program, std::size_t * bytes))                              \
  X(get_cubin, nvrtcGetCUBIN, (NvrtcProgram program, char* cubin))                                               \
  X(get_log_size, nvrtcGetProgramLogSize, (NvrtcProgram program, std::size_t * bytes))                           \
  X(get_log, nvrtcGetProgramLog, (NvrtcProgram program, char* log))

struct NvrtcCalls {
#define TILEWAVE_NVRTC_MEMBER(name, symbol, parameters) NvrtcResult(*name) parameters = nullptr;
  TILEWAVE_NVRTC_CALLS(TILEWAVE_NVRTC_MEMBER)
#undef TILEWAVE_NVRTC_MEMBER
  const char* (*get_error_string)(NvrtcResult result) = nullptr;
};

/// A loaded NVRTC.
struct Nvrtc {
  NvrtcCalls calls;
  int major = 0;
  int minor = 0;
  std::string path;

  std::string version_text() const { return std::to_string(major) + "." + std::to_string(minor); }
};

/// The result of looking for NVRTC.
struct NvrtcSearch {
  const Nvrtc* nvrtc = nullptr;  ///< or null; then `problem` says why, with the places searched
  std::string problem;
};

/// Looks for NVRTC in $CUDA_HOME, /usr/local/cuda*, the loader's path and the site-packages of the nvidia-cuda-nvrtc wheel. Success is
/// cached for the life of the process, failure is not. Thread-safe.
NvrtcSearch find_nvrtc();

/// The text of one header under the name that #include uses.
struct NvrtcHeader {
  const char* name;
  const char* text;
};

/// The result of one compilation.
struct NvrtcOutput {
  bool ok = false;
  std::string log;
  std::string cubin;
  std::string ptx;
  double milliseconds = 0;  ///< in nvrtcCompileProgram
};

/// Compiles `source`. Adds the options for NVRTC's own cache. A compile error is not an exception: see `ok`.
NvrtcOutput compile_with(const Nvrtc& nvrtc, const std::string& source, const std::vector<NvrtcHeader>& headers,
                         const std::vector<std::string>& options);

}  // namespace tw
