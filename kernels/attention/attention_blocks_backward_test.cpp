// attention_backward() of blocks of keys against loops in double with the mask that the blocks mean.

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kernels/attention/attention_case.hpp"
#include "kernels/attention/backward.hpp"
#include "kernels/attention/backward_case.hpp"
#include "kernels/attention/backward_reference.hpp"
#include "kernels/attention/blocks_case.hpp"
#include "kernels/attention/key_blocks.hpp"
#include "tests/compiled_kernels.hpp"
#include "tests/expect_error.hpp"
#include "tilewave/tile/cpu/target.tile.hpp"

namespace tw::kernels::attention {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

class AttentionOfBlocksBackward : public AttentionTest {
 protected:
  void SetUp() override {
    skip_unless_present(device);
    if (device.is_cuda() && dtype == DType::f32) GTEST_SKIP() << "f32 is for the CPU";
    cpu::set_poison_released_slots(true);
  }

  /// attention_backward() with any order of additions, or deterministic; on the CPU the kernel that adds dQ up.
  enum class Way { fast, deterministic, summed };
  std::vector<Way> ways(const Case& c) const {
    if (device.is_cuda()) return {Way::fast, Way::deterministic};
    if (c.softcap > 0 || std::max(c.head_dim, c.values()) > 128) return {Way::deterministic};
    return {Way::deterministic, Way::summed};
  }

  /// Gradients, poisoned at first. Shapes are those of q, k and v.
  struct Results {
    Results(const Tensor& q, const Tensor& k, const Tensor& v, std::int64_t heads)
        : dq(shape_of(q), q.dtype(), q.device()),
          dk(shape_of(k), q.dtype(), q.device()),
          dv(shape_of(v), q.dtype(), q.device()),
          d_sink({heads}, DType::f32, q.device(), {.offset = 1}) {}
    static Shape shape_of(const Tensor& t) { return {t.shape().begin(), t.shape().end()}; }
    PlacedTensor dq, dk, dv, d_sink;
    std::vector<std::vector<double>> values() const { return {dq.values(), dk.values(), dv.values()}; }
  };

  void expect_gradient(const char* name, const std::vector<double>& values, const std::vector<double>& exact,
                       const std::vector<double>& near, std::span<const double> cancelled, std::int64_t value_dim) const {
    EXPECT_TRUE(accurate({.out = values,
                          .reference = exact,
                          .naive = near,
                          .arithmetic = arithmetic_of(dtype, device),
                          .factor = 3,
                          .cancelled = cancelled,
                          .cancelled_products = value_dim}))
        << name;
  }

  void check(const Case& c, const Blocks& x) {
    SCOPED_TRACE(c.describe() + "; " + x.describe());
    Selection selection = select_blocks(x.one_sequence ? 1 : c.batch, c.heads / x.heads_per_list, blocks_in(c.seqlen_q, x.query_block),
                                        blocks_in(c.seqlen_k, x.key_block), x.density, random);
    if (c.alibi > 0) select_near(c, x, selection);
    const BlockTensors tensors(x, selection, random, device);
    PlacedTensor q({c.batch, c.seqlen_q, c.heads, c.head_dim}, dtype, device, placement(c.q));
    PlacedTensor k({c.batch, c.seqlen_k, c.kv_heads, c.head_dim}, dtype, device, placement(c.kv));
    PlacedTensor v({c.batch, c.seqlen_k, c.kv_heads, c.values()}, dtype, device, placement(c.kv));
    PlacedTensor o({c.batch, c.seqlen_q, c.heads, c.values()}, dtype, device), d_o(o.tensor().shape(), dtype, device);
    PlacedTensor lse({c.batch, c.heads, c.seqlen_q}, DType::f32, device, {.offset = 3});
    std::vector<float> q_values = q.fill_random(random, c.magnitude), k_values = k.fill_random(random, c.magnitude),
                       v_values = v.fill_random(random), gradient = d_o.fill_random(random);
    AttentionOptions options;
    PlainCall plain = plain_call(c);
    Features features;
    add_features(c, features, options, plain);
    options.blocks = &tensors.blocks;
    options.lse = &lse.tensor();
    std::vector<float> hidden;
    hide_blocks(plain, x, selection, hidden);
    plain.q = q_values, plain.k = k_values, plain.v = v_values;
    const PlainGradients exact = reference_gradients(plain, gradient), near = naive_gradients(plain, gradient, dtype);
    // Where the call gets NaN: keys that nothing selects, and queries that select nothing, are not read.
    poison(c, x, selection, q, k, v, d_o, {q_values, k_values, v_values, gradient});
    if (!launched([&] { tw::attention(q, k, v, o, options); })) return;
    for (const Way way : ways(c)) {
      SCOPED_TRACE(tw::format("way {}", static_cast<int>(way)));
      const Results out(q, k, v, c.heads);
      AttentionBackwardOptions all{.forward = options, .deterministic = way == Way::deterministic};
      if (way == Way::summed) {
        BackwardCall call = check_backward(q, k, v, o, lse, d_o, out.dq, out.dk, out.dv, all);
        run_adding_up(call);
      } else {
        if (c.sink) all.d_sink = &out.d_sink.tensor();
        attention_backward(q, k, v, o, lse, d_o, out.dq, out.dk, out.dv, all);
      }
      expect_gradient("dq", out.dq.values(), exact.dq, near.dq, exact.dq_cancelled, c.values());
      expect_gradient("dk", out.dk.values(), exact.dk, near.dk, exact.dk_cancelled, c.values());
      // As in attention_backward()'s test.
      const std::span cancelled = dtype == DType::f32 ? std::span(exact.dv_cancelled) : std::span<const double>();
      expect_gradient("dv", out.dv.values(), exact.dv, near.dv, cancelled, c.values());
      if (c.sink && way != Way::summed)
        expect_gradient("d_sink", out.d_sink.values(), exact.d_sink, near.d_sink, exact.d_sink_cancelled, c.values());
      EXPECT_TRUE(out.dq.gaps_intact() && out.dk.gaps_intact() && out.dv.gaps_intact() && out.d_sink.gaps_intact());
    }
  }
  /// Selects the blocks on the diagonal. Were only far keys selected, ALiBi's scores of a hundred and more would be all that the LSE, in
  /// f32, rounds.
  static void select_near(const Case& c, const Blocks& x, Selection& s) {
    if (s.keys == 0) return;
    for (std::int64_t i = 0; i < c.seqlen_q; ++i) {
      const std::int64_t near = std::clamp<std::int64_t>(i + c.seqlen_k - c.seqlen_q, 0, c.seqlen_k - 1);
      for (std::int64_t b = 0; b < s.batch; ++b)
        for (std::int64_t h = 0; h < s.heads; ++h) s.selected[s.index(b, h, i / x.query_block, near / x.key_block)] = true;
    }
  }
  struct Values {
    std::vector<float> q, k, v, d_o;
  };
  static void poison(const Case& c, const Blocks& x, const Selection& s, PlacedTensor& q, PlacedTensor& k, PlacedTensor& v,
                     PlacedTensor& d_o, Values values) {
    const std::int64_t group = c.heads / c.kv_heads;
    const auto fill_row = [](std::vector<float>& to, std::int64_t row, std::int64_t dim) {
      std::fill_n(to.begin() + row * dim, dim, kNaN);
    };
    for (std::int64_t b = 0; b < c.batch; ++b) {
      for (std::int64_t j = 0; j < c.seqlen_k; ++j) {
        for (std::int64_t kv_head = 0; kv_head < c.kv_heads; ++kv_head) {
          bool read = false;
          for (std::int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h)
            for (std::int64_t i = 0; i < s.queries; ++i) read |= s.at(b, h / x.heads_per_list, i, j / x.key_block);
          if (read) continue;
          const std::int64_t row = (b * c.seqlen_k + j) * c.kv_heads + kv_head;
          fill_row(values.k, row, c.head_dim);
          fill_row(values.v, row, c.values());
        }
      }
      // A sink's gradient is of all queries.
      for (std::int64_t i = 0; i < (c.sink ? 0 : c.seqlen_q); ++i) {
        for (std::int64_t h = 0; h < c.heads; ++h) {
          bool reads = false;
          for (std::int64_t j = 0; j < s.keys; ++j) reads |= s.at(b, h / x.heads_per_list, i / x.query_block, j);
          if (reads) continue;
          const std::int64_t row = (b * c.seqlen_q + i) * c.heads + h;
          fill_row(values.q, row, c.head_dim);
          fill_row(values.d_o, row, c.values());
        }
      }
    }
    q.fill(values.q), k.fill(values.k), v.fill(values.v), d_o.fill(values.d_o);
  }
};

INSTANTIATE_TEST_SUITE_P(Ops, AttentionOfBlocksBackward, testing::ValuesIn(kDevicesAndDTypes), device_and_dtype);

TEST_P(AttentionOfBlocksBackward, AnyLengths) {
  constexpr std::int64_t kPairs[][2] = {{1, 1}, {1, 128}, {128, 1}, {64, 64}, {65, 63}, {127, 129}, {129, 127}, {193, 384}, {257, 130}};
  for (const auto& [seqlen_q, seqlen_k] : kPairs) {
    for (const int query_block : {64, 128}) {
      for (const int key_block : {64, 128}) {
        const bool causal = pick(2) == 0;
        check({.seqlen_q = seqlen_q, .seqlen_k = seqlen_k, .heads = 2, .kv_heads = 1, .head_dim = causal ? 128 : 64, .causal = causal},
              {.query_block = query_block, .key_block = key_block, .indices = pick(2) == 0, .density = 0.6});
      }
    }
  }
}

TEST_P(AttentionOfBlocksBackward, MoreBlocksThanAreListedAtOnce) {
  check({.seqlen_q = 8300, .seqlen_k = 150, .heads = 3, .kv_heads = 1}, {.query_block = 64, .key_block = 64, .density = 0.4});
  check({.seqlen_q = 150, .seqlen_k = 17000, .causal = true}, {.query_block = 64, .key_block = 64, .indices = true, .density = 0.4});
}

TEST_P(AttentionOfBlocksBackward, AnyHeadDim) {
  for (const auto& [head_dim, value_dim] : {std::pair{8, 8}, {64, 64}, {96, 96}, {128, 80}, {192, 192}, {192, 128}, {256, 256}}) {
    for (const int block : {64, 128}) {
      check({.seqlen_q = 133, .seqlen_k = 201, .heads = 2, .kv_heads = 1, .head_dim = head_dim, .causal = true, .value_dim = value_dim},
            {.query_block = block, .key_block = block, .indices = pick(2) == 0});
    }
  }
}

TEST_P(AttentionOfBlocksBackward, CausalOffsetsWindowsAndChunks) {
  for (const int offset : {-1000, -150, -64, -1, 0, 1, 63, 64, 200, 1000}) {
    check({.seqlen_q = 200, .seqlen_k = 260, .heads = 2, .kv_heads = 2, .head_dim = 128, .causal = true, .causal_offset = offset},
          {.key_block = 64, .density = 0.7});
  }
  for (const auto& [left, right] : {std::pair{0, 0}, {5, -1}, {-1, 7}, {64, 3}, {1, 130}, {200, 200}}) {
    check({.seqlen_q = 230, .seqlen_k = 300, .window_left = left, .window_right = right},
          {.query_block = 64, .key_block = 64, .indices = true, .density = 0.7});
  }
  for (const int chunk : {50, 64, 200})
    check({.seqlen_q = 230, .seqlen_k = 300, .causal = true, .chunk = chunk},
          {.query_block = 64, .key_block = 64, .indices = true, .density = 0.7});
}

TEST_P(AttentionOfBlocksBackward, SampledFeatures) {
  // On a GPU every list of rules is a kernel to compile, so there are fewer lists.
  const int cases = device.is_cuda() ? 48 : random_cases(30);
  struct List {
    int dim, query_block, key_block;
    bool softcap, alibi, mask, lower, upper, dropout;
  };
  constexpr int kDims[] = {64, 96, 128, 192, 256};
  const int list_count = device.is_cuda() ? 8 : cases;
  std::vector<List> lists;
  for (int i = 0; i < list_count; ++i)
    lists.push_back({kDims[pick(5)], 64 + 64 * pick(2), 64 + 64 * pick(2), pick(3) == 0, pick(3) == 0, pick(4) == 0, pick(3) == 0,
                     pick(2) == 0, pick(5) == 0});
  for (int i = 0; i < cases && !HasFailure(); ++i) {
    const List& list = lists[static_cast<std::size_t>(i % list_count)];
    const int group = 1 + pick(3), kv_heads = 1 + pick(2), heads = group * kv_heads, sharing = pick(3);
    const bool causal = list.upper && pick(2) == 0;
    check({.seqlen_q = 1 + pick(260),
           .seqlen_k = pick(300),
           .batch = 1 + pick(2),
           .heads = heads,
           .kv_heads = kv_heads,
           .head_dim = list.dim - 8 * pick(3),
           .causal = causal,
           .causal_offset = !list.alibi && pick(3) == 0 ? std::optional(pick(200) - 100) : std::nullopt,
           .value_dim = list.dim - 8 * pick(3),
           .window_left = list.lower ? pick(150) : -1,
           .window_right = list.upper && !causal ? pick(100) : -1,
           .softcap = list.softcap ? 1.0f + static_cast<float>(pick(40)) : 0,
           .alibi = list.alibi ? 1 + pick(2) : 0,
           // Beside a sink, keys that are all far away would have weights that f16 cannot represent.
           .sink = !list.alibi && pick(3) == 0,
           .mask = list.mask ? std::optional(pick(2) == 0 ? DType::boolean : DType::f32) : std::nullopt,
           .mask_dims = static_cast<unsigned>(pick(16)),
           .dropout = list.dropout ? 0.2f : 0.0f},
          {.query_block = list.query_block,
           .key_block = list.key_block,
           .indices = pick(2) == 0,
           .one_sequence = pick(2) == 0,
           .heads_per_list = sharing == 0   ? 1
                             : sharing == 1 ? group
                                            : heads,
           .density = 0.1 + 0.2 * pick(5),
           .counted = pick(2) == 0});
  }
}

TEST_P(AttentionOfBlocksBackward, OfNothing) {
  for (const bool indices : {false, true}) {
    for (const bool sink : {false, true}) {
      for (const int block : {64, 128})
        check({.seqlen_q = 200, .seqlen_k = 150, .batch = 2, .heads = 2, .kv_heads = 1, .sink = sink},
              {.query_block = block, .key_block = block, .indices = indices, .density = 0});
    }
  }
  check({.seqlen_q = 70, .seqlen_k = 0, .batch = 2}, {});
  check({.seqlen_q = 0, .seqlen_k = 70, .batch = 2}, {.indices = true});
  check({.seqlen_q = 5, .seqlen_k = 7, .batch = 2, .heads = 0, .kv_heads = 2}, {});
  check({.seqlen_q = 5, .seqlen_k = 7, .batch = 0, .heads = 2, .kv_heads = 2}, {});
}

TEST_P(AttentionOfBlocksBackward, PackedSequences) {
  for (int n = 0; n < (device.is_cuda() ? 16 : random_cases(40)) && !HasFailure(); ++n) {
    const std::int64_t batch = 1 + pick(4), kv_heads = 1 + pick(2), group = 1 + pick(2), heads = kv_heads * group, d = 64;
    const Blocks x{.query_block = 64 + 64 * pick(2),
                   .key_block = 64 + 64 * pick(2),
                   .indices = pick(2) == 0,
                   .one_sequence = pick(3) == 0,
                   .heads_per_list = static_cast<int>(pick(2) == 0 ? group : 1),
                   .density = 0.6};
    Case c{.seqlen_q = 1, .seqlen_k = 1, .batch = batch, .heads = heads, .kv_heads = kv_heads, .head_dim = d, .causal = pick(2) == 0};
    if (pick(3) == 0) c.window_left = pick(150);
    std::vector<std::int32_t> cu_q{pick(3)}, cu_k{pick(3)};
    std::vector<std::int64_t> lengths_q, lengths_k;
    for (std::int64_t b = 0; b < batch; ++b) {
      lengths_q.push_back(pick(4) == 0 ? 0 : pick(250)), lengths_k.push_back(pick(5) == 0 ? 0 : pick(280));
      cu_q.push_back(cu_q.back() + static_cast<std::int32_t>(lengths_q.back()));
      cu_k.push_back(cu_k.back() + static_cast<std::int32_t>(lengths_k.back()));
      c.seqlen_q = std::max(c.seqlen_q, lengths_q.back()), c.seqlen_k = std::max(c.seqlen_k, lengths_k.back());
    }
    const std::int64_t total_q = cu_q.back() + pick(3), total_k = cu_k.back() + pick(3);
    if (total_q == 0 || total_k == 0) continue;
    SCOPED_TRACE(tw::format("{}; {}; cu_q {} cu_k {}", c.describe(), x.describe(), tw::join(cu_q, ","), tw::join(cu_k, ",")));
    const Selection selection = select_blocks(x.one_sequence ? 1 : batch, heads / x.heads_per_list, blocks_in(c.seqlen_q, x.query_block),
                                              blocks_in(c.seqlen_k, x.key_block), x.density, random);
    const BlockTensors tensors(x, selection, random, device);
    // Row r of sequence b of `dense` is row offsets[b] + r of the packed tensor; other rows are NaN.
    const auto packed = [&](std::int64_t total, std::int64_t count, const std::vector<std::int32_t>& offsets,
                            const std::vector<std::int64_t>& lengths, std::int64_t longest, std::vector<float>& dense) {
      std::vector<float> values(static_cast<std::size_t>(total * count * d), kNaN);
      dense.assign(static_cast<std::size_t>(batch * longest * count * d), 0);
      std::normal_distribution<float> normal;
      for (std::size_t b = 0; b < lengths.size(); ++b) {
        for (std::int64_t i = 0; i < lengths[b] * count * d; ++i) {
          const float value = round_to(dtype, normal(random));
          values[static_cast<std::size_t>(offsets[b] * count * d + i)] = value;
          dense[static_cast<std::size_t>(static_cast<std::int64_t>(b) * longest * count * d + i)] = value;
        }
      }
      return values;
    };
    std::vector<float> q_dense, k_dense, v_dense, gradient;
    PlacedTensor q({total_q, heads, d}, dtype, device), k({total_k, kv_heads, d}, dtype, device), v({total_k, kv_heads, d}, dtype, device);
    PlacedTensor o({total_q, heads, d}, dtype, device), d_o({total_q, heads, d}, dtype, device), lse({heads, total_q}, DType::f32, device);
    q.fill(packed(total_q, heads, cu_q, lengths_q, c.seqlen_q, q_dense));
    k.fill(packed(total_k, kv_heads, cu_k, lengths_k, c.seqlen_k, k_dense));
    v.fill(packed(total_k, kv_heads, cu_k, lengths_k, c.seqlen_k, v_dense));
    d_o.fill(packed(total_q, heads, cu_q, lengths_q, c.seqlen_q, gradient));
    const PackedSequences sequences{to_device(cu_q, {batch + 1}), to_device(cu_k, {batch + 1})};
    PlainCall plain = plain_call(c);
    plain.causal_offset = {};
    std::vector<float> hidden;
    hide_blocks(plain, x, selection, hidden);
    plain.q = q_dense, plain.k = k_dense, plain.v = v_dense;
    plain.lengths_q = lengths_q, plain.lengths_k = lengths_k;
    const AttentionOptions options{.causal = c.causal, .window_left = c.window_left, .blocks = &tensors.blocks, .lse = &lse.tensor()};
    attention_varlen(q, k, v, o, sequences, options);
    const PlainGradients exact = reference_gradients(plain, gradient), near = naive_gradients(plain, gradient, dtype);
    for (const Way way : ways(c)) {
      SCOPED_TRACE(tw::format("way {}", static_cast<int>(way)));
      const Results out(q, k, v, heads);
      const AttentionBackwardOptions all{.forward = options, .deterministic = way == Way::deterministic};
      if (way == Way::summed) {
        BackwardCall call = check_varlen_backward(q, k, v, o, lse, d_o, out.dq, out.dk, out.dv, sequences, all);
        run_adding_up(call);
      } else {
        attention_varlen_backward(q, k, v, o, lse, d_o, out.dq, out.dk, out.dv, sequences, all);
      }
      const auto expect = [&](const char* name, const PlacedTensor& of, const std::vector<std::int32_t>& offsets,
                              const std::vector<std::int64_t>& lengths, std::int64_t longest, std::int64_t row,
                              const std::vector<double>& of_exact, const std::vector<double>& of_near,
                              const std::vector<double>& of_cancelled) {
        const std::vector<double> values = of.values();
        std::vector<double> mine, mine_exact, mine_near, mine_cancelled;
        for (std::size_t b = 0; b < lengths.size(); ++b) {
          for (std::int64_t i = 0; i < lengths[b] * row; ++i) {
            const auto dense = static_cast<std::size_t>(static_cast<std::int64_t>(b) * longest * row + i);
            mine.push_back(values[static_cast<std::size_t>(offsets[b] * row + i)]);
            mine_exact.push_back(of_exact[dense]), mine_near.push_back(of_near[dense]);
            if (!of_cancelled.empty()) mine_cancelled.push_back(of_cancelled[dense]);
          }
        }
        expect_gradient(name, mine, mine_exact, mine_near, mine_cancelled, d);
        EXPECT_TRUE(of.gaps_intact()) << name;
      };
      expect("dq", out.dq, cu_q, lengths_q, c.seqlen_q, heads * d, exact.dq, near.dq, exact.dq_cancelled);
      expect("dk", out.dk, cu_k, lengths_k, c.seqlen_k, kv_heads * d, exact.dk, near.dk, exact.dk_cancelled);
      expect("dv", out.dv, cu_k, lengths_k, c.seqlen_k, kv_heads * d, exact.dv, near.dv,
             dtype == DType::f32 ? exact.dv_cancelled : std::vector<double>());
    }
  }
}

TEST_P(AttentionOfBlocksBackward, ListsInLittleMemory) {
  // Lists of some heads at a time give the same bits as those of all.
  for (const bool indices : {false, true}) {
    for (const bool one_sequence : {false, true}) {
      for (const int heads_per_list : {1, 2, 4}) {
        const Blocks x{.query_block = 64, .key_block = 64, .indices = indices, .one_sequence = one_sequence};
        const Selection selection = select_blocks(one_sequence ? 1 : 3, 4 / heads_per_list, 3, 4, 0.5, random);
        const BlockTensors tensors(x, selection, random, device);
        PlacedTensor q({3, 170, 4, 64}, dtype, device), d_o({3, 170, 4, 64}, dtype, device);
        PlacedTensor k({3, 250, 2, 64}, dtype, device), v({3, 250, 2, 64}, dtype, device);
        for (PlacedTensor* const t : {&q, &d_o, &k, &v}) t->fill_random(random);
        std::vector<std::vector<double>> first;
        for (const std::int64_t bytes : {std::int64_t{1} << 26, std::int64_t{1}, std::int64_t{200}, std::int64_t{500}}) {
          SCOPED_TRACE(tw::format("{}; {} bytes", x.describe(), bytes));
          const PlacedTensor o({3, 170, 4, 64}, dtype, device), lse({3, 4, 170}, DType::f32, device);
          const AttentionOptions options{.causal = true, .blocks = &tensors.blocks, .lse = &lse.tensor()};
          detail::AttentionCall call = detail::check_attention(q, k, v, o, options);
          call.blocks.most_list_bytes = bytes;
          attention::run(call);
          const Results out(q, k, v, 4);
          BackwardCall backward = check_backward(q, k, v, o, lse, d_o, out.dq, out.dk, out.dv, {.forward = options});
          backward.forward.blocks.most_list_bytes = bytes;
          run_backward(backward);
          std::vector<std::vector<double>> now = out.values();
          now.push_back(o.values());
          now.push_back(lse.values());
          if (first.empty()) first = now;
          EXPECT_EQ(now, first);
        }
      }
    }
  }
}

TEST_P(AttentionOfBlocksBackward, IsDeterministic) {
  const Blocks x{.query_block = 64, .indices = true};
  const Selection selection = select_blocks(2, 4, 5, 4, 0.5, random);
  const BlockTensors tensors(x, selection, random, device);
  PlacedTensor q({2, 300, 4, 64}, dtype, device), d_o({2, 300, 4, 64}, dtype, device);
  PlacedTensor k({2, 400, 2, 64}, dtype, device), v({2, 400, 2, 64}, dtype, device);
  const PlacedTensor o({2, 300, 4, 64}, dtype, device), lse({2, 4, 300}, DType::f32, device);
  for (PlacedTensor* const t : {&q, &d_o, &k, &v}) t->fill_random(random);
  const AttentionOptions options{.blocks = &tensors.blocks, .lse = &lse.tensor()};
  tw::attention(q, k, v, o, options);
  std::vector<std::vector<double>> first;
  for (int i = 0; i < 4; ++i) {
    const Results out(q, k, v, 4);
    attention_backward(q, k, v, o, lse, d_o, out.dq, out.dk, out.dv, {.forward = options});
    if (first.empty()) first = out.values();
    EXPECT_EQ(out.values(), first);
  }
}

TEST(ListedHeads, CoverAllHeadsOnce) {
  for (const int batches : {1, 2, 5}) {
    for (const auto& [heads, unit] : {std::pair{1, 1}, {4, 1}, {6, 2}, {6, 3}, {8, 8}}) {
      for (const std::int64_t most : {1, 99, 100, 250, 600, 1300, 100000}) {
        const bool fits = std::int64_t{batches} * (heads / unit) * 100 <= most;
        std::vector<int> seen(static_cast<std::size_t>(batches * heads));
        const std::vector<ListedHeads> parts = listed_heads(batches, heads, unit, 100, most, false);
        for (const ListedHeads& part : parts) {
          EXPECT_EQ(part.first_head % unit, 0);
          EXPECT_EQ(part.heads % unit, 0);
          EXPECT_TRUE(part.batches == 1 || part.heads == heads);
          EXPECT_TRUE(part.batches * part.heads == unit || part.batches * part.heads / unit * 100 <= most);
          EXPECT_LE(part.batches * part.heads, parts.front().batches * parts.front().heads);
          for (int b = part.first_batch; b < part.first_batch + part.batches; ++b)
            for (int h = part.first_head; h < part.first_head + part.heads; ++h) ++seen[static_cast<std::size_t>(b * heads + h)];
        }
        EXPECT_EQ(seen, std::vector<int>(seen.size(), 1));
        EXPECT_EQ(parts.size() == 1, fits || (batches == 1 && heads == unit));
      }
    }
  }
  EXPECT_EQ(listed_heads(5, 4, 1, 100, 400, true).size(), 1u);
}

/// Tiles that ship for GPUs, on the CPU: one warpgroup, and tiles that are parts of blocks.
template <int kRows, int kKeys>
void expect_right_on_the_cpu(int query_block, int key_block) {
  SCOPED_TRACE(tw::format("tiles of {} x {}, blocks of {} x {}", kRows, kKeys, query_block, key_block));
  static constexpr AttentionConfig config{.head_dim = 64, .value_dim = 64, .rows = kRows, .keys = kKeys, .stages = 2, .form = kListed};
  using List = Rules<Optional<Softcap, Use::never>, Optional<Alibi, Use::never>, Optional<MaskTensor, Use::never>, Band<true, true, true>>;
  using OfKeys = KeyGradients<bf16, config, List, Gradients::keys_and_values>;
  using OfQueries = QueryGradient<bf16, config, List>;
  using KeyLists = ListKeyBlocks<kRows, kKeys>;
  using QueryLists = ListQueryBlocks<kRows, kKeys, kEqualLengths>;
  std::mt19937_64 random = random_engine();
  const Device cpu = Device::cpu();
  const std::int64_t heads = 4, kv_heads = 2, queries = 310, keys = 400;
  PlacedTensor q({1, queries, heads, 64}, DType::bf16, cpu), k({1, keys, kv_heads, 64}, DType::bf16, cpu),
      v(k.tensor().shape(), DType::bf16, cpu);
  PlacedTensor o(q.tensor().shape(), DType::bf16, cpu), d_o(q.tensor().shape(), DType::bf16, cpu),
      lse({1, heads, queries}, DType::f32, cpu);
  const std::vector<float> q_values = q.fill_random(random), k_values = k.fill_random(random), v_values = v.fill_random(random),
                           gradient = d_o.fill_random(random);
  const Blocks x{.query_block = query_block, .key_block = key_block};
  const Selection selection = select_blocks(1, heads, blocks_in(queries, query_block), blocks_in(keys, key_block), 0.6, random);
  const BlockTensors tensors(x, selection, random, cpu);
  const AttentionOptions options{.causal = true, .window_left = 170, .blocks = &tensors.blocks, .lse = &lse.tensor()};
  tw::attention(q, k, v, o, options);
  const PlacedTensor dq(q.tensor().shape(), DType::bf16, cpu), dk(k.tensor().shape(), DType::bf16, cpu),
      dv(k.tensor().shape(), DType::bf16, cpu);
  BackwardCall call = check_backward(q, k, v, o, lse, d_o, dq, dk, dv, {.forward = options});
  run_delta(call, false);
  const auto grid = [](const Tensor& lists) { return TileGrid{ceil_div(static_cast<int>(lists.shape(0)), KeyLists::rows)}; };
  with_query_lists(
      call, kRows, kKeys, {},
      [&](const BackwardCall& some, const Tensor& tiles, const HostMask& mask, const Tensor& lists) {
        launch_cpu<QueryLists>(grid(lists), [&](auto&, auto& p) { fill_query_lists(p, some, tiles, mask, lists); });
      },
      [](const BackwardCall& some) {
        launch_cpu<OfKeys>(key_gradients_grid(some, kKeys), [&](auto& bind, auto& p) { fill_key_gradients<List>(bind, p, some); });
      });
  with_lists(
      call.forward, kRows, kKeys,
      [&](const AttentionCall& some, const HostMask& mask, const Tensor& lists) {
        launch_cpu<KeyLists>(grid(lists), [&](auto&, auto& p) { fill_lists(p, some, mask, lists); });
      },
      [&](const AttentionCall& some) {
        BackwardCall of_some = call;
        of_some.forward = some;
        launch_cpu<OfQueries>(detail::attention_grid(some, kRows),
                              [&](auto& bind, auto& p) { fill_query_gradient<List>(bind, p, of_some); });
      });
  PlainCall plain{.batch = 1, .heads = heads, .kv_heads = kv_heads, .seqlen_q = queries, .seqlen_k = keys, .head_dim = 64};
  plain.scale = 0.125;
  plain.causal = true, plain.window_left = 170;
  std::vector<float> hidden;
  hide_blocks(plain, x, selection, hidden);
  plain.q = q_values, plain.k = k_values, plain.v = v_values;
  const PlainGradients exact = reference_gradients(plain, gradient), near = naive_gradients(plain, gradient, DType::bf16);
  const auto expect = [&](const char* name, const PlacedTensor& of, const std::vector<double>& of_exact,
                          const std::vector<double>& of_near) {
    const std::vector<double> got = of.values();
    EXPECT_TRUE(accurate({.out = got, .reference = of_exact, .naive = of_near, .arithmetic = arithmetic_of(DType::bf16, cpu), .factor = 3}))
        << name;
  };
  expect("dq", dq, exact.dq, near.dq);
  expect("dk", dk, exact.dk, near.dk);
  expect("dv", dv, exact.dv, near.dv);
}

TEST(ShippedGradientsOfBlocks, Tiles) {
  for (const int query_block : {64, 128}) {
    expect_right_on_the_cpu<64, 128>(query_block, 128);
    expect_right_on_the_cpu<64, 64>(query_block, 64);
    expect_right_on_the_cpu<32, 64>(query_block, 128);
  }
  expect_right_on_the_cpu<128, 64>(128, 64);
}

TEST(ShippedGradientsOfBlocks, CompileWithoutSpills) {
  skip_without_nvrtc();
  std::vector<KernelSpec> specs = listed_backward_specs();
  specs.push_back(make_spec(kernel_info<ListQueryBlocks<64, 128, kEqualLengths>>, true, true, "list_query_blocks"));
  specs.push_back(make_spec(kernel_info<ListQueryBlocks<64, 64, kRagged>>, true, true, "list_query_blocks, packed"));
  compile_and_check(specs, "sm_90a", expect_fast);
}

}  // namespace
}  // namespace tw::kernels::attention
