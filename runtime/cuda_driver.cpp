#include "runtime/cuda_driver.hpp"

#include <dlfcn.h>

#include <atomic>
#include <mutex>

#include "runtime/format.hpp"
#include "tilewave/error.hpp"

namespace tw::cuda {
namespace {

constexpr const char* kLibrary = "libcuda.so.1";

/// The first symbol that `handle` lacks, or null.
const char* load_symbols(void* handle, Driver& calls) {
  const char* missing = nullptr;
#define TILEWAVE_CUDA_LOAD(name, symbol, parameters)                                        \
  calls.name = reinterpret_cast<decltype(calls.name)>(dlsym(handle, #symbol)); /* NOLINT */ \
  if (calls.name == nullptr && missing == nullptr) missing = #symbol;
  TILEWAVE_CUDA_CALLS(TILEWAVE_CUDA_LOAD)
#undef TILEWAVE_CUDA_LOAD
  return missing;
}

}  // namespace

DriverSearch find_driver() {
  // The table and the library are never released, because destructors of tensors and streams may run when the process ends.
  static std::mutex mutex;
  static const Driver* found = nullptr;

  const std::lock_guard lock(mutex);
  if (found != nullptr) return {found, "", found->version};

  void* handle = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* reason = dlerror();
    return {nullptr, tw::format("no CUDA driver: {}", reason == nullptr ? kLibrary : reason), 0};
  }
  Driver calls;
  const char* missing = load_symbols(handle, calls);
  if (calls.driver_get_version != nullptr && calls.driver_get_version(&calls.version) != Result::success) calls.version = 0;
  if (missing != nullptr) {
    return {nullptr, tw::format("the CUDA driver ({}) is too old: it has no {}; CUDA 12.0 is needed", version_text(calls.version), missing),
            calls.version};
  }
  // A machine may have the driver's library but no GPU (a container without one, CUDA_VISIBLE_DEVICES empty, an MPS server that is down).
  Result result = calls.init(0);
  if (result != Result::success) {
    return {nullptr, tw::format("the CUDA driver ({}) cannot start: cuInit: {}", version_text(calls.version), describe(calls, result)),
            calls.version};
  }
  int count = 0;
  result = calls.device_get_count(&count);
  if (result != Result::success || count == 0) {
    return {nullptr,
            tw::format("the CUDA driver ({}) finds no GPU: cuDeviceGetCount: {}", version_text(calls.version),
                       result == Result::success ? "0 devices" : describe(calls, result)),
            calls.version};
  }
  found = new Driver(calls);
  return {found, "", found->version};
}

const Driver*& driver_of_thread() {
  static thread_local const Driver* replacement = nullptr;
  return replacement;
}

const Driver& driver() {
  if (const Driver* replacement = driver_of_thread()) return *replacement;
  static std::atomic<const Driver*> known = nullptr;  // no lock, because every launch comes here
  if (const Driver* calls = known.load(std::memory_order_acquire)) return *calls;
  DriverSearch search = find_driver();
  if (search.driver == nullptr) throw DeviceError(search.problem);
  known.store(search.driver, std::memory_order_release);
  return *search.driver;
}

std::string describe(const Driver& calls, Result result) {
  const char* name = nullptr;
  const char* text = nullptr;
  if (calls.get_error_name == nullptr || calls.get_error_name(result, &name) != Result::success || name == nullptr) name = nullptr;
  if (calls.get_error_string == nullptr || calls.get_error_string(result, &text) != Result::success || text == nullptr) text = nullptr;
  if (name == nullptr) return tw::format("CUDA error {}", static_cast<int>(result));
  std::string description = text == nullptr ? std::string(name) : tw::format("{} ({})", name, text);
  // Loading a module also takes memory, and the error does not say whether there is none left.
  std::size_t free = 0, total = 0;
  if (result == Result::out_of_memory && calls.mem_get_info != nullptr && calls.mem_get_info(&free, &total) == Result::success)
    description += tw::format("; {} of {} bytes of the device's memory are free", free, total);
  return description;
}

std::string describe(Result result) {
  DriverSearch search = find_driver();
  return describe(search.driver == nullptr ? Driver{} : *search.driver, result);
}

void check(Result result, const char* call) {
  if (result != Result::success) throw DeviceError(tw::format("{}: {}", call, describe(result)));
}

std::string version_text(int version) {
  return version == 0 ? "unknown version" : tw::format("{}.{}", version / 1000, version % 1000 / 10);
}

}  // namespace tw::cuda
