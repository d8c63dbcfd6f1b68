#include "runtime/gpu.hpp"

#include <array>
#include <atomic>
#include <cstdint>
#include <limits>

#include "runtime/format.hpp"
#include "tilewave/error.hpp"

namespace tw {
namespace {

// Counters of different launches are in different 32-byte sectors of the L2 cache.
constexpr std::size_t kCounterBytes = kLaunchCounters * sizeof(unsigned);
constexpr std::size_t kCounterBlockBytes = 256 * kCounterBytes;
static_assert(kCounterBytes % 32 == 0);

std::array<std::atomic<Gpu*>, kMostGpus>& open_gpus() {
  static std::array<std::atomic<Gpu*>, kMostGpus> table{};
  return table;
}

}  // namespace

Gpu* Gpu::find_open(int index) { return index < 0 || index >= kMostGpus ? nullptr : open_gpus()[index].load(std::memory_order_acquire); }

Gpu& Gpu::get(int index) {
  if (Gpu* gpu = find_open(index)) return *gpu;
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  if (Gpu* gpu = find_open(index)) return *gpu;
  Gpu* gpu = new Gpu(index);  // never deleted, because memory may be freed while the process ends
  open_gpus()[index].store(gpu, std::memory_order_release);
  return *gpu;
}

Gpu::Gpu(int index) : index_(index) {
  const cuda::Driver& d = cuda::driver();
  int count = 0;
  cuda::check(d.device_get_count(&count), "cuDeviceGetCount");
  if (index < 0 || index >= count || index >= kMostGpus) {
    throw DeviceError(tw::format("cuda:{}: no such device; this machine has {} CUDA device(s)", index, count));
  }
  cuda::check(d.device_get(&device_, index), "cuDeviceGet");
  cuda::check(d.device_get_attribute(&multiprocessors_, cuda::DeviceAttribute::multiprocessor_count, device_), "cuDeviceGetAttribute");
  auto& [major, minor] = compute_capability_;
  cuda::check(d.device_get_attribute(&major, cuda::DeviceAttribute::compute_capability_major, device_), "cuDeviceGetAttribute");
  cuda::check(d.device_get_attribute(&minor, cuda::DeviceAttribute::compute_capability_minor, device_), "cuDeviceGetAttribute");
  int pools = 0;
  cuda::check(d.device_get_attribute(&pools, cuda::DeviceAttribute::memory_pools_supported, device_), "cuDeviceGetAttribute");
  if (pools == 0) throw DeviceError(tw::format("cuda:{}: the driver offers no stream-ordered memory pools here", index));

  const RelaxedCapture relaxed;
  cuda::check(d.primary_ctx_retain(&context_, device_), "cuDevicePrimaryCtxRetain");
  try {
    const CurrentContext current(*this);
    cuda::check(d.stream_create(&stream_, cuda::kStreamNonBlocking), "cuStreamCreate");
    // A pool of our own: other libraries in the process use the default pool, whose settings must not change.
    cuda::PoolProperties properties;
    properties.location.id = index;
    cuda::check(d.mem_pool_create(&pool_, &properties), "cuMemPoolCreate");
    std::uint64_t keep_everything = std::numeric_limits<std::uint64_t>::max();
    cuda::check(d.mem_pool_set_attribute(pool_, cuda::PoolAttribute::release_threshold, &keep_everything), "cuMemPoolSetAttribute");
  } catch (...) {
    d.primary_ctx_release(device_);
    throw;
  }
}

unsigned* Gpu::take_counter() {
  const std::lock_guard lock(counters_mutex_);
  if (free_counters_.empty()) {
    const cuda::Driver& d = cuda::driver();
    const RelaxedCapture relaxed;
    const CurrentContext current(*this);
    cuda::Address block = 0;
    cuda::check(d.mem_alloc_from_pool_async(&block, kCounterBlockBytes, pool_, stream_), "cuMemAllocFromPoolAsync");
    cuda::check(d.memset_d8_async(block, 0, kCounterBlockBytes, stream_), "cuMemsetD8Async");
    cuda::check(d.stream_synchronize(stream_), "cuStreamSynchronize");
    for (std::size_t offset = kCounterBlockBytes; offset > 0; offset -= kCounterBytes) {
      free_counters_.push_back(reinterpret_cast<unsigned*>(block + offset - kCounterBytes));
    }
  }
  unsigned* counter = free_counters_.back();
  free_counters_.pop_back();
  return counter;
}

void Gpu::give_back_counter(unsigned* counter) {
  const std::lock_guard lock(counters_mutex_);
  free_counters_.push_back(counter);
}

CurrentContext::CurrentContext(const Gpu& gpu) {
  const cuda::Driver& d = cuda::driver();
  if (&d != &gpu.driver()) throw DeviceError(tw::format("cuda:{} is not a device of this thread: its dry run is over", gpu.index()));
  cuda::Context current = nullptr;
  cuda::check(d.ctx_get_current(&current), "cuCtxGetCurrent");
  if (current == gpu.context()) return;
  cuda::check(d.ctx_set_current(gpu.context()), "cuCtxSetCurrent");
  restore_ = current;
}

CurrentContext::~CurrentContext() {
  if (restore_ != nullptr) cuda::driver().ctx_set_current(restore_);
}

RelaxedCapture::RelaxedCapture() {
  cuda::check(cuda::driver().thread_exchange_capture_mode(&previous_), "cuThreadExchangeStreamCaptureMode");
}

RelaxedCapture::~RelaxedCapture() { cuda::driver().thread_exchange_capture_mode(&previous_); }

bool is_capturing(cuda::Stream stream) {
  // For the legacy stream this is an error while another stream is being captured; the legacy stream itself is not captured then.
  cuda::CaptureStatus status = cuda::CaptureStatus::none;
  return cuda::driver().stream_is_capturing(stream, &status) == cuda::Result::success && status == cuda::CaptureStatus::active;
}

}  // namespace tw
