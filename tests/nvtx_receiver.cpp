// A profiler's library as NVTX 3 loads it: writes the ranges that it receives to the file named in NVTX_RECEIVER_FILE, one line each.

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace {

using Function = void (*)();

std::FILE* file = nullptr;
int depth = 0;

int push(const char* name) {
  std::fprintf(file, "%s%s\n", std::string(static_cast<std::size_t>(2 * depth), ' ').c_str(), name);
  return depth++;
}

int pop() {
  if (depth == 0) std::fprintf(file, "pop without push\n");
  return --depth;
}

void at_end() {
  std::fprintf(file, "%d open\n", depth);
  std::fclose(file);
}

// The tables that the program hands out.
struct Callbacks {
  std::size_t struct_size;
  int (*module_table)(int module, Function*** table, unsigned* size);
};

}  // namespace

extern "C" __attribute__((visibility("default"))) int InitializeInjectionNvtx2(const void* (*table_by_number)(std::uint32_t)) {
  constexpr std::uint32_t kCallbacks = 1;
  constexpr int kCore = 1, kModules = 6;
  constexpr unsigned kRangePushA = 9, kRangePop = 11;
  const auto* callbacks = static_cast<const Callbacks*>(table_by_number(kCallbacks));
  if (callbacks == nullptr || callbacks->struct_size < sizeof(Callbacks)) return 0;
  // Profilers write to all functions of all modules.
  const auto nothing = [] {};
  for (int module = kCore; module <= kModules; ++module) {
    Function** table = nullptr;
    unsigned size = 0;
    if (callbacks->module_table(module, &table, &size) == 0) return 0;
    for (unsigned i = 1; i < size; ++i) *table[i] = nothing;
  }
  Function** core = nullptr;
  unsigned size = 0;
  if (callbacks->module_table(kCore, &core, &size) == 0 || size <= kRangePop) return 0;
  *core[kRangePushA] = reinterpret_cast<Function>(push);
  *core[kRangePop] = reinterpret_cast<Function>(pop);
  const char* path = std::getenv("NVTX_RECEIVER_FILE");
  file = path == nullptr ? nullptr : std::fopen(path, "w");
  if (file == nullptr) return 0;
  std::atexit(at_end);
  return 1;
}
