// attention() of blocks of keys against loops in double with the mask that the blocks mean.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kernels/attention/attention_case.hpp"
#include "kernels/attention/blocks_case.hpp"
#include "kernels/attention/heuristics.hpp"
#include "kernels/attention/key_blocks.hpp"
#include "tests/compiled_kernels.hpp"
#include "tests/expect_error.hpp"
#include "tilewave/launch.hpp"
#include "tilewave/tile/cpu/target.tile.hpp"

namespace tw::kernels::attention {
namespace {

using namespace tw::test;

class AttentionOfBlocks : public AttentionTest {
 protected:
  void SetUp() override {
    skip_unless_present(device);
    cpu::set_poison_released_slots(true);
  }

  Selection select(const Case& c, const Blocks& x) {
    return select_blocks(x.one_sequence ? 1 : c.batch, c.heads / x.heads_per_list, blocks_in(c.seqlen_q, x.query_block),
                         blocks_in(c.seqlen_k, x.key_block), x.density, random);
  }
  void check(const Case& c, const Blocks& x) { check(c, x, select(c, x)); }
  void check(const Case& c, const Blocks& x, const Selection& selection) {
    SCOPED_TRACE(c.describe() + "; " + x.describe());
    PlacedTensor q({c.batch, c.seqlen_q, c.heads, c.head_dim}, dtype, device, placement(c.q));
    PlacedTensor k({c.batch, c.seqlen_k, c.kv_heads, c.head_dim}, dtype, device, placement(c.kv));
    PlacedTensor v({c.batch, c.seqlen_k, c.kv_heads, c.values()}, dtype, device, placement(c.kv));
    PlacedTensor o({c.batch, c.seqlen_q, c.heads, c.values()}, dtype, device, placement(c.o));
    PlacedTensor lse({c.batch, c.heads, c.seqlen_q}, DType::f32, device, {.offset = 3});
    const std::vector<float> q_values = q.fill_random(random, c.magnitude);
    std::vector<float> k_values = k.fill_random(random, c.magnitude), v_values = v.fill_random(random);
    const BlockTensors tensors(x, selection, random, device);
    AttentionOptions options{.blocks = &tensors.blocks, .lse = c.with_lse ? &lse.tensor() : nullptr};
    PlainCall plain = plain_call(c);
    Features features;
    add_features(c, features, options, plain);
    std::vector<float> hidden;
    hide_blocks(plain, x, selection, hidden);
    // The reference gets numbers where the call gets NaN: keys that no query of their head selects are not even read.
    plain.q = q_values, plain.k = k_values, plain.v = v_values;
    std::vector<float> k_poisoned = k_values, v_poisoned = v_values;
    for (std::int64_t b = 0; b < c.batch; ++b) {
      for (std::int64_t j = 0; j < c.seqlen_k; ++j) {
        for (std::int64_t kv_head = 0; kv_head < c.kv_heads; ++kv_head) {
          bool read = false;
          for (std::int64_t h = kv_head * (c.heads / c.kv_heads); h < (kv_head + 1) * (c.heads / c.kv_heads); ++h)
            for (std::int64_t i = 0; i < selection.queries; ++i) read |= selection.at(b, h / x.heads_per_list, i, j / x.key_block);
          if (read) continue;
          const std::int64_t row = (b * c.seqlen_k + j) * c.kv_heads + kv_head;
          std::fill_n(k_poisoned.begin() + row * c.head_dim, c.head_dim, kNaN);
          std::fill_n(v_poisoned.begin() + row * c.values(), c.values(), kNaN);
        }
      }
    }
    k.fill(k_poisoned);
    v.fill(v_poisoned);
    if (dtype == DType::f32 && device.is_cuda()) {
      expect_error<InvalidArgument>([&] { tw::attention(q, k, v, o, options); }, {"blocks are given", "f32 on the CPU"});
      return;
    }
    if (!launched([&] { tw::attention(q, k, v, o, options); })) return;
    expect_results(plain, dtype, device, o, c.with_lse ? &lse : nullptr);
    if (!c.with_lse) {
      EXPECT_TRUE(lse.untouched());
    }
  }
  /// q, k and v of a small call, and its result with some blocks.
  struct Small {
    PlacedTensor q, k, v;
  };
  Small small() {
    Small t{PlacedTensor({2, 200, 2, 64}, dtype, device), PlacedTensor({2, 300, 1, 64}, dtype, device),
            PlacedTensor({2, 300, 1, 64}, dtype, device)};
    for (PlacedTensor* x : {&t.q, &t.k, &t.v}) x->fill_random(random);
    return t;
  }
  std::vector<double> result(const Small& t, const AttentionBlocks& blocks) const {
    PlacedTensor o({2, 200, 2, 64}, dtype, device);
    tw::attention(t.q, t.k, t.v, o, {.blocks = &blocks});
    return o.values();
  }
  bool unsupported() const { return dtype == DType::f32 && device.is_cuda(); }
};

INSTANTIATE_TEST_SUITE_P(Ops, AttentionOfBlocks, testing::ValuesIn(kDevicesAndDTypes), device_and_dtype);

TEST_P(AttentionOfBlocks, AnyLengths) {
  constexpr std::int64_t kPairs[][2] = {{1, 1},     {1, 128},   {64, 64},   {65, 63},   {127, 129}, {128, 128},
                                        {129, 127}, {193, 384}, {257, 641}, {37, 1031}, {640, 130}};
  for (const auto& [seqlen_q, seqlen_k] : kPairs) {
    for (const int query_block : {64, 128}) {
      for (const int key_block : {64, 128}) {
        const Blocks blocks{.query_block = query_block, .key_block = key_block, .indices = pick(2) == 0, .density = 0.6};
        check({.seqlen_q = seqlen_q, .seqlen_k = seqlen_k, .heads = 2, .kv_heads = 1, .head_dim = 128, .causal = pick(2) == 0}, blocks);
      }
    }
  }
}

TEST_P(AttentionOfBlocks, AnyHeadDim) {
  for (const auto& [head_dim, value_dim] : {std::pair{8, 8}, {64, 64}, {96, 96}, {128, 80}, {192, 192}, {192, 128}, {256, 256}}) {
    for (const int block : {64, 128}) {
      check({.seqlen_q = 133, .seqlen_k = 401, .heads = 2, .kv_heads = 1, .head_dim = head_dim, .causal = true, .value_dim = value_dim},
            {.query_block = block, .key_block = block, .indices = pick(2) == 0});
    }
  }
}

TEST_P(AttentionOfBlocks, CausalOffsetsWindowsAndChunks) {
  for (const int offset : {-1000, -150, -64, -1, 0, 1, 63, 64, 200, 1000}) {
    check({.seqlen_q = 260, .seqlen_k = 330, .heads = 2, .kv_heads = 2, .head_dim = 128, .causal = true, .causal_offset = offset},
          {.key_block = 64, .density = 0.7});
  }
  for (const auto& [left, right] : {std::pair{0, 0}, {5, -1}, {-1, 7}, {64, 3}, {1, 130}, {200, 200}}) {
    check({.seqlen_q = 300, .seqlen_k = 500, .head_dim = 128, .window_left = left, .window_right = right},
          {.key_block = 64, .indices = true, .density = 0.7});
  }
  for (const int chunk : {50, 64, 200})
    check({.seqlen_q = 300, .seqlen_k = 500, .head_dim = 128, .causal = true, .chunk = chunk},
          {.key_block = 64, .indices = true, .density = 0.7});
}

TEST_P(AttentionOfBlocks, SampledFeatures) {
  // On a GPU every list of rules is a kernel to compile, so there are fewer lists.
  const int cases = device.is_cuda() ? 80 : random_cases(150);
  struct List {
    int head_dim, value_dim, query_block, key_block;
    bool softcap, alibi, mask, lower, upper, dropout;
  };
  constexpr int kDims[][2] = {{64, 64}, {96, 96}, {128, 128}, {192, 192}, {256, 256}, {192, 128}};
  const int list_count = device.is_cuda() ? 12 : cases;
  std::vector<List> lists;
  for (int i = 0; i < list_count; ++i) {
    const auto& [d, dv] = kDims[pick(6)];
    lists.push_back(
        {d, dv, 64 + 64 * pick(2), 64 + 64 * pick(2), pick(3) == 0, pick(3) == 0, pick(4) == 0, pick(3) == 0, pick(2) == 0, pick(6) == 0});
  }
  for (int i = 0; i < cases && !HasFailure(); ++i) {
    const List& list = lists[static_cast<std::size_t>(i % list_count)];
    const int group = 1 + pick(3), kv_heads = 1 + pick(2), heads = group * kv_heads, sharing = pick(3);
    const bool causal = list.upper && pick(2) == 0;
    const int mask = pick(3);
    check({.seqlen_q = 1 + pick(300),
           .seqlen_k = pick(500),
           .batch = 1 + pick(2),
           .heads = heads,
           .kv_heads = kv_heads,
           .head_dim = list.head_dim - 8 * pick(3),
           .causal = causal,
           .causal_offset = !list.alibi && pick(3) == 0 ? std::optional(pick(400) - 200) : std::nullopt,
           .with_lse = pick(4) != 0,
           .value_dim = list.value_dim - 8 * pick(3),
           .window_left = list.lower ? pick(250) : -1,
           .window_right = list.upper && !causal ? pick(100) : -1,
           .softcap = list.softcap ? 1.0f + static_cast<float>(pick(40)) : 0,
           .alibi = list.alibi ? 1 + pick(2) : 0,
           // Beside a sink, keys that are all far away would have weights that f16 cannot represent.
           .sink = !list.alibi && pick(3) == 0,
           .mask = list.mask ? std::optional(mask == 0   ? DType::boolean
                                             : mask == 1 ? DType::f32
                                                         : dtype)
                             : std::nullopt,
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

TEST_P(AttentionOfBlocks, OfNothing) {
  for (const bool indices : {false, true}) {
    for (const bool sink : {false, true}) {
      for (const int block : {64, 128})
        check({.seqlen_q = 200, .seqlen_k = 300, .batch = 2, .heads = 2, .kv_heads = 1, .sink = sink},
              {.query_block = block, .key_block = block, .indices = indices, .density = 0});
    }
  }
  check({.seqlen_q = 70, .seqlen_k = 0, .batch = 2}, {});
  check({.seqlen_q = 70, .seqlen_k = 0, .batch = 2}, {.indices = true});
}

TEST_P(AttentionOfBlocks, AllAreDense) {
  if (unsupported()) GTEST_SKIP() << "blocks in f32 are for the CPU";
  const Small t = small();
  const Tensor mask = mask_tensor({1, 1, 2, 3, std::vector<bool>(6, true)}, device);
  PlacedTensor dense({2, 200, 2, 64}, dtype, device);
  tw::attention(t.q, t.k, t.v, dense);
  const std::vector<double> got = result(t, {.mask = &mask}), expected = dense.values();
  EXPECT_TRUE(accurate({got, expected, expected, arithmetic_of(dtype, device)}));
}

TEST_P(AttentionOfBlocks, OrderAndRepetitionDoNotMatter) {
  if (unsupported()) GTEST_SKIP() << "blocks in f32 are for the CPU";
  const Small t = small();
  const auto of = [&](const std::vector<std::int32_t>& first, const std::vector<std::int32_t>& second) {
    std::vector<std::int32_t> entries = first;
    entries.insert(entries.end(), second.begin(), second.end());
    const Tensor indices = to_device(entries, {1, 1, 2, static_cast<std::int64_t>(first.size())});
    return result(t, {.indices = &indices});
  };
  const std::vector<double> sorted = of({0, 2, -1}, {1, -1, -1});
  EXPECT_EQ(of({2, 0, -1}, {-1, -1, 1}), sorted);
  EXPECT_EQ(of({2, 0, 2, 0}, {1, 1, 1, 1}), sorted);
  EXPECT_EQ(of({0, 3, 2, -5}, {1, 3, 1 << 30, -(1 << 30)}), sorted);
  EXPECT_NE(of({0, 2, 1}, {1, -1, -1}), sorted);
}

TEST_P(AttentionOfBlocks, CountsAreClamped) {
  if (unsupported()) GTEST_SKIP() << "blocks in f32 are for the CPU";
  const Small t = small();
  const Tensor indices = to_device(std::vector<std::int32_t>{2, 0, 1, 2}, {1, 1, 2, 2});
  const auto of = [&](std::int32_t first, std::int32_t second) {
    const Tensor counts = to_device(std::vector{first, second}, {1, 1, 2});
    return result(t, {.indices = &indices, .counts = &counts});
  };
  EXPECT_EQ(of(1000, std::numeric_limits<std::int32_t>::max()), of(2, 2));
  EXPECT_EQ(of(-1, std::numeric_limits<std::int32_t>::min()), of(0, 0));
  EXPECT_NE(of(1, 1), of(2, 2));
  for (const double x : of(0, 0)) ASSERT_EQ(x, 0);
}

TEST_P(AttentionOfBlocks, AnyStrides) {
  if (unsupported()) GTEST_SKIP() << "blocks in f32 are for the CPU";
  const Small t = small();
  std::vector<bool> bits(2 * 2 * 2 * 3);
  for (auto&& bit : bits) bit = pick(2) == 0;
  const Tensor mask = mask_tensor({2, 2, 2, 3, bits}, device), transposed = mask.to(Device::cpu());
  // The same numbers, [key_blocks, query_blocks, heads, batch] in memory.
  const Tensor host = Tensor::empty({3, 2, 2, 2}, DType::boolean);
  for (std::int64_t b = 0; b < 2; ++b)
    for (std::int64_t h = 0; h < 2; ++h)
      for (std::int64_t i = 0; i < 2; ++i)
        for (std::int64_t j = 0; j < 3; ++j)
          static_cast<u8*>(host.data())[((j * 2 + i) * 2 + h) * 2 + b] =
              static_cast<const u8*>(transposed.data())[((b * 2 + h) * 2 + i) * 3 + j];
  const Tensor there = host.to(device), view = there.transpose(0, 3).transpose(1, 2);
  EXPECT_EQ(result(t, {.mask = &view}), result(t, {.mask = &mask}));
}

TEST_P(AttentionOfBlocks, PackedSequences) {
  for (int n = 0; n < (device.is_cuda() ? 24 : random_cases(80)) && !HasFailure(); ++n) {
    const std::int64_t batch = 1 + pick(5), kv_heads = 1 + pick(2), group = 1 + pick(2), heads = kv_heads * group, d = 64;
    const bool used = pick(3) == 0;
    const Blocks x{.query_block = 64 + 64 * pick(2),
                   .key_block = 64 + 64 * pick(2),
                   .indices = pick(2) == 0,
                   .one_sequence = pick(3) == 0,
                   .heads_per_list = static_cast<int>(pick(2) == 0 ? group : 1),
                   .density = 0.6};
    Case c{.seqlen_q = 1, .seqlen_k = 1, .batch = batch, .heads = heads, .kv_heads = kv_heads, .head_dim = d, .causal = pick(2) == 0};
    if (pick(3) == 0) c.window_left = pick(150);
    std::vector<std::int32_t> cu_q{pick(3)}, cu_k{pick(3)}, used_q, used_k;
    std::vector<std::int64_t> lengths_q, lengths_k;
    for (std::int64_t b = 0; b < batch; ++b) {
      const int q_length = pick(4) == 0 ? 0 : pick(300), k_length = pick(5) == 0 ? 0 : pick(400);
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
    SCOPED_TRACE(tw::format("{} cu_q {} cu_k {} used {} blocks of {} x {}", c.describe(), tw::join(cu_q, ","), tw::join(cu_k, ","), used,
                            x.query_block, x.key_block));
    // One block less than the longest sequences have: what the tensors do not hold is not attended to.
    Selection selection = select(c, x), smaller = selection;
    if (selection.queries > 1 && selection.keys > 1 && pick(2) == 0) {
      smaller = {selection.batch, selection.heads, selection.queries - 1, selection.keys - 1, {}};
      for (std::int64_t b = 0; b < selection.batch; ++b)
        for (std::int64_t h = 0; h < selection.heads; ++h)
          for (std::int64_t i = 0; i < selection.queries; ++i)
            for (std::int64_t j = 0; j < selection.keys; ++j) {
              const auto index = static_cast<std::size_t>(((b * selection.heads + h) * selection.queries + i) * selection.keys + j);
              const bool inside = i < smaller.queries && j < smaller.keys;
              if (inside) smaller.selected.push_back(selection.selected[index]);
              // A list of indices may name any block of keys.
              if (i == smaller.queries || (j == smaller.keys && !x.indices)) selection.selected[index] = false;
            }
      if (x.indices) {
        smaller = {selection.batch, selection.heads, selection.queries - 1, selection.keys, {}};
        for (std::int64_t row = 0; row < selection.batch * selection.heads * selection.queries; ++row)
          for (std::int64_t j = 0; row % selection.queries < smaller.queries && j < selection.keys; ++j)
            smaller.selected.push_back(selection.selected[static_cast<std::size_t>(row * selection.keys + j)]);
      }
    }
    const auto packed = [&](std::int64_t total, std::int64_t count, const std::vector<std::int32_t>& cu,
                            const std::vector<std::int64_t>& lengths, std::int64_t longest, std::vector<float>& dense) {
      std::vector<float> values(static_cast<std::size_t>(total * count * d), kNaN);
      dense.assign(static_cast<std::size_t>(batch * longest * count * d), 0);
      std::normal_distribution<float> normal;
      for (std::size_t b = 0; b < lengths.size(); ++b) {
        for (std::int64_t i = 0; i < lengths[b] * count * d; ++i) {
          const float value = round_to(dtype, normal(random));
          values[static_cast<std::size_t>(cu[b] * count * d + i)] = value;
          dense[static_cast<std::size_t>(static_cast<std::int64_t>(b) * longest * count * d + i)] = value;
        }
      }
      return values;
    };
    std::vector<float> q_dense, k_dense, v_dense;
    PlacedTensor q({total_q, heads, d}, dtype, device), k({total_k, kv_heads, d}, dtype, device), v({total_k, kv_heads, d}, dtype, device);
    PlacedTensor o({total_q, heads, d}, dtype, device), lse({heads, total_q}, DType::f32, device);
    q.fill(packed(total_q, heads, cu_q, lengths_q, c.seqlen_q, q_dense));
    k.fill(packed(total_k, kv_heads, cu_k, lengths_k, c.seqlen_k, k_dense));
    v.fill(packed(total_k, kv_heads, cu_k, lengths_k, c.seqlen_k, v_dense));
    const Tensor used_q_tensor = to_device(used_q, {batch}), used_k_tensor = to_device(used_k, {batch});
    const PackedSequences sequences{to_device(cu_q, {batch + 1}), to_device(cu_k, {batch + 1}), used ? &used_q_tensor : nullptr,
                                    used ? &used_k_tensor : nullptr};
    const BlockTensors tensors(x, smaller, random, device);
    PlainCall plain = plain_call(c);
    AttentionOptions options;
    Features features;
    add_features(c, features, options, plain);
    options.lse = &lse.tensor();
    options.blocks = &tensors.blocks;
    if (dtype == DType::f32 && device.is_cuda()) {
      expect_error<InvalidArgument>([&] { attention_varlen(q, k, v, o, sequences, options); }, {"f32 on the CPU"});
      return;
    }
    if (!launched([&] { attention_varlen(q, k, v, o, sequences, options); })) return;
    plain.causal_offset = {};
    std::vector<float> hidden;
    hide_blocks(plain, x, selection, hidden);
    plain.q = q_dense, plain.k = k_dense, plain.v = v_dense;
    plain.lengths_q = lengths_q, plain.lengths_k = lengths_k;
    const PlainResult expected = reference(plain), unfused = naive(plain, dtype);
    const std::vector<double> out = o.values(), sums = lse.values();
    std::vector<double> mine, exact, near, mine_lse, exact_lse;
    for (std::int64_t b = 0; b < batch; ++b) {
      for (std::int64_t s = 0; s < lengths_q[static_cast<std::size_t>(b)]; ++s) {
        const std::int64_t row = cu_q[static_cast<std::size_t>(b)] + s;
        for (std::int64_t i = 0; i < heads * d; ++i) {
          mine.push_back(out[static_cast<std::size_t>(row * heads * d + i)]);
          exact.push_back(expected.o[static_cast<std::size_t>((b * c.seqlen_q + s) * heads * d + i)]);
          near.push_back(unfused.o[static_cast<std::size_t>((b * c.seqlen_q + s) * heads * d + i)]);
        }
        for (std::int64_t h = 0; h < heads; ++h) {
          mine_lse.push_back(sums[static_cast<std::size_t>(h * total_q + row)]);
          exact_lse.push_back(expected.lse[static_cast<std::size_t>((b * heads + h) * c.seqlen_q + s)]);
        }
      }
    }
    EXPECT_TRUE(accurate({mine, exact, near, arithmetic_of(dtype, device)}));
    EXPECT_TRUE(lse_accurate(mine_lse, exact_lse));
    EXPECT_TRUE(o.gaps_intact());
  }
}

TEST(ListShares, TakeEachEntryOnce) {
  for (int count = 0; count <= 20; ++count) {
    for (int splits = 1; splits <= 24; ++splits) {
      for (int cut = 0; cut <= count; ++cut) {
        const int cut_first = (count - cut + 1) / 2;
        int next = 0, cuts = 0, first_cuts = 0;
        for (int part = 0; part < splits; ++part) {
          const ListShare share = ListShare::of(count, part, splits);
          EXPECT_EQ(share.begin, next);
          EXPECT_LE(share.end - share.begin, (count + splits - 1) / splits);
          EXPECT_GE(share.end - share.begin, count / splits);
          next = share.end;
          // Entry by entry.
          int among_first = 0, among_last = 0;
          for (int i = share.begin; i < share.end; ++i) among_first += i < cut, among_last += i >= count - cut_first;
          EXPECT_EQ(share.among_first(cut), among_first) << count << " " << splits << " " << part << " " << cut;
          EXPECT_EQ(share.among_last(cut_first, count), among_last) << count << " " << splits << " " << part << " " << cut;
          cuts += among_first, first_cuts += among_last;
        }
        EXPECT_EQ(next, count);
        EXPECT_EQ(cuts, cut);
        EXPECT_EQ(first_cuts, cut_first);
      }
    }
  }
}

class AttentionOfBlocksBadInput : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override { skip_unless_present(device); }
  const Device device = GetParam();
};

INSTANTIATE_TEST_SUITE_P(Ops, AttentionOfBlocksBadInput, testing::ValuesIn(kDevices), device_name);

TEST_P(AttentionOfBlocksBadInput, Refused) {
  const PlacedTensor q({2, 200, 4, 64}, DType::bf16, device), kv({2, 300, 2, 64}, DType::bf16, device);
  const PlacedTensor o({2, 200, 4, 64}, DType::bf16, device);
  const auto refused = [&](const AttentionBlocks& blocks, std::initializer_list<std::string_view> parts) {
    expect_error<InvalidArgument>([&] { tw::attention(q, kv, kv, o, {.blocks = &blocks}); }, parts);
    EXPECT_TRUE(o.untouched());
  };
  const auto zeros = [&](Shape shape, DType dtype = DType::boolean) {
    return Tensor::zeros(std::move(shape), dtype, Stream::standard(device));
  };
  const Tensor mask = zeros({2, 4, 2, 3}), indices = zeros({1, 2, 2, 1}, DType::i32), counts = zeros({1, 2, 2}, DType::i32);
  refused({}, {"either blocks.mask or blocks.indices"});
  refused({.mask = &mask, .indices = &indices}, {"either blocks.mask or blocks.indices"});
  refused({.mask = &mask, .counts = &counts}, {"blocks.counts is given without blocks.indices"});
  for (const int size : {0, -64, 32, 96, 256}) {
    refused({.mask = &mask, .query_block = size}, {tw::format("blocks.query_block is {}", size), "64 or 128"});
    refused({.mask = &mask, .key_block = size}, {tw::format("blocks.key_block is {}", size), "64 or 128"});
  }
  refused({.mask = &mask, .query_block = 64}, {"200 queries in blocks of 64", "4 query_blocks"});
  refused({.mask = &mask, .key_block = 64}, {"300 keys in blocks of 64", "5 key_blocks"});
  const Tensor batch = zeros({3, 4, 2, 3}), heads = zeros({2, 3, 2, 3}), rank = zeros({4, 2, 3}), bytes = zeros({2, 4, 2, 3}, DType::u8);
  refused({.mask = &batch}, {"blocks.mask is bool[3, 4, 2, 3]", "batch", "2 or 1"});
  refused({.mask = &heads}, {"blocks.mask is bool[2, 3, 2, 3]", "heads", "q's, 4", "k's, 2"});
  refused({.mask = &rank}, {"blocks.mask is bool[4, 2, 3]", "[batch, heads, query_blocks, key_blocks]"});
  refused({.mask = &bytes}, {"blocks.mask", "u8[2, 4, 2, 3]", "bool"});
  const Tensor wide = zeros({1, 2, 2, 1}, DType::i64), fewer = zeros({1, 2, 1}, DType::i32);
  refused({.indices = &wide}, {"blocks.indices", "i64[1, 2, 2, 1]", "i32"});
  refused({.indices = &indices, .counts = &fewer}, {"blocks.counts is i32[1, 2, 1]", "i32[1, 2, 2]"});
}

TEST_P(AttentionOfBlocksBadInput, WithWhatDoesNotTakeThem) {
  const Tensor mask = Tensor::zeros({1, 1, 1, 1}, DType::boolean, Stream::standard(device));
  const AttentionBlocks blocks{.mask = &mask};
  const PlacedTensor x({1, 16, 1, 64}, DType::bf16, device), o({1, 16, 1, 64}, DType::bf16, device);
  const Tensor bytes = Tensor::zeros({1, 16, 1, 64}, DType::fp8_e4m3, Stream::standard(device));
  expect_error<InvalidArgument>([&] { tw::attention(bytes, bytes, bytes, o, {.blocks = &blocks}); }, {"blocks are given", "fp8_e4m3"});
  const Tensor heads = Tensor::zeros({1, 2, 1, 1}, DType::boolean, Stream::standard(device)), rows = heads.transpose(1, 2);
  const AttentionBlocks of_heads{.mask = &heads}, of_rows{.mask = &rows};
  const PlacedTensor many({1, 1, 2, 64}, DType::bf16, device), to({1, 1, 2, 64}, DType::bf16, device);
  expect_error<InvalidArgument>([&] { attention_decode(many, x, x, to, {}, {.blocks = &of_heads}); },
                                {"blocks.mask is bool[1, 2, 1, 1]", "k_cache's, 1, or 1"});
  expect_error<InvalidArgument>([&] { attention_decode(many, x, x, to, {}, {.blocks = &of_rows}); },
                                {"blocks.mask is bool[1, 1, 2, 1]", "one query_block"});
  EXPECT_TRUE(to.untouched());
  EXPECT_TRUE(o.untouched());
}

/// A schedule that ships for GPUs, on the CPU: its results, and that its rings are used in order where tiles follow each other in a block.
template <int D, int kQueryBlock, int kKeyBlock>
void expect_right_on_the_cpu() {
  static constexpr AttentionConfig config = listed_config({D, D}, TileUse::narrow, kQueryBlock, kKeyBlock, kEqualLengths);
  using List = Rules<Optional<Softcap, Use::never>, Optional<Alibi, Use::never>, Optional<MaskTensor, Use::never>, Band<true, true, true>>;
  using Lists = ListKeyBlocks<config.rows, config.keys>;
  std::mt19937_64 random = random_engine();
  const std::int64_t heads = 4, rows = 2 * kQueryBlock + 5, keys = 5 * kKeyBlock + 7;
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
  const Tensor mask = Tensor::empty({1, heads, blocks_in(rows, kQueryBlock), blocks_in(keys, kKeyBlock)}, DType::boolean);
  for (std::int64_t i = 0; i < mask.numel(); ++i) static_cast<u8*>(mask.data())[i] = random() % 3 != 0;
  const AttentionBlocks blocks{.mask = &mask, .query_block = kQueryBlock, .key_block = kKeyBlock};
  const int left = 3 * kKeyBlock, diagonal = static_cast<int>(keys - rows);
  const AttentionOptions options{.causal = true, .causal_offset = diagonal, .window_left = left, .blocks = &blocks};
  const AttentionCall call = detail::check_attention(q, k, v, o, options);
  const auto write = [](const AttentionCall& some, const HostMask& selected, const Tensor& to) {
    launch_cpu<Lists>({ceil_div(static_cast<int>(to.shape(0)), Lists::rows)}, [&](auto&, auto& p) { fill_lists(p, some, selected, to); });
  };
  with_lists(call, config.rows, config.keys, write, [](const AttentionCall& some) {
    launch_cpu<tw::Attention<bf16, config, List>>(detail::attention_grid(some, config.rows), [&](auto& bind, auto& p) {
      detail::fill_attention<List>(bind, p, some, config.keys, kNoUserRule);
    });
  });

  PlainCall plain{.batch = 1, .heads = heads, .kv_heads = heads, .seqlen_q = rows, .seqlen_k = keys, .head_dim = D};
  plain.scale = 1 / std::sqrt(static_cast<double>(D));
  plain.causal = true;
  plain.causal_offset = diagonal;
  plain.window_left = left;
  std::vector<float> hidden;
  for (std::int64_t h = 0; h < heads; ++h)
    for (std::int64_t i = 0; i < rows; ++i)
      for (std::int64_t j = 0; j < keys; ++j)
        hidden.push_back(static_cast<const u8*>(mask.data())[(h * mask.shape(2) + i / kQueryBlock) * mask.shape(3) + j / kKeyBlock] != 0
                             ? 0.0f
                             : -static_cast<float>(kInf));
  plain.mask = hidden, plain.mask_strides = {0, rows * keys, keys, 1};
  plain.q = values[0], plain.k = values[1], plain.v = values[2];
  std::vector<double> got;
  for (std::int64_t i = 0; i < o.numel(); ++i) got.push_back(static_cast<float>(o.data<bf16>()[i]));
  EXPECT_TRUE(accurate({got, reference(plain).o, naive(plain, DType::bf16).o, arithmetic_of(DType::bf16, Device::cpu())}));
}

/// The same of decode, with splits that take parts of the lists, and blocks that rules cut at both ends.
template <int D, int kKeyBlock>
void expect_right_in_splits(int splits) {
  SCOPED_TRACE(splits);
  static constexpr AttentionConfig config = listed_config({D, D}, TileUse::split, 128, kKeyBlock, kRagged | kSplit | kPaged);
  using List = Rules<Optional<Softcap, Use::never>, Optional<Alibi, Use::never>, Optional<MaskTensor, Use::never>, Band<true, true, true>>;
  using Lists = ListKeyBlocks<config.rows, config.keys>;
  std::mt19937_64 random = random_engine();
  const std::int64_t heads = 4, kv_heads = 2, queries = 3, keys = 11 * kKeyBlock + 7;
  const auto normal = [&](Shape shape) {
    const Tensor tensor = Tensor::empty(std::move(shape), DType::bf16);
    std::normal_distribution<float> distribution;
    for (std::int64_t i = 0; i < tensor.numel(); ++i) tensor.data<bf16>()[i] = bf16(distribution(random));
    return tensor;
  };
  const Tensor by_head = normal({1, heads, queries, D}), q = by_head.transpose(1, 2);
  const Tensor k = normal({1, keys, kv_heads, D}), v = normal({1, keys, kv_heads, D});
  const Tensor o = Tensor::poisoned({1, queries, heads, D}, DType::bf16);
  const Selection selection = select_blocks(1, kv_heads, 1, blocks_in(keys, kKeyBlock), 0.7, random);
  const Tensor mask = mask_tensor(selection, Device::cpu());
  const AttentionBlocks blocks{.mask = &mask, .key_block = kKeyBlock};
  const int left = 8 * kKeyBlock + 3;
  AttentionCall call = check_decode(q, k, v, o, {}, {.causal = true, .window_left = left, .blocks = &blocks});
  share_keys(call, q);
  call.splits = splits;
  const Tensor parts = Tensor::poisoned({splits, 1, heads, queries, D}, DType::f32),
               part_lse = Tensor::poisoned({splits, 1, heads, queries}, DType::f32);
  call.partial = parts.reshape({splits, kv_heads, heads / kv_heads * queries, D});
  call.lse = part_lse.data<float>();
  const auto write = [](const AttentionCall& some, const HostMask& selected, const Tensor& to) {
    launch_cpu<Lists>({ceil_div(static_cast<int>(to.shape(0)), Lists::rows)}, [&](auto&, auto& p) { fill_lists(p, some, selected, to); });
  };
  with_lists(call, config.rows, config.keys, write, [](const AttentionCall& some) {
    launch_cpu<tw::Attention<bf16, config, List>>(detail::attention_grid(some, config.rows), [&](auto& bind, auto& p) {
      detail::fill_attention<List>(bind, p, some, config.keys, kNoUserRule);
    });
  });
  combine({.parts = parts, .part_lse = part_lse, .o = o}, call.stream);

  PlainCall plain{.batch = 1, .heads = heads, .kv_heads = kv_heads, .seqlen_q = queries, .seqlen_k = keys, .head_dim = D};
  plain.scale = 1 / std::sqrt(static_cast<double>(D));
  plain.causal = true;
  plain.window_left = left;
  std::vector<float> hidden;
  hide_blocks(plain, {.query_block = 1 << 30, .key_block = kKeyBlock, .heads_per_list = static_cast<int>(heads / kv_heads)}, selection,
              hidden);
  const auto numbers = [](const Tensor& t) {
    std::vector<float> x;
    for (std::int64_t i = 0; i < t.numel(); ++i) x.push_back(static_cast<float>(t.data<bf16>()[i]));
    return x;
  };
  const Tensor dense_q = Tensor::empty(q.shape(), DType::bf16);
  for (std::int64_t h = 0; h < heads; ++h)
    for (std::int64_t i = 0; i < queries; ++i)
      std::copy_n(by_head.data<bf16>() + (h * queries + i) * D, D, dense_q.data<bf16>() + (i * heads + h) * D);
  const std::vector<float> q_values = numbers(dense_q), k_values = numbers(k), v_values = numbers(v), result = numbers(o);
  plain.q = q_values, plain.k = k_values, plain.v = v_values;
  const std::vector<double> got(result.begin(), result.end());
  EXPECT_TRUE(accurate({got, reference(plain).o, naive(plain, DType::bf16).o, arithmetic_of(DType::bf16, Device::cpu())}));
}

TEST(ShippedAttentionOfBlocks, Splits) {
  for (const int splits : {1, 2, 3, 8, 20}) {
    expect_right_in_splits<128, 64>(splits);
    expect_right_in_splits<64, 128>(splits);
  }
}

TEST(ShippedAttentionOfBlocks, TilesOf128) { expect_right_on_the_cpu<128, 128, 128>(); }
TEST(ShippedAttentionOfBlocks, FewerKeys) { expect_right_on_the_cpu<128, 128, 64>(); }
TEST(ShippedAttentionOfBlocks, OneWarpgroup) { expect_right_on_the_cpu<128, 64, 64>(); }
// A block of the mask is two of the kernel's.
TEST(ShippedAttentionOfBlocks, PartsOfBlocks) { expect_right_on_the_cpu<192, 64, 128>(); }

TEST(ShippedAttentionOfBlocks, CompileWithoutSpills) {
  skip_without_nvrtc();
  std::vector<KernelSpec> specs;
  const auto add = [&](int head_dim, int query_block, int key_block, const RuleSet& rules) {
    const HeadDims dims{head_dim, head_dim};
    const Kernel kernel{
        .dtype = DType::bf16, .rules = rules, .config = listed_config(dims, TileUse::narrow, query_block, key_block, kEqualLengths)};
    specs.push_back(make_spec({type_of(kernel), "tilewave/tile/attention.tile.hpp", nullptr}, true, true,
                              tw::format("attention of blocks, D {}, {} x {}", head_dim, query_block, key_block)));
  };
  for (const int query_block : {64, 128}) {
    for (const int key_block : {64, 128}) {
      add(64, query_block, key_block, {});
      add(128, query_block, key_block, {.upper = true});
    }
    add(256, query_block, 64, {.lower = true, .upper = true});
  }
  const auto add_decode = [&](int head_dim, int key_block, TileUse use, int form) {
    const Kernel kernel{.dtype = DType::bf16, .rules = {}, .config = listed_config({head_dim, head_dim}, use, 128, key_block, form)};
    specs.push_back(make_spec({type_of(kernel), "tilewave/tile/attention.tile.hpp", nullptr}, true, true,
                              tw::format("decode of blocks of {}, D {}, form {}", key_block, head_dim, form)));
  };
  for (const int key_block : {64, 128}) {
    for (const int head_dim : {64, 128, 192, 256}) add_decode(head_dim, key_block, TileUse::split, kRagged | kSplit | kPaged);
    add_decode(128, key_block, TileUse::narrow, kRagged);
    add_decode(128, key_block, TileUse::narrow, kRagged | kPaged);
  }
  specs.push_back(make_spec(kernel_info<ListKeyBlocks<128, 128>>, true, true, "list_key_blocks"));
  specs.push_back(make_spec(kernel_info<MarkBlocks>, true, true, "mark_blocks"));
  compile_and_check(specs, "sm_90a", expect_fast);
  std::vector<KernelSpec> generic;
  for (const std::int64_t shared : {std::int64_t{99} << 10, std::int64_t{163} << 10}) {
    for (const int form : {0, kRagged | kSplit | kPaged}) {
      const Kernel kernel{
          .dtype = DType::bf16, .rules = {.upper = true}, .config = generic_config({128, 128}, form | kListed, {}, shared, 64)};
      generic.push_back(for_target(make_spec({type_of(kernel), "tilewave/tile/attention.tile.hpp", nullptr}, true, true,
                                             tw::format("attention of blocks, {} bytes, form {}", shared, form)),
                                   GpuTarget::cuda));
    }
  }
  compile_and_check(generic, "sm_90a", expect_fast);
}

}  // namespace
}  // namespace tw::kernels::attention
