#include "runtime/dry_run.hpp"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstdint>
#include <cstring>
#include <deque>
#include <mutex>
#include <set>
#include <tuple>
#include <utility>

#include "runtime/cuda_driver.hpp"
#include "runtime/format.hpp"
#include "runtime/gpu.hpp"
#include "runtime/recording.hpp"
#include "tilewave/error.hpp"

namespace tw {
namespace {

/// The GPUs of all dry runs. The runtime keeps what it knows about a device by its index, so equal GPUs share one.
class DryRunGpus {
 public:
  static DryRunGpus& get() {
    static DryRunGpus& gpus = *new DryRunGpus;
    return gpus;
  }

  Device device_of(const GpuProperties& gpu) {
    const std::lock_guard lock(mutex_);
    auto found = std::find(gpus_.begin(), gpus_.end(), gpu);
    if (found == gpus_.end()) {
      if (gpus_.size() == kMostDryRunGpus)
        throw DeviceError(
            tw::format("dry run: this process has had {} different GPUs; allowed: at most {}", gpus_.size(), kMostDryRunGpus));
      found = gpus_.insert(gpus_.end(), gpu);
    }
    return Device::cuda(kFirstDryRunGpu + static_cast<int>(found - gpus_.begin()));
  }
  const GpuProperties& operator[](cuda::Device device) {
    const std::lock_guard lock(mutex_);
    return gpus_.at(static_cast<std::size_t>(device - kFirstDryRunGpu));
  }

 private:
  std::mutex mutex_;
  std::deque<GpuProperties> gpus_;  // elements stay where they are
};

using cuda::Result;

/// Any call that has nothing to return.
template <class... Arguments>
Result succeed(Arguments...) {
  return Result::success;
}

/// Handles are never null: to the runtime that is a missing object.
template <class Handle, class... Arguments>
Result make(Handle* handle, Arguments...) {
  *handle = reinterpret_cast<Handle>(1);
  return Result::success;
}

Result attribute_of(int* value, cuda::DeviceAttribute attribute, cuda::Device device) {
  const GpuProperties& gpu = DryRunGpus::get()[device];
  switch (attribute) {
    case cuda::DeviceAttribute::multiprocessor_count:
      *value = gpu.multiprocessors;
      break;
    case cuda::DeviceAttribute::l2_cache_size:
      *value = static_cast<int>(gpu.l2_bytes);
      break;
    case cuda::DeviceAttribute::compute_capability_major:
      *value = gpu.compute_capability.major;
      break;
    case cuda::DeviceAttribute::compute_capability_minor:
      *value = gpu.compute_capability.minor;
      break;
    case cuda::DeviceAttribute::max_shared_memory_per_block_optin:
      *value = static_cast<int>(gpu.shared_per_block);
      break;
    case cuda::DeviceAttribute::memory_pools_supported:
      *value = 1;
      break;
  }
  return Result::success;
}

std::set<void*>*& recorded_allocation_streams() {
  static thread_local std::set<void*>* recorded = nullptr;
  return recorded;
}

Result make_stream(cuda::Stream* stream, unsigned) {
  static std::atomic<std::uintptr_t> last = 0;
  *stream = reinterpret_cast<cuda::Stream>(++last);
  return Result::success;
}

Result allocate_addresses(cuda::Address* address, std::size_t bytes, cuda::MemoryPool, cuda::Stream stream) {
  recorded_allocation_streams()->insert(stream);
  constexpr cuda::Address kAlignment = 512;  // as the driver's
  static std::atomic<cuda::Address> next = cuda::Address{1} << 40;
  *address = next.fetch_add((bytes + kAlignment - 1) / kAlignment * kAlignment);
  return Result::success;
}

Result memory_info(std::size_t* free, std::size_t* total) {
  // Which device is current makes no difference: nothing is ever allocated.
  *free = *total = std::size_t{64} << 30;
  return Result::success;
}

cuda::Driver make_driver() {
  cuda::Driver d;
#define TILEWAVE_DRY_RUN_CALL(name, symbol, parameters) d.name = succeed;
  TILEWAVE_CUDA_CALLS(TILEWAVE_DRY_RUN_CALL)
#undef TILEWAVE_DRY_RUN_CALL
  d.version = 13000;
  d.driver_get_version = [](int* version) { return *version = 13000, Result::success; };
  const auto error_text = [](Result, const char** text) { return *text = "an error in a dry run", Result::success; };
  d.get_error_name = error_text;
  d.get_error_string = error_text;
  d.device_get_count = [](int* count) { return *count = kMostGpus, Result::success; };
  d.device_get = [](cuda::Device* device, int ordinal) { return *device = ordinal, Result::success; };
  d.device_get_name = [](char* name, int size, cuda::Device device) {
    std::snprintf(name, static_cast<std::size_t>(size), "%s", DryRunGpus::get()[device].name.c_str());
    return Result::success;
  };
  d.device_get_attribute = attribute_of;
  d.device_total_mem = [](std::size_t* bytes, cuda::Device device) {
    *bytes = DryRunGpus::get()[device].total_memory;
    return Result::success;
  };
  d.primary_ctx_retain = make;
  d.ctx_get_current = [](cuda::Context* context) { return *context = nullptr, Result::success; };
  d.mem_get_info = memory_info;
  d.mem_pool_create = make;
  d.mem_pool_get_attribute = [](cuda::MemoryPool, cuda::PoolAttribute, void* value) {
    std::memset(value, 0, sizeof(std::uint64_t));
    return Result::success;
  };
  d.mem_alloc_from_pool_async = allocate_addresses;
  d.memcpy_dtoh_async = [](void* to, cuda::Address, std::size_t bytes, cuda::Stream) {
    std::memset(to, 0, bytes);
    return Result::success;
  };
  d.stream_create = make_stream;
  d.stream_is_capturing = [](cuda::Stream, cuda::CaptureStatus* status) { return *status = cuda::CaptureStatus::none, Result::success; };
  d.stream_end_capture = [](cuda::Stream, cuda::Graph* graph) { return make(graph); };
  d.event_create = make;
  d.event_elapsed_time = [](float* milliseconds, cuda::Event, cuda::Event) { return *milliseconds = 0, Result::success; };
  d.graph_instantiate = make;
  // Launches are recorded before they come here, and with them ends what needs a module.
  d.module_load_data = [](cuda::Module*, const void*) { return Result::not_supported; };
  d.launch_kernel = [](const cuda::LaunchConfig*, cuda::Function, void**, void**) { return Result::not_supported; };
  return d;
}

}  // namespace

GpuProperties gpu_properties(Device device) {
  const DeviceInfo& info = device_info(device);
  if (!info.usable) throw DeviceError(tw::format("{}: {}", device.name(), info.problem));
  const Gpu& gpu = Gpu::get(device.index);
  return {info.name, gpu.compute_capability(), info.units, info.total_memory, info.l2_bytes, info.shared_per_block};
}

GpuProperties typical_gpu(std::string_view arch) {
  struct Typical {
    const char* name;
    ComputeCapability compute_capability;
    int multiprocessors, gib, l2_mib;
  };
  // NVIDIA's data sheets.
  static constexpr Typical kTypical[] = {
      {"NVIDIA A100", {8, 0}, 108, 80, 40},    {"NVIDIA RTX 3090", {8, 6}, 82, 24, 6},    {"NVIDIA Orin", {8, 7}, 16, 32, 4},
      {"NVIDIA L40S", {8, 9}, 142, 48, 96},    {"NVIDIA H200", {9, 0}, 132, 141, 50},     {"NVIDIA B200", {10, 0}, 148, 180, 126},
      {"NVIDIA B300", {10, 3}, 148, 270, 126}, {"NVIDIA RTX 5090", {12, 0}, 170, 32, 96}, {"NVIDIA GB10", {12, 1}, 48, 119, 24},
  };
  target_of_architecture(arch);  // refuses unknown ones
  const std::string_view digits = arch.substr(3, arch.find_last_of("0123456789") - 2);
  int number = 0;
  std::from_chars(digits.data(), digits.data() + digits.size(), number);
  const ComputeCapability wanted{number / 10, number % 10};
  const Typical& gpu =
      *std::find_if(std::begin(kTypical), std::end(kTypical), [&](const Typical& t) { return t.compute_capability == wanted; });
  return {tw::format("{} (dry run)", gpu.name),
          wanted,
          gpu.multiprocessors,
          static_cast<std::size_t>(gpu.gib) << 30,
          static_cast<std::size_t>(gpu.l2_mib) << 20,
          static_cast<std::size_t>(max_shared_bytes(arch))};
}

DryRun::DryRun(const GpuProperties& gpu)
    : device_(DryRunGpus::get().device_of(gpu)),
      launches_before_(std::exchange(recorded_launches(), &launches_)),
      allocation_streams_before_(std::exchange(recorded_allocation_streams(), &allocation_streams_)),
      driver_before_(cuda::driver_of_thread()) {
  static const cuda::Driver& driver = *new cuda::Driver(make_driver());
  cuda::driver_of_thread() = &driver;
}

DryRun::~DryRun() {
  cuda::driver_of_thread() = driver_before_;
  recorded_launches() = launches_before_;
  recorded_allocation_streams() = allocation_streams_before_;
}

const std::vector<KernelSpec>& DryRun::kernels() {
  kernels_.insert(kernels_.end(), launches_.begin(), launches_.end());
  launches_.clear();
  return kernels_ = unique_kernels(kernels_);
}

bool is_dry_run(Device device) { return device.is_cuda() && device.index >= kFirstDryRunGpu; }

std::vector<KernelSpec> unique_kernels(const std::vector<KernelSpec>& specs) {
  std::vector<KernelSpec> unique;
  std::set<std::tuple<std::string_view, std::string_view, std::string_view>> seen;
  for (const KernelSpec& spec : specs)
    if (seen.insert({spec.type, spec.target, spec.source}).second) unique.push_back(spec);
  return unique;
}

}  // namespace tw
