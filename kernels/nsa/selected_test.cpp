// nsa_selected() and nsa_compressed() against loops in double, on the CPU and, where there is one, on a GPU.

#include <gtest/gtest.h>

#include <random>
#include <tuple>

#include "kernels/nsa/nsa_case.hpp"

namespace tw::kernels::nsa {
namespace {

using namespace tw::test;

class NsaSelected : public testing::TestWithParam<std::tuple<Device, DType>> {
 protected:
  void SetUp() override {
    if (device.is_cuda() && dtype == DType::f32) GTEST_SKIP() << "skipped: f32 is for the CPU";
    skip_unless_present(device);
  }
  void check(const NsaCase& c);

  const Device device = std::get<0>(GetParam());
  const DType dtype = std::get<1>(GetParam());
  std::mt19937_64 random = random_engine();
};

void NsaSelected::check(const NsaCase& c) {
  SCOPED_TRACE(c.describe());
  NsaOperands in(c, dtype, device, random);
  PlacedTensor o({c.batch, c.tokens, c.kv_heads * c.group, c.value_dim}, dtype, device, NsaOperands::placement(c)),
      lse({c.batch, c.tokens, c.kv_heads * c.group}, DType::f32, device);
  if (c.lse) in.options.lse = &lse.tensor();
  if (!launched([&] {
        if (c.compressed)
          nsa_compressed(in.q, in.k, in.v, o, in.options);
        else
          nsa_selected(in.q, in.k, in.v, in.indices, o, in.options);
      }))
    return;
  const PlainResult expected = reference(in.plain);
  EXPECT_TRUE(accurate(
      {.out = o.values(), .reference = expected.o, .naive = naive(in.plain, dtype).o, .arithmetic = arithmetic_of(dtype, device)}));
  EXPECT_TRUE(o.gaps_intact());
  EXPECT_TRUE(lse.gaps_intact());
  if (c.lse)
    expect_close(lse.values(), expected.lse);
  else
    EXPECT_TRUE(lse.untouched());
}

std::string case_name(const testing::TestParamInfo<std::tuple<Device, DType>>& info) {
  const auto& [device, dtype] = info.param;
  return tw::format("{}_{}", device.is_cuda() ? "cuda" : "cpu", name_of(dtype));
}

INSTANTIATE_TEST_SUITE_P(Ops, NsaSelected,
                         testing::Combine(testing::ValuesIn(kDevices), testing::Values(DType::bf16, DType::f16, DType::f32)), case_name);

TEST_P(NsaSelected, Sizes) {
  for (const std::int64_t tokens : {1, 7, 8, 9, 65, 131}) check({.tokens = tokens});
  check({.tokens = 300, .kv_heads = 1, .slots = 16});
  check({.batch = 3, .tokens = 37, .slots = 2});
}

TEST_P(NsaSelected, Groups) {
  for (const std::int64_t group : {1, 3, 8, 15, 17, 32, 33, 64}) check({.tokens = 41, .group = group});
}

TEST_P(NsaSelected, HeadDims) {
  check({.tokens = 50, .head_dim = 128, .value_dim = 128});
  check({.tokens = 50, .head_dim = 128, .value_dim = 64});
  check({.tokens = 50, .head_dim = 40, .value_dim = 104});
  check({.tokens = 50, .head_dim = 8, .value_dim = 8});
}

TEST_P(NsaSelected, BlockSizes) {
  for (const int block_size : {32, 64, 128, 192}) check({.tokens = 401, .kv_heads = 1, .slots = 3, .block_size = block_size});
}

TEST_P(NsaSelected, Lists) {
  check({.slots = 0});
  check({.slots = 1, .holes = 0});
  check({.tokens = 70, .holes = 1});
  check({.tokens = 200, .slots = 37, .holes = 0.9});
  check({.tokens = 100, .kv_heads = 1, .slots = kNsaSlots, .holes = 0});
  check({.batch = 2, .tokens = 77, .slots = 5, .counts = true});
}

TEST_P(NsaSelected, PackedSequences) {
  check({.tokens = 1, .packed = {1}});
  check({.tokens = 168, .packed = {0, 33, 1, 0, 128, 6, 0}});
  check({.tokens = 150, .slots = 3, .block_size = 64, .packed = {67, 83}, .counts = true});
}

TEST_P(NsaSelected, Decoding) {
  check({.batch = 5, .tokens = 1, .slots = 3, .capacity = 200, .lengths = {1, 200, 64, 97, 0}});
  check({.batch = 2, .tokens = 1, .group = 64, .slots = 3, .capacity = 90, .lengths = {33, 90}, .counts = true});
  // A few new tokens of each sequence, and lengths that are too small and too large.
  check({.batch = 3, .tokens = 3, .slots = 3, .capacity = 150, .lengths = {2, 150, 77}});
  check({.batch = 2, .tokens = 1, .slots = 6, .capacity = 150, .lengths = {-5, 1000}});
}

TEST_P(NsaSelected, NoTokensOrKeys) {
  check({.tokens = 0});
  check({.batch = 0});
  check({.kv_heads = 0});
  check({.tokens = 4, .capacity = 3, .lengths = {0}});
}

TEST_P(NsaSelected, StridesScalesAndLargeScores) {
  check({.batch = 2, .tokens = 45, .strided = true});
  check({.batch = 2, .tokens = 45, .capacity = 60, .lengths = {50, 60}, .strided = true, .lse = false});
  check({.tokens = 45, .scale = 0.31f, .lse = false});
  // Scores of hundreds: weights of one key, and maxima that grow from block to block.
  check({.tokens = 150, .slots = 6, .magnitude = 6});
}

TEST_P(NsaSelected, RandomCases) {
  std::uniform_real_distribution<double> uniform;
  const auto below = [&](std::int64_t n) { return static_cast<std::int64_t>(uniform(random) * static_cast<double>(n)); };
  for (int n = 0; n < random_cases(16); ++n) {
    const bool compressed = below(4) == 0;
    check({.batch = 1 + below(3),
           .tokens = 1 + below(90),
           .kv_heads = 1 + below(3),
           .group = 1 + below(20),
           .head_dim = 8 * (1 + below(16)),
           .value_dim = 8 * (1 + below(16)),
           .slots = below(7),
           .block_size = below(2) == 0 ? 32 : 64,
           .counts = !compressed && below(2) == 0,
           .compressed = compressed});
  }
}

TEST_P(NsaSelected, CompressedKeys) {
  for (const std::int64_t tokens : {31, 32, 33, 500}) check({.tokens = tokens, .kv_heads = 1, .compressed = true});
  check({.batch = 2, .tokens = 2200, .kv_heads = 1, .group = 2, .compressed = true});  // more than a step's keys
  check({.tokens = 300, .packed = {0, 31, 64, 205, 0}, .compressed = true});
  check({.batch = 3, .tokens = 1, .capacity = 320, .lengths = {31, 320, 100}, .compressed = true});
}

}  // namespace
}  // namespace tw::kernels::nsa
