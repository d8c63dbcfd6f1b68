// hadamard() against loops in double, on the CPU and, where there is one, on a GPU; its matrices; its bad inputs.

#include "tilewave/hadamard.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <tuple>
#include <vector>

#include "kernels/hadamard/hadamard.tile.hpp"
#include "kernels/hadamard/plan.hpp"
#include "kernels/hadamard/reference.hpp"
#include "runtime/format.hpp"
#include "tests/accuracy.hpp"
#include "tests/expect_error.hpp"
#include "tests/launch_kernel.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"

namespace tw::kernels::hadamard {
namespace {

using namespace tw::test;

std::vector<std::int64_t> all_sizes() {
  std::vector<std::int64_t> sizes;
  for (const std::int64_t order : {1, 12, 20, 28})
    for (std::int64_t n = order == 1 ? 2 : order; n <= 32768; n *= 2) sizes.push_back(n);
  return sizes;
}

SignMatrix matrix_of(std::int64_t n) { return small_matrix(factors_of(n).order); }

class Hadamard : public testing::TestWithParam<std::tuple<Device, DType>> {
 protected:
  void SetUp() override { skip_unless_present(device); }
  int pick(int below) { return static_cast<int>(random() % static_cast<unsigned>(below)); }

  struct Case {
    Placement x = {}, y = {};
    bool factors = false;
    float scale = 1;
  };
  void check(const Shape& shape, DType out, const Case& c) {
    SCOPED_TRACE(tw::format("[{}] to {}, factors: {}, scale {}", tw::join(shape, ", "), name_of(out), c.factors, c.scale));
    const std::int64_t n = shape.back();
    PlacedTensor x(shape, dtype, device, c.x), y(shape, out, device, c.y), factors({n}, DType::f32, device, {.offset = 1});
    const std::vector<float> values = x.fill_random(random), of_columns = factors.fill_random(random);
    tw::hadamard(x, y, {.scale = c.scale, .factors = c.factors ? &factors.tensor() : nullptr});
    expect_transformed(y, values, c.factors ? of_columns : std::vector<float>{}, c.scale);
  }
  void expect_transformed(const PlacedTensor& y, const std::vector<float>& x, const std::vector<float>& factors, float scale) {
    const std::int64_t n = y.tensor().shape(-1);
    const DType out = y.tensor().dtype();
    const SignMatrix small = n > 0 ? matrix_of(n) : SignMatrix{};
    std::vector<double> naive;
    for (const float v : plain<float>(x, n, small, factors, scale)) naive.push_back(round_to(out, v));
    EXPECT_TRUE(accurate({y.values(), plain<double>(x, n, small, factors, scale), naive, arithmetic_of(out, Device::cpu())}));
    EXPECT_TRUE(y.gaps_intact());
  }

  const Device device = std::get<0>(GetParam());
  const DType dtype = std::get<1>(GetParam());
  std::mt19937_64 random = random_engine();
};

INSTANTIATE_TEST_SUITE_P(Ops, Hadamard, testing::Combine(testing::ValuesIn(kDevices), testing::Values(DType::f32, DType::f16, DType::bf16)),
                         [](const auto& instance) {
                           return tw::format("{}_{}", std::get<0>(instance.param).is_cuda() ? "cuda" : "cpu",
                                             name_of(std::get<1>(instance.param)));
                         });

TEST_P(Hadamard, EverySize) {
  for (const std::int64_t n : all_sizes()) {
    const float scale = 1 / std::sqrt(static_cast<float>(n));
    check({1 + pick(3), n}, dtype, {.scale = scale});
    check({1 + pick(3), n}, dtype, {.factors = true, .scale = scale});
  }
}

TEST_P(Hadamard, AnyNumberOfRows) {
  for (const std::int64_t rows : {0, 1, 2, 3, 31, 32, 33, 511, 513}) {
    check({rows, 4}, dtype, {});
    check({rows, 64}, dtype, {.factors = true});
    check({rows, 24}, dtype, {.factors = true});
  }
  check({3, 0, 16}, dtype, {});
}

TEST_P(Hadamard, AnyRankAndStrides) {
  for (const std::int64_t n : {2, 16, 128, 4096, 40, 768}) {
    check({n}, dtype, {});
    check({2, 3, 5, n}, dtype, {});
    check({5, n}, dtype, {.x = {.offset = 3, .gap = 1}, .y = {.offset = 1, .gap = 5}});  // no two rows aligned alike
    check({5, n}, dtype, {.x = {.gap = 8, .align = 8}, .y = {.offset = 8, .gap = 16, .align = 8}, .factors = true});
    check({5, n}, dtype, {.x = {.offset = 4, .align = 8}, .y = {.offset = 2, .align = 8}});  // half and quarter words
    check({3, n}, dtype, {.x = {.step = 2, .gap = 3}, .y = {.step = 3}, .factors = true});
    check({3, n}, dtype, {.x = {.order = {1, 0}}, .y = {.reversed = true}});
    check({2, 3, 4, n}, dtype, {.x = {.order = {3, 1, 0, 2}}, .y = {.order = {2, 1, 0, 3}}});
  }
}

TEST_P(Hadamard, OtherDtypeOut) {
  for (const DType out : {DType::f32, DType::f16, DType::bf16})
    for (const std::int64_t n : {64, 1024, 8192, 448}) check({3, n}, out, {.factors = true, .scale = 0.25f});
}

TEST_P(Hadamard, ScalesOfAnySign) {
  for (const float scale : {0.0f, -1.0f, 1e-3f}) check({3, 128}, dtype, {.scale = scale});
}

TEST_P(Hadamard, InPlace) {
  for (const std::int64_t n : {8, 512, 4096, 640}) {
    PlacedTensor x({7, n}, dtype, device, {.offset = 8, .gap = 8});
    const std::vector<float> values = x.fill_random(random);
    tw::hadamard(x, x, {.scale = 0.5f});
    expect_transformed(x, values, {}, 0.5f);
  }
}

TEST_P(Hadamard, TwiceIsTheIdentity) {
  if (dtype != DType::f32) return;
  for (const std::int64_t n : all_sizes()) {
    PlacedTensor x({2, n}, dtype, device), y({2, n}, dtype, device);
    std::vector<float> values(static_cast<std::size_t>(2 * n));
    for (float& v : values) v = static_cast<float>(pick(17) - 8);
    x.fill(values);
    tw::hadamard(x, y);
    tw::hadamard(y, y);
    const std::vector<double> got = y.values();  // sums of integers below 2^24 are exact
    for (std::size_t i = 0; i < values.size(); ++i) {
      const double expected = static_cast<double>(values[i]) * static_cast<double>(n);
      ASSERT_NEAR(got[i], expected, n > 1024 ? 8.0 * static_cast<double>(n) * 1e-6 : 0) << n << ", element " << i;
    }
  }
}

TEST_P(Hadamard, SameBitsEveryTime) {
  for (const std::int64_t n : {64, 2048, 16384, 20480}) {
    PlacedTensor x({9, n}, dtype, device), first({9, n}, dtype, device), second({9, n}, dtype, device);
    x.fill_random(random);
    tw::hadamard(x, first, {.scale = 0.1f});
    tw::hadamard(x, second, {.scale = 0.1f});
    EXPECT_EQ(first.values(), second.values());
  }
}

TEST_P(Hadamard, RowsAreIndependent) {
  for (const std::int64_t n : {4, 128, 4096, 96}) {
    PlacedTensor x({4, n}, dtype, device), y({4, n}, dtype, device);
    std::vector<float> values = x.fill_random(random);
    values[static_cast<std::size_t>(2 * n + n / 2)] = std::numeric_limits<float>::quiet_NaN();
    x.fill(values);
    tw::hadamard(x, y);
    const std::vector<double> got = y.values();
    for (std::size_t i = 0; i < got.size(); ++i) ASSERT_EQ(std::isnan(got[i]), i / static_cast<std::size_t>(n) == 2) << n << ", " << i;
  }
}

// A GPU's passes for long rows, on the CPU.
template <int n>
void expect_plan(std::mt19937_64& random) {
  SCOPED_TRACE(n);
  constexpr SharedPlan plan = shared_plan(n);
  static_assert(!is_held(n) && plan.order * plan.span * plan.first * plan.second == n && plan.first <= 32 && plan.second <= 32);
  PlacedTensor x({2, n}, DType::f32, Device::cpu()), y({2, n}, DType::f32, Device::cpu());
  const std::vector<float> values = x.fill_random(random);
  launch_kernel<SharedRows<float, float, true, plan.order, plan.span, plan.first, plan.second, plan.warps, 4>>(
      Device::cpu(), {2}, [&](auto& bind, auto& p) {
        bind(p.x, x);
        bind(p.y, y);
        bind(p.factors, static_cast<const Tensor*>(nullptr));
        p.scale = 0.5f;
      });
  std::vector<double> naive;
  for (const float v : plain<float>(values, n, matrix_of(n), {}, 0.5f)) naive.push_back(v);
  EXPECT_TRUE(accurate({y.values(), plain<double>(values, n, matrix_of(n), {}, 0.5), naive, Arithmetic::f32}));
}

TEST(HadamardPlan, PassesOfLongRows) {
  std::mt19937_64 random = random_engine();
  expect_plan<4096>(random);
  expect_plan<16384>(random);
  expect_plan<24>(random);
  expect_plan<12288>(random);
  expect_plan<20480>(random);
  expect_plan<28672>(random);
}

/// The elements that a GPU's warps access at once in a pass over `count` elements that are `step` apart, and how many are in one bank.
int most_in_a_bank(int n, int step, int count, int first_pass) {
  int most = 0;
  for (int group = 0; group < n / count; group += 32) {
    for (int k = 0; k < count; ++k) {
      int in_bank[32] = {};
      for (int lane = 0; lane < 32 && group + lane < n / count; ++lane) {
        const int first = (group + lane) / step * (step * count) + (group + lane) % step;
        const int place = place_in_banks_after(place_in_banks(first, first_pass), k * step, first_pass);
        EXPECT_EQ(place, place_in_banks(first + k * step, first_pass)) << n << ": " << first << " + " << k * step;
        most = std::max(most, ++in_bank[place % 32]);
      }
    }
  }
  return most;
}

TEST(HadamardPlan, PlacesInSharedMemory) {
  for (const std::int64_t size : all_sizes()) {
    if (is_held(static_cast<int>(size))) continue;
    SCOPED_TRACE(size);
    const int n = static_cast<int>(size);
    const auto [order, span, first, second, warps] = shared_plan(n);
    std::vector<bool> taken(static_cast<std::size_t>(ceil_div(n, 32) * 32));
    for (int i = 0; i < n; ++i) {
      const int place = place_in_banks(i, span * first);
      ASSERT_TRUE(place >= 0 && place < std::ssize(taken) && !taken[static_cast<std::size_t>(place)]) << i;
      taken[static_cast<std::size_t>(place)] = true;
    }
    const int allowed = n < 512 ? 2 : 1;
    EXPECT_LE(most_in_a_bank(n, span, first, span * first), allowed);
    EXPECT_LE(most_in_a_bank(n, span * first, second, span * first), allowed);
    EXPECT_LE(most_in_a_bank(n, n / order, order, span * first), allowed);
  }
}

template <int order>
void expect_hadamard_matrix() {
  SCOPED_TRACE(order);
  const SignMatrix expected = small_matrix(order);
  std::vector<std::vector<float>> rows;
  for (int i = 0; i < order; ++i) {
    Columns<float, 1> unit[order] = {};
    unit[i].x[0] = 1;
    small_hadamard(unit);
    std::vector<float> row;
    for (const auto& column : unit) row.push_back(column.x[0]);
    rows.push_back(row);
  }
  for (int i = 0; i < order; ++i) {
    for (int j = 0; j < order; ++j) {
      const auto r = static_cast<std::size_t>(i), c = static_cast<std::size_t>(j);
      ASSERT_EQ(std::abs(rows[r][c]), 1) << i << ", " << j;
      ASSERT_EQ(rows[r][c], rows[c][r]) << i << ", " << j;
      ASSERT_EQ(rows[r][c], static_cast<float>(expected(i, j))) << i << ", " << j;
      float product = 0;
      for (std::size_t k = 0; k < static_cast<std::size_t>(order); ++k) product += rows[r][k] * rows[c][k];
      ASSERT_EQ(product, i == j ? order : 0) << i << ", " << j;
    }
  }
}

TEST(HadamardMatrices, AreOrthogonalAndSymmetric) {
  expect_hadamard_matrix<12>();
  expect_hadamard_matrix<20>();
  expect_hadamard_matrix<28>();
}

/// The reference itself: the definition, entry by entry.
TEST(HadamardReference, IsTheDefinition) {
  for (const std::int64_t n : {2, 8, 16, 12, 24, 80, 112}) {
    const SignMatrix small = matrix_of(n);
    const int power = static_cast<int>(n) / small.order;
    for (int i = 0; i < n; ++i) {
      std::vector<float> unit(static_cast<std::size_t>(n));
      unit[static_cast<std::size_t>(i)] = 1;
      const std::vector<double> y = plain<double>(unit, n, small, {}, 1);
      for (int j = 0; j < n; ++j) {
        const bool odd = std::popcount(static_cast<unsigned>(i % power & j % power)) % 2 == 1;
        ASSERT_EQ(y[static_cast<std::size_t>(j)], small(i / power, j / power) * (odd ? -1 : 1)) << n << ": " << i << ", " << j;
      }
    }
  }
}

TEST(HadamardSizes, ArePowersOfTwoAndSmallMultiplesOfThem) {
  std::int64_t count = 0;
  for (std::int64_t n = -1; n <= 70000; ++n) count += is_hadamard_size(n) ? 1 : 0;
  EXPECT_EQ(count, static_cast<std::int64_t>(all_sizes().size()));
  for (const std::int64_t n : all_sizes()) EXPECT_TRUE(is_hadamard_size(n)) << n;
}

class HadamardArguments : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override { skip_unless_present(GetParam()); }
  Tensor tensor(Shape shape, DType dtype = DType::f32) { return Tensor::poisoned(std::move(shape), dtype, Stream::standard(GetParam())); }
};
INSTANTIATE_TEST_SUITE_P(Ops, HadamardArguments, testing::ValuesIn(kDevices), device_name);

TEST_P(HadamardArguments, AreRefusedByName) {
  const auto refused = [&](const Tensor& x, const Tensor& y, std::initializer_list<std::string_view> parts, HadamardOptions options = {}) {
    expect_error<InvalidArgument>([&] { tw::hadamard(x, y, options); }, parts);
  };
  const Tensor x = tensor({3, 4}), y = tensor({3, 4});
  refused(tensor({3, 4}, DType::i32), y, {"hadamard: x is i32[3, 4]", "f32, f16 and bf16"});
  refused(x, tensor({3, 4}, DType::i8), {"hadamard: y is i8[3, 4]"});
  refused(x, tensor({4, 3}), {"y is f32[4, 3]", "x's shape, f32[3, 4]"});
  refused(tensor({1, 1, 1, 3, 4}), tensor({1, 1, 1, 3, 4}), {"1 to 4 dimensions"});
  for (const std::int64_t n : {0, 1, 3, 36, 65536, 28 * 2048}) {
    const Tensor wrong = tensor({2, n});
    refused(wrong, tensor({2, n}), {tw::format("x is f32[2, {}]", n), "2, 4, 8, ... 32768, or 12, 20 or 28 times 1, 2, 4"});
  }
  refused(x, Tensor::borrow(y.data(), {3, 4}, DType::f32, y.device(), {0, 1}), {"stride 0 in dimension 0"});
  refused(x, Tensor::borrow(x.data(), {3, 4}, DType::f32, x.device(), {1, 3}), {"shares memory with x", "the same shape, strides"});
  for (const float scale : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()})
    refused(x, y, {"scale is", "finite"}, {.scale = scale});
  const Tensor five = tensor({5}), halves = tensor({4}, DType::f16), matrix = tensor({1, 4}), row = y.select(0, 1);
  refused(x, y, {"factors is f32[5]", "f32[4]"}, {.factors = &five});
  refused(x, y, {"factors is f32[1, 4]", "f32[4]"}, {.factors = &matrix});
  refused(x, y, {"factors is f16[4]", "f32"}, {.factors = &halves});
  refused(x, y, {"y is", "shares memory with factors"}, {.factors = &row});
  if (GetParam().is_cuda()) refused(Tensor::zeros({3, 4}, DType::f32), y, {"x is", "but the call runs on cuda"});
}

}  // namespace
}  // namespace tw::kernels::hadamard
