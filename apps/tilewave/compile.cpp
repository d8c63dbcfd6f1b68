#include "compile.hpp"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <mutex>
#include <thread>

#include "apps/tilewave/terminal.hpp"
#include "runtime/format.hpp"
#include "tilewave/error.hpp"

namespace tw::cli {
namespace {

/// Shows "[12/40] gemm_bf16_nt". Thread-safe.
class Progress {
 public:
  explicit Progress(std::size_t total) : total_(total) {}

  void done(const std::string& name) {
    const std::lock_guard lock(mutex_);
    screen_.progress(tw::format("[{}/{}] {}", ++done_, total_, name));
  }

 private:
  std::mutex mutex_;
  std::size_t total_;
  std::size_t done_ = 0;
  Screen screen_;
};

using Clock = std::chrono::steady_clock;

/// Sets `cache_keeps` to false if a kernel that was just compiled is not found in the cache. The cache is not tried again then, because
/// each try costs a compilation.
void compile_one(CompileResult& result, const CompileOptions& options, std::atomic<bool>& cache_keeps) {
  try {
    result.kernel = compile(result.spec, options.arch, !options.no_cache);
    if (!options.no_cache && cache_keeps) {
      const auto begin = Clock::now();
      const bool found = compile(result.spec, options.arch).from_cache;
      if (found) {
        result.load_ms = std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
      } else {
        cache_keeps = false;
      }
    }
    if (!options.output.empty()) write_pack(options.output, result.spec, result.kernel, options.arch);
  } catch (const DeviceError&) {
    throw;  // NVRTC is missing or broken: no kernel can be compiled
  } catch (const std::exception& error) {
    result.failure = error.what();
  }
}

/// Finds problems with the folder before minutes of compiling, not after.
void require_writable(const std::string& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (!error && access(folder.c_str(), W_OK | X_OK) != 0) error.assign(errno, std::generic_category());
  if (error) throw Error(tw::format("{}: {}", folder, error.message()));
}

int shared_bytes(const CompileResult& r) { return r.kernel.module.shared_bytes + r.kernel.static_shared_bytes; }

}  // namespace

std::vector<std::string> CompileResult::problems() const {
  if (!failure.empty()) return {failure};
  std::vector<std::string> list;
  if (kernel.spill_bytes > 0) list.push_back(tw::format("kernel {}: spills {} bytes", spec.name, kernel.spill_bytes));
  for (const std::string& message : kernel.performance_losses) list.push_back(tw::format("kernel {}: {}", spec.name, message));
  if (kernel.module.loads && kernel.tensor_core_instruction.empty())
    list.push_back(tw::format("kernel {}: has no tensor-core instruction", spec.name));
  return list;
}

std::vector<CompileResult> compile_kernels(const std::vector<RegisteredKernel>& kernels, const CompileOptions& options) {
  if (!options.output.empty()) require_writable(options.output);
  std::vector<CompileResult> results;
  for (const RegisteredKernel& kernel : kernels) results.push_back({kernel.family, kernel.spec, {}, {}, {}});
  Progress progress(results.size());
  std::atomic<std::size_t> next = 0;
  std::atomic<bool> cache_keeps = true;
  std::mutex mutex;
  std::exception_ptr failure;
  const auto work = [&] {
    try {
      for (std::size_t i = next.fetch_add(1); i < results.size(); i = next.fetch_add(1)) {
        compile_one(results[i], options, cache_keeps);
        progress.done(results[i].spec.name);
      }
    } catch (...) {
      next = results.size();
      const std::lock_guard lock(mutex);
      failure = std::current_exception();
    }
  };
  const unsigned cores = std::max(1u, std::thread::hardware_concurrency());
  const std::size_t threads = std::min<std::size_t>(options.threads > 0 ? static_cast<unsigned>(options.threads) : cores, results.size());
  std::vector<std::jthread> team;  // joins even if a thread cannot be started
  for (std::size_t i = 1; i < threads; ++i) team.emplace_back(work);
  work();
  team.clear();
  if (failure) std::rethrow_exception(failure);
  return results;
}

nlohmann::ordered_json to_json(const CompileResult& r) {
  nlohmann::ordered_json json;
  json["name"] = r.spec.name;
  json["family"] = r.family;
  json["ok"] = r.problems().empty();
  const bool compiled = r.failure.empty();
  const auto if_compiled = [&](auto value) { return compiled ? nlohmann::ordered_json(value) : nlohmann::ordered_json(nullptr); };
  json["registers"] = if_compiled(r.kernel.registers);
  json["spill_bytes"] = if_compiled(r.kernel.spill_bytes);
  json["shared_bytes"] = if_compiled(shared_bytes(r));
  json["threads"] = if_compiled(r.kernel.module.threads);
  json["compile_ms"] = if_compiled(r.kernel.compile_ms);
  json["load_ms"] = r.load_ms ? nlohmann::ordered_json(*r.load_ms) : nlohmann::ordered_json(nullptr);
  json["from_cache"] = r.kernel.from_cache;
  json["instruction"] = r.kernel.tensor_core_instruction;
  json["performance_losses"] = r.kernel.performance_losses;
  json["compiler"] = r.kernel.compiler;
  json["failure"] = compiled ? nlohmann::ordered_json(nullptr) : nlohmann::ordered_json(r.failure);
  return json;
}

void print_table(const std::vector<CompileResult>& results) {
  std::size_t width = 4;
  for (const CompileResult& r : results) width = std::max(width, r.spec.name.size());
  tw::print("{:<{}} {:>9} {:>7} {:>9} {:>7} {:>10} {:>8}  {}\n", "name", width, "registers", "spilled", "shared", "threads", "compile ms",
            "load ms", "instruction");
  for (const CompileResult& r : results) {
    if (!r.failure.empty()) {
      tw::print("{:<{}} failed\n", r.spec.name, width);
      continue;
    }
    tw::print("{:<{}} {:>9} {:>7} {:>9} {:>7} {:>10.0f} {:>8}  {}\n", r.spec.name, width, r.kernel.registers, r.kernel.spill_bytes,
              shared_bytes(r), r.kernel.module.threads, r.kernel.compile_ms, r.load_ms ? tw::format("{:.1f}", *r.load_ms) : "-",
              r.kernel.tensor_core_instruction.empty() ? "-" : r.kernel.tensor_core_instruction);
  }
}

bool report_problems(const std::vector<CompileResult>& results) {
  bool good = true;
  for (const CompileResult& result : results) {
    for (const std::string& problem : result.problems()) {
      good = false;
      tw::print(stderr, "tilewave: {}\n", shown(stderr, problem));
    }
  }
  return good;
}

}  // namespace tw::cli
