// nsa_select() and nsa_combine() against loops in double, on the CPU and, where there is one, on a GPU.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <tuple>
#include <vector>

#include "kernels/nsa/nsa_case.hpp"
#include "tilewave/nsa.hpp"

namespace tw::kernels::nsa {
namespace {

using namespace tw::test;

class NsaSelect : public testing::TestWithParam<std::tuple<Device, DType>> {
 protected:
  void SetUp() override {
    if (device.is_cuda() && dtype == DType::f32) GTEST_SKIP() << "skipped: f32 is for the CPU";
    skip_unless_present(device);
  }
  /// Of the case: its compressed keys, and how many slots.
  void check(NsaCase c, int initial = 1, int local = 2);
  /// Expects that a token's list is right: see nsa_select().
  void expect_list(const NsaOperands& in, std::int64_t token, std::int64_t head, std::int64_t position, std::int64_t begin,
                   const std::vector<double>& lse, const std::vector<std::int64_t>& list, int initial, int local);

  const Device device = std::get<0>(GetParam());
  const DType dtype = std::get<1>(GetParam());
  std::mt19937_64 random = random_engine();
};

void NsaSelect::expect_list(const NsaOperands& in, std::int64_t token, std::int64_t head, std::int64_t position, std::int64_t begin,
                            const std::vector<double>& lse, const std::vector<std::int64_t>& list, int initial, int local) {
  const NsaCase& c = in.c;
  const auto at = [](std::int64_t i) { return static_cast<std::size_t>(i); };
  const std::int64_t blocks = position < 0 ? 0 : std::min(position / c.block_size + 1, in.keys + 1);
  const std::int64_t complete = std::ssize(in.plain.seen[at(token * c.kv_heads + head)]);
  std::vector<double> scores;
  for (std::int64_t n = 0; n < blocks; ++n) {
    double sum = 0;
    for (std::int64_t g = 0; g < c.group && n < complete; ++g) {
      const std::int64_t row = token * c.kv_heads * c.group + head * c.group + g;
      double s = 0;
      for (std::int64_t d = 0; d < c.head_dim; ++d)
        s += static_cast<double>(in.of_q[at(row * c.head_dim + d)]) *
             static_cast<double>(in.of_k[at(((begin + n) * c.kv_heads + head) * c.head_dim + d)]);
      sum += std::exp(s * in.plain.scale - lse[at(row)]);
    }
    scores.push_back(sum);
  }
  const auto always = [&](std::int64_t n) { return n < initial || n >= blocks - local; };
  const std::int64_t taken = std::min(blocks, c.slots);
  std::vector<bool> listed(at(blocks));
  for (std::int64_t n = 0; n < c.slots; ++n) {
    if (n >= taken) {
      EXPECT_EQ(list[at(n)], -1);
      continue;
    }
    ASSERT_TRUE(list[at(n)] >= 0 && list[at(n)] < blocks) << list[at(n)] << " of " << blocks;
    EXPECT_FALSE(listed[at(list[at(n)])]) << "twice: " << list[at(n)];
    listed[at(list[at(n)])] = true;
  }
  if (taken > 0 && local > 0) {
    EXPECT_EQ(list[0], blocks - 1);
  }
  // Those that are always taken, then none that is left out has a larger score than one that is listed; 1e-4 for sums in f32.
  double least = 1e30, most_left = 0;
  bool all_always = true;
  for (std::int64_t n = 0; n < blocks; ++n) {
    if (always(n))
      all_always = all_always && listed[at(n)];
    else if (listed[at(n)])
      least = std::min(least, scores[at(n)]);
    else
      most_left = std::max(most_left, scores[at(n)]);
  }
  std::int64_t count_always = 0;
  for (std::int64_t n = 0; n < blocks; ++n) count_always += always(n) ? 1 : 0;
  if (count_always <= c.slots) {
    EXPECT_TRUE(all_always);
  }
  EXPECT_LE(most_left, least * (1 + 1e-4) + 1e-6);
  for (std::int64_t n = 1; n < taken; ++n) {
    if (always(list[at(n)]) || always(list[at(n - 1)])) continue;
    EXPECT_LE(scores[at(list[at(n)])], scores[at(list[at(n - 1)])] * (1 + 1e-4) + 1e-6) << "not in order at " << n;
  }
}

void NsaSelect::check(NsaCase c, int initial, int local) {
  c.compressed = true;
  SCOPED_TRACE(c.describe());
  NsaOperands in(c, dtype, device, random);
  PlacedTensor o({c.batch, c.tokens, c.kv_heads * c.group, c.value_dim}, dtype, device),
      lse({c.batch, c.tokens, c.kv_heads * c.group}, DType::f32, device),
      lists({c.batch, c.tokens, c.kv_heads, c.slots}, DType::i32, device);
  in.options.lse = &lse.tensor();
  const NsaSelectOptions options{.block_size = c.block_size,
                                 .scale = c.scale,
                                 .initial_blocks = initial,
                                 .local_blocks = local,
                                 .cu_seqlens = in.options.cu_seqlens,
                                 .cu_seqlens_k = in.options.cu_seqlens_k,
                                 .seqlens = in.options.seqlens};
  if (!launched([&] {
        nsa_compressed(in.q, in.k, in.v, o, in.options);
        nsa_select(in.q, in.k, lse, lists, options);
      }))
    return;
  EXPECT_TRUE(lists.gaps_intact());
  const std::vector<double> of_lse = lse.values(), of_lists = lists.values();
  std::int64_t token = 0;
  const auto expect_token = [&](std::int64_t position, std::int64_t begin) {
    for (std::int64_t head = 0; head < c.kv_heads; ++head) {
      SCOPED_TRACE(tw::format("token {} head {}", token, head));
      const auto first = of_lists.begin() + (token * c.kv_heads + head) * c.slots;
      std::vector<std::int64_t> list;
      std::transform(first, first + c.slots, std::back_inserter(list), [](double x) { return static_cast<std::int64_t>(x); });
      expect_list(in, token, head, position, begin, of_lse, list, initial, local);
    }
    ++token;
  };
  if (!c.packed.empty()) {
    std::int64_t begin = 0;
    for (const std::int64_t length : c.packed) {
      for (std::int64_t i = 0; i < length; ++i) expect_token(i, begin);
      begin += length / c.block_size;
    }
    return;
  }
  for (std::int64_t b = 0; b < c.batch; ++b) {
    const std::int64_t length = c.lengths.empty() ? c.tokens : c.lengths[static_cast<std::size_t>(b)];
    for (std::int64_t i = 0; i < c.tokens; ++i) expect_token(length - c.tokens + i, b * in.keys);
  }
}

std::string case_name(const testing::TestParamInfo<std::tuple<Device, DType>>& info) {
  const auto& [device, dtype] = info.param;
  return tw::format("{}_{}", device.is_cuda() ? "cuda" : "cpu", name_of(dtype));
}

INSTANTIATE_TEST_SUITE_P(Ops, NsaSelect,
                         testing::Combine(testing::ValuesIn(kDevices), testing::Values(DType::bf16, DType::f16, DType::f32)), case_name);

TEST_P(NsaSelect, Sizes) {
  for (const std::int64_t tokens : {1, 31, 32, 33, 300}) check({.tokens = tokens, .kv_heads = 1});
  check({.batch = 2, .tokens = 130, .slots = 2});
  check({.tokens = 4500, .kv_heads = 1, .group = 2, .head_dim = 16, .value_dim = 16, .slots = 16});  // more blocks than a step's keys
}

TEST_P(NsaSelect, Groups) {
  for (const std::int64_t group : {1, 5, 17, 33, 64}) check({.tokens = 200, .kv_heads = 2, .group = group, .head_dim = 128});
}

TEST_P(NsaSelect, BlocksThatAreAlwaysTaken) {
  for (const int initial : {0, 1, 3})
    for (const int local : {0, 1, 2}) check({.tokens = 260, .kv_heads = 1, .group = 4, .slots = 6}, initial, local);
  check({.tokens = 260, .kv_heads = 1, .slots = 2}, 2, 3);
  check({.tokens = 260, .kv_heads = 1, .slots = 1});
}

TEST_P(NsaSelect, PackedSequences) { check({.tokens = 300, .packed = {0, 31, 64, 205, 0}}); }

TEST_P(NsaSelect, Decoding) { check({.batch = 4, .tokens = 1, .capacity = 640, .lengths = {1, 640, 33, 0}}); }

TEST_P(NsaSelect, EqualScoresAreInTheOrderOfTheSequence) {
  constexpr std::int64_t kTokens = 320, kSlots = 5;
  const Stream stream = Stream::standard(device);
  const Tensor q = Tensor::zeros({1, kTokens, 16, 64}, dtype, stream), k = Tensor::zeros({1, kTokens / 32, 1, 64}, dtype, stream);
  PlacedTensor lse({1, kTokens, 16}, DType::f32, device), lists({1, kTokens, 1, kSlots}, DType::i32, device);
  const Tensor o = Tensor::zeros(q.shape(), dtype, stream);
  if (!launched([&] {
        nsa_compressed(q, k, k, o, {.block_size = 32, .lse = &lse.tensor()});
        nsa_select(q, k, lse, lists, {.block_size = 32});
      }))
    return;
  const std::vector<double> got = lists.values();
  const std::vector<double> last(got.end() - kSlots, got.end());
  EXPECT_EQ(last, (std::vector<double>{9, 0, 8, 1, 2}));
}

TEST_P(NsaSelect, CombinesBranches) {
  std::bernoulli_distribution coin;
  for (const DType gate_dtype : {dtype, DType::f32}) {
    for (const std::int64_t heads : {1, 16, 19}) {
      const Shape shape{2, 5, heads, 72};
      PlacedTensor x({2, 5, heads, 72}, dtype, device, {.order = {0, 2, 1, 3}}), y(shape, dtype, device), z(shape, dtype, device),
          o(shape, dtype, device);
      PlacedTensor a({2, 5, heads}, gate_dtype, device, {.order = {2, 1, 0}, .step = 3}), b({2, 5, heads}, gate_dtype, device),
          c({2, 5, heads}, gate_dtype, device);
      const std::vector<float> xs = x.fill_random(random), ys = y.fill_random(random), zs = z.fill_random(random);
      const std::vector<float> as = a.fill_random(random), bs = b.fill_random(random), cs = c.fill_random(random);
      const bool second = coin(random);
      if (!launched([&] {
            nsa_combine(o, {&x.tensor(), second ? &y.tensor() : nullptr, &z.tensor()},
                        {&a.tensor(), second ? &b.tensor() : nullptr, &c.tensor()});
          }))
        return;
      std::vector<double> expected, naive;
      for (std::size_t n = 0; n < xs.size(); ++n) {
        const float sum = as[n / 72] * xs[n] + (second ? bs[n / 72] * ys[n] : 0) + cs[n / 72] * zs[n];
        const auto product = [&](const std::vector<float>& g, const std::vector<float>& v) {
          return static_cast<double>(g[n / 72]) * static_cast<double>(v[n]);
        };
        expected.push_back(product(as, xs) + (second ? product(bs, ys) : 0) + product(cs, zs));
        naive.push_back(static_cast<double>(round_to(dtype, sum)));
      }
      EXPECT_TRUE(
          accurate({.out = o.values(), .reference = expected, .naive = naive, .arithmetic = arithmetic_of(dtype, device), .terms = 3}));
      EXPECT_TRUE(o.gaps_intact());
    }
  }
}

}  // namespace
}  // namespace tw::kernels::nsa
