#include "runtime/nvtx.hpp"

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "runtime/paths.hpp"

// The library named in NVTX_INJECTION64_PATH exports InitializeInjectionNvtx2, which gets a function that returns tables by number. The
// table "callbacks" leads to a table of slots for each module of NVTX, into which the profiler writes its functions. These declarations
// are those of NVTX 3, https://github.com/NVIDIA/NVTX.

namespace tw {
namespace {

using Function = void (*)();

constexpr std::uint32_t kCallbacksTable = 1, kVersionTable = 3;
constexpr std::uint32_t kNvtxVersion = 3;
constexpr unsigned kRangePush = 9, kRangePop = 11;  // nvtxRangePushA, nvtxRangePop in the core module

/// The functions of one module by number, from 1 on. Profilers may write all of them.
constexpr unsigned kMostFunctions = 32;
struct Module {
  unsigned functions;  ///< one more than the largest number
  Function slots[kMostFunctions] = {};
  Function* table[kMostFunctions + 1] = {};  ///< null, then the slots, then null
};

constexpr int kCore = 1, kModules = 7;

Module& module(int number) {
  // none, core, CUDA driver, OpenCL, CUDA runtime, core with domains, synchronisation
  static Module modules[kModules] = {{0}, {16}, {15}, {15}, {7}, {16}, {7}};
  return modules[number];
}

extern "C" {

int tilewave_nvtx_module(int number, Function*** table, unsigned* size) {
  if (number <= 0 || number >= kModules) return 0;
  Module& wanted = module(number);
  for (unsigned i = 1; i < wanted.functions; ++i) wanted.table[i] = &wanted.slots[i];
  if (table != nullptr) *table = wanted.table;
  if (size != nullptr) *size = wanted.functions;
  return 1;
}

void tilewave_nvtx_profiler_version(std::uint32_t) {}

struct NvtxCallbacks {
  std::size_t struct_size = sizeof(NvtxCallbacks);
  int (*module_table)(int, Function***, unsigned*) = tilewave_nvtx_module;
};

struct NvtxVersion {
  std::size_t struct_size = sizeof(NvtxVersion);
  std::uint32_t version = kNvtxVersion;
  std::uint32_t reserved = 0;
  void (*set_profiler_version)(std::uint32_t) = tilewave_nvtx_profiler_version;
};

const void* tilewave_nvtx_table(std::uint32_t number) {
  static const NvtxCallbacks callbacks;
  static const NvtxVersion version;
  if (number == kCallbacksTable) return &callbacks;
  if (number == kVersionTable) return &version;
  return nullptr;
}

}  // extern "C"

std::optional<Nvtx> load() {
  const std::string path = environment("NVTX_INJECTION64_PATH");
  if (path.empty()) return {};
  void* library = dlopen(path.c_str(), RTLD_LAZY);
  if (library == nullptr) return {};
  using Initialize = int (*)(const void* (*)(std::uint32_t));
  const auto initialize = reinterpret_cast<Initialize>(dlsym(library, "InitializeInjectionNvtx2"));
  if (initialize == nullptr || initialize(tilewave_nvtx_table) == 0) return {};
  const Module& core = module(kCore);
  Nvtx nvtx;
  nvtx.push = reinterpret_cast<int (*)(const char*)>(core.slots[kRangePush]);
  nvtx.pop = reinterpret_cast<int (*)()>(core.slots[kRangePop]);
  if (nvtx.push == nullptr || nvtx.pop == nullptr) return {};
  return nvtx;
}

}  // namespace

const Nvtx* find_nvtx() {
  static const std::optional<Nvtx> nvtx = load();
  return nvtx ? &*nvtx : nullptr;
}

}  // namespace tw
