// What attention_decode() refuses, and what it says.

#include <gtest/gtest.h>

#include <limits>
#include <utility>
#include <vector>

#include "runtime/format.hpp"
#include "tests/bad_input.hpp"
#include "tests/expect_error.hpp"
#include "tilewave/attention.hpp"

namespace tw::kernels::attention {
namespace {

using namespace tw::test;

class AttentionDecodeBadInput : public BadInput {
 protected:
  void refused(const Tensor& of_q, const Tensor& of_k, const Tensor& of_v, const PlacedTensor& of_o,
               std::initializer_list<std::string_view> parts, const CacheOptions& cache = {}, const AttentionOptions& options = {}) {
    expect_error<InvalidArgument>([&] { tw::attention_decode(of_q, of_k, of_v, of_o, cache, options); }, parts);
    EXPECT_TRUE(of_o.untouched());
  }
  /// Of tensors that would do.
  void refused(std::initializer_list<std::string_view> parts, const CacheOptions& cache, AttentionOptions options = {}) {
    options.check_contents = true;
    refused(q, kv, kv, o, parts, cache, options);
    EXPECT_TRUE(kv.untouched());
  }

  const PlacedTensor q = make({2, 1, 4, 64}), kv = make({2, 32, 2, 64}), o = make({2, 1, 4, 64}), other_kv = make({2, 32, 2, 64});
  const PlacedTensor seqlens = integers({5, 30}, {2}), new_kv = make({2, 1, 2, 64});
};

INSTANTIATE_TEST_SUITE_P(Ops, AttentionDecodeBadInput, testing::ValuesIn(kDevices), device_name);

TEST_P(AttentionDecodeBadInput, Shapes) {
  refused(make({1, 4, 64}), kv, kv, o, {"attention_decode", "q is bf16[1, 4, 64]", "[batch, seqlen_q, heads, head_dim]"});
  refused(q, make({32, 2, 64}), kv, o, {"k_cache is bf16[32, 2, 64]", "[cache_batch, capacity, kv_heads, head_dim]"});
  refused(q, kv, kv, make({2, 4, 64}), {"o is bf16[2, 4, 64]"});
  refused(q, kv, kv, make({2, 1, 3, 64}), {"o is bf16[2, 1, 3, 64]", "[2, 1, 4, 64]"});
  refused(q, kv, make({2, 32, 2, 128}), o, {"o is bf16[2, 1, 4, 64]", "v_cache's, 128"});
  refused(q, kv, make({2, 31, 2, 64}), o, {"v_cache is bf16[2, 31, 2, 64]", "k_cache is bf16[2, 32, 2, 64]"});
  refused(q, make({2, 32, 2, 128}), kv, o, {"k_cache is bf16[2, 32, 2, 128]", "head_dim", "64"});
  refused(q, make({2, 32, 3, 64}), make({2, 32, 3, 64}), o, {"q has 4 heads and k_cache 3", "multiple"});
  refused(q, make({3, 32, 2, 64}), make({3, 32, 2, 64}), o, {"k_cache is bf16[3, 32, 2, 64]", "batch_idx", "2"});
  for (const std::int64_t d : {0, 4, 60, 264}) {
    const PlacedTensor t = make({2, 1, 2, d});
    refused(t, t, t, make({2, 1, 2, d}), {tw::format("q is bf16[2, 1, 2, {}]", d), "multiple of 8 from 8 to 256"});
  }
  const PlacedTensor stepped({2, 1, 4, 64}, DType::bf16, device, {.step = 2});
  refused(stepped, kv, kv, o, {"q is bf16[2, 1, 4, 64]", "last dimension must be contiguous"});
}

TEST_P(AttentionDecodeBadInput, Dtypes) {
  refused(make({2, 1, 4, 64}, DType::f16), kv, kv, o, {"k_cache is bf16[2, 32, 2, 64]", "f16"});
  refused(q, kv, make({2, 32, 2, 64}, DType::f32), o, {"v_cache is f32[2, 32, 2, 64]", "bf16"});
  refused(make({2, 1, 4, 64}, DType::i32), kv, kv, o, {"q is i32[2, 1, 4, 64]", "bf16 and f16"});
  refused({"seqlens is f32[2]", "i32"}, {.seqlens = &make({2}, DType::f32).tensor()});
}

TEST_P(AttentionDecodeBadInput, Memory) {
  refused(o, kv, kv, o, {"o is", "shares memory with q"});
  const PlacedTensor as_o = make({2, 1, 4, 64});
  refused(q, as_o, as_o, as_o, {"o is", "shares memory with k_cache"});
  std::vector<std::int64_t> strides = o.tensor().strides();
  strides[2] = 0;
  const Tensor folded = Tensor::borrow(o.tensor().data(), {2, 1, 4, 64}, DType::bf16, device, strides);
  expect_error<InvalidArgument>([&] { tw::attention_decode(q, kv, kv, folded, {}); }, {"o is bf16[2, 1, 4, 64]", "stride 0", "distinct"});
  refused({"v_cache is", "shares memory with k_cache"},
          {.seqlens = &seqlens.tensor(), .new_k = &new_kv.tensor(), .new_v = &new_kv.tensor()});
}

TEST_P(AttentionDecodeBadInput, CacheOptions) {
  const PlacedTensor three = integers({1, 2, 3}, {3}), table = integers({0, 1}, {2, 1}), apart({2}, DType::i32, device, {.step = 2});
  refused({"seqlens is i32[3]", "i32[2]"}, {.seqlens = &three.tensor()});
  refused({"batch_idx is i32[3]", "i32[2]"}, {.batch_idx = &three.tensor()});
  refused({"leftpad is i32[2]", "contiguous"}, {.leftpad = &apart.tensor()});
  refused({"block_table is i32[3]", "i32[2, pages]"}, {.block_table = &three.tensor()});
  const PlacedTensor few = integers({0}, {1, 1}), no_pages = make({4, 0, 2, 64}), cu = integers({0, 1, 2}, {3});
  refused({"block_table is i32[1, 1]", "i32[2, pages]", "batch_idx"}, {.block_table = &few.tensor()});
  refused(q, no_pages, no_pages, o, {"k_cache is bf16[4, 0, 2, 64]", "page_size", "1 or more"}, {.block_table = &table.tensor()});
  refused({"q is bf16[2, 1, 4, 64]", "[total_q, heads, head_dim], with cu_seqlens_q"}, {.cu_seqlens_q = &cu.tensor()});
  const PlacedTensor packed = make({2, 4, 64}), three_kv = make({3, 32, 2, 64}), out = make({2, 4, 64});
  refused(packed, kv, kv, out, {"cu_seqlens_q is i32[2, 1]", "i32[batch + 1]"}, {.cu_seqlens_q = &table.tensor()});
  refused(packed, three_kv, three_kv, out, {"k_cache is bf16[3, 32, 2, 64]", "batch_idx", "cu_seqlens_q, 2"},
          {.cu_seqlens_q = &cu.tensor()});
  refused({"num_splits is 129", "128"}, {.num_splits = 129});
  refused({"num_splits is -1"}, {.num_splits = -1});
}

TEST_P(AttentionDecodeBadInput, NewKeys) {
  const auto with = [&](const PlacedTensor* new_k, const PlacedTensor* new_v) {
    return tw::CacheOptions{
        .seqlens = &seqlens.tensor(), .new_k = new_k ? &new_k->tensor() : nullptr, .new_v = new_v ? &new_v->tensor() : nullptr};
  };
  const auto into_two = [&](std::initializer_list<std::string_view> parts, const tw::CacheOptions& cache) {
    refused(q, kv, other_kv, o, parts, cache);
    EXPECT_TRUE(kv.untouched());
  };
  into_two({"new_k is given without new_v"}, with(&new_kv, nullptr));
  into_two({"new_v is given without new_k"}, with(nullptr, &new_kv));
  into_two({"new_k is given without seqlens"}, {.new_k = &new_kv.tensor(), .new_v = &new_kv.tensor()});
  const PlacedTensor other_heads = make({2, 1, 3, 64}), two = make({2, 2, 2, 64}), flat = make({2, 2, 64}), many = make({2, 33, 2, 64}),
                     f16 = make({2, 1, 2, 64}, DType::f16);
  into_two({"new_k is bf16[2, 1, 3, 64]", "[2, 1, 2, 64]"}, with(&other_heads, &new_kv));
  into_two({"new_v is bf16[2, 2, 2, 64]", "[2, 1, 2, 64]"}, with(&new_kv, &two));
  into_two({"new_k is bf16[2, 2, 64]", "[batch, seqlen_new, kv_heads, head_dim]"}, with(&flat, &new_kv));
  into_two({"new_k is f16[2, 1, 2, 64]", "bf16"}, with(&f16, &new_kv));
  into_two({"new_k is bf16[2, 33, 2, 64]", "32 tokens"}, with(&many, &many));
  const PlacedTensor cu = integers({0, 1, 2}, {3}), two_offsets = integers({0, 1}, {2}), table = make({50, 16}, DType::f32);
  into_two({"cu_seqlens_new is given without new_k"}, {.cu_seqlens_new = &cu.tensor()});
  tw::CacheOptions cache = with(&new_kv, &new_kv);
  cache.cu_seqlens_new = &cu.tensor();
  into_two({"new_k is bf16[2, 1, 2, 64]", "[total_new, kv_heads, head_dim], with cu_seqlens_new"}, cache);
  cache = with(&flat, &flat);
  cache.cu_seqlens_new = &two_offsets.tensor();
  into_two({"cu_seqlens_new is i32[2]", "i32[3]"}, cache);
  cache.cu_seqlens_new = &cu.tensor();
  cache.rotary_cos = cache.rotary_sin = &table.tensor();
  into_two({"rotary_cos is given with cu_seqlens_new", "rope()"}, cache);
}

TEST_P(AttentionDecodeBadInput, RotaryTables) {
  const PlacedTensor table = make({50, 16}, DType::f32), wide = make({50, 33}, DType::f32), shorter = make({49, 16}, DType::f32),
                     half = make({50, 16}, DType::f16), empty = make({0, 16}, DType::f32);
  const auto refuse = [&](std::initializer_list<std::string_view> parts, const PlacedTensor* cos, const PlacedTensor* sin,
                          bool new_keys = true) {
    tw::CacheOptions cache{.seqlens = &seqlens.tensor()};
    if (new_keys) cache.new_k = cache.new_v = &new_kv.tensor();
    cache.rotary_cos = cos ? &cos->tensor() : nullptr;
    cache.rotary_sin = sin ? &sin->tensor() : nullptr;
    refused(q, kv, other_kv, o, parts, cache);
  };
  refuse({"rotary_cos is given without rotary_sin"}, &table, nullptr);
  refuse({"rotary_sin is given without rotary_cos"}, nullptr, &table);
  refuse({"rotary_cos is given without new keys"}, &table, &table, false);
  refuse({"rotary_cos is f32[50, 33]", "64"}, &wide, &wide);
  refuse({"rotary_cos is f32[0, 16]", "positions"}, &empty, &empty);
  refuse({"rotary_sin is f32[49, 16]", "rotary_cos's shape"}, &table, &shorter);
  refuse({"rotary_cos is f16[50, 16]", "bf16, or f32"}, &half, &half);
  refuse({"rotary_sin is f16[50, 16]", "f32"}, &table, &half);
}

TEST_P(AttentionDecodeBadInput, Options) {
  refused({"scale is -1", "positive"}, {}, {.scale = -1});
  refused({"softcap is -2", "positive"}, {}, {.softcap = -2});
  refused({"window_left is -2", "-1 for no bound"}, {}, {.window_left = -2});
  refused({"attention_chunk is -2", "0 for none"}, {}, {.attention_chunk = -2});
  refused({"sm_margin is -2", "0 or more"}, {}, {.sm_margin = -2});
  refused({"window_right is -7"}, {}, {.window_right = -7});
  refused({"causal_offset is 2147483647", "2^29"}, {}, {.causal_offset = std::numeric_limits<int>::max()});
  const PlacedTensor five = make({5}, DType::f32), four = make({4}), lse = make({2, 1, 4}, DType::f32);
  refused({"mask is", "broadcastable to"}, {}, {.mask = &five.tensor()});
  refused({"alibi_slopes is f32[5]", "f32[4] or f32[2, 4]"}, {}, {.alibi_slopes = &five.tensor()});
  refused({"sink is f32[5]", "f32[4]"}, {}, {.sink = &five.tensor()});
  refused({"sink is bf16[4]", "f32"}, {}, {.sink = &four.tensor()});
  refused({"lse is f32[2, 1, 4]", "f32[2, 4, 1]"}, {}, {.lse = &lse.tensor()});
}

TEST_P(AttentionDecodeBadInput, Contents) {
  const PlacedTensor negative = integers({5, -1}, {2}), over = integers({33, 2}, {2}), full = integers({3, 32}, {2});
  refused({"seqlens[1] is -1", "0 to 32"}, {.seqlens = &negative.tensor()});
  refused({"seqlens[0] is 33", "0 to 32"}, {.seqlens = &over.tensor()});
  refused({"leftpad[0] is 6", "0 to 5"}, {.seqlens = &seqlens.tensor(), .leftpad = &integers({6, 6}, {2}).tensor()});
  refused({"leftpad[1] is -1"}, {.leftpad = &negative.tensor()});
  refused({"batch_idx[1] is 2", "0 to 1"}, {.batch_idx = &integers({1, 2}, {2}).tensor()});

  // A page that no token is in may have any number.
  const PlacedTensor pages = make({4, 16, 2, 64}), other_pages = make({4, 16, 2, 64}), table = integers({0, 9, 1, 4}, {2, 2});
  AttentionOptions options;
  options.check_contents = true;
  refused(q, pages, pages, o, {"block_table[1, 1] is 4", "0 to 3"}, {.seqlens = &seqlens.tensor(), .block_table = &table.tensor()},
          options);
  refused(q, pages, pages, o, {"block_table[0, 1] is 9", "0 to 3"}, {.block_table = &table.tensor()}, options);

  const PlacedTensor choice = integers({1, 2}, {2});
  refused(q, pages, pages, o, {"batch_idx[1] is 2", "0 to 1, one of the block table's rows"},
          {.seqlens = &seqlens.tensor(), .batch_idx = &choice.tensor(), .block_table = &table.tensor()}, options);
  const PlacedTensor packed = make({2, 4, 64}), out = make({2, 4, 64}), falling = integers({0, 2, 1}, {3}),
                     long_new = integers({0, 1, 3}, {3}), flat = make({2, 2, 64});
  refused(packed, kv, kv, out, {"cu_seqlens_q[1] is 2 and cu_seqlens_q[2] is 1", "not decrease"}, {.cu_seqlens_q = &falling.tensor()},
          options);
  refused(q, kv, other_kv, o, {"cu_seqlens_new[2] is 3", "2 new keys"},
          {.seqlens = &seqlens.tensor(), .cu_seqlens_new = &long_new.tensor(), .new_k = &flat.tensor(), .new_v = &flat.tensor()}, options);

  tw::CacheOptions cache{.seqlens = &full.tensor(), .new_k = &new_kv.tensor(), .new_v = &new_kv.tensor()};
  refused(q, kv, other_kv, o, {"seqlens[1] is 32", "1 new tokens", "0 to 31"}, cache, options);
  cache.seqlens = &seqlens.tensor();
  const PlacedTensor rotary = make({30, 16}, DType::f32);
  cache.rotary_cos = cache.rotary_sin = &rotary.tensor();
  refused(q, kv, other_kv, o, {"rotary_cos has 30 positions", "sequence 1 needs 31"}, cache, options);
  EXPECT_TRUE(kv.untouched());
}

TEST(AttentionDecodeBadMemory, OperandsOnAnotherDevice) {
  // Only looked at: a tensor may say that it lies on a GPU without there being one.
  alignas(16) u16 values[64 * 8] = {};
  const PlacedTensor host({1, 4, 2, 64}, DType::bf16, Device::cpu()), o({1, 4, 2, 64}, DType::bf16, Device::cpu());
  const Tensor gpu = Tensor::borrow(values, {1, 4, 2, 64}, DType::bf16, Device::cuda());
  const Tensor lengths = Tensor::borrow(values, {1}, DType::i32, Device::cuda());
  expect_error<InvalidArgument>([&] { tw::attention_decode(gpu, host, host, o, {}); }, {"q is bf16[1, 4, 2, 64] on cuda", "cpu"});
  expect_error<InvalidArgument>([&] { tw::attention_decode(host, host, gpu, o, {}); }, {"v_cache is bf16[1, 4, 2, 64] on cuda", "cpu"});
  expect_error<InvalidArgument>([&] { tw::attention_decode(host, host, host, o, {.seqlens = &lengths}); }, {"seqlens is i32[1] on cuda"});
  EXPECT_TRUE(o.untouched());
}

}  // namespace
}  // namespace tw::kernels::attention
