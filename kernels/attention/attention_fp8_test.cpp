// attention() of e4m3 against loops in double, and its other forms against attention(), on the CPU and, where there is one, on a GPU.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <random>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/attention/attention_case.hpp"
#include "kernels/attention/call.hpp"
#include "kernels/attention/reference.hpp"
#include "tests/expect_error.hpp"
#include "tilewave/cast_fp8.hpp"
#include "tilewave/tile/attention.tile.hpp"
#include "tilewave/tile/cuda/operand.tile.hpp"

namespace tw::kernels::attention {
namespace {

using namespace tw::test;

/// Which of the three descales a call has.
enum Descaled : unsigned { kOfQ = 1, kOfK = 2, kOfV = 4 };

/// The dtype is o's.
class Fp8Attention : public AttentionTest {
 protected:
  void SetUp() override { skip_unless_present(device); }

  /// TMA takes strides and bases of 16 bytes.
  static Placement placement_of(Place place) {
    if (place == Place::aligned) return {.offset = 32, .gap = 16, .align = 16};
    return placement(place);
  }
  struct Descale {
    PlacedTensor tensor;
    std::vector<float> values;
  };
  /// A factor of its own for each head.
  Descale descale(const Case& c) {
    Descale d{PlacedTensor({c.batch, c.kv_heads}, DType::f32, device, {.offset = 1, .gap = 3}), uniform(c.batch * c.kv_heads, 0.2f, 1.8f)};
    d.tensor.fill(d.values);
    return d;
  }
  /// Multiplies [batch, seqlen, heads, dim] by a factor for each batch and key head.
  static void scale_heads(std::vector<float>& values, const std::vector<float>& factors, const Case& c, std::int64_t heads,
                          std::int64_t dim) {
    const std::int64_t group = heads / c.kv_heads, rows = static_cast<std::int64_t>(values.size()) / (c.batch * heads * dim);
    for (std::size_t i = 0; i < values.size(); ++i) {
      const std::int64_t head = static_cast<std::int64_t>(i) / dim % heads, b = static_cast<std::int64_t>(i) / (dim * heads * rows);
      values[i] *= factors[static_cast<std::size_t>(b * c.kv_heads + head / group)];
    }
  }
  static double largest_norm(const std::vector<float>& rows, std::int64_t dim) {
    double largest = 0;
    for (std::size_t i = 0; i < rows.size(); i += static_cast<std::size_t>(dim)) {
      double squares = 0;
      for (std::size_t n = 0; n < static_cast<std::size_t>(dim); ++n) squares += static_cast<double>(rows[i + n]) * rows[i + n];
      largest = std::max(largest, squares);
    }
    return std::sqrt(largest);
  }

  void check(const Case& c, unsigned descaled = kOfQ | kOfK | kOfV) {
    SCOPED_TRACE(tw::format("{} descaled {}", c.describe(), descaled));
    PlacedTensor q({c.batch, c.seqlen_q, c.heads, c.head_dim}, DType::fp8_e4m3, device, placement_of(c.q));
    PlacedTensor k({c.batch, c.seqlen_k, c.kv_heads, c.head_dim}, DType::fp8_e4m3, device, placement_of(c.kv));
    PlacedTensor v({c.batch, c.seqlen_k, c.kv_heads, c.values()}, DType::fp8_e4m3, device, placement_of(c.kv));
    PlacedTensor o({c.batch, c.seqlen_q, c.heads, c.values()}, dtype, device, placement_of(c.o));
    PlacedTensor lse({c.batch, c.heads, c.seqlen_q}, DType::f32, device, {.offset = 3});
    std::vector<float> q_values = q.fill_random(random, c.magnitude), k_values = k.fill_random(random, c.magnitude),
                       v_values = v.fill_random(random);
    AttentionOptions options{.lse = c.with_lse ? &lse.tensor() : nullptr};
    PlainCall plain = plain_call(c);
    Features features;
    add_features(c, features, options, plain);
    const Descale of_q = descale(c), of_k = descale(c), of_v = descale(c);
    if (descaled & kOfQ) {
      options.q_descale = &of_q.tensor.tensor();
      scale_heads(q_values, of_q.values, c, c.heads, c.head_dim);
    }
    if (descaled & kOfK) {
      options.k_descale = &of_k.tensor.tensor();
      scale_heads(k_values, of_k.values, c, c.kv_heads, c.head_dim);
    }
    if (descaled & kOfV) {
      options.v_descale = &of_v.tensor.tensor();
      scale_heads(v_values, of_v.values, c, c.kv_heads, c.values());
    }
    if (!launched([&] { tw::attention(q, k, v, o, options); })) return;
    plain.q = q_values, plain.k = k_values, plain.v = v_values;
    expect_fp8_results(c, plain, o, c.with_lse ? &lse : nullptr);
    if (!c.with_lse) {
      EXPECT_TRUE(lse.untouched());
    }
  }
  /// Weights of e4m3 have relative errors of up to 2^-4, 2.1e-2 in the mean square: of random values, that is the error of the sum.
  static constexpr double kRelativeL2 = 5e-2;
  void expect_fp8_results(const Case& c, const PlainCall& plain, const PlacedTensor& o, const PlacedTensor* lse) const {
    const PlainResult expected = reference(plain);
    // Of a sum of 8-bit products tensor cores keep 13 bits. No partial sum of a score exceeds |q| |k|.
    const double norms =
        largest_norm({plain.q.begin(), plain.q.end()}, c.head_dim) * largest_norm({plain.k.begin(), plain.k.end()}, c.head_dim);
    const double step = device.is_cuda() ? std::ldexp(1.0, -13) * norms * plain.scale : 0;
    EXPECT_TRUE(accurate({.out = o.values(),
                          .reference = expected.o,
                          .naive = naive_fp8(plain, dtype, static_cast<float>(step)).o,
                          .arithmetic = arithmetic_of(dtype, device),
                          .factor = 3,
                          .relative_l2 = kRelativeL2}));
    EXPECT_TRUE(o.gaps_intact());
    if (lse == nullptr) return;
    const double of_score = static_cast<double>(c.head_dim + 31) / 32 * step;  // summed 32 products at a time
    const std::vector<double> values = lse->values();
    ASSERT_EQ(values.size(), expected.lse.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (expected.lse[i] == -kInf)
        ASSERT_EQ(values[i], -kInf) << "lse " << i;
      else
        ASSERT_NEAR(values[i], expected.lse[i], 1e-3 + of_score) << "lse " << i;
    }
    EXPECT_TRUE(lse->gaps_intact());
  }
};

INSTANTIATE_TEST_SUITE_P(Ops, Fp8Attention, testing::Combine(testing::ValuesIn(kDevices), testing::Values(DType::bf16, DType::f16)),
                         device_and_dtype);

TEST_P(Fp8Attention, AnyLengths) {
  constexpr std::int64_t kPairs[][2] = {{1, 1},     {1, 128},   {128, 1},  {2, 3},     {63, 64},  {64, 63},  {95, 97},   {96, 96},
                                        {127, 129}, {129, 127}, {191, 65}, {193, 128}, {37, 257}, {257, 37}, {113, 211}, {1, 1031}};
  for (const auto& [seqlen_q, seqlen_k] : kPairs) {
    for (const std::int64_t head_dim : {64, 128, 256}) {
      for (const bool causal : {false, true})
        check({.seqlen_q = seqlen_q, .seqlen_k = seqlen_k, .heads = 2, .kv_heads = 1, .head_dim = head_dim, .causal = causal});
    }
  }
  for (const bool causal : {false, true}) {
    check({.seqlen_q = 383, .seqlen_k = device.is_cuda() ? 2049 : 513, .causal = causal});
    check({.seqlen_q = device.is_cuda() ? 2049 : 513, .seqlen_k = 383, .head_dim = 128, .causal = causal});
  }
}

TEST_P(Fp8Attention, EachDescale) {
  for (const unsigned descaled : {0u, 1u, 2u, 4u, 7u}) {
    for (const float softcap : {0.0f, 5.0f})
      check({.seqlen_q = 70, .seqlen_k = 140, .batch = 2, .heads = 6, .kv_heads = 3, .softcap = softcap}, descaled);
  }
}

TEST_P(Fp8Attention, AnyHeadDim) {
  for (const auto& [head_dim, value_dim] :
       {std::pair{16, 16}, {48, 48}, {80, 80}, {96, 96}, {144, 144}, {192, 192}, {240, 240}, {192, 128}, {64, 32}, {16, 256}, {128, 80}}) {
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

TEST_P(Fp8Attention, SampledFeatures) {
  // On a GPU every list of rules is a kernel to compile, so there are fewer lists.
  const int cases = device.is_cuda() ? 160 : random_cases(150);
  struct List {
    int dim;
    bool softcap, alibi, mask, lower, upper;
  };
  std::vector<List> lists;
  const int list_count = device.is_cuda() ? 16 : cases;
  for (int i = 0; i < list_count; ++i)
    lists.push_back({64 << pick(3), pick(3) == 0, pick(3) == 0, pick(4) == 0, pick(3) == 0, pick(2) == 0});
  for (int i = 0; i < cases && !HasFailure(); ++i) {
    const List& list = lists[static_cast<std::size_t>(i % list_count)];
    const int group = 1 + pick(4), kv_heads = 1 + pick(2), masks = pick(3);
    const bool causal = list.upper && pick(2) == 0;
    check({.seqlen_q = 1 + pick(pick(4) == 0 ? 260 : 70),
           .seqlen_k = pick(pick(4) == 0 ? 300 : 150),
           .batch = 1 + pick(2),
           .heads = group * kv_heads,
           .kv_heads = kv_heads,
           .head_dim = list.dim - 16 * pick(3),
           .causal = causal,
           .causal_offset = !list.alibi && pick(3) == 0 ? std::optional(pick(200) - 100) : std::nullopt,
           .with_lse = pick(4) != 0,
           .value_dim = list.dim - 16 * pick(3),
           .window_left = list.lower ? pick(150) : -1,
           .window_right = list.upper && !causal ? pick(100) : -1,
           .softcap = list.softcap ? 1.0f + static_cast<float>(pick(40)) : 0,
           .alibi = list.alibi ? 1 + pick(2) : 0,
           .sink = pick(3) == 0,
           .mask = list.mask ? std::optional(masks == 0   ? DType::boolean
                                             : masks == 1 ? DType::f32
                                                          : dtype)
                             : std::nullopt,
           .mask_dims = static_cast<unsigned>(pick(16))},
          static_cast<unsigned>(pick(8)));
  }
}

TEST_P(Fp8Attention, AnyStrides) {
  constexpr Place kPlaces[] = {Place::dense, Place::by_head, Place::aligned, Place::unaligned};
  for (const Place place : kPlaces) {
    for (const bool causal : {false, true})
      check(
          {.seqlen_q = 70, .seqlen_k = 133, .batch = 2, .heads = 4, .kv_heads = 2, .causal = causal, .q = place, .kv = place, .o = place});
  }
  check({.seqlen_q = 130, .seqlen_k = 300, .heads = 2, .kv_heads = 2, .head_dim = 128, .q = Place::unaligned, .kv = Place::by_head});
}

TEST_P(Fp8Attention, LargeScoresDoNotOverflow) {
  check({.seqlen_q = 66, .seqlen_k = 300, .magnitude = 8});
  check({.seqlen_q = 66, .seqlen_k = 300, .head_dim = 128, .causal = true, .magnitude = 8});
}

TEST_P(Fp8Attention, AMaximumThatMovesFromBlockToBlock) {
  // Every query's scores rise or fall steadily along the sequence, by more than the headroom of a row's base.
  for (const bool rising : {true, false}) {
    for (const std::int64_t d : {64, 128, 256}) {
      SCOPED_TRACE(tw::format("rising {} head_dim {}", rising, d));
      const Case c{.seqlen_q = 300, .seqlen_k = 700, .head_dim = d};
      PlacedTensor q({1, c.seqlen_q, 1, d}, DType::fp8_e4m3, device), k({1, c.seqlen_k, 1, d}, DType::fp8_e4m3, device),
          v({1, c.seqlen_k, 1, d}, DType::fp8_e4m3, device), o({1, c.seqlen_q, 1, d}, dtype, device);
      PlacedTensor lse({1, 1, c.seqlen_q}, DType::f32, device);
      std::vector<float> q_values(static_cast<std::size_t>(c.seqlen_q * d)), k_values(static_cast<std::size_t>(c.seqlen_k * d));
      for (std::size_t i = 0; i < q_values.size(); ++i) q_values[i] = i % 2 == 0 ? 0.5f : -0.5f;
      for (std::size_t i = 0; i < k_values.size(); ++i) {
        const auto key = static_cast<float>(i / static_cast<std::size_t>(d)) / 100;
        const float x = (i % 2 == 0 ? 0.5f : -0.5f) * (rising ? key : 7 - key);
        k_values[i] = round_to(DType::fp8_e4m3, x);
      }
      q.fill(q_values);
      k.fill(k_values);
      const std::vector<float> v_values = v.fill_random(random);
      if (!launched([&] { tw::attention(q, k, v, o, {.lse = &lse.tensor()}); })) return;
      PlainCall plain = plain_call(c);
      plain.q = q_values, plain.k = k_values, plain.v = v_values;
      expect_fp8_results(c, plain, o, &lse);
    }
  }
}

TEST_P(Fp8Attention, ManyKeysWithACommonMean) {
  // Values of one sign make sums that grow along the sequence, of which tensor cores lose a part in each addition. Up to 128 columns each
  // block of keys has a sum of its own. Above, measured on an H200, o is too small by 2^-16 of itself for each key.
  for (const std::int64_t d : {64, 128, 256}) {
    const std::int64_t seqlen_k = device.is_cuda() ? 16384 : 2048;
    const Case c{.seqlen_q = 64, .seqlen_k = seqlen_k, .head_dim = d};
    PlacedTensor q({1, 64, 1, d}, DType::fp8_e4m3, device), k({1, seqlen_k, 1, d}, DType::fp8_e4m3, device),
        v({1, seqlen_k, 1, d}, DType::fp8_e4m3, device), o({1, 64, 1, d}, dtype, device);
    const std::vector<float> q_values = q.fill_random(random), k_values = k.fill_random(random);
    std::vector<float> v_values = uniform(seqlen_k * d, 0.5f, 2);
    for (float& x : v_values) x = round_to(DType::fp8_e4m3, x);
    v.fill(v_values);
    if (!launched([&] { tw::attention(q, k, v, o); })) return;
    PlainCall plain = plain_call(c);
    plain.q = q_values, plain.k = k_values, plain.v = v_values;
    const std::vector<double> out = o.values(), expected = reference(plain).o;
    double worst = 0, sum = 0;
    for (std::size_t i = 0; i < out.size(); ++i) {
      worst = std::max(worst, std::abs(out[i] - expected[i]) / expected[i]);
      sum += (out[i] - expected[i]) / expected[i] / static_cast<double>(out.size());
    }
    RecordProperty(tw::format("mean_relative_error_{}", d), tw::format("{}", sum));
    const double lost = device.is_cuda() && d > 128 ? static_cast<double>(seqlen_k) * std::ldexp(1.25, -16) : 0;
    EXPECT_LE(worst, lost + 1e-2) << "mean relative error " << sum;
  }
}

TEST_P(Fp8Attention, QueriesThatSeeNothingAndNoKeys) {
  check({.seqlen_q = 200, .seqlen_k = 20, .causal = true});
  check({.seqlen_q = 70, .seqlen_k = 0, .batch = 2, .heads = 4, .kv_heads = 2});
  PlacedTensor q({2, 0, 4, 64}, DType::fp8_e4m3, device), kv({2, 7, 2, 64}, DType::fp8_e4m3, device), o({2, 0, 4, 64}, dtype, device);
  tw::attention(q, kv, kv, o);
  EXPECT_TRUE(o.untouched());
}

TEST_P(Fp8Attention, IsDeterministic) {
  PlacedTensor q({2, 200, 4, 128}, DType::fp8_e4m3, device), k({2, 300, 2, 128}, DType::fp8_e4m3, device),
      v({2, 300, 2, 128}, DType::fp8_e4m3, device);
  q.fill_random(random);
  k.fill_random(random);
  v.fill_random(random);
  const auto run = [&] {
    PlacedTensor o({2, 200, 4, 128}, dtype, device);
    tw::attention(q, k, v, o, {.causal = true});
    return o.values();
  };
  const std::vector<double> first = run();
  EXPECT_EQ(run(), first);
}

TEST_P(Fp8Attention, RotatedQueriesAndKeysRoundLess) {
  // N(0, 1), with N(0, 100) added with probability 0.001. The numbers are the same in each run: the gain depends on where outliers are.
  constexpr std::int64_t kSeqlen = 512, kHeads = 4, kDim = 128;
  std::mt19937_64 fixed(1);
  std::normal_distribution<float> normal;
  const Shape shape = {1, kSeqlen, kHeads, kDim};
  const auto with_outliers = [&] {
    const Tensor x = Tensor::empty(shape, DType::f32);
    for (std::int64_t i = 0; i < x.numel(); ++i)
      x.data<float>()[i] = round_to(dtype, normal(fixed) + (fixed() % 1000 == 0 ? 10 * normal(fixed) : 0));
    return x;
  };
  const Tensor q = with_outliers(), k = with_outliers(), v = with_outliers(), exact = Tensor::poisoned(shape, DType::f32);
  tw::attention(q, k, v, exact);
  std::vector<float> of_columns(kDim);
  for (float& sign : of_columns) sign = fixed() % 2 == 0 ? 1.0f : -1.0f;
  const Tensor signs = to_device(of_columns, {kDim});
  const auto error = [&](bool rotate) {
    const auto cast = [&](const Tensor& x, bool rotated) {
      const CastFp8HeadsOptions options{.rotate = rotated, .signs = rotated ? &signs : nullptr};
      const Tensor here = x.to(device), y = Tensor::poisoned(shape, DType::fp8_e4m3, Stream::standard(device)),
                   scales = Tensor::poisoned({1, kHeads}, DType::f32, Stream::standard(device));
      head_scales(here, scales, options);
      cast_fp8_heads(here, y, scales, options);
      return std::pair(y, scales);
    };
    const auto [of_q, q_scales] = cast(q, rotate);
    const auto [of_k, k_scales] = cast(k, rotate);
    const auto [of_v, v_scales] = cast(v, false);
    const Tensor o = Tensor::poisoned(shape, dtype, Stream::standard(device));
    tw::attention(of_q, of_k, of_v, o, {.q_descale = &q_scales, .k_descale = &k_scales, .v_descale = &v_scales});
    const Tensor got = o.to(Device::cpu()).to(DType::f32);
    double sum = 0;
    for (std::int64_t i = 0; i < got.numel(); ++i) sum += std::pow(static_cast<double>(got.data<float>()[i]) - exact.data<float>()[i], 2);
    return std::sqrt(sum / static_cast<double>(got.numel()));
  };
  const double plain = error(false), rotated = error(true);
  EXPECT_LT(plain, 0.05);  // o itself is about 0.2
  EXPECT_LT(rotated, 0.75 * plain);
}

TEST_P(Fp8Attention, TransposesValues) {
  for (const auto& [keys, dim] : {std::pair{1, 16}, {16, 64}, {100, 80}, {128, 128}, {300, 256}}) {
    for (const Place place : {Place::dense, Place::unaligned}) {
      PlacedTensor v({2, keys, 3, dim}, DType::fp8_e4m3, device, placement_of(place));
      v.fill_random(random);
      const Stream stream = Stream::standard(device);
      const Tensor values = values_workspace(v.tensor().transpose(1, 2), stream);
      transpose_values(v.tensor().transpose(1, 2), values, stream);
      const Tensor host = values.to(Device::cpu());
      ASSERT_EQ(host.shape(3) % 16, 0);
      const std::vector<double> expected = v.values();
      for (std::int64_t at = 0; at < host.numel(); ++at) {
        const std::int64_t key = eight_bit_key(static_cast<int>(at % host.shape(3))), col = at / host.shape(3) % dim,
                           head = at / host.shape(3) / dim % 3, b = at / host.shape(3) / dim / 3;
        const double x = key < keys ? expected[static_cast<std::size_t>(((b * keys + key) * 3 + head) * dim + col)] : 0;
        ASSERT_EQ(static_cast<float>(host.data<fp8_e4m3>()[at]), x) << "key " << key << " column " << col;
      }
    }
  }
}

/// Calls of attention_varlen() and attention_decode() give what attention() gives of each sequence, but for the rounding of its weights.
class Fp8Sequences : public Fp8Attention {
 protected:
  /// Of sequence `b` alone: rows [row, row + size) of q and o, and keys[key, key + size) of k and v.
  std::vector<double> alone(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionOptions& options, std::int64_t b) {
    const auto one = [&](const Tensor* t) { return t->slice(0, b, b + 1); };
    const Tensor of_q = one(options.q_descale), of_k = one(options.k_descale), of_v = one(options.v_descale);
    AttentionOptions with = options;
    with.q_descale = &of_q, with.k_descale = &of_k, with.v_descale = &of_v;
    const PlacedTensor o({1, q.shape(1), q.shape(2), v.shape(3)}, dtype, device);
    tw::attention(q, k, v, o, with);
    return o.values();
  }
  void expect_alike(const std::vector<double>& got, const std::vector<double>& expected) const {
    ASSERT_EQ(got.size(), expected.size());
    double error = 0, size = 1e-12;
    for (std::size_t i = 0; i < got.size(); ++i) {
      error += (got[i] - expected[i]) * (got[i] - expected[i]);
      size += expected[i] * expected[i];
    }
    EXPECT_LE(std::sqrt(error / size), device.is_cuda() ? kRelativeL2 : dtype == DType::f16 ? 1e-3 : 5e-3);
  }
};

INSTANTIATE_TEST_SUITE_P(Ops, Fp8Sequences, testing::Combine(testing::ValuesIn(kDevices), testing::Values(DType::bf16, DType::f16)),
                         device_and_dtype);

TEST_P(Fp8Sequences, Packed) {
  const std::vector<std::int32_t> cu_q{0, 33, 33, 163, 164}, cu_k{0, 70, 75, 200, 329};
  for (const std::int64_t d : {64, 128, 256}) {
    for (const bool causal : {false, true}) {
      PlacedTensor q({164, 4, d}, DType::fp8_e4m3, device), k({329, 2, d}, DType::fp8_e4m3, device),
          v({329, 2, d}, DType::fp8_e4m3, device), o({164, 4, d}, dtype, device);
      for (PlacedTensor* const t : {&q, &k, &v}) t->fill_random(random);
      const Case c{.seqlen_q = 0, .seqlen_k = 0, .batch = 4, .heads = 4, .kv_heads = 2};
      const Descale of_q = descale(c), of_k = descale(c), of_v = descale(c);
      const AttentionOptions options{.causal = causal,
                                     .window_left = causal ? 90 : -1,
                                     .q_descale = &of_q.tensor.tensor(),
                                     .k_descale = &of_k.tensor.tensor(),
                                     .v_descale = &of_v.tensor.tensor()};
      const PackedSequences sequences{to_device(cu_q, {5}), to_device(cu_k, {5})};
      if (!launched([&] { attention_varlen(q, k, v, o, sequences, options); })) return;
      const std::vector<double> out = o.values();
      for (std::size_t b = 0; b < 4; ++b) {
        if (cu_q[b] == cu_q[b + 1]) continue;
        const auto rows = [&](const PlacedTensor& t, const std::vector<std::int32_t>& cu) {
          return as_batch(t.tensor().slice(0, cu[b], cu[b + 1]));
        };
        const std::vector<double> expected = alone(rows(q, cu_q), rows(k, cu_k), rows(v, cu_k), options, static_cast<std::int64_t>(b));
        expect_alike({out.begin() + cu_q[b] * 4 * d, out.begin() + cu_q[b + 1] * 4 * d}, expected);
      }
    }
  }
}

TEST_P(Fp8Sequences, InACache) {
  // Contiguous, where batch_idx maps sequences, and in pages that lie in reverse order; with a new token each.
  const std::vector<std::int32_t> seqlens{29, 0, 90}, batch_idx{3, 0, 2};
  constexpr std::int64_t batch = 3, capacity = 96, heads = 4, kv_heads = 2, d = 64, page = 16, pages = capacity / page;
  for (const bool paged : {false, true}) {
    for (const int num_splits : {0, 3}) {
      PlacedTensor q({batch, 1, heads, d}, DType::fp8_e4m3, device), new_k({batch, 1, kv_heads, d}, DType::fp8_e4m3, device),
          new_v({batch, 1, kv_heads, d}, DType::fp8_e4m3, device), o({batch, 1, heads, d}, dtype, device);
      const Shape shape = paged ? Shape{batch * pages, page, kv_heads, d} : Shape{batch + 1, capacity, kv_heads, d};
      PlacedTensor k(shape, DType::fp8_e4m3, device), v(shape, DType::fp8_e4m3, device);
      for (PlacedTensor* const t : {&q, &new_k, &new_v, &k, &v}) t->fill_random(random);
      std::vector<std::int32_t> table;
      for (std::int64_t n = 0; n < batch * pages; ++n) table.push_back(static_cast<std::int32_t>(batch * pages - 1 - n));
      const Tensor lengths = to_device(seqlens, {batch}), index = to_device(batch_idx, {batch}),
                   pages_of = to_device(table, {batch, pages});
      const Case c{.seqlen_q = 1, .seqlen_k = 1, .batch = batch, .heads = heads, .kv_heads = kv_heads};
      const Descale of_q = descale(c), of_k = descale(c), of_v = descale(c);
      const AttentionOptions options{
          .q_descale = &of_q.tensor.tensor(), .k_descale = &of_k.tensor.tensor(), .v_descale = &of_v.tensor.tensor()};
      CacheOptions cache{.seqlens = &lengths, .new_k = &new_k.tensor(), .new_v = &new_v.tensor(), .num_splits = num_splits};
      (paged ? cache.block_table : cache.batch_idx) = paged ? &pages_of : &index;
      if (!launched([&] { attention_decode(q, k, v, o, cache, options); })) return;
      const std::vector<double> out = o.values(), keys = k.values(), values = v.values();
      for (std::int64_t b = 0; b < batch; ++b) {
        const std::int64_t size = seqlens[static_cast<std::size_t>(b)] + 1, row = kv_heads * d;
        PlacedTensor own_k({1, size, kv_heads, d}, DType::fp8_e4m3, device), own_v({1, size, kv_heads, d}, DType::fp8_e4m3, device);
        std::vector<float> from_k, from_v;
        for (std::int64_t token = 0; token < size; ++token) {
          const std::int64_t at = paged ? table[static_cast<std::size_t>(b * pages + token / page)] * page + token % page
                                        : batch_idx[static_cast<std::size_t>(b)] * capacity + token;
          for (std::int64_t n = 0; n < row; ++n) {
            from_k.push_back(static_cast<float>(keys[static_cast<std::size_t>(at * row + n)]));
            from_v.push_back(static_cast<float>(values[static_cast<std::size_t>(at * row + n)]));
          }
        }
        own_k.fill(from_k);
        own_v.fill(from_v);
        // The last token is the new one.
        const std::vector<double> added = new_k.values();
        for (std::int64_t n = 0; n < row; ++n)
          ASSERT_EQ(from_k[static_cast<std::size_t>((size - 1) * row + n)], added[static_cast<std::size_t>(b * row + n)]);
        const std::vector<double> expected = alone(q.tensor().slice(0, b, b + 1), own_k, own_v, options, b);
        expect_alike({out.begin() + b * heads * d, out.begin() + (b + 1) * heads * d}, expected);
      }
    }
  }
}

// Each thread's weights are where the product takes them from, if keys are in the order of eight_bit_key().
TEST(Fp8Weights, StayInTheirThreads) {
  using Scores = cuda::Fragment<float, 64, 128>;
  using Weights = cuda::Operand<fp8_e4m3, 64, 128>;
  for (u32 thread = 0; thread < 128; ++thread) {
    const cuda::Position at = cuda::Position::of(thread);
    Scores scores;
    Weights weights;
    for (const bool rows : {false, true}) {
      // Numbers up to 16 are exact.
      for (int i = 0; i < Scores::size; ++i)
        scores.x[i] = static_cast<float>(rows ? Scores::row(at, i) % 16 : static_cast<int>(Scores::col(at, i)) % 16);
      cuda::convert_bytes_in_place(weights, scores);
      for (int i = 0; i < Weights::size; ++i) {
        const int col = Weights::col(at, i);
        fp8_e4m3 weight{};
        weight.bits = static_cast<u8>(weights.x[i / 4] >> i % 4 * 8);
        ASSERT_EQ(static_cast<int>(static_cast<float>(weight)), rows ? Weights::row(at, i) % 16 : eight_bit_key(col) % 16)
            << "thread " << thread << " column " << col;
        ASSERT_EQ(eight_bit_key(col) / 16, col / 16);
      }
    }
  }
}

class Fp8AttentionBadInput : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override { skip_unless_present(device); }
  PlacedTensor make(Shape shape, DType dtype = DType::fp8_e4m3) const {
    return PlacedTensor(std::move(shape), dtype, device, {.offset = 16});
  }
  void refused(const Tensor& q, const Tensor& k, const Tensor& v, const PlacedTensor& o, std::initializer_list<std::string_view> parts,
               const AttentionOptions& options = {}) {
    expect_error<InvalidArgument>([&] { tw::attention(q, k, v, o, options); }, parts);
    EXPECT_TRUE(o.untouched());
  }
  const Device device = GetParam();
};

INSTANTIATE_TEST_SUITE_P(Ops, Fp8AttentionBadInput, testing::ValuesIn(kDevices), device_name);

TEST_P(Fp8AttentionBadInput, Dtypes) {
  const PlacedTensor q = make({2, 5, 4, 64}), kv = make({2, 7, 2, 64}), o = make({2, 5, 4, 64}, DType::bf16);
  refused(q, make({2, 7, 2, 64}, DType::bf16), kv, o, {"attention", "k is bf16[2, 7, 2, 64]", "fp8_e4m3"});
  refused(q, kv, make({2, 7, 2, 64}, DType::fp8_e5m2), o, {"v is fp8_e5m2[2, 7, 2, 64]", "fp8_e4m3"});
  refused(make({2, 5, 4, 64}, DType::bf16), kv, kv, o, {"k is fp8_e4m3[2, 7, 2, 64]", "bf16"});
  refused(make({2, 5, 4, 64}, DType::fp8_e5m2), kv, kv, o, {"q is fp8_e5m2[2, 5, 4, 64]", "fp8_e4m3 with o in bf16 or f16"});
  for (const DType dtype : {DType::fp8_e4m3, DType::f32})
    refused(q, kv, kv, make({2, 5, 4, 64}, dtype), {tw::format("o is {}[2, 5, 4, 64]", name_of(dtype)), "bf16 or f16"});
}

TEST_P(Fp8AttentionBadInput, HeadDims) {
  for (const std::int64_t d : {0, 8, 40, 72, 272}) {
    const PlacedTensor q = make({1, 5, 2, d});
    refused(q, q, q, make({1, 5, 2, d}, DType::bf16), {tw::format("q is fp8_e4m3[1, 5, 2, {}]", d), "multiple of 16 from 16 to 256"});
  }
  const PlacedTensor q = make({1, 5, 2, 64});
  refused(q, q, make({1, 5, 2, 24}), make({1, 5, 2, 24}, DType::bf16), {"v is fp8_e4m3[1, 5, 2, 24]", "multiple of 16"});
}

TEST_P(Fp8AttentionBadInput, Descales) {
  const PlacedTensor q = make({2, 5, 4, 64}), kv = make({2, 7, 2, 64}), o = make({2, 5, 4, 64}, DType::f16);
  for (const Shape& shape : {Shape{2, 4}, Shape{2}, Shape{1, 2}, Shape{2, 2, 1}}) {
    const PlacedTensor d = make(shape, DType::f32);
    refused(q, kv, kv, o, {"q_descale is f32[", "f32[2, 2]", "[batch, kv_heads]"}, {.q_descale = &d.tensor()});
    refused(q, kv, kv, o, {"k_descale is f32[", "f32[2, 2]"}, {.k_descale = &d.tensor()});
    refused(q, kv, kv, o, {"v_descale is f32[", "f32[2, 2]"}, {.v_descale = &d.tensor()});
  }
  const PlacedTensor half = make({2, 2}, DType::bf16), d = make({2, 2}, DType::f32);
  refused(q, kv, kv, o, {"k_descale is bf16[2, 2]", "f32"}, {.k_descale = &half.tensor()});
  const PlacedTensor wide_q = make({2, 5, 4, 64}, DType::f16), wide_kv = make({2, 7, 2, 64}, DType::f16);
  refused(wide_q, wide_kv, wide_kv, o, {"v_descale is given, but q is f16[2, 5, 4, 64]", "only fp8_e4m3"}, {.v_descale = &d.tensor()});
  if (device.is_cuda()) {
    const Tensor host = Tensor::zeros({2, 2}, DType::f32, Stream::standard(Device::cpu()));
    refused(q, kv, kv, o, {"q_descale is f32[2, 2]", "cpu"}, {.q_descale = &host});
  }
}

TEST_P(Fp8AttentionBadInput, OtherForms) {
  const PlacedTensor q = make({2, 1, 4, 64}), cache = make({2, 7, 2, 64}), v_cache = make({2, 7, 2, 64}), new_k = make({2, 1, 2, 64});
  const PlacedTensor o = make({2, 1, 4, 64}, DType::bf16), cos = make({9, 8}, DType::f32);
  const PlacedTensor seqlens({2}, DType::i32, device), wide = make({2, 1, 2, 64}, DType::bf16);
  const auto decode = [&](const CacheOptions& options, std::initializer_list<std::string_view> words) {
    expect_error<InvalidArgument>([&] { attention_decode(q, cache, v_cache, o, options); }, words);
  };
  decode({.seqlens = &seqlens.tensor(),
          .new_k = &new_k.tensor(),
          .new_v = &new_k.tensor(),
          .rotary_cos = &cos.tensor(),
          .rotary_sin = &cos.tensor()},
         {"rotary_cos is given", "fp8_e4m3"});
  decode({.seqlens = &seqlens.tensor(), .new_k = &wide.tensor(), .new_v = &wide.tensor()}, {"new_k is bf16[2, 1, 2, 64]", "fp8_e4m3"});
  const PlacedTensor packed = make({7, 2, 64}), out = make({7, 2, 64}), lse = make({2, 7}, DType::f32);
  PlacedTensor cu({2}, DType::i32, device);
  cu.fill(std::vector<float>{0, 7});
  expect_error<InvalidArgument>([&] { attention_varlen(packed, packed, packed, out, {cu, cu}); }, {"o is fp8_e4m3", "bf16 or f16"});
  expect_error<InvalidArgument>(
      [&] {
        attention_varlen_backward(packed, packed, packed, out, lse, out, out, out, out, {cu, cu});
      },
      {"attention_varlen_backward: q is fp8_e4m3[1, 7, 2, 64]", "bf16 and f16"});
  EXPECT_TRUE(o.untouched());
  EXPECT_TRUE(out.untouched());
}

}  // namespace
}  // namespace tw::kernels::attention
