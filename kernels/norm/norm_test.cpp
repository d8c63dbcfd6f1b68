// layer_norm() and rms_norm() against loops in double, on the CPU and, where there is one, on a GPU; their bad inputs.

#include "tilewave/norm.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <tuple>
#include <vector>

#include "kernels/norm/reference.hpp"
#include "runtime/format.hpp"
#include "tests/accuracy.hpp"
#include "tests/expect_error.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"

namespace tw::kernels::norm {
namespace {

using namespace tw::test;

enum class In { new_memory, x, residual };  ///< where a result goes

struct Case {
  Shape shape;
  DType out = DType::bf16;
  bool weight = true, bias = true, f32_weights = false;
  bool residual = false, stores_h = false;
  In h_in = In::new_memory, y_in = In::new_memory;
  Placement x_place = {}, y_place = {};
  float epsilon = 1e-5f, offset = 0;
};

class Norm : public testing::TestWithParam<std::tuple<Device, DType, bool>> {
 protected:
  void SetUp() override { skip_unless_present(device); }
  int pick(int below) { return static_cast<int>(random() % static_cast<unsigned>(below)); }
  void run(const Tensor& x, const Tensor& y, const NormOptions& options = {}) {
    rms ? tw::rms_norm(x, y, options) : tw::layer_norm(x, y, options);
  }
  void check(Case c) {
    if (rms) c.bias = false;
    if (c.y_in != In::new_memory) c.out = dtype;
    const std::int64_t cols = c.shape.back();
    SCOPED_TRACE(tw::format("[{}] to {} weight {} bias {} f32 {} residual {} stores h {} in {} y in {} offset {}", tw::join(c.shape, ", "),
                            name_of(c.out), c.weight, c.bias, c.f32_weights, c.residual, c.stores_h, static_cast<int>(c.h_in),
                            static_cast<int>(c.y_in), c.offset));
    PlacedTensor x(c.shape, dtype, device, c.x_place), residual(c.shape, dtype, device, c.y_in == In::residual ? Placement{} : c.x_place);
    PlacedTensor own_y(c.shape, c.out, device, c.y_place), own_h(c.shape, dtype, device, c.x_place);
    const DType w_type = c.f32_weights ? DType::f32 : dtype;
    PlacedTensor weight({cols}, w_type, device, {.offset = 8}), bias({cols}, w_type, device, {.offset = 1, .step = 2});
    std::vector<float> h = x.fill_random(random);
    for (float& v : h) v = round_to(dtype, v + c.offset);
    x.fill(h);
    const std::vector<float> added = residual.fill_random(random);
    for (std::size_t i = 0; i < h.size() && c.residual; ++i) h[i] = round_to(dtype, h[i] + added[i]);
    const std::vector<float> w = weight.fill_random(random), b = bias.fill_random(random);
    const auto placed = [&](In in, PlacedTensor& own) -> PlacedTensor& { return in == In::x ? x : in == In::residual ? residual : own; };
    PlacedTensor& y = placed(c.y_in, own_y);
    PlacedTensor& sum = placed(c.h_in, own_h);

    run(x, y,
        {.epsilon = c.epsilon,
         .weight = c.weight ? &weight.tensor() : nullptr,
         .bias = c.bias ? &bias.tensor() : nullptr,
         .residual = c.residual ? &residual.tensor() : nullptr,
         .sum = c.stores_h ? &sum.tensor() : nullptr});

    PlainCall call{.h = h, .cols = cols, .epsilon = c.epsilon, .rms = rms};
    if (c.weight) call.weight = w;
    if (c.bias) call.bias = b;
    const std::vector<double> exact = plain<double>(call, [](double v) { return v; });
    std::vector<double> naive;
    for (const float v : plain<float>(call, [&](float n) { return rms ? round_to(dtype, n) : n; })) naive.push_back(round_to(c.out, v));
    // The rounding before the weight is of x's dtype.
    const Arithmetic arithmetic = rms && c.out == DType::f32    ? arithmetic_of(dtype, Device::cpu())
                                  : rms && dtype == DType::bf16 ? Arithmetic::bf16
                                                                : arithmetic_of(c.out, Device::cpu());
    EXPECT_TRUE(accurate({y.values(), exact, naive, arithmetic}));
    EXPECT_TRUE(y.gaps_intact());
    if (!c.stores_h) return;
    const std::vector<double> stored = sum.values();
    for (std::size_t i = 0; i < h.size(); ++i) ASSERT_EQ(stored[i], h[i]) << "element " << i << " of the sum";
    EXPECT_TRUE(sum.gaps_intact());
  }
  std::vector<double> of_row(const std::vector<float>& row) {
    const auto cols = static_cast<std::int64_t>(row.size());
    PlacedTensor x({cols}, dtype, device), y({cols}, dtype, device);
    x.fill(row);
    run(x, y);
    return y.values();
  }

  const Device device = std::get<0>(GetParam());
  const DType dtype = std::get<1>(GetParam());
  const bool rms = std::get<2>(GetParam());
  std::mt19937_64 random = random_engine();
};

INSTANTIATE_TEST_SUITE_P(Ops, Norm,
                         testing::Combine(testing::ValuesIn(kDevices), testing::Values(DType::f32, DType::f16, DType::bf16),
                                          testing::Bool()),
                         [](const auto& instance) {
                           return tw::format("{}_{}_{}", std::get<0>(instance.param).is_cuda() ? "cuda" : "cpu",
                                             name_of(std::get<1>(instance.param)), std::get<2>(instance.param) ? "rms" : "layer");
                         });

TEST_P(Norm, RowsOfAnyLength) {
  for (const std::int64_t cols : {1,    2,    3,    31,   64,   127,  129,  255,  256,  257,  512,   1000,  1279,
                                  1280, 1281, 2048, 2049, 4095, 4096, 4097, 5120, 8192, 8193, 16384, 16385, 20011})
    check({.shape = {1 + pick(4), cols}, .out = dtype});
}

TEST_P(Norm, AnyNumberOfRows) {
  for (const std::int64_t rows : {0, 1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 33, 131}) check({.shape = {rows, 70}, .out = dtype});
  check({.shape = {3, 0}, .out = dtype});
}

TEST_P(Norm, AnyRankAndStrides) {
  check({.shape = {77}, .out = dtype});
  check({.shape = {3, 5, 130}, .out = dtype});
  check({.shape = {2, 3, 5, 70},
         .out = dtype,
         .residual = true,
         .stores_h = true,
         .x_place = {.offset = 1, .gap = 3},
         .y_place = {.gap = 1}});
  check({.shape = {2, 3, 4, 256}, .out = dtype, .x_place = {.offset = 8, .gap = 8, .align = 8}, .y_place = {.order = {1, 0, 2, 3}}});
  check({.shape = {2, 3, 4, 33}, .out = dtype, .x_place = {.order = {3, 1, 0, 2}}, .y_place = {.order = {2, 1, 0, 3}}});
  check({.shape = {5, 300}, .out = dtype, .x_place = {.step = 2, .gap = 1}, .y_place = {.gap = 2, .reversed = true}});
  check({.shape = {2, 5000}, .out = dtype, .residual = true, .x_place = {.order = {1, 0}}, .y_place = {.offset = 3, .gap = 7}});
}

TEST_P(Norm, WeightsAndTheirTypes) {
  for (const std::int64_t cols : {40, 1280, 5000}) {
    for (const bool f32 : {false, true}) {
      for (const DType out : {DType::f32, DType::f16, DType::bf16}) check({.shape = {3, cols}, .out = out, .f32_weights = f32});
      check({.shape = {3, cols}, .out = dtype, .weight = false, .f32_weights = f32});
      check({.shape = {3, cols}, .out = dtype, .bias = false, .f32_weights = f32});
    }
    check({.shape = {3, cols}, .out = dtype, .weight = false, .bias = false});
  }
}

TEST_P(Norm, ResidualAndWhereTheSumGoes) {
  for (const std::int64_t cols : {100, 2048, 17000}) {
    check({.shape = {3, cols}, .out = dtype, .residual = true});
    for (const In h_in : {In::new_memory, In::x, In::residual})
      check({.shape = {3, cols}, .out = dtype, .residual = true, .stores_h = true, .h_in = h_in});
    for (const In y_in : {In::x, In::residual}) check({.shape = {3, cols}, .residual = true, .y_in = y_in});
    check({.shape = {3, cols}, .residual = true, .stores_h = true, .h_in = In::residual, .y_in = In::x});
    check({.shape = {3, cols}, .y_in = In::x});
  }
}

TEST_P(Norm, RowsFarFromZero) {
  // The variance is a ten-thousandth of the mean's square; a difference of means of squares would lose it.
  for (const std::int64_t cols : {130, 1280, 17000}) check({.shape = {4, cols}, .out = DType::f32, .offset = 100});
}

TEST_P(Norm, RowsOfZeros) {
  for (const std::size_t cols : {7, 1280, 17000})
    for (const double y : of_row(std::vector<float>(cols, 0.0f))) ASSERT_EQ(y, 0);
}

TEST_P(Norm, InfinitiesAndNaN) {
  for (const std::size_t cols : {7, 1280, 17000}) {
    std::vector<float> row(cols, 1.0f);
    row[cols / 2] = kNaN;
    for (const double y : of_row(row)) ASSERT_TRUE(std::isnan(y));
    row[cols / 2] = kInf;
    const std::vector<double> y = of_row(row);
    for (std::size_t i = 0; i < cols; ++i) {
      if (rms && i != cols / 2)
        ASSERT_EQ(y[i], 0);
      else
        ASSERT_TRUE(std::isnan(y[i]));
    }
  }
}

/// Results of 16 MB and more are written past a CPU's caches: what one row alone gives.
TEST_P(Norm, LargeTensorsWithGaps) {
  if (device.is_cuda() || dtype == DType::f16) return;
  constexpr std::int64_t kCols = 1281;
  const std::int64_t rows = (std::int64_t{17} << 20) / (kCols * static_cast<std::int64_t>(size_of(dtype)));
  const Placement place{.offset = 5, .gap = 3};
  PlacedTensor x({rows, kCols}, dtype, device), residual({rows, kCols}, dtype, device), weight({kCols}, dtype, device);
  PlacedTensor y({rows, kCols}, dtype, device, place), sum({rows, kCols}, dtype, device, place);
  PlacedTensor y_row({kCols}, dtype, device), sum_row({kCols}, dtype, device);
  x.fill_random(random);
  residual.fill_random(random);
  weight.fill_random(random);
  run(x, y, {.weight = &weight.tensor(), .residual = &residual.tensor(), .sum = &sum.tensor()});
  EXPECT_TRUE(y.gaps_intact());
  EXPECT_TRUE(sum.gaps_intact());
  for (int n = 0; n < 200; ++n) {
    const std::int64_t at = n == 0 ? rows - 1 : n == 1 ? 0 : pick(static_cast<int>(rows));
    const Tensor added = residual.tensor().select(0, at);
    run(x.tensor().select(0, at), y_row, {.weight = &weight.tensor(), .residual = &added, .sum = &sum_row.tensor()});
    const auto same = [&](const PlacedTensor& large, const PlacedTensor& row) {
      return std::memcmp(large.tensor().select(0, at).data(), row.tensor().data(), kCols * size_of(dtype)) == 0;
    };
    ASSERT_TRUE(same(y, y_row) && same(sum, sum_row)) << "row " << at;
  }
}

class NormArguments : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override { skip_unless_present(GetParam()); }
  Tensor tensor(Shape shape, DType dtype = DType::bf16) { return Tensor::poisoned(std::move(shape), dtype, Stream::standard(GetParam())); }
};
INSTANTIATE_TEST_SUITE_P(Ops, NormArguments, testing::ValuesIn(kDevices), device_name);

TEST_P(NormArguments, AreRefusedByName) {
  const auto refused = [&](const Tensor& x, const Tensor& y, std::initializer_list<std::string_view> parts, NormOptions options = {}) {
    expect_error<InvalidArgument>([&] { tw::layer_norm(x, y, options); }, parts);
  };
  const Tensor x = tensor({3, 4}), y = tensor({3, 4}), row = tensor({4}), f32_row = tensor({4}, DType::f32);
  const Tensor f16 = tensor({3, 4}, DType::f16), f16_row = tensor({4}, DType::f16), other = tensor({4, 3});
  refused(tensor({3, 4}, DType::i32), y, {"layer_norm: x is i32[3, 4]"});
  refused(x, tensor({3, 4}, DType::u8), {"y is u8[3, 4]"});
  refused(x, other, {"y is bf16[4, 3]", "x's shape"});
  refused(tensor({1, 1, 1, 3, 4}), y, {"1 to 4 dimensions"});
  refused(x, y, {"weight is f16[4]", "x's dtype, bf16, or f32"}, {.weight = &f16_row});
  refused(x, y, {"weight is bf16[3, 4]", "[4]"}, {.weight = &x});
  refused(x, y, {"weight is bf16[4]", "bias is f32[4]", "one dtype"}, {.weight = &row, .bias = &f32_row});
  refused(x, y, {"residual is f16[3, 4]"}, {.residual = &f16});
  refused(x, y, {"residual is bf16[4, 3]", "x's shape"}, {.residual = &other});
  refused(x, y, {"sum is bf16[3, 4]", "without a residual"}, {.sum = &x});
  refused(x, y, {"sum is", "shares memory with y"}, {.residual = &x, .sum = &y});
  refused(x, Tensor::borrow(x.data(), {3, 4}, DType::bf16, x.device(), {1, 3}), {"shares memory with x", "the same shape, strides"});
  for (const float epsilon : {-1.0f, kInf, kNaN}) refused(x, y, {"epsilon is"}, {.epsilon = epsilon});
  expect_error<InvalidArgument>([&] { tw::rms_norm(x, y, {.bias = &row}); }, {"rms_norm: bias is", "RMS norm has none"});
}

}  // namespace
}  // namespace tw::kernels::norm
