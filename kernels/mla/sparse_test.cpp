// mla_sparse() against loops in double, on the CPU and, where there is one, on a GPU.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/mla/reference.hpp"
#include "runtime/format.hpp"
#include "tests/accuracy.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"
#include "tilewave/mla.hpp"

namespace tw::kernels::mla {
namespace {

using namespace tw::test;

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

struct Case {
  std::int64_t heads = 16, tokens = 2, topk = 70, kv_tokens = 90;
  double holes = 0.2;                        ///< share of entries that name no token
  std::vector<std::int64_t> lengths = {};    ///< topk_length, as given
  std::vector<float> sinks = {};             ///< of heads 0, 1, ..., in turn
  std::int64_t page_size = 0, page_gap = 0;  ///< kv in pages, and tokens between them; 0: one matrix
  int num_splits = 0;
  bool results = true;  ///< lse and max_logits
  float scale = 0, magnitude = 1;
  bool strided = false;  ///< tensors that are not aligned and have gaps
  bool fp8 = false;      ///< a cache of 8 bits

  std::string describe() const {
    return tw::format(
        "heads {} tokens {} topk {} of {} holes {} lengths {} sinks {} pages {}+{} splits {} scale {} magnitude {} strided {} fp8 {}",
        heads, tokens, topk, kv_tokens, holes, tw::join(lengths, ","), sinks.size(), page_size, page_gap, num_splits, scale, magnitude,
        strided, fp8);
  }
};

class MlaSparse : public testing::TestWithParam<std::tuple<Device, DType>> {
 protected:
  void SetUp() override { skip_unless_present(device); }
  void check(const Case& c);

  const Device device = std::get<0>(GetParam());
  const DType dtype = std::get<1>(GetParam());
  std::mt19937_64 random = random_engine();
};

/// A row of 656 bytes, and in `key` the numbers that it stands for.
void quantize(float* key, std::int64_t token, std::uint8_t* row) {
  for (std::int64_t col = 0; col < kMlaLatentDim; ++col) {
    const float scale = 0.003f * static_cast<float>(1 + (token + col / 128) % 5);
    const fp8_e4m3 code(key[col] / scale);
    std::memcpy(row + col, &code, 1);
    std::memcpy(row + kMlaLatentDim + col / 128 * 4, &scale, 4);
    key[col] = static_cast<float>(code) * scale;
  }
  for (std::int64_t col = 0; col < kMlaRotaryDim; ++col) {
    const bf16 x(key[kMlaLatentDim + col]);
    std::memcpy(row + kMlaLatentDim + 16 + col * 2, &x, 2);
  }
}

/// One call with random tensors.
void MlaSparse::check(const Case& c) {
  SCOPED_TRACE(c.describe());
  // Lists, with duplicates and with entries that are no token of the cache.
  const std::int64_t missing[] = {-1, c.kv_tokens, -(std::int64_t{1} << 31), std::int64_t{1} << 30, c.kv_tokens + 1};
  std::vector<std::int64_t> indices(at(c.tokens * c.topk)), lengths(at(c.tokens), c.topk);
  std::uniform_real_distribution<double> uniform;
  std::set<std::int64_t> selected;
  for (std::int64_t& length : lengths)
    if (!c.lengths.empty()) length = std::clamp<std::int64_t>(c.lengths[at(&length - lengths.data())], 0, c.topk);
  for (std::int64_t n = 0; n < std::ssize(indices); ++n) {
    const bool hole = c.kv_tokens == 0 || uniform(random) < c.holes;
    // An odd token is never selected, except by entries after topk_length.
    const bool counts = n % c.topk < lengths[at(n / c.topk)];
    const auto token = static_cast<std::int64_t>(uniform(random) * static_cast<double>(c.kv_tokens) / 2) * 2;
    indices[at(n)] = hole ? missing[random() % 5] : counts ? token : std::min(token + 1, c.kv_tokens - 1);
    if (!hole && counts) selected.insert(token);
  }
  // Everything of the cache that is not selected is NaN.
  const std::int64_t page_size = c.page_size > 0 ? c.page_size : 1;
  ASSERT_EQ(c.kv_tokens % page_size, 0);
  std::vector<float> kv(at(c.kv_tokens * kMlaKeyDim), kNaN);
  std::normal_distribution<float> normal;
  const Tensor bytes = Tensor::empty({c.kv_tokens, kMlaFp8Bytes}, DType::u8);
  std::fill_n(bytes.data<std::uint8_t>(), bytes.numel(), std::uint8_t{0xff});  // NaN in all three types
  for (const std::int64_t token : selected) {
    for (std::int64_t col = 0; col < kMlaKeyDim; ++col) kv[at(token * kMlaKeyDim + col)] = round_to(dtype, normal(random));
    if (c.fp8) quantize(kv.data() + token * kMlaKeyDim, token, bytes.data<std::uint8_t>() + token * kMlaFp8Bytes);
  }
  std::vector<float> sinks;
  for (std::int64_t head = 0; head < c.heads && !c.sinks.empty(); ++head) sinks.push_back(c.sinks[at(head) % c.sinks.size()]);

  const Placement gaps = c.strided ? Placement{.offset = 3, .gap = 5} : Placement{};
  const Placement by_head = c.strided ? Placement{.order = {1, 0, 2}, .offset = 3, .gap = 5} : Placement{};
  PlacedTensor q({c.tokens, c.heads, kMlaKeyDim}, dtype, device, by_head), lists({c.tokens, c.topk}, DType::i32, device, gaps),
      topk_length({c.tokens}, DType::i32, device), sink({c.heads}, DType::f32, device);
  // Pages with tokens between them, which are poison.
  PlacedTensor in_pages({c.kv_tokens / page_size, page_size + c.page_gap, kMlaKeyDim}, dtype, device),
      matrix({c.kv_tokens, kMlaKeyDim}, dtype, device, gaps);
  std::vector<float> spread;
  for (std::int64_t token = 0; token < c.kv_tokens; ++token) {
    spread.insert(spread.end(), kv.begin() + token * kMlaKeyDim, kv.begin() + (token + 1) * kMlaKeyDim);
    if (token % page_size == page_size - 1) spread.insert(spread.end(), at(c.page_gap * kMlaKeyDim), kNaN);
  }
  c.page_size > 0 ? in_pages.fill(spread) : matrix.fill(kv);
  const std::vector<float> qs = q.fill_random(random, c.magnitude);
  lists.fill(std::vector<float>(indices.begin(), indices.end()));
  if (!c.lengths.empty()) topk_length.fill(std::vector<float>(c.lengths.begin(), c.lengths.end()));
  if (!sinks.empty()) sink.fill(sinks);
  PlacedTensor o({c.tokens, c.heads, kMlaLatentDim}, dtype, device, by_head), lse({c.tokens, c.heads}, DType::f32, device),
      max_logits({c.tokens, c.heads}, DType::f32, device);
  MlaSparseOptions options{.scale = c.scale, .num_splits = c.num_splits};
  if (!c.lengths.empty()) options.topk_length = &topk_length.tensor();
  if (!sinks.empty()) options.sink = &sink.tensor();
  if (c.results) {
    options.lse = &lse.tensor();
    options.max_logits = &max_logits.tensor();
  }
  const Tensor in_8_bits = c.fp8 ? bytes.to(device) : Tensor();
  const Tensor cache = c.fp8 ? in_8_bits : c.page_size > 0 ? in_pages.tensor().slice(1, 0, page_size) : matrix.tensor();
  if (!launched([&] { mla_sparse(q, cache, lists, o, options); })) return;

  const double scale = c.scale > 0 ? static_cast<double>(c.scale) : 1 / std::sqrt(static_cast<double>(kMlaKeyDim));
  const PlainSparse plain{c.tokens, c.heads, c.topk, qs, kv, indices, lengths, sinks, scale};
  const SparseResult expected = reference(plain);
  // The naive computation is attention's, of sequences that hold the listed keys.
  std::vector<float> gathered(at(c.tokens * c.topk * kMlaKeyDim));
  std::vector<std::int64_t> counts;
  for (std::int64_t token = 0; token < c.tokens; ++token) {
    float* to = gathered.data() + token * c.topk * kMlaKeyDim;
    const std::vector<const float*> keys = plain.keys_of(token);
    for (const float* key : keys) to = std::copy_n(key, kMlaKeyDim, to);
    counts.push_back(std::ssize(keys));
  }
  PlainMla of_lists(qs, gathered, counts, 1, c.heads, scale, false);
  std::vector<float> finite_sinks = sinks;
  for (float& x : finite_sinks) x = std::clamp(x, -1e4f, 1e4f);
  of_lists.call.sink = finite_sinks;
  EXPECT_TRUE(accurate({.out = o.values(),
                        .reference = expected.o,
                        .naive = attention::naive(of_lists.call, dtype).o,
                        .arithmetic = arithmetic_of(dtype, device)}));
  EXPECT_TRUE(o.gaps_intact());
  EXPECT_TRUE(lse.gaps_intact());
  EXPECT_TRUE(max_logits.gaps_intact());
  if (!c.results) {
    EXPECT_TRUE(lse.untouched());
    EXPECT_TRUE(max_logits.untouched());
    return;
  }
  const auto close = [&](const std::vector<double>& got, const std::vector<double>& wanted) {
    ASSERT_EQ(got.size(), wanted.size());
    for (std::size_t n = 0; n < got.size(); ++n) {
      if (std::isinf(wanted[n]))
        EXPECT_EQ(got[n], wanted[n]) << n;
      else
        EXPECT_NEAR(got[n], wanted[n], 1e-3 + (c.fp8 ? kFp8KeyError * std::abs(wanted[n]) : 0)) << n;
    }
  };
  close(lse.values(), expected.lse);
  close(max_logits.values(), expected.max_logits);
}

std::string case_name(const testing::TestParamInfo<std::tuple<Device, DType>>& info) {
  const auto& [device, dtype] = info.param;
  return tw::format("{}_{}", device.is_cuda() ? "cuda" : "cpu", name_of(dtype));
}

INSTANTIATE_TEST_SUITE_P(Ops, MlaSparse, testing::Combine(testing::ValuesIn(kDevices), testing::Values(DType::bf16, DType::f16)),
                         case_name);

TEST_P(MlaSparse, Lists) {
  for (const std::int64_t topk : {1, 63, 64, 65, 130}) check({.topk = topk});
  check({.heads = 3, .tokens = 1, .topk = 2048, .kv_tokens = 5000});
  check({.topk = 100, .kv_tokens = 6});  // each key many times
}

TEST_P(MlaSparse, Heads) {
  for (const std::int64_t heads : {1, 64, 65, 128, 130}) check({.heads = heads, .topk = 66});
}

TEST_P(MlaSparse, ListsOfNothing) {
  check({.holes = 1});
  check({.holes = 1, .num_splits = 2});
  // Some blocks of keys have none, in the middle of a list and at its ends.
  check({.tokens = 6, .topk = 200, .holes = 0.99});
  check({.topk = 0});
  check({.topk = 5, .kv_tokens = 0});
  check({.tokens = 0});
  check({.heads = 0});
}

TEST_P(MlaSparse, Lengths) {
  check({.tokens = 9, .topk = 130, .lengths = {0, 1, 63, 64, 65, 129, 130, 131, -7}});
  check({.tokens = 4, .topk = 130, .lengths = {0, 1, 70, 1 << 30}, .num_splits = 3});
}

TEST_P(MlaSparse, Sinks) {
  const float inf = std::numeric_limits<float>::infinity();
  const std::vector<float> sinks = {0.5f, -3, 4, 100, -100, inf, -inf};
  for (const int splits : {1, 3}) {
    check({.sinks = sinks, .num_splits = splits});
    check({.tokens = 3, .holes = 0, .lengths = {70, 0, 1}, .sinks = sinks, .num_splits = splits});
    check({.heads = 65, .sinks = sinks, .num_splits = splits, .results = false});
  }
}

TEST_P(MlaSparse, Splits) {
  for (const int splits : {1, 2, 7}) check({.heads = 20, .tokens = 3, .topk = 300, .lengths = {300, 64, 190}, .num_splits = splits});
  check({.topk = 190, .num_splits = 128, .results = false});
}

TEST_P(MlaSparse, Pages) {
  check({.page_size = 15});
  for (const std::int64_t page_size : {1, 6, 45}) check({.page_size = page_size, .page_gap = 2});
}

TEST_P(MlaSparse, Strides) {
  check({.tokens = 3, .strided = true});
  check({.heads = 5, .tokens = 3, .topk = 65, .num_splits = 2, .strided = true});
}

TEST_P(MlaSparse, ScalesAndLargeScores) {
  check({.scale = 0.1352f});
  // Scores of hundreds: weights of one key, and maxima that grow from block to block.
  check({.topk = 250, .magnitude = 20});
}

TEST_P(MlaSparse, CachesOfEightBits) {
  if (dtype != DType::bf16) GTEST_SKIP() << "skipped: such a cache is for bf16";
  if (device.is_cuda() && device_info(device).isa != "sm_90") GTEST_SKIP() << "skipped: such a cache is for Hopper GPUs";
  for (const std::int64_t topk : {1, 64, 130}) check({.topk = topk, .fp8 = true});
  check({.heads = 70, .tokens = 3, .topk = 150, .lengths = {150, 0, 64}, .sinks = {1, -1}, .num_splits = 2, .fp8 = true});
  check({.tokens = 5, .topk = 200, .holes = 0.99, .fp8 = true});
}

}  // namespace
}  // namespace tw::kernels::mla
