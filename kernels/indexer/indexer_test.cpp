// indexer_scores() against loops in double, on the CPU and, where there is one, on a GPU.

#include "tilewave/indexer.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/indexer/reference.hpp"
#include "runtime/format.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"

namespace tw::kernels::indexer {
namespace {

using namespace tw::test;

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

/// Where queries' ranges come from.
enum class Ranges { none, causal, starts_and_ends, starts, ends, causal_ends };

struct Case {
  std::int64_t queries = 5, keys = 130, heads = 64;
  Ranges ranges = Ranges::none;
  std::vector<std::pair<int, int>> given = {};  ///< of queries 0, 1, ..., in turn; otherwise they are random
  bool clear = true;
  int num_splits = 0;
  bool strided = false;   ///< tensors with gaps, not aligned
  bool reversed = false;  ///< rows of k and scores in reverse
  bool nan_keys = false;  ///< keys that no query sees are NaN

  std::string describe() const {
    return tw::format("queries {} keys {} heads {} ranges {} clear {} splits {} strided {} reversed {} NaN {}", queries, keys, heads,
                      static_cast<int>(ranges), clear, num_splits, strided, reversed, nan_keys);
  }
};

class Indexer : public testing::TestWithParam<std::tuple<Device, DType>> {
 protected:
  void SetUp() override { skip_unless_present(device); }
  void check(const Case& c);
  /// 0 to n - 1.
  std::int64_t pick(std::int64_t n) { return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(n)); }

  const Device device = std::get<0>(GetParam());
  const DType dtype = std::get<1>(GetParam());
  std::mt19937_64 random = random_engine();
};

/// The largest error of a score, in its magnitude. Sums in f32 of up to 128 products and 128 heads; a Hopper GPU's fp8 products are sums of
/// 32 that are cut off at 2^-13 of the largest, four times.
double tolerance(DType dtype, Device device) {
  return dtype == DType::fp8_e4m3 && device.is_cuda() ? std::ldexp(1.0, -12) : std::ldexp(1.0, -20);
}

void Indexer::check(const Case& c) {
  SCOPED_TRACE(c.describe());
  const Placement gaps = c.strided ? Placement{.offset = 3, .gap = 5} : c.reversed ? Placement{.reversed = true} : Placement{};
  PlacedTensor q({c.queries, c.heads, kIndexerDim}, dtype, device,
                 c.strided ? Placement{.order = {1, 0, 2}, .offset = 1, .gap = 3} : Placement{}),
      k({c.keys, kIndexerDim}, dtype, device, gaps), k_scale({c.keys}, DType::f32, device),
      weights({c.queries, c.heads}, DType::f32, device, c.strided ? Placement{.order = {1, 0}, .step = 2, .gap = 1} : Placement{}),
      starts({c.queries}, DType::i32, device), ends({c.queries}, DType::i32, device), scores({c.queries, c.keys}, DType::f32, device, gaps);
  // The ranges that are asked for, and what they mean.
  std::vector<float> asked_starts, asked_ends;
  std::vector<std::int64_t> begin, end;
  const bool has_starts = c.ranges == Ranges::starts || c.ranges == Ranges::starts_and_ends;
  const bool has_ends = c.ranges == Ranges::ends || c.ranges == Ranges::starts_and_ends || c.ranges == Ranges::causal_ends;
  const bool causal = c.ranges == Ranges::causal || c.ranges == Ranges::causal_ends;
  for (std::int64_t i = 0; i < c.queries; ++i) {
    std::int64_t first = pick(c.keys + 40) - 20, last = pick(c.keys + 40) - 20;  // in any order, and beyond the keys
    if (!c.given.empty()) std::tie(first, last) = c.given[at(i) % c.given.size()];
    asked_starts.push_back(static_cast<float>(first));
    asked_ends.push_back(static_cast<float>(last));
    begin.push_back(has_starts ? std::max<std::int64_t>(first, 0) : 0);
    end.push_back(std::min({has_ends ? last : c.keys, causal ? c.keys - c.queries + i + 1 : c.keys, c.keys}));
  }
  std::vector<bool> seen(at(c.keys), false);
  for (std::int64_t i = 0; i < c.queries; ++i)
    for (std::int64_t j = begin[at(i)]; j < end[at(i)]; ++j) seen[at(j)] = true;

  const std::vector<float> qs = q.fill_random(random), ws = weights.fill_random(random);
  std::vector<float> ks, scales;
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> uniform(0.01f, 2);
  for (std::int64_t j = 0; j < c.keys; ++j) {
    const bool poison = c.nan_keys && !seen[at(j)];
    for (std::int64_t i = 0; i < kIndexerDim; ++i) ks.push_back(poison ? kNaN : round_to(dtype, normal(random)));
    scales.push_back(poison ? kNaN : uniform(random));
  }
  k.fill(ks);
  k_scale.fill(scales);
  starts.fill(asked_starts);
  ends.fill(asked_ends);
  const bool fp8 = dtype == DType::fp8_e4m3;
  const IndexerOptions options{.k_scale = fp8 ? &k_scale.tensor() : nullptr,
                               .starts = has_starts ? &starts.tensor() : nullptr,
                               .ends = has_ends ? &ends.tensor() : nullptr,
                               .causal = causal,
                               .clear = c.clear,
                               .num_splits = c.num_splits};
  if (!launched([&] { indexer_scores(q, k, weights, scores, options); })) return;

  const PlainIndexer plain{c.queries, c.heads, qs, ks, fp8 ? std::span<const float>(scales) : std::span<const float>(), ws};
  const std::vector<double> got = scores.values();
  const double allowed = tolerance(dtype, device);
  for (std::int64_t i = 0; i < c.queries; ++i) {
    for (std::int64_t j = 0; j < c.keys; ++j) {
      const double x = got[at(i * c.keys + j)];
      if (j < begin[at(i)] || j >= end[at(i)]) {
        if (c.clear)
          ASSERT_EQ(x, -std::numeric_limits<double>::infinity()) << "query " << i << " does not see key " << j;
        else
          ASSERT_TRUE(std::isnan(x)) << "the score of query " << i << " and key " << j << " was written: " << x;
        continue;
      }
      const PlainScore expected = score(plain, i, j);
      ASSERT_NEAR(x, expected.score, allowed * expected.magnitude) << "query " << i << " key " << j;
    }
  }
  EXPECT_TRUE(scores.gaps_intact());
}

std::string case_name(const testing::TestParamInfo<std::tuple<Device, DType>>& info) {
  const auto& [device, dtype] = info.param;
  return tw::format("{}_{}", device.is_cuda() ? "cuda" : "cpu", name_of(dtype));
}

INSTANTIATE_TEST_SUITE_P(Ops, Indexer,
                         testing::Combine(testing::ValuesIn(kDevices), testing::Values(DType::fp8_e4m3, DType::bf16, DType::f16)),
                         case_name);

TEST_P(Indexer, KeysAroundTiles) {
  for (const std::int64_t keys : {1, 2, 63, 64, 65, 127, 128, 129, 255, 257, 383}) check({.keys = keys});
  check({.queries = 4, .keys = 1031});
}

TEST_P(Indexer, QueriesAroundTiles) {
  for (const std::int64_t queries : {1, 2, 3, 4, 7, 8, 9, 31}) check({.queries = queries, .keys = 70});
}

TEST_P(Indexer, Heads) {
  for (const std::int64_t heads : {1, 7, 16, 17, 32, 33, 48, 64, 65, 128})
    check({.queries = 1 + pick(20), .keys = 1 + pick(200), .heads = heads});
  for (const std::int64_t heads : {16, 32, 128}) check({.queries = 256 / heads + 1, .keys = 300, .heads = heads, .ranges = Ranges::causal});
}

TEST_P(Indexer, Nothing) {
  check({.queries = 0});
  check({.keys = 0});
  check({.queries = 0, .keys = 0});
}

TEST_P(Indexer, Causal) {
  for (const auto& [queries, keys] : {std::pair{1, 1}, {9, 9}, {130, 130}, {5, 300}, {300, 5}, {17, 129}})
    check({.queries = queries, .keys = keys, .ranges = Ranges::causal, .nan_keys = true});
  check({.queries = 40, .keys = 200, .ranges = Ranges::causal_ends});
}

TEST_P(Indexer, RandomRanges) {
  for (int n = random_cases(8); n > 0; --n) {
    const auto ranges = std::array{Ranges::starts_and_ends, Ranges::starts, Ranges::ends, Ranges::causal_ends}[at(pick(4))];
    check({.queries = 1 + pick(40), .keys = 1 + pick(500), .heads = 16 << pick(3), .ranges = ranges, .nan_keys = pick(2) == 0});
  }
}

TEST_P(Indexer, ChosenRanges) {
  constexpr int kLarge = std::numeric_limits<int>::max() / 2, kSmall = -kLarge;
  // Empty, reversed, whole, one key, beyond the keys on either side, around a tile's first key.
  const std::vector<std::pair<int, int>> given = {{10, 10}, {200, 100}, {0, 300},   {299, 300},       {300, 301},       {-5, 3}, {250, 400},
                                                  {-9, 0},  {128, 256}, {127, 129}, {kSmall, kLarge}, {kLarge, kSmall}, {-7, -3}};
  for (const bool clear : {true, false}) {
    check({.queries = 26, .keys = 300, .ranges = Ranges::starts_and_ends, .given = given, .clear = clear});
    check({.queries = 26, .keys = 300, .heads = 32, .ranges = Ranges::starts_and_ends, .given = given, .clear = clear, .num_splits = 2});
  }
  // No query of a tile sees a key.
  check({.queries = 9, .keys = 300, .ranges = Ranges::starts_and_ends, .given = {{5, 5}}, .nan_keys = true});
  check({.queries = 9, .keys = 300, .ranges = Ranges::starts_and_ends, .given = {{5, 5}}, .clear = false});
  // Far apart: what lies between is seen by none.
  check({.queries = 4, .keys = 700, .ranges = Ranges::starts_and_ends, .given = {{0, 3}, {690, 700}}, .nan_keys = true});
}

TEST_P(Indexer, PackedSequences) {
  // Queries of three sequences, causal in each.
  std::vector<std::pair<int, int>> given;
  for (int i = 0; i < 20; ++i) given.emplace_back(0, i + 1);
  for (int i = 0; i < 130; ++i) given.emplace_back(20, 21 + i);
  for (int i = 0; i < 7; ++i) given.emplace_back(150, 151 + i);
  check({.queries = 157, .keys = 157, .ranges = Ranges::starts_and_ends, .given = given, .nan_keys = true});
}

TEST_P(Indexer, Splits) {
  for (const int splits : {1, 2, 3, 1024}) {
    check({.queries = 6, .keys = 700, .num_splits = splits});
    check({.queries = 6, .keys = 700, .ranges = Ranges::starts_and_ends, .num_splits = splits});
  }
  check({.queries = 3, .keys = 5000, .ranges = Ranges::starts_and_ends});
}

TEST_P(Indexer, Strides) {
  check({.queries = 6, .keys = 150, .strided = true});
  check({.queries = 6, .keys = 150, .heads = 20, .ranges = Ranges::starts_and_ends, .clear = false, .strided = true});
  check({.queries = 6, .keys = 150, .reversed = true});
}

/// Bits of the scores, called several times with the same inputs.
TEST_P(Indexer, SameBitsInEveryRun) {
  PlacedTensor q({33, 64, kIndexerDim}, dtype, device), k({700, kIndexerDim}, dtype, device), scale({700}, DType::f32, device),
      weights({33, 64}, DType::f32, device);
  q.fill_random(random);
  k.fill_random(random);
  scale.fill_random(random);
  weights.fill_random(random);
  std::vector<double> first;
  for (int n = 0; n < 3; ++n) {
    PlacedTensor scores({33, 700}, DType::f32, device);
    if (!launched([&] {
          indexer_scores(q, k, weights, scores, {.k_scale = dtype == DType::fp8_e4m3 ? &scale.tensor() : nullptr, .num_splits = 1 + n});
        }))
      return;
    if (n == 0)
      first = scores.values();
    else
      EXPECT_EQ(scores.values(), first);
  }
}

}  // namespace
}  // namespace tw::kernels::indexer
