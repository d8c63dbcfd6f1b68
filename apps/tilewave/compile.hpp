#pragma once

// The implementation of `tilewave kernels compile`.

#include <nlohmann/json.hpp>

#include <optional>
#include <string>
#include <vector>

#include "kernels/registry.hpp"

namespace tw::cli {

struct CompileOptions {
  std::string arch = "sm_90a";
  std::string output;  ///< the pack's folder; empty: none
  int threads = 0;     ///< 0: one per core
  bool no_cache = false;
};

/// The result for one kernel.
struct CompileResult {
  std::string family;
  KernelSpec spec;
  CompiledKernel kernel;          ///< empty if `failure` is set
  std::optional<double> load_ms;  ///< time to read it back from the cache; none with --no-cache, or if the cache does not work
  std::string failure;            ///< why it did not compile or could not be written

  /// One text for each reason why the check fails.
  std::vector<std::string> problems() const;
};

/// Compiles all kernels in parallel, with a progress line on stderr if that is a terminal. A kernel that fails is reported in its result.
/// Throws DeviceError if kernels must be compiled but NVRTC is missing, and Error if the folder cannot be written.
std::vector<CompileResult> compile_kernels(const std::vector<RegisteredKernel>& kernels, const CompileOptions& options);

nlohmann::ordered_json to_json(const CompileResult& result);
void print_table(const std::vector<CompileResult>& results);
/// Writes problems to stderr. True if there are none.
bool report_problems(const std::vector<CompileResult>& results);

}  // namespace tw::cli
