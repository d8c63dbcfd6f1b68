// reduce() against loops in double, on the CPU and, where there is one, on a GPU.

#include "tilewave/reduce.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <random>
#include <tuple>
#include <vector>

#include "kernels/reduce/reference.hpp"
#include "kernels/reduce/variants.hpp"
#include "runtime/format.hpp"
#include "tests/accuracy.hpp"
#include "tests/expect_error.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"

namespace tw::kernels::reduce {
namespace {

using namespace tw::test;

constexpr std::array kReductions = {Reduction::sum, Reduction::mean, Reduction::max, Reduction::min, Reduction::abs_max};

class Reduce : public testing::TestWithParam<std::tuple<Device, DType>> {
 protected:
  void SetUp() override { skip_unless_present(device); }
  std::int64_t pick(std::int64_t below) { return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(below)); }

  void check(Reduction reduction, const Shape& shape, int dim, DType out, const Placement& place = {}, bool keep_dim = false) {
    SCOPED_TRACE(tw::format("reduction {} of [{}] along {} to {}", static_cast<int>(reduction), tw::join(shape, ", "), dim, name_of(out)));
    const auto at = static_cast<std::size_t>(dim < 0 ? dim + static_cast<int>(shape.size()) : dim);
    std::int64_t outer = 1, inner = 1;
    for (std::size_t d = 0; d < shape.size(); ++d) (d < at ? outer : inner) *= d == at ? 1 : shape[d];
    PlacedTensor x(shape, dtype, device, place);
    const std::vector<float> values = x.fill_random(random);
    Shape left = shape;
    if (keep_dim)
      left[at] = 1;
    else
      left.erase(left.begin() + static_cast<std::ptrdiff_t>(at));
    const PlacedTensor y(left, out, device, {.offset = 1});
    tw::reduce(reduction, x, y, {.dim = dim});
    const std::vector<double> exact = reference<double>(reduction, values, outer, shape[at], inner);
    std::vector<double> naive = naive_result(reduction, values, outer, shape[at], inner, exact);
    for (double& v : naive) v = round_to(out, static_cast<float>(v));
    EXPECT_TRUE(accurate({y.values(), exact, naive, out == DType::f32 ? Arithmetic::f32 : arithmetic_of(out, device)}));
    EXPECT_TRUE(y.gaps_intact());
  }
  /// The loop in f32, from eight first terms on where there are few results: of each, the one furthest from `exact`. A single sum of
  /// random signs can be right by luck, and what it is then held against would be no measure of what f32 allows.
  static std::vector<double> naive_result(Reduction reduction, std::vector<float> values, std::int64_t outer, std::int64_t extent,
                                          std::int64_t inner, const std::vector<double>& exact) {
    std::vector<double> worst = reference<float>(reduction, values, outer, extent, inner);
    if (outer * inner >= 64) return worst;
    for (int turn = 1; turn < 8; ++turn) {
      for (std::int64_t o = 0; o < outer; ++o) {
        const auto first = values.begin() + o * extent * inner;
        std::rotate(first, first + extent / 8 * inner, first + extent * inner);
      }
      const std::vector<double> turned = reference<float>(reduction, values, outer, extent, inner);
      for (std::size_t i = 0; i < worst.size(); ++i)
        if (std::abs(turned[i] - exact[i]) > std::abs(worst[i] - exact[i])) worst[i] = turned[i];
    }
    return worst;
  }
  Reduction any_reduction() { return kReductions[static_cast<std::size_t>(pick(kReductions.size()))]; }
  DType any_out() { return pick(2) == 0 ? dtype : DType::f32; }
  std::vector<double> of(Reduction reduction, const std::vector<float>& values, const Shape& shape, int dim, const Shape& out) {
    PlacedTensor x(shape, dtype, device);
    x.fill(values);
    const PlacedTensor y(out, dtype, device);
    tw::reduce(reduction, x, y, {.dim = dim});
    return y.values();
  }

  const Device device = std::get<0>(GetParam());
  const DType dtype = std::get<1>(GetParam());
  std::mt19937_64 random = random_engine();
};

INSTANTIATE_TEST_SUITE_P(Ops, Reduce, testing::Combine(testing::ValuesIn(kDevices), testing::Values(DType::f32, DType::f16, DType::bf16)),
                         [](const auto& instance) {
                           return tw::format("{}_{}", std::get<0>(instance.param).is_cuda() ? "cuda" : "cpu",
                                             name_of(std::get<1>(instance.param)));
                         });

TEST_P(Reduce, EveryReduction) {
  for (const Reduction reduction : kReductions)
    for (const DType out : {dtype, DType::f32})
      for (const Shape& shape : {Shape{7, 20}, Shape{67, 301}, Shape{3, 2000}, Shape{3, 9001}, Shape{1, 50021}})
        for (const int dim : {0, 1}) check(reduction, shape, dim, out);
}

TEST_P(Reduce, AnyLength) {
  // Around the columns and rows of tiles, and of what is reduced across.
  for (const std::int64_t n :
       {1, 2, 31, 32, 33, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1023, 1024, 1025, 4095, 4096, 4097, 8191, 16385})
    for (const std::int64_t m : {1, 5, 17}) {
      check(any_reduction(), {m, n}, -1, any_out());
      check(any_reduction(), {n, m}, 0, any_out());
    }
  check(Reduction::sum, {1000003}, 0, any_out());
  check(Reduction::mean, {3, 300007}, 1, any_out());
  check(Reduction::max, {100003, 3}, 0, any_out());
  check(Reduction::abs_max, {5003, 40}, 1, any_out());
}

TEST_P(Reduce, AnyDimensionOfAnyShape) {
  for (int i = 0; i < random_cases(60); ++i) {
    Shape shape;
    const std::int64_t rank = 1 + pick(4);
    for (std::int64_t d = 0; d < rank; ++d) shape.push_back(1 + pick(rank == 4 ? 13 : rank == 3 ? 41 : 300));
    check(any_reduction(), shape, static_cast<int>(pick(2 * rank) - rank), any_out(), {}, pick(2) == 0);
  }
}

TEST_P(Reduce, AnyStrides) {
  const std::vector<Placement> places = {
      {.offset = 3},        {.offset = 8, .gap = 8},       {.offset = 1, .gap = 3}, {.step = 2}, {.gap = 1, .reversed = true},
      {.order = {2, 1, 0}}, {.order = {1, 2, 0}, .gap = 1}};
  for (const Placement& place : places)
    for (int dim = 0; dim < 3; ++dim) {
      check(any_reduction(), {5, 67, 130}, dim, any_out(), place);
      check(any_reduction(), {40, 9, 33}, dim, any_out(), place);
    }
}

TEST_P(Reduce, NoElements) {
  for (const auto& [shape, dim] : {std::pair{Shape{3, 0}, 1}, std::pair{Shape{0, 3}, 0}}) {
    for (const double sum : of(Reduction::sum, {}, shape, dim, {3})) EXPECT_EQ(sum, 0);
    for (const double mean : of(Reduction::mean, {}, shape, dim, {3})) EXPECT_TRUE(std::isnan(mean));
  }
  EXPECT_TRUE(of(Reduction::max, {}, {0, 3}, 1, {0}).empty());
}

TEST_P(Reduce, NanAndInfinity) {
  for (const std::int64_t n : {5, 300, 20000}) {
    for (const int dim : {0, 1}) {
      for (const std::int64_t at : {std::int64_t{0}, n / 2, n - 1}) {
        std::vector<float> values(static_cast<std::size_t>(n), 1.0f);
        const Shape shape = dim == 1 ? Shape{1, n} : Shape{n, 1};
        values[static_cast<std::size_t>(at)] = kNaN;
        for (const Reduction reduction : kReductions)
          EXPECT_TRUE(std::isnan(of(reduction, values, shape, dim, {1})[0])) << n << ", " << at << ", " << static_cast<int>(reduction);
        values[static_cast<std::size_t>(at)] = -kInf;
        EXPECT_EQ(of(Reduction::sum, values, shape, dim, {1})[0], -kInf);
        EXPECT_EQ(of(Reduction::max, values, shape, dim, {1})[0], 1);
        EXPECT_EQ(of(Reduction::min, values, shape, dim, {1})[0], -kInf);
        EXPECT_EQ(of(Reduction::abs_max, values, shape, dim, {1})[0], kInf);
      }
      const std::vector<float> lowest(static_cast<std::size_t>(n), -kInf);
      EXPECT_EQ(of(Reduction::max, lowest, dim == 1 ? Shape{1, n} : Shape{n, 1}, dim, {1})[0], -kInf);
    }
  }
}

TEST_P(Reduce, TheSameInEveryRun) {
  PlacedTensor x({3, 70001}, dtype, device);
  x.fill_random(random);
  const PlacedTensor first({3}, DType::f32, device), second({3}, DType::f32, device);
  tw::reduce(Reduction::sum, x, first);
  const int threads = cpu_threads();
  set_cpu_threads(threads == 1 ? 3 : 1);
  tw::reduce(Reduction::sum, x, second);
  set_cpu_threads(threads);
  EXPECT_EQ(first.values(), second.values());
}

TEST_P(Reduce, BadInput) {
  const PlacedTensor x({4, 6}, dtype, device), y({4}, dtype, device);
  const Stream stream = Stream::standard(device);
  const auto message = [&](auto call, std::initializer_list<std::string_view> parts) {
    expect_error<InvalidArgument>(call, parts);
    EXPECT_TRUE(y.untouched());
  };
  message([&] { tw::reduce(Reduction::sum, x, y, {.dim = 0}); }, {"reduce: y is", "[4]", "dim 0", "[6] or [1, 6]"});
  message([&] { tw::reduce(Reduction::sum, x, y, {.dim = 2}); }, {"reduce: dim is 2", "-2 to 1"});
  message([&] { tw::reduce(Reduction::sum, Tensor::empty({4, 6}, DType::i32, stream), y); }, {"reduce: x is i32", "f32, f16 and bf16"});
  message([&] { tw::reduce(Reduction::sum, x, PlacedTensor({4}, dtype == DType::f16 ? DType::bf16 : DType::f16, device)); },
          {"reduce: y is", "or f32"});
  message([&] { tw::reduce(Reduction::sum, x, PlacedTensor({4}, dtype, device, {.step = 2})); }, {"reduce: y is", "contiguous"});
  message([&] { tw::reduce(Reduction::max, Tensor::empty({4, 0}, dtype, stream), y); }, {"reduce: x is", "without elements"});
}

TEST(ReduceSplits, CoverTheDimension) {
  for (const std::int64_t extent : {0, 1, 16, 4096, 16384, 16385, 100000, 1 << 30})
    for (const std::int64_t blocks : {1, 7, 527, 528, 100000})
      for (const int tile : {16, 1024, 4096}) {
        const Splits splits = choose_splits(extent, blocks, tile, 528);
        EXPECT_EQ(splits.length % tile, 0);
        EXPECT_GE(static_cast<std::int64_t>(splits.count) * splits.length, extent);
        EXPECT_TRUE(splits.count == 1 || static_cast<std::int64_t>(splits.count - 1) * splits.length < extent);
        EXPECT_TRUE(splits.count == 1 || (blocks < 528 && splits.length >= 4 * tile));
      }
}

}  // namespace
}  // namespace tw::kernels::reduce
