#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "runtime/cuda_driver.hpp"
#include "tests/gpu_lock.hpp"
#include "tests/support.hpp"
#include "tests/temporary_directory.hpp"
#include "tilewave/error.hpp"
#include "tilewave/tensor.hpp"

namespace tw::test {
namespace {

class Memory : public testing::TestWithParam<Device> {};
INSTANTIATE_TEST_SUITE_P(, Memory, testing::ValuesIn(kDevices), device_name);

TEST_P(Memory, IsAlignedAndApart) {
  skip_unless_present(GetParam());
  const Stream stream = Stream::standard(GetParam());
  std::vector<std::shared_ptr<void>> blocks;
  std::vector<std::pair<std::uintptr_t, std::size_t>> ranges;
  for (std::size_t bytes : {1u, 2u, 255u, 256u, 257u, 1000u, 4096u, 65537u, 1u << 20, (1u << 20) + 1, 5u << 20}) {
    blocks.push_back(allocate(bytes, stream));
    const auto begin = reinterpret_cast<std::uintptr_t>(blocks.back().get());
    EXPECT_NE(begin, 0u);
    EXPECT_EQ(begin % 256, 0u) << bytes;
    for (const auto& [other, size] : ranges) EXPECT_TRUE(begin + bytes <= other || other + size <= begin) << "blocks overlap";
    ranges.emplace_back(begin, bytes);
    if (!GetParam().is_cuda()) std::memset(blocks.back().get(), 0x77, bytes);  // under a sanitizer: all of it is there
  }
}

TEST_P(Memory, NothingForZeroBytes) {
  skip_unless_present(GetParam());
  EXPECT_EQ(allocate(0, Stream::standard(GetParam())), nullptr);
}

TEST_P(Memory, TooMuchSaysHowMuchWasAskedFor) {
  skip_unless_present(GetParam());
  const Stream stream = Stream::standard(GetParam());
  for (std::size_t bytes : {std::size_t{1} << 55, std::size_t{1} << 61, SIZE_MAX}) {
    try {
      allocate(bytes, stream);
      FAIL() << bytes << " bytes were given";
    } catch (const OutOfMemory& error) {
      EXPECT_NE(std::string(error.what()).find(std::to_string(bytes)), std::string::npos) << error.what();
    }
  }
  const std::shared_ptr<void> block = allocate(1 << 20, stream);  // the process goes on
  EXPECT_NE(block, nullptr);
}

TEST(MemoryOfTheCpu, ComesBackFromThePool) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "skipped: the pool is off under the address sanitizer";
#endif
  const Stream stream = Stream::standard(Device::cpu());
  void* first = allocate(100000, stream).get();
  void* second = allocate(100000, stream).get();
  EXPECT_EQ(first, second);
}

TEST(MemoryOfTheCpu, ManyThreadsGetTheirOwn) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([t] {
      const Stream stream = Stream::standard(Device::cpu());
      for (std::size_t round = 0; round < 300; ++round) {
        const std::size_t bytes = 64 + round * 37 % 5000;
        const std::shared_ptr<void> block = allocate(bytes, stream);
        std::memset(block.get(), t, bytes);
        std::this_thread::yield();
        for (std::size_t i = 0; i < bytes; ++i) ASSERT_EQ(static_cast<char*>(block.get())[i], t);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(MemoryOfTheGpu, cuda_alone_OutOfDeviceMemoryNamesAskedAndFree) {
  skip_without_cuda();
  const AloneOnTheGpu alone;
  const Stream stream = Stream::standard(Device::cuda());
  const std::size_t total = device_info(Device::cuda()).total_memory;
  // Fill the device, so that the failure is one of real exhaustion and not only of an absurd size.
  std::vector<std::shared_ptr<void>> blocks;
  const std::size_t step = total / 16;
  std::string message;
  try {
    for (int i = 0; i < 32; ++i) blocks.push_back(allocate(step, stream));
  } catch (const OutOfMemory& error) {
    message = error.what();
  }
  EXPECT_NE(message.find(std::to_string(step)), std::string::npos) << message;
  EXPECT_NE(message.find("free"), std::string::npos) << message;
  blocks.clear();
  stream.synchronize();
  // Pooled memory is found again, also as one block larger than each of those that were freed.
  EXPECT_NE(allocate(step * 3, stream), nullptr);
}

TEST(OutOfMemoryMessage, SaysHowMuchIsFree) {
  cuda::Driver calls;
  const auto describe = [&](cuda::Result result) { return cuda::describe(calls, result); };
  EXPECT_EQ(describe(cuda::Result::out_of_memory), "CUDA error 2") << "a driver without any calls";
  calls.get_error_name = [](cuda::Result result, const char** text) {
    *text = result == cuda::Result::out_of_memory ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_INVALID_VALUE";
    return cuda::Result::success;
  };
  EXPECT_EQ(describe(cuda::Result::out_of_memory), "CUDA_ERROR_OUT_OF_MEMORY");
  calls.get_error_string = [](cuda::Result, const char** text) {
    *text = "some text";
    return cuda::Result::success;
  };
  calls.mem_get_info = [](std::size_t* free, std::size_t* total) {
    *free = 3 << 20, *total = std::size_t{139} << 30;
    return cuda::Result::success;
  };
  EXPECT_EQ(describe(cuda::Result::out_of_memory),
            "CUDA_ERROR_OUT_OF_MEMORY (some text); 3145728 of 149250113536 bytes of the device's memory are free");
  EXPECT_EQ(describe(cuda::Result::invalid_value), "CUDA_ERROR_INVALID_VALUE (some text)");
  calls.mem_get_info = [](std::size_t*, std::size_t*) { return cuda::Result::invalid_context; };
  EXPECT_EQ(describe(cuda::Result::out_of_memory), "CUDA_ERROR_OUT_OF_MEMORY (some text)");
}

/// Whether another process gets the lock at once.
bool another_process_gets(const std::string& path, bool alone) {
  const pid_t child = fork();
  if (child == 0) {
    ualarm(500000, 0);  // ends the process while it waits
    ProcessLock lock(path);
    alone ? lock.take_alone() : lock.share();
    _exit(0);
  }
  int status = 0;
  return waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

TEST(ProcessLocks, SharersExcludeTheOneThatIsAlone) {
  const TemporaryDirectory folder;
  const std::string path = folder.path() / "lock";
  ProcessLock lock(path);
  ASSERT_TRUE(lock.is_open());
  lock.share();
  EXPECT_TRUE(another_process_gets(path, false));
  EXPECT_FALSE(another_process_gets(path, true));
  lock.take_alone();
  EXPECT_FALSE(another_process_gets(path, false));
  lock.share();
  EXPECT_TRUE(another_process_gets(path, false));
  EXPECT_FALSE(ProcessLock(folder.path() / "no" / "such" / "folder").is_open());
  ProcessLock(folder.path() / "no" / "such" / "folder").take_alone();  // no lock is no reason not to run
}

TEST(MemoryOfTheGpu, cuda_FreedBlocksAreReusedInStreamOrder) {
  skip_without_cuda();
  const Stream stream(Device::cuda());
  void* first = allocate(1 << 20, stream).get();
  void* second = allocate(1 << 20, stream).get();
  EXPECT_EQ(first, second);
}

}  // namespace
}  // namespace tw::test
