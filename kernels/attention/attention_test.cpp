// attention() against loops in double, on the CPU and, where there is one, on a GPU.

#include "tilewave/attention.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <optional>
#include <random>
#include <tuple>
#include <vector>

#include "kernels/attention/attention_case.hpp"
#include "kernels/attention/call.hpp"
#include "kernels/attention/reference.hpp"
#include "kernels/attention/variants.hpp"
#include "runtime/format.hpp"
#include "tests/accuracy.hpp"
#include "tests/expect_error.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"
#include "tilewave/f32_products.hpp"
#include "tilewave/tile/cpu/target.tile.hpp"

namespace tw::kernels::attention {
namespace {

using namespace tw::test;

class Attention : public AttentionTest {
 protected:
  void SetUp() override {
    skip_unless_present(device);
    cpu::set_poison_released_slots(true);
    if (!device.is_cuda()) return;
    if (dtype == DType::f32) exact.emplace(F32Products::exact);
    [[maybe_unused]] static const bool warm = (compile_all(specs_of(registered())), true);  // on all cores
  }
  void check(const Case& c) {
    SCOPED_TRACE(c.describe());
    PlacedTensor q({c.batch, c.seqlen_q, c.heads, c.head_dim}, dtype, device, placement(c.q));
    PlacedTensor k({c.batch, c.seqlen_k, c.kv_heads, c.head_dim}, dtype, device, placement(c.kv));
    PlacedTensor v({c.batch, c.seqlen_k, c.kv_heads, c.values()}, dtype, device, placement(c.kv));
    PlacedTensor o({c.batch, c.seqlen_q, c.heads, c.values()}, dtype, device, placement(c.o));
    PlacedTensor lse({c.batch, c.heads, c.seqlen_q}, DType::f32, device, {.offset = 3});
    const std::vector<float> q_values = q.fill_random(random, c.magnitude), k_values = k.fill_random(random, c.magnitude),
                             v_values = v.fill_random(random);
    AttentionOptions options{.lse = c.with_lse ? &lse.tensor() : nullptr};
    PlainCall plain = plain_call(c);
    Features features;
    add_features(c, features, options, plain);
    PlacedTensor qv({c.batch, c.seqlen_q, c.heads, c.values()}, dtype, device, placement(c.q));
    const std::vector<float> qv_values = qv.fill_random(random, c.magnitude);
    if (c.qv) options.qv = &qv.tensor(), plain.qv = qv_values;
    if (!launched([&] { tw::attention(q, k, v, o, options); })) return;
    plain.q = q_values, plain.k = k_values, plain.v = v_values;
    if (dtype == DType::f32 && device.is_cuda()) return expect_f32_on_gpu(c, plain, o, lse);
    expect_results(plain, dtype, device, o, c.with_lse ? &lse : nullptr);
    if (!c.with_lse) {
      EXPECT_TRUE(lse.untouched());
    }
    if (dtype != DType::f32 || c.seqlen_q * c.seqlen_k > 4096 || o.tensor().numel() == 0) return;
    // A GPU's way in f32, on the CPU, a few queries at a time.
    PlacedTensor again({c.batch, c.seqlen_q, c.heads, c.values()}, dtype, device, placement(c.o));
    PlacedTensor lse_again({c.batch, c.heads, c.seqlen_q}, DType::f32, device);
    if (c.with_lse) options.lse = &lse_again.tensor();
    run_in_f32(detail::check_attention(q, k, v, again, options), 5 * c.heads * c.seqlen_k);
    expect_results(plain, dtype, device, again, c.with_lse ? &lse_again : nullptr);
  }
  /// Tensor cores round towards zero when they add, so the error of scores grows with their size.
  static void expect_f32_on_gpu(const Case& c, const PlainCall& plain, const PlacedTensor& o, const PlacedTensor& lse) {
    const PlainResult expected = reference(plain);
    const std::vector<double> values = o.values();
    ASSERT_EQ(values.size(), expected.o.size());
    const double limit = 1e-4 * std::max(1.0f, c.magnitude * c.magnitude);
    for (std::size_t i = 0; i < values.size(); ++i) ASSERT_LE(std::abs(values[i] - expected.o[i]), limit) << i;
    EXPECT_TRUE(o.gaps_intact());
    if (c.with_lse) {
      EXPECT_TRUE(lse_accurate(lse.values(), expected.lse));
    }
  }

  std::optional<ScopedF32Products> exact;
};

INSTANTIATE_TEST_SUITE_P(Ops, Attention, testing::Combine(testing::ValuesIn(kDevices), testing::ValuesIn(kDTypes)), device_and_dtype);

TEST_P(Attention, AnyLengths) {
  // Around the tiles of both devices (64 and 64; 128 or 192 and 128), more queries than keys and fewer.
  constexpr std::int64_t kPairs[][2] = {{1, 1},     {1, 128},   {128, 1},  {2, 3},     {63, 64},  {64, 63},  {64, 64},   {65, 65},
                                        {127, 129}, {129, 127}, {191, 65}, {193, 128}, {37, 257}, {257, 37}, {113, 211}, {1, 1031}};
  for (const auto& [seqlen_q, seqlen_k] : kPairs) {
    for (const std::int64_t head_dim : {64, 128}) {
      for (const bool causal : {false, true})
        check({.seqlen_q = seqlen_q, .seqlen_k = seqlen_k, .heads = 2, .kv_heads = 1, .head_dim = head_dim, .causal = causal});
    }
  }
  const std::int64_t longest = device.is_cuda() ? 2049 : 513;
  for (const bool causal : {false, true}) {
    check({.seqlen_q = 383, .seqlen_k = longest, .causal = causal});
    check({.seqlen_q = longest, .seqlen_k = 383, .head_dim = 128, .causal = causal});
  }
}

TEST_P(Attention, SampledShapes) {
  for (int i = 0; i < random_cases(24); ++i) {
    const int groups = 1 << pick(4), kv_heads = 1 + pick(3);
    check({.seqlen_q = 1 + pick(150),
           .seqlen_k = 1 + pick(200),
           .batch = 1 + pick(3),
           .heads = groups * kv_heads,
           .kv_heads = kv_heads,
           .head_dim = 64 + 64 * pick(2),
           .causal = pick(2) == 1,
           .causal_offset = pick(2) == 1 ? std::optional(pick(200) - 100) : std::nullopt,
           .with_lse = pick(4) != 0});
  }
}

TEST_P(Attention, AnyHeadDim) {
  for (const auto& [head_dim, value_dim] : {std::pair{8, 8},
                                            {40, 40},
                                            {72, 72},
                                            {96, 96},
                                            {104, 104},
                                            {136, 136},
                                            {192, 192},
                                            {200, 200},
                                            {256, 256},
                                            {192, 128},
                                            {64, 32},
                                            {16, 256},
                                            {128, 80}}) {
    for (const bool causal : {false, true})
      check({.seqlen_q = 133,
             .seqlen_k = 201,
             .batch = 2,
             .heads = 2,
             .kv_heads = 1,
             .head_dim = head_dim,
             .causal = causal,
             .value_dim = value_dim});
  }
}

TEST_P(Attention, Windows) {
  for (const auto& [left, right] : {std::pair{0, 0}, {5, -1}, {-1, 7}, {64, 3}, {1, 130}, {200, 200}, {1 << 30, 1 << 30}}) {
    check({.seqlen_q = 150, .seqlen_k = 170, .heads = 2, .window_left = left, .window_right = right});
    check({.seqlen_q = 300, .seqlen_k = 300, .head_dim = 128, .causal = true, .window_left = left, .window_right = right});
    check({.seqlen_q = 310, .seqlen_k = 90, .window_left = left, .window_right = right});
    check({.seqlen_q = 70, .seqlen_k = 500, .causal_offset = 100, .window_left = left, .window_right = right});
  }
}

TEST_P(Attention, Chunks) {
  // Of one key, smaller and larger than a tile, and larger than the sequence; cut by the ends of blocks and of the sequence.
  for (const int chunk : {1, 7, 64, 100, 128, 200, 1000, 1 << 29}) {
    check({.seqlen_q = 150, .seqlen_k = 170, .heads = 2, .chunk = chunk});
    check({.seqlen_q = 300, .seqlen_k = 300, .head_dim = 128, .causal = true, .chunk = chunk, .sink = chunk == 7});
    check({.seqlen_q = 310, .seqlen_k = 90, .chunk = chunk});  // the first queries are before the first key
    check({.seqlen_q = 90, .seqlen_k = 410, .heads = 4, .kv_heads = 2, .window_left = 60, .window_right = 9, .chunk = chunk});
    check({.seqlen_q = 70, .seqlen_k = 500, .head_dim = 256, .causal_offset = -33, .chunk = chunk, .softcap = 5});
  }
  check({.seqlen_q = device.is_cuda() ? 4100 : 700, .seqlen_k = device.is_cuda() ? 4200 : 650, .causal = true, .chunk = 256});
  check({.seqlen_q = 200, .seqlen_k = 230, .head_dim = 96, .chunk = 50, .alibi = 1, .mask = DType::boolean});
}

TEST_P(Attention, Masks) {
  for (const DType type : {DType::boolean, DType::f32, dtype}) {
    for (const unsigned dims : {15u, 12u, 8u, 4u, 13u, 14u, 0u})
      check({.seqlen_q = 67, .seqlen_k = 140, .batch = 2, .heads = 2, .kv_heads = 1, .mask = type, .mask_dims = dims});
  }
}

TEST_P(Attention, SampledFeatures) {
  // On a GPU every list of rules is a kernel to compile, so there is some of everything, and fewer lists.
  const int cases = device.is_cuda() ? 160 : random_cases(300);
  struct List {
    int head_dim, value_dim;
    bool softcap, alibi, mask, lower, upper, chunks;
  };
  std::vector<List> lists;
  constexpr int kDims[][2] = {{64, 64}, {96, 96}, {128, 128}, {192, 192}, {256, 256}, {192, 128}};
  const int list_count = device.is_cuda() ? 16 : cases;
  for (int i = 0; i < list_count; ++i) {
    const auto& [d, dv] = kDims[pick(6)];
    lists.push_back({d, dv, pick(3) == 0, pick(3) == 0, pick(4) == 0, pick(3) == 0, pick(2) == 0, pick(5) == 0});
  }
  for (int i = 0; i < cases && !HasFailure(); ++i) {
    const List& list = lists[static_cast<std::size_t>(i % list_count)];
    const int group = 1 + pick(4), kv_heads = 1 + pick(2);
    const bool causal = list.upper && pick(2) == 0;
    const int dtypes = pick(3);
    check({.seqlen_q = 1 + pick(pick(4) == 0 ? 260 : 70),
           .seqlen_k = pick(pick(4) == 0 ? 300 : 150),
           .batch = 1 + pick(2),
           .heads = group * kv_heads,
           .kv_heads = kv_heads,
           .head_dim = list.head_dim - 8 * pick(3),
           .causal = causal,
           .causal_offset = !list.alibi && pick(3) == 0 ? std::optional(pick(200) - 100) : std::nullopt,
           .with_lse = pick(4) != 0,
           .value_dim = list.value_dim - 8 * pick(3),
           .window_left = list.lower ? pick(150) : -1,
           .window_right = list.upper && !causal ? pick(100) : -1,
           .chunk = list.chunks ? 1 + pick(150) : 0,
           .softcap = list.softcap ? 1.0f + static_cast<float>(pick(40)) : 0,
           .alibi = list.alibi ? 1 + pick(2) : 0,
           .sink = pick(3) == 0,
           .mask = list.mask ? std::optional(dtypes == 0   ? DType::boolean
                                             : dtypes == 1 ? DType::f32
                                                           : dtype)
                             : std::nullopt,
           .mask_dims = static_cast<unsigned>(pick(16))});
  }
}

TEST_P(Attention, Dropout) {
  // All tiles: head dimensions, and for 64 the four that its lengths and masks choose among.
  constexpr std::int64_t kDims[][2] = {{64, 64}, {96, 96}, {128, 128}, {192, 128}, {192, 192}, {256, 256}};
  for (const auto& [head_dim, value_dim] : kDims) {
    const Case c{.seqlen_q = 100,
                 .seqlen_k = 333,
                 .batch = 2,
                 .heads = 2,
                 .kv_heads = 1,
                 .head_dim = head_dim,
                 .value_dim = value_dim,
                 .dropout = 0.1f};
    Case high = c, softcap = c, all = c;
    high.dropout = 0.9f, high.causal = true;
    softcap.softcap = 5;
    all.alibi = 1, all.sink = true, all.window_left = 90, all.causal = true, all.mask = DType::boolean, all.q = Place::unaligned;
    for (const Case& x : {c, high, softcap, all}) check(x);
  }
  const std::int64_t longest = device.is_cuda() ? 4200 : 600;
  for (const bool causal : {false, true}) check({.seqlen_q = 600, .seqlen_k = longest, .causal = causal, .dropout = 0.5f});
  check({.seqlen_q = longest, .seqlen_k = 100, .dropout = 0.5f});
}

TEST_P(Attention, QueryValues) {
  for (const auto& [head_dim, value_dim] : {std::pair{64, 256}, {64, 64}, {32, 128}, {40, 200}, {128, 128}, {128, 256}, {16, 8}}) {
    for (const bool causal : {false, true}) {
      check({.seqlen_q = 133,
             .seqlen_k = 201,
             .batch = 2,
             .heads = 4,
             .kv_heads = 2,
             .head_dim = head_dim,
             .causal = causal,
             .value_dim = value_dim,
             .qv = true});
      check({.seqlen_q = 1, .seqlen_k = 300, .head_dim = head_dim, .causal = causal, .value_dim = value_dim, .qv = true});
    }
  }
  const Case c{.seqlen_q = 70, .seqlen_k = 333, .heads = 2, .kv_heads = 1, .value_dim = 256, .qv = true};
  Case windows = c, all = c, dropped = c, unaligned = c, chunks = c, none = c;
  windows.window_left = 60, windows.window_right = 9;
  chunks.chunk = 50, chunks.causal = true;
  all.softcap = 5, all.alibi = 1, all.sink = true, all.mask = DType::f32, all.scale = 0.1f;
  dropped.dropout = 0.2f;
  unaligned.q = unaligned.kv = unaligned.o = Place::unaligned;
  none.seqlen_k = 0;
  for (const Case& x : {windows, all, dropped, unaligned, chunks, none}) check(x);
}

TEST_P(Attention, PackedSequences) {
  for (int i = 0; i < (device.is_cuda() ? 24 : random_cases(120)) && !HasFailure(); ++i) {
    // On a GPU many are taken longest first, and long ones may have tiles of three warpgroups.
    const bool many = device.is_cuda() && pick(6) == 0;
    const int most = device.is_cuda() && !many && pick(6) == 0 ? 1300 : 300;
    const std::int64_t batch = many ? 150 + pick(50) : 1 + pick(5), kv_heads = many ? 2 : 1 + pick(2),
                       heads = kv_heads * (many ? 1 : 1 + pick(3)), d = pick(2) == 0 ? 64 : 128;
    const bool used = pick(3) == 0;
    Case c{.seqlen_q = 0, .seqlen_k = 0, .batch = batch, .heads = heads, .kv_heads = kv_heads, .head_dim = d, .causal = pick(2) == 0};
    if (pick(3) == 0) c.window_left = pick(60);
    if (pick(4) == 0) c.chunk = 1 + pick(150);
    // Gaps before, between and behind sequences belong to nobody.
    std::vector<std::int32_t> cu_q{pick(3)}, cu_k{pick(3)}, used_q, used_k;
    std::vector<std::int64_t> lengths_q, lengths_k;
    for (std::int64_t b = 0; b < batch; ++b) {
      const bool longer = most > 300 || pick(many ? 40 : 3) == 0;
      const int q_length = pick(4) == 0 ? 0 : pick(longer ? most : many ? 20 : 80);
      const int k_length = pick(5) == 0 ? 0 : pick(longer ? most : many ? 20 : 130);
      cu_q.push_back(cu_q.back() + q_length);
      cu_k.push_back(cu_k.back() + k_length);
      used_q.push_back(used ? pick(q_length + 1) : q_length);
      used_k.push_back(used ? pick(k_length + 1) : k_length);
      lengths_q.push_back(used_q.back());
      lengths_k.push_back(used_k.back());
      c.seqlen_q = std::max<std::int64_t>(c.seqlen_q, q_length);
      c.seqlen_k = std::max<std::int64_t>(c.seqlen_k, k_length);
    }
    const std::int64_t total_q = cu_q.back() + pick(3), total_k = cu_k.back() + pick(3);
    if (total_q == 0 || total_k == 0) continue;
    SCOPED_TRACE(tw::format("{} cu_q {} cu_k {} used {}", c.describe(), tw::join(cu_q, ","), tw::join(cu_k, ","), used));
    // q, k and v are NaN wherever no sequence lies.
    const auto nan = std::numeric_limits<float>::quiet_NaN();
    const auto packed = [&](std::int64_t total, std::int64_t n, const std::vector<std::int32_t>& cu,
                            const std::vector<std::int64_t>& lengths, std::int64_t longest, std::vector<float>& dense) {
      std::vector<float> values(static_cast<std::size_t>(total * n * d), nan);
      dense.assign(static_cast<std::size_t>(batch * longest * n * d), 0);
      std::normal_distribution<float> normal;
      for (std::size_t b = 0; b < lengths.size(); ++b) {
        for (std::int64_t x = 0; x < lengths[b] * n * d; ++x) {
          const float value = round_to(dtype, normal(random));
          values[static_cast<std::size_t>(cu[b] * n * d + x)] = value;
          dense[static_cast<std::size_t>(static_cast<std::int64_t>(b) * longest * n * d + x)] = value;
        }
      }
      return values;
    };
    std::vector<float> q_dense, k_dense, v_dense, qv_dense;
    c.qv = !many && pick(5) == 0;
    if (!many && pick(4) == 0 && c.seqlen_q > 0 && c.seqlen_k > 0)
      c.mask = pick(2) == 0 ? DType::boolean : DType::f32, c.mask_dims = static_cast<unsigned>(pick(16));
    PlacedTensor q({total_q, heads, d}, dtype, device), k({total_k, kv_heads, d}, dtype, device), v({total_k, kv_heads, d}, dtype, device);
    PlacedTensor o({total_q, heads, d}, dtype, device), lse({heads, total_q}, DType::f32, device);
    q.fill(packed(total_q, heads, cu_q, lengths_q, c.seqlen_q, q_dense));
    k.fill(packed(total_k, kv_heads, cu_k, lengths_k, c.seqlen_k, k_dense));
    v.fill(packed(total_k, kv_heads, cu_k, lengths_k, c.seqlen_k, v_dense));
    PlacedTensor qv({total_q, heads, d}, dtype, device);
    qv.fill(packed(total_q, heads, cu_q, lengths_q, c.seqlen_q, qv_dense));
    const Tensor used_q_tensor = to_device(used_q, {batch}), used_k_tensor = to_device(used_k, {batch});
    const PackedSequences sequences{to_device(cu_q, {batch + 1}), to_device(cu_k, {batch + 1}), used ? &used_q_tensor : nullptr,
                                    used ? &used_k_tensor : nullptr};
    if (dtype == DType::f32 && device.is_cuda()) {
      expect_error<InvalidArgument>([&] { attention_varlen(q, k, v, o, sequences); }, {"q is f32", "f32 on the CPU"});
      return;
    }
    PlainCall plain = plain_call(c);
    AttentionOptions options;
    Features features;
    if (!many && pick(4) == 0) c.dropout = 0.3f;
    add_features(c, features, options, plain);
    options.lse = &lse.tensor();
    if (c.qv) options.qv = &qv.tensor(), plain.qv = qv_dense;
    if (!launched([&] { attention_varlen(q, k, v, o, sequences, options); })) return;
    plain.causal_offset = {};
    plain.q = q_dense, plain.k = k_dense, plain.v = v_dense;
    plain.lengths_q = lengths_q, plain.lengths_k = lengths_k;
    const PlainResult expected = reference(plain), unfused = naive(plain, dtype);
    const std::vector<double> out = o.values(), sums = lse.values();
    std::vector<double> mine, exact, near, mine_lse, exact_lse;
    std::vector<bool> written(static_cast<std::size_t>(total_q));
    for (std::int64_t b = 0; b < batch; ++b) {
      for (std::int64_t s = 0; s < lengths_q[static_cast<std::size_t>(b)]; ++s) {
        const std::int64_t row = cu_q[static_cast<std::size_t>(b)] + s;
        written[static_cast<std::size_t>(row)] = true;
        for (std::int64_t x = 0; x < heads * d; ++x) {
          mine.push_back(out[static_cast<std::size_t>(row * heads * d + x)]);
          exact.push_back(expected.o[static_cast<std::size_t>((b * c.seqlen_q + s) * heads * d + x)]);
          near.push_back(unfused.o[static_cast<std::size_t>((b * c.seqlen_q + s) * heads * d + x)]);
        }
        for (std::int64_t h = 0; h < heads; ++h) {
          mine_lse.push_back(sums[static_cast<std::size_t>(h * total_q + row)]);
          exact_lse.push_back(expected.lse[static_cast<std::size_t>((b * heads + h) * c.seqlen_q + s)]);
        }
      }
    }
    EXPECT_TRUE(accurate({mine, exact, near, arithmetic_of(dtype, device)}));
    EXPECT_TRUE(lse_accurate(mine_lse, exact_lse));
    // Rows of nobody are as they were: poison, which is NaN.
    for (std::int64_t row = 0; row < total_q; ++row) {
      if (!written[static_cast<std::size_t>(row)]) {
        EXPECT_TRUE(std::isnan(out[static_cast<std::size_t>(row * heads * d)])) << "row " << row;
      }
    }
    EXPECT_TRUE(o.gaps_intact());
  }
}

TEST_P(Attention, CausalOffsets) {
  // From a query that sees nothing to one that sees everything; -70 and less leave whole tiles without keys.
  for (const int offset : {-1000, -100, -70, -64, -63, -1, 0, 1, 17, 64, 99, 100, 1000, -(1 << 29), 1 << 29}) {
    check({.seqlen_q = 100, .seqlen_k = 90, .heads = 2, .kv_heads = 2, .causal = true, .causal_offset = offset});
    check({.seqlen_q = 70, .seqlen_k = 200, .head_dim = 128, .causal = true, .causal_offset = offset});
  }
  // Without `causal` an offset says nothing.
  check({.seqlen_q = 20, .seqlen_k = 30, .causal_offset = -15});
}

TEST_P(Attention, QueriesThatSeeNothing) {
  // Bottom-right aligned, the first Sq - Sk queries see no key: O = 0 and LSE = -infinity, never NaN.
  PlacedTensor q({1, 200, 1, 64}, dtype, device), k({1, 20, 1, 64}, dtype, device), v({1, 20, 1, 64}, dtype, device);
  PlacedTensor o({1, 200, 1, 64}, dtype, device), lse({1, 1, 200}, DType::f32, device);
  q.fill_random(random);
  k.fill_random(random);
  v.fill_random(random);
  tw::attention(q, k, v, o, {.causal = true, .lse = &lse.tensor()});
  const std::vector<double> out = o.values(), sums = lse.values();
  for (std::size_t i = 0; i < 180; ++i) {
    ASSERT_EQ(sums[i], -kInf) << "query " << i;
    for (std::size_t c = 0; c < 64; ++c) ASSERT_EQ(out[i * 64 + c], 0) << "query " << i;
  }
  for (std::size_t i = 180; i < 200; ++i) ASSERT_TRUE(std::isfinite(sums[i])) << "query " << i;
}

TEST_P(Attention, NoKeys) {
  for (const bool causal : {false, true}) {
    check({.seqlen_q = 70, .seqlen_k = 0, .batch = 2, .heads = 2, .kv_heads = 1, .causal = causal});
    check({.seqlen_q = 1, .seqlen_k = 0, .head_dim = 128, .causal = causal});
  }
}

TEST_P(Attention, NoQueries) {
  for (const Shape& shape : {Shape{2, 0, 4, 64}, Shape{0, 5, 4, 64}, Shape{2, 5, 0, 64}}) {
    PlacedTensor q(shape, dtype, device), o(shape, dtype, device), lse({shape[0], shape[2], shape[1]}, DType::f32, device);
    PlacedTensor k({shape[0], 7, 2, 64}, dtype, device), v({shape[0], 7, 2, 64}, dtype, device);
    tw::attention(q, k, v, o, {.lse = &lse.tensor()});
    EXPECT_TRUE(o.untouched());
    EXPECT_TRUE(lse.untouched());
  }
}

TEST_P(Attention, HeadsShareKeys) {
  for (const std::int64_t group : {1, 2, 4, 8}) {
    for (const std::int64_t kv_heads : {1, 3}) {
      check({.seqlen_q = 65, .seqlen_k = 80, .batch = 2, .heads = group * kv_heads, .kv_heads = kv_heads, .causal = true});
      check({.seqlen_q = 9, .seqlen_k = 130, .heads = group * kv_heads, .kv_heads = kv_heads, .head_dim = 128});
    }
  }
}

TEST_P(Attention, AnyStrides) {
  constexpr Place kPlaces[] = {Place::dense, Place::by_head, Place::aligned, Place::unaligned};
  for (const Place place : kPlaces) {
    for (const bool causal : {false, true})
      check(
          {.seqlen_q = 70, .seqlen_k = 133, .batch = 2, .heads = 4, .kv_heads = 2, .causal = causal, .q = place, .kv = place, .o = place});
  }
  for (int i = 0; i < (device.is_cuda() ? 6 : 12); ++i) {
    check({.seqlen_q = 1 + pick(90),
           .seqlen_k = 1 + pick(150),
           .batch = 2,
           .heads = 2,
           .kv_heads = 2,
           .head_dim = 64,
           .causal = true,
           .q = kPlaces[pick(4)],
           .kv = kPlaces[pick(4)],
           .o = kPlaces[pick(4)]});
  }
}

TEST_P(Attention, SlicesOfAPackedTensor) {
  // [batch, seqlen, q heads + k heads + v heads, head_dim], as one product makes it.
  constexpr std::int64_t batch = 2, seqlen = 77, heads = 4, kv_heads = 2, d = 64, all = heads + 2 * kv_heads;
  PlacedTensor packed({batch, seqlen, all, d}, dtype, device), o({batch, seqlen, heads, d}, dtype, device),
      lse({batch, heads, seqlen}, DType::f32, device);
  const std::vector<float> values = packed.fill_random(random);
  const Tensor& t = packed;
  tw::attention(t.slice(2, 0, heads), t.slice(2, heads, heads + kv_heads), t.slice(2, heads + kv_heads, all), o,
                {.causal = true, .lse = &lse.tensor()});

  const auto unpack = [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> part;
    for (std::int64_t row = 0; row < batch * seqlen; ++row)
      part.insert(part.end(), values.begin() + (row * all + begin) * d, values.begin() + (row * all + end) * d);
    return part;
  };
  const std::vector<float> q = unpack(0, heads), k = unpack(heads, heads + kv_heads), v = unpack(heads + kv_heads, all);
  PlainCall plain =
      plain_call({.seqlen_q = seqlen, .seqlen_k = seqlen, .batch = batch, .heads = heads, .kv_heads = kv_heads, .causal = true});
  plain.q = q, plain.k = k, plain.v = v;
  expect_results(plain, dtype, device, o, &lse);
}

TEST_P(Attention, Scales) {
  for (const float scale : {1e-6f, 0.01f, 0.3f, 1.0f}) {
    check({.seqlen_q = 66, .seqlen_k = 140, .scale = scale});
    check({.seqlen_q = 66, .seqlen_k = 140, .head_dim = 128, .causal = true, .scale = scale});
  }
}

TEST_P(Attention, LargeScoresDoNotOverflow) {
  // Scores of some hundreds, whose exponentials are far beyond f32.
  check({.seqlen_q = 66, .seqlen_k = 300, .magnitude = 8});
  check({.seqlen_q = 66, .seqlen_k = 300, .head_dim = 128, .causal = true, .magnitude = 8});
}

TEST_P(Attention, AMaximumThatMovesFromBlockToBlock) {
  // Keys are multiples of one direction, so every query's scores rise or fall steadily along the sequence, by more than any bound for a
  // lazy rescale.
  for (const bool rising : {true, false}) {
    for (const bool causal : {false, true}) {
      SCOPED_TRACE(tw::format("rising {} causal {}", rising, causal));
      constexpr std::int64_t seqlen = 300, d = 64;
      PlacedTensor q({1, seqlen, 1, d}, dtype, device), k({1, seqlen, 1, d}, dtype, device), v({1, seqlen, 1, d}, dtype, device),
          o({1, seqlen, 1, d}, dtype, device);
      PlacedTensor lse({1, 1, seqlen}, DType::f32, device);
      std::vector<float> q_values(seqlen * d), k_values(seqlen * d);
      for (std::int64_t i = 0; i < seqlen; ++i) {
        for (std::int64_t c = 0; c < d; ++c) {
          const float direction = c % 2 == 0 ? 0.5f : -0.5f;
          const auto at = static_cast<std::size_t>(i * d + c);
          q_values[at] = round_to(dtype, direction * (1 + static_cast<float>(i % 3) / 4));
          k_values[at] = round_to(dtype, direction * static_cast<float>(rising ? i : seqlen - i) / 16);
        }
      }
      q.fill(q_values);
      k.fill(k_values);
      const std::vector<float> v_values = v.fill_random(random);
      tw::attention(q, k, v, o, {.causal = causal, .lse = &lse.tensor()});
      PlainCall plain = plain_call({.seqlen_q = seqlen, .seqlen_k = seqlen, .causal = causal});
      plain.q = q_values, plain.k = k_values, plain.v = v_values;
      expect_results(plain, dtype, device, o, &lse);
    }
  }
}

TEST_P(Attention, IsDeterministic) {
  PlacedTensor q({2, 200, 4, 64}, dtype, device), k({2, 300, 2, 64}, dtype, device), v({2, 300, 2, 64}, dtype, device);
  q.fill_random(random);
  k.fill_random(random);
  v.fill_random(random);
  const auto run = [&] {
    PlacedTensor o({2, 200, 4, 64}, dtype, device);
    tw::attention(q, k, v, o, {.causal = true});
    return o.values();
  };
  const std::vector<double> first = run();
  EXPECT_EQ(run(), first);
  if (!device.is_cuda()) {
    const int threads = cpu_threads();
    for (const int n : {1, 3}) {
      set_cpu_threads(n);
      EXPECT_EQ(run(), first) << n << " threads";
    }
    set_cpu_threads(threads);
  }
}

TEST_P(Attention, LeavesAMargin) {
  // Down to blocks on one SM only. LaunchBlocks has the number of blocks.
  const std::int64_t seqlen = device.is_cuda() ? 2048 : 130;
  PlacedTensor q({2, seqlen, 8, 64}, dtype, device), k({2, seqlen, 2, 64}, dtype, device), v({2, seqlen, 2, 64}, dtype, device),
      o({2, seqlen, 8, 64}, dtype, device);
  for (PlacedTensor* const t : {&q, &k, &v}) t->fill_random(random);
  const int all_but_one = device.is_cuda() ? device_info(device).units - 1 : 1000;
  for (const bool causal : {false, true}) {
    tw::attention(q, k, v, o, {.causal = causal});
    const std::vector<double> expected = o.values();
    for (const int margin : {1, all_but_one}) {
      PlacedTensor with({2, seqlen, 8, 64}, dtype, device);
      tw::attention(q, k, v, with, {.causal = causal, .sm_margin = margin});
      // Other tiles may be chosen, whose results differ by rounding.
      EXPECT_TRUE(accurate({with.values(), expected, expected, arithmetic_of(dtype, device)})) << "margin " << margin;
    }
  }
}

TEST_P(Attention, RunsOnTheStreamGiven) {
  PlacedTensor q({1, 70, 2, 64}, dtype, device), k({1, 90, 2, 64}, dtype, device), v({1, 90, 2, 64}, dtype, device),
      o({1, 70, 2, 64}, dtype, device), on_stream({1, 70, 2, 64}, dtype, device);
  q.fill_random(random);
  k.fill_random(random);
  v.fill_random(random);
  tw::attention(q, k, v, o);
  const std::vector<double> expected = o.values();  // also waits for the standard stream, which made the operands
  on_stream.values();
  const Stream stream(device);
  tw::attention(q, k, v, on_stream, {.stream = stream});
  stream.synchronize();
  EXPECT_EQ(on_stream.values(), expected);
}

}  // namespace
}  // namespace tw::kernels::attention
