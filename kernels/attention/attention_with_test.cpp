// attention_with(): rules of a user's, together with the library's options, against loops in double.

#include "tilewave/attention_with.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "kernels/attention/heuristics.hpp"
#include "kernels/attention/reference.hpp"
#include "runtime/format.hpp"
#include "tests/accuracy.hpp"
#include "tests/expect_error.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"
#include "tests/user_rules.tile.hpp"

namespace tw::kernels::attention {
namespace {

using namespace tw::test;

constexpr float kHidden = -std::numeric_limits<float>::infinity();
constexpr int kBatch = 2, kHeads = 4, kKvHeads = 2, kQueries = 150, kKeys = 700, kDocuments = 5, kReach = 90;

template <class X>
Tensor to_device(const std::vector<X>& values, Shape shape, Device device) {
  const Tensor host = Tensor::empty(std::move(shape), dtype_of<X>, Stream::standard(Device::cpu()));
  std::copy(values.begin(), values.end(), host.data<X>());
  return host.to(device);
}

class AttentionWith : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override {
    skip_unless_present(device);
    cpu::set_poison_released_slots(true);
    std::uniform_real_distribution<float> distribution(-1, 1);
    for (float& x : bias) x = distribution(random);
    for (float& x : slopes) x = 0.1f + 0.05f * distribution(random);
    for (float& x : sinks) x = distribution(random);
    for (int b = 0; b < kBatch; ++b) {
      // Documents of any lengths, one of which is empty. A query belongs to that of the key that it stands beside.
      std::vector<int> cuts{0, kKeys};
      for (int i = 2; i < kDocuments; ++i) cuts.push_back(static_cast<int>(random() % kKeys));
      cuts.push_back(cuts.back());
      std::sort(cuts.begin(), cuts.end());
      begin.insert(begin.end(), cuts.begin(), cuts.end());
      const auto document = [&](int key) {
        return static_cast<int>(std::upper_bound(cuts.begin(), cuts.end() - 1, key) - cuts.begin()) - 1;
      };
      for (int key = 0; key < kKeys; ++key) of_key.push_back(document(key));
      for (int query = 0; query < kQueries; ++query) of_query.push_back(document(query + kKeys - kQueries));
    }
    begin_there = to_device(begin, {kBatch, kDocuments + 1}, device);
    of_key_there = to_device(of_key, {kBatch, kKeys}, device);
    of_query_there = to_device(of_query, {kBatch, kQueries}, device);
    bias_there = to_device(bias, {kHeads, 2 * kReach - 1}, device);
    slopes_there = to_device(slopes, {kHeads}, device);
    sinks_there = to_device(sinks, {kHeads}, device);
  }

  /// What RelativeBias adds and SameDocument hides, as a mask of the reference.
  std::vector<float> added(bool biased, bool by_document) const {
    std::vector<float> mask(static_cast<std::size_t>(kBatch) * kHeads * kQueries * kKeys);
    std::size_t at = 0;
    for (int b = 0; b < kBatch; ++b) {
      for (int head = 0; head < kHeads; ++head) {
        for (int query = 0; query < kQueries; ++query) {
          for (int key = 0; key < kKeys; ++key, ++at) {
            const int distance = key - query - (kKeys - kQueries);
            if (biased && std::abs(distance) < kReach)
              mask[at] = bias[static_cast<std::size_t>(head * (2 * kReach - 1) + distance + kReach - 1)] * kFactor;
            if (by_document &&
                of_key[static_cast<std::size_t>(b * kKeys + key)] != of_query[static_cast<std::size_t>(b * kQueries + query)])
              mask[at] = kHidden;
          }
        }
      }
    }
    return mask;
  }
  auto binder() const {
    return [this](auto& rule) {
      if constexpr (requires { rule.bias; }) {
        rule.bias = bias_there.data<float>(), rule.reach = kReach, rule.factor = kFactor;
      } else if constexpr (requires { rule.begin; }) {
        rule.of_query = of_query_there.data<i32>(), rule.of_key = of_key_there.data<i32>(), rule.begin = begin_there.data<i32>();
        rule.documents = kDocuments;
      }
    };
  }

  /// o of a call with the rule, after it was compared with the loops' of `mask`; empty where it cannot be launched.
  template <class Rule, class T, int kHeadDim>
  std::vector<double> check(const std::vector<float>& mask, AttentionOptions options, std::int64_t head_dim = kHeadDim) {
    SCOPED_TRACE(tw::format("{}: D {} in {}, causal {}, window {}, softcap {}, ALiBi {}", tw::detail::type_name<Rule>(), head_dim, kHeadDim,
                            options.causal, options.window_left, options.softcap, options.alibi_slopes != nullptr));
    std::mt19937_64 same(seed());  // operands of one size are the same in all calls of a test
    const DType dtype = dtype_of<T>;
    PlacedTensor q({kBatch, kQueries, kHeads, head_dim}, dtype, device), k({kBatch, kKeys, kKvHeads, head_dim}, dtype, device),
        v({kBatch, kKeys, kKvHeads, head_dim}, dtype, device), o({kBatch, kQueries, kHeads, head_dim}, dtype, device),
        lse({kBatch, kHeads, kQueries}, DType::f32, device);
    const std::vector<float> q_values = q.fill_random(same, 2), k_values = k.fill_random(same), v_values = v.fill_random(same);
    options.lse = &lse.tensor();
    if (!launched([&] { attention_with<Rule, T, kHeadDim>(q, k, v, o, binder(), options); })) return {};

    PlainCall plain{.batch = kBatch, .heads = kHeads, .kv_heads = kKvHeads, .seqlen_q = kQueries, .seqlen_k = kKeys, .head_dim = head_dim};
    plain.q = q_values, plain.k = k_values, plain.v = v_values;
    plain.scale = options.scale > 0 ? static_cast<double>(options.scale) : 1 / std::sqrt(static_cast<double>(head_dim));
    plain.causal = options.causal;
    plain.window_left = options.window_left;
    plain.softcap = options.softcap;
    if (options.alibi_slopes) plain.alibi_slopes = slopes;
    if (options.sink) plain.sink = sinks;
    plain.mask = mask, plain.mask_strides = {kHeads * kQueries * kKeys, kQueries * kKeys, kKeys, 1};
    const PlainResult expected = reference(plain);
    EXPECT_TRUE(accurate({o.values(), expected.o, naive(plain, dtype).o, arithmetic_of(dtype, device)}));
    const std::vector<double> lse_values = lse.values();
    for (std::size_t i = 0; i < lse_values.size(); ++i) {
      if (expected.lse[i] == lse_values[i]) continue;  // -infinity
      EXPECT_NEAR(lse_values[i], expected.lse[i], 1e-3) << "lse " << i;
      if (HasFailure()) break;
    }
    return o.values();
  }
  /// Whether a rule with ranges is computed by the same steps as one without: on a GPU the maxima of rows are found in another way where
  /// ranges say in which blocks that may be done, and results differ by rounding.
  bool same_kernel() const { return !device.is_cuda(); }

  /// The kernel as a GPU has it, whose list of rules is known when it is compiled, on the CPU: with one output in flight and with none.
  template <class Rule>
  void check_compiled_in(const std::vector<float>& mask, const AttentionOptions& options) {
    check_schedule<Rule, TileUse::paired>(mask, options);
    check_schedule<Rule, TileUse::narrow>(mask, options);
  }
  template <class Rule, TileUse kUse>
  void check_schedule(const std::vector<float>& mask, const AttentionOptions& options) {
    constexpr AttentionConfig config =
        gpu_config({64, 64}, kUse, kEqualLengths, {tw::detail::kUserRule<Rule>.anywhere, tw::detail::kUserRule<Rule>.changing, true});
    SCOPED_TRACE(tw::format("{}, causal {}, window {}, {} keys at a time", tw::detail::type_name<Rule>(), options.causal,
                            options.window_left, config.keys));
    PlacedTensor q({kBatch, kQueries, kHeads, 64}, DType::f32, device), k({kBatch, kKeys, kKvHeads, 64}, DType::f32, device),
        v({kBatch, kKeys, kKvHeads, 64}, DType::f32, device), o({kBatch, kQueries, kHeads, 64}, DType::f32, device);
    const std::vector<float> q_values = q.fill_random(random, 2), k_values = k.fill_random(random), v_values = v.fill_random(random);
    using List = tw::detail::CallRules<Rule>;
    using Kernel = Attention<float, config, List>;
    const tw::detail::AttentionCall call = tw::detail::check_attention(q, k, v, o, options);
    const auto bind_rule = binder();
    launch_cpu<Kernel>(tw::detail::attention_grid(call, 128),
                       [&](auto& bind, auto& p) { tw::detail::fill_attention<List>(bind, p, call, config.keys, bind_rule); });
    PlainCall plain{.batch = kBatch, .heads = kHeads, .kv_heads = kKvHeads, .seqlen_q = kQueries, .seqlen_k = kKeys, .head_dim = 64};
    plain.q = q_values, plain.k = k_values, plain.v = v_values;
    plain.scale = 0.125;
    plain.causal = options.causal;
    plain.window_left = options.window_left;
    plain.mask = mask, plain.mask_strides = {kHeads * kQueries * kKeys, kQueries * kKeys, kKeys, 1};
    EXPECT_TRUE(accurate({o.values(), reference(plain).o, naive(plain, DType::f32).o, Arithmetic::f32}));
  }

  /// Everything that the library does to scores before and after a rule.
  AttentionOptions everything() const {
    return {.scale = 0.2f, .causal = true, .window_left = 300, .softcap = 5, .alibi_slopes = &slopes_there, .sink = &sinks_there};
  }

  static constexpr float kFactor = 3;
  const Device device = GetParam();
  std::mt19937_64 random = random_engine();
  std::vector<float> bias = std::vector<float>(kHeads * (2 * kReach - 1)), slopes = std::vector<float>(kHeads),
                     sinks = std::vector<float>(kHeads);
  std::vector<int> begin, of_key, of_query;
  Tensor begin_there, of_key_there, of_query_there, bias_there, slopes_there, sinks_there;
};

INSTANTIATE_TEST_SUITE_P(Ops, AttentionWith, testing::ValuesIn(kDevices), device_name);

TEST_P(AttentionWith, AMaskWithAndWithoutRanges) {
  const std::vector<float> mask = added(false, true);
  for (const AttentionOptions& options : {AttentionOptions{}, AttentionOptions{.causal = true}, everything()}) {
    const std::vector<double> looked_at = check<SameDocument, bf16, 64>(mask, options);
    const std::vector<double> by_range = check<SameDocumentByRange, bf16, 64>(mask, options);
    if (same_kernel()) {
      EXPECT_EQ(by_range, looked_at);
    }
  }
}

TEST_P(AttentionWith, AChangeOfScoresWithAndWithoutRanges) {
  const std::vector<float> mask = added(true, false);
  for (const AttentionOptions& options : {AttentionOptions{}, AttentionOptions{.scale = 0.3f, .softcap = 4}, everything()}) {
    const std::vector<double> all = check<RelativeBias, bf16, 64>(mask, options);
    const std::vector<double> before = check<RelativeBiasFromOneSide<true>, bf16, 64>(mask, options);
    const std::vector<double> behind = check<RelativeBiasFromOneSide<false>, bf16, 64>(mask, options);
    if (same_kernel()) {
      EXPECT_EQ(before, all);
      EXPECT_EQ(behind, all);
    }
  }
}

TEST_P(AttentionWith, InF32WhereUnitsShow) {
  if (device.is_cuda()) GTEST_SKIP() << "skipped: f32 is for the CPU";
  for (AttentionOptions options : {AttentionOptions{.scale = 0.3f}, AttentionOptions{.softcap = 4}, everything()}) {
    check<RelativeBias, float, 64>(added(true, false), options);
    options.alibi_slopes = &slopes_there;
    check<RelativeBias, float, 64>(added(true, false), options);
  }
}

TEST_P(AttentionWith, RulesThatAreCompiledIn) {
  if (device.is_cuda()) GTEST_SKIP() << "skipped: the other tests run these kernels on a GPU";
  for (const AttentionOptions& options : {AttentionOptions{}, AttentionOptions{.causal = true},
                                          AttentionOptions{.causal = true, .window_left = 300}, AttentionOptions{.window_left = 20}}) {
    check_compiled_in<SameDocument>(added(false, true), options);
    check_compiled_in<SameDocumentByRange>(added(false, true), options);
    check_compiled_in<RelativeBias>(added(true, false), options);
    check_compiled_in<RelativeBiasFromOneSide<true>>(added(true, false), options);
    check_compiled_in<RelativeBiasFromOneSide<false>>(added(true, false), options);
  }
}

TEST_P(AttentionWith, SmallerHeadsThanTheKernels) {
  for (const std::int64_t head_dim : {8, 72, 128}) check<SameDocument, f16, 128>(added(false, true), {.causal = true}, head_dim);
}

TEST_P(AttentionWith, ARuleThatDoesBoth) {
  std::vector<float> odd_hidden(static_cast<std::size_t>(kBatch) * kHeads * kQueries * kKeys);
  for (std::size_t i = 1; i < odd_hidden.size(); i += 2) odd_hidden[i] = kHidden;
  static_assert(kKeys % 2 == 0);
  // Twice the scores are those of twice the scale.
  const AttentionOptions options{.scale = 0.125f, .causal = true};
  PlacedTensor q({kBatch, kQueries, kHeads, 64}, DType::bf16, device), k({kBatch, kKeys, kKvHeads, 64}, DType::bf16, device),
      o({kBatch, kQueries, kHeads, 64}, DType::bf16, device), expected({kBatch, kQueries, kHeads, 64}, DType::bf16, device);
  q.fill_random(random);
  k.fill_random(random);
  if (!launched([&] {
        attention_with<DoubledEvenKeys, bf16, 64>(
            q, k, k, o, [](auto&) {}, options);
      }))
    return;
  const Tensor mask = to_device(std::vector<float>(odd_hidden.begin(), odd_hidden.begin() + kKeys), {kKeys}, device);
  if (!launched([&] { tw::attention(q, k, k, expected, {.scale = 0.25f, .causal = true, .mask = &mask}); })) return;
  const std::vector<double> values = o.values(), expected_values = expected.values();
  for (std::size_t i = 0; i < values.size(); ++i) ASSERT_NEAR(values[i], expected_values[i], 1.0 / 64) << i;
}

TEST_P(AttentionWith, BadInput) {
  const auto make = [&](Shape shape, DType dtype = DType::bf16) { return PlacedTensor(std::move(shape), dtype, device); };
  const PlacedTensor q = make({2, 5, 4, 64}), kv = make({2, 7, 2, 64}), o = make({2, 5, 4, 64});
  const auto nothing = [](auto&) {};
  expect_error<InvalidArgument>([&] { attention_with<SameDocument, f16, 128>(q, kv, kv, o, nothing); },
                                {"attention_with: q is bf16[2, 5, 4, 64]", "made for f16"});
  const PlacedTensor q_wide = make({2, 5, 4, 72}), kv_wide = make({2, 7, 2, 72}), o_wide = make({2, 5, 4, 72});
  expect_error<InvalidArgument>([&] { attention_with<SameDocument, bf16, 64>(q_wide, kv_wide, kv_wide, o_wide, nothing); },
                                {"head_dim 72", "v 72", "made for 64 and less"});
  expect_error<InvalidArgument>([&] { attention_with<SameDocument, bf16, 64>(q, kv, kv_wide, o_wide, nothing); },
                                {"head_dim 64", "v 72", "made for 64 and less"});
  expect_error<InvalidArgument>(
      [&] {
        attention_with<SameDocument, bf16, 64>(q, make({2, 7, 3, 64}), make({2, 7, 3, 64}), o, nothing);
      },
      {"q has 4 heads", "multiple"});
  EXPECT_TRUE(o.untouched());
  EXPECT_TRUE(o_wide.untouched());
}

/// A rule without `source`.
struct HostOnly {
  template <class Target>
  struct Params {};
  static bool visible(const auto&, const Score&) { return true; }
};

TEST(AttentionWithKernel, NamesARuleThatAGpuCannotHave) {
  expect_error<InvalidArgument>([] { attention_with_kernel<HostOnly, bf16, 64>(); }, {"HostOnly cannot run on a GPU", "no `source`"});
}

TEST(AttentionWithKernel, IsOneForEachSetOfRules) {
  const auto type = []<class Rule, class T, int kHeadDim>(const AttentionOptions& options = {}) {
    return attention_with_kernel<Rule, T, kHeadDim>(options).type;
  };
  const auto plain = [&] { return type.template operator()<SameDocument, bf16, 64>(); };
  EXPECT_EQ(plain().data(), plain().data());  // named once
  const std::string_view others[] = {type.template operator()<SameDocument, bf16, 64>({.causal = true}),
                                     type.template operator()<SameDocument, bf16, 128>(), type.template operator()<SameDocument, f16, 64>(),
                                     type.template operator()<SameDocumentByRange, bf16, 64>()};
  for (const std::string_view other : others) EXPECT_NE(other, plain());
}

TEST(AttentionWithKernel, HasTheRulesOfTheOptionsAndCompiles) {
  const KernelInfo plain = attention_with_kernel<SameDocument, bf16, 64>();
  EXPECT_EQ(plain.source, "tests/user_rules.tile.hpp");
  EXPECT_NE(plain.type.find("tw::UserRule<tw::test::SameDocument>, tw::Band<false, false>"), std::string_view::npos) << plain.type;
  const KernelInfo with = attention_with_kernel<RelativeBiasFromOneSide<false>, bf16, 128>({.causal = true, .softcap = 30});
  EXPECT_NE(with.type.find("tw::Optional<tw::Softcap, tw::Use::always>"), std::string_view::npos) << with.type;
  EXPECT_NE(with.type.find("tw::Band<false, true>"), std::string_view::npos) << with.type;
  EXPECT_NE(with.type.find(".head_dim = 128, .value_dim = 128, .rows = 128, .keys = 128"), std::string_view::npos) << with.type;
  skip_without_nvrtc();
  for (const KernelInfo* info : {&plain, &with}) {
    const CompiledKernel kernel = compile(make_spec(*info, true, true));
    EXPECT_EQ(kernel.spill_bytes, 0) << info->type;
    EXPECT_TRUE(kernel.performance_losses.empty()) << info->type;
  }
}

}  // namespace
}  // namespace tw::kernels::attention
