// Products in shares of K: how steps are divided, and the kernel, which gemm() uses on GPUs only, on the CPU target.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "kernels/gemm/launch.hpp"
#include "kernels/gemm/reference.hpp"
#include "runtime/format.hpp"
#include "tests/accuracy.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"
#include "tilewave/tile/cpu/target.tile.hpp"

namespace tw::kernels::gemm {
namespace {

using namespace tw::test;

/// Goes through the parts in their order, as blocks take them.
void check_shares(const Shares& shares) {
  SCOPED_TRACE(tw::format("{} tiles of {} steps, {} blocks: {} whole, shares of {} steps", shares.tiles, shares.tile_steps, shares.blocks,
                          shares.whole, shares.steps));
  ASSERT_EQ(shares.whole % shares.blocks, 0) << "parts are dealt to blocks in turn";
  ASSERT_LT(shares.tiles - shares.whole, shares.blocks) << "there is a counter for each";
  std::vector<int> done(static_cast<std::size_t>(shares.tiles)), ends(done), first_parts(done);
  std::vector<int> steps_of_share(static_cast<std::size_t>(shares.blocks)), end_of_share(steps_of_share.size(), -1);
  for (int i = 0; i < shares.parts(); ++i) {
    const PartOfTile part = shares.part(i);
    if (part.steps == 0) continue;
    ASSERT_GT(part.steps, 0);
    ASSERT_GE(part.tile, 0);
    ASSERT_LT(part.tile, shares.tiles);
    const auto tile = static_cast<std::size_t>(part.tile);
    done[tile] += part.steps;
    if (i < shares.whole) {
      ASSERT_EQ(part.steps, shares.tile_steps);
      ++first_parts[tile];
      continue;
    }
    ASSERT_EQ(part.share, (i - shares.whole) % shares.blocks) << "a share is one block's";
    const auto share = static_cast<std::size_t>(part.share);
    steps_of_share[share] += part.steps;
    if (part.first > 0) {
      ASSERT_EQ(first_parts[tile], 0) << "ends come before first parts, which wait for them";
      ASSERT_EQ(end_of_share[share], -1) << "a share has memory for one end";
      end_of_share[share] = part.tile;
      ++ends[tile];
      continue;
    }
    ++first_parts[tile];
    ASSERT_EQ(part.other_parts, ends[tile]);
    int from = part.steps;
    for (int other = 1; other <= part.other_parts; ++other) {
      const PartOfTile end = shares.part(shares.whole + part.share + other);
      ASSERT_EQ(end.tile, part.tile);
      ASSERT_EQ(end.first, from);
      from += end.steps;
    }
    ASSERT_EQ(from, shares.tile_steps);
  }
  for (const int steps : done) ASSERT_EQ(steps, shares.tile_steps);
  for (const int parts : first_parts) ASSERT_EQ(parts, 1);
  for (const int steps : steps_of_share) ASSERT_LE(steps, shares.steps);
}

TEST(Shares, HaveEveryStepOnce) {
  std::mt19937_64 random = random_engine();
  for (const int blocks : {1, 2, 7, 132}) {
    for (int i = 0; i < random_cases(200); ++i) {
      const int tiles = 1 + static_cast<int>(random() % static_cast<unsigned>(4 * blocks)), steps = 1 + static_cast<int>(random() % 100);
      check_shares(Shares::of(tiles, steps, blocks));
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

TEST(Shares, AreEqual) {
  for (const int tiles : {139, 150, 198, 263}) {
    const Shares shares = Shares::of(tiles, 64, 132);
    EXPECT_EQ(shares.whole, tiles / 132 * 132);
    EXPECT_LE(shares.steps * 132, std::max((tiles - shares.whole) * 64 + 131, 8 * 132)) << tiles;
  }
  EXPECT_EQ(Shares::of(5 * 132, 64, 132).whole, 5 * 132);
  EXPECT_EQ(Shares::of(3, 5, 132).steps, 8) << "not so few that parts take longer to add than to multiply";
}

struct Case {
  int m, n, k, blocks;
  int batch = 0;
  bool bias = false, residual = false;
  Activation activation = Activation::none;
};

template <Kernel kernel>
void check(const Case& c, std::mt19937_64& random) {
  SCOPED_TRACE(tw::format("m {} n {} k {} batch {} blocks {} bias {} residual {}", c.m, c.n, c.k, c.batch, c.blocks, c.bias, c.residual));
  const Device device = Device::cpu();
  constexpr DType dtype = kernel.dtype;
  const auto shape = [&](std::int64_t rows, std::int64_t cols) { return c.batch > 0 ? Shape{c.batch, rows, cols} : Shape{rows, cols}; };
  const std::vector<int> by_columns = c.batch > 0 ? std::vector{0, 2, 1} : std::vector{1, 0};
  PlacedTensor a(shape(c.m, c.k), dtype, device, {.gap = 3}), b(shape(c.k, c.n), dtype, device, {.order = by_columns, .gap = 5});
  PlacedTensor d(shape(c.m, c.n), dtype, device, {.gap = 1}), residual(shape(c.m, c.n), dtype, device), bias({c.n}, dtype, device);
  const std::vector<float> a_values = a.fill_random(random);
  const std::vector<float> b_values = b.fill_random(random, 1 / std::sqrt(static_cast<float>(c.k)));
  std::vector<float> bias_values, residual_values;
  if (c.bias) bias_values = bias.fill_random(random);
  if (c.residual) residual_values = residual.fill_random(random);
  const Call call = make_call(
      a, b, d,
      {.bias = c.bias ? &bias.tensor() : nullptr, .activation = c.activation, .residual = c.residual ? &residual.tensor() : nullptr});

  PlacedTensor sums({c.blocks, kernel.tile.bm, kernel.tile.bn}, DType::f32, device);
  std::vector<u32> complete(static_cast<std::size_t>(c.blocks));
  const Launch x = make_stream_k_launch(call, kernel, sums, complete.data());
  launch_cpu<HostKernel<kernel>>(x.grid, [&](auto& bind, auto& p) { bind_launch(bind, p, call, x); });

  const PlainCall plain{.m = c.m,
                        .n = c.n,
                        .k = c.k,
                        .batch = c.batch > 0 ? c.batch : 1,
                        .a = a_values,
                        .b = b_values,
                        .bias = bias_values,
                        .residual = residual_values,
                        .a_batched = c.batch > 0,
                        .b_batched = c.batch > 0,
                        .activation = c.activation};
  EXPECT_TRUE(accurate({d.values(), reference(plain), naive(plain, dtype, false), arithmetic_of(dtype, device), c.k}));
  EXPECT_TRUE(d.gaps_intact());
  EXPECT_EQ(complete, std::vector<u32>(complete.size())) << "for the next launch";
}

constexpr Kernel with_tile(DType dtype, Activation activation = Activation::none, bool addends = false, bool begins = false) {
  return {.dtype = dtype, .form = Kernel::stream_k, .activation = activation, .addends = addends, .begins = begins, .tile = {64, 64, 3}};
}

template <DType dtype>
void check_all() {
  cpu::set_poison_released_slots(true);
  std::mt19937_64 random = random_engine();
  for (const int blocks : {1, 3, 7}) {
    check<with_tile(dtype)>({.m = 64, .n = 64, .k = 64, .blocks = blocks}, random);               // one part
    check<with_tile(dtype)>({.m = 100, .n = 70, .k = 1500, .blocks = blocks}, random);            // fewer tiles than blocks
    check<with_tile(dtype)>({.m = 130, .n = 260, .k = 700, .blocks = blocks}, random);            // more
    check<with_tile(dtype)>({.m = 70, .n = 70, .k = 900, .blocks = blocks, .batch = 3}, random);  // of several products
    const Case all{.m = 140, .n = 130, .k = 1000, .blocks = blocks, .bias = true, .residual = true};
    check<with_tile(dtype, Activation::none, true, true)>(all, random);
    check<with_tile(dtype, Activation::none, true)>(all, random);
    check<with_tile(dtype, Activation::gelu_erf)>(
        {.m = 140, .n = 130, .k = 1000, .blocks = blocks, .bias = true, .activation = Activation::gelu_erf}, random);
  }
}

TEST(StreamK, OfBf16IsCorrectOnTheCpu) { check_all<DType::bf16>(); }
TEST(StreamK, OfF16IsCorrectOnTheCpu) { check_all<DType::f16>(); }

}  // namespace
}  // namespace tw::kernels::gemm
