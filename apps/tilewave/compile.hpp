#pragma once

// What `tilewave kernels compile` does.

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

/// What became of one kernel.
struct CompileResult {
  std::string family;
  KernelSpec spec;
  CompiledKernel kernel;          ///< empty when `failure` is not
  std::optional<double> load_ms;  ///< reading it back from the cache; none under --no-cache, or when the cache keeps nothing
  std::string failure;            ///< why it did not compile or could not be written

  /// Everything that makes the check fail, one text each.
  std::vector<std::string> problems() const;
};

/// Compiles all of them in parallel, with a line of progress on stderr where that is a terminal. A kernel that fails is reported in its
/// result. Throws DeviceError when kernels are missing in the cache and so is NVRTC, Error for a folder that cannot be written.
std::vector<CompileResult> compile_kernels(const std::vector<RegisteredKernel>& kernels, const CompileOptions& options);

nlohmann::ordered_json to_json(const CompileResult& result);
void print_table(const std::vector<CompileResult>& results);
/// Writes problems to stderr. True if there are none.
bool report_problems(const std::vector<CompileResult>& results);

}  // namespace tw::cli
