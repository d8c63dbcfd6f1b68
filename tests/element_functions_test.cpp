// The element functions of kernels against the C library in double: relative error on dense grids, infinities, NaN.

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "tests/language_kernels.tile.hpp"
#include "tests/launch_kernel.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"

namespace tw::test {
namespace {

constexpr double kPi = 3.14159265358979323846;

/// A GPU's approximations take results below the normal numbers for 0.
const double kSmallest = std::ldexp(1.0, -126);

class ElementFunctions : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override { skip_unless_present(device); }

  std::vector<float> run(Function function, std::vector<float> x) const {
    constexpr int kCols = 1024;
    const std::size_t count = x.size();
    x.resize((count + kCols - 1) / kCols * kCols, 1.0f);
    const auto rows = static_cast<int>(x.size()) / kCols;
    const Tensor in = Tensor::from<float>(x, {rows, kCols}).to(device);
    const Tensor out = Tensor::poisoned({rows, kCols}, DType::f32, Stream::standard(device));
    launch_kernel<ElementFunction<8, 64>>(device, {ceil_div(rows, 8), kCols / 64}, [&](auto& bind, auto& p) {
      bind(p.in, in);
      bind(p.out, out);
      p.function = function;
    });
    const Tensor host = out.to(Device::cpu());
    return {host.data<float>(), host.data<float>() + count};
  }
  float run(Function function, float x) const { return run(function, std::vector<float>{x})[0]; }

  /// |f(x) - exact(x)| <= bound(x, exact(x)) on a grid from `low` to `high`, plus whatever `more` adds.
  template <class Exact, class Bound>
  void expect_within(Function function, double low, double high, Exact exact, Bound bound, const std::vector<float>& more = {}) const {
    constexpr int kPoints = 200'003;
    std::vector<float> x = more;
    for (int i = 0; i <= kPoints; ++i) x.push_back(static_cast<float>(low + (high - low) * i / kPoints));
    const std::vector<float> y = run(function, x);
    double worst = 0;
    std::size_t at = 0;
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double expected = exact(static_cast<double>(x[i]));
      // Relative to the bound: more than 1 is too much. Results beyond f32 must be infinite.
      const double error = std::abs(expected) > static_cast<double>(std::numeric_limits<float>::max())
                               ? (std::isinf(y[i]) && std::signbit(y[i]) == std::signbit(expected) ? 0.0 : kInf)
                               : std::abs(y[i] - expected) / bound(x[i], expected);
      if (!(error <= worst)) {
        worst = error;
        at = i;
      }
    }
    EXPECT_LE(worst, 1) << "f(" << x[at] << ") is " << y[at] << " instead of " << exact(static_cast<double>(x[at]));
  }
  static auto relative(double bound) {
    return [=](double, double y) { return std::max(std::abs(y) * bound, kSmallest); };
  }
  static auto relative_growing(double bound, double growth) {
    return [=](double x, double y) { return std::max(std::abs(y) * (bound + std::abs(x) * growth), kSmallest); };
  }

  /// A GPU has tanh by way of its approximate exp2, of which 1 is subtracted.
  double tanh_bound() const { return std::ldexp(1.0, device.is_cuda() ? -18 : -21); }

  const Device device = GetParam();
};

INSTANTIATE_TEST_SUITE_P(Tile, ElementFunctions, testing::ValuesIn(kDevices), device_name);

/// Numbers of all magnitudes.
std::vector<float> all_magnitudes(int from, int to) {
  std::vector<float> x;
  for (int exponent = from; exponent <= to; ++exponent)
    for (const float mantissa : {1.0f, 1.1f, 1.25f, 1.4142135f, 1.5f, 1.75f, 1.9999999f}) x.push_back(std::ldexp(mantissa, exponent));
  return x;
}

std::vector<float> both_signs(std::vector<float> x) {
  const std::size_t count = x.size();
  for (std::size_t i = 0; i < count; ++i) x.push_back(-x[i]);
  return x;
}

TEST_P(ElementFunctions, Exponentials) {
  const auto bound = std::ldexp(1.0, -21);
  expect_within(
      Function::exp2, -130, 129, [](double x) { return std::exp2(x); }, relative(bound), both_signs(all_magnitudes(-140, 6)));
  expect_within(
      Function::exp2, -2, 2, [](double x) { return std::exp2(x); }, relative(bound));
  // exp x is 2^(x log2 e), whose exponent is rounded: the error grows with x.
  expect_within(
      Function::exp, -88, 88, [](double x) { return std::exp(x); }, relative_growing(bound, std::ldexp(1.0, -23)),
      both_signs(all_magnitudes(-140, 5)));
}

TEST_P(ElementFunctions, Logarithm) {
  const auto bound = [](double, double y) { return std::max(std::abs(y), 1.0) * std::ldexp(1.0, -21); };
  expect_within(
      Function::log2, 1e-3, 8, [](double x) { return std::log2(x); }, bound, all_magnitudes(-126, 127));
}

TEST_P(ElementFunctions, RootsAndReciprocals) {
  const double bound = std::ldexp(1.0, -22);
  expect_within(
      Function::sqrt, 0, 100, [](double x) { return std::sqrt(x); }, relative(bound), all_magnitudes(-126, 127));
  expect_within(
      Function::rsqrt, 0.01, 100, [](double x) { return 1 / std::sqrt(x); }, relative(bound), all_magnitudes(-126, 127));
  expect_within(
      Function::reciprocal, 0.01, 100, [](double x) { return 1 / x; }, relative(bound), both_signs(all_magnitudes(-126, 127)));
}

TEST_P(ElementFunctions, HyperbolicTangent) {
  expect_within(
      Function::tanh, -12, 12, [](double x) { return std::tanh(x); }, relative(tanh_bound()), both_signs(all_magnitudes(-120, 100)));
  expect_within(
      Function::tanh, -0.1, 0.1, [](double x) { return std::tanh(x); }, relative(tanh_bound()));
}

TEST_P(ElementFunctions, ErrorFunction) {
  expect_within(
      Function::erf, -5, 5, [](double x) { return std::erf(x); }, relative(std::ldexp(1.0, -21)), both_signs(all_magnitudes(-120, 100)));
}

TEST_P(ElementFunctions, Trigonometric) {
  const auto bound = [](double, double) { return std::ldexp(1.0, -21); };
  expect_within(
      Function::sin, -100, 100, [](double x) { return std::sin(x); }, bound, both_signs(all_magnitudes(-100, 20)));
  expect_within(
      Function::cos, -100, 100, [](double x) { return std::cos(x); }, bound, both_signs(all_magnitudes(-100, 20)));
}

TEST_P(ElementFunctions, Sigmoid) {
  const auto exact = [](double x) { return 1 / (1 + std::exp(-x)); };
  expect_within(Function::sigmoid, -87, 100, exact, relative_growing(std::ldexp(1.0, -20), std::ldexp(1.0, -22)),
                both_signs(all_magnitudes(-100, 6)));
}

TEST_P(ElementFunctions, Activations) {
  // Relative to x: where an activation is near 0 it is the small difference of larger numbers.
  const auto relative_to_x = [](double bound) { return [=](double x, double) { return std::max(std::abs(x) * bound, kSmallest); }; };
  const std::vector<float> more = both_signs(all_magnitudes(-100, 30));
  expect_within(
      Function::relu, -10, 10, [](double x) { return x < 0 ? 0 : x; }, [](double, double) { return kSmallest; }, more);
  expect_within(
      Function::silu, -20, 20, [](double x) { return x / (1 + std::exp(-x)); }, relative_to_x(std::ldexp(1.0, -21)), more);
  expect_within(
      Function::gelu_erf, -10, 10, [](double x) { return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0))); },
      relative_to_x(std::ldexp(1.0, -21)), more);
  expect_within(
      Function::gelu_tanh, -10, 10, [](double x) { return 0.5 * x * (1 + std::tanh(std::sqrt(2 / kPi) * (x + 0.044715 * x * x * x))); },
      relative_to_x(tanh_bound()), all_magnitudes(-100, 30));
}

TEST_P(ElementFunctions, AtInfinity) {
  const std::pair<Function, std::pair<float, float>> limits[] = {
      // at -infinity and at infinity
      {Function::exp2, {0, kInf}},   {Function::exp, {0, kInf}},     {Function::log2, {kNaN, kInf}}, {Function::sqrt, {kNaN, kInf}},
      {Function::rsqrt, {kNaN, 0}},  {Function::reciprocal, {0, 0}}, {Function::tanh, {-1, 1}},      {Function::erf, {-1, 1}},
      {Function::sin, {kNaN, kNaN}}, {Function::cos, {kNaN, kNaN}},  {Function::sigmoid, {0, 1}},    {Function::relu, {0, kInf}}};
  for (const auto& [function, values] : limits) {
    for (const bool positive : {false, true}) {
      const float expected = positive ? values.second : values.first, got = run(function, positive ? kInf : -kInf);
      if (std::isnan(expected))
        EXPECT_TRUE(std::isnan(got)) << "function " << static_cast<int>(function);
      else
        EXPECT_EQ(got, expected) << "function " << static_cast<int>(function);
    }
  }
  for (const Function function : {Function::silu, Function::gelu_erf, Function::gelu_tanh}) EXPECT_EQ(run(function, kInf), kInf);
}

TEST_P(ElementFunctions, OfZero) {
  const std::pair<Function, float> values[] = {
      {Function::exp2, 1},          {Function::exp, 1},  {Function::log2, -kInf}, {Function::sqrt, 0},     {Function::rsqrt, kInf},
      {Function::reciprocal, kInf}, {Function::tanh, 0}, {Function::erf, 0},      {Function::sin, 0},      {Function::cos, 1},
      {Function::sigmoid, 0.5f},    {Function::relu, 0}, {Function::silu, 0},     {Function::gelu_erf, 0}, {Function::gelu_tanh, 0}};
  static_assert(std::size(values) == static_cast<std::size_t>(Function::count));
  for (const auto& [function, value] : values) EXPECT_EQ(run(function, 0.0f), value) << "function " << static_cast<int>(function);
}

TEST_P(ElementFunctions, NanStaysNan) {
  for (int function = 0; function < static_cast<int>(Function::count); ++function) {
    EXPECT_TRUE(std::isnan(run(static_cast<Function>(function), kNaN))) << "function " << function;
    EXPECT_TRUE(std::isnan(run(static_cast<Function>(function), -kNaN))) << "function " << function;
  }
}

TEST_P(ElementFunctions, NanOfAnyBitsStaysNan) {
  std::vector<float> x;
  for (const std::uint32_t bits : {0x7f800001u, 0x7fffffffu, 0x7fc001ffu, 0xff800001u, 0xffffffffu, 0xffc00100u})
    x.push_back(std::bit_cast<float>(bits));
  for (const Function function : {Function::exp2, Function::exp, Function::sigmoid})
    for (const float y : run(function, x)) EXPECT_TRUE(std::isnan(y)) << "function " << static_cast<int>(function);
}

TEST_P(ElementFunctions, ExponentialsOverflowAndVanish) {
  for (const float x : {128.0f, 129.0f, 1e10f, std::numeric_limits<float>::max()}) EXPECT_EQ(run(Function::exp2, x), kInf) << x;
  for (const float x : {-151.0f, -1e10f, std::numeric_limits<float>::lowest()}) EXPECT_EQ(run(Function::exp2, x), 0) << x;
}

TEST(MaxAndMin, OfTwo) {
  EXPECT_EQ(tw::max(2.0f, -3.0f), 2);
  EXPECT_EQ(tw::min(2.0f, -3.0f), -3);
  EXPECT_EQ(tw::max(-kInf, -3.0f), -3);
  EXPECT_EQ(tw::max(4, 7), 7);
  EXPECT_EQ(tw::min(4, 7), 4);
  EXPECT_EQ(tw::abs(-2.5f), 2.5f);
  EXPECT_EQ(ceil_div(0, 64), 0);
  EXPECT_EQ(ceil_div(1, 64), 1);
  EXPECT_EQ(ceil_div(64, 64), 1);
  EXPECT_EQ(ceil_div(65, 64), 2);
}

}  // namespace
TEST(ElementFunctions, TheLargerAndTheSmallerOfANumberAndNaNIsTheNumber) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(max(1.0f, nan), 1.0f);
  EXPECT_EQ(max(nan, -1.0f), -1.0f);
  EXPECT_EQ(min(1.0f, nan), 1.0f);
  EXPECT_EQ(min(nan, -1.0f), -1.0f);
  EXPECT_TRUE(std::isnan(max(nan, nan)));
  EXPECT_EQ(max(-kInfinity, 2.0f), 2.0f);
  EXPECT_EQ(min(kInfinity, 2.0f), 2.0f);
}

}  // namespace tw::test
