// attention_backward() against loops in double, on the CPU and, where there is one, on a GPU.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "kernels/attention/attention_case.hpp"
#include "kernels/attention/backward.hpp"
#include "kernels/attention/backward_case.hpp"
#include "kernels/attention/backward_reference.hpp"
#include "runtime/format.hpp"
#include "tests/compiled_kernels.hpp"
#include "tests/support.hpp"
#include "tilewave/attention.hpp"
#include "tilewave/tile/cpu/target.tile.hpp"

namespace tw::kernels::attention {
namespace {

class AttentionBackward : public AttentionTest {
 protected:
  void SetUp() override {
    skip_unless_present(device);
    if (device.is_cuda() && dtype == DType::f32) GTEST_SKIP() << "f32 is for the CPU";
    cpu::set_poison_released_slots(true);
    if (!device.is_cuda()) return;
    [[maybe_unused]] static const bool warm = (compile_all(specs_of(registered_backward())), true);  // on all cores
  }

  /// The default; options.deterministic; on the CPU, the kernel that adds dQ up, in any order and in turn.
  enum class Way { fast, deterministic, summed, summed_in_turn };
  static constexpr bool adds_up(Way way) { return way == Way::summed || way == Way::summed_in_turn; }

  /// The tensors of a forward pass, and what it gave.
  struct Pass {
    Pass(const Case& c, DType dtype, Device device)
        : q({c.batch, c.seqlen_q, c.heads, c.head_dim}, dtype, device, placement(c.q)),
          k({c.batch, c.seqlen_k, c.kv_heads, c.head_dim}, dtype, device, placement(c.kv)),
          v({c.batch, c.seqlen_k, c.kv_heads, c.values()}, dtype, device, placement(c.kv)),
          o({c.batch, c.seqlen_q, c.heads, c.values()}, dtype, device, placement(c.o)),
          d_o({c.batch, c.seqlen_q, c.heads, c.values()}, dtype, device, placement(c.o)),
          lse({c.batch, c.heads, c.seqlen_q}, DType::f32, device, {.offset = 3}) {}
    PlacedTensor q, k, v, o, d_o, lse;
  };
  /// Gradients, poisoned at first.
  struct Gradients {
    Gradients(const Case& c, DType dtype, Device device, const AttentionOptions& options, DType of_mask)
        : dq({c.batch, c.seqlen_q, c.heads, c.head_dim}, dtype, device, placement(c.q)),
          dk({c.batch, c.seqlen_k, c.kv_heads, c.head_dim}, dtype, device, placement(c.kv)),
          dv({c.batch, c.seqlen_k, c.kv_heads, c.values()}, dtype, device, placement(c.kv)),
          d_sink({c.heads}, DType::f32, device, {.offset = 1}),
          d_mask(options.mask ? options.mask->shape() : Shape{1}, of_mask, device, {.offset = 3}) {}
    PlacedTensor dq, dk, dv, d_sink, d_mask;
    /// Without d_sink and d_mask if they were not written.
    std::vector<std::vector<double>> values() const {
      std::vector<std::vector<double>> all = {dq.values(), dk.values(), dv.values()};
      for (const PlacedTensor* const t : {&d_sink, &d_mask})
        if (!t->untouched()) all.push_back(t->values());
      return all;
    }
  };

  void check(const Case& c) {
    SCOPED_TRACE(c.describe());
    Pass pass(c, dtype, device);
    PlainCall plain = plain_call(c);
    AttentionOptions options;
    Features features;
    add_features(c, features, options, plain);
    const std::vector<float> q = pass.q.fill_random(random, c.magnitude), k = pass.k.fill_random(random, c.magnitude),
                             v = pass.v.fill_random(random), d_o = pass.d_o.fill_random(random);
    plain.q = q, plain.k = k, plain.v = v;
    options.lse = &pass.lse.tensor();
    if (!launched([&] { tw::attention(pass.q, pass.k, pass.v, pass.o, options); })) return;
    const PlainGradients exact = reference_gradients(plain, d_o), near = naive_gradients(plain, d_o, dtype);
    for (const Way way : {Way::fast, Way::deterministic, Way::summed, Way::summed_in_turn}) {
      if (device.is_cuda() ? adds_up(way) : way == Way::fast) continue;
      if (adds_up(way) && (c.softcap > 0 || std::max(c.head_dim, c.values()) > 128)) continue;
      SCOPED_TRACE(tw::format("way {}", static_cast<int>(way)));
      const DType of_mask = adds_mask(c) && way == Way::deterministic ? *c.mask : DType::f32;
      const Gradients out = run(pass, c, options, way, of_mask);
      const auto expect = [&](const char* name, const PlacedTensor& of, const std::vector<double>& of_exact,
                              const std::vector<double>& of_near, std::span<const double> of_cancelled) {
        expect_gradient(name, of, of_exact, of_near, of_cancelled, c.values());
      };
      expect("dq", out.dq, exact.dq, near.dq, exact.dq_cancelled);
      expect("dk", out.dk, exact.dk, near.dk, exact.dk_cancelled);
      // A query that sees one key has a naive weight of exactly 1. In 16 bits the rounding of weights is larger than their exponents'.
      expect("dv", out.dv, exact.dv, near.dv, dtype == DType::f32 ? std::span(exact.dv_cancelled) : std::span<const double>());
      if (c.sink && !adds_up(way))
        expect("d_sink", out.d_sink, exact.d_sink, near.d_sink, exact.d_sink_cancelled);
      else
        EXPECT_TRUE(out.d_sink.untouched());
      if (adds_mask(c) && !adds_up(way))
        expect("d_mask", out.d_mask, exact.d_mask, near.d_mask, exact.d_mask_cancelled);
      else
        EXPECT_TRUE(out.d_mask.untouched());
    }
  }
  static bool adds_mask(const Case& c) { return c.mask && *c.mask != DType::boolean; }
  /// `of_mask`: the dtype of the mask's gradient.
  Gradients run(const Pass& pass, const Case& c, const AttentionOptions& options, Way way = Way::deterministic,
                DType of_mask = DType::f32) const {
    Gradients out(c, dtype, device, options, of_mask);
    if (adds_up(way)) {
      BackwardCall call = check_backward(pass.q, pass.k, pass.v, pass.o, pass.lse, pass.d_o, out.dq, out.dk, out.dv,
                                         {.forward = options, .deterministic = way == Way::summed_in_turn});
      run_adding_up(call);
      return out;
    }
    attention_backward(pass.q, pass.k, pass.v, pass.o, pass.lse, pass.d_o, out.dq, out.dk, out.dv,
                       {.forward = options,
                        .d_sink = options.sink ? &out.d_sink.tensor() : nullptr,
                        .d_mask = adds_mask(c) ? &out.d_mask.tensor() : nullptr,
                        .deterministic = way == Way::deterministic});
    return out;
  }
  void expect_gradient(const char* name, const PlacedTensor& out, const std::vector<double>& exact, const std::vector<double>& near,
                       std::span<const double> cancelled, std::int64_t value_dim) const {
    const std::vector<double> values = out.values();
    EXPECT_TRUE(accurate({.out = values,
                          .reference = exact,
                          .naive = near,
                          .arithmetic = arithmetic_of(dtype, device),
                          .factor = 3,
                          .cancelled = cancelled,
                          .cancelled_products = value_dim}))
        << name;
    EXPECT_TRUE(out.gaps_intact()) << name;
  }
};

INSTANTIATE_TEST_SUITE_P(Ops, AttentionBackward, testing::Combine(testing::ValuesIn(kDevices), testing::ValuesIn(kDTypes)),
                         device_and_dtype);

TEST_P(AttentionBackward, AnyLengths) {
  // Around the tiles of all targets, 16 to 128 queries and keys; more queries than keys and fewer.
  constexpr std::int64_t kPairs[][2] = {{1, 1},   {1, 128},   {128, 1},   {2, 3},    {15, 17},   {63, 64},  {64, 63},  {64, 64},
                                        {65, 65}, {127, 129}, {129, 127}, {191, 65}, {193, 128}, {37, 257}, {257, 37}, {113, 211}};
  for (const auto& [seqlen_q, seqlen_k] : kPairs) {
    for (const bool causal : {false, true})
      check({.seqlen_q = seqlen_q, .seqlen_k = seqlen_k, .heads = 2, .kv_heads = 1, .head_dim = causal ? 128 : 64, .causal = causal});
  }
  const std::int64_t longest = device.is_cuda() ? 2049 : 513;
  for (const bool causal : {false, true}) {
    check({.seqlen_q = 383, .seqlen_k = longest, .causal = causal});
    check({.seqlen_q = longest, .seqlen_k = 383, .head_dim = 128, .causal = causal});
  }
}

TEST_P(AttentionBackward, AnyHeadDim) {
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
      check({.seqlen_q = 133, .seqlen_k = 201, .heads = 2, .kv_heads = 1, .head_dim = head_dim, .causal = causal, .value_dim = value_dim});
  }
}

TEST_P(AttentionBackward, Windows) {
  for (const auto& [left, right] : {std::pair{0, 0}, {5, -1}, {-1, 7}, {64, 3}, {1, 130}, {200, 200}, {1 << 30, 1 << 30}}) {
    check({.seqlen_q = 150, .seqlen_k = 170, .heads = 2, .window_left = left, .window_right = right});
    check({.seqlen_q = 300, .seqlen_k = 300, .head_dim = 128, .causal = true, .window_left = left, .window_right = right});
    check({.seqlen_q = 310, .seqlen_k = 90, .window_left = left, .window_right = right});
    check({.seqlen_q = 70, .seqlen_k = 500, .causal_offset = 100, .window_left = left, .window_right = right});
  }
}

TEST_P(AttentionBackward, Chunks) {
  for (const int chunk : {1, 7, 64, 100, 128, 200, 1000}) {
    check({.seqlen_q = 150, .seqlen_k = 170, .heads = 2, .chunk = chunk});
    check({.seqlen_q = 300, .seqlen_k = 300, .head_dim = 128, .causal = true, .chunk = chunk});
    check({.seqlen_q = 310, .seqlen_k = 90, .chunk = chunk, .sink = true});
    check({.seqlen_q = 90, .seqlen_k = 270, .heads = 4, .kv_heads = 2, .window_left = 60, .window_right = 9, .chunk = chunk});
  }
  check({.seqlen_q = 140, .seqlen_k = 230, .head_dim = 256, .causal_offset = -33, .chunk = 50, .softcap = 5});
}

TEST_P(AttentionBackward, CausalOffsets) {
  // From a query that sees nothing to one that sees everything; -70 and less leave whole tiles without keys.
  for (const int offset : {-1000, -100, -70, -64, -63, -1, 0, 1, 17, 64, 99, 100, 1000, -(1 << 29), 1 << 29}) {
    check({.seqlen_q = 100, .seqlen_k = 90, .heads = 2, .kv_heads = 2, .causal = true, .causal_offset = offset});
    check({.seqlen_q = 70, .seqlen_k = 200, .head_dim = 128, .causal = true, .causal_offset = offset});
  }
}

TEST_P(AttentionBackward, ScoresThatRulesChange) {
  for (const std::int64_t head_dim : {64, 128}) {
    for (const bool causal : {false, true}) {
      const Case c{.seqlen_q = 133, .seqlen_k = 150, .heads = 4, .kv_heads = 2, .head_dim = head_dim, .causal = causal};
      Case softcap = c, alibi = c, sink = c, all = c;
      softcap.softcap = 3;
      softcap.magnitude = 1.5f;  // most of the cap's range
      alibi.alibi = 2;
      sink.sink = true;
      all.softcap = 5, all.alibi = 1, all.sink = true, all.window_left = 40;
      for (const Case& x : {softcap, alibi, sink, all}) check(x);
    }
  }
}

TEST_P(AttentionBackward, Masks) {
  for (const DType type : {DType::boolean, DType::f32, dtype}) {
    for (const unsigned dims : {15u, 12u, 8u, 4u, 13u, 14u, 0u})
      check({.seqlen_q = 67, .seqlen_k = 140, .batch = 2, .heads = 2, .kv_heads = 1, .mask = type, .mask_dims = dims});
  }
}

TEST_P(AttentionBackward, MasksOfAnyExtents) {
  // Their gradients are sums over the sequences, heads, queries and keys in which they have an extent of 1.
  for (unsigned dims = 0; dims < 16; ++dims) {
    const DType type = dims % 2 == 0 ? DType::f32 : dtype;
    Case c{
        .seqlen_q = 133, .seqlen_k = 150, .batch = 2, .heads = 4, .kv_heads = 2, .mask = type, .mask_dims = dims, .mask_hides = dims > 3};
    check(c);
    c.causal = true, c.head_dim = 128, c.seqlen_q = 260;
    check(c);
  }
}

TEST_P(AttentionBackward, MasksWithOtherRules) {
  for (const unsigned dims : {15u, 13u, 14u, 7u, 11u, 8u}) {
    const Case c{.seqlen_q = 190, .seqlen_k = 201, .batch = 2, .heads = 2, .kv_heads = 1, .mask = DType::f32, .mask_dims = dims};
    Case changed = c, window = c, offset = c, chunks = c, dropping = c;
    changed.softcap = 3, changed.alibi = 2, changed.sink = true;
    window.window_left = 40, window.window_right = 9, window.head_dim = 256;
    offset.causal = true, offset.causal_offset = -70, offset.value_dim = 32;
    chunks.chunk = 50, chunks.causal = true, chunks.head_dim = 96, chunks.mask_hides = true;
    dropping.dropout = 0.3f, dropping.causal = true, dropping.head_dim = 192, dropping.value_dim = 128;
    for (const Case& x : {changed, window, offset, chunks, dropping}) check(x);
  }
}

TEST_P(AttentionBackward, MasksAtTheEdgesOfTiles) {
  for (const auto& [seqlen_q, seqlen_k] : {std::pair{1, 1}, {1, 65}, {127, 64}, {128, 63}, {129, 1}, {256, 129}, {257, 191}}) {
    for (const unsigned dims : {15u, 12u, 4u, 8u, 0u})
      check({.seqlen_q = seqlen_q, .seqlen_k = seqlen_k, .heads = 3, .kv_heads = 1, .mask = dtype, .mask_dims = dims});
  }
}

TEST_P(AttentionBackward, HeadsShareKeys) {
  for (const std::int64_t group : {1, 2, 4, 8}) {
    for (const std::int64_t kv_heads : {1, 3}) {
      check({.seqlen_q = 65, .seqlen_k = 80, .batch = 2, .heads = group * kv_heads, .kv_heads = kv_heads, .causal = true});
      check({.seqlen_q = 9, .seqlen_k = 130, .heads = group * kv_heads, .kv_heads = kv_heads, .head_dim = 128});
    }
  }
}

TEST_P(AttentionBackward, AnyStrides) {
  for (const Place place : {Place::dense, Place::by_head, Place::aligned, Place::unaligned}) {
    for (const std::int64_t head_dim : {64, 128})
      check({.seqlen_q = 70,
             .seqlen_k = 133,
             .batch = 2,
             .heads = 4,
             .kv_heads = 2,
             .head_dim = head_dim,
             .causal = true,
             .q = place,
             .kv = place,
             .o = place});
  }
  check({.seqlen_q = 70, .seqlen_k = 133, .heads = 2, .kv_heads = 2, .q = Place::unaligned, .kv = Place::by_head, .o = Place::aligned});
}

TEST_P(AttentionBackward, Scales) {
  // With a smaller one f16's gradients would be subnormal.
  for (const float scale : {1e-3f, 0.01f, 0.3f}) check({.seqlen_q = 66, .seqlen_k = 140, .causal = true, .scale = scale});
  // Scores of some hundreds, whose exponentials are far beyond f32: most weights are 0 or 1. In f32 they are smaller, since the rounding of
  // such scores alone changes weights by 1e-4.
  check({.seqlen_q = 66, .seqlen_k = 300, .magnitude = dtype == DType::f32 ? 2.0f : 8.0f});
}

TEST_P(AttentionBackward, SampledFeatures) {
  // On a GPU every list of rules is a kernel to compile, so there are fewer.
  const int cases = device.is_cuda() ? 60 : random_cases(50);
  struct List {
    int dim;
    bool softcap, alibi, mask, lower, upper, chunks;
  };
  std::vector<List> lists;
  constexpr int kDims[] = {64, 96, 128, 192, 256};
  const int list_count = device.is_cuda() ? 8 : cases;
  for (int i = 0; i < list_count; ++i)
    lists.push_back({kDims[pick(5)], pick(3) == 0, pick(3) == 0, pick(4) == 0, pick(3) == 0, pick(2) == 0, pick(5) == 0});
  for (int i = 0; i < cases && !HasFailure(); ++i) {
    const List& list = lists[static_cast<std::size_t>(i % list_count)];
    const int group = 1 + pick(4), kv_heads = 1 + pick(2);
    const bool causal = list.upper && pick(2) == 0;
    check({.seqlen_q = 1 + pick(pick(4) == 0 ? 260 : 70),
           .seqlen_k = pick(pick(4) == 0 ? 300 : 150),
           .batch = 1 + pick(2),
           .heads = group * kv_heads,
           .kv_heads = kv_heads,
           .head_dim = list.dim - 8 * pick(3),
           .causal = causal,
           .causal_offset = !list.alibi && pick(3) == 0 ? std::optional(pick(200) - 100) : std::nullopt,
           .value_dim = list.dim - 8 * pick(3),
           .window_left = list.lower ? pick(150) : -1,
           .window_right = list.upper && !causal ? pick(100) : -1,
           .chunk = list.chunks ? 1 + pick(150) : 0,
           .softcap = list.softcap ? 1.0f + static_cast<float>(pick(40)) : 0,
           .alibi = list.alibi ? 1 + pick(2) : 0,
           .sink = pick(3) == 0,
           .mask = list.mask ? std::optional(pick(2) == 0 ? DType::boolean : DType::f32) : std::nullopt,
           .mask_dims = static_cast<unsigned>(pick(16))});
  }
}

TEST_P(AttentionBackward, Dropout) {
  for (const std::int64_t head_dim : {64, 96, 128, 256}) {
    const Case c{.seqlen_q = 150, .seqlen_k = 165, .batch = 2, .heads = 2, .kv_heads = 1, .head_dim = head_dim, .dropout = 0.1f};
    Case high = c, all = c;
    high.dropout = 0.75f, high.causal = true;
    all.softcap = head_dim == 128 ? 5 : 0;
    all.alibi = 1, all.sink = true, all.window_left = 90, all.mask = DType::boolean;
    for (const Case& x : {c, high, all}) check(x);
  }
}

TEST_P(AttentionBackward, LeavesAMargin) {
  // On a GPU one SM is left: blocks that wait for their turn must not keep out the ones that they wait for.
  const Case c{.seqlen_q = 300, .seqlen_k = 400, .heads = 4, .kv_heads = 2, .causal = true};
  Pass pass(c, dtype, device);
  for (PlacedTensor* const t : {&pass.q, &pass.k, &pass.v, &pass.d_o}) t->fill_random(random);
  AttentionOptions options{.causal = true, .lse = &pass.lse.tensor()};
  tw::attention(pass.q, pass.k, pass.v, pass.o, options);
  const auto expected = run(pass, c, options).values();
  options.sm_margin = device.is_cuda() ? device_info(device).units - 1 : 1000;
  EXPECT_EQ(run(pass, c, options).values(), expected);
}

TEST_P(AttentionBackward, WithoutKeysOrQueries) {
  check({.seqlen_q = 70, .seqlen_k = 0, .batch = 2, .heads = 2, .kv_heads = 1, .sink = true});
  check({.seqlen_q = 0, .seqlen_k = 70, .batch = 2, .heads = 2, .kv_heads = 1, .sink = true});
  check({.seqlen_q = 0, .seqlen_k = 0, .batch = 2, .heads = 2, .kv_heads = 2, .sink = true});
  check({.seqlen_q = 5, .seqlen_k = 7, .batch = 0, .heads = 2, .kv_heads = 1, .sink = true});
  check({.seqlen_q = 5, .seqlen_k = 7, .batch = 2, .heads = 0, .kv_heads = 2});
  // Masks that have elements all the same get gradients of 0.
  check({.seqlen_q = 70, .seqlen_k = 0, .batch = 2, .heads = 2, .kv_heads = 1, .mask = DType::f32, .mask_dims = 7});
  check({.seqlen_q = 0, .seqlen_k = 70, .batch = 2, .heads = 2, .kv_heads = 1, .mask = dtype, .mask_dims = 8});
  check({.seqlen_q = 5, .seqlen_k = 7, .batch = 0, .heads = 2, .kv_heads = 1, .mask = DType::f32, .mask_dims = 12});
}

TEST_P(AttentionBackward, QueriesThatSeeNothing) {
  // Bottom-right aligned, the first Sq - Sk queries see no key: their gradient is 0, never NaN.
  const Case c{.seqlen_q = 200, .seqlen_k = 20, .causal = true};
  check(c);
  Pass pass(c, dtype, device);
  for (PlacedTensor* const t : {&pass.q, &pass.k, &pass.v, &pass.d_o}) t->fill_random(random);
  const AttentionOptions options{.causal = true, .lse = &pass.lse.tensor()};
  tw::attention(pass.q, pass.k, pass.v, pass.o, options);
  const std::vector<double> dq = run(pass, c, options).dq.values();
  for (std::size_t i = 0; i < 180 * 64; ++i) ASSERT_EQ(dq[i], 0) << "element " << i;
  EXPECT_NE(dq[182 * 64], 0);
}

TEST_P(AttentionBackward, IsDeterministic) {
  const Case c{.seqlen_q = 200,
               .seqlen_k = 300,
               .batch = 2,
               .heads = 4,
               .kv_heads = 2,
               .causal = true,
               .sink = true,
               .mask = DType::f32,
               .mask_dims = 8};
  Pass pass(c, dtype, device);
  for (PlacedTensor* const t : {&pass.q, &pass.k, &pass.v, &pass.d_o}) t->fill_random(random);
  AttentionOptions options;
  PlainCall plain;
  Features features;
  add_features(c, features, options, plain);
  options.lse = &pass.lse.tensor();
  tw::attention(pass.q, pass.k, pass.v, pass.o, options);
  for (const Way way : {Way::deterministic, Way::summed_in_turn}) {
    if (device.is_cuda() && adds_up(way)) continue;
    const std::vector<std::vector<double>> first = run(pass, c, options, way).values();
    EXPECT_EQ(first.size(), adds_up(way) ? 3u : 5u);
    for (int i = 0; i < 3; ++i) EXPECT_EQ(run(pass, c, options, way).values(), first);
    if (device.is_cuda()) continue;
    const int threads = cpu_threads();
    for (const int n : {1, 3}) {
      set_cpu_threads(n);
      EXPECT_EQ(run(pass, c, options, way).values(), first) << n << " threads";
    }
    set_cpu_threads(threads);
  }
}

TEST(BackwardTiles, HaveTheSmallestCompiledDimension) {
  constexpr std::int64_t kDims[][3] = {{64, 64, 64},  {40, 64, 64},    {64, 72, 96},    {96, 96, 96},   {96, 128, 128},
                                       {128, 8, 128}, {136, 128, 192}, {192, 192, 192}, {200, 64, 256}, {256, 256, 256}};
  for (const auto& [head_dim, value_dim, expected] : kDims) {
    SCOPED_TRACE(tw::format("head dimension {}, of values {}", head_dim, value_dim));
    const auto tensor = [](std::int64_t dim) { return placeholder({1, 200, 2, dim}, DType::bf16); };
    const Tensor q = tensor(head_dim), k = tensor(head_dim), v = tensor(value_dim), o = tensor(value_dim), d_o = tensor(value_dim);
    const Tensor dq = tensor(head_dim), dk = tensor(head_dim), dv = tensor(value_dim), lse = placeholder({1, 2, 200}, DType::f32);
    const BackwardCall call = check_backward(q, k, v, o, lse, d_o, dq, dk, dv, {});
    EXPECT_EQ(key_gradients_config(call).head_dim, expected);
    EXPECT_EQ(query_gradient_config(call).head_dim, expected);
    if (expected <= 128) {
      EXPECT_EQ(all_gradients_config(call).head_dim, expected <= 64 ? 64 : 128);
    }
  }
}

/// The reference is checked too: by differences of the forward pass's reference.
TEST(AttentionGradients, ReferenceAgreesWithFiniteDifferences) {
  constexpr std::int64_t kQueries = 5, kKeys = 7, kHeads = 2, kDim = 8;
  std::mt19937_64 random = random_engine();
  std::normal_distribution<float> normal;
  const auto values = [&](std::int64_t count) {
    std::vector<float> x(static_cast<std::size_t>(count));
    for (float& y : x) y = normal(random);
    return x;
  };
  std::vector<float> q = values(kQueries * kHeads * kDim), k = values(kKeys * kDim), v = values(kKeys * kDim), sink = values(kHeads);
  const std::vector<float> d_o = values(kQueries * kHeads * kDim), slopes = {0.1f, 0.3f};
  std::vector<float> mask = values(kHeads * kKeys);
  for (const bool features : {false, true}) {
    PlainCall call{.batch = 1, .heads = kHeads, .kv_heads = 1, .seqlen_q = kQueries, .seqlen_k = kKeys, .head_dim = kDim};
    call.q = q, call.k = k, call.v = v;
    call.scale = 0.35;
    call.causal = true;
    if (features)
      call.softcap = 1.5, call.alibi_slopes = slopes, call.sink = sink, call.window_left = 4, call.mask = mask,
      call.mask_strides = {0, kKeys, 0, 1};
    const auto loss = [&] {
      const std::vector<double> o = reference(call).o;
      double sum = 0;
      for (std::size_t i = 0; i < o.size(); ++i) sum += o[i] * d_o[i];
      return sum;
    };
    const PlainGradients gradients = reference_gradients(call, d_o);
    const auto expect_slopes = [&](std::vector<float>& x, const std::vector<double>& gradient) {
      ASSERT_EQ(gradient.size(), x.size());
      for (std::size_t i = 0; i < x.size(); ++i) {
        const float at = x[i], above = at + 1e-3f, below = at - 1e-3f;
        x[i] = above;
        const double more = loss();
        x[i] = below;
        const double less = loss();
        x[i] = at;
        EXPECT_NEAR((more - less) / (static_cast<double>(above) - below), gradient[i], 1e-5) << i;
      }
    };
    expect_slopes(q, gradients.dq);
    expect_slopes(k, gradients.dk);
    expect_slopes(v, gradients.dv);
    if (features) expect_slopes(sink, gradients.d_sink);
    if (features) expect_slopes(mask, gradients.d_mask);
  }
}

/// Apart from any reference: by differences of attention() itself, in f32.
TEST(AttentionGradients, OfAMaskAgreeWithFiniteDifferences) {
  constexpr std::int64_t kQueries = 6, kKeys = 9, kHeads = 2, kDim = 8;
  const Shape q_shape = {1, kQueries, kHeads, kDim}, kv_shape = {1, kKeys, 1, kDim};
  const Tensor q = Tensor::random(q_shape, DType::f32, 1), k = Tensor::random(kv_shape, DType::f32, 2),
               v = Tensor::random(kv_shape, DType::f32, 3);
  const Tensor d_o = Tensor::random(q_shape, DType::f32, 4), o = Tensor::poisoned(q_shape, DType::f32),
               lse = Tensor::poisoned({1, kHeads, kQueries}, DType::f32);
  const Tensor dq = Tensor::poisoned(q_shape, DType::f32), dk = Tensor::poisoned(kv_shape, DType::f32),
               dv = Tensor::poisoned(kv_shape, DType::f32);
  for (const Shape& shape : {Shape{kHeads, kQueries, kKeys}, Shape{kKeys}, Shape{kHeads, kQueries, 1}, Shape{1, 1, 1, 1}}) {
    const Tensor mask = Tensor::random(shape, DType::f32, 5), d_mask = Tensor::poisoned(shape, DType::f32);
    const AttentionOptions options{.scale = 0.4f, .causal = true, .softcap = 2, .mask = &mask, .lse = &lse};
    const auto loss = [&] {
      tw::attention(q, k, v, o, options);
      double sum = 0;
      for (std::int64_t i = 0; i < o.numel(); ++i) sum += static_cast<double>(o.data<float>()[i]) * d_o.data<float>()[i];
      return sum;
    };
    loss();
    attention_backward(q, k, v, o, lse, d_o, dq, dk, dv, {.forward = options, .d_mask = &d_mask});
    for (std::int64_t i = 0; i < mask.numel(); ++i) {
      float& x = mask.data<float>()[i];
      const float at = x;
      x = at + 0.02f;
      const double more = loss();
      x = at - 0.02f;
      const double less = loss();
      x = at;
      EXPECT_NEAR((more - less) / 0.04, d_mask.data<float>()[i], 1e-3) << i;
    }
  }
}

TEST(AttentionMaskGradient, CompilesWithoutSpills) {
  skip_without_nvrtc();
  compile_and_check(mask_gradient_specs(), "sm_90a", expect_fast);
}

}  // namespace
}  // namespace tw::kernels::attention
