// The arithmetic of decode_splits() and decode_plan().

#include <gtest/gtest.h>

#include <algorithm>
#include <initializer_list>
#include <string_view>

#include "kernels/attention/variants.hpp"
#include "tests/expect_error.hpp"
#include "tilewave/attention.hpp"

namespace tw {
namespace {

/// The share of multiprocessors that work, over all rounds.
double busy(int sequences, int splits, int multiprocessors) {
  const int parts = sequences * splits, rounds = (parts + multiprocessors - 1) / multiprocessors;
  return static_cast<double>(parts) / (rounds * multiprocessors);
}

TEST(DecodeSplits, OneWhereTheDeviceIsFull) {
  for (const int sequences : {132, 264, 1320, 2112, 100'000}) EXPECT_EQ(decode_splits(sequences, 1 << 17, 128, 132), 1) << sequences;
  EXPECT_EQ(decode_splits(0, 1 << 17, 128, 132), 1);
  EXPECT_EQ(decode_splits(8, 1 << 17, 128, 1), 1);
}

TEST(DecodeSplits, LongCachesKeepADeviceBusy) {
  // Batch 1 with 8 key heads and 131072 keys on an H200, then other numbers of sequences.
  EXPECT_GE(busy(8, decode_splits(8, 131072, 128, 132), 132), 0.9);
  for (int sequences = 1; sequences <= 600; ++sequences)
    EXPECT_GE(busy(sequences, decode_splits(sequences, 131072, 128, 132), 132), 0.85) << sequences;
}

TEST(DecodeSplits, FewestThatReachNineTenthsOfTheBest) {
  for (const int multiprocessors : {1, 2, 78, 132}) {
    for (const int seqlen_k : {0, 127, 128, 1000, 8192, 131072}) {
      for (int sequences = 1; sequences < 300; sequences += 7) {
        for (const int most : {1, 16, 128}) {
          const int limit = std::clamp(seqlen_k / 128, 1, most), splits = decode_splits(sequences, seqlen_k, 128, multiprocessors, most);
          ASSERT_GE(splits, 1);
          ASSERT_LE(splits, limit);
          double best = 0;
          for (int n = 1; n <= limit; ++n) best = std::max(best, busy(sequences, n, multiprocessors));
          ASSERT_GE(busy(sequences, splits, multiprocessors), 0.96 * best) << sequences << " sequences of " << seqlen_k;
          for (int n = 1; n < splits; ++n) ASSERT_LT(busy(sequences, n, multiprocessors), 0.96 * best) << n << " would do";
        }
      }
    }
  }
}

TEST(DecodeSplits, NoPartIsSmallerThanABlock) {
  for (int seqlen_k = 0; seqlen_k < 2000; ++seqlen_k) {
    const int splits = decode_splits(1, seqlen_k, 64, 132);
    if (splits > 1) {
      ASSERT_GE(seqlen_k / splits, 64) << seqlen_k;
    }
  }
  EXPECT_EQ(decode_splits(1, 127, 64, 132), 1);
  EXPECT_EQ(decode_splits(1, 128, 64, 132), 2);
}

TEST(DecodeSplits, GrowWithTheKeys) {
  for (const int sequences : {1, 3, 8, 40, 131, 133}) {
    int before = 1;
    for (int seqlen_k = 0; seqlen_k < 40'000; seqlen_k += 100) {
      const int splits = decode_splits(sequences, seqlen_k, 128, 132);
      ASSERT_GE(splits, before) << sequences << " sequences of " << seqlen_k;
      before = splits;
    }
  }
}

TEST(DecodePlan, FollowsFromTheProblem) {
  const int units = std::max(1, device_info(Device::cpu()).units);
  const DecodeProblem few{.batch = 1, .seqlen_q = 1, .heads = 8, .kv_heads = 2, .seqlen_k = 4096};
  const auto plan = [&](auto change) {
    DecodeProblem problem = few;
    change(problem);
    return decode_plan(problem, Device::cpu());
  };
  EXPECT_EQ(plan([](auto&) {}), decode_splits(2, 4096, 128, units));
  EXPECT_EQ(plan([](auto& p) { p.batch = 3; }), decode_splits(6, 4096, 128, units));
  EXPECT_EQ(plan([](auto& p) { p.seqlen_k = 300; }), decode_splits(2, 300, 128, units));
  EXPECT_EQ(plan([](auto& p) { p.attention_chunk = 256; }), decode_splits(2, 256, 128, units));
  EXPECT_EQ(plan([](auto& p) { p.seqlen_q = 16; }), decode_splits(2, 4096, 128, units));
  EXPECT_EQ(plan([](auto& p) { p.seqlen_q = 17; }), decode_splits(4, 4096, 128, units)) << "a second tile of rows";
  EXPECT_EQ(plan([](auto& p) { p.sm_margin = 1000; }), plan([](auto&) {})) << "a margin is for GPUs";
  EXPECT_EQ(plan([](auto& p) { p.batch = 0; }), 1);
  EXPECT_EQ(plan([](auto& p) { p.heads = p.kv_heads = 0; }), 1);
}

TEST(DecodePlan, SplitsByTilesOfRows) {
  using kernels::attention::planned_splits;
  EXPECT_EQ(planned_splits(2, 1, 4096, 0, 6), 3);
  EXPECT_EQ(planned_splits(2, 64, 4096, 0, 6), 3);
  EXPECT_EQ(planned_splits(2, 65, 4096, 0, 6), 3) << "four tiles of 3 splits are two full rounds";
  EXPECT_EQ(planned_splits(2, 192, 4096, 0, 6), 1) << "six tiles";
  EXPECT_EQ(planned_splits(2, 1, 300, 0, 6), 2);
  EXPECT_EQ(planned_splits(2, 1, 4096, 256, 6), 2) << "a chunk of two blocks";
  EXPECT_EQ(planned_splits(std::int64_t{1} << 29, std::int64_t{1} << 29, 1 << 29, 0, 132), 1);
}

TEST(DecodePlan, BadInput) {
  using test::expect_error;
  const DecodeProblem right{.batch = 1, .seqlen_q = 1, .heads = 8, .kv_heads = 2, .seqlen_k = 4096};
  const auto refused = [&](std::initializer_list<std::string_view> words, auto change) {
    DecodeProblem problem = right;
    change(problem);
    expect_error<InvalidArgument>([&] { decode_plan(problem, Device::cpu()); }, words);
  };
  refused({"decode_plan", "batch is -1"}, [](auto& p) { p.batch = -1; });
  refused({"seqlen_q is -1"}, [](auto& p) { p.seqlen_q = -1; });
  refused({"seqlen_k is 1099511627776", "2^29"}, [](auto& p) { p.seqlen_k = std::int64_t{1} << 40; });
  refused({"heads is 8", "multiple of kv_heads, 3"}, [](auto& p) { p.kv_heads = 3; });
  refused({"heads is 8", "multiple of kv_heads, 0"}, [](auto& p) { p.kv_heads = 0; });
  refused({"attention_chunk is -2"}, [](auto& p) { p.attention_chunk = -2; });
  refused({"sm_margin is -2"}, [](auto& p) { p.sm_margin = -2; });
  refused({"batch is 536870912 and kv_heads 2", "product"}, [](auto& p) { p.batch = 1 << 29; });
}

TEST(DecodeSplits, BadInput) {
  using test::expect_error;
  expect_error<InvalidArgument>([] { decode_splits(-1, 5, 128, 132); }, {"sequences is -1"});
  expect_error<InvalidArgument>([] { decode_splits(1, -5, 128, 132); }, {"seqlen_k -5"});
  expect_error<InvalidArgument>([] { decode_splits(1, 5, 0, 132); }, {"block is 0", "positive"});
  expect_error<InvalidArgument>([] { decode_splits(1, 5, 128, 0); }, {"multiprocessors 0"});
  expect_error<InvalidArgument>([] { decode_splits(1, 5, 128, 132, 0); }, {"most 0"});
}

}  // namespace
}  // namespace tw
