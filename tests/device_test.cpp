#include "tilewave/device.hpp"

#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

#include "runtime/cuda_driver.hpp"
#include "tests/support.hpp"
#include "tilewave/error.hpp"

namespace tw::test {
namespace {

TEST(Device, Parse) {
  EXPECT_EQ(Device::parse("cpu"), Device::cpu());
  EXPECT_EQ(Device::parse("cuda"), Device::cuda(0));
  EXPECT_EQ(Device::parse("cuda:0"), Device::cuda(0));
  EXPECT_EQ(Device::parse("cuda:17"), Device::cuda(17));
  EXPECT_EQ(Device::parse("auto"), best_device());
  for (const char* text :
       {"", "CPU", "gpu", "cuda:", "cuda:x", "cuda:1x", "cuda:-1", "cuda: 1", "cuda:99999999999", "cuda1", "cpu:0", "auto "}) {
    try {
      Device::parse(text);
      ADD_FAILURE() << '"' << text << "\" was taken";
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find('"' + std::string(text) + '"'), std::string::npos) << error.what();
    }
  }
  EXPECT_EQ(Device::cpu().name(), "cpu");
  EXPECT_EQ(Device::cuda(3).name(), "cuda:3");
  EXPECT_EQ(Device::parse(Device::cuda(3).name()), Device::cuda(3));
}

TEST(Device, ReportSaysWhatWasFoundOrWhyNot) {
  const DeviceReport report = find_devices();
  ASSERT_FALSE(report.devices.empty());
  const DeviceInfo& cpu = report.devices[0];
  EXPECT_EQ(cpu.device, Device::cpu());
  EXPECT_TRUE(cpu.usable);
  EXPECT_TRUE(cpu.problem.empty());
  EXPECT_FALSE(cpu.name.empty());
  EXPECT_TRUE(cpu.isa == "baseline" || cpu.isa == "avx2" || cpu.isa.starts_with("avx512")) << cpu.isa;
  EXPECT_GE(cpu.units, 1);
  EXPECT_GT(cpu.total_memory, 0u);
  EXPECT_GE(cpu.total_memory, cpu.free_memory);

  EXPECT_EQ(report.devices.size() == 1, !report.cuda_problem.empty()) << report.cuda_problem;
  EXPECT_EQ(report.nvrtc.empty(), !report.nvrtc_problem.empty());
  EXPECT_TRUE(report.nvrtc_problem.empty() || report.nvrtc_problem.find("searched: ") != std::string::npos) << report.nvrtc_problem;
  for (std::size_t i = 1; i < report.devices.size(); ++i) {
    const DeviceInfo& gpu = report.devices[i];
    EXPECT_EQ(gpu.device, Device::cuda(static_cast<int>(i) - 1));
    EXPECT_EQ(gpu.usable, gpu.problem.empty()) << gpu.problem;
    if (gpu.isa != "sm_90") {
      EXPECT_FALSE(gpu.usable);
      EXPECT_NE(gpu.problem.find("sm_90"), std::string::npos) << gpu.problem;
    }
  }
}

TEST(Device, ReportsWhatIsUsableAndWhyTheRestIsNot) {
  DeviceReport report;
  report.devices.resize(3);
  report.devices[0].usable = true;
  report.devices[1].device = Device::cuda(0);
  report.devices[1].problem = "too old";
  report.devices[2].device = Device::cuda(1);
  report.devices[2].usable = true;
  EXPECT_EQ(report.usable(), (std::vector{Device::cpu(), Device::cuda(1)}));
  EXPECT_EQ(report.problems(), "cuda:0: too old\n");
  report.nvrtc_problem = "not found";
  EXPECT_EQ(report.usable(), std::vector{Device::cpu()});
  EXPECT_EQ(report.problems(), "cuda:0: too old\nno kernels on GPUs: not found\n");
  report.devices.resize(1);
  report.nvrtc_problem.clear();
  EXPECT_EQ(report.problems(), "");
  report.cuda_problem = "no driver";
  EXPECT_EQ(report.problems(), "no GPU: no driver\n");
}

TEST(Device, NoCudaIsAnErrorThatSaysWhy) {
  const DeviceReport report = find_devices();
  if (report.cuda_problem.empty()) GTEST_SKIP() << "skipped: there is a GPU";
  EXPECT_EQ(best_device(), Device::cpu());
  try {
    device_info(Device::cuda());
    FAIL() << "a GPU that is not there was described";
  } catch (const DeviceError& error) {
    EXPECT_EQ(error.what(), report.cuda_problem);
  }
  EXPECT_THROW(Stream{Device::cuda()}, DeviceError);
  EXPECT_THROW(Stream::standard(Device::cuda()), DeviceError);
  EXPECT_THROW(Stream::borrow(Device::cuda(), nullptr), DeviceError);
  EXPECT_THROW(Event{Device::cuda()}, DeviceError);
}

TEST(Device, InfoOfADeviceThatIsNotThere) {
  EXPECT_THROW(device_info(Device::cuda(63)), DeviceError);
  EXPECT_THROW(device_info(Device::cuda(-1)), DeviceError);
  EXPECT_THROW(Stream{Device::cuda(63)}, DeviceError);
}

TEST(Device, InfoIsFoundOnce) { EXPECT_EQ(&device_info(Device::cpu()), &device_info(Device::cpu())); }

TEST(Device, cuda_InfoDescribesTheGpu) {
  skip_without_cuda();
  const Device gpu = cuda_device()->device;
  const DeviceInfo& info = device_info(gpu);
  EXPECT_TRUE(info.usable) << info.problem;
  EXPECT_EQ(info.isa, "sm_90");
  EXPECT_GE(info.units, 1);
  EXPECT_EQ(info.shared_per_block, 232448u);
  EXPECT_GT(info.l2_bytes, 0u);
  EXPECT_GT(info.total_memory, info.free_memory);
  EXPECT_GT(info.free_memory, 0u);
  EXPECT_EQ(best_device(), gpu);
}

TEST(Device, cuda_DriverErrorsNameTheCallAndTheReason) {
  skip_without_cuda();
  try {
    cuda::check(cuda::Result::invalid_value, "cuExample");
    FAIL();
  } catch (const DeviceError& error) {
    const std::string text = error.what();
    EXPECT_EQ(text.find("cuExample: CUDA_ERROR_INVALID_VALUE ("), 0u) << text;
  }
  EXPECT_NO_THROW(cuda::check(cuda::Result::success, "cuExample"));
}

}  // namespace
}  // namespace tw::test
