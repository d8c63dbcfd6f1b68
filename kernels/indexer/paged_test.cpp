// indexer_scores_paged() against loops in double, on the CPU and, where there is one, on a GPU.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "kernels/indexer/reference.hpp"
#include "runtime/format.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"
#include "tilewave/indexer.hpp"

namespace tw::kernels::indexer {
namespace {

using namespace tw::test;

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

struct Case {
  std::int64_t seqlen_q = 1, heads = 64, table = 5;  ///< table: pages of a sequence
  std::vector<std::int64_t> lengths = {130, 300};    ///< as given; one for each sequence
  std::int64_t columns = 310;
  bool with_lengths = true, causal = true, clear = true;
  bool by_query = false;  ///< lengths are of queries: those given, in turn
  int num_splits = 0;
  double missing = 0;         ///< share of the table that names no page
  std::int64_t page_gap = 0;  ///< bytes between pages
  bool shared = false;        ///< sequences share pages
  bool strided = false;

  std::string describe() const {
    return tw::format(
        "seqlen_q {} heads {} table {} lengths {} columns {} with lengths {} causal {} clear {} splits {} missing {} gap {} shared {} "
        "strided {}",
        seqlen_q, heads, table, tw::join(lengths, ","), columns, with_lengths, causal, clear, num_splits, missing, page_gap, shared,
        strided);
  }
};

class IndexerPaged : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override { skip_unless_present(device); }
  void check(const Case& c);

  const Device device = GetParam();
  std::mt19937_64 random = random_engine();
};

void IndexerPaged::check(const Case& c) {
  SCOPED_TRACE(c.describe());
  const auto batch = std::ssize(c.lengths);
  const std::int64_t pages = std::max<std::int64_t>(c.shared ? c.table : batch * c.table, 1) + 2;
  std::vector<std::int32_t> numbers(at(pages));
  std::iota(numbers.begin(), numbers.end(), 0);
  std::shuffle(numbers.begin(), numbers.end(), random);
  constexpr std::int32_t kSmallest = std::numeric_limits<std::int32_t>::min();
  const std::int32_t nowhere[] = {-1, static_cast<std::int32_t>(pages), kSmallest, std::numeric_limits<std::int32_t>::max(),
                                  static_cast<std::int32_t>(pages + 1)};
  std::uniform_real_distribution<double> uniform;
  std::vector<float> table;
  std::vector<std::int64_t> page_of;  // -1: none
  const std::int64_t held = c.table * kIndexerPage;
  std::vector<bool> used(at(pages * kIndexerPage), false);
  for (std::int64_t b = 0; b < batch; ++b) {
    const std::int64_t given = c.by_query ? *std::max_element(c.lengths.begin(), c.lengths.end()) : c.lengths[at(b)];
    const std::int64_t length = std::clamp<std::int64_t>(c.with_lengths ? given : held, 0, std::min(held, c.columns));
    for (std::int64_t n = 0; n < c.table; ++n) {
      const bool in_use = n * kIndexerPage < length;
      // Entries after the last page of a sequence may be anything.
      const bool none = !in_use || uniform(random) < c.missing;
      const std::int32_t page = none ? nowhere[random() % 5] : numbers[at((c.shared ? 0 : b * c.table) + n)];
      table.push_back(static_cast<float>(page));
      page_of.push_back(none ? -1 : page);
      for (std::int64_t j = 0; j < kIndexerPage && !none; ++j)
        if (n * kIndexerPage + j < length) used[at(page * kIndexerPage + j)] = true;
    }
  }
  // A page's memory: keys, then scales. What is not in use is NaN.
  const std::int64_t page_bytes = kIndexerPage * kIndexerKeyBytes + c.page_gap;
  const Tensor host = Tensor::empty({pages * page_bytes}, DType::u8);
  auto* const bytes = host.data<std::uint8_t>();
  std::fill_n(bytes, host.numel(), std::uint8_t{0xff});
  std::vector<float> keys(at(pages * kIndexerPage * kIndexerDim)), scales(at(pages * kIndexerPage));
  std::normal_distribution<float> normal;
  for (std::int64_t row = 0; row < pages * kIndexerPage; ++row) {
    if (!used[at(row)]) continue;
    std::uint8_t* const page = bytes + row / kIndexerPage * page_bytes;
    const std::int64_t j = row % kIndexerPage;
    for (std::int64_t i = 0; i < kIndexerDim; ++i) {
      const fp8_e4m3 code(normal(random));
      std::memcpy(page + j * kIndexerDim + i, &code, 1);
      keys[at(row * kIndexerDim + i)] = static_cast<float>(code);
    }
    scales[at(row)] = static_cast<float>(0.1 + uniform(random));
    std::memcpy(page + kIndexerPage * kIndexerDim + j * 4, &scales[at(row)], 4);
  }
  const Tensor on_device = host.to(device);
  const Tensor cache =
      Tensor::borrow(on_device.data(), {pages, kIndexerPage, kIndexerKeyBytes}, DType::u8, device, {page_bytes, kIndexerKeyBytes, 1});

  const Placement gaps = c.strided ? Placement{.offset = 3, .gap = 5} : Placement{};
  // The queries of all sequences are equally far apart.
  PlacedTensor all_q({batch * c.seqlen_q, c.heads, kIndexerDim}, DType::fp8_e4m3, device, gaps),
      all_weights({batch * c.seqlen_q, c.heads}, DType::f32, device, gaps),
      all_scores({batch * c.seqlen_q, c.columns}, DType::f32, device, gaps), block_table({batch, c.table}, DType::i32, device, gaps),
      seqlens({batch}, DType::i32, device);
  const std::vector<float> qs = all_q.fill_random(random), ws = all_weights.fill_random(random);
  block_table.fill(table);
  seqlens.fill(std::vector<float>(c.lengths.begin(), c.lengths.end()));
  PlacedTensor query_lengths({batch, c.seqlen_q}, DType::i32, device);
  std::vector<float> of_queries;
  for (std::int64_t row = 0; row < batch * c.seqlen_q; ++row) of_queries.push_back(static_cast<float>(c.lengths[at(row % batch)]));
  query_lengths.fill(of_queries);
  const auto by_sequence = [&](const Tensor& t) {
    Shape shape{batch, c.seqlen_q}, strides{c.seqlen_q * t.stride(0), t.stride(0)};
    for (std::size_t dim = 1; dim < t.shape().size(); ++dim) {
      shape.push_back(t.shape()[dim]);
      strides.push_back(t.strides()[dim]);
    }
    return Tensor::borrow(t.data(), shape, t.dtype(), t.device(), strides);
  };
  const IndexerPagedOptions options{.seqlens = !c.with_lengths ? nullptr
                                               : c.by_query    ? &query_lengths.tensor()
                                                               : &seqlens.tensor(),
                                    .causal = c.causal,
                                    .clear = c.clear,
                                    .num_splits = c.num_splits};
  const Tensor q = by_sequence(all_q), weights = by_sequence(all_weights), scores = by_sequence(all_scores);
  if (!launched([&] { indexer_scores_paged(q, cache, weights, block_table, scores, options); })) return;

  const PlainIndexer plain{batch * c.seqlen_q, c.heads, qs, keys, scales, ws};
  const std::vector<double> got = all_scores.values();
  const double allowed = device.is_cuda() ? std::ldexp(1.0, -12) : std::ldexp(1.0, -20);  // as in indexer_test.cpp
  for (std::int64_t b = 0; b < batch; ++b) {
    const std::int64_t length = std::clamp<std::int64_t>(c.with_lengths ? c.lengths[at(b)] : held, 0, std::min(held, c.columns));
    for (std::int64_t i = 0; i < c.seqlen_q; ++i) {
      const std::int64_t row = b * c.seqlen_q + i;
      std::int64_t end = c.causal ? length - c.seqlen_q + i + 1 : length;
      if (c.by_query) end = std::clamp<std::int64_t>(c.lengths[at(row % batch)], 0, std::min(held, c.columns));
      for (std::int64_t j = 0; j < c.columns; ++j) {
        const double x = got[at(row * c.columns + j)];
        const std::int64_t page = j < end ? page_of[at(b * c.table + j / kIndexerPage)] : -1;
        if (page < 0) {
          if (c.clear)
            ASSERT_EQ(x, -std::numeric_limits<double>::infinity()) << "sequence " << b << " query " << i << " key " << j;
          else
            ASSERT_TRUE(std::isnan(x)) << "sequence " << b << " query " << i << " key " << j << " was written: " << x;
          continue;
        }
        const PlainScore expected = score(plain, row, page * kIndexerPage + j % kIndexerPage);
        ASSERT_NEAR(x, expected.score, allowed * expected.magnitude) << "sequence " << b << " query " << i << " key " << j;
      }
    }
  }
  EXPECT_TRUE(all_scores.gaps_intact());
}

INSTANTIATE_TEST_SUITE_P(Ops, IndexerPaged, testing::ValuesIn(kDevices), device_name);

TEST_P(IndexerPaged, Lengths) {
  check({.lengths = {0, 1, 63, 64, 65, 127, 128, 129, 255, 320, 310}});
  check({.lengths = {321, 1 << 30, -1, -(1 << 30)}});  // clipped
  check({.table = 17, .lengths = {1031}, .columns = 1031});
}

TEST_P(IndexerPaged, QueriesOfASequence) {
  for (const std::int64_t seqlen_q : {1, 2, 3, 4, 5, 9}) {
    check({.seqlen_q = seqlen_q, .lengths = {0, 1, 2, seqlen_q, 64, 65, 200}});
    check({.seqlen_q = seqlen_q, .lengths = {3, 130}, .causal = false});
  }
}

/// Sequences have keys for the longest of all lengths.
TEST_P(IndexerPaged, LengthsOfQueries) {
  for (const std::int64_t seqlen_q : {1, 2, 5}) {
    check({.seqlen_q = seqlen_q, .lengths = {0, 64, 310, 129, 1 << 30, -5}, .by_query = true});
    check({.seqlen_q = seqlen_q, .lengths = {7, 200}, .causal = false, .clear = false, .by_query = true, .num_splits = 2});
  }
}

TEST_P(IndexerPaged, Heads) {
  for (const std::int64_t heads : {1, 16, 24, 32, 64, 65, 128})
    for (const std::int64_t seqlen_q : {1, 2}) check({.seqlen_q = seqlen_q, .heads = heads, .lengths = {70, 140}});
}

TEST_P(IndexerPaged, ColumnsBeyondLengths) {
  check({.columns = 1000});
  check({.columns = 1000, .clear = false});
  check({.columns = 40});
  check({.columns = 1000, .with_lengths = false});
  check({.columns = 100, .with_lengths = false, .causal = false});
}

TEST_P(IndexerPaged, PagesThatDoNotExist) {
  check({.lengths = {320, 320, 320, 300}, .missing = 0.4});
  check({.seqlen_q = 2, .lengths = {320, 320, 320, 200}, .clear = false, .missing = 0.4});
  check({.lengths = {200, 300}, .missing = 1});
}

TEST_P(IndexerPaged, Nothing) {
  check({.lengths = {}});
  check({.seqlen_q = 0});
  check({.columns = 0});
  check({.table = 0});
  const PlacedTensor none({0, kIndexerPage, kIndexerKeyBytes}, DType::u8, device), q({1, 1, 64, kIndexerDim}, DType::fp8_e4m3, device),
      weights({1, 1, 64}, DType::f32, device), table({1, 3}, DType::i32, device), scores({1, 1, 100}, DType::f32, device);
  if (!launched([&] { indexer_scores_paged(q, none, weights, table, scores); })) return;
  for (const double x : scores.values()) EXPECT_EQ(x, -std::numeric_limits<double>::infinity());
}

TEST_P(IndexerPaged, Splits) {
  for (const int splits : {1, 2, 5, 1024})
    check({.seqlen_q = 2, .table = 11, .lengths = {700, 90, 0, 500}, .columns = 704, .num_splits = splits});
}

TEST_P(IndexerPaged, Memory) {
  for (const std::int64_t gap : {4, 16, 4096}) check({.page_gap = gap});
  check({.seqlen_q = 2, .strided = true});
  check({.lengths = {100, 200, 300}, .shared = true});
}

TEST_P(IndexerPaged, RandomCalls) {
  for (int n = random_cases(6); n > 0; --n) {
    const auto pick = [&](std::int64_t count) { return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(count)); };
    Case c{.seqlen_q = 1 + pick(4),
           .heads = 1 + pick(128),
           .table = 1 + pick(12),
           .lengths = {},
           .columns = 1 + pick(800),
           .causal = pick(2) == 0};
    for (std::int64_t b = 1 + pick(6); b > 0; --b) c.lengths.push_back(pick(c.table * kIndexerPage + 1));
    check(c);
  }
}

}  // namespace
}  // namespace tw::kernels::indexer
