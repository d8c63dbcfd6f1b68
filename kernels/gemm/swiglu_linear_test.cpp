// swiglu_linear(), and products whose B is interleaved, against sums in double.

#include "kernels/gemm/swiglu_linear.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/gemm/launch.hpp"
#include "runtime/format.hpp"
#include "tests/expect_error.hpp"
#include "tests/support.hpp"
#include "tilewave/launch.hpp"

namespace tw::kernels::gemm {
namespace {

using namespace tw::test;

class SwigluLinearTest : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override { skip_unless_present(device); }

  /// Operands whose products are exact in every type, because they are small integers, and what comes of them.
  void prepare(int rows, int columns, int depth, DType dtype) {
    std::uniform_int_distribution<int> small(-2, 2);
    std::vector<float> a(static_cast<std::size_t>(rows) * depth), b(2 * static_cast<std::size_t>(columns) * depth);
    for (float& value : a) value = static_cast<float>(small(random)) / 4;
    for (float& value : b) value = static_cast<float>(small(random));
    x = Tensor::from<float>(a, {rows, depth}).to(dtype).to(device);
    weight = Tensor::from<float>(b, {2 * columns, depth}).to(dtype).to(device);
    y = Tensor::poisoned({rows, columns}, dtype, Stream::standard(device));

    const double unit = dtype == DType::f16 ? 0x1p-11 : 0x1p-8;  // half of the last digit
    expected.clear();
    bounds.clear();
    const auto dot = [&](int row, int n) {
      double sum = 0;
      for (int k = 0; k < depth; ++k) sum += double{a[row * depth + k]} * b[n * depth + k];
      return sum;
    };
    for (int row = 0; row < rows; ++row) {
      for (int n = 0; n < columns; ++n) {
        const double gate = dot(row, n), up = dot(row, n + columns), value = gate / (1 + std::exp(-gate)) * up;
        expected.push_back(value);
        bounds.push_back(unit * std::abs(value) * 1.001 + 1e-5 * std::abs(gate * up) + 1e-7);
      }
    }
  }
  void check() const {
    const Tensor values = y.to(Device::cpu()).to(DType::f32);
    for (std::size_t i = 0; i < expected.size(); ++i) ASSERT_NEAR(values.data<float>()[i], expected[i], bounds[i]) << "element " << i;
  }
  void run() { swiglu_linear(x, weight, y, Stream::standard(device)); }
  void check_linear(int rows, int columns, int depth, DType dtype) {
    SCOPED_TRACE(tw::format("{} rows, {} columns, depth {}, {}", rows, columns, depth, name_of(dtype)));
    prepare(rows, columns, depth, dtype);
    if (launched([&] { run(); })) check();
  }
  /// The kernel with tiles of any target.
  template <Kernel kernel>
  void check_kernel(int rows, int columns, int depth) {
    SCOPED_TRACE(tw::format("{} rows, {} columns, depth {}, {}", rows, columns, depth, type_of(kernel)));
    prepare(rows, columns, depth, kernel.dtype);
    const Stream stream = Stream::standard(device);
    Call call = make_call(x, weight.transpose(0, 1), y, {.activation = Activation::swiglu, .stream = stream});
    call.interleaved = true;
    const Launch launch = make_launch(call, kernel);
    const bool ran = launched(
        [&] { tw::launch<HostKernel<kernel>>(stream, launch.grid, [&](auto& bind, auto& p) { bind_launch(bind, p, call, launch); }); });
    if (ran) check();
  }

  const Device device = GetParam();
  std::mt19937_64 random = random_engine();
  Tensor x, weight, y;
  std::vector<double> expected, bounds;
};

constexpr Kernel with(DType dtype, Config tile) {
  return {.dtype = dtype, .activation = Activation::swiglu, .interleaved = true, .tile = tile};
}

TEST_P(SwigluLinearTest, MultipliesTheGatedHalves) {
  if (!has_swiglu_linear(DType::bf16, 100, Stream::standard(device))) {
    prepare(100, 8, 16, DType::bf16);
    expect_error<InvalidArgument>([&] { run(); }, {"swiglu_linear: x is", "on a Hopper GPU"});
    return;
  }
  for (const DType dtype : {DType::bf16, DType::f16}) {
    check_linear(421, 1000, 128, dtype);
    check_linear(17, 8, 64, dtype);
    check_linear(64, 72, 72, dtype);
    check_linear(130, 520, 8, dtype);
  }
  check_linear(3000, 2048, 64, DType::bf16);  // many tiles for each SM, in clusters
}

TEST_P(SwigluLinearTest, KernelsInterleaveTheHalves) {
  check_kernel<with(DType::bf16, {64, 64, 3})>(100, 40, 72);
  check_kernel<with(DType::bf16, {64, 64, 3})>(64, 32, 64);
  check_kernel<with(DType::f16, {128, 128, 3})>(129, 72, 200);
  check_kernel<with(DType::f16, {128, 128, 3})>(3, 8, 8);
  if (device.is_cuda() && Stream::standard(device).target() != GpuTarget::sm_90a) return;
  check_kernel<with(DType::bf16, {128, 256, 4, 2, 8})>(300, 328, 136);
}

TEST_P(SwigluLinearTest, GivesTheSameBitsManyTimes) {
  if (!has_swiglu_linear(DType::bf16, 100, Stream::standard(device))) GTEST_SKIP() << "for Hopper GPUs";
  prepare(421, 768, 256, DType::bf16);
  std::vector<std::byte> first;
  for (int i = 0; i < 200; ++i) {
    y = Tensor::poisoned(y.shape(), y.dtype(), Stream::standard(device));
    if (!launched([&] { run(); })) return;
    const Tensor now = y.to(Device::cpu());
    const auto* bytes = static_cast<const std::byte*>(now.data());
    const std::vector<std::byte> all(bytes, bytes + now.numel() * 2);
    if (i == 0) {
      check();
      first = all;
    }
    ASSERT_EQ(std::memcmp(first.data(), all.data(), all.size()), 0) << "repetition " << i;
  }
}

TEST_P(SwigluLinearTest, RefusesWhatDoesNotFit) {
  if (!has_swiglu_linear(DType::bf16, 100, Stream::standard(device))) return;
  prepare(100, 8, 16, DType::bf16);
  const auto refused = [&](std::initializer_list<std::string_view> words, auto change) {
    const auto kept = std::array{x, weight, y};
    change();
    expect_error<InvalidArgument>([&] { run(); }, words);
    std::tie(x, weight, y) = std::tie(kept[0], kept[1], kept[2]);
  };
  refused({"more than 16 rows"}, [&] { x = x.slice(0, 0, 16), y = y.slice(0, 0, 16); });
  refused({"contiguous"}, [&] { y = Tensor::zeros({8, 100}, DType::bf16, Stream::standard(device)).transpose(0, 1); });
  refused({"gemm: d is"}, [&] { y = y.slice(1, 0, 7); });
  refused({"N must be even"}, [&] { weight = weight.slice(0, 0, 15); });
}

INSTANTIATE_TEST_SUITE_P(Devices, SwigluLinearTest, testing::ValuesIn(kDevices), device_name);

TEST(SwigluLinearKernels, CompileForSm90a) {
  skip_without_nvrtc();
  for (const int n : {0, 3, 6}) {
    const Kernel form = with(DType::bf16, kProductTiles[static_cast<std::size_t>(n)]);
    const CompiledKernel kernel = compile(make_spec({type_of(form), source_of(form), nullptr}, true, true));
    EXPECT_EQ(kernel.spill_bytes, 0) << type_of(form);
    EXPECT_TRUE(kernel.performance_losses.empty()) << type_of(form) << ": " << kernel.performance_losses.front();
  }
}

}  // namespace
}  // namespace tw::kernels::gemm
