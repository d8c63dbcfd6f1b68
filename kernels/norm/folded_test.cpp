// row_scales() and fold_norm() against a layer norm and a linear layer in double.

#include "kernels/norm/folded.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "runtime/format.hpp"
#include "tests/expect_error.hpp"
#include "tests/support.hpp"

namespace tw::kernels::norm {
namespace {

using namespace tw::test;

constexpr float kEpsilon = 1e-5f;

class FoldedNorm : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override { skip_unless_present(device); }

  /// Normal numbers around `mean`, rounded to `dtype`, on the device.
  Tensor random_tensor(Shape shape, DType dtype, double mean) {
    std::normal_distribution<float> distribution(static_cast<float>(mean), 1);
    std::vector<float> values(1);
    for (const std::int64_t extent : shape) values.resize(values.size() * static_cast<std::size_t>(extent));
    for (float& value : values) value = distribution(random);
    return Tensor::from<float>(values, std::move(shape)).to(dtype).to(device);
  }
  static std::vector<double> values_of(const Tensor& t) {
    const Tensor here = t.to(Device::cpu()).to(DType::f32);
    return {here.data<float>(), here.data<float>() + here.numel()};
  }
  /// 1 / sqrt(variance + epsilon), and the mean.
  static std::pair<double, double> statistics(const std::vector<double>& x, std::int64_t row, std::int64_t cols) {
    double mean = 0, variance = 0;
    for (std::int64_t k = 0; k < cols; ++k) mean += x[row * cols + k] / static_cast<double>(cols);
    for (std::int64_t k = 0; k < cols; ++k) variance += std::pow(x[row * cols + k] - mean, 2) / static_cast<double>(cols);
    return {1 / std::sqrt(variance + double{kEpsilon}), mean};
  }

  const Device device = GetParam();
  const Stream stream = Stream::standard(device);
  std::mt19937_64 random = random_engine();
};

TEST_P(FoldedNorm, ScalesAreInverseDeviations) {
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
    for (const auto& [rows, cols] : {std::pair{37, 1280}, {9, 1000}, {5, 1281}, {6, 2048}, {3, 5120}, {1, 1}}) {
      SCOPED_TRACE(tw::format("{} x {}, {}", rows, cols, name_of(dtype)));
      const Tensor x = random_tensor({rows, cols}, dtype, 3), scales = Tensor::poisoned({rows}, DType::f32, stream);
      if (!launched([&] { row_scales(x, kEpsilon, scales, stream); })) continue;
      const std::vector<double> of_x = values_of(x), actual = values_of(scales);
      for (int row = 0; row < rows; ++row) {
        const double expected = statistics(of_x, row, cols).first;
        ASSERT_NEAR(actual[row], expected, 1e-5 * expected) << "row " << row;
      }
    }
  }
}

TEST_P(FoldedNorm, IsTheNormAndTheLinearLayer) {
  for (const auto& [rows, cols] : {std::pair{19, 1280}, {6, 200}, {3, 3000}}) {
    SCOPED_TRACE(tw::format("{} x {}", rows, cols));
    const Tensor x = random_tensor({4, cols}, DType::f32, 2), gamma = random_tensor({cols}, DType::f32, 1);
    const Tensor beta = random_tensor({cols}, DType::f32, 0), weight = random_tensor({rows, cols}, DType::f32, 0.2);
    const Tensor bias = random_tensor({rows}, DType::f32, 0), scales = Tensor::poisoned({4}, DType::f32, stream);
    const std::vector<double> of_x = values_of(x), g = values_of(gamma), b = values_of(beta), w = values_of(weight), c = values_of(bias);
    if (!launched([&] {
          row_scales(x, kEpsilon, scales, stream);
          fold_norm(weight, bias, gamma, beta, stream);
        }))
      continue;
    const std::vector<double> s = values_of(scales), folded = values_of(weight), folded_bias = values_of(bias);
    for (int m = 0; m < 4; ++m) {
      const auto [scale, mean] = statistics(of_x, m, cols);
      for (int n = 0; n < rows; ++n) {
        double expected = c[n], actual = 0, size = std::abs(c[n]);
        for (int k = 0; k < cols; ++k) {
          const double term = ((of_x[m * cols + k] - mean) * scale * g[k] + b[k]) * w[n * cols + k];
          expected += term;
          size += std::abs(term);
          actual += of_x[m * cols + k] * folded[n * cols + k];
        }
        ASSERT_NEAR(actual * s[m] + folded_bias[n], expected, 1e-6 * size) << "row " << m << ", column " << n;
      }
    }
  }
}

TEST_P(FoldedNorm, RowsOfTheWeightHaveNoMean) {
  const Tensor weight = random_tensor({7, 640}, DType::bf16, 1), bias = random_tensor({7}, DType::bf16, 0);
  if (!launched([&] { fold_norm(weight, bias, random_tensor({640}, DType::bf16, 1), random_tensor({640}, DType::bf16, 0), stream); }))
    return;
  const std::vector<double> w = values_of(weight);
  for (int n = 0; n < 7; ++n) EXPECT_NEAR(statistics(w, n, 640).second, 0, 0x1p-9 * 4 / std::sqrt(640)) << "row " << n;
}

TEST_P(FoldedNorm, RefusesWhatDoesNotFit) {
  const auto tensor = [&](Shape shape, DType dtype) { return Tensor::poisoned(std::move(shape), dtype, stream); };
  const Tensor x = tensor({4, 64}, DType::bf16), four = tensor({4}, DType::f32), vector = tensor({64}, DType::bf16);
  const auto scales = [&](const Tensor& of, const Tensor& to) { row_scales(of, kEpsilon, to, stream); };
  expect_error<InvalidArgument>([&] { scales(x, tensor({3}, DType::f32)); }, {"row_scales: scales is", "[4]"});
  expect_error<InvalidArgument>([&] { scales(x, tensor({4}, DType::bf16)); }, {"row_scales: scales is", "f32"});
  expect_error<InvalidArgument>([&] { scales(x.transpose(0, 1), four); }, {"row_scales: x is", "contiguous"});
  expect_error<InvalidArgument>([&] { scales(tensor({4, 8193}, DType::bf16), four); }, {"row_scales: rows have 8193 columns"});
  const auto fold = [&](const Tensor& w, const Tensor& bias, const Tensor& gamma) { fold_norm(w, bias, gamma, vector, stream); };
  const Tensor bias = tensor({4}, DType::bf16);
  expect_error<InvalidArgument>([&] { fold(tensor({4, 8, 8}, DType::bf16), bias, vector); }, {"fold_norm: weight is", "[N, K]"});
  expect_error<InvalidArgument>([&] { fold(x, four, vector); }, {"fold_norm: bias is", "bf16"});
  expect_error<InvalidArgument>([&] { fold(x, bias, bias); }, {"fold_norm: gamma is", "64 elements"});
}

INSTANTIATE_TEST_SUITE_P(Devices, FoldedNorm, testing::ValuesIn(kDevices), device_name);

}  // namespace
}  // namespace tw::kernels::norm
