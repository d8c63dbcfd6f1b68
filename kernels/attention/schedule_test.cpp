// The schedules that ship for GPUs, on the CPU: their results, and that their rings are used in order where tiles follow each other in a
// block.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "kernels/attention/call.hpp"
#include "kernels/attention/heuristics.hpp"
#include "kernels/attention/reference.hpp"
#include "tests/accuracy.hpp"
#include "tests/support.hpp"

namespace tw::kernels::attention {
namespace {

using namespace tw::test;
/// Causal attention, with a softcap or without, and in chunks of `chunk` keys if it is not 0.
template <int D, TileUse use, bool kSoftcap = false, int chunk = 0>
void expect_right_on_the_cpu() {
  constexpr AttentionConfig config = gpu_config({D, D}, use, kEqualLengths, {.changing = kSoftcap});
  using List = Rules<Optional<Softcap, kSoftcap ? Use::always : Use::never>, Optional<Alibi, Use::never>, Optional<MaskTensor, Use::never>,
                     Band<false, true, (chunk > 0)>>;
  std::mt19937_64 random = random_engine();
  const std::int64_t heads = 4, rows = 2 * config.rows + 5, keys = 2 * config.keys + 7;
  std::vector<float> values[3];
  const auto normal = [&](Shape shape, std::vector<float>& numbers) {
    const Tensor tensor = Tensor::empty(std::move(shape), DType::bf16);
    std::normal_distribution<float> distribution;
    for (std::int64_t i = 0; i < tensor.numel(); ++i) {
      tensor.data<bf16>()[i] = bf16(distribution(random));
      numbers.push_back(static_cast<float>(tensor.data<bf16>()[i]));
    }
    return tensor;
  };
  const Tensor q = normal({1, rows, heads, D}, values[0]), k = normal({1, keys, heads, D}, values[1]),
               v = normal({1, keys, heads, D}, values[2]);
  const Tensor o = Tensor::poisoned(q.shape(), DType::bf16);
  const AttentionOptions options{.causal = true, .causal_offset = 0, .attention_chunk = chunk, .softcap = kSoftcap ? 2.0f : 0.0f};
  const detail::AttentionCall call = detail::check_attention(q, k, v, o, options);
  launch_cpu<Attention<bf16, config, List>>(detail::attention_grid(call, config.rows), [&](auto& bind, auto& p) {
    detail::fill_attention<List>(bind, p, call, config.keys, kNoUserRule);
  });

  PlainCall plain{.batch = 1, .heads = heads, .kv_heads = heads, .seqlen_q = rows, .seqlen_k = keys, .head_dim = D};
  plain.scale = 1 / std::sqrt(static_cast<double>(D));
  plain.causal = true;
  plain.causal_offset = 0;
  plain.chunk = chunk;
  plain.softcap = options.softcap;
  plain.q = values[0], plain.k = values[1], plain.v = values[2];
  std::vector<double> got;
  for (std::int64_t i = 0; i < o.numel(); ++i) got.push_back(static_cast<float>(o.data<bf16>()[i]));
  EXPECT_TRUE(accurate({got, reference(plain).o, naive(plain, DType::bf16).o, arithmetic_of(DType::bf16, Device::cpu())}));
}

TEST(AttentionChunks, BeginWhereDivisionSays) {
  std::mt19937_64 random = random_engine();
  const auto below = [&](std::int64_t end) { return static_cast<int>(random() % static_cast<std::uint64_t>(end)); };
  for (int i = 0; i < 20000; ++i) {
    const int power = 1 << below(30), near = power + below(5) - 2, size = std::clamp(i % 2 == 0 ? near : 1 + below(power), 1, 1 << 29);
    const Chunks chunks = Chunks::of(size);
    const auto begin_of = [&](std::int64_t position) { return position - (position % size + size) % size; };
    const std::int64_t most = 1 << 30, least = -(1 << 29), multiple = begin_of(below(most - least) + least);
    for (const std::int64_t at :
         std::initializer_list<std::int64_t>{multiple - 1, multiple, multiple + 1, multiple + size - 1, least, most - 1, 0, -1}) {
      if (at < least || at >= most) continue;
      ASSERT_EQ(chunks.begin(static_cast<int>(at)), begin_of(at)) << at << " in chunks of " << size;
    }
  }
  const Chunks none = Chunks::of(0);
  for (const int at : {-(1 << 29), -1, 0, 1, (1 << 30) - 1}) {
    EXPECT_LE(none.begin(at), -(1 << 29));
    EXPECT_GE(none.begin(at) + none.size - 1, (1 << 30) - 2);
  }
}

// Queries in registers.
TEST(ShippedAttention, NarrowTiles) {
  expect_right_on_the_cpu<64, TileUse::narrow>();
  expect_right_on_the_cpu<192, TileUse::narrow>();  // too many for registers
}
// No output in flight; maxima before the exponents.
TEST(ShippedAttention, PairedTiles) { expect_right_on_the_cpu<64, TileUse::paired>(); }
// Blocks that are cut where a row's first key lies in the middle of a tile's keys.
TEST(ShippedAttention, Chunks) {
  expect_right_on_the_cpu<64, TileUse::paired, false, 40>();
  expect_right_on_the_cpu<128, TileUse::narrow, false, 100>();
  expect_right_on_the_cpu<96, TileUse::wide, true, 150>();
}
// Queries given back early; rules in halves.
TEST(ShippedAttention, WideTilesWithASoftcap) { expect_right_on_the_cpu<96, TileUse::wide, true>(); }

/// e4m3 with descales, of which each head has its own. The CPU's operands keep the order of columns (block.convert()), so the keys of the
/// transposed values are in their own order here.
template <int D, bool kSoftcap = false>
void expect_fp8_right_on_the_cpu() {
  constexpr AttentionConfig config = fp8_config({D, D}, false, {.changing = kSoftcap});
  using List = Rules<Optional<Softcap, kSoftcap ? Use::always : Use::never>, Optional<Alibi, Use::never>, Optional<MaskTensor, Use::never>,
                     Band<false, true>>;
  std::mt19937_64 random = random_engine();
  const std::int64_t heads = 4, kv_heads = 2, rows = 2 * config.rows + 5, keys = 3 * config.keys + 7;
  std::normal_distribution<float> normal;
  const Tensor q = Tensor::empty({1, rows, heads, D}, DType::fp8_e4m3), k = Tensor::empty({1, keys, kv_heads, D}, DType::fp8_e4m3),
               v = Tensor::empty(k.shape(), DType::fp8_e4m3);
  const float q_factors[] = {0.7f, 1.4f}, k_factors[] = {1.1f, 0.5f}, v_factors[] = {3, 0.3f};
  std::vector<float> values[3];
  const auto fill = [&](const Tensor& t, const float* factors, std::vector<float>& numbers) {
    const std::int64_t group = t.shape(2) / kv_heads;
    for (std::int64_t i = 0; i < t.numel(); ++i) {
      t.data<fp8_e4m3>()[i] = fp8_e4m3(normal(random));
      numbers.push_back(static_cast<float>(t.data<fp8_e4m3>()[i]) * factors[i / D % t.shape(2) / group]);
    }
  };
  fill(q, q_factors, values[0]);
  fill(k, k_factors, values[1]);
  fill(v, v_factors, values[2]);
  const auto descale = [&](const float* factors) { return Tensor::from(std::span<const float>(factors, 2), {1, kv_heads}); };
  const Tensor of_q = descale(q_factors), of_k = descale(k_factors), of_v = descale(v_factors),
               o = Tensor::poisoned(q.shape(), DType::bf16);
  const AttentionOptions options{.causal = true,
                                 .causal_offset = static_cast<int>(keys - rows),
                                 .softcap = kSoftcap ? 2.0f : 0.0f,
                                 .q_descale = &of_q,
                                 .k_descale = &of_k,
                                 .v_descale = &of_v};
  detail::AttentionCall call = detail::check_attention(q, k, v, o, options);
  const Tensor transposed = Tensor::empty({1, kv_heads, D, keys}, DType::fp8_e4m3);
  for (std::int64_t i = 0; i < v.numel(); ++i)
    transposed.data<fp8_e4m3>()[(i / D % kv_heads * D + i % D) * keys + i / D / kv_heads] = v.data<fp8_e4m3>()[i];
  call.v = transposed;
  call.values_transposed = true;
  launch_cpu<Attention<fp8_e4m3, config, List, bf16>>(detail::attention_grid(call, config.rows), [&](auto& bind, auto& p) {
    detail::fill_attention<List>(bind, p, call, config.keys, kNoUserRule);
  });

  PlainCall plain{.batch = 1, .heads = heads, .kv_heads = kv_heads, .seqlen_q = rows, .seqlen_k = keys, .head_dim = D};
  plain.scale = 1 / std::sqrt(static_cast<double>(D));
  plain.causal = true;
  plain.causal_offset = keys - rows;
  plain.softcap = options.softcap;
  plain.q = values[0], plain.k = values[1], plain.v = values[2];
  std::vector<double> got;
  for (std::int64_t i = 0; i < o.numel(); ++i) got.push_back(static_cast<float>(o.data<bf16>()[i]));
  EXPECT_TRUE(accurate({.out = got,
                        .reference = reference(plain).o,
                        .naive = naive_fp8(plain, DType::bf16, 0).o,
                        .arithmetic = Arithmetic::bf16,
                        .factor = 3,
                        .relative_l2 = 5e-2}));
}

TEST(ShippedAttention, Fp8) {
  expect_fp8_right_on_the_cpu<64>();
  expect_fp8_right_on_the_cpu<128>();
  expect_fp8_right_on_the_cpu<256>();
}
TEST(ShippedAttention, Fp8WithASoftcap) { expect_fp8_right_on_the_cpu<128, true>(); }

TEST(ShippedAttention, SchedulesFollowFromSizesAndRules) {
  const auto expect = [](const AttentionConfig& got, AttentionConfig expected) {
    expected.form = got.form;
    EXPECT_EQ(got, expected) << got.head_dim << " " << got.rows << " x " << got.keys;
  };
  expect(gpu_config({64, 64}, TileUse::widest),
         {.head_dim = 64, .value_dim = 64, .rows = 256, .keys = 64, .stages = 4, .queries_back_early = true, .maxima_first = true});
  expect(gpu_config({64, 64}, TileUse::wide),
         {.head_dim = 64, .value_dim = 64, .rows = 192, .keys = 128, .stages = 3, .queries_back_early = true, .maxima_first = true});
  expect(
      gpu_config({64, 64}, TileUse::narrow),
      {.head_dim = 64, .value_dim = 64, .rows = 128, .keys = 128, .stages = 2, .queries_in_registers = true, .queries_back_early = true});
  expect(gpu_config({64, 64}, TileUse::paired), {.head_dim = 64,
                                                 .value_dim = 64,
                                                 .rows = 128,
                                                 .keys = 64,
                                                 .stages = 4,
                                                 .min_blocks = 2,
                                                 .lag = 0,
                                                 .queries_back_early = true,
                                                 .maxima_first = true});
  expect(gpu_config({96, 96}, TileUse::wide, kRagged, {.changing = true}),
         {.head_dim = 96, .value_dim = 96, .rows = 192, .keys = 96, .stages = 2, .queries_back_early = true, .rules_in_halves = true});
  expect(gpu_config({128, 128}, TileUse::narrow),
         {.head_dim = 128, .value_dim = 128, .rows = 128, .keys = 128, .stages = 2, .queries_in_registers = true});
  expect(gpu_config({128, 128}, TileUse::narrow, kEqualLengths, {.anywhere = true, .changing = true}),  // a mask
         {.head_dim = 128, .value_dim = 128, .rows = 128, .keys = 128, .stages = 2, .maxima_first = true});
  expect(gpu_config({128, 128}, TileUse::narrow, kEqualLengths, {.user = true}),
         {.head_dim = 128, .value_dim = 128, .rows = 128, .keys = 128, .stages = 2});
  expect(gpu_config({192, 128}, TileUse::narrow), {.head_dim = 192, .value_dim = 128, .rows = 128, .keys = 96, .stages = 2});
  expect(gpu_config({256, 256}, TileUse::narrow), {.head_dim = 256, .value_dim = 256, .rows = 128, .keys = 64, .stages = 2});
  expect(gpu_config({64, 64}, TileUse::split),
         {.head_dim = 64, .value_dim = 64, .rows = 64, .keys = 128, .stages = 4, .queries_back_early = true});
  expect(gpu_config({128, 128}, TileUse::split), {.head_dim = 128, .value_dim = 128, .rows = 64, .keys = 128, .stages = 3});
  expect(gpu_config({256, 256}, TileUse::split), {.head_dim = 256, .value_dim = 256, .rows = 64, .keys = 64, .stages = 2});
}

}  // namespace
}  // namespace tw::kernels::attention
