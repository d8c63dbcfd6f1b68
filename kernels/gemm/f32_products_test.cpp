// Exact products of f32: the parts of operands, and gemm() of them. On the CPU the parts are multiplied as a GPU's tensor cores would,
// because they are tf32 numbers.

#include "tilewave/f32_products.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <thread>
#include <vector>

#include "kernels/elementwise/tf32_parts.tile.hpp"
#include "kernels/gemm/call.hpp"
#include "kernels/gemm/reference.hpp"
#include "kernels/tf32_parts.hpp"
#include "runtime/format.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"
#include "tilewave/elementwise.hpp"
#include "tilewave/launch.hpp"

namespace tw::kernels::gemm {
namespace {

using namespace tw::test;

class F32ProductsTest : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override { skip_unless_present(device); }
  /// Every element's error is at most 2^-20 of the sum of its products' magnitudes, and a rounding of the result. Tensor cores also round
  /// every eight products towards zero.
  void check(const Shape& a_shape, const Shape& b_shape, const Placement& a_place, const Placement& b_place, bool epilogue) {
    SCOPED_TRACE(tw::format("a [{}], b [{}]", tw::join(a_shape, ", "), tw::join(b_shape, ", ")));
    PlacedTensor a(a_shape, DType::f32, device, a_place), b(b_shape, DType::f32, device, b_place);
    const std::vector<float> a_values = a.fill_random(random), b_values = b.fill_random(random);
    const std::int64_t batch = a_shape.size() == 3 ? a_shape[0] : 1, m = a_shape[a_shape.size() - 2], k = a_shape.back(),
                       n = b_shape.back();
    Shape d_shape{m, n};
    if (a_shape.size() == 3) d_shape.insert(d_shape.begin(), batch);
    PlacedTensor d(d_shape, DType::f32, device), bias({n}, DType::f32, device), residual(d_shape, DType::f32, device);
    const std::vector<float> bias_values = bias.fill_random(random), residual_values = residual.fill_random(random);
    GemmOptions options;
    if (epilogue) options = {.alpha = 0.5f, .bias = &bias.tensor(), .residual = &residual.tensor()};
    if (device.is_cuda()) {
      const ScopedF32Products exact(F32Products::exact);
      tw::gemm(a, b, d, options);
    } else {
      run_in_parts(make_call(a, b, d, options));
    }
    const std::vector<double> got = d.values();
    for (std::int64_t i = 0; i < batch * m * n; ++i) {
      const std::int64_t of = i / (m * n), row = i / n % m, col = i % n;
      double sum = 0, magnitude = 0;
      for (std::int64_t j = 0; j < k; ++j) {
        const double product =
            static_cast<double>(a_values[(of * m + row) * k + j]) * b_values[((b_shape.size() == 3 ? of : 0) * k + j) * n + col];
        sum += product;
        magnitude += std::abs(product);
      }
      if (epilogue) sum = 0.5 * sum + bias_values[col] + residual_values[i];
      ASSERT_LE(std::abs(got[i] - sum),
                std::ldexp(magnitude, device.is_cuda() ? -17 : -20) + std::ldexp(std::abs(sum), -22) + 1e-6 * epilogue)
          << i;
    }
    EXPECT_TRUE(d.gaps_intact());
  }

  const Device device = GetParam();
  std::mt19937_64 random = random_engine();
};

INSTANTIATE_TEST_SUITE_P(Ops, F32ProductsTest, testing::ValuesIn(kDevices), device_name);

TEST_P(F32ProductsTest, PartsAreTf32NumbersThatAddUp) {
  std::vector<float> values = {0, -0.0f, 1, -1.0f / 3, 1e-38f, 3e38f, kInf, -kInf, kNaN};
  for (int i = 0; i < 991; ++i)
    values.push_back(std::ldexp(std::normal_distribution<float>()(random), static_cast<int>(random() % 160) - 80));
  const auto count = static_cast<std::int64_t>(values.size());
  Tensor x = Tensor::from<float>(values, {4, count / 4});
  if (device.is_cuda()) x = x.to(device);
  const std::int64_t k = count / 4;
  for (const ProductSide side : {ProductSide::left, ProductSide::right}) {
    const Tensor parts = tf32_parts(x, side, Stream::standard(device)).to(Device::cpu());
    ASSERT_EQ(parts.shape(), (Shape{4, 3 * k}));
    for (std::int64_t i = 0; i < count; ++i) {
      const auto part = [&](int n) { return parts.data<float>()[i / k * 3 * k + n * k + i % k]; };
      const float high = part(0), low = part(side == ProductSide::left ? 1 : 2), again = part(side == ProductSide::left ? 2 : 1);
      if (!std::isfinite(values[i])) {
        EXPECT_EQ(bit_cast<u32>(low), 0u) << values[i];
        EXPECT_TRUE(std::isnan(values[i]) ? std::isnan(high) : high == values[i]) << values[i];
        continue;
      }
      EXPECT_EQ(high, again);
      EXPECT_EQ(high, static_cast<float>(tf32(high)));
      EXPECT_EQ(low, static_cast<float>(tf32(low)));
      // Below 2^-104 the rest is subnormal.
      EXPECT_LE(std::abs(static_cast<double>(values[i]) - high - low), std::ldexp(std::abs(static_cast<double>(values[i])), -22) + 1e-41)
          << values[i];
    }
  }
}

TEST_P(F32ProductsTest, ProductsOfF32) {
  check({1, 1}, {1, 1}, {}, {}, false);
  check({65, 33}, {33, 70}, {}, {}, true);
  check({130, 256}, {256, 129}, {}, {.order = {1, 0}}, false);          // a weight stored [N, K]
  check({70, 100}, {100, 40}, {.order = {1, 0}}, {.offset = 3}, true);  // stored [K, M]
  check({3, 20, 50}, {50, 30}, {}, {}, true);
  check({3, 20, 50}, {3, 50, 30}, {.gap = 4}, {}, false);
  check({1, 2048}, {2048, 64}, {}, {.order = {1, 0}}, false);
}

TEST(F32Products, KernelsOfThePartsCompile) {
  skip_without_nvrtc();
  for (const KernelSpec& spec : {make_spec(kernel_info<Elementwise<Tf32High, float>>, true, true, "tf32_high"),
                                 make_spec(kernel_info<Elementwise<Tf32Low, float>>, false, false, "tf32_low")})
    EXPECT_EQ(compile(spec).spill_bytes, 0) << spec.name;
}

TEST(F32Products, ScopesNestAndBelongToAThread) {
  EXPECT_EQ(f32_products(), F32Products::tf32);
  {
    const ScopedF32Products exact(F32Products::exact);
    EXPECT_EQ(f32_products(), F32Products::exact);
    {
      const ScopedF32Products inner(F32Products::tf32);
      EXPECT_EQ(f32_products(), F32Products::tf32);
    }
    EXPECT_EQ(f32_products(), F32Products::exact);
    std::thread([] { EXPECT_EQ(f32_products(), F32Products::tf32); }).join();
  }
  EXPECT_EQ(f32_products(), F32Products::tf32);
}

}  // namespace
}  // namespace tw::kernels::gemm
