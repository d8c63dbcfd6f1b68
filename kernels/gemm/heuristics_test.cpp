// gemm()'s choice of configurations, plain arithmetic, and the kernels that are registered.

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <string>

#include "kernels/gemm/variants.hpp"
#include "runtime/target.hpp"
#include "tests/support.hpp"
#include "tilewave/gemm.hpp"

namespace tw::kernels::gemm {
namespace {

using namespace tw::test;

constexpr int kUnits = 132;  // an H200's

Config chosen(const Problem& problem) { return configs()[static_cast<std::size_t>(choose_config(problem))]; }

std::int64_t tiles(const Config& c, const Problem& p) {
  const std::int64_t m = (p.m + c.bm - 1) / c.bm;
  return (m + c.cluster - 1) / c.cluster * c.cluster * ((p.n + c.bn - 1) / c.bn) * p.batch;
}

TEST(GemmHeuristics, ChooseSomethingThatTheCallMayUse) {
  std::mt19937_64 random = random_engine();
  const auto extent = [&] { return std::int64_t{1} << random() % 31 | static_cast<std::int64_t>(random() % 1000); };
  const auto one_of = [&](const std::vector<int>& values) { return values[random() % values.size()]; };
  for (int i = 0; i < random_cases(20000); ++i) {
    const Problem p{extent(),
                    extent(),
                    random() % 10 == 0 ? 0 : extent(),
                    random() % 4 == 0 ? extent() : 1,
                    random() % 2 == 0 ? 2 : 4,
                    random() % 2 == 0,
                    random() % 2 == 0,
                    1 + static_cast<int>(random() % 200),
                    one_of({0, max_shared_bytes("sm_80"), max_shared_bytes("sm_86"), max_shared_bytes("sm_90a")})};
    // gemm() refuses products of more tiles than an int counts.
    if (static_cast<double>(p.m) * static_cast<double>(p.n) * static_cast<double>(p.batch) > 1e12) continue;
    const int index = choose_config(p);
    ASSERT_GE(index, 0);
    const std::vector<Config> all = configs(p.generic_shared);
    ASSERT_LT(index, static_cast<int>(all.size()));
    ASSERT_TRUE(valid(all[static_cast<std::size_t>(index)], p)) << p.m << " x " << p.n << " x " << p.k << ", " << p.generic_shared;
  }
}

TEST(GemmHeuristics, LargeProductsTakeWideTiles) {
  for (const std::int64_t size : {4096, 8192, 16384}) EXPECT_GE(chosen({size, size, size, 1, 2, false, false, kUnits}).bn, 192) << size;
}

TEST(GemmHeuristics, TeamsTakeManyTilesOfFewSteps) {
  Problem p{12000, 5120, 1280, 1, 2, false, false, kUnits};
  EXPECT_EQ(chosen(p).teams, 2);
  p.addends = p.begins = true;
  EXPECT_EQ(chosen(p).teams, 1) << "addends take registers";
  p.addends = p.begins = false;
  p.column_step = 64;
  EXPECT_EQ(chosen(p).teams, 1) << "so does a rotation";
  EXPECT_EQ(chosen(p).bn % 64, 0);
  p.column_step = 1;
  p.pairs = true;
  EXPECT_EQ(chosen(p).teams, 1);
  p.pairs = false;
  p.element_bytes = 4;
  EXPECT_EQ(chosen(p).teams, 1);
  EXPECT_EQ(chosen({1500, 1280, 5120, 1, 2, false, false, kUnits}).teams, 1) << "one round of tiles";
}

TEST(GemmHeuristics, FewRowsTakeLowTiles) {
  for (const std::int64_t m : {1, 2, 16, 63, 64})
    for (const std::int64_t n : {256, 1280, 4096}) EXPECT_EQ(chosen({m, n, 4096, 1, 2, false, false, kUnits}).bm, 64) << m << " x " << n;
}

TEST(GemmHeuristics, SmallProductsFillMoreUnits) {
  for (const std::int64_t size : {256, 384, 512, 768}) {
    const Problem p{size, size, 1024, 1, 2, false, false, kUnits};
    EXPECT_GT(std::min<std::int64_t>(tiles(chosen(p), p), kUnits), std::min<std::int64_t>(tiles(configs()[0], p), kUnits)) << size;
  }
}

TEST(GemmHeuristics, SharesAreChosenWhereTheyAreFaster) {
  std::mt19937_64 random = random_engine();
  const auto extent = [&](unsigned most) { return std::int64_t{64} + static_cast<std::int64_t>(random() % most); };
  int chosen = 0;
  for (int i = 0; i < random_cases(20000); ++i) {
    Problem p{extent(8192), extent(8192), extent(16384), 1, 2, random() % 4 == 0, random() % 2 == 0, kUnits};
    p.begins = p.addends && random() % 2 == 0;
    const Choice whole{configs()[static_cast<std::size_t>(choose_config(p))]}, any = choose(p, true);
    EXPECT_EQ(choose(p, false).splits, 1);
    if (any.splits != kStreamK) continue;
    ++chosen;
    ASSERT_TRUE(valid_stream_k(any.tile, p));
    ASSERT_LT(predicted_time(p, costed(any.tile), kStreamK), 0.85 * predicted_time(p, costed(whole.tile), 1));
  }
  EXPECT_GT(chosen, 0);
  Problem generic{1500, 1280, 8192, 1, 2, false, false, kUnits, max_shared_bytes("sm_86")};
  EXPECT_NE(choose(generic, true).splits, kStreamK);
}

TEST(GemmHeuristics, ABatchOfProductsIsAsGoodAsATallOne) {
  // The same tiles, whether they come from one tall product or from a batch whose rows fill their tiles.
  for (const std::int64_t batch : {1, 2, 4, 16, 64}) {
    const Problem tall{256 * batch, 1024, 1024, 1, 2, false, false, kUnits}, stack{256, 1024, 1024, batch, 2, false, false, kUnits};
    EXPECT_EQ(choose_config(tall), choose_config(stack)) << batch;
  }
}

TEST(GemmHeuristics, EveryConfigurationFitsTheHardware) {
  for (const Config& c : configs()) {
    EXPECT_EQ(c.bm % 64, 0);
    EXPECT_EQ(c.bn % 8, 0);
    EXPECT_GE(c.stages, 2) << "a product is in flight while the next slot is taken";
    EXPECT_TRUE(c.cluster == 1 || c.cluster == 2);
  }
}

TEST(GemmHeuristics, AnIndexNamesTheSameTilesForEveryProblem) {
  for (const char* arch : {"sm_80", "sm_86", "sm_90a"}) {
    const std::int64_t shared = max_shared_bytes(arch);
    const std::vector<Config> all = configs(shared);
    Problem p{4096, 4096, 4096, 1, 2, false, false, kUnits, shared};
    for (const Config& c : all) {
      p.addends = false;
      EXPECT_TRUE(valid(c, p)) << arch;
      p.addends = true;
      EXPECT_EQ(valid(c, p), c.bm <= 128 ? c.bn <= 128 : c.bm <= 192 && c.bn <= 96) << arch;
    }
    EXPECT_LE(all[static_cast<std::size_t>(choose_config(p))].bn, 128) << arch;
    EXPECT_FALSE(valid(configs()[0], p)) << arch << ": clusters are sm_90a's";
  }
}

TEST(GemmRegistered, NamesAreUniqueAndLaunchesPossible) {
  std::set<std::string> names, kernels;
  for (const KernelSpec& spec : specs_of(registered())) {
    EXPECT_TRUE(names.insert(spec.name).second) << spec.name << " twice";
    EXPECT_TRUE(kernels.insert(spec.type + " on " + spec.target).second) << spec.name << " is another name's kernel";
    EXPECT_NE(find_embedded(spec.source), nullptr) << spec.source;
  }
  EXPECT_FALSE(names.empty());
}

}  // namespace
}  // namespace tw::kernels::gemm
