#include "tests/gpu_lock.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>

#include "runtime/gpu.hpp"
#include "tests/support.hpp"
#include "tilewave/device.hpp"

namespace tw::test {

ProcessLock::ProcessLock(const std::string& path) : path_(path) {
  // Another user's file may be opened to be read, but Linux refuses to open it with O_CREAT in a folder that all can write.
  descriptor_ = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (descriptor_ < 0 && errno == ENOENT) descriptor_ = open(path.c_str(), O_RDONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0644);
}

ProcessLock::~ProcessLock() {
  if (descriptor_ >= 0) close(descriptor_);
}

void ProcessLock::lock(bool alone) {
  const int kind = alone ? LOCK_EX : LOCK_SH;
  if (descriptor_ < 0 || flock(descriptor_, kind | LOCK_NB) == 0) return;
  if (errno == EWOULDBLOCK) {
    std::printf("waiting for other test programs that use the GPU (%s)\n", path_.c_str());
    std::fflush(stdout);
  }
  while (flock(descriptor_, kind) != 0 && errno == EINTR) {
  }
}

ProcessLock& gpu_lock() {
  static ProcessLock& lock = *new ProcessLock((std::filesystem::temp_directory_path() / "tilewave-gpu-tests.lock").string());
  return lock;
}

AloneOnTheGpu::~AloneOnTheGpu() {
  if (const DeviceInfo* device = cuda_device()) {
    Stream::standard(device->device).synchronize();
    if (const Gpu* gpu = Gpu::find_open(device->device.index)) cuda::driver().mem_pool_trim_to(gpu->pool(), 0);
  }
  gpu_lock().share();
}

}  // namespace tw::test
