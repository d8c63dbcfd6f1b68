#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>

#include "runtime/bind.hpp"
#include "runtime/format.hpp"
#include "runtime/jit.hpp"
#include "runtime/launch_blocks.hpp"
#include "runtime/launch_observer.hpp"
#include "runtime/recording.hpp"
#include "runtime/stream.hpp"
#include "runtime/target.hpp"
#include "tilewave/detail/sm_margin.hpp"
#include "tilewave/error.hpp"
#include "tilewave/launch.hpp"

namespace tw {

namespace detail {

/// A kernel in the memory of one GPU.
struct Loaded {
  KernelSpec spec;
  int device = 0;
  std::mutex mutex;                                // held while it is compiled and loaded
  std::atomic<cuda::Function> function = nullptr;  // set last
  ModuleInfo module;
  RoomForBlocks room;
};

}  // namespace detail

namespace {

using detail::Loaded;

constexpr std::int64_t kLargestGrid = 0x7fffffff;  // CUDA's limit in x

/// Of the calling thread: see ScopedSmMargin.
thread_local int sm_margin = 0;

/// All kernels that were ever requested. They live until the process ends, so pointers to them stay valid.
Loaded& find_loaded(const KernelSpec& spec, int device) {
  using Key = std::tuple<int, std::string, std::string, std::string>;
  static std::mutex mutex;
  static auto& known = *new std::map<Key, Loaded>;
  const std::lock_guard lock(mutex);
  auto [found, added] = known.try_emplace({device, spec.type, spec.target, spec.source});
  if (added) {
    found->second.spec = spec;
    found->second.device = device;
  }
  return found->second;
}

cuda::Function load(Loaded& kernel, const Gpu& gpu) {
  const KernelSpec& spec = kernel.spec;
  const cuda::Driver& d = cuda::driver();
  const DeviceInfo& info = device_info(Device::cuda(gpu.index()));
  if (!info.usable) throw DeviceError(tw::format("kernel {} cannot run on {}: {}", spec.name, info.device.name(), info.problem));
  const CompiledKernel compiled = compile(spec, architecture(gpu.compute_capability()));
  const ModuleInfo& m = compiled.module;
  if (static_cast<std::size_t>(m.shared_bytes) > info.shared_per_block) {
    throw DeviceError(tw::format("kernel {} needs {} bytes of shared memory; a block on {} may have {}", spec.name, m.shared_bytes,
                                 info.device.name(), info.shared_per_block));
  }

  const RelaxedCapture relaxed;  // the first launch may happen while the stream is being captured
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
                                 m.threads, m.shared_bytes, compiled.registers));
  };
  check(result, "cuModuleLoadData");
  cuda::Function function = nullptr;
  check(d.module_get_function(&function, module, kEntryPoint), "cuModuleGetFunction");
  check(d.func_set_attribute(function, cuda::FunctionAttribute::max_dynamic_shared_size_bytes, m.shared_bytes), "cuFuncSetAttribute");

  int blocks_per_sm = 0;
  check(d.occupancy_blocks_per_sm(&blocks_per_sm, function, m.threads, static_cast<std::size_t>(m.shared_bytes)),
        "cuOccupancyMaxActiveBlocksPerMultiprocessor");
  kernel.room = {std::int64_t{gpu.multiprocessors()} * blocks_per_sm, blocks_per_sm, gpu.multiprocessors()};
  if (m.cluster > 1) {
    // A cluster runs on one GPC, and a GPC may have an odd number of SMs, so fewer clusters fit than the numbers of blocks suggest.
    cuda::LaunchAttribute cluster = cuda::LaunchAttribute::cluster(m.cluster);
    cuda::LaunchConfig config;
    config.grid_x = static_cast<unsigned>(m.cluster);
    config.block_x = static_cast<unsigned>(m.threads);
    config.shared_bytes = static_cast<unsigned>(m.shared_bytes);
    config.attributes = &cluster;
    config.attribute_count = 1;
    int clusters = 0;
    check(d.occupancy_clusters(&clusters, function, &config), "cuOccupancyMaxActiveClusters");
    kernel.room.at_once = std::min(kernel.room.at_once, std::int64_t{clusters} * m.cluster);
  }
  if (kernel.room.at_once == 0) {
    d.module_unload(module);
    throw DeviceError(tw::format("kernel {} does not fit on {}: {} threads, {} registers each, {} bytes of shared memory, clusters of {}",
                                 spec.name, info.device.name(), m.threads, compiled.registers, m.shared_bytes, m.cluster));
  }
  kernel.module = m;
  return function;
}

/// Compiles and loads the kernel if necessary. `check` inspects the module before the kernel is used for the first time.
template <class Check>
void ensure_loaded(Loaded& kernel, const Gpu& gpu, Check check) {
  if (kernel.function.load(std::memory_order_acquire) != nullptr) return;
  const std::lock_guard lock(kernel.mutex);
  if (kernel.function.load(std::memory_order_acquire) != nullptr) return;
  const cuda::Function function = load(kernel, gpu);
  check();
  kernel.function.store(function, std::memory_order_release);
}

/// The number of tiles of a grid. Throws InvalidArgument for an invalid one.
std::int64_t count_tiles(std::string_view kernel, const TileGrid& grid) {
  if (grid.m < 0 || grid.n < 0 || grid.batch < 0) {
    throw InvalidArgument(tw::format("kernel {}: grid is {} x {} x {}; allowed: 0 or more", kernel, grid.m, grid.n, grid.batch));
  }
  const std::int64_t plane = std::int64_t{grid.m} * grid.n;
  if (plane > kLargestGrid || plane * grid.batch > kLargestGrid) {
    throw InvalidArgument(
        tw::format("kernel {}: grid is {} x {} x {}; allowed: at most {} tiles", kernel, grid.m, grid.n, grid.batch, kLargestGrid));
  }
  return plane * grid.batch;
}

void enqueue(Loaded& kernel, const Gpu& gpu, const void* params, const TileGrid& grid, std::int64_t tiles, const Stream& stream) {
  TileGrid passed = grid;
  if (passed.counter == nullptr) passed.counter = StreamAccess::counter_for_launch(stream);
  const ModuleInfo& module = kernel.module;
  const std::int64_t blocks = launch_blocks(tiles, module.persistent, module.cluster, kernel.room, sm_margin);
  void* arguments[] = {const_cast<void*>(params), &passed};
  // Blocks may start while the previous kernel's last blocks finish: every kernel waits for them before it accesses memory. GPUs before 9.0
  // support neither this nor clusters.
  // Blocks that wait for others cannot start while some of these have to wait for room on the GPU.
  cuda::LaunchAttribute attributes[] = {module.waits ? cuda::LaunchAttribute::cooperative() : cuda::LaunchAttribute::overlap(),
                                        cuda::LaunchAttribute::cluster(module.cluster)};
  cuda::LaunchConfig config;
  config.grid_x = static_cast<unsigned>(blocks);
  config.block_x = static_cast<unsigned>(module.threads);
  config.shared_bytes = static_cast<unsigned>(module.shared_bytes);
  config.stream = StreamAccess::native(stream);
  config.attributes = attributes;
  config.attribute_count = module.cluster > 1 ? 2 : module.waits || gpu.launches_overlap() ? 1 : 0;
  LaunchObserver* const observer = launch_observer();
  if (observer != nullptr) [[unlikely]]
    observer->launch_begin(kernel.spec, stream);
  const cuda::Result result = cuda::driver().launch_kernel(&config, kernel.function.load(std::memory_order_relaxed), arguments, nullptr);
  if (result != cuda::Result::success) {
    throw DeviceError(tw::format(
        "kernel {} was not launched: cuLaunchKernelEx: {} ({} blocks for {} x {} x {} tiles, {} threads, {} bytes of shared memory)",
        kernel.spec.name, cuda::describe(result), blocks, grid.m, grid.n, grid.batch, module.threads, module.shared_bytes));
  }
  if (observer != nullptr) [[unlikely]]
    observer->launch_end(kernel.spec, stream);
}

}  // namespace

void launch_on_gpu(const KernelSpec& spec, const void* params, const TileGrid& grid, const Stream& stream) {
  if (!stream.device().is_cuda()) throw InvalidArgument(tw::format("kernel {}: stream is on cpu; allowed: a CUDA device", spec.name));
  if (params == nullptr) throw InvalidArgument(tw::format("kernel {}: params is null; allowed: the kernel's Params", spec.name));
  const std::int64_t tiles = count_tiles(spec.name, grid);
  if (tiles == 0) return;
  if (recorded_launches() != nullptr) return recorded_launches()->push_back(spec);
  Gpu& gpu = Gpu::get(stream.device().index);
  const CurrentContext current(gpu);
  Loaded& kernel = find_loaded(spec, gpu.index());
  ensure_loaded(kernel, gpu, [] {});
  enqueue(kernel, gpu, params, grid, tiles, stream);
}

namespace detail {

ScopedSmMargin::ScopedSmMargin(int margin) : before_(std::exchange(sm_margin, margin)) {}
ScopedSmMargin::~ScopedSmMargin() { sm_margin = before_; }

class NamedKernel {
 public:
  std::string type, source;

  KernelSpec spec(GpuTarget wanted, bool tma_load, bool tma_store) const { return spec_for(target_variant(wanted, tma_load, tma_store)); }

  /// The variant for a device. Looked up once, then a pointer.
  Loaded& variant(GpuTarget wanted, bool tma_load, bool tma_store, int device) const {
    const TargetVariant target = target_variant(wanted, tma_load, tma_store);
    if (device >= kDevices) return find(target, device);
    std::atomic<Loaded*>& known = variants_[device][target.index];
    Loaded* loaded = known.load(std::memory_order_acquire);
    if (loaded == nullptr) known.store(loaded = &find(target, device), std::memory_order_release);
    return *loaded;
  }

 private:
  static constexpr int kDevices = 16;
  KernelSpec spec_for(const TargetVariant& target) const {
    return {.name = type, .type = type, .target = std::string(target.text), .source = source};
  }
  Loaded& find(const TargetVariant& target, int device) const { return find_loaded(spec_for(target), device); }
  mutable std::atomic<Loaded*> variants_[kDevices][kTargetVariants] = {};
};

const NamedKernel& named_kernel(std::string_view type, std::string_view source) {
  static std::mutex mutex;
  static auto& known = *new std::map<std::pair<std::string, std::string>, NamedKernel>;
  const std::lock_guard lock(mutex);
  auto [found, added] = known.try_emplace({std::string(type), std::string(source)});
  if (added) {
    found->second.type = type;
    found->second.source = source;
  }
  return found->second;
}

std::string_view type_of(const NamedKernel& kernel) { return kernel.type; }
std::string_view source_of(const NamedKernel& kernel) { return kernel.source; }

void launch_bound(const NamedKernel& kernel, const GpuBinder& binder, const ParamsUnderConstruction& params, TileGrid grid,
                  const Stream& stream) {
  std::int64_t tiles = count_tiles(kernel.type, grid);
  if (tiles == 0) return;
  if (recorded_launches() != nullptr)
    return recorded_launches()->push_back(kernel.spec(stream.target(), binder.tma_load, binder.tma_store));
  Gpu& gpu = Gpu::get(stream.device().index);
  const CurrentContext current(gpu);
  Loaded& loaded = kernel.variant(stream.target(), binder.tma_load, binder.tma_store, gpu.index());
  ensure_loaded(loaded, gpu, [&] { require_layout(params, loaded.module.params); });
  make_maps(binder, params, loaded.module.params);
  if (const int cluster = loaded.module.cluster; cluster > 1) {
    grid.m = ceil_div(grid.m, cluster) * cluster;
    tiles = count_tiles(kernel.type, grid);
  }
  enqueue(loaded, gpu, params.params, grid, tiles, stream);
}

}  // namespace detail
}  // namespace tw
