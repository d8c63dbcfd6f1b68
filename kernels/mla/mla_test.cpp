// mla_decode() against loops in double, on the CPU and, where there is one, on a GPU.

#include "tilewave/mla.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/mla/kernels.hpp"
#include "kernels/mla/reference.hpp"
#include "runtime/format.hpp"
#include "tests/accuracy.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"

namespace tw::kernels::mla {
namespace {

using namespace tw::test;

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

struct Case {
  std::int64_t heads = 16, seqlen_q = 1;
  std::vector<std::int64_t> lengths = {70};
  std::int64_t capacity = 100;
  std::int64_t page_size = 0;  ///< 0: not paged
  int num_splits = 0;
  bool causal = true, full = false, lse = true;
  float scale = 0;
  float magnitude = 1;   ///< standard deviation of queries
  bool strided = false;  ///< tensors that are not aligned and have gaps
  bool fp8 = false;      ///< a cache of 8 bits
  float spread = 0;      ///< of its scales: 0.003 times 1 to 5 or, if it is not 0, times 2^-spread to 2^spread, and 0 for every 13th token

  std::string describe() const {
    return tw::format(
        "heads {} Sq {} lengths {} capacity {} page {} splits {} causal {} full {} scale {} magnitude {} strided {} fp8 {} spread {}",
        heads, seqlen_q, tw::join(lengths, ","), capacity, page_size, num_splits, causal, full, scale, magnitude, strided, fp8, spread);
  }
};

class MlaDecode : public testing::TestWithParam<std::tuple<Device, DType>> {
 protected:
  void SetUp() override { skip_unless_present(device); }
  std::vector<double> check(const Case& c);

  const Device device = std::get<0>(GetParam());
  const DType dtype = std::get<1>(GetParam());
  std::mt19937_64 random = random_engine();
};

/// One call with random tensors; gives o.
std::vector<double> MlaDecode::check(const Case& c) {
  SCOPED_TRACE(c.describe());
  const auto batch = std::ssize(c.lengths);
  const std::int64_t pages = c.page_size > 0 ? (c.capacity + c.page_size - 1) / c.page_size : 1;  // of a sequence
  const std::int64_t page_size = c.page_size > 0 ? c.page_size : c.capacity, capacity = pages * page_size;
  const std::int64_t entries = c.page_size > 0 ? batch * pages + 3 : batch;
  std::vector<std::int64_t> numbers(index(entries));
  std::iota(numbers.begin(), numbers.end(), 0);
  if (c.page_size > 0) std::shuffle(numbers.begin(), numbers.end(), random);

  // Tokens of sequences have numbers, everything else of the cache is NaN.
  std::vector<float> cache(index(entries * page_size * kMlaKeyDim), kNaN), kv(index(batch * capacity * kMlaKeyDim), 0.0f);
  std::normal_distribution<float> normal;
  for (std::int64_t b = 0; b < batch; ++b) {
    for (std::int64_t token = 0; token < c.lengths[index(b)]; ++token) {
      const std::int64_t entry = numbers[index(b * pages + token / page_size)];
      for (std::int64_t col = 0; col < kMlaKeyDim; ++col)
        kv[index((b * capacity + token) * kMlaKeyDim + col)] = cache[index((entry * page_size + token % page_size) * kMlaKeyDim + col)] =
            round_to(dtype, normal(random));
    }
  }
  // In 8 bits each token has scales of its own, and keys are what its numbers stand for.
  const Tensor bytes = Tensor::empty({entries, page_size, kMlaFp8Bytes}, DType::u8);
  if (c.fp8) {
    std::memset(bytes.data(), 0xff, static_cast<std::size_t>(bytes.numel()));  // NaN in all three types
    for (std::int64_t b = 0; b < batch; ++b) {
      for (std::int64_t token = 0; token < c.lengths[index(b)]; ++token) {
        const std::int64_t entry = numbers[index(b * pages + token / page_size)];
        std::uint8_t* const row = bytes.data<std::uint8_t>() + (entry * page_size + token % page_size) * kMlaFp8Bytes;
        float* const key = kv.data() + (b * capacity + token) * kMlaKeyDim;
        for (std::int64_t col = 0; col < kMlaLatentDim; ++col) {
          const std::int64_t group = col / 128;
          const float wide =
              token % 13 == 0 ? 0.0f : 0.003f * std::exp2(c.spread * static_cast<float>((token * 7 + group * 3) % 11 - 5) / 5);
          const float scale = c.spread > 0 ? wide : 0.003f * static_cast<float>(1 + (token + group) % 5);
          const fp8_e4m3 code(scale > 0 ? key[col] / scale : 1.0f);
          std::memcpy(row + col, &code, 1);
          std::memcpy(row + kMlaLatentDim + col / 128 * 4, &scale, 4);
          key[col] = static_cast<float>(code) * scale;
        }
        for (std::int64_t col = 0; col < kMlaRotaryDim; ++col) {
          const bf16 x(key[kMlaLatentDim + col]);
          std::memcpy(row + kMlaLatentDim + 16 + col * 2, &x, 2);
        }
      }
    }
  }
  std::vector<float> table(numbers.begin(), numbers.begin() + batch * pages);
  for (std::int64_t b = 0; b < batch; ++b)  // of pages without tokens the numbers may be anything
    for (std::int64_t page = 0; page < pages; ++page)
      if (page * page_size >= c.lengths[index(b)]) table[index(b * pages + page)] = page % 2 == 0 ? -1 : 1'000'000;

  const Placement gaps = c.strided ? Placement{.offset = 3, .gap = 5} : Placement{};
  // Tokens of q apart, so that rows of all tokens are not one matrix.
  const Placement by_head = c.strided ? Placement{.order = {0, 2, 1, 3}, .offset = 3, .gap = 5} : Placement{};
  PlacedTensor q({batch, c.seqlen_q, c.heads, kMlaKeyDim}, dtype, device, by_head),
      kv_cache({entries, page_size, kMlaKeyDim}, dtype, device, c.page_size > 0 && c.page_size % 16 != 0 ? Placement{.offset = 3} : gaps),
      seqlens({batch}, DType::i32, device), block_table({batch, pages}, DType::i32, device);
  const std::vector<float> qs = q.fill_random(random, c.magnitude);
  kv_cache.fill(cache);
  seqlens.fill(std::vector<float>(c.lengths.begin(), c.lengths.end()));
  block_table.fill(table);
  PlacedTensor o({batch, c.seqlen_q, c.heads, kMlaLatentDim}, dtype, device, by_head),
      lse({batch, c.heads, c.seqlen_q}, DType::f32, device);
  MlaOptions options{.scale = c.scale, .causal = c.causal, .num_splits = c.num_splits, .check_contents = true};
  if (!c.full) options.seqlens = &seqlens.tensor();
  if (c.page_size > 0) options.block_table = &block_table.tensor();
  if (c.lse) options.lse = &lse.tensor();
  const Tensor in_8_bits = c.fp8 ? bytes.to(device) : Tensor();
  if (!launched([&] { mla_decode(q, c.fp8 ? in_8_bits : kv_cache.tensor(), o, options); })) return {};

  const double scale = c.scale > 0 ? static_cast<double>(c.scale) : 1 / std::sqrt(static_cast<double>(kMlaKeyDim));
  const PlainMla plain(qs, kv, c.lengths, c.seqlen_q, c.heads, scale, c.causal);
  const attention::PlainResult expected = attention::reference(plain.call), naive = attention::naive(plain.call, dtype);
  std::vector<double> got = o.values();
  EXPECT_TRUE(accurate({.out = got, .reference = expected.o, .naive = naive.o, .arithmetic = arithmetic_of(dtype, device)}));
  EXPECT_TRUE(o.gaps_intact());
  if (!c.lse) {
    EXPECT_TRUE(lse.untouched());
    return got;
  }
  const std::vector<double> got_lse = lse.values();
  for (std::size_t n = 0; n < got_lse.size(); ++n) {
    if (std::isinf(expected.lse[n]))
      EXPECT_EQ(got_lse[n], expected.lse[n]) << n;
    else
      EXPECT_NEAR(got_lse[n], expected.lse[n], 1e-3 + (c.fp8 ? kFp8KeyError * std::abs(expected.lse[n]) : 0)) << n;
  }
  EXPECT_TRUE(lse.gaps_intact());
  return got;
}

std::string case_name(const testing::TestParamInfo<std::tuple<Device, DType>>& info) {
  const auto& [device, dtype] = info.param;
  return tw::format("{}_{}", device.is_cuda() ? "cuda" : "cpu", name_of(dtype));
}

INSTANTIATE_TEST_SUITE_P(Ops, MlaDecode, testing::Combine(testing::ValuesIn(kDevices), testing::Values(DType::bf16, DType::f16)),
                         case_name);

TEST_P(MlaDecode, Lengths) {
  check({.lengths = {0, 1, 63, 64, 65, 100}});
  check({.heads = 3, .lengths = {129}, .capacity = 129, .full = true});
  check({.lengths = {0, 0}, .capacity = 5});
  check({.heads = 1, .lengths = {0, 0}, .capacity = 0, .full = true});
}

TEST_P(MlaDecode, RowsOfSeveralTiles) {
  check({.heads = 128, .lengths = {70, 3}});
  check({.heads = 40, .seqlen_q = 2, .lengths = {66}});
}

TEST_P(MlaDecode, NewTokensSeeTheTokensBeforeThem) {
  for (const bool causal : {true, false}) {
    // Lengths of less than seqlen_q: the first tokens see nothing.
    check({.seqlen_q = 4, .lengths = {2, 67, 0, 4}, .causal = causal});
    check({.heads = 24, .seqlen_q = 3, .lengths = {66, 1}, .num_splits = 3, .causal = causal});
  }
}

TEST_P(MlaDecode, Pages) {
  for (const std::int64_t page_size : {1, 16, 64, 7, 48, 128}) {
    check({.lengths = {0, 1, page_size, page_size + 1, 99}, .capacity = 130, .page_size = page_size});
    check({.heads = 16, .seqlen_q = 2, .lengths = {130, 64}, .capacity = 130, .page_size = page_size, .num_splits = 2});
  }
  check({.lengths = {66}, .capacity = 66, .page_size = 11, .full = true});
}

TEST_P(MlaDecode, Splits) {
  for (const int splits : {2, 3, 7}) check({.heads = 20, .lengths = {0, 1, 64, 190, 257}, .capacity = 260, .num_splits = splits});
  check({.lengths = {190}, .capacity = 190, .num_splits = 128, .lse = false});
}

TEST_P(MlaDecode, Strides) {
  check({.seqlen_q = 2, .lengths = {65, 20}, .strided = true});
  check({.seqlen_q = 2, .lengths = {65, 20}, .page_size = 16, .num_splits = 2, .strided = true});
  check({.heads = 5, .lengths = {65}, .page_size = 5, .lse = false, .strided = true});
}

TEST_P(MlaDecode, ScalesAndLargeScores) {
  check({.lengths = {100}, .scale = 0.1352f});
  // Scores of hundreds: weights of one key, and maxima that grow from block to block.
  check({.lengths = {250}, .capacity = 250, .magnitude = 20});
}

TEST_P(MlaDecode, SplitsAndPagesChangeOnlyRoundings) {
  const Case plain{.lengths = {150}, .capacity = 192, .lse = false};
  Case paged = plain, split = plain;
  paged.page_size = 1;
  split.num_splits = 3;
  const auto run = [&](const Case& c) {
    random.seed(1);
    std::vector<double> o = check(c);
    return o;
  };
  run(paged);
  const std::vector<double> expected = run(plain), got = run(split);
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t n = 0; n < got.size(); ++n) ASSERT_NEAR(got[n], expected[n], 2e-3 + 0x1p-7 * std::abs(expected[n])) << n;
}

TEST_P(MlaDecode, CachesOfEightBits) {
  if (dtype != DType::bf16) GTEST_SKIP() << "skipped: such a cache is for bf16";
  if (device.is_cuda() && device_info(device).isa != "sm_90") GTEST_SKIP() << "skipped: such a cache is for Hopper GPUs";
  check({.lengths = {0, 1, 63, 64, 65, 100}, .fp8 = true});
  check({.heads = 70, .seqlen_q = 2, .lengths = {130, 3}, .capacity = 130, .num_splits = 2, .fp8 = true});
  for (const std::int64_t page_size : {1, 16, 64, 7})
    check({.seqlen_q = 2, .lengths = {70, 0, 128}, .capacity = 128, .page_size = page_size, .fp8 = true});
  for (const float magnitude : {1e-4f, 20.0f}) check({.lengths = {250}, .capacity = 250, .magnitude = magnitude, .fp8 = true});
  check({.seqlen_q = 2, .lengths = {0, 30, 200, 255}, .capacity = 255, .fp8 = true, .spread = 7});
  check({.lengths = {300, 1}, .capacity = 300, .page_size = 1, .num_splits = 2, .fp8 = true, .spread = 7});
}

TEST(MlaSplits, BusySms) {
  EXPECT_EQ(mla_splits(128, 128, 8192, 132), 1);  // 256 tiles: two rounds, 0.97 of which are used
  EXPECT_EQ(mla_splits(1, 128, 32768, 132), 64);  // two tiles
  EXPECT_EQ(mla_splits(128, 16, 8192, 132), 1);   // 128 tiles
  EXPECT_EQ(mla_splits(1, 16, 100, 132), 1);      // fewer keys than two blocks
  EXPECT_EQ(mla_splits(1, 16, 1024, 132), 8);     // two blocks each
  EXPECT_EQ(mla_splits(0, 16, 1024, 132), 1);
}

/// The parts of a sequence cover its blocks without gaps, whatever the split.
TEST(MlaWork, SplitsCoverTheKeys) {
  using On = HostKernel<Kernel{}>::On<cpu::Target>;
  constexpr int keys = Kernel{}.keys;
  On::Params p{};
  p.causal = true;
  p.heads = 48;
  p.seqlen_q = 3;
  p.capacity = 1000;
  for (const int seqlen : {-5, 0, 1, 2, 64, 65, 999, 1000, 5000}) {
    const std::int32_t length = seqlen;
    p.seqlens = &length;
    const int used = std::clamp(seqlen, 0, 1000);
    for (const int splits : {1, 2, 3, 16, 128}) {
      p.splits = splits;
      for (int n = 0; n < 3; ++n) {
        int end = 0;
        for (int part = 0; part < splits; ++part) {
          const On::Work w = On::work(p, {part, n, 0});
          EXPECT_EQ(w.begin, end);
          EXPECT_GE(w.blocks, 0);
          EXPECT_LE(w.blocks, used / keys / splits + 1);
          end += w.blocks;
        }
        const int last_token = std::min(n * 64 + 63, 143) / 48;
        EXPECT_EQ(end, (std::clamp(used - 3 + last_token + 1, 0, used) + keys - 1) / keys) << seqlen << " " << splits << " " << n;
      }
    }
  }
}

}  // namespace
}  // namespace tw::kernels::mla
