#include <malloc.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdlib>
#include <mutex>
#include <vector>

#include "runtime/dry_run.hpp"
#include "runtime/format.hpp"
#include "runtime/host.hpp"
#include "runtime/pinned.hpp"
#include "runtime/stream.hpp"
#include "tilewave/device.hpp"
#include "tilewave/error.hpp"

#if defined(__SANITIZE_ADDRESS__)
#define TILEWAVE_ADDRESS_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define TILEWAVE_ADDRESS_SANITIZER 1
#endif
#endif

namespace tw {
namespace {

constexpr std::size_t kAlignment = 256;
constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kMostBytes = std::size_t{1} << 62;

#ifdef TILEWAVE_ADDRESS_SANITIZER
// Freed memory must go back at once, otherwise the sanitizer would miss uses after the free.
constexpr std::size_t kMaxPooledBytes = 0;
#else
constexpr std::size_t kMaxPooledBytes = std::size_t{256} << 20;
#endif

/// Freed host memory, kept for the next allocation of the same size class. Touching fresh pages takes longer than most kernels.
class HostPool {
 public:
  static HostPool& get() {
    static HostPool& pool = *new HostPool;  // never destroyed: tensors may outlive main()
    return pool;
  }

  /// Sizes are rounded up to a quarter of a power of two: at most 25 % is lost.
  static std::size_t rounded(std::size_t bytes) {
    if (bytes <= kAlignment) return kAlignment;
    const std::size_t step = std::max(kAlignment, std::bit_floor(bytes - 1) / 4);
    return (bytes + step - 1) / step * step;
  }

  void* take(std::size_t size) {
    {
      const std::lock_guard lock(mutex_);
      std::vector<void*>& list = free_[index(size)];
      if (!list.empty()) {
        void* memory = list.back();
        list.pop_back();
        pooled_bytes_ -= size;
        return memory;
      }
    }
    const bool large = size >= 2 * kHugePage;
    const std::size_t alignment = large ? kHugePage : kAlignment;
    void* memory = std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
#ifdef MADV_HUGEPAGE
    if (large && memory != nullptr) madvise(memory, size, MADV_HUGEPAGE);
#endif
    return memory;
  }

  void give(void* memory, std::size_t size) {
    {
      const std::lock_guard lock(mutex_);
      if (pooled_bytes_ + size <= kMaxPooledBytes) {
        free_[index(size)].push_back(memory);
        pooled_bytes_ += size;
        return;
      }
    }
    std::free(memory);
  }

  void clear() {
    const std::lock_guard lock(mutex_);
    for (std::vector<void*>& list : free_) {
      for (void* memory : list) std::free(memory);
      list.clear();
    }
    pooled_bytes_ = 0;
  }

 private:
  /// The position of a rounded size: four per power of two.
  static std::size_t index(std::size_t size) {
    const std::size_t log = static_cast<std::size_t>(std::bit_width(size)) - 1;
    return log * 4 + ((size >> (log - 2)) & 3);
  }

  std::mutex mutex_;
  std::array<std::vector<void*>, 256> free_;
  std::size_t pooled_bytes_ = 0;
};

std::shared_ptr<void> allocate_on_cpu(std::size_t bytes) {
  // The system overcommits, and kills the process when it touches the pages. So refuse more than the machine's memory here.
  static const std::size_t installed = host_memory().total;
  const std::size_t size = HostPool::rounded(bytes);
  const bool possible = installed == 0 || bytes <= installed;
  void* memory = possible ? HostPool::get().take(size) : nullptr;
  if (memory == nullptr && possible) {
    HostPool::get().clear();
    memory = HostPool::get().take(size);
  }
  if (memory == nullptr) {
    throw OutOfMemory(tw::format("cpu: {} bytes were requested; about {} bytes are free", bytes, host_memory().available));
  }
  return {memory, [size](void* p) { HostPool::get().give(p, size); }};
}

std::shared_ptr<void> allocate_on_gpu(std::size_t bytes, const Stream& stream) {
  const cuda::Driver& d = cuda::driver();
  Gpu& gpu = Gpu::get(stream.device().index);
  const CurrentContext current(gpu);
  const cuda::Stream native = StreamAccess::native(stream);
  if (is_capturing(native)) {
    throw DeviceError(tw::format("{}: {} bytes were requested while the stream is captured into a graph; allocate before",
                                 stream.device().name(), bytes));
  }
  cuda::Address address = 0;
  cuda::Result result = d.mem_alloc_from_pool_async(&address, bytes, gpu.pool(), native);
  if (result == cuda::Result::out_of_memory) {
    // The pool may have it in separate blocks, or in frees that the stream has not reached yet.
    cuda::check(d.stream_synchronize(native), "cuStreamSynchronize");
    cuda::check(d.mem_pool_trim_to(gpu.pool(), 0), "cuMemPoolTrimTo");
    result = d.mem_alloc_from_pool_async(&address, bytes, gpu.pool(), native);
  }
  if (result == cuda::Result::out_of_memory) {
    std::size_t free = 0;
    std::size_t total = 0;
    cuda::check(d.mem_get_info(&free, &total), "cuMemGetInfo");
    throw OutOfMemory(tw::format("{}: {} bytes were requested; {} of {} bytes are free", stream.device().name(), bytes, free, total));
  }
  cuda::check(result, "cuMemAllocFromPoolAsync");
  return {reinterpret_cast<void*>(address), [stream](void* p) {
            try {
              const CurrentContext context(Gpu::get(stream.device().index));
              // At the end of the process the driver may already be gone, and with it the memory.
              cuda::driver().mem_free_async(reinterpret_cast<cuda::Address>(p), StreamAccess::native(stream));
            } catch (const Error&) {
            }
          }};
}

}  // namespace

void release_host_memory() {
  HostPool::get().clear();
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

std::shared_ptr<void> allocate(std::size_t bytes, const Stream& stream) {
  if (bytes == 0) return nullptr;
  if (bytes > kMostBytes)
    throw OutOfMemory(tw::format("{}: {} bytes were requested; no device has that much", stream.device().name(), bytes));
  return stream.device().is_cuda() ? allocate_on_gpu(bytes, stream) : allocate_on_cpu(bytes);
}

std::shared_ptr<void> allocate_pinned(std::size_t bytes, Device gpu) {
  if (bytes == 0) return nullptr;
  if (is_dry_run(gpu)) return allocate_on_cpu(bytes);
  const CurrentContext current(Gpu::get(gpu.index));
  void* memory = nullptr;
  const cuda::Result result = bytes <= kMostBytes ? cuda::driver().mem_host_alloc(&memory, bytes, 0) : cuda::Result::out_of_memory;
  if (result == cuda::Result::out_of_memory)
    throw OutOfMemory(
        tw::format("cpu: {} bytes of page-locked memory were requested; about {} bytes are free", bytes, host_memory().available));
  cuda::check(result, "cuMemHostAlloc");
  return {memory, [gpu](void* p) {
            try {
              const CurrentContext context(Gpu::get(gpu.index));
              cuda::driver().mem_free_host(p);  // fails at the end of the process, when the driver is gone
            } catch (const Error&) {
            }
          }};
}

}  // namespace tw
