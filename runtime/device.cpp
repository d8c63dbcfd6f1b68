#include "tilewave/device.hpp"

#include <charconv>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "runtime/format.hpp"
#include "runtime/gpu.hpp"
#include "runtime/host.hpp"
#include "runtime/nvrtc.hpp"
#include "runtime/target.hpp"
#include "tilewave/error.hpp"
#include "tilewave/tile/cpu/library.tile.hpp"

namespace tw {
namespace {

DeviceInfo describe_cpu() {
  const HostMemory memory = host_memory();
  DeviceInfo info;
  info.device = Device::cpu();
  info.name = host_cpu_name();
  info.isa = cpu::library().isa;
  info.units = cpu_threads();
  info.total_memory = memory.total;
  info.free_memory = memory.available;
  info.l2_bytes = host_cache_bytes();
  info.usable = true;
  return info;
}

/// Free memory can only be queried inside a context. A GPU that the runtime has not opened is opened for the query, which also shows
/// whether it can be used.
std::size_t free_memory(const cuda::Driver& d, int index, cuda::Device device) {
  std::size_t free = 0;
  std::size_t total = 0;
  if (Gpu* gpu = Gpu::find_open(index)) {
    const CurrentContext current(*gpu);
    cuda::check(d.mem_get_info(&free, &total), "cuMemGetInfo");
    return free;
  }
  cuda::Context before = nullptr;
  cuda::Context context = nullptr;
  cuda::check(d.ctx_get_current(&before), "cuCtxGetCurrent");
  cuda::check(d.primary_ctx_retain(&context, device), "cuDevicePrimaryCtxRetain");
  cuda::Result result = d.ctx_set_current(context);
  if (result == cuda::Result::success) result = d.mem_get_info(&free, &total);
  d.ctx_set_current(before);
  d.primary_ctx_release(device);
  cuda::check(result, "cuMemGetInfo");
  return free;
}

DeviceInfo describe_gpu(const cuda::Driver& d, int index) {
  DeviceInfo info;
  info.device = Device::cuda(index);
  try {
    cuda::Device device = 0;
    cuda::check(d.device_get(&device, index), "cuDeviceGet");
    auto attribute = [&](cuda::DeviceAttribute which) {
      int value = 0;
      cuda::check(d.device_get_attribute(&value, which, device), "cuDeviceGetAttribute");
      return value;
    };
    char name[256] = {};
    cuda::check(d.device_get_name(name, sizeof(name), device), "cuDeviceGetName");
    info.name = name;
    const int major = attribute(cuda::DeviceAttribute::compute_capability_major);
    const int minor = attribute(cuda::DeviceAttribute::compute_capability_minor);
    info.isa = tw::format("sm_{}{}", major, minor);
    info.units = attribute(cuda::DeviceAttribute::multiprocessor_count);
    info.l2_bytes = static_cast<std::size_t>(attribute(cuda::DeviceAttribute::l2_cache_size));
    info.shared_per_block = static_cast<std::size_t>(attribute(cuda::DeviceAttribute::max_shared_memory_per_block_optin));
    cuda::check(d.device_total_mem(&info.total_memory, device), "cuDeviceTotalMem");
    info.problem = target_problem(info.name, {major, minor});
    if (!info.problem.empty()) return info;
    info.target = best_target({major, minor});
    info.free_memory = free_memory(d, index, device);
    info.usable = true;
  } catch (const DeviceError& error) {
    info.problem = error.what();
  }
  return info;
}

int gpu_count(const cuda::Driver& d) {
  int count = 0;
  cuda::check(d.device_get_count(&count), "cuDeviceGetCount");
  return count;
}

}  // namespace

std::string Device::name() const { return is_cuda() ? tw::format("cuda:{}", index) : "cpu"; }

Device Device::parse(std::string_view text) {
  if (text == "cpu") return cpu();
  if (text == "auto") return best_device();
  constexpr std::string_view kCuda = "cuda";
  if (text == kCuda) return cuda(0);
  if (text.substr(0, kCuda.size() + 1) == "cuda:") {
    const std::string_view digits = text.substr(kCuda.size() + 1);
    int index = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), index);
    if (error == std::errc() && end == digits.data() + digits.size() && digits.front() != '-') return cuda(index);
  }
  throw InvalidArgument(tw::format("device is \"{}\"; allowed: \"cpu\", \"cuda\", \"cuda:N\", \"auto\"", text));
}

DeviceReport find_devices() {
  DeviceReport report;
  report.devices.push_back(describe_cpu());
  const cuda::DriverSearch search = cuda::find_driver();
  if (search.version != 0) report.cuda_driver = cuda::version_text(search.version);
  report.cuda_problem = search.problem;
  if (search.driver != nullptr) {
    try {
      const int count = gpu_count(*search.driver);
      for (int i = 0; i < count; ++i) report.devices.push_back(describe_gpu(*search.driver, i));
    } catch (const DeviceError& error) {
      report.cuda_problem = error.what();
    }
  }
  const NvrtcSearch nvrtc = find_nvrtc();
  report.nvrtc_problem = nvrtc.problem;
  if (nvrtc.nvrtc != nullptr) report.nvrtc = tw::format("{} ({})", nvrtc.nvrtc->version_text(), nvrtc.nvrtc->path);
  return report;
}

std::vector<Device> DeviceReport::usable() const {
  std::vector<Device> result;
  for (const DeviceInfo& info : devices) {
    if (info.usable && (!info.device.is_cuda() || nvrtc_problem.empty())) result.push_back(info.device);
  }
  return result;
}

std::string DeviceReport::problems() const {
  std::string text;
  if (!cuda_problem.empty()) text += tw::format("no GPU: {}\n", cuda_problem);
  for (const DeviceInfo& info : devices) {
    if (!info.usable) text += tw::format("{}: {}\n", info.device.name(), info.problem);
  }
  if (!nvrtc_problem.empty()) text += tw::format("no kernels on GPUs: {}\n", nvrtc_problem);
  return text;
}

const DeviceInfo& device_info(Device device) {
  static std::mutex mutex;
  static auto& known = *new std::map<std::pair<bool, int>, DeviceInfo>;
  const std::lock_guard lock(mutex);
  const std::pair key(device.is_cuda(), device.index);
  auto found = known.find(key);
  if (found != known.end()) return found->second;
  if (!device.is_cuda()) {
    if (device.index != 0) throw DeviceError(tw::format("cpu:{}: no such device; there is one CPU", device.index));
    return known.emplace(key, describe_cpu()).first->second;
  }
  const cuda::Driver& d = cuda::driver();
  const int count = gpu_count(d);
  if (device.index < 0 || device.index >= count) {
    throw DeviceError(tw::format("{}: no such device; this machine has {} CUDA device(s)", device.name(), count));
  }
  return known.emplace(key, describe_gpu(d, device.index)).first->second;
}

Device best_device() {
  const cuda::DriverSearch search = cuda::find_driver();
  if (search.driver == nullptr) return Device::cpu();
  try {
    const int count = gpu_count(*search.driver);
    for (int i = 0; i < count; ++i) {
      if (device_info(Device::cuda(i)).usable) return Device::cuda(i);
    }
  } catch (const DeviceError&) {
    // find_devices() reports the reason.
  }
  return Device::cpu();
}

}  // namespace tw
