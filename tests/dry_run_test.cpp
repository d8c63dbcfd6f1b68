#include "runtime/dry_run.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "tests/expect_error.hpp"
#include "tilewave/elementwise.hpp"
#include "tilewave/error.hpp"
#include "tilewave/gemm.hpp"
#include "tilewave/tensor.hpp"

namespace tw::test {
namespace {

void expect_no_device(Device device) { EXPECT_THROW(Stream{device}, DeviceError) << device.name(); }

TEST(DryRun, MemoryHasAddressesButNoBytes) {
  const DryRun run(typical_gpu("sm_90a"));
  const Stream stream(run.device());
  // Far more than any machine has.
  const Tensor a = Tensor::empty({1 << 20, 1 << 20}, DType::f32, stream), b = Tensor::empty({1 << 20, 1 << 20}, DType::f32, stream);
  EXPECT_GE(static_cast<char*>(b.data()) - static_cast<char*>(a.data()), std::int64_t{1} << 42);
  const float values[] = {1, 1};
  const Tensor ones = Tensor::from(std::span<const float>(values), {2}).to(run.device());
  EXPECT_EQ(ones.device(), run.device());
  EXPECT_EQ(ones.to(Device::cpu()).at({1}), 0);
}

TEST(DryRun, RecordsEachKernelOnceInTheOrderOfFirstLaunches) {
  DryRun run(typical_gpu("sm_90a"));
  const Stream stream(run.device());
  EXPECT_TRUE(run.kernels().empty());
  const Tensor x = Tensor::empty({64, 64}, DType::bf16, stream), y = Tensor::empty({64, 64}, DType::bf16, stream);
  add(x, x, y, {.stream = stream});
  silu(x, y, {.stream = stream});
  add(x, x, y, {.stream = stream});
  const std::vector<KernelSpec> first = run.kernels();
  ASSERT_EQ(first.size(), 2u);
  EXPECT_NE(first[0].type.find("Add"), std::string::npos) << first[0].type;
  EXPECT_NE(first[1].type.find("Silu"), std::string::npos) << first[1].type;

  // What runs in a graph counts too, and with what was there before.
  const Graph graph = Graph::capture(stream, [&] { mul(x, x, y, {.stream = stream}); });
  graph.replay(stream);
  ASSERT_EQ(run.kernels().size(), 3u);
  EXPECT_NE(run.kernels()[2].type.find("Mul"), std::string::npos) << run.kernels()[2].type;
}

TEST(DryRun, KernelsAreThoseOfTheArchitecture) {
  const auto gemm_on = [](std::string_view arch) {
    DryRun run(typical_gpu(arch));
    const Stream stream(run.device());
    const Tensor x = Tensor::empty({4096, 4096}, DType::bf16, stream);
    gemm(x, Tensor::empty({4096, 4096}, DType::bf16, stream), Tensor::empty({4096, 4096}, DType::bf16, stream), {.stream = stream});
    return run.kernels().back();
  };
  EXPECT_EQ(gemm_on("sm_90a").target.find("tw::sm_90a::"), 0u);
  EXPECT_EQ(gemm_on("sm_80").target.find("tw::cuda::"), 0u);
  EXPECT_NE(gemm_on("sm_80").type, gemm_on("sm_86").type) << "an RTX 30 has less shared memory than an A100";
}

TEST(DryRun, TypicalGpus) {
  for (const char* arch : {"sm_80", "sm_86", "sm_87", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120", "sm_121"}) {
    const GpuProperties gpu = typical_gpu(arch);
    std::string without_letter = arch;
    if (without_letter.back() == 'a') without_letter.pop_back();
    EXPECT_EQ("sm_" + std::to_string(10 * gpu.compute_capability.major + gpu.compute_capability.minor), without_letter);
    EXPECT_GT(gpu.multiprocessors, 0);
    EXPECT_EQ(static_cast<int>(gpu.shared_per_block), max_shared_bytes(arch));
    const DryRun run(gpu);
    EXPECT_EQ(device_info(run.device()).units, gpu.multiprocessors);
    EXPECT_TRUE(device_info(run.device()).usable);
  }
  expect_error<InvalidArgument>([] { typical_gpu("sm_75"); }, {"sm_75", "sm_90a"});
}

TEST(DryRun, ItsDeviceIsThatOfItsThreadAndTime) {
  const GpuProperties gpu = typical_gpu("sm_90a");
  Device device;
  {
    const DryRun run(gpu);
    device = run.device();
    EXPECT_TRUE(is_dry_run(device));
    EXPECT_EQ(Stream(device).device(), device);
    std::thread([&] { expect_no_device(device); }).join();
    GpuProperties other = gpu;
    ++other.multiprocessors;
    {
      const DryRun inner(other);
      EXPECT_FALSE(inner.device() == device);
      EXPECT_EQ(device_info(inner.device()).units, gpu.multiprocessors + 1);
    }
    EXPECT_EQ(Stream(device).device(), device) << "the outer one goes on";
  }
  expect_no_device(device);
  EXPECT_TRUE(DryRun(gpu).device() == device) << "equal GPUs share an index";
  EXPECT_FALSE(is_dry_run(Device::cuda()));
  EXPECT_FALSE(is_dry_run(Device::cpu()));
}

/// A driver of this thread, as on a machine with a GPU, that counts what the end of a dry run's objects asks of it.
class CountingDriver {
 public:
  CountingDriver() {
    asked = 0;
    driver_.ctx_get_current = [](cuda::Context* context) { return ++asked, *context = nullptr, cuda::Result::success; };
    driver_.ctx_set_current = [](cuda::Context) { return ++asked, cuda::Result::success; };
    driver_.stream_destroy = [](cuda::Stream) { return ++asked, cuda::Result::success; };
    driver_.event_destroy = [](cuda::Event) { return ++asked, cuda::Result::success; };
    driver_.mem_free_async = [](cuda::Address, cuda::Stream) { return ++asked, cuda::Result::success; };
    cuda::driver_of_thread() = &driver_;
  }
  ~CountingDriver() { cuda::driver_of_thread() = nullptr; }
  static inline int asked = 0;

 private:
  cuda::Driver driver_;
};

TEST(DryRun, WhatOutlivesItNeverReachesAnotherDriver) {
  const CountingDriver driver;
  {
    std::optional<Tensor> tensor;
    std::optional<Event> event;
    std::optional<Stream> stream;
    {
      const DryRun run(typical_gpu("sm_90a"));
      stream.emplace(run.device());
      tensor = Tensor::zeros({100}, DType::f32, *stream);
      event.emplace(run.device());
    }
    expect_error<DeviceError>([&] { return Tensor::zeros({100}, DType::f32, *stream); }, {"dry run is over"});
  }
  EXPECT_EQ(CountingDriver::asked, 0);
}

}  // namespace
}  // namespace tw::test
