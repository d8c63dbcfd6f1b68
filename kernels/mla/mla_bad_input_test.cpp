// What mla_decode() and mla_sparse() refuse, and what they say.

#include <gtest/gtest.h>

#include <limits>
#include <utility>
#include <vector>

#include "runtime/format.hpp"
#include "tests/bad_input.hpp"
#include "tests/expect_error.hpp"
#include "tilewave/mla.hpp"

namespace tw::kernels::mla {
namespace {

using namespace tw::test;

class MlaBadInput : public BadInput {
 protected:
  void refused(const Tensor& of_q, const Tensor& of_kv, const PlacedTensor& of_o, std::initializer_list<std::string_view> parts,
               const MlaOptions& options = {}) {
    expect_error<InvalidArgument>([&] { tw::mla_decode(of_q, of_kv, of_o, options); }, parts);
    EXPECT_TRUE(of_o.untouched());
  }
  /// Of tensors that would do.
  void refused(std::initializer_list<std::string_view> parts, MlaOptions options) {
    options.check_contents = true;
    refused(q, kv, o, parts, options);
  }

  const PlacedTensor q = make({2, 1, 4, 576}), kv = make({2, 32, 576}), o = make({2, 1, 4, 512});
  const PlacedTensor seqlens = integers({5, 32}, {2}), table = integers({0, 1, 1, 0}, {2, 2});
};

INSTANTIATE_TEST_SUITE_P(Ops, MlaBadInput, testing::ValuesIn(kDevices), device_name);

TEST_P(MlaBadInput, Shapes) {
  refused(make({1, 4, 576}), kv, o, {"mla_decode", "q is bf16[1, 4, 576]", "[batch, seqlen_q, heads, 576]"});
  refused(make({2, 1, 4, 512}), kv, o, {"q is bf16[2, 1, 4, 512]", "576"});
  refused(q, kv, make({2, 1, 4, 576}), {"o is bf16[2, 1, 4, 576]", "bf16[2, 1, 4, 512]"});
  refused(q, make({2, 32, 512}), o, {"kv_cache is bf16[2, 32, 512]", "[batch, capacity, 576]"});
  refused(q, make({2, 32, 1, 576}), o, {"kv_cache is bf16[2, 32, 1, 576]", "[batch, capacity, 576]"});
  refused(q, make({3, 32, 576}), o, {"kv_cache is bf16[3, 32, 576]", "[2, capacity, 576]"});
  refused(q, PlacedTensor({2, 32, 576}, DType::bf16, device, {.step = 2}), o, {"kv_cache is", "stride 2", "contiguous"});
  refused(PlacedTensor({2, 1, 4, 576}, DType::bf16, device, {.step = 2}), kv, o, {"q is", "stride 2", "contiguous"});
}

TEST_P(MlaBadInput, CachesOfEightBits) {
  const PlacedTensor f16_q = make({2, 1, 4, 576}, DType::f16), f16_o = make({2, 1, 4, 512}, DType::f16);
  const Tensor bytes = Tensor::zeros({2, 32, 656}, DType::u8, Stream::standard(device));
  refused(f16_q, bytes, f16_o, {"kv_cache is u8[2, 32, 656]", "bf16", "f16"});
  refused(q, Tensor::zeros({2, 32, 576}, DType::u8, Stream::standard(device)), o, {"kv_cache is u8[2, 32, 576]", "656"});
  const Tensor odd = Tensor::borrow(static_cast<char*>(bytes.data()) + 8, {2, 31, 656}, DType::u8, device, {32 * 656, 656, 1});
  refused(q, odd, o, {"kv_cache is u8[2, 31, 656]", "multiples of 16 bytes"});
}

TEST_P(MlaBadInput, Dtypes) {
  refused(make({2, 1, 4, 576}, DType::f32), kv, o, {"q is f32[2, 1, 4, 576]", "bf16 and f16"});
  refused(q, make({2, 32, 576}, DType::f16), o, {"kv_cache is f16[2, 32, 576]", "bf16"});
  refused(q, kv, make({2, 1, 4, 512}, DType::f32), {"o is f32[2, 1, 4, 512]", "bf16"});
  refused({"seqlens is f32[2]", "i32"}, {.seqlens = &make({2}, DType::f32).tensor()});
  refused({"block_table is f32[2, 2]", "i32"}, {.block_table = &make({2, 2}, DType::f32).tensor()});
  refused({"lse is bf16[2, 4, 1]", "f32"}, {.lse = &make({2, 4, 1}).tensor()});
}

TEST_P(MlaBadInput, Options) {
  refused({"lse is f32[2, 1, 4]", "f32[2, 4, 1]"}, {.lse = &make({2, 1, 4}, DType::f32).tensor()});
  refused({"scale is -1", "positive"}, {.scale = -1});
  refused({"scale is nan", "positive"}, {.scale = std::numeric_limits<float>::quiet_NaN()});
  refused({"num_splits is 129", "1 to 128"}, {.num_splits = 129});
  refused({"num_splits is -1", "1 to 128"}, {.num_splits = -1});
  refused({"max_seqlen is -1", "positive"}, {.max_seqlen = -1});
  refused({"seqlens is i32[3]", "i32[2]"}, {.seqlens = &integers({1, 2, 3}, {3}).tensor()});
  refused({"block_table is i32[1, 2]", "i32[2, pages]"}, {.block_table = &integers({1, 0}, {1, 2}).tensor()});
}

TEST_P(MlaBadInput, Memory) {
  const PlacedTensor memory = make({2, 1, 4, 576});
  const Tensor over_o = Tensor::borrow(o.tensor().data(), {2, 4, 1}, DType::f32, device);
  refused({"lse is", "shares memory with o"}, {.lse = &over_o});
  expect_error<InvalidArgument>([&] { tw::mla_decode(memory, kv, memory.tensor().slice(3, 0, 512)); }, {"o is", "shares memory with q"});
  EXPECT_TRUE(memory.untouched());
  const PlacedTensor apart({2, 5, 576}, DType::bf16, device, {.gap = 3});
  refused(q, apart, o, {"kv_cache is bf16[2, 5, 576]", "whole number of tokens apart"}, {.block_table = &table.tensor()});
}

TEST_P(MlaBadInput, Contents) {
  refused({"seqlens[1] is 33", "0 to 32", "kv_cache holds"}, {.seqlens = &integers({5, 33}, {2}).tensor()});
  refused({"seqlens[0] is -1", "0 to 32"}, {.seqlens = &integers({-1, 3}, {2}).tensor()});
  refused({"seqlens[1] is 65", "0 to 64", "block_table"}, {.seqlens = &integers({5, 65}, {2}).tensor(), .block_table = &table.tensor()});
  refused({"block_table[1, 0] is 2", "0 to 1", "a page of kv_cache"}, {.block_table = &integers({0, 1, 2, 0}, {2, 2}).tensor()});
  refused({"block_table[0, 1] is -1", "0 to 1"},
          {.seqlens = &integers({33, 0}, {2}).tensor(), .block_table = &integers({0, -1, 2, 0}, {2, 2}).tensor()});
}

class MlaSparseBadInput : public BadInput {
 protected:
  void refused(const Tensor& of_q, const Tensor& of_kv, const Tensor& of_indices, const PlacedTensor& of_o,
               std::initializer_list<std::string_view> parts, const MlaSparseOptions& options = {}) {
    expect_error<InvalidArgument>([&] { tw::mla_sparse(of_q, of_kv, of_indices, of_o, options); }, parts);
    EXPECT_TRUE(of_o.untouched());
  }
  /// Of tensors that would do.
  void refused(std::initializer_list<std::string_view> parts, const MlaSparseOptions& options) {
    refused(q, kv, indices, o, parts, options);
  }

  const PlacedTensor q = make({2, 4, 576}), kv = make({32, 576}), o = make({2, 4, 512});
  const PlacedTensor indices = integers({5, -1, 31, 0, 0, 7}, {2, 3});
};

INSTANTIATE_TEST_SUITE_P(Ops, MlaSparseBadInput, testing::ValuesIn(kDevices), device_name);

TEST_P(MlaSparseBadInput, Shapes) {
  refused(make({2, 1, 4, 576}), kv, indices, o, {"mla_sparse", "q is bf16[2, 1, 4, 576]", "[tokens, heads, 576]"});
  refused(make({2, 4, 512}), kv, indices, o, {"q is bf16[2, 4, 512]", "576"});
  refused(q, kv, indices, make({2, 4, 576}), {"o is bf16[2, 4, 576]", "bf16[2, 4, 512]"});
  refused(q, make({576}), indices, o, {"kv is bf16[576]", "[kv_tokens, columns]"});
  refused(q, make({32, 512}), indices, o, {"kv is bf16[32, 1, 512]", "576"});
  refused(q, make({2, 16, 1, 576}), indices, o, {"kv is bf16[2, 16, 1, 576]", "[pages, page_size, columns]"});
  refused(q, kv, integers({1, 2, 3}, {1, 3}), o, {"indices is i32[1, 3]", "i32[2, topk]"});
  refused(q, kv, integers({1, 2}, {2}), o, {"indices is i32[2]", "i32[2, topk]"});
  refused(PlacedTensor({2, 4, 576}, DType::bf16, device, {.step = 2}), kv, indices, o, {"q is", "stride 2", "contiguous"});
  refused(q, kv, PlacedTensor({2, 3}, DType::i32, device, {.step = 2}), o, {"indices is", "stride 2", "contiguous"});
}

TEST_P(MlaSparseBadInput, Dtypes) {
  refused(make({2, 4, 576}, DType::f32), kv, indices, o, {"q is f32[2, 4, 576]", "bf16 and f16"});
  refused(q, make({32, 576}, DType::f16), indices, o, {"kv is f16[32, 1, 576]", "bf16"});
  refused(q, kv, make({2, 3}, DType::f32), o, {"indices is f32[2, 3]", "i32"});
  refused(q, kv, indices, make({2, 4, 512}, DType::f32), {"o is f32[2, 4, 512]", "bf16"});
  refused(make({2, 4, 576}, DType::f16), Tensor::zeros({32, 656}, DType::u8, Stream::standard(device)), indices,
          make({2, 4, 512}, DType::f16), {"kv is u8[32, 1, 656]", "bf16", "f16"});
}

TEST_P(MlaSparseBadInput, Options) {
  refused({"scale is -1", "positive"}, {.scale = -1});
  refused({"num_splits is 129", "1 to 128"}, {.num_splits = 129});
  refused({"topk_length is i32[3]", "i32[2]"}, {.topk_length = &integers({1, 2, 3}, {3}).tensor()});
  refused({"topk_length is f32[2]", "i32"}, {.topk_length = &make({2}, DType::f32).tensor()});
  refused({"sink is bf16[4]", "f32"}, {.sink = &make({4}).tensor()});
  refused({"sink is f32[2]", "f32[4]"}, {.sink = &make({2}, DType::f32).tensor()});
  refused({"lse is f32[4, 2]", "f32[2, 4]"}, {.lse = &make({4, 2}, DType::f32).tensor()});
  refused({"max_logits is f32[8]", "f32[2, 4]"}, {.max_logits = &make({8}, DType::f32).tensor()});
}

TEST_P(MlaSparseBadInput, Memory) {
  const Tensor over_o = Tensor::borrow(o.tensor().data(), {2, 4}, DType::f32, device);
  refused({"lse is", "shares memory with o"}, {.lse = &over_o});
  const PlacedTensor once = make({2, 4}, DType::f32);
  refused({"max_logits is", "shares memory with lse"}, {.lse = &once.tensor(), .max_logits = &once.tensor()});
  const PlacedTensor memory = make({2, 4, 576});
  expect_error<InvalidArgument>([&] { tw::mla_sparse(memory, kv, indices, memory.tensor().slice(2, 0, 512)); },
                                {"o is", "shares memory with q"});
  EXPECT_TRUE(memory.untouched());
  const PlacedTensor apart({2, 16, 576}, DType::bf16, device, {.gap = 3});
  refused(q, apart, indices, o, {"kv is bf16[2, 16, 576]", "whole number of tokens apart"});
}

}  // namespace
}  // namespace tw::kernels::mla
