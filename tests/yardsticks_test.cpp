// The kernels that benchmarks hold others against do what they are measured for.

#include <gtest/gtest.h>

#include <cstdint>

#include "benchmarks/yardsticks.tile.hpp"
#include "tests/launch_kernel.hpp"
#include "tests/support.hpp"
#include "tilewave/analyze.hpp"

namespace tw::test {
namespace {

using Copy = bench::Copy<bench::kCopyRows, bench::kYardstickCols>;
using Read = bench::Read<bench::kReadRows, bench::kYardstickCols>;

constexpr std::int64_t kRows = 19;  // the last tile is not whole
constexpr std::int64_t kCols = bench::kYardstickCols;
constexpr int kRowBytes = bench::kYardstickCols * 4;

class Yardsticks : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override { skip_unless_present(GetParam()); }
  Device device() const { return GetParam(); }
  Tensor input() const { return Tensor::random({kRows, kCols}, DType::f32, seed()).to(device()); }
};

TEST_P(Yardsticks, CopyCopiesEveryElement) {
  const Tensor from = input();
  const Tensor to = Tensor::poisoned({kRows, kCols}, DType::f32, Stream::standard(device()));
  launch_kernel<Copy>(device(), {.m = ceil_div(static_cast<int>(kRows), bench::kCopyRows)}, [&](auto& bind, auto& p) {
    bind(p.from, from);
    bind(p.to, to);
  });
  EXPECT_EQ(max_difference(from, to), 0);
}

TEST_P(Yardsticks, ReadSeesEveryElement) {
  const Tensor from = input();
  const Tensor sums = Tensor::poisoned({kRows}, DType::f32, Stream::standard(device()));
  launch_kernel<Read>(device(), {.m = ceil_div(static_cast<int>(kRows), bench::kReadRows)}, [&](auto& bind, auto& p) {
    bind(p.from, from);
    p.sums = sums.data<float>();
  });
  const Tensor on_host = from.to(Device::cpu());
  const Tensor result = sums.to(Device::cpu());
  for (std::int64_t row = 0; row < kRows; ++row) {
    double sum = 0;
    for (std::int64_t col = 0; col < kCols; ++col) sum += on_host.at({row, col});
    EXPECT_NEAR(result.at({row}), sum, 1e-3) << "row " << row;
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, Yardsticks, testing::ValuesIn(kDevices), device_name);

/// Without a GPU: how many loads are in flight follows from the registers.
template <class Kernel>
void expect_loads_in_flight(int bytes_per_block) {
  const KernelInfo& info = kernel_info<Kernel>;
  const CompiledKernel compiled = compile(make_spec(info, true, true));
  EXPECT_EQ(compiled.spill_bytes, 0) << info.type;
  const int blocks = 65536 / (compiled.registers * compiled.module.threads);
  EXPECT_GE(blocks * bytes_per_block, 48 << 10) << info.type << ": " << compiled.registers << " registers";
}

TEST(YardstickKernels, KeepTheMemoryBusy) {
  skip_without_nvrtc();
  expect_loads_in_flight<Copy>(bench::kCopyRows * kRowBytes);
  expect_loads_in_flight<Read>(bench::kReadRows * kRowBytes);
}

TEST(YardstickKernels, EmptyDoesNothing) {
  const Analysis empty = analyze<bench::Empty>({}, [](auto&, auto&) {});
  EXPECT_EQ(empty.tiles, 1);
  EXPECT_EQ(empty.global_read + empty.global_written + empty.shared_traffic, 0U);
  EXPECT_EQ(empty.operations.all_products() + empty.operations.f32 + empty.operations.special + empty.uncounted, 0U);
}

TEST(YardstickKernels, EmptyRuns_cuda) {
  skip_without_cuda();
  launch_kernel<bench::Empty>(Device::cuda(), {}, [](auto&, auto&) {});
  Stream::standard(Device::cuda()).synchronize();
}

}  // namespace
}  // namespace tw::test
