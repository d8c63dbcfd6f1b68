// What the functions of native sparse attention refuse, and what they say.

#include <gtest/gtest.h>

#include <array>
#include <limits>
#include <vector>

#include "runtime/format.hpp"
#include "tests/bad_input.hpp"
#include "tests/expect_error.hpp"
#include "tilewave/nsa.hpp"

namespace tw::kernels::nsa {
namespace {

using namespace tw::test;

class NsaBadInput : public BadInput {
 protected:
  using Parts = std::initializer_list<std::string_view>;
  void refused(const Tensor& of_q, const Tensor& of_k, const Tensor& of_v, const Tensor& lists, const PlacedTensor& of_o, Parts parts,
               const NsaOptions& options = {}) {
    expect_error<InvalidArgument>([&] { nsa_selected(of_q, of_k, of_v, lists, of_o, options); }, parts);
    EXPECT_TRUE(of_o.untouched());
  }
  void refused(Parts parts, const NsaOptions& options) { refused(q, k, v, indices, o, parts, options); }
  void compressed_refused(Parts parts, const NsaOptions& options) {
    expect_error<InvalidArgument>([&] { nsa_compressed(q, k, v, o, options); }, parts);
    EXPECT_TRUE(o.untouched());
  }

  const PlacedTensor q = make({1, 6, 4, 64}), k = make({1, 6, 2, 64}), v = make({1, 6, 2, 32}), o = make({1, 6, 4, 32});
  const PlacedTensor indices = integers(std::vector<float>(36), {1, 6, 2, 3}), counts = integers(std::vector<float>(12), {1, 6, 2}),
                     offsets = integers({0, 2, 6}, {3}), seqlens = integers({6}, {1});
};

INSTANTIATE_TEST_SUITE_P(Ops, NsaBadInput, testing::ValuesIn(kDevices), device_name);

TEST_P(NsaBadInput, Shapes) {
  refused(make({6, 4, 64}), k, v, indices, o, {"nsa_selected", "q is bf16[6, 4, 64]", "[batch, seqlen, heads, head_dim]"});
  refused(make({1, 6, 4, 60}), k, v, indices, o, {"q is bf16[1, 6, 4, 60]", "multiple of 8 up to 128"});
  refused(make({1, 6, 4, 136}), k, v, indices, o, {"q is bf16[1, 6, 4, 136]", "128"});
  refused(q, make({2, 6, 2, 64}), v, indices, o, {"k is bf16[2, 6, 2, 64]", "bf16[1, keys, kv_heads, 64]"});
  refused(q, make({1, 6, 3, 64}), v, indices, o, {"q is bf16[1, 6, 4, 64]", "1 to 64 times"});
  refused(make({1, 6, 130, 64}), k, v, indices, make({1, 6, 130, 32}), {"q is bf16[1, 6, 130, 64]", "1 to 64 times"});
  refused(q, k, make({1, 5, 2, 32}), indices, o, {"v is bf16[1, 5, 2, 32]", "bf16[1, 6, 2, value_dim]"});
  refused(q, k, make({1, 6, 2, 36}), indices, o, {"v is bf16[1, 6, 2, 36]", "multiple of 8"});
  refused(q, k, v, integers({0, 0}, {1, 1, 2, 1}), o, {"block_indices is i32[1, 1, 2, 1]", "i32[1, 6, 2, slots]"});
  refused(q, k, v, integers(std::vector<float>(12 * 257), {1, 6, 2, 257}), o, {"block_indices is i32[1, 6, 2, 257]", "256 slots"});
  refused(q, k, v, indices, make({1, 6, 4, 64}), {"o is bf16[1, 6, 4, 64]", "bf16[1, 6, 4, 32]"});
  refused(PlacedTensor({1, 6, 4, 64}, DType::bf16, device, {.step = 2}), k, v, indices, o, {"q is", "stride 2", "contiguous"});
}

TEST_P(NsaBadInput, Dtypes) {
  refused(make({1, 6, 4, 64}, DType::i8), k, v, indices, o, {"q is i8[1, 6, 4, 64]", "bf16 and f16"});
  refused(q, make({1, 6, 2, 64}, DType::f16), v, indices, o, {"k is f16[1, 6, 2, 64]", "bf16"});
  refused(q, k, v, make({1, 6, 2, 3}, DType::i64), o, {"block_indices is i64[1, 6, 2, 3]", "i32"});
  if (device.is_cuda())
    refused(make({1, 6, 4, 64}, DType::f32), make({1, 6, 2, 64}, DType::f32), make({1, 6, 2, 32}, DType::f32), indices,
            make({1, 6, 4, 32}, DType::f32), {"q is f32[1, 6, 4, 64]", "CPU only"});
}

TEST_P(NsaBadInput, Options) {
  for (const int size : {0, 16, 33, 96, -64, 8192})
    refused({tw::format("block_size is {}", size), "32, or a multiple of 64"}, {.block_size = size});
  refused({"scale is -1", "positive"}, {.scale = -1});
  refused({"scale is inf"}, {.scale = std::numeric_limits<float>::infinity()});
  const PlacedTensor few = integers({0, 0}, {2}), long_lse = make({1, 6, 5}, DType::f32);
  refused({"block_counts is i32[2]", "i32[1, 6, 2]"}, {.block_counts = &few.tensor()});
  refused({"seqlens is i32[2]", "i32[1]"}, {.seqlens = &few.tensor()});
  refused({"lse is f32[1, 6, 5]", "f32[1, 6, 4]"}, {.lse = &long_lse.tensor()});
  refused({"cu_seqlens and seqlens are given"}, {.cu_seqlens = &offsets.tensor(), .seqlens = &seqlens.tensor()});
  refused({"cu_seqlens_k", "no cu_seqlens"}, {.cu_seqlens_k = &offsets.tensor()});
  refused({"cu_seqlens_k is for compressed keys"}, {.cu_seqlens = &offsets.tensor(), .cu_seqlens_k = &offsets.tensor()});
  refused(make({2, 3, 4, 64}), make({2, 3, 2, 64}), make({2, 3, 2, 32}), integers(std::vector<float>(12), {2, 3, 2, 1}),
          make({2, 3, 4, 32}), {"q is bf16[2, 3, 4, 64]", "batch must be 1"}, {.cu_seqlens = &offsets.tensor()});
  refused(q, make({1, 7, 2, 64}), make({1, 7, 2, 32}), indices, o, {"k is bf16[1, 7, 2, 64]", "as many tokens"},
          {.cu_seqlens = &offsets.tensor()});
  compressed_refused({"nsa_compressed", "cu_seqlens is given but not cu_seqlens_k"}, {.cu_seqlens = &offsets.tensor()});
  compressed_refused({"block_counts are for keys that tokens select"}, {.block_counts = &counts.tensor()});
}

TEST_P(NsaBadInput, Selecting) {
  const PlacedTensor lse = make({1, 6, 4}, DType::f32), lists = integers(std::vector<float>(24), {1, 6, 2, 2});
  const auto select_refused = [&](const Tensor& of_lse, const Tensor& to, Parts parts, const NsaSelectOptions& options = {}) {
    expect_error<InvalidArgument>([&] { nsa_select(q, k, of_lse, to, options); }, parts);
  };
  select_refused(make({1, 6, 2}, DType::f32), lists, {"nsa_select", "lse is f32[1, 6, 2]", "f32[1, 6, 4]"});
  select_refused(lse, integers({0}, {1, 1, 1, 1}), {"block_indices is i32[1, 1, 1, 1]", "i32[1, 6, 2, slots]"});
  select_refused(lse, lists, {"initial_blocks is -1 and local_blocks 2"}, {.initial_blocks = -1});
  select_refused(lse, lists, {"block_size is 1"}, {.block_size = 1});
}

TEST_P(NsaBadInput, Gradients) {
  const PlacedTensor lse = make({1, 6, 4}, DType::f32), dq = make({1, 6, 4, 64}), dk = make({1, 6, 2, 64}), dv = make({1, 6, 2, 32});
  const auto backward_refused = [&](const Tensor& d_o, const Tensor& to, Parts parts, const NsaOptions& options = {}) {
    expect_error<InvalidArgument>([&] { nsa_selected_backward(q, k, v, indices, o, lse, d_o, dq, dk, to, options); }, parts);
    EXPECT_TRUE(dq.untouched());
    EXPECT_TRUE(dk.untouched());
  };
  backward_refused(make({1, 6, 4, 64}), dv, {"nsa_selected_backward", "d_o is bf16[1, 6, 4, 64]", "bf16[1, 6, 4, 32]"});
  backward_refused(o, make({1, 6, 2, 64}), {"dv is bf16[1, 6, 2, 64]", "bf16[1, 6, 2, 32]"});
  backward_refused(o, dv, {"seqlens is given", "not in a cache"}, {.seqlens = &seqlens.tensor()});
}

TEST_P(NsaBadInput, Combining) {
  const PlacedTensor gates = make({1, 6, 4}), few = make({1, 6, 2}), of_f32 = make({1, 6, 4}, DType::f32);
  const auto combine_refused = [&](std::array<const Tensor*, 3> outputs, std::array<const Tensor*, 3> of_gates, Parts parts) {
    expect_error<InvalidArgument>([&] { nsa_combine(o, outputs, of_gates); }, parts);
    EXPECT_TRUE(o.untouched());
  };
  const PlacedTensor x = make({1, 6, 4, 32});
  combine_refused({&q.tensor()}, {&gates.tensor()}, {"nsa_combine", "outputs[0] is bf16[1, 6, 4, 64]", "o's shape"});
  combine_refused({&x.tensor()}, {nullptr}, {"outputs[0]", "no gates[0]"});
  combine_refused({nullptr, &x.tensor()}, {nullptr, &few.tensor()}, {"gates[1] is bf16[1, 6, 2]", "[1, 6, 4]"});
  combine_refused({&x.tensor(), nullptr, &x.tensor()}, {&of_f32.tensor(), nullptr, &gates.tensor()}, {"gates[2]", "one dtype"});
}

}  // namespace
}  // namespace tw::kernels::nsa
