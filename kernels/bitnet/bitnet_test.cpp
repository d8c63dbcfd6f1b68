// The functions of tilewave/bitnet.hpp against plain loops, on the CPU and, where there is one, on a GPU; their bad inputs.

#include "tilewave/bitnet.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "kernels/bitnet/product_case.hpp"
#include "runtime/format.hpp"
#include "tests/expect_error.hpp"

namespace tw::kernels::bitnet {
namespace {

using namespace tw::test;

std::vector<float> floats_of(const Tensor& t) {
  const Tensor host = t.to(Device::cpu()).to(DType::f32);
  return {host.data<float>(), host.data<float>() + host.numel()};
}
std::vector<int> integers_of(const Tensor& t) {
  std::vector<int> all;
  const Tensor host = t.to(Device::cpu());
  for (std::int64_t i = 0; i < host.numel(); ++i) all.push_back(host.data<i8>()[i]);
  return all;
}

class BitNet : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override { skip_unless_present(device); }
  Tensor poisoned(Shape shape, DType dtype) { return Tensor::poisoned(std::move(shape), dtype, Stream::standard(device)); }

  void check_activations(std::vector<float> x, std::int64_t m, std::int64_t k, DType dtype, std::int64_t gap = 0) {
    SCOPED_TRACE(tw::format("{} [{}, {}] gap {}", name_of(dtype), m, k, gap));
    for (float& v : x) v = round_to(dtype, v);
    PlacedTensor in({m, k}, dtype, device, {.gap = gap}), values({m, k}, DType::i8, device, {.gap = gap});
    const Tensor scales = poisoned({m}, DType::f32);
    in.fill(x);
    if (!launched([&] { quantize_activations(in, values, scales); })) return;
    const PlainActivations expected = plain_activations(x, m, k);
    const std::vector<double> results = values.values();
    const std::vector<float> scaled = floats_of(scales);
    ASSERT_EQ(scaled.size(), expected.scales.size());
    for (std::size_t i = 0; i < scaled.size(); ++i) {
      if (std::isnan(expected.scales[i]))
        EXPECT_TRUE(std::isnan(scaled[i])) << i;
      else
        EXPECT_EQ(scaled[i], expected.scales[i]) << i;
    }
    for (std::size_t i = 0; i < results.size(); ++i) ASSERT_EQ(results[i], expected.values[i]) << i << " of " << x[i];
    EXPECT_TRUE(values.gaps_intact());
  }
  std::vector<float> normal(std::int64_t count, float sigma = 1) {
    std::normal_distribution<float> distribution(0, sigma);
    std::vector<float> x(static_cast<std::size_t>(count));
    for (float& v : x) v = distribution(random);
    return x;
  }
  void check_product(const ProductCase& c, DType dtype) {
    SCOPED_TRACE(tw::format("{} m {} n {} k {} bias {} accumulate {} gap {}", name_of(dtype), c.m, c.n, c.k, c.bias, c.accumulate, c.gap));
    const ProductOperands of(c, dtype, device, random);
    if (!launched([&] {
          ternary_gemm(of.x, of.x_scales, of.weight, of.y, {.accumulate = c.accumulate, .bias = c.bias ? &of.bias.tensor() : nullptr});
        }))
      return;
    of.expect_right(dtype);
  }

  Device device = GetParam();
  std::mt19937_64 random = random_engine();
};
INSTANTIATE_TEST_SUITE_P(Devices, BitNet, testing::ValuesIn(kDevices), device_name);

TEST_P(BitNet, ActivationsAreRoundedByRow) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const std::int64_t k : {1, 7, 32, 640, 2561, 17000}) check_activations(normal(3 * k), 3, k, dtype, k % 5);
    check_activations(normal(65 * 40), 65, 40, dtype);
  }
}

TEST_P(BitNet, ActivationsAreRoundedToEven) {
  // The largest is 127, so that the factor is 1 and halves are ties.
  check_activations({127, 0.5f, 1.5f, 2.5f, -0.5f, -1.5f, -2.5f, -127}, 1, 8, DType::f32);
}

TEST_P(BitNet, RowsOfZerosAndOfTinyNumbersHaveTheLeastScale) { check_activations({0, 0, 0, 0, 1e-6f, -1e-6f, 4e-6f, 0}, 2, 4, DType::f32); }

TEST_P(BitNet, RowsThatAreNotFiniteBecomeNaN) {
  check_activations({1, 2, 3, 4, 1, kNaN, 3, 4, 5, kInf, 1, 2, -1, -kInf, 0, kNaN, 1, -2, 3, -4}, 5, 4, DType::f32);
}

TEST_P(BitNet, ActivationsWithoutElementsAreNothing) {
  quantize_activations(poisoned({0, 8}, DType::f32), poisoned({0, 8}, DType::i8), poisoned({0}, DType::f32));
}

TEST_P(BitNet, WeightsAreRoundedToTheirMean) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const auto& [n, k] : {std::pair{1, 4}, {3, 100}, {40, 1028}, {9, 4096}}) {
      SCOPED_TRACE(tw::format("{} [{}, {}]", name_of(dtype), n, k));
      PlacedTensor w({n, k}, dtype, device, {.gap = k % 3});
      const std::vector<float> given = w.fill_random(random, 0.02f);
      TernaryMatrix result;
      if (!launched([&] { result = quantize_ternary(w); })) continue;
      double sum = 0;
      for (const float v : given) sum += std::abs(v);
      const std::vector<float> scales = floats_of(result.scales);
      ASSERT_EQ(scales.size(), static_cast<std::size_t>(n));
      const double mean = sum / static_cast<double>(given.size());
      EXPECT_NEAR(scales[0], mean, mean * 0x1p-20);  // f32 sums of up to 256 elements, and of these
      for (const float s : scales) EXPECT_EQ(s, scales[0]);
      const std::vector<int> numbers = numbers_of(result.to(Device::cpu()));
      for (std::size_t i = 0; i < given.size(); ++i) ASSERT_EQ(numbers[i], plain_ternary(given[i], scales[0])) << i;
    }
  }
}

TEST_P(BitNet, WeightsHaveALeastScale) {
  const TernaryMatrix w = quantize_ternary(Tensor::zeros({2, 8}, DType::f32, Stream::standard(device)));
  EXPECT_EQ(floats_of(w.scales), std::vector<float>(2, 1e-5f));
  EXPECT_EQ(numbers_of(w.to(Device::cpu())), std::vector<int>(16, 0));
}

TEST_P(BitNet, WeightsThatAreNotFiniteHaveNoScale) {
  const Tensor w = Tensor::zeros({1, 8}, DType::f32);
  w.data<float>()[3] = kNaN;
  EXPECT_TRUE(std::isnan(floats_of(quantize_ternary(w.to(device)).scales)[0]));
  w.data<float>()[3] = kInf;
  EXPECT_TRUE(std::isnan(floats_of(quantize_ternary(w.to(device)).scales)[0]));
}

TEST_P(BitNet, WeightsAreUnpacked) {
  for (const auto& [n, k] : {std::pair{1, 4}, {5, 300}, {33, 2052}}) {
    const TernaryMatrix w = quantize_ternary(Tensor::random({n, k}, DType::f32, random()));
    const Tensor out = poisoned({n, k}, DType::i8);
    if (!launched([&] { unpack_ternary(w.to(device), out); })) continue;
    EXPECT_EQ(integers_of(out), numbers_of(w)) << n << " x " << k;
  }
}

TEST_P(BitNet, ProductsAreExact) {
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
    for (const std::int64_t m : {1, 3, 8, 9, 16, 17, 70}) {
      for (const std::int64_t k : {4, 64, 132, 704, 2560})
        check_product({.m = m, .n = 5 + 7 * m, .k = k, .gap = m % 3, .align = 16}, dtype);
    }
  }
  check_product({.m = 1, .n = 19, .k = 6912}, DType::bf16);
  check_product({.m = 300, .n = 260, .k = 192, .align = 16}, DType::bf16);
}

TEST_P(BitNet, ProductsWithTheLargestSumsAreExact) {
  constexpr std::int64_t k = kLargestTernaryDepth;
  const Tensor x = Tensor::empty({2, k}, DType::i8), w = Tensor::empty({3, k}, DType::i8), ones = Tensor::empty({3}, DType::f32);
  for (std::int64_t i = 0; i < k; ++i) {
    x.data<i8>()[i] = -128, x.data<i8>()[k + i] = 127;
    w.data<i8>()[i] = -1, w.data<i8>()[k + i] = 1, w.data<i8>()[2 * k + i] = i % 2 == 0 ? 1 : -1;
  }
  for (int i = 0; i < 3; ++i) ones.data<float>()[i] = 1;
  const TernaryMatrix weight = pack_ternary(w, ones).to(device);
  for (const std::int64_t m : {2, 40}) {
    const Tensor rows = Tensor::empty({m, k}, DType::i8), scales = Tensor::empty({m}, DType::f32), y = poisoned({m, 3}, DType::f32);
    for (std::int64_t r = 0; r < m; ++r) {
      std::copy_n(x.data<i8>() + r % 2 * k, k, rows.data<i8>() + r * k);
      scales.data<float>()[r] = 1;
    }
    if (!launched([&] { ternary_gemm(rows.to(device), scales.to(device), weight, y); })) continue;
    const std::vector<float> results = floats_of(y);
    for (std::int64_t r = 0; r < m; ++r) {
      const float value = r % 2 == 0 ? -128 : 127;
      EXPECT_EQ(results[static_cast<std::size_t>(3 * r)], -value * k);
      EXPECT_EQ(results[static_cast<std::size_t>(3 * r + 1)], value * k);
      EXPECT_EQ(results[static_cast<std::size_t>(3 * r + 2)], 0);
    }
  }
}

TEST_P(BitNet, ProductsAddBiasAndY) {
  for (const DType dtype : {DType::bf16, DType::f32}) {
    for (const std::int64_t m : {1, 13, 40}) {
      check_product({.m = m, .n = 50, .k = 320, .bias = true, .gap = 1, .align = 16}, dtype);
      check_product({.m = m, .n = 50, .k = 320, .accumulate = true, .align = 16}, dtype);
      check_product({.m = m, .n = 33, .k = 100, .bias = true, .accumulate = true, .gap = 2}, dtype);
    }
  }
}

TEST_P(BitNet, ProductsWithoutElementsAreNothingOrZero) {
  const Stream stream = Stream::standard(device);
  const TernaryMatrix w = TernaryMatrix::allocate(5, 8, stream);
  ternary_gemm(poisoned({0, 8}, DType::i8), poisoned({0}, DType::f32), w, poisoned({0, 5}, DType::f32));
  ternary_gemm(poisoned({3, 8}, DType::i8), poisoned({3}, DType::f32), TernaryMatrix::allocate(0, 8, stream), poisoned({3, 0}, DType::f32));
  const Tensor y = poisoned({3, 2}, DType::f32), ones = Tensor::from<float>(std::vector<float>{1, 1, 1}, {3}).to(device);
  if (launched([&] { ternary_gemm(poisoned({3, 0}, DType::i8), ones, {poisoned({2, 0}, DType::u8), ones.slice(0, 0, 2)}, y); })) {
    EXPECT_EQ(floats_of(y), std::vector<float>(6, 0));
  }
}

TEST_P(BitNet, LayersAreARoundingAndAProduct) {
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
    for (const std::int64_t m : {1, 30}) {
      constexpr std::int64_t n = 70, k = 640;
      PlacedTensor x({m, k}, dtype, device, {.gap = 3});
      x.fill_random(random);
      const TernaryMatrix w = quantize_ternary(Tensor::random({n, k}, DType::f32, random())).to(device);
      const Tensor values = poisoned({m, k}, DType::i8), scales = poisoned({m}, DType::f32);
      const Tensor y = poisoned({m, n}, dtype), expected = poisoned({m, n}, dtype);
      if (!launched([&] {
            quantize_activations(x, values, scales);
            ternary_gemm(values, scales, w, expected);
            bit_linear(x, w, y);
          }))
        continue;
      EXPECT_EQ(floats_of(y), floats_of(expected));
    }
  }
}

TEST(BitNetWeights, ChangeTheirLayoutFromCheckpoints) {
  std::mt19937_64 random = random_engine();
  constexpr std::int64_t n = 12, k = 20;
  const Tensor packed = Tensor::zeros({n / 4, k}, DType::u8);
  std::vector<int> numbers;
  for (std::int64_t row = 0; row < n; ++row) {
    for (std::int64_t col = 0; col < k; ++col) {
      numbers.push_back(static_cast<int>(random() % 3) - 1);
      packed.data<u8>()[row % (n / 4) * k + col] |= static_cast<u8>((numbers.back() + 1) << row / (n / 4) * 2);
    }
  }
  const TernaryMatrix w = convert_bitnet(packed, 0.75f);
  EXPECT_EQ(numbers_of(w), numbers);
  EXPECT_EQ(floats_of(w.scales), std::vector<float>(n, 0.75f));
  packed.data<u8>()[k + 3] = 0x30;
  expect_error<InvalidArgument>([&] { convert_bitnet(packed, 1); }, {"packed[1, 3] is 48", "code of 3"});
  expect_error<InvalidArgument>([&] { convert_bitnet(Tensor::zeros({2, 6}, DType::u8), 1); }, {"packed is", "multiple of 4"});
  expect_error<InvalidArgument>([&] { convert_bitnet(Tensor::zeros({2, 8}, DType::u8), kNaN); }, {"scale is nan", "finite"});
}

TEST(BitNetWeights, ArePackedFourInAByte) {
  const Tensor integers = Tensor::zeros({2, 8}, DType::i8), scales = Tensor::zeros({2}, DType::f32);
  integers.data<i8>()[0] = -1, integers.data<i8>()[1] = 1, integers.data<i8>()[15] = -1;
  const TernaryMatrix w = pack_ternary(integers, scales);
  EXPECT_EQ(w.values.data<u8>()[0], 0b10'10'11'01);
  EXPECT_EQ(w.values.data<u8>()[3], 0b01'10'10'10);
  EXPECT_EQ(w.scales.data(), scales.data());
  EXPECT_EQ(w.rows(), 2);
  EXPECT_EQ(w.columns(), 8);
  EXPECT_EQ(w.bytes(), 4 + 8);
  EXPECT_EQ(numbers_of(w.slice(1, 2)), (std::vector<int>{0, 0, 0, 0, 0, 0, 0, -1}));
  integers.data<i8>()[9] = 2;
  expect_error<InvalidArgument>([&] { pack_ternary(integers, scales); }, {"integers[1, 1] is 2", "-1, 0 or 1"});
}

TEST(BitNetErrors, NameTheArgument) {
  const auto floats = [](Shape shape) { return Tensor::zeros(std::move(shape), DType::f32); };
  const Tensor values = Tensor::zeros({2, 8}, DType::i8), scales = floats({2}), y = Tensor::poisoned({2, 3}, DType::f32);
  const TernaryMatrix w = quantize_ternary(floats({3, 8}));
  const auto refused = [&](auto f, std::initializer_list<std::string_view> parts) { expect_error<InvalidArgument>(f, parts); };
  refused(
      [&] {
        quantize_activations(Tensor::zeros({2, 8}, DType::i8), values, scales);
      },
      {"quantize_activations", "x is", "f32, f16 and bf16"});
  refused([&] { quantize_activations(floats({2, 9}), values, scales); }, {"values is", "i8[2, 9]"});
  refused([&] { quantize_activations(floats({2, 8}), values, floats({3})); }, {"scales is", "f32[2]"});
  refused([&] { quantize_activations(floats({8, 2}).transpose(0, 1), values, scales); }, {"x is", "adjacent"});
  refused([&] { quantize_ternary(floats({3, 6})); }, {"quantize_ternary", "multiple of 4"});
  refused([&] { quantize_ternary(floats({3, 8}), {Tensor::zeros({3, 8}, DType::u8), floats({3})}); }, {"values is", "u8[3, 2]"});
  refused([&] { unpack_ternary(w, Tensor::zeros({3, 4}, DType::i8)); }, {"out is", "i8[3, 8]"});
  refused([&] { unpack_ternary({}, Tensor::zeros({3, 8}, DType::i8)); }, {"weight is empty"});
  refused([&] { ternary_gemm(Tensor::zeros({2, 4}, DType::i8), scales, w, y); }, {"ternary_gemm", "values is", "[M, 8]"});
  refused([&] { ternary_gemm(values, floats({1}), w, y); }, {"x_scales is", "f32[2]"});
  refused([&] { ternary_gemm(values, scales, w, floats({2, 4})); }, {"y is", "f32[2, 3]"});
  refused([&] { ternary_gemm(values, scales, w, Tensor::zeros({2, 3}, DType::i32)); }, {"y is", "f32, f16 and bf16"});
  refused([&] { ternary_gemm(values, scales, {w.values, floats({2})}, y); }, {"weight's scales", "f32[3]"});
  const Tensor bias = floats({4});
  refused([&] { ternary_gemm(values, scales, w, y, {.bias = &bias}); }, {"bias"});
  const std::int64_t deep = kLargestTernaryDepth + 4;
  refused([&] { ternary_gemm(Tensor::zeros({2, deep}, DType::i8), scales, TernaryMatrix::allocate(3, deep), y); }, {"65536 columns"});
  refused([&] { bit_linear(floats({2, 4}), w, y); }, {"bit_linear", "x is", "[M, 8]"});
  refused([&] { bit_linear(floats({2, 8}), w, Tensor::zeros({2, 3}, DType::bf16)); }, {"y is", "x's dtype, f32"});
  for (std::int64_t i = 0; i < 6; ++i) EXPECT_TRUE(std::isnan(y.data<float>()[i])) << "written";
}

}  // namespace
}  // namespace tw::kernels::bitnet
