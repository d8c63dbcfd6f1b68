// attention_decode() against loops in double, on the CPU and, where there is one, on a GPU; what it does to the cache.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/attention/append.tile.hpp"
#include "kernels/attention/blocks_case.hpp"
#include "kernels/attention/call.hpp"
#include "kernels/attention/gather.tile.hpp"
#include "kernels/attention/reference.hpp"
#include "runtime/format.hpp"
#include "tests/accuracy.hpp"
#include "tests/expect_error.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"
#include "tilewave/attention.hpp"
#include "tilewave/f32_products.hpp"
#include "tilewave/launch.hpp"

namespace tw::kernels::attention {
namespace {

using namespace tw::test;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

/// What the sequences of a call share.
struct Case {
  std::int64_t batch = 2, seqlen_q = 1, kv_heads = 2, group = 2, head_dim = 64;
  std::int64_t value_dim = 0;              ///< 0: head_dim
  std::int64_t capacity = 96;              ///< of a sequence; with pages at least
  std::int64_t page_size = 0;              ///< 0: not paged
  std::vector<std::int64_t> seqlens = {};  ///< default: drawn at random
  bool full = false;                       ///< without seqlens: the sequences fill the cache
  bool batch_idx = false, leftpad = false;
  std::int64_t seqlen_new = 0, rotary_dim = 0;
  RopePairing pairing = RopePairing::half_split;
  bool table_of_dtype = false;  ///< the rotary table; else f32
  bool causal = false;
  int window_left = -1, window_right = -1;
  int chunk = 0;
  float scale = 0, softcap = 0;
  int alibi = 0;  ///< dimensions of the slopes; 0: none
  bool sink = false, lse = true, qv = false;
  int mask = 0;  ///< 1: of keys, bool; 2: of all scores, added; 0: none
  int num_splits = 0;
  bool strided = false;                                          ///< tensors that are not aligned and have gaps
  int key_block = 0;                                             ///< of the blocks of keys that are attended to; 0: all keys are
  bool indices = false, one_sequence = false, one_head = false;  ///< how the blocks are given: see AttentionBlocks
  double density = 0.5;

  std::string describe() const {
    return tw::format(
        "batch {} Sq {} heads {}x{} D {} Dv {} capacity {} page {} full {} idx {} pad {} new {} rotary {} {} causal {} window {} {} "
        "chunk {} softcap {} alibi {} sink {} qv {} mask {} splits {} strided {} blocks of {} indices {} one sequence {} one head {} "
        "density {}",
        batch, seqlen_q, kv_heads, group, head_dim, value_dim, capacity, page_size, full, batch_idx, leftpad, seqlen_new, rotary_dim,
        static_cast<int>(pairing), causal, window_left, window_right, chunk, softcap, alibi, sink, qv, mask, num_splits, strided, key_block,
        indices, one_sequence, one_head, density);
  }
};

/// Row-major numbers with their extents.
struct Numbers {
  Shape shape;
  std::vector<float> values;

  Numbers(Shape of, float value) : shape(std::move(of)) {
    std::int64_t size = 1;
    for (const std::int64_t extent : shape) size *= extent;
    values.assign(index(size), value);
  }
  /// Element 0 of the row at the first three indices.
  float* row(std::int64_t i, std::int64_t j, std::int64_t k) { return values.data() + ((i * shape[1] + j) * shape[2] + k) * shape[3]; }
};

class AttentionDecode : public testing::TestWithParam<std::tuple<Device, DType>> {
 protected:
  void SetUp() override {
    skip_unless_present(device);
    if (device.is_cuda() && dtype == DType::f32) exact.emplace(F32Products::exact);
  }
  int pick(int below) { return static_cast<int>(random() % static_cast<unsigned>(below)); }
  Numbers random_numbers(Shape shape, DType type) {
    Numbers numbers(std::move(shape), 0);
    std::normal_distribution<float> normal;
    for (float& x : numbers.values) x = round_to(type, normal(random));
    return numbers;
  }
  PlacedTensor placed(const Numbers& numbers, DType type, bool strided = false) const {
    PlacedTensor t(numbers.shape, type, device, strided ? Placement{.offset = 3, .gap = 5} : Placement{});
    t.fill(numbers.values);
    return t;
  }
  PlacedTensor integers(const std::vector<std::int64_t>& values, Shape shape) const {
    PlacedTensor t(std::move(shape), DType::i32, device);
    t.fill(std::vector<float>(values.begin(), values.end()));
    return t;
  }
  /// The heads of a token, turned by a row of the table.
  void turn(float* head, const Case& c, const Numbers& cos, const Numbers& sin, std::int64_t position) const {
    const std::int64_t half = c.rotary_dim / 2;
    const bool interleaved = c.pairing == RopePairing::interleaved;
    for (std::int64_t k = 0; k < half; ++k) {
      float &first = head[interleaved ? 2 * k : k], &second = head[interleaved ? 2 * k + 1 : k + half];
      const float x = cos.values[index(position * half + k)], y = sin.values[index(position * half + k)], a = first, b = second;
      first = round_to(dtype, a * x - b * y);
      second = round_to(dtype, b * x + a * y);
    }
  }
  /// NaN where NaN is expected, else the same; or with `turned` off by the last bit of numbers up to 8.
  testing::AssertionResult cache_is(const PlacedTensor& cache, const Numbers& expected, bool turned) const {
    const std::vector<double> values = cache.values();
    const double unit = dtype == DType::bf16 ? 0x1p-5 : dtype == DType::f16 ? 0x1p-8 : 0x1p-21;
    for (std::size_t n = 0; n < values.size(); ++n) {
      const double x = expected.values[n];
      if (std::isnan(x) ? !std::isnan(values[n]) : !(std::abs(values[n] - x) <= (turned ? unit : 0)))
        return testing::AssertionFailure() << "element " << n << " is " << values[n] << " instead of " << x;
    }
    return cache.gaps_intact();
  }
  /// Tensor cores round towards zero when they add.
  static testing::AssertionResult near_f32(const std::vector<double>& values, const std::vector<double>& expected) {
    for (std::size_t n = 0; n < expected.size(); ++n)
      if (!(std::abs(values[n] - expected[n]) <= 1e-4))
        return testing::AssertionFailure() << "element " << n << " is " << values[n] << " instead of " << expected[n];
    return testing::AssertionSuccess();
  }
  std::vector<double> check(const Case& c);

  std::optional<ScopedF32Products> exact;  ///< in f32 on a GPU
  const Device device = std::get<0>(GetParam());
  const DType dtype = std::get<1>(GetParam());
  std::mt19937_64 random = random_engine();
};

/// One call with random tensors; gives o.
std::vector<double> AttentionDecode::check(const Case& c) {
  SCOPED_TRACE(c.describe());
  const std::int64_t heads = c.kv_heads * c.group, value_dim = c.value_dim > 0 ? c.value_dim : c.head_dim;
  const std::int64_t pages = c.page_size > 0 ? (c.capacity + c.page_size - 1) / c.page_size : 1;  // of a sequence
  const std::int64_t page_size = c.page_size > 0 ? c.page_size : c.capacity, capacity = pages * page_size;
  const std::int64_t entries = c.page_size > 0 ? c.batch * pages + 3 : c.batch + (c.batch_idx ? 2 : 0);

  // Where the sequences lie. Entries are dealt out in no order; some belong to nobody.
  std::vector<std::int64_t> lengths(index(c.batch), capacity), pads(index(c.batch), 0), numbers(index(entries));
  std::iota(numbers.begin(), numbers.end(), 0);
  if (c.batch_idx || c.page_size > 0) std::shuffle(numbers.begin(), numbers.end(), random);
  for (std::size_t b = 0; b < lengths.size(); ++b) {
    if (!c.full) lengths[b] = c.seqlens.empty() ? pick(static_cast<int>(capacity - c.seqlen_new) + 1) : c.seqlens[b];
    if (c.leftpad) pads[b] = pick(static_cast<int>(lengths[b]) + 1);
  }
  const auto place_of = [&](std::int64_t b, std::int64_t token) {
    return std::pair{numbers[index(c.page_size > 0 ? b * pages + token / page_size : b)], token % page_size};
  };
  std::vector<std::int64_t> table(numbers.begin(), numbers.begin() + c.batch * pages);
  for (std::int64_t b = 0; b < c.batch; ++b)  // of pages without tokens the numbers may be anything
    for (std::int64_t page = 0; page < pages; ++page)
      if (page * page_size >= lengths[index(b)] + c.seqlen_new) table[index(b * pages + page)] = pick(2) == 0 ? -1 : 1'000'000;
  // With batch_idx the table's rows, too, are in no order, and some belong to nobody.
  std::vector<std::int64_t> choice(numbers.begin(), numbers.begin() + c.batch);
  if (c.page_size > 0 && c.batch_idx) {
    choice.resize(index(c.batch + 2));
    std::iota(choice.begin(), choice.end(), 0);
    std::shuffle(choice.begin(), choice.end(), random);
    std::vector<std::int64_t> rows(index((c.batch + 2) * pages), -1);
    for (std::int64_t b = 0; b < c.batch; ++b) std::copy_n(table.begin() + b * pages, pages, rows.begin() + choice[index(b)] * pages);
    table = rows;
    choice.resize(index(c.batch));
  }

  // With blocks those of the tokens after the left padding.
  const Blocks blocks{.query_block = 1 << 30,
                      .key_block = std::max(c.key_block, 64),
                      .indices = c.indices,
                      .one_sequence = c.one_sequence,
                      .heads_per_list = static_cast<int>(c.one_head ? heads : c.group),
                      .counted = pick(2) == 0};
  const Selection selection = select_blocks(c.one_sequence ? 1 : c.batch, c.one_head ? 1 : c.kv_heads, 1,
                                            blocks_in(capacity, blocks.key_block), c.key_block > 0 ? c.density : 1, random);
  BlockTensors block_tensors(blocks, selection, random, device);
  block_tensors.blocks.query_block = 128;
  const auto is_read = [&](std::int64_t b, std::int64_t kv_head, std::int64_t token) {
    return selection.at(b, c.one_head ? 0 : kv_head, 0, (token - pads[index(b)]) / blocks.key_block);
  };

  // Tokens that count have numbers, everything else of the cache is NaN.
  Numbers k({entries, page_size, c.kv_heads, c.head_dim}, kNan), v({entries, page_size, c.kv_heads, value_dim}, kNan);
  std::normal_distribution<float> normal;
  for (std::int64_t b = 0; b < c.batch; ++b) {
    for (std::int64_t token = pads[index(b)]; token < lengths[index(b)]; ++token) {
      const auto [entry, at] = place_of(b, token);
      for (std::int64_t head = 0; head < c.kv_heads; ++head) {
        if (!is_read(b, head, token)) continue;
        for (std::int64_t n = 0; n < c.head_dim; ++n) k.row(entry, at, head)[n] = round_to(dtype, normal(random));
        for (std::int64_t n = 0; n < value_dim; ++n) v.row(entry, at, head)[n] = round_to(dtype, normal(random));
      }
    }
  }
  Numbers q = random_numbers({c.batch, c.seqlen_q, heads, c.head_dim}, dtype);
  const Numbers qv = random_numbers({c.batch, c.seqlen_q, heads, value_dim}, dtype);
  Numbers new_k = random_numbers({c.batch, c.seqlen_new, c.kv_heads, c.head_dim}, dtype);
  const Numbers new_v_values = random_numbers({c.batch, c.seqlen_new, c.kv_heads, value_dim}, dtype);
  Numbers new_v = new_v_values;
  const DType table_type = c.table_of_dtype ? dtype : DType::f32;
  Numbers cos({capacity + c.seqlen_q, c.rotary_dim / 2}, 0), sin = cos;
  for (std::size_t n = 0; n < cos.values.size(); ++n) {
    const auto angle = static_cast<float>(pick(1000)) / 100;
    cos.values[n] = round_to(table_type, std::cos(angle));
    sin.values[n] = round_to(table_type, std::sin(angle));
  }
  // As ALiBi's: near keys weigh most. Were it far ones, by negative slopes, their scores of hundreds would be all that f32 rounds.
  Numbers slopes(c.alibi == 2 ? Shape{c.batch, heads} : Shape{heads}, 0);
  for (float& x : slopes.values) x = std::uniform_real_distribution<float>(0.01f, 0.5f)(random);

  const PlacedTensor qv_tensor = placed(qv, dtype, c.strided);
  const PlacedTensor q_tensor = placed(q, dtype, c.strided), k_cache = placed(k, dtype, c.strided), v_cache = placed(v, dtype, c.strided),
                     new_k_tensor = placed(new_k, dtype, c.strided), new_v_tensor = placed(new_v, dtype, c.strided),
                     cos_tensor = placed(cos, table_type, c.strided), sin_tensor = placed(sin, table_type, c.strided),
                     slopes_tensor = placed(slopes, DType::f32), seqlens = integers(lengths, {c.batch}),
                     leftpad = integers(pads, {c.batch}), batch_idx = integers(choice, {c.batch}),
                     block_table = integers(table, {std::ssize(table) / pages, pages});
  PlacedTensor sinks({heads}, DType::f32, device);
  const std::vector<float> sink_values = sinks.fill_random(random);
  PlacedTensor o({c.batch, c.seqlen_q, heads, value_dim}, dtype, device, c.strided ? Placement{.offset = 1, .gap = 3} : Placement{}),
      lse({c.batch, heads, c.seqlen_q}, DType::f32, device, {.offset = 3});
  CacheOptions cache;
  if (!c.full) cache.seqlens = &seqlens.tensor();
  if (c.batch_idx) cache.batch_idx = &batch_idx.tensor();
  if (c.leftpad) cache.leftpad = &leftpad.tensor();
  if (c.page_size > 0) cache.block_table = &block_table.tensor();
  if (c.seqlen_new > 0) {
    cache.new_k = &new_k_tensor.tensor();
    cache.new_v = &new_v_tensor.tensor();
  }
  if (c.rotary_dim > 0) {
    cache.rotary_cos = &cos_tensor.tensor();
    cache.rotary_sin = &sin_tensor.tensor();
    cache.rotary_pairing = c.pairing;
  }
  cache.num_splits = c.num_splits;
  AttentionOptions options;
  options.scale = c.scale;
  options.causal = c.causal;
  options.window_left = c.window_left;
  options.window_right = c.window_right;
  options.attention_chunk = c.chunk;
  options.softcap = c.softcap;
  if (c.alibi > 0) options.alibi_slopes = &slopes_tensor.tensor();
  if (c.sink) options.sink = &sinks.tensor();
  if (c.lse) options.lse = &lse.tensor();
  if (c.qv) options.qv = &qv_tensor.tensor();
  // Of keys [batch, 1, 1, capacity], or of scores [heads, seqlen_q, capacity].
  const Shape mask_shape = c.mask == 1 ? Shape{c.batch, 1, 1, capacity} : Shape{heads, c.seqlen_q, capacity};
  Numbers mask_values(mask_shape, 0);
  const Tensor host_mask = Tensor::empty(mask_shape, c.mask == 1 ? DType::boolean : DType::f32, Stream::standard(Device::cpu()));
  for (std::size_t n = 0; n < mask_values.values.size(); ++n) {
    float& x = mask_values.values[n];
    x = c.mask == 1 ? (pick(4) == 0 ? -static_cast<float>(kInf) : 0.0f) : static_cast<float>(pick(33) - 16) / 8;
    if (c.mask == 1)
      static_cast<u8*>(host_mask.data())[n] = x == 0;
    else
      host_mask.data<float>()[n] = x;
  }
  const Tensor mask_tensor = host_mask.to(device);
  if (c.mask > 0) options.mask = &mask_tensor;
  options.check_contents = true;
  if (c.key_block > 0) {
    options.blocks = &block_tensors.blocks;
    if (dtype == DType::f32 && device.is_cuda()) {
      expect_error<InvalidArgument>([&] { tw::attention_decode(q_tensor, k_cache, v_cache, o, cache, options); },
                                    {"blocks are given", "f32 on the CPU"});
      return {};
    }
  }
  if (!launched([&] { tw::attention_decode(q_tensor, k_cache, v_cache, o, cache, options); })) return {};

  // The cache has the new tokens and is otherwise as it was.
  for (std::int64_t b = 0; b < c.batch; ++b) {
    const std::int64_t first = lengths[index(b)] - pads[index(b)];
    for (std::int64_t i = 0; i < c.seqlen_new; ++i) {
      const auto [entry, at] = place_of(b, lengths[index(b)] + i);
      for (std::int64_t head = 0; head < c.kv_heads; ++head) {
        turn(new_k.row(b, i, head), c, cos, sin, first + i);
        std::copy_n(new_k.row(b, i, head), c.head_dim, k.row(entry, at, head));
        std::copy_n(new_v.row(b, i, head), value_dim, v.row(entry, at, head));
      }
    }
    const bool advance = c.causal || c.window_left >= 0 || c.window_right >= 0 || c.chunk > 0;
    for (std::int64_t i = 0; i < c.seqlen_q; ++i)
      for (std::int64_t head = 0; head < heads; ++head) turn(q.row(b, i, head), c, cos, sin, first + (advance ? i : 0));
  }
  EXPECT_TRUE(cache_is(k_cache, k, c.rotary_dim > 0));
  EXPECT_TRUE(cache_is(v_cache, v, false));

  // The sequences' tokens one behind the other; the keys as they are in the cache now.
  Numbers keys({c.batch, capacity, c.kv_heads, c.head_dim}, kNan), values({c.batch, capacity, c.kv_heads, value_dim}, kNan);
  std::vector<std::int64_t> counts(index(c.batch));
  const std::vector<double> in_cache = k_cache.values();
  std::transform(in_cache.begin(), in_cache.end(), k.values.begin(), [](double x) { return static_cast<float>(x); });
  for (std::int64_t b = 0; b < c.batch; ++b) {
    std::int64_t& count = counts[index(b)];
    for (std::int64_t token = pads[index(b)]; token < lengths[index(b)] + c.seqlen_new; ++token, ++count) {
      const auto [entry, at] = place_of(b, token);
      std::copy_n(k.row(entry, at, 0), c.kv_heads * c.head_dim, keys.row(b, count, 0));
      std::copy_n(v.row(entry, at, 0), c.kv_heads * value_dim, values.row(b, count, 0));
      for (std::int64_t head = 0; head < c.kv_heads; ++head) {  // the reference multiplies all numbers
        if (is_read(b, head, token)) continue;
        std::fill_n(keys.row(b, count, head), c.head_dim, 0.0f);
        std::fill_n(values.row(b, count, head), value_dim, 0.0f);
      }
    }
  }
  PlainCall plain{.batch = c.batch,
                  .heads = heads,
                  .kv_heads = c.kv_heads,
                  .seqlen_q = c.seqlen_q,
                  .seqlen_k = capacity,
                  .head_dim = c.head_dim,
                  .value_dim = value_dim};
  plain.q = q.values, plain.k = keys.values, plain.v = values.values;
  plain.scale = c.scale > 0 ? c.scale : 1 / std::sqrt(static_cast<double>(c.head_dim + (c.qv ? value_dim : 0)));
  if (c.qv) plain.qv = qv.values;
  plain.causal = c.causal, plain.window_left = c.window_left, plain.window_right = c.window_right;
  plain.chunk = c.chunk;
  plain.softcap = c.softcap;
  if (c.alibi > 0) plain.alibi_slopes = slopes.values;
  if (c.sink) plain.sink = sink_values;
  plain.lengths_k = counts;
  if (c.mask > 0) {
    plain.mask = mask_values.values;
    plain.mask_strides = {c.mask == 1 ? capacity : 0, c.mask == 1 ? 0 : c.seqlen_q * capacity, c.mask == 1 ? 0 : capacity, 1};
  }
  std::vector<float> hidden;
  if (c.key_block > 0) hide_blocks(plain, blocks, selection, hidden);
  const PlainResult expected = reference(plain);
  const std::vector<double> out = o.values();
  const auto expect_result = [&](const PlacedTensor& result, const PlacedTensor& result_lse) {
    if (dtype == DType::f32 && device.is_cuda())
      EXPECT_TRUE(near_f32(result.values(), expected.o));
    else
      EXPECT_TRUE(accurate({result.values(), expected.o, naive(plain, dtype).o, arithmetic_of(dtype, device)}));
    EXPECT_TRUE(result.gaps_intact());
    EXPECT_TRUE(c.lse ? result_lse.gaps_intact() : result_lse.untouched());
    const std::vector<double> sums = result_lse.values();
    for (std::size_t n = 0; c.lse && n < sums.size(); ++n)
      EXPECT_TRUE(expected.lse[n] == -kInf ? sums[n] == -kInf : std::abs(sums[n] - expected.lse[n]) <= 1e-3)
          << "lse " << n << " is " << sums[n] << " instead of " << expected.lse[n];
  };
  expect_result(o, lse);
  if (dtype == DType::f32 && !device.is_cuda() && capacity <= 300 && c.key_block == 0) {
    // A GPU's way in f32, on the CPU. The new tokens are written once more.
    PlacedTensor again(o.tensor().shape(), dtype, device), lse_again(lse.tensor().shape(), DType::f32, device);
    if (c.lse) options.lse = &lse_again.tensor();
    run_decode(check_decode(q_tensor, k_cache, v_cache, again, cache, options), q_tensor, again, cache, options, DecodeWith::f32_products);
    expect_result(again, lse_again);
  }
  return out;
}

// On the CPU f16 runs the code of bf16.
INSTANTIATE_TEST_SUITE_P(Ops, AttentionDecode,
                         testing::Values(std::tuple(Device::cpu(), DType::f32), std::tuple(Device::cpu(), DType::bf16),
                                         std::tuple(Device::cuda(), DType::f32), std::tuple(Device::cuda(), DType::f16),
                                         std::tuple(Device::cuda(), DType::bf16)),
                         [](const auto& instance) {
                           return tw::format("{}_{}", std::get<0>(instance.param).is_cuda() ? "cuda" : "cpu",
                                             name_of(std::get<1>(instance.param)));
                         });

TEST_P(AttentionDecode, AFullCache) {
  for (const std::int64_t capacity : {0, 1, 16, 63, 64, 65, 128, 300}) {
    check({.capacity = capacity, .full = true});
    check({.seqlen_q = 3, .head_dim = 128, .capacity = capacity, .full = true, .causal = true});
  }
}

TEST_P(AttentionDecode, Blocks) {
  for (const int key_block : {64, 128}) {
    for (const std::int64_t page_size : {0, 16, 64, 256}) {
      for (const int splits : {0, 1, 3, 7, 40}) {
        check({.batch = 3,
               .seqlen_q = 1 + pick(3),
               .head_dim = 128,
               .capacity = 1000,
               .page_size = page_size,
               .causal = pick(2) == 0,
               .num_splits = splits,
               .key_block = key_block,
               .indices = pick(2) == 0});
      }
    }
  }
}

TEST_P(AttentionDecode, BlocksOfAnyLengths) {
  for (const bool indices : {false, true}) {
    for (const double density : {0.0, 0.3, 1.0}) {
      check({.batch = 6, .capacity = 300, .seqlens = {0, 1, 64, 128, 299, 300}, .key_block = 64, .indices = indices, .density = density});
      check({.batch = 6,
             .capacity = 300,
             .seqlens = {0, 1, 64, 128, 299, 300},
             .sink = true,
             .num_splits = 5,
             .key_block = 128,
             .indices = indices,
             .density = density});
    }
  }
  // More rows than are split.
  check({.seqlen_q = 70, .capacity = 500, .causal = true, .key_block = 64});
  check({.seqlen_q = 5, .group = 16, .capacity = 500, .page_size = 64, .causal = true, .key_block = 64, .indices = true});
}

TEST_P(AttentionDecode, MoreBlocksThanAreListedAtOnce) {
  for (const bool indices : {false, true})
    check({.batch = 2, .group = 1, .capacity = 40000, .seqlens = {40000, 33333}, .key_block = 64, .indices = indices, .density = 0.3});
}

TEST_P(AttentionDecode, SampledBlocks) {
  for (int i = 0; i < (device.is_cuda() ? 40 : random_cases(120)) && !HasFailure(); ++i) {
    const std::int64_t dim = device.is_cuda() ? 64 + 64 * pick(2) : 8 * (1 + pick(24));
    const bool appended = pick(3) == 0;
    check({.batch = 1 + pick(4),
           .seqlen_q = 1 + pick(3),
           .kv_heads = 1 + pick(3),
           .group = 1 + pick(8),
           .head_dim = dim,
           .capacity = 1 + pick(900),
           .page_size = pick(2) == 0 ? 0 : 16 << pick(5),
           .batch_idx = pick(3) == 0,
           .leftpad = pick(3) == 0,
           .seqlen_new = appended ? 1 : 0,
           .causal = pick(2) == 0,
           .window_left = pick(4) == 0 ? pick(500) : -1,
           .softcap = pick(4) == 0 ? 20.0f : 0,
           .sink = pick(3) == 0,
           .lse = pick(3) != 0,
           .num_splits = pick(2) == 0 ? 0 : 1 + pick(12),
           .key_block = 64 + 64 * pick(2),
           .indices = pick(2) == 0,
           .one_sequence = pick(3) == 0,
           .one_head = pick(3) == 0,
           .density = 0.1 + 0.2 * pick(5)});
  }
}

TEST_P(AttentionDecode, AnyLengths) {
  check({.batch = 5, .capacity = 200, .seqlens = {0, 1, 64, 199, 200}});
  check({.batch = 5, .seqlen_q = 4, .capacity = 200, .seqlens = {0, 1, 3, 65, 200}, .causal = true});
  check({.batch = 1, .seqlens = {0}, .sink = true});
  for (const std::int64_t seqlen_q : {1, 2, 3, 4, 5})
    check({.batch = 3, .seqlen_q = seqlen_q, .capacity = 150, .causal = seqlen_q % 2 == 0});
}

TEST_P(AttentionDecode, Pages) {
  for (const std::int64_t page_size : {16, 48, 64, 256}) {
    check({.batch = 3, .capacity = 300, .page_size = page_size});
    check({.batch = 3, .seqlen_q = 2, .head_dim = 128, .capacity = 200, .page_size = page_size, .seqlen_new = 2, .causal = true});
    check({.batch = 2, .capacity = page_size * 2, .page_size = page_size, .seqlens = {page_size, page_size + 1}, .num_splits = 3});
    check({.batch = 2, .capacity = page_size * 2, .page_size = page_size, .seqlens = {page_size - 1, 0}, .seqlen_new = 3, .strided = true});
  }
}

// As a language model processes a prompt, whole or a piece of it.
TEST_P(AttentionDecode, PromptsInPages) {
  for (const std::int64_t head_dim : {64, 128}) {
    check({.batch = 1,
           .seqlen_q = 100,
           .group = 4,
           .head_dim = head_dim,
           .capacity = 256,
           .page_size = 64,
           .seqlens = {0},
           .seqlen_new = 100,
           .rotary_dim = head_dim,
           .causal = true});
    check({.batch = 2,
           .seqlen_q = 70,
           .group = 4,
           .head_dim = head_dim,
           .capacity = 256,
           .page_size = 64,
           .seqlens = {64, 131},
           .seqlen_new = 70,
           .rotary_dim = head_dim,
           .causal = true});
  }
}

TEST_P(AttentionDecode, PagesOfAnySize) {
  for (const std::int64_t page_size : {1, 7, 24, 100}) {
    check({.batch = 3, .capacity = 100, .page_size = page_size, .seqlen_new = 1});
    check({.batch = 2, .seqlen_q = 5, .kv_heads = 9, .group = 15, .head_dim = 72, .capacity = 60, .page_size = page_size, .causal = true});
  }
  check({.batch = 2, .capacity = 40, .page_size = 10, .full = true});
  check({.batch = 2, .value_dim = 128, .capacity = 40, .page_size = 10, .seqlen_new = 3, .num_splits = 2, .strided = true});
}

TEST_P(AttentionDecode, PagesOfSequencesInAnyOrderAndWithLeftPadding) {
  for (const std::int64_t page_size : {16, 12}) {
    check({.batch = 3, .page_size = page_size, .batch_idx = true, .seqlen_new = 2});
    check({.batch = 3, .seqlen_q = 2, .page_size = page_size, .leftpad = true, .seqlen_new = 2, .rotary_dim = 32, .causal = true});
    check({.batch = 3, .page_size = page_size, .batch_idx = true, .leftpad = true, .window_left = 20, .alibi = 1});
  }
}

TEST_P(AttentionDecode, PackedQueriesOfBlocks) {
  if (dtype == DType::f32 && device.is_cuda()) GTEST_SKIP() << "blocks in f32 are for the CPU";
  // Each sequence by itself gives the same.
  constexpr std::int64_t batch = 4, heads = 4, kv_heads = 2, d = 64, capacity = 300;
  const std::vector<std::int64_t> cu_q{0, 3, 3, 140, 141}, lengths{300, 70, 211, 0};
  for (const bool one_sequence : {false, true}) {
    for (const bool indices : {false, true}) {
      SCOPED_TRACE(tw::format("one sequence {}, indices {}", one_sequence, indices));
      PlacedTensor q({141, heads, d}, dtype, device), k({batch, capacity, kv_heads, d}, dtype, device),
          v(k.tensor().shape(), dtype, device);
      for (PlacedTensor* const t : {&q, &k, &v}) t->fill_random(random);
      const PlacedTensor o({141, heads, d}, dtype, device), offsets = integers(cu_q, {batch + 1}), seqlens = integers(lengths, {batch});
      const Blocks blocks{.key_block = 64, .indices = indices};
      const Selection all = select_blocks(one_sequence ? 1 : batch, kv_heads, 1, blocks_in(capacity, 64), 0.6, random);
      const BlockTensors tensors(blocks, all, random, device);
      const CacheOptions cache{.seqlens = &seqlens.tensor(), .cu_seqlens_q = &offsets.tensor()};
      if (!launched([&] { tw::attention_decode(q, k, v, o, cache, {.causal = true, .blocks = &tensors.blocks}); })) return;
      const auto slice = [](const Tensor& t, std::int64_t first, Shape shape) {
        auto* const data = static_cast<char*>(t.data()) + first * t.stride(0) * static_cast<std::int64_t>(size_of(t.dtype()));
        return Tensor::borrow(data, std::move(shape), t.dtype(), t.device());
      };
      const PlacedTensor alone({141, heads, d}, dtype, device);
      for (std::int64_t b = 0; b < batch; ++b) {
        const std::int64_t first = cu_q[index(b)], queries = cu_q[index(b + 1)] - first;
        if (queries == 0) continue;
        Selection one{1, kv_heads, 1, all.keys};
        for (std::int64_t i = 0; i < kv_heads * all.keys; ++i) one.selected.push_back(all.at(b, i / all.keys, 0, i % all.keys));
        const BlockTensors of_one(blocks, one, random, device);
        const PlacedTensor length = integers({lengths[index(b)]}, {1});
        const Shape rows{1, queries, heads, d}, of_k{1, capacity, kv_heads, d};
        tw::attention_decode(slice(q, first, rows), slice(k, b, of_k), slice(v, b, of_k), slice(alone, first, rows),
                             {.seqlens = &length.tensor(), .num_splits = 1}, {.causal = true, .blocks = &of_one.blocks});
      }
      const std::vector<double> got = o.values(), expected = alone.values();
      EXPECT_TRUE(accurate({got, expected, expected, arithmetic_of(dtype, device)}));
    }
  }
}

TEST_P(AttentionDecode, PackedQueriesAndNewKeys) {
  // Each sequence by itself gives the same, and writes the same.
  constexpr std::int64_t batch = 4, heads = 4, kv_heads = 2, d = 64, capacity = 48;
  const std::vector<std::int64_t> cu_q{0, 3, 3, 140, 141}, cu_new{0, 0, 4, 5, 9}, lengths{40, 7, 30, 0}, entries{2, 4, 0, 3};
  for (const std::int64_t page_size : {0, 16, 5}) {
    SCOPED_TRACE(page_size);
    const std::int64_t pages = page_size > 0 ? (capacity + page_size - 1) / page_size : 1;
    Shape shape{page_size > 0 ? 6 * pages : 6, page_size > 0 ? page_size : capacity, kv_heads, d};
    std::vector<std::int64_t> numbers(index(6 * pages));
    std::iota(numbers.begin(), numbers.end(), 0);
    std::shuffle(numbers.begin(), numbers.end(), random);
    const Numbers keys = random_numbers(shape, dtype), values = random_numbers(shape, dtype);
    PlacedTensor q({141, heads, d}, dtype, device), o({143, heads, d}, dtype, device), new_k({9, kv_heads, d}, dtype, device),
        new_v({9, kv_heads, d}, dtype, device);
    q.fill_random(random), new_k.fill_random(random), new_v.fill_random(random);
    const auto rows = [](const PlacedTensor& t, std::int64_t first, std::int64_t count) {
      const Tensor& all = t.tensor();
      auto* const data = static_cast<char*>(all.data()) + first * all.stride(0) * static_cast<std::int64_t>(size_of(all.dtype()));
      return Tensor::borrow(data, {count, all.shape(1), all.shape(2)}, all.dtype(), all.device(), all.strides());
    };
    const PlacedTensor table = integers(numbers, {6, pages}), offsets = integers(cu_q, {batch + 1}), added = integers(cu_new, {batch + 1});
    const auto run = [&](const PlacedTensor& k, const PlacedTensor& v, const Tensor& of_q, const Tensor& of_o, const PlacedTensor& cu,
                         const PlacedTensor& cu_added, const Tensor& of_k, const Tensor& of_v, const std::vector<std::int64_t>& used,
                         const std::vector<std::int64_t>& choice) {
      const std::int64_t count = std::ssize(used);
      const PlacedTensor seqlens = integers(used, {count}), batch_idx = integers(choice, {count});
      tw::CacheOptions cache{.seqlens = &seqlens.tensor(), .batch_idx = &batch_idx.tensor()};
      if (page_size > 0) cache.block_table = &table.tensor();
      cache.cu_seqlens_q = &cu.tensor();
      cache.cu_seqlens_new = &cu_added.tensor();
      cache.new_k = &of_k, cache.new_v = &of_v;
      return launched([&] { tw::attention_decode(of_q, k, v, of_o, cache, {.causal = true, .check_contents = true}); });
    };
    if (dtype == DType::f32 && device.is_cuda()) {
      const PlacedTensor k = placed(keys, dtype), v = placed(values, dtype);
      expect_error<InvalidArgument>([&] { tw::attention_decode(q, k, v, rows(o, 0, 141), {.cu_seqlens_q = &offsets.tensor()}); },
                                    {"q is f32", "f32 on the CPU"});
      return;
    }
    const PlacedTensor k = placed(keys, dtype), v = placed(values, dtype), k_alone = placed(keys, dtype), v_alone = placed(values, dtype);
    if (!run(k, v, q, rows(o, 0, 141), offsets, added, new_k, new_v, lengths, entries)) return;
    PlacedTensor alone({143, heads, d}, dtype, device);
    for (std::size_t b = 0; b < batch; ++b) {
      const std::int64_t queries = cu_q[b + 1] - cu_q[b], news = cu_new[b + 1] - cu_new[b];
      run(k_alone, v_alone, rows(q, cu_q[b], queries), rows(alone, cu_q[b], queries), integers({0, queries}, {2}), integers({0, news}, {2}),
          rows(new_k, cu_new[b], news), rows(new_v, cu_new[b], news), {lengths[b]}, {entries[b]});
    }
    EXPECT_EQ(k.values(), k_alone.values());
    EXPECT_EQ(v.values(), v_alone.values());
    EXPECT_NE(k.values(), placed(keys, dtype).values());
    const std::vector<double> together = o.values(), one_by_one = alone.values();
    const std::size_t used = 141 * heads * d;
    const double unit = dtype == DType::bf16 ? 0x1p-8 : dtype == DType::f16 ? 0x1p-10 : 1e-6;  // tiles are smaller for few rows
    for (std::size_t n = 0; n < used; ++n) ASSERT_NEAR(together[n], one_by_one[n], unit * std::max(1.0, 2 * std::abs(one_by_one[n]))) << n;
    for (std::size_t n = used; n < together.size(); ++n) ASSERT_TRUE(std::isnan(together[n])) << n;
  }
}

TEST_P(AttentionDecode, SequencesInAnyOrder) {
  check({.batch = 4, .batch_idx = true});
  check({.batch = 4, .batch_idx = true, .seqlen_new = 5, .rotary_dim = 32, .causal = true});
  check({.batch = 3, .full = true, .batch_idx = true});
}

TEST_P(AttentionDecode, LeftPadding) {
  check({.batch = 4, .leftpad = true});
  check({.batch = 4, .seqlen_q = 2, .batch_idx = true, .leftpad = true, .seqlen_new = 2, .rotary_dim = 64, .causal = true});
  check({.batch = 2, .full = true, .leftpad = true, .alibi = 1});
}

TEST_P(AttentionDecode, HeadsShareKeys) {
  for (int group = 1; group <= 8; ++group) check({.seqlen_q = 1 + group % 3, .kv_heads = 1 + group % 2, .group = group, .causal = true});
  check({.kv_heads = 1, .group = 17});
}

TEST_P(AttentionDecode, HeadDimensions) {
  for (const std::int64_t d : {8, 40, 64, 96, 128, 192, 256}) check({.head_dim = d, .seqlen_new = 1});
  check({.head_dim = 192, .value_dim = 128, .seqlen_new = 2});
  check({.head_dim = 64, .value_dim = 256});
}

TEST_P(AttentionDecode, AppendsWithoutTurning) {
  for (const std::int64_t seqlen_new : {1, 2, 7, 96}) {
    check({.seqlen_new = seqlen_new});
    check({.seqlen_q = 3, .seqlen_new = seqlen_new, .causal = true, .strided = true});
  }
}

TEST_P(AttentionDecode, TurnsQueriesAndNewKeys) {
  for (const RopePairing pairing : {RopePairing::half_split, RopePairing::interleaved}) {
    for (const std::int64_t rotary_dim : {64, 32, 12, 2}) {
      for (const bool causal : {false, true})
        check({.seqlen_q = 3, .seqlen_new = 3, .rotary_dim = rotary_dim, .pairing = pairing, .causal = causal});
    }
    check({.seqlen_q = 2, .kv_heads = 1, .group = 20, .head_dim = 256, .seqlen_new = 2, .rotary_dim = 256, .pairing = pairing});
    check({.seqlen_q = 1, .kv_heads = 9, .group = 1, .seqlen_new = 4, .rotary_dim = 48, .pairing = pairing, .table_of_dtype = true});
    check({.seqlen_q = 2, .seqlen_new = 1, .rotary_dim = 64, .pairing = pairing, .window_left = 9, .strided = true});
    check({.seqlen_q = 0, .seqlen_new = 2, .rotary_dim = 64, .pairing = pairing});
  }
}

TEST_P(AttentionDecode, WindowsAndScores) {
  check({.seqlen_q = 3, .capacity = 200, .window_left = 10, .window_right = 0});
  check({.seqlen_q = 5, .capacity = 200, .window_left = 0, .window_right = 2});
  check({.seqlen_q = 5, .capacity = 200, .causal = true, .window_left = 70});
  check({.seqlen_q = 2, .scale = 0.3f, .softcap = 2});
  for (const int alibi : {1, 2}) check({.seqlen_q = 3, .causal = true, .alibi = alibi});
  check({.seqlen_q = 2, .sink = true});
  check({.batch = 3, .seqlens = {0, 5, 90}, .sink = true, .num_splits = 4});
}

TEST_P(AttentionDecode, Chunks) {
  for (const int chunk : {1, 16, 50, 64, 150, 1000}) {
    for (const int num_splits : {0, 1, 3}) {
      check({.batch = 3, .capacity = 200, .seqlens = {0, 64, 199}, .chunk = chunk, .num_splits = num_splits});
      check({.seqlen_q = 5, .capacity = 300, .page_size = 16, .causal = true, .chunk = chunk, .num_splits = num_splits});
    }
    check({.seqlen_q = 3, .capacity = 200, .leftpad = true, .seqlen_new = 3, .rotary_dim = 64, .chunk = chunk});
    check({.seqlen_q = 40, .kv_heads = 1, .group = 4, .capacity = 300, .causal = true, .chunk = chunk});  // more rows than are split
    check({.seqlen_q = 2, .capacity = 500, .causal = true, .chunk = chunk, .key_block = 64});
  }
}

TEST_P(AttentionDecode, Masks) {
  for (const int mask : {1, 2}) {
    for (const std::int64_t page_size : {0, 16, 10}) {
      for (const int num_splits : {0, 1, 3})
        check({.batch = 3,
               .seqlen_q = 1 + pick(3),
               .group = 3,
               .capacity = 300,
               .page_size = page_size,
               .causal = pick(2) == 0,
               .mask = mask,
               .num_splits = num_splits});
    }
    check({.seqlen_q = 3, .capacity = 200, .leftpad = true, .seqlen_new = 3, .rotary_dim = 64, .causal = true, .sink = true, .mask = mask});
    check({.seqlen_q = 40, .kv_heads = 1, .group = 4, .capacity = 300, .softcap = 5, .mask = mask});
  }
}

TEST_P(AttentionDecode, MoreRowsThanATileHas) {
  // Their keys are divided too, where that is asked for or the device is not full.
  for (const int num_splits : {0, 1, 2, 5, 40}) {
    check({.batch = 1, .seqlen_q = 65, .kv_heads = 1, .group = 1, .capacity = 700, .num_splits = num_splits});
    check({.seqlen_q = 70,
           .kv_heads = 2,
           .group = 3,
           .head_dim = 128,
           .capacity = 400,
           .page_size = 16,
           .causal = true,
           .sink = true,
           .num_splits = num_splits});
    check({.seqlen_q = 33,
           .kv_heads = 1,
           .group = 8,
           .capacity = 500,
           .window_left = 50,
           .alibi = 2,
           .num_splits = num_splits,
           .strided = true});
  }
}

TEST_P(AttentionDecode, QueryValues) {
  for (const std::int64_t head_dim : {64, 32}) {
    for (const std::int64_t value_dim : {256, 64}) {
      for (const std::int64_t page_size : {0, 64, 10}) {
        for (const int num_splits : {0, 1, 3})
          check({.seqlen_q = 1 + pick(3),
                 .kv_heads = 1,
                 .group = 16,
                 .head_dim = head_dim,
                 .value_dim = value_dim,
                 .capacity = 300,
                 .page_size = page_size,
                 .causal = pick(2) == 0,
                 .qv = true,
                 .num_splits = num_splits});
      }
    }
  }
  check({.seqlen_q = 3,
         .value_dim = 128,
         .batch_idx = true,
         .leftpad = true,
         .seqlen_new = 3,
         .rotary_dim = 64,
         .causal = true,
         .qv = true,
         .strided = true});
  check({.seqlen_q = 40, .kv_heads = 1, .group = 4, .value_dim = 256, .capacity = 300, .causal = true, .sink = true, .qv = true});
}

TEST_P(AttentionDecode, AnyNumberOfParts) {
  for (const int num_splits : {1, 2, 3, 7, 16, 17, 64, 128}) {
    check({.batch = 3, .seqlen_q = 2, .capacity = 300, .seqlens = {300, 17, 1}, .causal = true, .num_splits = num_splits});
    check({.kv_heads = 1,
           .group = 1,
           .head_dim = 256,
           .capacity = 200,
           .page_size = 16,
           .window_left = 40,
           .sink = true,
           .num_splits = num_splits});
  }
}

TEST_P(AttentionDecode, SampledCases) {
  for (int i = 0; i < (device.is_cuda() ? 12 : random_cases(120)); ++i) {  // on a GPU most of them are kernels to compile
    Case c;
    c.batch = 1 + pick(4);
    c.seqlen_q = 1 + pick(5);
    c.kv_heads = 1 + pick(4);
    c.group = 1 + pick(8);
    c.head_dim = std::vector{64, 128, 96, 192, 256, 8 * (1 + pick(32))}[index(pick(6))];
    c.value_dim = pick(4) == 0 ? 8 * (1 + pick(32)) : 0;
    c.capacity = 16 + pick(200);
    c.page_size = pick(2) == 0 ? std::vector{16, 48, 64, 256, 1 + pick(70)}[index(pick(5))] : 0;
    c.full = pick(6) == 0;
    c.batch_idx = pick(2) == 0;
    c.leftpad = pick(2) == 0;
    if (!c.full && pick(2) == 0) {
      c.seqlen_new = 1 + pick(6);
      c.rotary_dim = pick(2) == 0 ? 2 * (1 + pick(static_cast<int>(c.head_dim / 2))) : 0;
      c.pairing = pick(2) == 0 ? RopePairing::interleaved : RopePairing::half_split;
      c.table_of_dtype = pick(2) == 0;
    }
    c.causal = pick(2) == 0;
    c.window_left = pick(3) == 0 ? pick(100) : -1;
    c.window_right = pick(5) == 0 ? pick(10) : -1;
    c.chunk = pick(5) == 0 ? 1 + pick(150) : 0;
    c.scale = pick(3) == 0 ? 0.1f : 0;
    c.softcap = pick(3) == 0 ? 5 : 0;
    c.alibi = pick(2) == 0 ? 1 + pick(2) : 0;
    c.sink = pick(3) == 0;
    c.lse = pick(4) != 0;
    c.num_splits = pick(2) == 0 ? 1 + pick(9) : 0;
    c.strided = pick(4) == 0;
    check(c);
  }
}

TEST_P(AttentionDecode, PartsChangeNoMoreThanRounding) {
  // Of one call's tensors; and each number of parts gives the same bits every time.
  const std::int64_t batch = 2, capacity = 700, kv_heads = 2, heads = 8, d = 128;
  PlacedTensor q({batch, 2, heads, d}, dtype, device), k({batch, capacity, kv_heads, d}, dtype, device),
      v({batch, capacity, kv_heads, d}, dtype, device);
  q.fill_random(random);
  k.fill_random(random);
  v.fill_random(random);
  const auto run = [&](int num_splits) {
    PlacedTensor o({batch, 2, heads, d}, dtype, device);
    if (!launched([&] { tw::attention_decode(q, k, v, o, {.num_splits = num_splits}, {.causal = true}); })) return std::vector<double>();
    return o.values();
  };
  const std::vector<double> whole = run(1);
  for (const int num_splits : {0, 1, 2, 5, 16, 33, 100}) {
    const std::vector<double> out = run(num_splits);
    EXPECT_EQ(run(num_splits), out) << num_splits << " parts, again";
    // Results are below 1: their last bit, and in f32 what sums in another order do.
    const double unit = dtype == DType::bf16 ? 0x1p-8 : dtype == DType::f16 ? 0x1p-10 : 1e-6;
    for (std::size_t n = 0; n < whole.size(); ++n) ASSERT_NEAR(out[n], whole[n], unit) << num_splits << " parts";
  }
}

TEST_P(AttentionDecode, LeavesAMargin) {
  PlacedTensor q({2, 1, 4, 64}, dtype, device), k({2, 900, 2, 64}, dtype, device), v({2, 900, 2, 64}, dtype, device),
      o({2, 1, 4, 64}, dtype, device), with({2, 1, 4, 64}, dtype, device);
  for (PlacedTensor* const t : {&q, &k, &v}) t->fill_random(random);
  const int margin = device.is_cuda() ? device_info(device).units - 1 : 1000;
  if (!launched([&] { tw::attention_decode(q, k, v, o, {.num_splits = 3}); })) return;
  tw::attention_decode(q, k, v, with, {.num_splits = 3}, {.sm_margin = margin});
  EXPECT_EQ(with.values(), o.values());
}

TEST_P(AttentionDecode, RunsOnTheStreamGiven) {
  PlacedTensor q({1, 1, 4, 64}, dtype, device), k({1, 90, 2, 64}, dtype, device), v({1, 90, 2, 64}, dtype, device),
      o({1, 1, 4, 64}, dtype, device), on_stream({1, 1, 4, 64}, dtype, device);
  q.fill_random(random);
  k.fill_random(random);
  v.fill_random(random);
  if (!launched([&] { tw::attention_decode(q, k, v, o, {}); })) return;
  const std::vector<double> expected = o.values();
  on_stream.values();
  const Stream stream(device);
  tw::attention_decode(q, k, v, on_stream, {}, {.stream = stream});
  stream.synchronize();
  EXPECT_EQ(on_stream.values(), expected);
}

TEST_P(AttentionDecode, NothingToDo) {
  // Without sequences or queries; new keys are appended nevertheless.
  PlacedTensor k({2, 8, 2, 64}, dtype, device), v({2, 8, 2, 64}, dtype, device), new_k({2, 1, 2, 64}, dtype, device),
      new_v({2, 1, 2, 64}, dtype, device);
  const PlacedTensor none({2, 0, 4, 64}, dtype, device), seqlens = integers({0, 7}, {2});
  const std::vector<float> values = new_k.fill_random(random);
  new_v.fill_random(random);
  if (!launched([&] {
        tw::attention_decode(none, k, v, none, {.seqlens = &seqlens.tensor(), .new_k = &new_k.tensor(), .new_v = &new_v.tensor()});
      }))
    return;
  const std::vector<double> cache = k.values();
  for (std::size_t n = 0; n < 128; ++n) {
    ASSERT_EQ(cache[n], values[n]);
    ASSERT_EQ(cache[(8 + 7) * 128 + n], values[128 + n]);
  }
  EXPECT_TRUE(std::isnan(cache[128]));
  const PlacedTensor no_batch({0, 1, 4, 64}, dtype, device), no_cache({0, 8, 2, 64}, dtype, device);
  tw::attention_decode(no_batch, no_cache, no_cache, no_batch, {});
}

TEST_P(AttentionDecode, WhatDoesNotFitIsDropped) {
  // Numbers that are found wrong only on a GPU: nothing beside the places that exist is touched.
  constexpr std::int64_t batch = 7, capacity = 32, entries = 3, most = std::numeric_limits<std::int32_t>::max();
  const Numbers new_values = random_numbers({batch, 4, 2, 64}, dtype);
  const PlacedTensor new_k = placed(new_values, dtype), new_v = placed(new_values, dtype);
  const CacheOptions added{.new_k = &new_k.tensor(), .new_v = &new_v.tensor()};
  const auto into = [&](const Tensor& k, const Tensor& v) {
    tw::detail::AttentionCall call;
    call.k = k.transpose(1, 2), call.v = v.transpose(1, 2);
    call.keys = capacity;
    call.stream = Stream::standard(device);
    return call;
  };
  const auto fill = [](Numbers& cache, std::int64_t entry, std::int64_t at, Numbers& from, std::int64_t b, std::int64_t i) {
    std::copy_n(from.row(b, i, 0), 128, cache.row(entry, at, 0));
  };
  {
    const PlacedTensor k({entries, capacity, 2, 64}, dtype, device, {.offset = 64}), v({entries, capacity, 2, 64}, dtype, device);
    const PlacedTensor seqlens = integers({30, 32, -2, -most, 5, 5, 8}, {batch}), batch_idx = integers({0, 1, 2, 0, -1, 3, 1}, {batch});
    tw::detail::AttentionCall call = into(k, v);
    call.used_k = seqlens.tensor().data<std::int32_t>();
    call.k_batch = batch_idx.tensor().data<std::int32_t>();
    if (!launched([&] { append(call, added, {}); })) return;
    Numbers expected({entries, capacity, 2, 64}, kNan), from = new_values;
    fill(expected, 0, 30, from, 0, 0);
    fill(expected, 0, 31, from, 0, 1);
    fill(expected, 2, 0, from, 2, 2);
    fill(expected, 2, 1, from, 2, 3);
    for (std::int64_t i = 0; i < 4; ++i) fill(expected, 1, 8 + i, from, 6, i);
    EXPECT_TRUE(cache_is(k, expected, false));
    EXPECT_TRUE(cache_is(v, expected, false));
  }
  const PlacedTensor k({entries, 16, 2, 64}, dtype, device, {.offset = 64}), v({entries, 16, 2, 64}, dtype, device);
  const PlacedTensor seqlens = integers({14, 30, 31, 40, 3, -1, -64}, {batch});
  const PlacedTensor table = integers({0, 1, -1, 3, 9, -64, 0, 1, 1'000'000, 0, 2, 7, 0, 0}, {batch, 2});
  tw::detail::AttentionCall call = into(k, v);
  call.used_k = seqlens.tensor().data<std::int32_t>();
  call.pages = table.tensor().data<std::int32_t>();
  call.pages_stride = 2;
  call.page_tables = batch;
  append(call, added, {});
  Numbers expected({entries, 16, 2, 64}, kNan), from = new_values;
  fill(expected, 0, 14, from, 0, 0);
  fill(expected, 0, 15, from, 0, 1);
  fill(expected, 1, 0, from, 0, 2);
  fill(expected, 1, 1, from, 0, 3);
  for (std::int64_t i = 1; i < 4; ++i) fill(expected, 2, i - 1, from, 5, i);
  EXPECT_TRUE(cache_is(k, expected, false));
  EXPECT_TRUE(cache_is(v, expected, false));
}

/// Sequences of no key, of parts of 64 keys and of several, whatever the number of threads and of other sequences.
TEST(AttentionDecodeOfFewQueries, GivesTheSameBitsAlone) {
  constexpr std::int64_t kv_heads = 2, heads = 6, d = 72, value_d = 40, page_size = 48, pages = 6;
  const std::vector<int> lengths{0, 1, 64, 65, 250}, order{7, 29, 4, 11, 0, 18};
  const auto batch = std::ssize(lengths);
  std::vector<int> table;
  for (int b = 0; b < batch; ++b)
    for (const int page : order) table.push_back((page + 5 * b) % 30);
  const Tensor k = Tensor::random({30, page_size, kv_heads, d}, DType::f32, 1),
               v = Tensor::random({30, page_size, kv_heads, value_d}, DType::f32, 2);
  const Tensor q = Tensor::random({batch, 1, heads, d}, DType::f32, 3);
  const Tensor seqlens = Tensor::from(std::span<const int>(lengths), {batch}),
               block_table = Tensor::from(std::span<const int>(table), {batch, pages});
  const auto run = [&](std::int64_t first, std::int64_t end) {
    const Tensor o = Tensor::empty({end - first, 1, heads, value_d}, DType::f32), lse = Tensor::empty({end - first, heads, 1}, DType::f32);
    const Tensor some = seqlens.slice(0, first, end), of_table = block_table.slice(0, first, end);
    tw::attention_decode(q.slice(0, first, end), k, v, o, {.seqlens = &some, .block_table = &of_table}, {.lse = &lse});
    std::vector<float> all(o.data<float>(), o.data<float>() + o.numel());
    all.insert(all.end(), lse.data<float>(), lse.data<float>() + lse.numel());
    return all;
  };
  const std::vector<float> together = run(0, batch);
  for (std::int64_t b = 0; b < batch; ++b) {
    const std::vector<float> alone = run(b, b + 1);
    for (std::int64_t i = 0; i < heads * value_d; ++i)
      ASSERT_EQ(alone[index(i)], together[index(b * heads * value_d + i)]) << "sequence " << b;
    for (std::int64_t h = 0; h < heads; ++h) {
      const float* const query = q.data<float>() + (b * heads + h) * d;
      std::vector<double> weights, sums(value_d);
      double total = 0;
      for (int key = 0; key < lengths[index(b)]; ++key) {
        const std::int64_t row = (table[index(b * pages + key / page_size)] * page_size + key % page_size) * kv_heads + h / 3;
        double score = 0;
        for (std::int64_t c = 0; c < d; ++c) score += static_cast<double>(query[c]) * k.data<float>()[row * d + c];
        const double weight = std::exp(score / std::sqrt(static_cast<double>(d)));
        total += weight;
        for (std::int64_t c = 0; c < value_d; ++c) sums[index(c)] += weight * v.data<float>()[row * value_d + c];
      }
      for (std::int64_t c = 0; c < value_d; ++c)
        ASSERT_NEAR(alone[index(h * value_d + c)], total == 0 ? 0 : sums[index(c)] / total, 1e-5) << "sequence " << b << ", head " << h;
      const float lse = alone[index(heads * value_d + h)];
      if (total == 0)
        ASSERT_EQ(lse, -kInf);
      else
        ASSERT_NEAR(lse, std::log(total), 1e-5) << "sequence " << b << ", head " << h;
    }
  }
  const int threads = cpu_threads();
  for (const int other : {1, 3}) {
    set_cpu_threads(other);
    EXPECT_EQ(run(0, batch), together) << other << " threads";
  }
  set_cpu_threads(threads);
}

TEST(AttentionDecodeKernels, CompileForAGpu) {
  // Kernels that are not registered: they compile when a call first needs them.
  skip_without_nvrtc();
  for (const KernelInfo* info : {&kernel_info<Append<bf16, float>>, &kernel_info<GatherPages<bf16>>})
    EXPECT_EQ(compile(make_spec(*info, true, true)).spill_bytes, 0) << info->type;
}

}  // namespace
}  // namespace tw::kernels::attention
