// The C interface's products and attention against the C++ functions that they call, on the CPU: the same bits.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "tilewave/attention.hpp"
#include "tilewave/gemm.hpp"
#include "tilewave/rope.hpp"
#include "tilewave/tensor.hpp"
#include "tilewave/tilewave.h"

namespace tw::test {
namespace {

/// A tensor as C knows it. The memory stays the tensor's.
class InC {
 public:
  explicit InC(const Tensor& t) : tensor_{} {
    tensor_.data = t.data();
    tensor_.dtype = t.dtype() == DType::f32       ? TW_F32
                    : t.dtype() == DType::f16     ? TW_F16
                    : t.dtype() == DType::bf16    ? TW_BF16
                    : t.dtype() == DType::boolean ? TW_BOOL
                                                  : TW_I32;
    tensor_.cuda_device = -1;
    tensor_.rank = t.rank();
    std::copy(t.shape().begin(), t.shape().end(), tensor_.shape);
    for (int dim = 0; dim < t.rank(); ++dim) tensor_.strides[dim] = t.stride(dim);
  }
  operator const tw_tensor*() const { return &tensor_; }
  const tw_tensor* get() const { return &tensor_; }

 private:
  tw_tensor tensor_;
};

Tensor poisoned(Shape shape, DType dtype) { return Tensor::poisoned(std::move(shape), dtype, Stream::standard(Device::cpu())); }
Tensor integers(const std::vector<int>& values, Shape shape) {
  const Tensor t = Tensor::empty(std::move(shape), DType::i32);
  std::copy(values.begin(), values.end(), t.data<int>());
  return t;
}
bool same_bits(const Tensor& a, const Tensor& b) {
  return a.shape() == b.shape() && std::memcmp(a.data(), b.data(), static_cast<std::size_t>(a.numel()) * size_of(a.dtype())) == 0;
}
tw_attention_options attention_options() {
  tw_attention_options options = {};
  options.struct_size = sizeof options;
  return options;
}

#define EXPECT_OK(call) EXPECT_EQ(call, TW_OK) << tw_last_error()

/// That `status` refuses an argument, with a message that holds `part`.
void expect_refused(tw_status status, std::string_view part) {
  EXPECT_EQ(status, TW_INVALID_ARGUMENT);
  EXPECT_NE(std::string_view(tw_last_error()).find(part), std::string_view::npos) << tw_last_error();
}

TEST(CInterface, Gemm) {
  const Tensor a = Tensor::random({33, 70}, DType::f32, 1), b = Tensor::random({70, 21}, DType::f32, 2), d = poisoned({33, 21}, DType::f32),
               expected = poisoned({33, 21}, DType::f32);
  EXPECT_OK(tw_gemm(InC(a), InC(b), InC(d), nullptr));
  gemm(a, b, expected);
  EXPECT_TRUE(same_bits(d, expected));
}

struct CInterfaceAttention : testing::Test {
  const Tensor q = Tensor::random({2, 37, 4, 64}, DType::bf16, 1), k = Tensor::random({2, 90, 2, 64}, DType::bf16, 2),
               v = Tensor::random({2, 90, 2, 64}, DType::bf16, 3), o = poisoned(q.shape(), DType::bf16),
               expected = poisoned(q.shape(), DType::bf16);
};

TEST_F(CInterfaceAttention, NullOptionsAreDefaults) {
  EXPECT_OK(tw_attention(InC(q), InC(k), InC(v), InC(o), nullptr, nullptr));
  attention(q, k, v, expected);
  EXPECT_TRUE(same_bits(o, expected));
}

TEST_F(CInterfaceAttention, EveryOption) {
  const Tensor slopes = Tensor::random({2, 4}, DType::f32, 4), sink = Tensor::random({4}, DType::f32, 5),
               lse = poisoned({2, 4, 37}, DType::f32), expected_lse = poisoned({2, 4, 37}, DType::f32),
               added = Tensor::random({1, 4, 37, 90}, DType::f32, 6);
  const Tensor seen = Tensor::empty({37, 90}, DType::boolean);
  for (int i = 0; i < seen.numel(); ++i) static_cast<unsigned char*>(seen.data())[i] = i % 7 != 0;
  const InC slopes_in_c(slopes), sink_in_c(sink), lse_in_c(lse), added_in_c(added), seen_in_c(seen);

  tw_attention_options options = attention_options();
  options.scale = 0.3f;
  options.softcap = 2;
  options.alibi_slopes = slopes_in_c;
  options.sink = sink_in_c;
  options.mask = added_in_c;
  options.lse = lse_in_c;
  options.has_window_left = options.has_window_right = 1;
  options.window_left = 20, options.window_right = 9;
  EXPECT_OK(tw_attention(InC(q), InC(k), InC(v), InC(o), &options, nullptr));
  attention(q, k, v, expected,
            {.scale = 0.3f,
             .window_left = 20,
             .window_right = 9,
             .softcap = 2,
             .alibi_slopes = &slopes,
             .sink = &sink,
             .mask = &added,
             .lse = &expected_lse});
  EXPECT_TRUE(same_bits(o, expected));
  EXPECT_TRUE(same_bits(lse, expected_lse));

  options = attention_options();
  options.causal = 1;
  options.has_causal_offset = 1;
  options.causal_offset = 5;
  options.mask = seen_in_c;
  EXPECT_OK(tw_attention(InC(q), InC(k), InC(v), InC(o), &options, nullptr));
  attention(q, k, v, expected, {.causal = true, .causal_offset = 5, .mask = &seen});
  EXPECT_TRUE(same_bits(o, expected));
}

TEST_F(CInterfaceAttention, FieldsThatAnOlderCallerDoesNotHaveAreDefaults) {
  tw_attention_options options = attention_options();
  options.causal = 1;
  options.softcap = 1;  // behind the end
  options.struct_size = offsetof(tw_attention_options, has_causal_offset);
  EXPECT_OK(tw_attention(InC(q), InC(k), InC(v), InC(o), &options, nullptr));
  attention(q, k, v, expected, {.causal = true});
  EXPECT_TRUE(same_bits(o, expected));
}

TEST_F(CInterfaceAttention, PackedSequences) {
  const Tensor packed_q = Tensor::random({70, 4, 64}, DType::f16, 1), packed_k = Tensor::random({110, 2, 64}, DType::f16, 2),
               packed_v = Tensor::random({110, 2, 64}, DType::f16, 3), out = poisoned(packed_q.shape(), DType::f16),
               expected_out = poisoned(packed_q.shape(), DType::f16), lse = poisoned({4, 70}, DType::f32),
               expected_lse = poisoned({4, 70}, DType::f32);
  const Tensor cu_q = integers({0, 30, 30, 70}, {4}), cu_k = integers({0, 50, 60, 110}, {4}), used_q = integers({30, 0, 25}, {3}),
               used_k = integers({17, 10, 50}, {3});
  const InC lse_in_c(lse);
  tw_attention_options options = attention_options();
  options.causal = 1;
  options.lse = lse_in_c;
  for (const bool used : {false, true}) {
    EXPECT_OK(tw_attention_varlen(InC(packed_q), InC(packed_k), InC(packed_v), InC(out), InC(cu_q), InC(cu_k),
                                  used ? InC(used_q).get() : nullptr, used ? InC(used_k).get() : nullptr, &options, nullptr));
    attention_varlen(packed_q, packed_k, packed_v, expected_out, {cu_q, cu_k, used ? &used_q : nullptr, used ? &used_k : nullptr},
                     {.causal = true, .lse = &expected_lse});
    EXPECT_TRUE(same_bits(out, expected_out));
    EXPECT_TRUE(same_bits(lse, expected_lse));
  }
}

TEST_F(CInterfaceAttention, Decode) {
  // Both calls append to a cache of their own.
  const Tensor few = Tensor::random({2, 3, 4, 64}, DType::bf16, 1), cos = poisoned({128, 16}, DType::f32),
               sin = poisoned({128, 16}, DType::f32), new_k = Tensor::random({2, 3, 2, 64}, DType::bf16, 7),
               new_v = Tensor::random({2, 3, 2, 64}, DType::bf16, 8), out = poisoned(few.shape(), DType::bf16),
               expected_out = poisoned(few.shape(), DType::bf16);
  rope_table(cos, sin);
  const Tensor seqlens = integers({50, 61}, {2}), pages = integers({4, 0, 5, 1, 3, 2, 9, 8}, {2, 4});
  const auto cache = [](unsigned seed) { return Tensor::random({10, 16, 2, 64}, DType::bf16, seed); };
  const Tensor k_cache = cache(5), v_cache = cache(6), expected_k = cache(5), expected_v = cache(6);
  const InC seqlens_in_c(seqlens), pages_in_c(pages), new_k_in_c(new_k), new_v_in_c(new_v), cos_in_c(cos), sin_in_c(sin);
  tw_cache_options options = {};
  options.struct_size = sizeof options;
  options.seqlens = seqlens_in_c;
  options.block_table = pages_in_c;
  options.new_k = new_k_in_c;
  options.new_v = new_v_in_c;
  options.rotary_cos = cos_in_c;
  options.rotary_sin = sin_in_c;
  options.rotary_interleaved = 1;
  options.num_splits = 2;
  tw_attention_options attention = attention_options();
  attention.causal = 1;
  EXPECT_OK(tw_attention_decode(InC(few), InC(k_cache), InC(v_cache), InC(out), &options, &attention, nullptr));
  attention_decode(few, expected_k, expected_v, expected_out,
                   {.seqlens = &seqlens,
                    .block_table = &pages,
                    .new_k = &new_k,
                    .new_v = &new_v,
                    .rotary_cos = &cos,
                    .rotary_sin = &sin,
                    .rotary_pairing = RopePairing::interleaved,
                    .num_splits = 2},
                   {.causal = true});
  EXPECT_TRUE(same_bits(out, expected_out));
  EXPECT_TRUE(same_bits(k_cache, expected_k));
  EXPECT_TRUE(same_bits(v_cache, expected_v));
}

TEST_F(CInterfaceAttention, BadInput) {
  const auto call = [&](const tw_tensor* q_in_c, const tw_attention_options* options) {
    return tw_attention(q_in_c, InC(k), InC(v), InC(o), options, nullptr);
  };
  expect_refused(call(nullptr, nullptr), "q is null");
  tw_tensor wrong = *InC(q).get();
  wrong.rank = 5;
  expect_refused(call(&wrong, nullptr), "q has rank 5; 1 to 4 are allowed");
  wrong = *InC(q).get();
  wrong.dtype = static_cast<tw_dtype>(77);
  expect_refused(call(&wrong, nullptr), "q has dtype 77");
  tw_attention_options options = attention_options();
  options.struct_size = 0;
  expect_refused(call(InC(q), &options), "options.struct_size is 0");
  options = attention_options();
  options.softcap = -1;
  expect_refused(call(InC(q), &options), "attention: softcap is -1");
  tw_cache_options cache = {};
  cache.struct_size = 1;
  expect_refused(tw_attention_decode(InC(q), InC(k), InC(v), InC(o), &cache, nullptr, nullptr), "cache.struct_size is 1");
  expect_refused(tw_attention_varlen(InC(q), InC(k), InC(v), InC(o), nullptr, nullptr, nullptr, nullptr, nullptr, nullptr),
                 "cu_seqlens_q is null");
  const Tensor untouched = poisoned(q.shape(), DType::bf16);
  EXPECT_TRUE(same_bits(o, untouched));
}

}  // namespace
}  // namespace tw::test
