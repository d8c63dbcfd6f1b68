// moe_route(), moe_permutation(), moe_dispatch() and moe_combine() against loops, on the CPU and, where there is one, on a GPU.

#include "tilewave/moe.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <random>
#include <span>
#include <vector>

#include "kernels/moe/reference.hpp"
#include "runtime/format.hpp"
#include "tests/accuracy.hpp"
#include "tests/expect_error.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"

namespace tw::kernels::moe {
namespace {

using namespace tw::test;

class Moe : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override { skip_unless_present(device); }
  std::int64_t pick(std::int64_t below) { return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(below)); }
  static std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

  struct Route {
    std::int64_t tokens;
    int experts, k;
    MoeRouteOptions options = {};
    DType dtype = DType::f32;
    bool bias = false;
    Placement from = {}, to = {};
  };
  /// Routes these logits and compares each token's experts and weights.
  void check_route(const Route& c, const std::vector<float>& values) {
    SCOPED_TRACE(tw::format("{} tokens, {} of {} experts, {} of {} groups, {}, bias {}", c.tokens, c.k, c.experts, c.options.groups_taken,
                            c.options.groups, name_of(c.dtype), c.bias));
    PlacedTensor logits({c.tokens, c.experts}, c.dtype, device, c.from), bias({c.experts}, DType::f32, device);
    const PlacedTensor weights({c.tokens, c.k}, DType::f32, device, c.to), experts({c.tokens, c.k}, DType::i32, device, c.to);
    logits.fill(values);
    const std::vector<float> bias_values = bias.fill_random(random, 0.2f);
    MoeRouteOptions options = c.options;
    if (c.bias) options.bias = &bias.tensor();
    if (!launched([&] { moe_route(logits, weights, experts, options); })) return;
    EXPECT_TRUE(weights.gaps_intact());
    EXPECT_TRUE(experts.gaps_intact());
    const std::vector<double> got_weights = weights.values(), got_experts = experts.values();
    std::int64_t compared = 0;
    for (std::int64_t t = 0; t < c.tokens; ++t) {
      const std::span<const float> row = std::span(values).subspan(index(t * c.experts), index(c.experts));
      const Routed expected =
          route_reference({row, c.bias ? std::span<const float>(bias_values) : std::span<const float>(), c.k, c.options});
      if (expected.margin < 3e-6) continue;  // f32 may not tell them apart
      ++compared;
      for (std::int64_t n = 0; n < c.k; ++n) {
        const auto at = index(t * c.k + n);
        ASSERT_EQ(got_experts[at], expected.experts[index(n)]) << "token " << t << ", choice " << n;
        ASSERT_NEAR(got_weights[at], expected.weights[index(n)], 2e-5 * std::abs(expected.weights[index(n)]) + 1e-30)
            << "token " << t << ", choice " << n;
      }
    }
    EXPECT_GE(2 * compared, c.tokens);
  }
  void check_route(const Route& c, float sigma = 2) {
    std::normal_distribution<float> normal(0, sigma);
    std::vector<float> values(index(c.tokens * c.experts));
    for (float& x : values) x = round_to(c.dtype, normal(random));
    check_route(c, values);
  }

  void check_permutation(const std::vector<std::int64_t>& values, std::int64_t tokens, int n_experts, int first_expert = 0) {
    const std::int64_t k = tokens > 0 ? static_cast<std::int64_t>(values.size()) / tokens : 4, count = tokens * k;
    SCOPED_TRACE(tw::format("{} tokens, k {}, {} experts from {} on", tokens, k, n_experts, first_expert));
    const Tensor wide = Tensor::from<std::int64_t>(values, {tokens, k});
    const Tensor experts = device.is_cuda() ? wide.to(DType::i32).to(device) : wide.to(DType::i32);
    const PlacedTensor offsets({n_experts + 1}, DType::i32, device), rows({count}, DType::i32, device);
    const PlacedTensor places({tokens, k}, DType::i32, device);
    if (!launched([&] { moe_permutation(experts, n_experts, offsets, rows, places, {.first_expert = first_expert}); })) return;
    const Permuted expected = permutation_reference(values, static_cast<int>(k), n_experts, first_expert);
    const auto equal = [](const PlacedTensor& got, const std::vector<int>& wanted) {
      EXPECT_TRUE(got.gaps_intact());
      EXPECT_EQ(got.values(), std::vector<double>(wanted.begin(), wanted.end()));
    };
    equal(offsets, expected.offsets);
    equal(places, expected.places);
    equal(rows, expected.rows);
  }
  /// `count` numbers of experts; about one in `strangers` is none of theirs.
  std::vector<std::int64_t> random_experts(std::int64_t count, int n_experts, int first_expert, int strangers) {
    constexpr std::int32_t kStrange[] = {-1, std::numeric_limits<std::int32_t>::min(), std::numeric_limits<std::int32_t>::max()};
    std::vector<std::int64_t> values(index(count));
    for (std::int64_t& e : values) {
      e = first_expert + pick(n_experts);
      if (strangers == 0 || pick(strangers) > 0) continue;
      const std::int64_t which = pick(5);
      e = which < 3 ? kStrange[which] : which == 3 ? first_expert + n_experts : first_expert - 1;
    }
    return values;
  }

  /// Places of tokens in more rows than are used, some of them outside.
  std::vector<float> random_places(std::int64_t tokens, std::int64_t k, std::int64_t rows) {
    std::vector<float> places(index(tokens * k), -1);
    std::vector<std::int64_t> order(index(rows));
    for (std::int64_t r = 0; r < rows; ++r) order[index(r)] = r;
    std::shuffle(order.begin(), order.end(), random);
    std::size_t next = 0;
    for (float& place : places) {
      const std::int64_t kind = pick(8);
      if (kind == 0) place = pick(2) == 0 ? -1 : static_cast<float>(rows + pick(100));
      if (kind > 0 && next < order.size()) place = static_cast<float>(order[next++]);
    }
    return places;
  }

  const Device device = GetParam();
  std::mt19937_64 random = random_engine();
};

INSTANTIATE_TEST_SUITE_P(Ops, Moe, testing::ValuesIn(kDevices), device_name);

constexpr MoeRouteOptions kDeepSeekV3{.score = MoeScore::sigmoid,
                                      .groups = 8,
                                      .groups_taken = 4,
                                      .group_score = MoeGroupScore::sum_of_two,
                                      .renormalise = true,
                                      .scale = 2.5f};

TEST_P(Moe, RoutesAsPublishedModels) {
  check_route({.tokens = 37, .experts = 8, .k = 2, .options = {.renormalise = true}});                            // Mixtral
  check_route({.tokens = 37, .experts = 128, .k = 8, .options = {.renormalise = true}, .dtype = DType::bf16});    // Qwen3
  check_route({.tokens = 37, .experts = 160, .k = 6, .options = {.groups = 8, .groups_taken = 3, .scale = 16}});  // DeepSeek-V2
  check_route({.tokens = 200, .experts = 256, .k = 8, .options = kDeepSeekV3, .bias = true});
  check_route(
      {.tokens = 37, .experts = 384, .k = 8, .options = {.score = MoeScore::sigmoid, .renormalise = true, .scale = 2.827f}, .bias = true});
}

TEST_P(Moe, RoutesAnyShape) {
  for (const int experts : {1, 2, 3, 31, 127, 128, 129, 255, 256, 257, 511, 512})
    for (const int k : {1, 2, 7, 16})
      if (k <= experts) check_route({.tokens = 1 + pick(9), .experts = experts, .k = k, .dtype = pick(2) == 0 ? DType::f16 : DType::bf16});
  for (const std::int64_t tokens : {0, 1, 2, 3, 4, 5, 1000}) check_route({.tokens = tokens, .experts = 60, .k = 4});
  for (int n = 0; n < random_cases(40); ++n) {
    const int groups = 1 + static_cast<int>(pick(64)), size = 2 + static_cast<int>(pick(512 / groups - 1));
    const int taken = 1 + static_cast<int>(pick(groups));
    check_route({.tokens = 20,
                 .experts = groups * size,
                 .k = 1 + static_cast<int>(pick(std::min(taken * size, 16))),
                 .options = {.score = pick(2) == 0 ? MoeScore::softmax : MoeScore::sigmoid,
                             .groups = groups,
                             .groups_taken = taken,
                             .group_score = pick(2) == 0 ? MoeGroupScore::largest : MoeGroupScore::sum_of_two,
                             .renormalise = pick(2) == 0,
                             .scale = 1.5f},
                 .bias = pick(2) == 0});
  }
}

TEST_P(Moe, RoutesAnyStrides) {
  for (const Placement& from : {Placement{.offset = 3}, Placement{.gap = 5}, Placement{.step = 2}, Placement{.order = {1, 0}}}) {
    for (const Placement& to : {Placement{.offset = 1, .gap = 3}, Placement{.order = {1, 0}}, Placement{.gap = 1, .reversed = true}})
      check_route({.tokens = 21, .experts = 64, .k = 6, .from = from, .to = to});
  }
}

/// Equal scores: the lower expert comes first, and of groups the lower group. Without a bias logits are compared, where sigmoids are equal.
TEST_P(Moe, RoutesEqualLogits) {
  const std::vector<float> equal(index(5 * 256), 1.0f);
  check_route({.tokens = 5, .experts = 256, .k = 16}, equal);
  check_route({.tokens = 5, .experts = 256, .k = 16, .options = kDeepSeekV3}, equal);
  check_route({.tokens = 5, .experts = 256, .k = 8, .options = {.groups = 8, .groups_taken = 2}}, equal);
  std::vector<float> few(index(40 * 512));  // many equal ones among few values, and both zeros
  for (float& x : few) x = static_cast<float>(pick(5)) - 2;
  for (float& x : few) x = x == 0 && pick(2) == 0 ? -0.0f : x;
  check_route({.tokens = 40, .experts = 512, .k = 16}, few);
  check_route({.tokens = 40, .experts = 512, .k = 9, .options = {.groups = 32, .groups_taken = 3}}, few);
  std::vector<float> large(index(3 * 40));
  for (float& x : large) x = 40 + static_cast<float>(pick(1000));
  check_route({.tokens = 3, .experts = 40, .k = 10, .options = {.score = MoeScore::sigmoid}}, large);
}

TEST_P(Moe, RoutesLogitsThatAreNotFinite) {
  std::vector<float> values(index(60 * 24));
  for (float& x : values) {
    const std::int64_t kind = pick(6);
    x = kind == 0 ? kNaN : kind == 1 ? -kInf : static_cast<float>(pick(2000)) / 256;
  }
  for (std::size_t n = 0; n < 24; ++n) {
    values[n] = kNaN;  // nothing to choose from
    values[24 + n] = -kInf;
    values[48 + n] = n % 2 == 0 ? kNaN : -kInf;
  }
  values[72] = kInf;
  for (const bool renormalise : {false, true}) {
    check_route({.tokens = 60, .experts = 24, .k = 16, .options = {.renormalise = renormalise}}, values);
    check_route({.tokens = 60, .experts = 24, .k = 8, .options = {.score = MoeScore::sigmoid, .renormalise = renormalise}, .bias = true},
                values);
    check_route({.tokens = 60, .experts = 24, .k = 6, .options = {.groups = 4, .groups_taken = 2, .renormalise = renormalise}}, values);
  }
}

/// Adding a bias that is NaN makes an expert the last choice.
TEST_P(Moe, RoutesABiasThatIsNaN) {
  PlacedTensor logits({1, 4}, DType::f32, device), bias({4}, DType::f32, device);
  const PlacedTensor weights({1, 4}, DType::f32, device), experts({1, 4}, DType::i32, device);
  logits.fill(std::vector<float>{4, 3, 2, 1});
  bias.fill(std::vector<float>{kNaN, 0, 0, 0});
  moe_route(logits, weights, experts, {.score = MoeScore::sigmoid, .bias = &bias.tensor()});
  EXPECT_EQ(experts.values(), (std::vector<double>{1, 2, 3, 0}));
}

TEST_P(Moe, PermutesAnyShape) {
  for (const int n_experts : {1, 2, 8, 60, 256, 511, 512})
    for (const std::int64_t tokens : {0, 1, 2, 7, 64, 200}) {
      const std::int64_t k = 1 + pick(std::min(n_experts, 16));
      check_permutation(random_experts(tokens * k, n_experts, 0, 0), tokens, n_experts);
      check_permutation(random_experts(tokens * k, n_experts, 100, 4), tokens, n_experts, 100);
    }
}

/// One chunk, and several: their lengths, last ones that are short, more assignments than 512 chunks of the usual length have.
TEST_P(Moe, PermutesManyAssignments) {
  for (const std::int64_t count : {2047, 2048, 2049, 2304, 5000, 8192})
    check_permutation(random_experts(count, 40, 0, count % 2 == 0 ? 0 : 9), count, 40);
  check_permutation(random_experts(1100 * 8, 512, -5, 20), 1100, 512, -5);
  check_permutation(random_experts(16384 * 8, 16, 0, 0), 16384, 16);
  check_permutation(random_experts(70001 * 2, 5, 1, 30), 70001, 5, 1);
}

TEST_P(Moe, PermutesUnevenExperts) {
  for (const std::int64_t tokens : {100, 3000}) {
    check_permutation(std::vector<std::int64_t>(index(tokens * 2), 7), tokens, 8);   // all to the last one
    check_permutation(std::vector<std::int64_t>(index(tokens * 2), 0), tokens, 8);   // to the first one
    check_permutation(std::vector<std::int64_t>(index(tokens * 2), -1), tokens, 8);  // to none
    std::vector<std::int64_t> values(index(tokens * 2));
    for (std::size_t n = 0; n < values.size(); ++n) values[n] = 7 - static_cast<std::int64_t>(n * 8 / values.size());  // backwards
    check_permutation(values, tokens, 8);
  }
}

TEST_P(Moe, DispatchesAnyShape) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const std::int64_t hidden : {1, 8, 511, 513, 1024, 1026, 2048, 3000}) {
      const std::int64_t tokens = pick(20), k = 1 + pick(9), rows = tokens * k + pick(5);
      for (const Placement& placement : {Placement{}, Placement{.offset = 1, .gap = 3}, Placement{.order = {1, 0}}}) {
        SCOPED_TRACE(tw::format("{} tokens of {} x {}, k {}, {} rows", tokens, hidden, name_of(dtype), k, rows));
        PlacedTensor x({tokens, hidden}, dtype, device, placement), y({rows, hidden}, dtype, device, placement);
        PlacedTensor places({tokens, k}, DType::i32, device, {.gap = 1});
        const std::vector<float> values = x.fill_random(random), where = random_places(tokens, k, rows);
        std::vector<float> expected(index(rows * hidden), 7.5f);
        y.fill(expected);
        places.fill(where);
        if (!launched([&] { moe_dispatch(x, places, y); })) continue;
        for (std::int64_t a = 0; a < tokens * k; ++a) {
          const auto row = static_cast<std::int64_t>(where[index(a)]);
          if (row >= 0 && row < rows) std::copy_n(values.begin() + a / k * hidden, hidden, expected.begin() + row * hidden);
        }
        EXPECT_EQ(y.values(), std::vector<double>(expected.begin(), expected.end()));
        EXPECT_TRUE(y.gaps_intact());
      }
    }
  }
}

TEST_P(Moe, CombinesAnyShape) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const std::int64_t hidden : {1, 8, 511, 513, 1024, 1026, 2048, 3000}) {
      const std::int64_t tokens = pick(20), k = 1 + pick(17), rows = tokens * k + pick(5);
      for (const Placement& placement : {Placement{}, Placement{.offset = 1, .gap = 3}, Placement{.order = {1, 0}}}) {
        const bool has_addend = pick(2) == 0, in_place = has_addend && pick(2) == 0;
        SCOPED_TRACE(
            tw::format("{} tokens of {} x {}, k {}, {} rows, addend {} {}", tokens, hidden, name_of(dtype), k, rows, has_addend, in_place));
        PlacedTensor y({rows, hidden}, dtype, device, placement), addend({tokens, hidden}, dtype, device, placement);
        PlacedTensor places({tokens, k}, DType::i32, device, {.gap = 1}), weights({tokens, k}, DType::f32, device, {.gap = 2});
        const PlacedTensor out({tokens, hidden}, dtype, device, placement);
        const std::vector<float> values = y.fill_random(random), added = addend.fill_random(random);
        const std::vector<float> where = random_places(tokens, k, rows);
        std::vector<float> weight = weights.fill_random(random);
        for (std::size_t a = 0; a < where.size(); ++a)
          if (where[a] < 0) weight[a] = kNaN;  // not used
        weights.fill(weight);
        places.fill(where);
        const PlacedTensor& result = in_place ? addend : out;
        if (!launched([&] { moe_combine(y, places, weights, result, {.addend = has_addend ? &addend.tensor() : nullptr}); })) continue;
        const std::vector<double> got = result.values();
        for (std::int64_t t = 0; t < tokens; ++t) {
          for (std::int64_t h = 0; h < hidden; ++h) {
            double exact = has_addend ? added[index(t * hidden + h)] : 0, magnitude = std::abs(exact);
            for (std::int64_t n = 0; n < k; ++n) {
              const auto row = static_cast<std::int64_t>(where[index(t * k + n)]);
              if (row < 0 || row >= rows) continue;
              const double product = static_cast<double>(weight[index(t * k + n)]) * values[index(row * hidden + h)];
              exact += product;
              magnitude += std::abs(product);
            }
            // Half a unit in the last place of the result, and for each summand two roundings to f32.
            const double unit = dtype == DType::f32 ? 0x1p-24 : dtype == DType::f16 ? 0x1p-11 : 0x1p-8;
            const double sums = static_cast<double>(2 * k + 1) * 0x1p-24 * magnitude;
            ASSERT_NEAR(got[index(t * hidden + h)], exact, unit * (std::abs(exact) + sums) + sums + (dtype == DType::f16 ? 0x1p-25 : 0))
                << "token " << t << ", column " << h;
          }
        }
        EXPECT_TRUE(result.gaps_intact());
      }
    }
  }
}

/// In f32 1e8 + 1 is 1e8, so the sum shows the order.
TEST_P(Moe, CombinesInOrder) {
  PlacedTensor y({11, 3}, DType::f32, device), places({2, 10}, DType::i32, device), weights({2, 10}, DType::f32, device);
  PlacedTensor addend({2, 3}, DType::f32, device);
  const PlacedTensor out({2, 3}, DType::f32, device);
  std::vector<float> values(33, 0);
  for (std::size_t h = 0; h < 3; ++h) {
    values[h] = 1e8f;
    values[3 + h] = 1;
    values[6 + h] = -1e8f;
  }
  y.fill(values);
  weights.fill(std::vector<float>(20, 1));
  addend.fill(std::vector<float>{0, 0, 0, 1, 1, 1});
  // 1e8 + 1 - 1e8 = 0; 1 + 1e8 - 1e8 + 1 = 1.
  std::vector<float> where{0, 1, 3, 4, 5, 6, 7, 8, 9, 2, 0, 4, 3, 5, 6, 7, 8, 9, 2, 1};
  places.fill(where);
  moe_combine(y, places, weights, out, {.addend = &addend.tensor()});
  EXPECT_EQ(out.values(), (std::vector<double>{0, 0, 0, 1, 1, 1}));
}

/// The pieces in a graph: replays follow the logits.
TEST_P(Moe, Graphs) {
  const Stream stream(device);
  for (const std::int64_t tokens : {6, 700}) {
    const int n_experts = 32;
    const std::int64_t k = 8;
    PlacedTensor logits({tokens, n_experts}, DType::f32, device), x({tokens, 64}, DType::f32, device);
    PlacedTensor weights({tokens, k}, DType::f32, device), experts({tokens, k}, DType::i32, device);
    const PlacedTensor offsets({n_experts + 1}, DType::i32, device), rows({tokens * k}, DType::i32, device);
    const PlacedTensor places({tokens, k}, DType::i32, device), sorted({tokens * k, 64}, DType::f32, device);
    const PlacedTensor out({tokens, 64}, DType::f32, device);
    logits.fill_random(random);
    x.fill_random(random);
    Stream::standard(device).synchronize();
    const Graph graph = Graph::capture(stream, [&] {
      moe_route(logits, weights, experts, {.renormalise = true, .stream = stream});
      moe_permutation(experts, n_experts, offsets, rows, places, {.stream = stream});
      moe_dispatch(x, places, sorted, {.stream = stream});
      moe_combine(sorted, places, weights, out, {.stream = stream});
    });
    for (int i = 0; i < 3; ++i) {
      logits.fill_random(random);
      const std::vector<float> values = x.fill_random(random);
      Stream::standard(device).synchronize();
      graph.replay(stream);
      stream.synchronize();
      const std::vector<double> got = out.values();  // x, as the weights add up to 1
      for (std::size_t n = 0; n < got.size(); ++n) ASSERT_NEAR(got[n], values[n], 1e-5);
      const std::vector<double> ids = experts.values();
      const Permuted expected = permutation_reference(std::vector<std::int64_t>(ids.begin(), ids.end()), static_cast<int>(k), n_experts, 0);
      EXPECT_EQ(rows.values(), std::vector<double>(expected.rows.begin(), expected.rows.end()));
    }
  }
}

class BadInput : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override {
    skip_unless_present(device);
    memory.emplace(device);
  }
  void TearDown() override {
    if (!memory) return;
    for (const PlacedTensor* out : {&memory->weights, &memory->chosen, &memory->offsets, &memory->rows, &memory->places, &memory->out})
      EXPECT_TRUE(out->untouched());
  }
  using Parts = std::initializer_list<std::string_view>;
  void refuse_route(const Tensor& logits, const MoeRouteOptions& options, Parts parts) {
    expect_error<InvalidArgument>([&] { moe_route(logits, memory->weights, memory->chosen, options); }, parts);
  }
  Tensor zeros(Shape shape, DType dtype) const { return Tensor::zeros(std::move(shape), dtype, Stream::standard(device)); }

  struct Memory {
    explicit Memory(Device device)
        : logits({3, 12}, DType::f32, device),
          weights({3, 4}, DType::f32, device),
          chosen({3, 4}, DType::i32, device),
          offsets({13}, DType::i32, device),
          rows({12}, DType::i32, device),
          places({3, 4}, DType::i32, device),
          out({3, 8}, DType::f32, device) {}
    PlacedTensor logits, weights, chosen, offsets, rows, places, out;
  };
  const Device device = GetParam();
  std::optional<Memory> memory;
};

INSTANTIATE_TEST_SUITE_P(Moe, BadInput, testing::ValuesIn(kDevices), device_name);

TEST_P(BadInput, Route) {
  const Tensor logits = memory->logits, weights = memory->weights, chosen = memory->chosen;
  const Tensor bias = zeros({13}, DType::f32), half = zeros({12}, DType::f16);
  refuse_route(zeros({3, 12}, DType::i32), {}, {"moe_route: logits is i32[3, 12]", "f32, f16 and bf16"});
  refuse_route(zeros({3, 513}, DType::f32), {}, {"logits is f32[3, 513]", "1 to 512 experts"});
  refuse_route(zeros({3, 0}, DType::f32), {}, {"logits is f32[3, 0]", "1 to 512 experts"});
  refuse_route(zeros({2, 12}, DType::f32), {}, {"weights is f32[3, 4]", "f32[2, 12]", "[tokens, k]"});
  refuse_route(logits, {.bias = &bias}, {"bias is f32[13]", "f32[12]"});
  refuse_route(logits, {.bias = &half}, {"bias is f16[12]", "f32"});
  refuse_route(logits, {.groups = 5}, {"groups is 5", "1 to 64 and divide the 12 experts"});
  refuse_route(logits, {.groups = 0}, {"groups is 0"});
  refuse_route(logits, {.groups = 3, .groups_taken = 4}, {"groups_taken is 4; it must be 1 to groups, 3"});
  refuse_route(logits, {.groups = 3, .groups_taken = 0}, {"groups_taken is 0"});
  refuse_route(logits, {.groups = 12, .groups_taken = 4, .group_score = MoeGroupScore::sum_of_two},
               {"groups is 12", "two of the 12 experts"});
  refuse_route(logits, {.groups = 4, .groups_taken = 1}, {"k is 4, but the groups taken have 3 of the 12 experts"});
  refuse_route(logits, {.scale = kInf}, {"scale is inf; it must be finite"});
  const auto refuse = [&](const Tensor& w, const Tensor& e, Parts parts) {
    expect_error<InvalidArgument>([&] { moe_route(logits, w, e); }, parts);
  };
  refuse(zeros({3, 0}, DType::f32), zeros({3, 0}, DType::i32), {"k is 0; it must be 1 to 16"});
  refuse(zeros({3, 17}, DType::f32), zeros({3, 17}, DType::i32), {"k is 17; it must be 1 to 16"});
  refuse(weights, zeros({3, 3}, DType::i32), {"experts is i32[3, 3]", "weights' shape, f32[3, 4]"});
  refuse(weights, zeros({3, 4}, DType::i64), {"experts is i64[3, 4]", "i32"});
  refuse(zeros({3, 4}, DType::f16), chosen, {"weights is f16[3, 4]", "f32"});
  refuse(Tensor::borrow(logits.data(), {3, 4}, DType::f32, device, {12, 1}), chosen, {"weights is", "shares memory with logits"});
  refuse(Tensor::borrow(weights.data(), {3, 4}, DType::f32, device, {4, 0}), chosen, {"weights", "stride 0 in dimension 1"});
}

TEST_P(BadInput, Permutation) {
  const Tensor experts = zeros({3, 4}, DType::i32), offsets = memory->offsets, rows = memory->rows, places = memory->places;
  const auto refuse = [&](const Tensor& e, int n, const Tensor& o, const Tensor& r, const Tensor& p, Parts parts) {
    expect_error<InvalidArgument>([&] { moe_permutation(e, n, o, r, p); }, parts);
  };
  refuse(zeros({3, 4}, DType::i64), 12, offsets, rows, places, {"moe_permutation: experts is i64[3, 4]", "i32"});
  refuse(zeros({12}, DType::i32), 12, offsets, rows, places, {"experts is i32[12]", "[tokens, k]"});
  refuse(zeros({3, 8}, DType::i32).slice(1, 0, 4), 12, offsets, rows, places, {"experts is i32[3, 4]", "contiguous"});
  refuse(experts, 0, offsets, rows, places, {"n_experts is 0; it must be 1 to 512"});
  refuse(experts, 513, offsets, rows, places, {"n_experts is 513; it must be 1 to 512"});
  refuse(experts, 11, offsets, rows, places, {"offsets is i32[13]", "i32[12]"});
  refuse(experts, 12, offsets, rows.slice(0, 0, 11), places, {"rows is i32[11]", "i32[12]"});
  refuse(experts, 12, offsets, rows, rows, {"places is i32[12]", "i32[3, 4]"});
  refuse(experts, 12, offsets, rows, Tensor::borrow(rows.data(), {3, 4}, DType::i32, device), {"rows is", "shares memory with places"});
  refuse(places, 12, offsets, rows, places, {"places is", "shares memory with experts"});
  const Tensor many = Tensor::borrow(experts.data(), {1 << 20, 1 << 11}, DType::i32, device, {0, 0});
  refuse(many, 12, offsets, rows, places, {"experts is i32[1048576, 2048]", "limited to 1073741824"});
}

TEST_P(BadInput, DispatchAndCombine) {
  const Tensor x = zeros({3, 8}, DType::f32), y = zeros({12, 8}, DType::f32), places = zeros({3, 4}, DType::i32);
  const Tensor weights = zeros({3, 4}, DType::f32), out = memory->out;
  const auto refuse_dispatch = [&](const Tensor& a, const Tensor& p, const Tensor& b, Parts parts) {
    expect_error<InvalidArgument>([&] { moe_dispatch(a, p, b); }, parts);
  };
  refuse_dispatch(zeros({3, 8}, DType::i32), places, out, {"moe_dispatch: x is i32[3, 8]", "f32, f16 and bf16"});
  refuse_dispatch(zeros({3, 8}, DType::f16), places, out, {"y is f32[3, 8]", "f16"});
  refuse_dispatch(zeros({3, 9}, DType::f32), places, out, {"y is f32[3, 8]", "as many columns as x, f32[3, 9]"});
  refuse_dispatch(zeros({3, 2, 4}, DType::f32), places, out, {"x is f32[3, 2, 4]", "2 dimensions"});
  refuse_dispatch(x, zeros({2, 4}, DType::i32), out, {"places is i32[2, 4]", "[3, k]"});
  refuse_dispatch(x, zeros({3, 4}, DType::i64), out, {"places is i64[3, 4]", "i32"});
  refuse_dispatch(out, places, out, {"y is", "shares memory with x"});
  const auto refuse_combine = [&](const Tensor& a, const Tensor& p, const Tensor& w, const MoeCombineOptions& options, Parts parts) {
    expect_error<InvalidArgument>([&] { moe_combine(a, p, w, out, options); }, parts);
  };
  refuse_combine(zeros({12, 7}, DType::f32), places, weights, {}, {"moe_combine: y is f32[12, 7]", "out, f32[3, 8]"});
  refuse_combine(zeros({12, 8}, DType::bf16), places, weights, {}, {"y is bf16[12, 8]", "f32"});
  refuse_combine(y, zeros({4, 4}, DType::i32), weights, {}, {"places is i32[4, 4]", "[3, k]"});
  refuse_combine(y, places, zeros({3, 5}, DType::f32), {}, {"weights is f32[3, 5]", "places' shape, i32[3, 4]"});
  refuse_combine(y, places, zeros({3, 4}, DType::f16), {}, {"weights is f16[3, 4]", "f32"});
  const Tensor wrong = zeros({3, 7}, DType::f32), half = zeros({3, 8}, DType::f16);
  refuse_combine(y, places, weights, {.addend = &wrong}, {"addend is f32[3, 7]", "out's shape, f32[3, 8]"});
  refuse_combine(y, places, weights, {.addend = &half}, {"addend is f16[3, 8]", "f32"});
  const Tensor shifted = Tensor::borrow(static_cast<float*>(out.data()) + 1, {3, 8}, DType::f32, device);
  refuse_combine(y, places, weights, {.addend = &shifted}, {"out is", "shares memory with addend"});
  refuse_combine(out, places, weights, {}, {"out is", "shares memory with y"});
}

}  // namespace
}  // namespace tw::kernels::moe
