// attention_varlen_backward() against loops in double, on the CPU and, where there is one, on a GPU.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "kernels/attention/attention_case.hpp"
#include "kernels/attention/backward.hpp"
#include "kernels/attention/backward_case.hpp"
#include "kernels/attention/backward_reference.hpp"
#include "runtime/format.hpp"
#include "tests/expect_error.hpp"
#include "tests/support.hpp"
#include "tilewave/attention.hpp"
#include "tilewave/tile/cpu/target.tile.hpp"

namespace tw::kernels::attention {
namespace {

using Integers = std::vector<std::int32_t>;
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN(), kInfiniteValue = std::numeric_limits<float>::infinity();

/// The sequences of a call, and rows that no sequence has.
struct Sequences {
  Integers cu_q{0}, cu_k{0}, used_q{}, used_k{};  ///< used: one for each sequence
  bool with_used = false;                         ///< whether the call is told; otherwise all is used
  int after_q = 0, after_k = 0;                   ///< rows after the last sequence

  static Sequences of(std::initializer_list<std::pair<int, int>> lengths) {
    Sequences s;
    for (const auto& [queries, keys] : lengths) s.add(queries, keys, queries, keys);
    return s;
  }
  void add(int queries, int keys, int queries_used, int keys_used) {
    cu_q.push_back(cu_q.back() + queries);
    cu_k.push_back(cu_k.back() + keys);
    used_q.push_back(queries_used);
    used_k.push_back(keys_used);
  }
  std::size_t batch() const { return used_q.size(); }
  std::int64_t total_q() const { return cu_q.back() + after_q; }
  std::int64_t total_k() const { return cu_k.back() + after_k; }
  std::string describe() const {
    return tw::format("cu_q {} used {} of {}; cu_k {} used {} of {}", tw::join(cu_q, ","), tw::join(used_q, ","), total_q(),
                      tw::join(cu_k, ","), tw::join(used_k, ","), total_k());
  }
};

class AttentionVarlenBackward : public AttentionTest {
 protected:
  void SetUp() override {
    skip_unless_present(device);
    if (device.is_cuda() && dtype == DType::f32) GTEST_SKIP() << "f32 is for the CPU";
    cpu::set_poison_released_slots(true);
  }

  /// The default; options.deterministic; on the CPU, the kernel that adds dQ up, in any order and in turn.
  enum class Way { fast, deterministic, summed, summed_in_turn };
  static constexpr bool adds_up(Way way) { return way == Way::summed || way == Way::summed_in_turn; }
  std::vector<Way> ways(const Case& c) const {
    if (device.is_cuda()) return {Way::fast, Way::deterministic};
    if (c.softcap > 0 || std::max(c.head_dim, c.values()) > 128) return {Way::deterministic};
    return {Way::deterministic, Way::summed, Way::summed_in_turn};
  }

  /// The tensors of a call and its results, poisoned at first, and the sequences on the device.
  struct Pass {
    Pass(const Case& c, const Sequences& s, DType dtype, Device device, const Placement& place)
        : q({s.total_q(), c.heads, c.head_dim}, dtype, device, place),
          k({s.total_k(), c.kv_heads, c.head_dim}, dtype, device, place),
          v({s.total_k(), c.kv_heads, c.values()}, dtype, device, place),
          o({s.total_q(), c.heads, c.values()}, dtype, device, place),
          d_o({s.total_q(), c.heads, c.values()}, dtype, device, place),
          lse({c.heads, s.total_q()}, DType::f32, device, {.offset = 3}) {}
    PlacedTensor q, k, v, o, d_o, lse;
    Tensor cu_q, cu_k, used_q, used_k;
    PackedSequences sequences = {};
  };
  struct Gradients {
    Gradients(const Case& c, const Sequences& s, DType dtype, Device device, const Placement& place, const Tensor* mask)
        : dq({s.total_q(), c.heads, c.head_dim}, dtype, device, place),
          dk({s.total_k(), c.kv_heads, c.head_dim}, dtype, device, place),
          dv({s.total_k(), c.kv_heads, c.values()}, dtype, device, place),
          d_sink({c.heads}, DType::f32, device, {.offset = 1}),
          d_mask(mask ? mask->shape() : Shape{1}, DType::f32, device, {.offset = 3}) {}
    PlacedTensor dq, dk, dv, d_sink, d_mask;
    bool intact() const { return dq.gaps_intact() && dk.gaps_intact() && dv.gaps_intact() && d_sink.gaps_intact() && d_mask.gaps_intact(); }
  };
  void set_sequences(Pass& pass, const Sequences& s) const {
    const auto batch = static_cast<std::int64_t>(s.batch());
    pass.cu_q = to_device(s.cu_q, {batch + 1}), pass.cu_k = to_device(s.cu_k, {batch + 1});
    pass.used_q = to_device(s.used_q, {batch}), pass.used_k = to_device(s.used_k, {batch});
    pass.sequences = {pass.cu_q, pass.cu_k, s.with_used ? &pass.used_q : nullptr, s.with_used ? &pass.used_k : nullptr};
  }

  /// Fills rows that sequences use at random and the others with NaN and infinity. Returns the used rows as [batch, longest, heads, dim].
  std::vector<float> fill(const PlacedTensor& to, const Integers& cu, const Integers& used, std::int64_t longest, float magnitude) {
    const Shape shape(to.tensor().shape().begin(), to.tensor().shape().end());
    const std::int64_t row = shape[1] * shape[2];
    std::vector<float> packed(static_cast<std::size_t>(shape[0] * row)), dense(used.size() * static_cast<std::size_t>(longest * row));
    for (std::size_t i = 0; i < packed.size(); ++i) packed[i] = i % 3 == 0 ? kInfiniteValue : kNaN;
    std::normal_distribution<float> normal(0, magnitude);
    for (std::size_t b = 0; b < used.size(); ++b) {
      for (std::int64_t x = 0; x < used[b] * row; ++x) {
        const float value = round_to(dtype, normal(random));
        packed[static_cast<std::size_t>(cu[b] * row + x)] = value;
        dense[b * static_cast<std::size_t>(longest * row) + static_cast<std::size_t>(x)] = value;
      }
    }
    const_cast<PlacedTensor&>(to).fill(packed);
    return dense;
  }
  /// Overwrites sequence `b`.
  static void poison(PlacedTensor& t, const Integers& cu, std::size_t b, float value) {
    const std::vector<double> now = t.values();
    std::vector<float> values(now.begin(), now.end());
    const std::size_t row = values.size() / static_cast<std::size_t>(t.tensor().shape(0));
    std::fill(values.begin() + static_cast<std::ptrdiff_t>(row) * cu[b], values.begin() + static_cast<std::ptrdiff_t>(row) * cu[b + 1],
              value);
    t.fill(values);
  }

  Gradients run(const Pass& pass, const Case& c, const Sequences& s, const AttentionOptions& options, Way way,
                const Placement& place = {}) const {
    Gradients out(c, s, dtype, device, place, options.mask);
    AttentionBackwardOptions all{.forward = options, .deterministic = way == Way::deterministic || way == Way::summed_in_turn};
    if (adds_up(way)) {
      BackwardCall call =
          check_varlen_backward(pass.q, pass.k, pass.v, pass.o, pass.lse, pass.d_o, out.dq, out.dk, out.dv, pass.sequences, all);
      run_adding_up(call);
    } else {
      if (options.sink) all.d_sink = &out.d_sink.tensor();
      if (adds_mask(c)) all.d_mask = &out.d_mask.tensor();
      attention_varlen_backward(pass.q, pass.k, pass.v, pass.o, pass.lse, pass.d_o, out.dq, out.dk, out.dv, pass.sequences, all);
    }
    return out;
  }

  static bool adds_mask(const Case& c) { return c.mask && *c.mask != DType::boolean; }

  /// `poisoned`: a sequence of which all rows are NaN or infinite. The others must not notice.
  void check(Case c, const Sequences& s, const Placement& place = {}, std::optional<std::size_t> poisoned = {}) {
    c.batch = static_cast<std::int64_t>(s.batch());
    c.seqlen_q = c.seqlen_k = 0;
    for (std::size_t b = 0; b < s.batch(); ++b) {
      c.seqlen_q = std::max<std::int64_t>(c.seqlen_q, s.used_q[b]);
      c.seqlen_k = std::max<std::int64_t>(c.seqlen_k, s.used_k[b]);
    }
    if (c.seqlen_q == 0 || c.seqlen_k == 0) c.mask.reset();  // masks have elements
    SCOPED_TRACE(c.describe() + " " + s.describe());
    Pass pass(c, s, dtype, device, place);
    set_sequences(pass, s);
    PlainCall plain = plain_call(c);
    if (!c.causal_offset) plain.causal_offset = {};
    AttentionOptions options;
    Features features;
    add_features(c, features, options, plain);
    const std::vector<float> q = fill(pass.q, s.cu_q, s.used_q, c.seqlen_q, c.magnitude),
                             k = fill(pass.k, s.cu_k, s.used_k, c.seqlen_k, c.magnitude), v = fill(pass.v, s.cu_k, s.used_k, c.seqlen_k, 1),
                             d_o = fill(pass.d_o, s.cu_q, s.used_q, c.seqlen_q, 1);
    plain.q = q, plain.k = k, plain.v = v;
    const std::vector<std::int64_t> lengths_q(s.used_q.begin(), s.used_q.end()), lengths_k(s.used_k.begin(), s.used_k.end());
    plain.lengths_q = lengths_q, plain.lengths_k = lengths_k;
    options.lse = &pass.lse.tensor();
    if (poisoned) {
      poison(pass.q, s.cu_q, *poisoned, kNaN);
      poison(pass.d_o, s.cu_q, *poisoned, kInfiniteValue);
      poison(pass.k, s.cu_k, *poisoned, kInfiniteValue);
      poison(pass.v, s.cu_k, *poisoned, kNaN);
    }
    if (!launched([&] { attention_varlen(pass.q, pass.k, pass.v, pass.o, pass.sequences, options); })) return;
    const PlainGradients exact = reference_gradients(plain, d_o), near = naive_gradients(plain, d_o, dtype);
    for (const Way way : ways(c)) {
      SCOPED_TRACE(tw::format("way {}", static_cast<int>(way)));
      const Gradients out = run(pass, c, s, options, way, place);
      const auto expect = [&](const char* name, const PlacedTensor& of, const Integers& cu, const Integers& used, std::int64_t longest,
                              const std::vector<double>& of_exact, const std::vector<double>& of_near,
                              std::span<const double> of_cancelled) {
        expect_rows(name, of, cu, used, longest, of_exact, of_near, of_cancelled, c.values(), poisoned);
      };
      expect("dq", out.dq, s.cu_q, s.used_q, c.seqlen_q, exact.dq, near.dq, exact.dq_cancelled);
      expect("dk", out.dk, s.cu_k, s.used_k, c.seqlen_k, exact.dk, near.dk, exact.dk_cancelled);
      // As in attention_backward()'s test.
      expect("dv", out.dv, s.cu_k, s.used_k, c.seqlen_k, exact.dv, near.dv,
             dtype == DType::f32 ? std::span(exact.dv_cancelled) : std::span<const double>());
      if (c.sink && !adds_up(way) && !poisoned) {
        const std::vector<double> d_sink = out.d_sink.values();
        EXPECT_TRUE(accurate({.out = d_sink,
                              .reference = exact.d_sink,
                              .naive = near.d_sink,
                              .arithmetic = arithmetic_of(dtype, device),
                              .factor = 3,
                              .cancelled = exact.d_sink_cancelled,
                              .cancelled_products = c.values()}));
      }
      if (adds_mask(c) && !adds_up(way) && !poisoned) {
        const std::vector<double> d_mask = out.d_mask.values();
        EXPECT_TRUE(accurate({.out = d_mask,
                              .reference = exact.d_mask,
                              .naive = near.d_mask,
                              .arithmetic = arithmetic_of(dtype, device),
                              .factor = 3,
                              .cancelled = exact.d_mask_cancelled,
                              .cancelled_products = c.values()}));
      }
      EXPECT_TRUE(out.intact());
    }
  }
  /// Rows in use are accurate, and the others 0.
  void expect_rows(const char* name, const PlacedTensor& out, const Integers& cu, const Integers& used, std::int64_t longest,
                   const std::vector<double>& exact, const std::vector<double>& near, std::span<const double> cancelled,
                   std::int64_t value_dim, std::optional<std::size_t> poisoned) const {
    const std::vector<double> values = out.values();
    const std::int64_t rows = out.tensor().shape(0), row = rows > 0 ? static_cast<std::int64_t>(values.size()) / rows : 0;
    std::vector<double> mine, mine_exact, mine_near, mine_cancelled;
    std::vector<bool> in_use(static_cast<std::size_t>(rows));
    for (std::size_t b = 0; b < used.size(); ++b) {
      for (std::int64_t r = 0; r < used[b]; ++r) {
        const auto packed = static_cast<std::size_t>(cu[b] + r);
        in_use[packed] = true;
        if (poisoned == b) continue;
        const std::int64_t dense = (static_cast<std::int64_t>(b) * longest + r) * row;
        for (std::int64_t x = 0; x < row; ++x) {
          mine.push_back(values[packed * static_cast<std::size_t>(row) + static_cast<std::size_t>(x)]);
          mine_exact.push_back(exact[static_cast<std::size_t>(dense + x)]);
          mine_near.push_back(near[static_cast<std::size_t>(dense + x)]);
          if (!cancelled.empty()) mine_cancelled.push_back(cancelled[static_cast<std::size_t>(dense + x)]);
        }
      }
    }
    EXPECT_TRUE(accurate({.out = mine,
                          .reference = mine_exact,
                          .naive = mine_near,
                          .arithmetic = arithmetic_of(dtype, device),
                          .factor = 3,
                          .cancelled = mine_cancelled,
                          .cancelled_products = value_dim}))
        << name;
    for (std::size_t r = 0; r < in_use.size(); ++r) {
      if (in_use[r]) continue;
      for (std::size_t x = 0; x < static_cast<std::size_t>(row); ++x)
        ASSERT_EQ(values[r * static_cast<std::size_t>(row) + x], 0) << name << ", row " << r << " is not in use";
    }
  }
  Sequences sample(int batch, int most, bool with_used) {
    Sequences s;
    s.with_used = with_used;
    s.cu_q[0] = pick(3) == 0 ? pick(150) : pick(3), s.cu_k[0] = pick(3);
    for (int b = 0; b < batch; ++b) {
      const int queries = pick(5) == 0 ? 0 : pick(pick(3) == 0 ? most : 80), keys = pick(6) == 0 ? 0 : pick(pick(3) == 0 ? most : 130);
      s.add(queries, keys, with_used ? pick(queries + 1) : queries, with_used ? pick(keys + 1) : keys);
    }
    s.after_q = pick(3), s.after_k = pick(3) == 0 ? pick(200) : 0;
    return s;
  }
};

INSTANTIATE_TEST_SUITE_P(Ops, AttentionVarlenBackward, testing::ValuesIn(kDevicesAndDTypes), device_and_dtype);

TEST_P(AttentionVarlenBackward, AnyLengths) {
  // Around the tiles of all targets, 16 to 128 queries and keys; more queries than keys and fewer; none.
  const Sequences s = Sequences::of({{1, 1},
                                     {1, 128},
                                     {0, 5},
                                     {128, 1},
                                     {15, 17},
                                     {5, 0},
                                     {64, 63},
                                     {0, 0},
                                     {65, 65},
                                     {127, 129},
                                     {129, 127},
                                     {191, 65},
                                     {193, 128},
                                     {2, 3},
                                     {37, 257},
                                     {257, 37}});
  for (const bool causal : {false, true}) {
    for (const std::int64_t head_dim : {64, 128})
      check({.seqlen_q = 0, .seqlen_k = 0, .heads = 2, .kv_heads = 1, .head_dim = head_dim, .causal = causal}, s);
  }
}

TEST_P(AttentionVarlenBackward, OneSequenceAndNone) {
  Sequences one = Sequences::of({{70, 150}}), one_query = Sequences::of({{1, 300}}), none, empty = Sequences::of({{0, 0}, {0, 0}});
  Sequences without_keys = Sequences::of({{3, 0}, {40, 0}}), without_queries = Sequences::of({{0, 3}, {0, 40}});
  for (Sequences* const s : {&none, &empty}) s->after_q = 3, s->after_k = 200;
  for (const Sequences& s : {one, one_query, none, empty, without_keys, without_queries, Sequences{}})
    for (const std::int64_t head_dim : {64, 256})
      check({.seqlen_q = 0, .seqlen_k = 0, .heads = 4, .kv_heads = 2, .head_dim = head_dim, .causal = true, .sink = true}, s);
}

TEST_P(AttentionVarlenBackward, ManyShortSequences) {
  // Tiles of a GPU are taken longest first.
  for (const bool with_used : {false, true}) {
    for (const bool causal : {false, true}) {
      Sequences s = sample(device.is_cuda() ? 180 : 30, 20, with_used);
      s.add(300, 280, with_used ? 290 : 300, with_used ? 270 : 280);
      for (int b = 0; b < 10; ++b) s.add(pick(9), pick(9), 0, 0);
      if (!with_used)
        for (std::size_t b = s.batch() - 10; b < s.batch(); ++b)
          s.used_q[b] = s.cu_q[b + 1] - s.cu_q[b], s.used_k[b] = s.cu_k[b + 1] - s.cu_k[b];
      check({.seqlen_q = 0, .seqlen_k = 0, .heads = 2, .kv_heads = 2, .head_dim = causal ? 64 : 128, .causal = causal}, s);
    }
  }
}

TEST_P(AttentionVarlenBackward, OtherSequencesDoNotLeak) {
  // Neighbours are NaN and infinite.
  const Sequences s = Sequences::of({{33, 70}, {100, 150}, {61, 30}, {130, 140}, {5, 3}});
  for (const std::int64_t head_dim : {64, 128, 192}) {
    for (const bool causal : {false, true}) {
      for (const std::size_t poisoned : {0u, 1u, 3u})
        check({.seqlen_q = 0, .seqlen_k = 0, .heads = 2, .kv_heads = 1, .head_dim = head_dim, .causal = causal}, s, {}, poisoned);
    }
  }
  check({.seqlen_q = 0, .seqlen_k = 0, .heads = 2, .kv_heads = 1, .softcap = 5, .alibi = 2, .sink = true}, s, {}, 1);
}

TEST_P(AttentionVarlenBackward, MasksOfAnyExtents) {
  Sequences s = Sequences::of({{133, 70}, {0, 9}, {20, 150}, {7, 0}, {129, 65}});
  s.after_q = 40, s.after_k = 3;
  for (unsigned dims = 0; dims < 16; ++dims) {
    Case c{.seqlen_q = 0,
           .seqlen_k = 0,
           .heads = 4,
           .kv_heads = 2,
           .mask = dims % 2 == 0 ? DType::f32 : dtype,
           .mask_dims = dims,
           .mask_hides = dims > 7};
    check(c, s);
    c.causal = true, c.head_dim = 128, c.sink = dims % 3 == 0, c.dropout = dims % 4 == 3 ? 0.2f : 0;
    check(c, s);
  }
}

TEST_P(AttentionVarlenBackward, SampledFeatures) {
  // On a GPU every list of rules is a kernel to compile, so there are fewer.
  const int cases = device.is_cuda() ? 30 : random_cases(30);
  struct List {
    int dim;
    bool softcap, alibi, lower, upper, chunks, mask;
  };
  std::vector<List> lists;
  constexpr int kDims[] = {64, 96, 128, 192, 256};
  const int list_count = device.is_cuda() ? 5 : cases;
  for (int i = 0; i < list_count; ++i)
    lists.push_back({kDims[pick(5)], pick(3) == 0, pick(3) == 0, pick(3) == 0, pick(2) == 0, i % 5 == 0, i % 5 == 1});
  for (int i = 0; i < cases && !HasFailure(); ++i) {
    const List& list = lists[static_cast<std::size_t>(i % list_count)];
    const int group = 1 + pick(4), kv_heads = 1 + pick(2);
    const bool causal = list.upper && pick(2) == 0;
    check({.seqlen_q = 0,
           .seqlen_k = 0,
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
           .mask_dims = static_cast<unsigned>(pick(16))},
          sample(1 + pick(5), 280, pick(2) == 0));
  }
}

TEST_P(AttentionVarlenBackward, Chunks) {
  const Sequences s = Sequences::of({{33, 170}, {200, 150}, {0, 30}, {130, 40}, {65, 257}});
  for (const int chunk : {5, 64, 150}) {
    check({.seqlen_q = 0, .seqlen_k = 0, .heads = 2, .kv_heads = 1, .chunk = chunk}, s);
    check({.seqlen_q = 0, .seqlen_k = 0, .heads = 2, .kv_heads = 1, .head_dim = 128, .causal = true, .chunk = chunk, .sink = true}, s);
  }
}

TEST_P(AttentionVarlenBackward, AnyStrides) {
  const Sequences s = Sequences::of({{70, 133}, {3, 20}, {129, 66}});
  for (const Placement& place :
       {Placement{.order = {1, 0, 2}}, Placement{.offset = 16, .gap = 8, .align = 8}, Placement{.offset = 3, .gap = 5}}) {
    for (const std::int64_t head_dim : {64, 128})
      check({.seqlen_q = 0, .seqlen_k = 0, .heads = 4, .kv_heads = 2, .head_dim = head_dim, .causal = true}, s, place);
  }
}

TEST_P(AttentionVarlenBackward, IsDeterministic) {
  const Sequences s = Sequences::of({{200, 300}, {1, 1}, {150, 400}, {260, 129}});
  const Case c{.seqlen_q = 0, .seqlen_k = 0, .heads = 4, .kv_heads = 2, .causal = true};
  Pass pass(c, s, dtype, device, {});
  set_sequences(pass, s);
  for (PlacedTensor* const t : {&pass.q, &pass.k, &pass.v, &pass.d_o}) t->fill_random(random);
  const AttentionOptions options{.causal = true, .lse = &pass.lse.tensor()};
  attention_varlen(pass.q, pass.k, pass.v, pass.o, pass.sequences, options);
  const auto values = [&](Way way) {
    const Gradients out = run(pass, c, s, options, way);
    return std::vector{out.dq.values(), out.dk.values(), out.dv.values()};
  };
  for (const Way way : {Way::deterministic, Way::summed_in_turn}) {
    if (device.is_cuda() && adds_up(way)) continue;
    const auto first = values(way);
    for (int i = 0; i < 3; ++i) EXPECT_EQ(values(way), first);
    if (device.is_cuda()) continue;
    const int threads = cpu_threads();
    for (const int n : {1, 3}) {
      set_cpu_threads(n);
      EXPECT_EQ(values(way), first) << n << " threads";
    }
    set_cpu_threads(threads);
  }
}

/// Offsets and lengths that the tests of other functions would refuse.
struct WrongSequences {
  Integers cu_q, cu_k, used_q, used_k;
};
const WrongSequences kWrongSequences[] = {
    {{0, 300, 20, 280}, {0, 10, 250, 40}, {400, -3, 5}, {3, 1000, -1}},
    {{-70, 5, 2000000000, 100}, {500, 400, 300, 200}, {1, 2, 3}, {9, 9, 9}},
    {{130, 130, 130, 130}, {-1, -2, -3, -4}, {0, 0, 0}, {1, 1, 1}},
};

TEST_P(AttentionVarlenBackward, WrongOffsetsAreClamped) {
  const Case c{.seqlen_q = 0, .seqlen_k = 0, .heads = 2, .kv_heads = 1, .causal = true};
  const Sequences s = Sequences::of({{100, 100}, {100, 100}, {100, 100}});
  const auto expect = [](const Integers& cu, const Integers& used, const std::int32_t* now, const std::int32_t* now_used) {
    for (std::size_t b = 0; b < cu.size(); ++b) {
      EXPECT_EQ(now[b], std::clamp(*std::max_element(cu.begin(), cu.begin() + static_cast<std::ptrdiff_t>(b) + 1), 0, 300)) << b;
      if (b > 0) {
        EXPECT_EQ(now_used[b - 1], std::clamp(used[b - 1], 0, now[b] - now[b - 1])) << b - 1;
      }
    }
  };
  for (const WrongSequences& wrong : kWrongSequences) {
    Pass pass(c, s, dtype, device, {});
    set_sequences(pass, s);
    for (PlacedTensor* const t : {&pass.q, &pass.k, &pass.v, &pass.o, &pass.d_o, &pass.lse}) t->fill_random(random);
    const Gradients out(c, s, dtype, device, {}, nullptr);
    BackwardCall call =
        check_varlen_backward(pass.q, pass.k, pass.v, pass.o, pass.lse, pass.d_o, out.dq, out.dk, out.dv, pass.sequences, {});
    const Tensor cu_q = to_device(wrong.cu_q, {4}), cu_k = to_device(wrong.cu_k, {4}), used_q = to_device(wrong.used_q, {3}),
                 used_k = to_device(wrong.used_k, {3});
    call.forward.cu_q = cu_q.data<std::int32_t>(), call.forward.cu_k = cu_k.data<std::int32_t>();
    call.forward.used_q = used_q.data<std::int32_t>(), call.forward.used_k = used_k.data<std::int32_t>();
    run_checked_sequences(call);
    const Tensor lengths = call.lengths.to(Device::cpu());
    const std::int32_t* const numbers = lengths.data<std::int32_t>();
    expect(wrong.cu_q, wrong.used_q, numbers, numbers + 4);
    expect(wrong.cu_k, wrong.used_k, numbers + 7, numbers + 11);
    // The whole backward pass with them stays in its tensors, and its turns come to an end. The CPU always refuses them.
    pass.sequences = {cu_q, cu_k, &used_q, &used_k};
    for (const bool deterministic : {false, true}) {
      const Gradients gradients(c, s, dtype, device, {}, nullptr);
      const auto backward = [&](bool check_contents) {
        attention_varlen_backward(pass.q, pass.k, pass.v, pass.o, pass.lse, pass.d_o, gradients.dq, gradients.dk, gradients.dv,
                                  pass.sequences,
                                  {.forward = {.causal = true, .check_contents = check_contents}, .deterministic = deterministic});
      };
      EXPECT_THROW(backward(true), InvalidArgument);
      EXPECT_TRUE(gradients.dq.untouched() && gradients.dk.untouched() && gradients.dv.untouched());
      if (device.is_cuda()) backward(false);
      EXPECT_TRUE(gradients.intact());
    }
  }
}

/// Offsets that f32 does not hold.
TEST_P(AttentionVarlenBackward, LargeOffsetsAreExact) {
  if (dtype != DType::bf16) GTEST_SKIP() << "offsets have no data type";
  constexpr int kRows = (1 << 29) - 1;
  const Integers cu{0, 3, (1 << 24) + 1, (1 << 24) + 3, (1 << 28) + 77777, (1 << 28) + 77778, kRows - 1};
  BackwardCall call;
  call.forward.stream = Stream::standard(device);
  call.forward.batch = static_cast<int>(cu.size()) - 1;
  const Tensor offsets = to_device(cu, {static_cast<std::int64_t>(cu.size())});
  call.forward.q = call.forward.k = Tensor::borrow(offsets.data(), {1, 1, kRows, 8}, DType::bf16, device);  // only its shape is used
  call.forward.cu_q = call.forward.cu_k = offsets.data<std::int32_t>();
  run_checked_sequences(call);
  const Tensor lengths = call.lengths.to(Device::cpu());
  for (std::size_t b = 0; b < cu.size(); ++b) EXPECT_EQ(lengths.data<std::int32_t>()[b], cu[b]);
}

}  // namespace
}  // namespace tw::kernels::attention
