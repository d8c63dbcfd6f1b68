// softmax() against loops in double, on the CPU and, where there is one, on a GPU; its bad inputs; the choice of tiles for rows.

#include "tilewave/softmax.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <tuple>
#include <vector>

#include "kernels/rows.hpp"
#include "kernels/softmax/reference.hpp"
#include "runtime/format.hpp"
#include "tests/accuracy.hpp"
#include "tests/expect_error.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"

namespace tw::kernels::softmax {
namespace {

using namespace tw::test;

Arithmetic arithmetic(DType dtype) { return arithmetic_of(dtype, Device::cpu()); }  // no products: f32 is f32 on a GPU, too

void expect_softmax(const PlacedTensor& y, std::span<const float> x, std::int64_t cols, float scale = 1) {
  const std::int64_t rows = cols == 0 ? 0 : static_cast<std::int64_t>(x.size()) / cols;
  const DType dtype = y.tensor().dtype();
  std::vector<double> naive;
  for (const float v : plain<float>(x, rows, cols, scale)) naive.push_back(round_to(dtype, v));
  EXPECT_TRUE(accurate({y.values(), plain<double>(x, rows, cols, scale), naive, arithmetic(dtype)}));
  EXPECT_TRUE(y.gaps_intact());
}

class Softmax : public testing::TestWithParam<std::tuple<Device, DType>> {
 protected:
  void SetUp() override { skip_unless_present(device); }
  int pick(int below) { return static_cast<int>(random() % static_cast<unsigned>(below)); }
  void check(Shape shape, DType out, Placement x_place = {}, Placement y_place = {}, float scale = 1) {
    SCOPED_TRACE(tw::format("[{}] to {}", tw::join(shape, ", "), name_of(out)));
    PlacedTensor x(shape, dtype, device, x_place), y(shape, out, device, y_place);
    const std::vector<float> values = x.fill_random(random, 3);
    tw::softmax(x, y, {.scale = scale});
    expect_softmax(y, values, shape.back(), scale);
  }
  /// What softmax() makes of one row.
  std::vector<double> of_row(const std::vector<float>& row) {
    const auto cols = static_cast<std::int64_t>(row.size());
    PlacedTensor x({cols}, dtype, device), y({cols}, dtype, device);
    x.fill(row);
    tw::softmax(x, y);
    return y.values();
  }

  const Device device = std::get<0>(GetParam());
  const DType dtype = std::get<1>(GetParam());
  std::mt19937_64 random = random_engine();
};

INSTANTIATE_TEST_SUITE_P(Ops, Softmax, testing::Combine(testing::ValuesIn(kDevices), testing::Values(DType::f32, DType::f16, DType::bf16)),
                         [](const auto& instance) {
                           return tw::format("{}_{}", std::get<0>(instance.param).is_cuda() ? "cuda" : "cpu",
                                             name_of(std::get<1>(instance.param)));
                         });

/// Lengths on both sides of what a tile holds on either device.
const std::vector<std::int64_t> kLengths = {1,    2,    3,    7,    31,   32,   97,   127,  128,  129,  255,  256,  257,   509,   512,  513,
                                            1024, 1025, 1280, 2047, 2048, 2049, 4095, 4096, 4097, 8192, 8193, 9001, 16384, 16385, 20011};

TEST_P(Softmax, RowsOfAnyLength) {
  for (const std::int64_t cols : kLengths) check({1 + pick(5), cols}, dtype);
}

TEST_P(Softmax, AnyNumberOfRows) {
  for (const std::int64_t rows : {0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 257}) {
    check({rows, 5}, dtype);
    check({rows, 64}, dtype);
  }
  check({3, 0}, dtype);
  check({0}, dtype);
}

TEST_P(Softmax, AnyRankAndStrides) {
  check({11}, dtype);
  check({3, 5, 130}, dtype);
  check({2, 3, 5, 70}, dtype);
  check({2, 3, 5, 70}, dtype, {.offset = 1, .gap = 3}, {.offset = 5, .gap = 1});
  check({2, 3, 4, 256}, dtype, {.offset = 8, .gap = 8, .align = 8}, {.offset = 16, .gap = 16, .align = 8});
  check({2, 3, 4, 33}, dtype, {.order = {3, 1, 0, 2}}, {.order = {2, 1, 0, 3}});
  check({5, 300}, dtype, {.offset = 1, .step = 2, .gap = 3}, {.step = 3});
  check({5, 300}, dtype, {.gap = 1, .reversed = true}, {});
  check({2, 5000}, dtype, {.order = {1, 0}}, {.offset = 3, .gap = 7});
}

// On a GPU such rows move in the widest words for which each is aligned, 16 bytes at most, and the last word in part.
TEST_P(Softmax, RowsThatEndWithinAWord) {
  for (const std::int64_t cols : {5, 44, 1274, 1500, 1501, 6007, 17001}) {
    check({5, cols}, dtype);                                                             // every alignment in turn
    check({5, cols}, dtype, {.align = 8}, {.align = 8});                                 // aligned, with a gap after each row
    check({3, cols}, dtype, {.offset = 4, .align = 8}, {.offset = 2, .align = 8});       // half and quarter words
    check({2, 3, cols}, DType::f32, {.align = 8}, {.offset = 1, .gap = 1, .align = 4});  // x wide, y element by element
  }
}

TEST_P(Softmax, OtherDtypeOut) {
  for (const DType out : {DType::f32, DType::f16, DType::bf16})
    for (const std::int64_t cols : {40, 1280, 5000}) check({3, cols}, out);
}

TEST_P(Softmax, Scale) {
  for (const float scale : {0.125f, 3.0f, 1e-20f}) {
    check({4, 100}, dtype, {}, {}, scale);
    check({2, 17000}, dtype, {}, {}, scale);
  }
}

TEST_P(Softmax, InPlace) {
  for (const std::int64_t cols : {60, 2048, 17000}) {
    PlacedTensor x({3, cols}, dtype, device, {.offset = 8, .gap = 8});
    const std::vector<float> values = x.fill_random(random);
    tw::softmax(x, x);
    expect_softmax(x, values, cols);
  }
}

TEST_P(Softmax, HugeValuesWhereverTheyAre) {
  for (const std::int64_t cols : {100, 1280, 18000}) {
    for (const std::int64_t at : {std::int64_t{0}, cols / 2, cols - 1}) {
      PlacedTensor x({1, cols}, dtype, device), y({1, cols}, dtype, device);
      std::vector<float> values = x.fill_random(random);
      values[static_cast<std::size_t>(at)] = round_to(dtype, 30000);
      x.fill(values);
      tw::softmax(x, y);
      expect_softmax(y, values, cols);
    }
    // All far from zero, on both sides: only differences count.
    for (const float offset : {-30000.0f, 30000.0f}) {
      PlacedTensor x({2, cols}, dtype, device), y({2, cols}, dtype, device);
      std::vector<float> values(static_cast<std::size_t>(2 * cols));
      for (float& v : values) v = round_to(dtype, offset + static_cast<float>(pick(3)) * 300);
      x.fill(values);
      tw::softmax(x, y);
      expect_softmax(y, values, cols);
    }
  }
}

TEST_P(Softmax, InfinitiesAndNaNAsInPyTorch) {
  for (const std::size_t cols : {5, 1280, 17000}) {
    for (const std::size_t at : {std::size_t{0}, cols / 2, cols - 1}) {
      std::vector<float> row(cols, 1.0f);
      row[at] = kNaN;
      for (const double y : of_row(row)) ASSERT_TRUE(std::isnan(y));
      row[at] = kInf;
      for (const double y : of_row(row)) ASSERT_TRUE(std::isnan(y));
      row[at] = -kInf;
      std::vector<double> y = of_row(row);
      for (std::size_t i = 0; i < cols; ++i) ASSERT_NEAR(y[i], i == at ? 0 : 1.0 / static_cast<double>(cols - 1), 1e-3);
      ASSERT_EQ(y[at], 0);
      // Nothing but one finite number.
      std::vector<float> alone(cols, -kInf);
      alone[at] = -30000;
      y = of_row(alone);
      for (std::size_t i = 0; i < cols; ++i) ASSERT_EQ(y[i], i == at ? 1 : 0);
    }
    for (const double y : of_row(std::vector<float>(cols, -kInf))) ASSERT_TRUE(std::isnan(y));
    for (const double y : of_row(std::vector<float>(cols, kNaN))) ASSERT_TRUE(std::isnan(y));
  }
}

TEST_P(Softmax, LargestNumbersOfF32) {
  if (dtype != DType::f32) return;  // the other types end far below
  const float most = std::numeric_limits<float>::max();
  for (const std::size_t cols : {4, 17000}) {
    std::vector<float> row(cols, -most);
    row[1] = most;
    const std::vector<double> y = of_row(row);
    for (std::size_t i = 0; i < cols; ++i) ASSERT_EQ(y[i], i == 1 ? 1 : 0);
    for (const double v : of_row(std::vector<float>(cols, -most))) ASSERT_NEAR(v, 1.0 / static_cast<double>(cols), 1e-6);
  }
}

/// Results of 16 MB and more are written past a CPU's caches, in whole lines where these lie inside a row.
TEST_P(Softmax, LargeTensorsWithGaps) {
  if (device.is_cuda() || dtype == DType::f16) return;
  constexpr std::int64_t kCols = 1999;
  const std::int64_t rows = (std::int64_t{17} << 20) / (kCols * static_cast<std::int64_t>(size_of(dtype)));
  for (const Placement& y_place : {Placement{.offset = 3, .gap = 1}, Placement{.gap = 49}}) {
    PlacedTensor x({rows, kCols}, dtype, device), y({rows, kCols}, dtype, device, y_place), row({kCols}, dtype, device);
    x.fill_random(random, 3);
    tw::softmax(x, y);
    EXPECT_TRUE(y.gaps_intact());
    for (int n = 0; n < 200; ++n) {
      const std::int64_t at = n == 0 ? rows - 1 : n == 1 ? 0 : pick(static_cast<int>(rows));
      tw::softmax(x.tensor().select(0, at), row);
      const Tensor large = y.tensor().select(0, at);
      ASSERT_EQ(std::memcmp(large.data(), row.tensor().data(), kCols * size_of(dtype)), 0) << "row " << at;
    }
  }
}

class SoftmaxArguments : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override { skip_unless_present(GetParam()); }
  Tensor tensor(Shape shape, DType dtype = DType::f32) { return Tensor::poisoned(std::move(shape), dtype, Stream::standard(GetParam())); }
};
INSTANTIATE_TEST_SUITE_P(Ops, SoftmaxArguments, testing::ValuesIn(kDevices), device_name);

TEST_P(SoftmaxArguments, AreRefusedByName) {
  const auto refused = [&](const Tensor& x, const Tensor& y, std::initializer_list<std::string_view> parts, SoftmaxOptions options = {}) {
    expect_error<InvalidArgument>([&] { tw::softmax(x, y, options); }, parts);
  };
  const Tensor x = tensor({3, 4}), y = tensor({3, 4});
  refused(tensor({3, 4}, DType::i32), y, {"softmax: x is i32[3, 4]", "f32, f16 and bf16"});
  refused(x, tensor({3, 4}, DType::i8), {"softmax: y is i8[3, 4]"});
  refused(x, tensor({4, 3}), {"y is f32[4, 3]", "x's shape, f32[3, 4]"});
  refused(tensor({1, 1, 1, 3, 4}), y, {"1 to 4 dimensions"});
  refused(x, Tensor::borrow(y.data(), {3, 4}, DType::f32, y.device(), {0, 1}), {"stride 0 in dimension 0"});
  refused(x, Tensor::borrow(x.data(), {3, 4}, DType::f32, x.device(), {1, 3}), {"shares memory with x", "the same shape, strides"});
  for (const float scale : {0.0f, -1.0f, kInf, kNaN}) refused(x, y, {"scale is", "positive and finite"}, {.scale = scale});
  refused(Tensor::borrow(x.data(), {std::int64_t{1} << 31, 4}, DType::f32, x.device(), {0, 1}),
          Tensor::borrow(y.data(), {std::int64_t{1} << 31, 4}, DType::f32, y.device(), {4, 1}), {"limited to"});
  if (GetParam().is_cuda()) refused(Tensor::zeros({3, 4}, DType::f32), y, {"x is", "but the call runs on cuda"});
}

TEST(RowConfig, ManyShortRowsHaveFewWarpsAndFewLongRowsMany) {
  EXPECT_EQ(choose_rows(131072, 1280, 132), (RowConfig{2, 24}));
  EXPECT_EQ(choose_rows(32768, 4096, 132), (RowConfig{4, 32}));
  EXPECT_EQ(choose_rows(8192, 16384, 132), (RowConfig{16, 32}));
  EXPECT_EQ(choose_rows(8192, 12288, 132, 24), (RowConfig{16, 24}));
  EXPECT_EQ(choose_rows(1, 2048, 132), (RowConfig{8, 8}));
  EXPECT_EQ(choose_rows(375, 2048, 132), (RowConfig{8, 8}));
  EXPECT_EQ(choose_rows(1 << 20, 64, 132), (RowConfig{1, 8}));
  for (std::int64_t cols = 1; cols <= longest_held_row(32); cols += 37) {
    for (const std::int64_t rows : {1, 100, 100000}) {
      const RowConfig c = choose_rows(rows, cols, 132);
      ASSERT_GE(32 * c.row_warps * c.share, cols);
      ASSERT_TRUE(c.share == 8 || cols * 2 > 32 * c.row_warps * c.share) << rows << " x " << cols;
    }
  }
}

TEST(RowViews, MergeWhatAllOperandsAllow) {
  const Tensor a = Tensor::zeros({2, 3, 5, 7}, DType::f32), b = Tensor::zeros({2, 3, 6, 7}, DType::f32).slice(2, 0, 5);
  EXPECT_EQ(RowViews(std::array{&a})[0].shape(), (Shape{1, 1, 30, 7}));
  EXPECT_EQ(RowViews(std::array{&a, &b})[0].shape(), (Shape{1, 6, 5, 7}));
  const Tensor swapped = a.transpose(0, 1);
  EXPECT_EQ(RowViews(std::array{&swapped})[0].shape(), (Shape{3, 2, 5, 7}));
  const Tensor row = Tensor::zeros({9}, DType::f32);
  EXPECT_EQ(RowViews(std::array{&row})[0].shape(), (Shape{1, 1, 1, 9}));
}

}  // namespace
}  // namespace tw::kernels::softmax
