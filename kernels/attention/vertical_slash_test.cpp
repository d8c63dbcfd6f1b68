// Vertical-slash sparse attention against loops in double with the mask that its lists mean, and the lists against a serial merge.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kernels/attention/attention_case.hpp"
#include "kernels/attention/heuristics.hpp"
#include "kernels/attention/key_blocks.hpp"
#include "kernels/attention/vertical_slash.hpp"
#include "tests/compiled_kernels.hpp"
#include "tilewave/vertical_slash.hpp"

namespace tw::kernels::attention {
namespace {

using namespace tw::test;

using Numbers = std::vector<std::int32_t>;

/// What a block of queries attends to.
struct Lists {
  Numbers blocks, columns;
};

/// Ascending, once each, without those that are outside the sequence.
Numbers in_order(Numbers x, int seqlen) {
  std::erase_if(x, [&](int n) { return n < 0 || n >= seqlen; });
  std::sort(x.begin(), x.end());
  x.erase(std::unique(x.begin(), x.end()), x.end());
  return x;
}

/// The lists of `size` queries from `begin` on, by MInference's merge of both lists: ranges grow by whole blocks.
Lists merge(const Numbers& vertical, const Numbers& slash, int begin, int size, int seqlen) {
  const Numbers columns = in_order(vertical, seqlen);
  Numbers distances = in_order(slash, seqlen);
  std::reverse(distances.begin(), distances.end());
  const int end = begin + size;
  Lists lists;
  std::vector<std::pair<int, int>> ranges;
  for (const int d : distances) {
    if (d >= end) continue;
    const int last = std::max(end - d, size);
    if (ranges.empty() || last > ranges.back().second + size)
      ranges.emplace_back(last - size, last);
    else if (last > ranges.back().second)
      ranges.back().second += size;
  }
  for (const auto& [first, last] : ranges)
    for (int key = first; key < last; key += size) lists.blocks.push_back(key);
  for (const int column : columns) {
    const bool held = std::any_of(ranges.begin(), ranges.end(), [&](const auto& r) { return r.first <= column && column < r.second; });
    if (column < end && !held) lists.columns.push_back(column);
  }
  return lists;
}

/// Columns and slashes of batch * heads heads.
struct Selected {
  std::int64_t batch, heads;
  std::vector<Numbers> vertical, slash;
  std::size_t at(std::int64_t b, std::int64_t h) const { return static_cast<std::size_t>(b * heads + h); }
};

struct Shapes {
  int seqlen, batch = 1, heads = 1, kv_heads = 1, head_dim = 64, value_dim = 0, query_block = 64;
  int columns = 9, slashes = 9;
  bool seqlens = false;
  Place q = Place::dense, kv = Place::dense, o = Place::dense;

  std::string describe() const {
    return tw::format("S {} batch {} heads {}/{} D {}/{} query_block {} columns {} slashes {} seqlens {} q {} kv {} o {}", seqlen, batch,
                      heads, kv_heads, head_dim, value_dim, query_block, columns, slashes, seqlens, static_cast<int>(q),
                      static_cast<int>(kv), static_cast<int>(o));
  }
};

class VerticalSlash : public AttentionTest {
 protected:
  void SetUp() override {
    skip_unless_present(device);
    cpu::set_poison_released_slots(true);
  }

  /// Numbers in any order, some of them twice, near each other or outside the sequence.
  Numbers numbers(int count, int seqlen) {
    Numbers x;
    while (std::ssize(x) < count) {
      const int kind = pick(8);
      using Limits = std::numeric_limits<std::int32_t>;
      if (kind == 0 && !x.empty())
        x.push_back(x[static_cast<std::size_t>(pick(static_cast<int>(x.size())))]);
      else if (kind == 1)
        x.push_back(pick(2) == 0 ? (pick(2) == 0 ? Limits::min() : Limits::max()) : (pick(2) == 0 ? -1 - pick(5) : seqlen + pick(5)));
      else if (kind < 5 && !x.empty() && x.back() < Limits::max() - 100)
        x.push_back(x.back() + 1 + pick(70));
      else
        x.push_back(pick(std::max(1, seqlen)));
    }
    return x;
  }
  Selected select(const Shapes& c) {
    Selected x{c.batch, c.heads, {}, {}};
    const int most = pick(3) == 0 ? std::max(1, c.seqlen / 4) : c.seqlen;  // all distances near 0, or all columns early
    for (int i = 0; i < c.batch * c.heads; ++i) {
      x.vertical.push_back(numbers(c.columns, c.seqlen));
      x.slash.push_back(numbers(c.slashes, most));
    }
    return x;
  }
  Tensor lists_tensor(const std::vector<Numbers>& lists, std::int64_t batch, std::int64_t heads) const {
    Numbers all;
    for (const Numbers& list : lists) all.insert(all.end(), list.begin(), list.end());
    return to_device(all, {batch, heads, std::ssize(all) / std::max<std::int64_t>(1, batch * heads)});
  }
  std::vector<std::int64_t> lengths(const Shapes& c) {
    std::vector<std::int64_t> lengths;
    for (int b = 0; b < c.batch; ++b) lengths.push_back(!c.seqlens ? c.seqlen : pick(4) == 0 ? 0 : pick(c.seqlen + 1));
    return lengths;
  }

  void check(const Shapes& c) { check(c, select(c)); }
  void check(const Shapes& c, const Selected& x) {
    SCOPED_TRACE(c.describe());
    const int values = c.value_dim > 0 ? c.value_dim : c.head_dim;
    PlacedTensor q({c.batch, c.seqlen, c.heads, c.head_dim}, dtype, device, placement(c.q));
    PlacedTensor k({c.batch, c.seqlen, c.kv_heads, c.head_dim}, dtype, device, placement(c.kv));
    PlacedTensor v({c.batch, c.seqlen, c.kv_heads, values}, dtype, device, placement(c.kv));
    PlacedTensor o({c.batch, c.seqlen, c.heads, values}, dtype, device, placement(c.o));
    PlacedTensor lse({c.batch, c.heads, c.seqlen}, DType::f32, device, {.offset = 3});
    const std::vector<float> q_values = q.fill_random(random);
    const std::vector<float> k_values = k.fill_random(random), v_values = v.fill_random(random);
    const std::vector<std::int64_t> seqlens = lengths(c);
    // The mask that the lists mean, and the keys that may be read.
    std::vector<float> mask(static_cast<std::size_t>(c.batch * c.heads * c.seqlen * c.seqlen), -static_cast<float>(kInf));
    std::vector<bool> read(static_cast<std::size_t>(c.batch * c.kv_heads * c.seqlen));
    for (int b = 0; b < c.batch; ++b) {
      const auto seqlen = static_cast<int>(seqlens[static_cast<std::size_t>(b)]);
      for (int h = 0; h < c.heads; ++h) {
        for (int begin = 0; begin < seqlen; begin += c.query_block) {
          const Lists lists = merge(x.vertical[x.at(b, h)], x.slash[x.at(b, h)], begin, c.query_block, c.seqlen);
          const auto see = [&](int key) {
            if (key >= seqlen) return;
            read[static_cast<std::size_t>((b * c.kv_heads + h / (c.heads / c.kv_heads)) * c.seqlen + key)] = true;
            for (int i = std::max(begin, key); i < std::min(begin + c.query_block, seqlen); ++i)
              mask[static_cast<std::size_t>(((b * c.heads + h) * c.seqlen + i) * c.seqlen + key)] = 0;
          };
          for (const int first : lists.blocks)
            for (int key = first; key < first + c.query_block; ++key) see(key);
          for (const int column : lists.columns) see(column);
        }
        for (const int column : in_order(x.vertical[x.at(b, h)], seqlen))  // one that a tile does not see may come with one that it sees
          read[static_cast<std::size_t>((b * c.kv_heads + h / (c.heads / c.kv_heads)) * c.seqlen + column)] = true;
      }
    }
    std::vector<float> k_poisoned = k_values, v_poisoned = v_values;
    for (int b = 0; b < c.batch; ++b) {
      for (int j = 0; j < c.seqlen; ++j) {
        for (int h = 0; h < c.kv_heads; ++h) {
          if (read[static_cast<std::size_t>((b * c.kv_heads + h) * c.seqlen + j)]) continue;
          const std::int64_t row = (b * c.seqlen + j) * c.kv_heads + h;
          std::fill_n(k_poisoned.begin() + row * c.head_dim, c.head_dim, kNaN);
          std::fill_n(v_poisoned.begin() + row * values, values, kNaN);
        }
      }
    }
    k.fill(k_poisoned);
    v.fill(v_poisoned);
    const Tensor vertical = lists_tensor(x.vertical, c.batch, c.heads), slash = lists_tensor(x.slash, c.batch, c.heads);
    const Tensor seqlens_tensor = to_device(Numbers(seqlens.begin(), seqlens.end()), {c.batch});
    const VerticalSlashOptions options{
        .query_block = c.query_block, .seqlens = c.seqlens ? &seqlens_tensor : nullptr, .lse = &lse.tensor()};
    if (!launched([&] { attend(q, k, v, vertical, slash, o, options); })) return;
    PlainCall plain{.batch = c.batch,
                    .heads = c.heads,
                    .kv_heads = c.kv_heads,
                    .seqlen_q = c.seqlen,
                    .seqlen_k = c.seqlen,
                    .head_dim = c.head_dim,
                    .value_dim = values,
                    .q = q_values,
                    .k = k_values,
                    .v = v_values,
                    .scale = 1 / std::sqrt(static_cast<double>(c.head_dim)),
                    .mask = mask,
                    .mask_strides = {std::int64_t{c.heads} * c.seqlen * c.seqlen, std::int64_t{c.seqlen} * c.seqlen, c.seqlen, 1},
                    .lengths_q = seqlens,
                    .lengths_k = seqlens};
    expect_results(plain, dtype, device, o, &lse);
    // The same bits again, over what is there.
    PlacedTensor again({c.batch, c.seqlen, c.heads, values}, dtype, device);
    VerticalSlashOptions without_lse = options;
    without_lse.lse = nullptr;
    if (launched([&] { attend(q, k, v, vertical, slash, again, without_lse); })) {
      EXPECT_EQ(again.values(), o.values());
    }
  }
  bool unsupported() const { return dtype == DType::f32 && device.is_cuda(); }

  using Attend = std::function<void(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& vertical, const Tensor& slash,
                                    const Tensor& o, const VerticalSlashOptions& options)>;
  Attend attend = vertical_slash_attention;
};

INSTANTIATE_TEST_SUITE_P(Ops, VerticalSlash, testing::ValuesIn(kDevicesAndDTypes), device_and_dtype);

TEST_P(VerticalSlash, AnyLength) {
  if (unsupported()) GTEST_SKIP() << "f32 is for the CPU";
  for (const int seqlen : {1, 2, 63, 64, 65, 127, 128, 129, 191, 257, 400}) {
    for (const int query_block : {64, 128})
      check({.seqlen = seqlen, .heads = 2, .head_dim = 128, .query_block = query_block, .seqlens = pick(2) == 0});
  }
}

TEST_P(VerticalSlash, AnyHeadDim) {
  if (unsupported()) GTEST_SKIP() << "f32 is for the CPU";
  for (const auto& [head_dim, value_dim] : {std::pair{8, 8}, {64, 64}, {96, 96}, {128, 80}, {192, 128}, {192, 192}, {256, 256}}) {
    for (const int query_block : {64, 128}) {
      check({.seqlen = 300,
             .heads = 2,
             .head_dim = head_dim,
             .value_dim = value_dim,
             .query_block = query_block,
             .columns = 40,
             .seqlens = pick(2) == 0});
    }
  }
}

TEST_P(VerticalSlash, Sampled) {
  if (unsupported()) GTEST_SKIP() << "f32 is for the CPU";
  constexpr Place kPlaces[] = {Place::dense, Place::by_head, Place::aligned, Place::unaligned};
  for (int i = 0; i < random_cases(60) && !HasFailure(); ++i) {
    const int kv_heads = 1 + pick(2), group = 1 + pick(3);
    check({.seqlen = 1 + pick(450),
           .batch = 1 + pick(2),
           .heads = kv_heads * group,
           .kv_heads = kv_heads,
           .head_dim = pick(2) == 0 ? 64 : 128,
           .query_block = 64 + 64 * pick(2),
           .columns = pick(4) == 0 ? pick(300) : pick(20),
           .slashes = pick(4) == 0 ? pick(300) : pick(20),
           .seqlens = pick(2) == 0,
           .q = kPlaces[pick(4)],
           .kv = kPlaces[pick(4)],
           .o = kPlaces[pick(4)]});
  }
}

TEST_P(VerticalSlash, OfNothing) {
  if (unsupported()) GTEST_SKIP() << "f32 is for the CPU";
  check({.seqlen = 200, .columns = 0, .slashes = 0});
  check({.seqlen = 200, .columns = 3, .slashes = 0}, {1, 1, {{-1, 200, 1 << 30}}, {{}}});
  // The first 150 queries see nothing.
  check({.seqlen = 200, .columns = 1, .slashes = 1}, {1, 1, {{150}}, {{500}}});
  check({.seqlen = 200, .columns = 0, .slashes = 1}, {1, 1, {{}}, {{192}}});
}

TEST_P(VerticalSlash, ColumnsAfterTheLastSlash) {
  if (unsupported()) GTEST_SKIP() << "f32 is for the CPU";
  // Without distance 0 the columns near a query are in no range.
  for (const int query_block : {64, 128})
    check({.seqlen = 330, .query_block = query_block, .columns = 5, .slashes = 2}, {1, 1, {{320, 255, 256, 100, 329}}, {{200, 130}}});
}

TEST_P(VerticalSlash, AllKeysAreDense) {
  if (unsupported()) GTEST_SKIP() << "f32 is for the CPU";
  Numbers all(300);
  for (int i = 0; i < 300; ++i) all[static_cast<std::size_t>(i)] = i;
  PlacedTensor q({1, 300, 2, 64}, dtype, device), k({1, 300, 1, 64}, dtype, device), v({1, 300, 1, 64}, dtype, device),
      o({1, 300, 2, 64}, dtype, device), dense({1, 300, 2, 64}, dtype, device);
  for (PlacedTensor* x : {&q, &k, &v}) x->fill_random(random);
  const Tensor every = lists_tensor({all, all}, 1, 2), none = to_device(Numbers{}, {1, 2, 0});
  tw::attention(q, k, v, dense, {.causal = true});
  const std::vector<double> expected = dense.values();
  for (const auto& [vertical, slash] : {std::pair{every, every}, {every, none}, {none, every}}) {
    vertical_slash_attention(q, k, v, vertical, slash, o);
    EXPECT_TRUE(accurate({o.values(), expected, expected, arithmetic_of(dtype, device)}));
  }
}

TEST_P(VerticalSlash, OrderAndRepetitionDoNotMatter) {
  if (unsupported()) GTEST_SKIP() << "f32 is for the CPU";
  PlacedTensor q({1, 300, 1, 64}, dtype, device), k({1, 300, 1, 64}, dtype, device), v({1, 300, 1, 64}, dtype, device);
  for (PlacedTensor* x : {&q, &k, &v}) x->fill_random(random);
  const auto of = [&](const Numbers& vertical, const Numbers& slash) {
    PlacedTensor o({1, 300, 1, 64}, dtype, device);
    vertical_slash_attention(q, k, v, lists_tensor({vertical}, 1, 1), lists_tensor({slash}, 1, 1), o);
    return o.values();
  };
  const std::vector<double> sorted = of({3, 40, 250}, {0, 70, 200});
  EXPECT_EQ(of({250, 3, 300, 40, -1}, {200, 0, 300, 70, 70, -70, 0}), sorted);
  // A column that is there twice has a place in the sums that it leaves empty: they are added in another order.
  EXPECT_TRUE(accurate({of({250, 3, 40, 3, 250, 3}, {0, 70, 200}), sorted, sorted, arithmetic_of(dtype, device)}));
  EXPECT_NE(of({3, 41, 250}, {0, 70, 200}), sorted);
  EXPECT_NE(of({3, 40, 250}, {0, 71, 200}), sorted);
}

TEST_P(VerticalSlash, ListsOfSomeHeadsAtATime) {
  if (unsupported()) GTEST_SKIP() << "f32 is for the CPU";
  const Shapes c{.seqlen = 300, .batch = 3, .heads = 4, .kv_heads = 2, .columns = 20, .slashes = 20};
  const Selected x = select(c);
  PlacedTensor q({3, 300, 4, 64}, dtype, device), k({3, 300, 2, 64}, dtype, device), v({3, 300, 2, 64}, dtype, device);
  for (PlacedTensor* t : {&q, &k, &v}) t->fill_random(random);
  const Tensor vertical = lists_tensor(x.vertical, 3, 4), slash = lists_tensor(x.slash, 3, 4);
  PlacedTensor whole({3, 300, 4, 64}, dtype, device);
  vertical_slash_attention(q, k, v, vertical, slash, whole);
  const std::vector<double> expected = whole.values();
  int most_launches = 0;
  for (const std::int64_t bytes : {1, 20000, 60000}) {
    PlacedTensor o({3, 300, 4, 64}, dtype, device);
    VerticalSlashCall call{detail::check_attention(q, k, v, o, {.causal = true, .causal_offset = 0}),
                           {.vertical = &vertical,
                            .slash = &slash,
                            .seqlens = nullptr,
                            .batch = 3,
                            .heads = 4,
                            .seqlen = 300,
                            .query_block = 64,
                            .stream = Stream::standard(device)}};
    call.attention.blocks.most_list_bytes = bytes;
    int launches = 0;
    if (device.is_cuda()) {
      const AttentionConfig config = vertical_slash_config(call);
      with_slash_lists(call, config.rows, config.keys, [&](const AttentionCall& some) {
        ++launches;
        run_on_gpu(some, config);
      });
      most_launches = std::max(most_launches, launches);
    } else {
      run_vertical_slash_on_cpu(call);
      with_slash_lists(call, 64, 64, [&](const AttentionCall&) { ++launches; });
      most_launches = std::max(most_launches, launches);
    }
    EXPECT_EQ(o.values(), expected) << bytes;
  }
  EXPECT_EQ(most_launches, 12);
}

/// The tiles and schedules of Hopper GPUs, on the CPU.
class ShippedVerticalSlash : public VerticalSlash {
 protected:
  template <int D, int kBlock, int kForm>
  void check_shipped(Shapes c) {
    static constexpr AttentionConfig config = columns_config({D, D}, kBlock, kForm);
    using List = Rules<Optional<Softcap, Use::never>, Optional<Alibi, Use::never>, Optional<MaskTensor, Use::never>, Band<false, true>>;
    attend = [](const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& vertical, const Tensor& slash, const Tensor& o,
                const VerticalSlashOptions& options) {
      const VerticalSlashCall call = check_vertical_slash(q, k, v, vertical, slash, o, options);
      clear_unused(call);
      with_slash_lists(call, config.rows, config.keys, [](const AttentionCall& some) {
        launch_cpu<Attention<bf16, config, List>>(detail::attention_grid(some, config.rows), [&](auto& bind, auto& p) {
          detail::fill_attention<List>(bind, p, some, config.keys, kNoUserRule);
        });
      });
    };
    c.head_dim = D, c.query_block = kBlock, c.seqlens = kForm == kRagged;
    for (int n = 0; n < 8 && !HasFailure(); ++n) {
      c.seqlen = 1 + pick(500);
      c.columns = pick(3) == 0 ? pick(3) : pick(300);
      c.slashes = pick(3) == 0 ? pick(3) : pick(100);
      check(c);
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Ops, ShippedVerticalSlash, testing::Values(std::tuple{Device::cpu(), DType::bf16}), device_and_dtype);

TEST_P(ShippedVerticalSlash, TilesOf128) { check_shipped<128, 128, kEqualLengths>({.seqlen = 0, .heads = 2}); }
TEST_P(ShippedVerticalSlash, OneWarpgroup) { check_shipped<128, 64, kRagged>({.seqlen = 0, .heads = 2}); }
TEST_P(ShippedVerticalSlash, PartsOfBlocks) { check_shipped<192, 128, kRagged>({.seqlen = 0, .heads = 2}); }
TEST_P(ShippedVerticalSlash, OutputAfterTheSoftmax) { check_shipped<64, 64, kEqualLengths>({.seqlen = 0, .heads = 2}); }

TEST_P(ShippedVerticalSlash, CompileWithoutSpills) {
  skip_without_nvrtc();
  std::vector<KernelSpec> specs;
  for (const int block : {64, 128}) {
    for (const auto& [dim, form] :
         {std::pair<int, int>{64, kEqualLengths}, {96, kRagged}, {128, kEqualLengths}, {128, kRagged}, {256, kRagged}}) {
      const Kernel kernel{.dtype = DType::bf16, .rules = {.upper = true}, .config = columns_config({dim, dim}, block, form)};
      specs.push_back(make_spec({type_of(kernel), "tilewave/tile/attention.tile.hpp", nullptr}, true, true,
                                tw::format("vertical-slash attention, D {}, blocks of {}, form {}", dim, block, form)));
    }
  }
  for (const auto& [info, name] : {std::pair{kernel_info<PackSlashes>, "pack_slashes"},
                                   {kernel_info<SortColumns>, "sort_columns"},
                                   {kernel_info<CopyColumns<bf16>>, "copy_columns"},
                                   {kernel_info<ListSlashBlocks>, "list_slash_blocks"},
                                   {kernel_info<PlaceColumns>, "place_columns"},
                                   {kernel_info<ListColumns>, "list_columns"},
                                   {kernel_info<ClearUnused<bf16>>, "clear_unused"}})
    specs.push_back(make_spec(info, true, true, name));
  compile_and_check(specs, "sm_90a", expect_fast);
}

class VerticalSlashIndex : public VerticalSlash {
 protected:
  Numbers read(const Tensor& t) const {
    const Tensor host = t.to(Device::cpu());
    return {host.data<std::int32_t>(), host.data<std::int32_t>() + host.numel()};
  }
};

INSTANTIATE_TEST_SUITE_P(Ops, VerticalSlashIndex, testing::Combine(testing::ValuesIn(kDevices), testing::Values(DType::i32)),
                         device_and_dtype);

TEST_P(VerticalSlashIndex, IsTheSerialMerge) {
  for (int n = 0; n < random_cases(200) && !HasFailure(); ++n) {
    const Shapes c{.seqlen = 1 + pick(700),
                   .batch = 1 + pick(2),
                   .heads = 1 + pick(3),
                   .query_block = 64 + 64 * pick(2),
                   .columns = pick(3) == 0 ? pick(600) : pick(30),
                   .slashes = pick(3) == 0 ? pick(600) : pick(30),
                   .seqlens = pick(2) == 0};
    SCOPED_TRACE(c.describe());
    const Selected x = select(c);
    const std::vector<std::int64_t> seqlens = lengths(c);
    const Tensor seqlens_tensor = to_device(Numbers(seqlens.begin(), seqlens.end()), {c.batch});
    const std::int64_t blocks = (c.seqlen + c.query_block - 1) / c.query_block;
    const Stream stream = Stream::standard(device);
    const Tensor block_count = Tensor::poisoned({c.batch, c.heads, blocks}, DType::i32, stream),
                 block_offset = Tensor::poisoned({c.batch, c.heads, blocks, c.slashes}, DType::i32, stream),
                 column_count = Tensor::poisoned({c.batch, c.heads, blocks}, DType::i32, stream),
                 column_index = Tensor::poisoned({c.batch, c.heads, blocks, c.columns}, DType::i32, stream);
    vertical_slash_index(lists_tensor(x.vertical, c.batch, c.heads), lists_tensor(x.slash, c.batch, c.heads), c.seqlen,
                         {block_count, block_offset, column_count, column_index},
                         {.query_block = c.query_block, .seqlens = c.seqlens ? &seqlens_tensor : nullptr});
    Numbers block_counts, block_offsets, column_counts, column_indices;
    const auto append = [](Numbers& counts, Numbers& entries, const Numbers& list, int size) {
      counts.push_back(static_cast<std::int32_t>(list.size()));
      entries.insert(entries.end(), list.begin(), list.end());
      entries.insert(entries.end(), static_cast<std::size_t>(size) - list.size(), 0);
    };
    for (int b = 0; b < c.batch; ++b) {
      for (int h = 0; h < c.heads; ++h) {
        for (int i = 0; i < blocks; ++i) {
          Lists lists;
          if (i * c.query_block < seqlens[static_cast<std::size_t>(b)])
            lists = merge(x.vertical[x.at(b, h)], x.slash[x.at(b, h)], i * c.query_block, c.query_block, c.seqlen);
          append(block_counts, block_offsets, lists.blocks, c.slashes);
          append(column_counts, column_indices, lists.columns, c.columns);
        }
      }
    }
    EXPECT_EQ(read(block_count), block_counts);
    EXPECT_EQ(read(block_offset), block_offsets);
    EXPECT_EQ(read(column_count), column_counts);
    EXPECT_EQ(read(column_index), column_indices);
  }
}

}  // namespace
}  // namespace tw::kernels::attention
