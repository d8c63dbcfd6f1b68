// argmax() and topk() against a stable sort, on the CPU and, where there is one, on a GPU; their bad inputs; how they deal rows to blocks.

#include "tilewave/topk.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/topk/reference.hpp"
#include "kernels/topk/variants.hpp"
#include "runtime/format.hpp"
#include "tests/expect_error.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"
#include "tilewave/device.hpp"

namespace tw::kernels::topk {
namespace {

using namespace tw::test;

/// What indices are before a call; their poison is -1, which is a result.
constexpr float kUnwritten = -7;

/// Elements of a row, by number.
using Values = std::function<float(std::mt19937_64&, std::int64_t)>;

const std::vector<std::pair<const char*, Values>>& distributions() {
  static const std::vector<std::pair<const char*, Values>> all = {
      {"normal", [](std::mt19937_64& random, std::int64_t) { return std::normal_distribution<float>()(random); }},
      {"few values", [](std::mt19937_64& random, std::int64_t) { return static_cast<float>(random() % 3) - 1; }},
      {"all equal", [](std::mt19937_64&, std::int64_t) { return 0.25f; }},
      {"ascending", [](std::mt19937_64&, std::int64_t i) { return static_cast<float>(i); }},
      {"descending", [](std::mt19937_64&, std::int64_t i) { return -static_cast<float>(i); }},
      {"any bits",  // of every magnitude, NaN and infinity among them
       [](std::mt19937_64& random, std::int64_t) { return bit_cast<float>(static_cast<u32>(random())); }},
      {"special",
       [](std::mt19937_64& random, std::int64_t) {
         constexpr float values[] = {kNaN, -kNaN, kInf, -kInf, 0.0f, -0.0f, 1.0f, -1.0f, 1e-40f, -1e-40f};
         return values[random() % std::size(values)];
       }},
      {"masked", [](std::mt19937_64& random, std::int64_t) { return random() % 50 == 0 ? 1.0f : -kInf; }},
      {"signed zeros", [](std::mt19937_64& random, std::int64_t) { return random() % 2 == 0 ? 0.0f : -0.0f; }},
      {"all NaN", [](std::mt19937_64& random, std::int64_t) { return random() % 2 == 0 ? kNaN : -kNaN; }},
  };
  return all;
}

/// The same number with the same sign, or both NaN.
bool same(double a, double b) { return std::isnan(a) ? std::isnan(b) : a == b && std::signbit(a) == std::signbit(b); }

struct Case {
  Shape shape;
  int k = 1;
  bool largest = true, sorted = true;
  Placement x = {}, values = {}, indices = {};
  std::string describe(const char* distribution) const {
    return tw::format("[{}], k {}, {}{}, {}", tw::join(shape, ", "), k, largest ? "largest" : "smallest", sorted ? "" : " by column",
                      distribution);
  }
};

class Ops : public testing::TestWithParam<std::tuple<Device, DType, DType>> {
 protected:
  void SetUp() override {
    skip_unless_present(device);
    set_cpu_threads(4);  // rows are cut into parts there, too
    if (!device.is_cuda()) return;
    [[maybe_unused]] static const bool warm = (compile_all(specs_of(registered())), true);
  }
  void TearDown() override { set_cpu_threads(threads_before_); }

  std::vector<float> draw(PlacedTensor& x, const Values& f) {
    const std::int64_t cols = x.tensor().shape(-1);
    std::vector<float> values(static_cast<std::size_t>(x.tensor().numel()));
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = round_to(dtype, f(random, static_cast<std::int64_t>(i) % std::max<std::int64_t>(cols, 1)));
    x.fill(values);
    return values;
  }
  static std::span<const float> row_of(const std::vector<float>& x, std::int64_t cols, std::size_t row) {
    return std::span(x).subspan(row * static_cast<std::size_t>(cols), static_cast<std::size_t>(cols));
  }
  PlacedTensor index_tensor(const Shape& shape, const Placement& placement = {}) const {
    PlacedTensor indices(shape, index_dtype, device, placement);
    indices.fill(std::vector<float>(static_cast<std::size_t>(indices.tensor().numel()), kUnwritten));
    return indices;
  }
  /// The rows' `numbers`, as starts or ends.
  PlacedTensor bounds(const Shape& shape, std::span<const float> numbers) const {
    PlacedTensor tensor({shape.begin(), shape.end() - 1}, DType::i32, device, {.offset = 1, .step = 3});
    tensor.fill(numbers);
    return tensor;
  }

  void check_topk(const Case& c, const char* distribution, const Values& f, std::span<const float> starts = {},
                  std::span<const float> ends = {}) {
    SCOPED_TRACE(c.describe(distribution));
    const std::int64_t cols = c.shape.back();
    Shape out_shape = c.shape;
    out_shape.back() = c.k;
    PlacedTensor x(c.shape, dtype, device, c.x), values(out_shape, dtype, device, c.values);
    const PlacedTensor indices = index_tensor(out_shape, c.indices);
    const std::vector<float> given = draw(x, f);
    const PlacedTensor start = bounds(c.shape, starts.empty() ? std::vector<float>(rows_of(c)) : std::vector(starts.begin(), starts.end()));
    const PlacedTensor end = bounds(c.shape, ends.empty() ? std::vector<float>(rows_of(c)) : std::vector(ends.begin(), ends.end()));
    tw::topk(x, c.k, values, indices,
             {.largest = c.largest,
              .sorted = c.sorted,
              .starts = starts.empty() ? nullptr : &start.tensor(),
              .ends = ends.empty() ? nullptr : &end.tensor()});
    const std::vector<double> got_values = values.values(), got_indices = indices.values();
    const auto k = static_cast<std::size_t>(c.k);
    for (std::size_t row = 0; row < rows_of(c); ++row) {
      const std::span<const float> elements = row_of(given, cols, row);
      std::vector<std::int64_t> expected = reference(elements, starts.empty() ? 0 : static_cast<std::int64_t>(starts[row]),
                                                     ends.empty() ? cols : static_cast<std::int64_t>(ends[row]), c.k, c.largest);
      if (!c.sorted) std::sort(expected.begin(), expected.end());
      for (std::size_t i = 0; i < k; ++i) {
        const bool found = i < expected.size();
        ASSERT_EQ(got_indices[row * k + i], found ? static_cast<double>(expected[i]) : -1.0) << "index " << i << " of row " << row;
        const double value = found ? elements[static_cast<std::size_t>(expected[i])] : c.largest ? -kInf : kInf;
        ASSERT_PRED2(same, got_values[row * k + i], value) << "value " << i << " of row " << row;
      }
    }
    EXPECT_TRUE(values.gaps_intact());
    EXPECT_TRUE(indices.gaps_intact());
  }
  void check_argmax(const Case& c, const char* distribution, const Values& f, bool with_values = true) {
    SCOPED_TRACE(c.describe(distribution));
    const Shape out_shape(c.shape.begin(), c.shape.end() - 1);
    PlacedTensor x(c.shape, dtype, device, c.x), values(out_shape, dtype, device, c.values);
    const PlacedTensor indices = index_tensor(out_shape, c.indices);
    const std::vector<float> given = draw(x, f);
    tw::argmax(x, indices, {.values = with_values ? &values.tensor() : nullptr});
    const std::vector<double> got_values = values.values(), got_indices = indices.values();
    for (std::size_t row = 0; row < rows_of(c); ++row) {
      const std::span<const float> elements = row_of(given, c.shape.back(), row);
      const std::int64_t expected = reference(elements, 0, c.shape.back(), 1, true).front();
      ASSERT_EQ(got_indices[row], static_cast<double>(expected)) << "row " << row;
      if (with_values) {
        ASSERT_PRED2(same, got_values[row], elements[static_cast<std::size_t>(expected)]) << "row " << row;
      }
    }
    EXPECT_TRUE(with_values ? values.gaps_intact() : values.untouched());
    EXPECT_TRUE(indices.gaps_intact());
  }
  static std::size_t rows_of(const Case& c) {
    std::size_t rows = 1;
    for (std::size_t dim = 0; dim + 1 < c.shape.size(); ++dim) rows *= static_cast<std::size_t>(c.shape[dim]);
    return rows;
  }
  std::int64_t pick(std::int64_t below) { return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(below)); }

  const Device device = std::get<0>(GetParam());
  const DType dtype = std::get<1>(GetParam());
  const DType index_dtype = std::get<2>(GetParam());
  std::mt19937_64 random = random_engine();

 private:
  const int threads_before_ = cpu_threads();
};

INSTANTIATE_TEST_SUITE_P(Topk, Ops,
                         testing::Combine(testing::ValuesIn(kDevices), testing::Values(DType::f32, DType::f16, DType::bf16),
                                          testing::Values(DType::i32, DType::i64)),
                         [](const auto& instance) {
                           return tw::format("{}_{}_{}", std::get<0>(instance.param).is_cuda() ? "cuda" : "cpu",
                                             name_of(std::get<1>(instance.param)), name_of(std::get<2>(instance.param)));
                         });

TEST_P(Ops, ArgmaxOfAnyRow) {
  for (const auto& [name, f] : distributions()) {
    for (const std::int64_t cols : {1, 2, 7, 255, 257, 1023, 1024, 1025, 4097}) check_argmax({.shape = {3, cols}}, name, f);
    check_argmax({.shape = {70, 130}}, name, f, false);
    check_argmax({.shape = {2, 8192 + pick(9000)}}, name, f);  // in parts
    check_argmax({.shape = {40961}}, name, f);
  }
}

TEST_P(Ops, TopkOfAnyRow) {
  for (const auto& [name, f] : distributions()) {
    for (const std::int64_t cols : {1, 2, 13, 256, 257, 1024, 1025, 4096, 4999}) {
      const int n = static_cast<int>(std::min<std::int64_t>(cols, 2048));
      for (const int k : {1, std::max(n - 1, 1), n, 1 + static_cast<int>(pick(n)), std::min(n + 1, 2048)})
        check_topk({.shape = {2, cols}, .k = k, .largest = pick(4) > 0, .sorted = pick(4) > 0}, name, f);
    }
    check_topk({.shape = {40, 128}, .k = 6}, name, f);
  }
}

TEST_P(Ops, TopkOfLongRowsInParts) {
  for (const auto& [name, f] : distributions()) {
    check_topk({.shape = {10007}, .k = 1}, name, f);
    check_topk({.shape = {2, 8192 + pick(20000)}, .k = 1 + static_cast<int>(pick(256))}, name, f);
    check_topk({.shape = {1, 12288}, .k = 50, .largest = false}, name, f);
    check_topk({.shape = {1, 12289}, .k = 50, .sorted = false}, name, f);
    check_topk({.shape = {1, 2 * 32768 + pick(5000)}, .k = 2048, .sorted = pick(2) > 0}, name, f);
  }
}

/// Rows in which a sample suggests what to list. In some of them it is wrong: it is taken from 8 of every 64 columns.
TEST_P(Ops, TopkOfLongRows) {
  const auto unlike_others = [](float sampled) {
    return [sampled](std::mt19937_64& random, std::int64_t i) {
      return std::normal_distribution<float>()(random) + (i % 64 < 8 ? sampled : 0.0f);
    };
  };
  std::vector<std::pair<const char*, Values>> all = distributions();
  all.emplace_back("the sample is larger", unlike_others(10));
  all.emplace_back("the sample is smaller", unlike_others(-10));
  // As many as need not be cut into parts: few, and many of them.
  const int units = device.is_cuda() ? device_info(device).units : cpu_threads();
  for (const auto& [name, f] : all) {
    check_topk({.shape = {units, 16384}, .k = 1 + static_cast<int>(pick(2048)), .largest = pick(2) > 0, .sorted = pick(2) > 0}, name, f);
    if (dtype != DType::f16) check_topk({.shape = {4 * units, 16384}, .k = 1000, .largest = pick(2) > 0, .sorted = false}, name, f);
  }
  check_topk({.shape = {units, 40000}, .k = 2048, .sorted = false}, "normal", all.front().second);
  check_topk({.shape = {units, 140000}, .k = 2048, .sorted = false}, "normal", all.front().second);
}

TEST_P(Ops, TopkOfAVocabulary) {
  const auto& [name, normal] = distributions().front();
  check_topk({.shape = {1, 151552}, .k = 50}, name, normal);
  check_argmax({.shape = {1, 151552}}, name, normal);
}

TEST_P(Ops, RowsThatBeginAndEndAnywhere) {
  for (const std::int64_t cols : {40, 1025, 5000, 20000}) {
    constexpr std::size_t kRows = 14;
    const auto n = static_cast<float>(cols);
    std::vector<float> starts(kRows), ends(kRows);
    for (std::size_t row = 0; row < kRows; ++row) {
      const auto a = static_cast<float>(pick(cols + 1)), b = static_cast<float>(pick(cols + 1));
      starts[row] = std::min(a, b), ends[row] = std::max(a, b);
    }
    starts[0] = 0, ends[0] = 0;          // nothing
    starts[1] = n, ends[1] = n;          // nothing
    starts[2] = 20, ends[2] = 10;        // nothing
    starts[3] = -5, ends[3] = 2 * n;     // clipped: all
    starts[4] = 2 * n, ends[4] = 3 * n;  // after the row
    starts[5] = -9, ends[5] = -3;        // before it
    starts[6] = 7, ends[6] = 8;          // one
    for (const auto& [name, f] : distributions()) {
      for (const int k : {1, 17, 300}) {
        const std::size_t rows = pick(2) > 0 ? kRows : 3 + static_cast<std::size_t>(pick(kRows - 3));
        const Case c{.shape = {static_cast<std::int64_t>(rows), cols}, .k = k, .largest = pick(3) > 0, .sorted = pick(3) > 0};
        check_topk(c, name, f, std::span(starts).first(rows), std::span(ends).first(rows));
        if (k == 17) {
          check_topk(c, name, f, {}, std::span(ends).first(rows));
          check_topk(c, name, f, std::span(starts).first(rows), {});
        }
      }
      // Few rows, so that long ones are done in parts.
      check_topk({.shape = {1, cols}, .k = 30}, name, f, std::span(starts).subspan(9, 1), std::span(ends).subspan(9, 1));
      check_topk({.shape = {2, cols}, .k = 30}, name, f, std::span(starts).subspan(2, 2), std::span(ends).subspan(2, 2));
    }
  }
}

TEST_P(Ops, AnyStridesAndDimensions) {
  const auto& few = distributions()[1];
  const std::vector<Placement> placements = {
      {}, {.offset = 16, .gap = 8, .align = 8}, {.offset = 3, .gap = 5}, {.offset = 1, .step = 3, .gap = 2}, {.gap = 1, .reversed = true}};
  for (const Placement& x : placements) {
    for (const Shape& shape : {Shape{300}, Shape{5, 1100}, Shape{3, 2, 264}, Shape{2, 3, 2, 50}}) {
      const Placement& values = placements[static_cast<std::size_t>(pick(5))];
      const Placement& indices = placements[static_cast<std::size_t>(pick(5))];
      check_topk({.shape = shape, .k = 9, .x = x, .values = values, .indices = indices}, few.first, few.second);
      if (shape.size() > 1) check_argmax({.shape = shape, .x = x, .values = values, .indices = indices}, few.first, few.second);
    }
    check_topk({.shape = {1, 9000}, .k = 9, .x = x}, few.first, few.second);
  }
  // Columns in the outer dimension of memory.
  check_topk({.shape = {70, 300}, .k = 9, .x = {.order = {1, 0}}, .values = {.order = {1, 0}}}, few.first, few.second);
  check_argmax({.shape = {70, 300}, .x = {.order = {1, 0}}}, few.first, few.second);
}

TEST_P(Ops, NoRowsAndNoColumns) {
  const auto& [name, normal] = distributions().front();
  check_topk({.shape = {0, 100}, .k = 5}, name, normal);
  check_topk({.shape = {3, 0}, .k = 5}, name, normal);
  check_argmax({.shape = {0, 100}}, name, normal);
  check_argmax({.shape = {0, 0}}, name, normal);
}

TEST_P(Ops, SameResultEveryTime) {
  const std::int64_t cols = 30011;
  PlacedTensor x({cols}, dtype, device), values({900}, dtype, device);
  draw(x, distributions()[1].second);
  const PlacedTensor first = index_tensor({900});
  tw::topk(x, 900, values, first);
  for (int i = 0; i < 5; ++i) {
    const PlacedTensor again = index_tensor({900});
    tw::topk(x, 900, values, again);
    EXPECT_EQ(again.values(), first.values());
  }
}

TEST_P(Ops, GraphsWithAWorkspace) {
  const Stream stream(device);
  PlacedTensor x({1, 50000}, dtype, device), values({1, 20}, dtype, device);
  const PlacedTensor indices = index_tensor({1, 20}), largest = index_tensor({1});
  const std::int64_t topk_elements = topk_workspace(x, 20), argmax_elements = argmax_workspace(x);
  ASSERT_GT(topk_elements, 0);
  ASSERT_GT(argmax_elements, 0);
  const Tensor workspace = Tensor::poisoned({std::max(topk_elements, argmax_elements)}, DType::i64, Stream::standard(device));
  Stream::standard(device).synchronize();
  const Graph graph = Graph::capture(stream, [&] {
    tw::topk(x, 20, values, indices, {.workspace = &workspace, .stream = stream});
    tw::argmax(x, largest, {.workspace = &workspace, .stream = stream});
  });
  for (int i = 0; i < 2; ++i) {
    const std::vector<float> given = draw(x, distributions().front().second);
    graph.replay(stream);
    stream.synchronize();
    const std::vector<std::int64_t> expected = reference(given, 0, 50000, 20, true);
    const std::vector<double> got = indices.values();
    for (std::size_t n = 0; n < 20; ++n) ASSERT_EQ(got[n], static_cast<double>(expected[n]));
    EXPECT_EQ(largest.values().front(), static_cast<double>(expected.front()));
  }
}

TEST(Plans, CoverEachRow) {
  std::mt19937_64 random = random_engine();
  const auto below = [&](std::int64_t n) { return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(n)); };
  for (int i = 0; i < random_cases(2000); ++i) {
    const std::int64_t rows = 1 + below(300), cols = below(std::int64_t{1} << (1 + below(30)));
    const int k = 1 + static_cast<int>(below(2048)), units = 1 + static_cast<int>(below(150));
    for (const Plan& plan : {plan_topk(rows, cols, k, units), plan_argmax(rows, cols, units)}) {
      SCOPED_TRACE(tw::format("{} x {}, k {}, {} units", rows, cols, k, units));
      if (plan.parts == 1) {
        EXPECT_EQ(plan.workspace(rows), 0);
        continue;
      }
      EXPECT_LT(rows, units);
      EXPECT_GE(std::int64_t{plan.parts} * plan.part, cols);
      EXPECT_LT(std::int64_t{plan.parts - 1} * plan.part, cols);
      EXPECT_GE(plan.part, 8 * plan.part_limit);
      EXPECT_LE(rows * plan.parts, 3 * units + rows);
      EXPECT_EQ(plan.width, Width::wide);
    }
    if (const Plan plan = plan_topk(rows, cols, k, units); plan.parts > 1) {
      EXPECT_GE(plan.part_limit, k);
    }
  }
  EXPECT_GT(plan_argmax(1, 151552, 132).parts, 30);  // one row uses much of a GPU
  EXPECT_GT(plan_topk(1, 151552, 50, 132).parts, 30);
  EXPECT_EQ(plan_topk(1000, 151552, 50, 132).parts, 1);
  EXPECT_EQ(plan_topk(4096, 128, 6, 132).width, Width::narrow);
  EXPECT_EQ(plan_topk(4096, 32768, 6, 132).width, Width::middle);
  EXPECT_EQ(plan_topk(200, 32768, 6, 132).width, Width::wide);
}

class BadInput : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override {
    skip_unless_present(device);
    memory.emplace(device);
  }
  void TearDown() override {
    if (!memory) return;
    EXPECT_TRUE(memory->values.untouched());
    EXPECT_TRUE(memory->indices.untouched());
    EXPECT_TRUE(memory->largest.untouched());
  }
  void refuse_topk(const Tensor& given_x, int k, const Tensor& given_values, const Tensor& given_indices, const TopkOptions& options,
                   std::initializer_list<std::string_view> parts) {
    expect_error<InvalidArgument>([&] { tw::topk(given_x, k, given_values, given_indices, options); }, parts);
  }
  void refuse_argmax(const Tensor& given_x, const Tensor& given_indices, const ArgmaxOptions& options,
                     std::initializer_list<std::string_view> parts) {
    expect_error<InvalidArgument>([&] { tw::argmax(given_x, given_indices, options); }, parts);
  }
  struct Memory {
    explicit Memory(Device device)
        : x({4, 30}, DType::f32, device),
          values({4, 5}, DType::f32, device),
          indices({4, 5}, DType::i32, device),
          largest({4}, DType::i32, device) {}
    PlacedTensor x, values, indices, largest;
  };
  const Device device = GetParam();
  std::optional<Memory> memory;
};

INSTANTIATE_TEST_SUITE_P(Topk, BadInput, testing::ValuesIn(kDevices), device_name);

TEST_P(BadInput, TopkRefusesWhatItCannotTake) {
  const Tensor x = memory->x, values = memory->values, indices = memory->indices;
  const Tensor bytes = Tensor::zeros({4, 30}, DType::u8, Stream::standard(device));
  const Tensor five = Tensor::zeros({1, 1, 1, 4, 30}, DType::f32, Stream::standard(device));
  const Tensor half = Tensor::zeros({4, 5}, DType::f16, Stream::standard(device));
  const Tensor wide = Tensor::zeros({4, 6}, DType::i32, Stream::standard(device));
  refuse_topk(bytes, 5, values, indices, {}, {"topk", "x is u8[4, 30]", "f32, f16 and bf16"});
  refuse_topk(five, 5, values, indices, {}, {"x is f32[1, 1, 1, 4, 30]", "1 to 4 dimensions"});
  refuse_topk(x, 0, values, indices, {}, {"k is 0", "1 to 2048"});
  refuse_topk(x, 2049, values, indices, {}, {"k is 2049", "1 to 2048"});
  refuse_topk(x, 4, values, indices, {}, {"indices is i32[4, 5]", "[4, 4]"});
  refuse_topk(x, 5, half, indices, {}, {"values is f16[4, 5]", "f32"});
  refuse_topk(x, 5, values, values, {}, {"indices is f32[4, 5]", "i32 or i64"});
  refuse_topk(x, 5, values, wide, {}, {"indices is i32[4, 6]", "[4, 5]"});
  refuse_topk(x, 5, values.slice(0, 0, 3), indices, {}, {"values is f32[3, 5]", "[4, 5]"});
  const Tensor one = Tensor::borrow(values.data(), {4, 5}, DType::f32, device, {5, 0});
  refuse_topk(x, 5, one, indices, {}, {"values", "stride 0 in dimension 1"});
  const Tensor input = Tensor::borrow(values.data(), {4, 30}, DType::f32, device, {0, 1});
  refuse_topk(input, 5, values, indices, {}, {"values is", "shares memory with x"});
  const Tensor huge = Tensor::borrow(x.data(), {(std::int64_t{1} << 30) + 1}, DType::f32, device, {0});
  refuse_topk(huge, 5, values, indices, {}, {"f32[1073741825]", "limited to 1073741824"});
  const Tensor many = Tensor::borrow(x.data(), {1 << 20, 1 << 20, 1 << 20, 1}, DType::f32, device, {0, 0, 0, 0});
  refuse_topk(many, 5, values, indices, {}, {"rows and columns are limited"});
}

TEST_P(BadInput, TopkRefusesBoundsAndWorkspaces) {
  const Tensor x = memory->x, values = memory->values, indices = memory->indices;
  const Tensor wrong_type = Tensor::zeros({4}, DType::i64, Stream::standard(device));
  const Tensor wrong_shape = Tensor::zeros({4, 1}, DType::i32, Stream::standard(device));
  refuse_topk(x, 5, values, indices, {.starts = &wrong_type}, {"starts is i64[4]", "i32"});
  refuse_topk(x, 5, values, indices, {.ends = &wrong_shape}, {"ends is i32[4, 1]", "[4]"});
  refuse_topk(x, 5, values, indices, {.workspace = &wrong_shape}, {"workspace is i32[4, 1]", "i64"});
  const Tensor row = Tensor::borrow(x.data(), {1, 1 << 20}, DType::f32, device, {0, 0});
  const Tensor row_values = values.slice(0, 0, 1), row_indices = indices.slice(0, 0, 1);
  const int before = cpu_threads();
  set_cpu_threads(4);
  refuse_topk(row, 5, row_values, row_indices, {.workspace = &wrong_type},
              {"workspace is i64[4]", tw::format("at least {} elements", topk_workspace(row, 5))});
  set_cpu_threads(before);
}

TEST_P(BadInput, ArgmaxRefusesWhatItCannotTake) {
  const Tensor x = memory->x, indices = memory->indices, largest = memory->largest;
  const Tensor empty = Tensor::zeros({4, 0}, DType::f32, Stream::standard(device));
  const Tensor half = Tensor::zeros({4}, DType::f16, Stream::standard(device));
  const Tensor scalar = Tensor::borrow(x.data(), {}, DType::f32, device);
  refuse_argmax(empty, largest, {}, {"argmax", "x is f32[4, 0]", "without elements"});
  refuse_argmax(x, indices, {}, {"indices is i32[4, 5]", "[4]"});
  refuse_argmax(x, half, {}, {"indices is f16[4]", "i32 or i64"});
  refuse_argmax(x, largest, {.values = &half}, {"values is f16[4]", "f32"});
  refuse_argmax(scalar, largest, {}, {"x is", "1 to 4 dimensions"});
  const Device other = device.is_cuda() ? Device::cpu() : Device::cuda();
  alignas(16) int somewhere[4] = {};
  const Tensor elsewhere = Tensor::borrow(somewhere, {4}, DType::i32, other);
  refuse_argmax(x, elsewhere, {}, {"indices is i32[4] on " + other.name(), device.name()});
}

}  // namespace
}  // namespace tw::kernels::topk
