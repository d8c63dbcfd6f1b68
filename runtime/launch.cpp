#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <tuple>

#include "runtime/format.hpp"
#include "runtime/jit.hpp"
#include "runtime/stream.hpp"
#include "tilewave/error.hpp"
#include "tilewave/kernel.hpp"
#include "tilewave/tile/grid.tile.hpp"

namespace tw {
namespace {

constexpr const char* kArch = "sm_90a";
constexpr std::int64_t kLargestGrid = 0x7fffffff;  // CUDA's limit in x

/// A kernel in the memory of one GPU.
struct Loaded {
  KernelSpec spec;
  int device = 0;
  std::mutex mutex;                                // held while it is compiled and loaded
  std::atomic<cuda::Function> function = nullptr;  // set last
  std::int64_t blocks_at_once = 0;
};

/// Everything of a spec that makes a different kernel, or the same one launched differently.
bool same_kernel(const KernelSpec& a, const KernelSpec& b) {
  return a.threads == b.threads && a.shared_bytes == b.shared_bytes && a.cluster == b.cluster && a.params_bytes == b.params_bytes &&
         a.type == b.type && a.target == b.target && a.source == b.source;
}

/// All kernels ever asked for. They stay until the process ends, so pointers to them may be kept.
Loaded& find_or_add(const KernelSpec& spec, int device) {
  using Key = std::tuple<int, std::string, std::string, std::string, int, int, int, std::size_t>;
  static std::mutex mutex;
  static auto& known = *new std::map<Key, Loaded>;
  Key key{device, spec.type, spec.target, spec.source, spec.threads, spec.shared_bytes, spec.cluster, spec.params_bytes};
  const std::lock_guard lock(mutex);
  auto [found, added] = known.try_emplace(std::move(key));
  if (added) {
    found->second.spec = spec;
    found->second.device = device;
  }
  return found->second;
}

/// The fast path: a launch site has its spec at a fixed address as a rule, so each thread remembers what it found there. What lies at an
/// address may change, so the contents are compared too.
Loaded& find(const KernelSpec& spec, int device) {
  struct Slot {
    const KernelSpec* address = nullptr;
    Loaded* kernel = nullptr;
  };
  constexpr std::size_t kSlots = 64;
  thread_local std::array<Slot, kSlots> slots;
  Slot& slot = slots[(reinterpret_cast<std::uintptr_t>(&spec) / alignof(KernelSpec) * 31 + static_cast<std::size_t>(device)) % kSlots];
  if (slot.address == &spec && slot.kernel->device == device && same_kernel(slot.kernel->spec, spec)) return *slot.kernel;
  slot = {&spec, &find_or_add(spec, device)};
  return *slot.kernel;
}

void load(Loaded& kernel, const Gpu& gpu) {
  const KernelSpec& spec = kernel.spec;
  const cuda::Driver& d = cuda::driver();
  const DeviceInfo& info = device_info(Device::cuda(gpu.index()));
  if (!info.usable) throw DeviceError(tw::format("kernel {} cannot run on {}: {}", spec.name, info.device.name(), info.problem));
  if (static_cast<std::size_t>(spec.shared_bytes) > info.shared_per_block) {
    throw DeviceError(tw::format("kernel {} needs {} bytes of shared memory; a block on {} may have {}", spec.name, spec.shared_bytes,
                                 info.device.name(), info.shared_per_block));
  }
  const CompiledKernel compiled = compile(spec, kArch);

  const RelaxedCapture relaxed;  // a first launch may happen while its stream is being captured
  cuda::Module module = nullptr;
  cuda::Result result = d.module_load_data(&module, compiled.cubin.data());
  if (result == cuda::Result::invalid_image || result == cuda::Result::no_binary_for_gpu ||
      result == cuda::Result::unsupported_ptx_version) {
    throw DeviceError(
        tw::format("kernel {}: the driver (CUDA {}) is too old for machine code from {}: cuModuleLoadData: {}; install a newer driver or "
                   "an older NVRTC",
                   spec.name, cuda::version_text(d.version), compiled.compiler, cuda::describe(result)));
  }
  auto check = [&](cuda::Result outcome, const char* call) {
    if (outcome == cuda::Result::success) return;
    const std::string text = cuda::describe(outcome);
    if (module != nullptr) d.module_unload(module);
    throw DeviceError(tw::format("kernel {}: {}: {} ({} threads, {} bytes of shared memory, {} registers)", spec.name, call, text,
                                 spec.threads, spec.shared_bytes, compiled.registers));
  };
  check(result, "cuModuleLoadData");
  cuda::Function function = nullptr;
  check(d.module_get_function(&function, module, kEntryPoint), "cuModuleGetFunction");
  check(d.func_set_attribute(function, cuda::FunctionAttribute::max_dynamic_shared_size_bytes, spec.shared_bytes), "cuFuncSetAttribute");

  int blocks_per_sm = 0;
  check(d.occupancy_blocks_per_sm(&blocks_per_sm, function, spec.threads, static_cast<std::size_t>(spec.shared_bytes)),
        "cuOccupancyMaxActiveBlocksPerMultiprocessor");
  kernel.blocks_at_once = std::int64_t{gpu.multiprocessors()} * blocks_per_sm;
  if (spec.cluster > 1) {
    // A cluster lies within one group of multiprocessors, and groups may have an odd number of them: fewer fit than the product says. The
    // cluster's size is part of the kernel, so the question must not repeat it.
    cuda::LaunchConfig config;
    config.grid_x = static_cast<unsigned>(spec.cluster);
    config.block_x = static_cast<unsigned>(spec.threads);
    config.shared_bytes = static_cast<unsigned>(spec.shared_bytes);
    int clusters = 0;
    check(d.occupancy_clusters(&clusters, function, &config), "cuOccupancyMaxActiveClusters");
    kernel.blocks_at_once = std::min(kernel.blocks_at_once, std::int64_t{clusters} * spec.cluster);
  }
  if (kernel.blocks_at_once == 0) {
    d.module_unload(module);
    throw DeviceError(tw::format("kernel {} does not fit on {}: {} threads, {} registers each, {} bytes of shared memory, clusters of {}",
                                 spec.name, info.device.name(), spec.threads, compiled.registers, spec.shared_bytes, spec.cluster));
  }
  kernel.function.store(function, std::memory_order_release);
}

/// Blocks of a launch over `tiles` tiles.
std::int64_t blocks_for(std::int64_t tiles, const KernelSpec& spec, std::int64_t blocks_at_once) {
  const std::int64_t wanted = spec.persistent ? std::min(tiles, blocks_at_once) : tiles;
  return std::max<std::int64_t>(wanted / spec.cluster, 1) * spec.cluster;
}

}  // namespace

void launch_on_gpu(const KernelSpec& spec, const void* params, const TileGrid& grid, const Stream& stream) {
  if (!stream.device().is_cuda()) throw InvalidArgument(tw::format("kernel {}: stream is on cpu; allowed: a CUDA device", spec.name));
  if (params == nullptr) throw InvalidArgument(tw::format("kernel {}: params is null; allowed: {} bytes", spec.name, spec.params_bytes));
  if (grid.m < 0 || grid.n < 0 || grid.batch < 0) {
    throw InvalidArgument(tw::format("kernel {}: grid is {} x {} x {}; allowed: 0 or more", spec.name, grid.m, grid.n, grid.batch));
  }
  if (grid.m == 0 || grid.n == 0 || grid.batch == 0) return;
  const std::int64_t plane = std::int64_t{grid.m} * grid.n;
  if (plane > kLargestGrid || plane * grid.batch > kLargestGrid) {
    throw InvalidArgument(
        tw::format("kernel {}: grid is {} x {} x {}; allowed: at most {} tiles", spec.name, grid.m, grid.n, grid.batch, kLargestGrid));
  }

  Gpu& gpu = Gpu::get(stream.device().index);
  const CurrentContext current(gpu);
  Loaded& kernel = find(spec, gpu.index());
  if (kernel.function.load(std::memory_order_acquire) == nullptr) {
    const std::lock_guard lock(kernel.mutex);
    if (kernel.function.load(std::memory_order_acquire) == nullptr) load(kernel, gpu);
  }

  TileGrid passed = grid;
  if (passed.counter == nullptr) passed.counter = StreamAccess::counter_for_launch(stream);
  const std::int64_t blocks = blocks_for(plane * grid.batch, spec, kernel.blocks_at_once);
  void* arguments[] = {const_cast<void*>(params), &passed};
  // Its blocks may come onto the device while the previous kernel's last ones finish: every kernel waits for that before it touches memory.
  cuda::LaunchAttribute overlap;
  cuda::LaunchConfig config;
  config.grid_x = static_cast<unsigned>(blocks);
  config.block_x = static_cast<unsigned>(spec.threads);
  config.shared_bytes = static_cast<unsigned>(spec.shared_bytes);
  config.stream = StreamAccess::native(stream);
  config.attributes = &overlap;
  config.attribute_count = 1;
  const cuda::Result result = cuda::driver().launch_kernel(&config, kernel.function.load(std::memory_order_relaxed), arguments, nullptr);
  if (result != cuda::Result::success) {
    throw DeviceError(tw::format(
        "kernel {} was not launched: cuLaunchKernelEx: {} ({} blocks for {} x {} x {} tiles, {} threads, {} bytes of shared memory)",
        spec.name, cuda::describe(result), blocks, grid.m, grid.n, grid.batch, spec.threads, spec.shared_bytes));
  }
}

}  // namespace tw
