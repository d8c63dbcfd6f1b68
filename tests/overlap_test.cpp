// What operations do about operands that share memory: kernels/check.hpp.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "kernels/check.hpp"
#include "runtime/format.hpp"
#include "tests/expect_error.hpp"
#include "tests/support.hpp"
#include "tilewave/attention.hpp"
#include "tilewave/bitnet.hpp"
#include "tilewave/block_sparse_gemm.hpp"
#include "tilewave/cast_fp8.hpp"
#include "tilewave/causal_conv1d.hpp"
#include "tilewave/convolution.hpp"
#include "tilewave/elementwise.hpp"
#include "tilewave/embedding.hpp"
#include "tilewave/gated_delta.hpp"
#include "tilewave/gemm.hpp"
#include "tilewave/grouped_gemm.hpp"
#include "tilewave/hadamard.hpp"
#include "tilewave/indexer.hpp"
#include "tilewave/linear_attention.hpp"
#include "tilewave/log_mel.hpp"
#include "tilewave/mamba2.hpp"
#include "tilewave/mamba2_chunks.hpp"
#include "tilewave/mla.hpp"
#include "tilewave/moe.hpp"
#include "tilewave/norm.hpp"
#include "tilewave/nsa.hpp"
#include "tilewave/reduce.hpp"
#include "tilewave/rope.hpp"
#include "tilewave/softmax.hpp"
#include "tilewave/sparse_gemm.hpp"
#include "tilewave/swiglu.hpp"
#include "tilewave/topk.hpp"
#include "tilewave/transpose.hpp"
#include "tilewave/vertical_slash.hpp"

namespace tw::test {
namespace {

/// A view's bytes, as offsets from `base`; each as often as elements have it.
std::vector<std::int64_t> bytes_of(const Tensor& t, const void* base) {
  std::vector<std::int64_t> bytes;
  const std::int64_t size = static_cast<std::int64_t>(size_of(t.dtype()));
  const std::int64_t first = static_cast<char*>(t.data()) - static_cast<const char*>(base);
  for (std::int64_t n = 0; n < t.numel(); ++n) {
    std::int64_t rest = n, offset = 0;
    for (int dim = t.rank() - 1; dim >= 0; --dim) {
      offset += rest % t.shape(dim) * t.stride(dim);
      rest /= t.shape(dim);
    }
    for (std::int64_t byte = 0; byte < size; ++byte) bytes.push_back(first + offset * size + byte);
  }
  return bytes;
}

TEST(SharedMemory, IsThatOfTheBytes) {
  std::mt19937_64 random = random_engine();
  const auto pick = [&](std::int64_t from, std::int64_t to) { return std::uniform_int_distribution<std::int64_t>(from, to)(random); };
  alignas(8) static char memory[1];  // only addresses are computed
  const auto view = [&] {
    const DType dtype = std::vector{DType::u8, DType::bf16, DType::f32, DType::i64}[static_cast<std::size_t>(pick(0, 3))];
    const int rank = static_cast<int>(pick(0, 4));
    Shape shape;
    std::vector<std::int64_t> strides;
    for (int dim = 0; dim < rank; ++dim) {
      shape.push_back(pick(0, 20) == 0 ? 0 : pick(1, 5));
      strides.push_back(pick(0, 2) == 0 ? pick(-20, 20) : pick(0, 3) * pick(1, 4) * 3);
    }
    const std::int64_t offset = pick(-40, 40) * static_cast<std::int64_t>(size_of(dtype));
    return Tensor::borrow(memory + offset, shape, dtype, Device::cpu(), strides);
  };
  int shared = 0, apart = 0, crossing = 0, distinct = 0;
  for (int n = 0; n < random_cases(20000); ++n) {
    const Tensor a = view(), b = view();
    const std::vector<std::int64_t> of_a = bytes_of(a, memory), of_b = bytes_of(b, memory);
    const std::set<std::int64_t> set(of_a.begin(), of_a.end());
    const bool share = std::any_of(of_b.begin(), of_b.end(), [&](std::int64_t byte) { return set.contains(byte); });
    ASSERT_EQ(share_memory(a, b), share) << tw::format("{} [{}] and {} [{}]", a, tw::join(a.strides(), ", "), b,
                                                       tw::join(b.strides(), ", "))
                                         << " " << static_cast<char*>(b.data()) - static_cast<char*>(a.data());
    ++(share ? shared : apart);
    bool refused = false;
    try {
      check_output("op", "a", a);
    } catch (const InvalidArgument&) {
      refused = true;
    }
    ASSERT_EQ(refused, set.size() != of_a.size()) << tw::format("{} [{}]", a, tw::join(a.strides(), ", "));
    ++(refused ? crossing : distinct);
  }
  EXPECT_GT(std::min({shared, apart, crossing, distinct}), random_cases(1000));
}

TEST(SharedMemory, IsFoundInLargeTensorsToo) {
  alignas(8) static char memory[1];
  const auto view = [&](std::int64_t offset, Shape shape, std::vector<std::int64_t> strides, DType dtype = DType::bf16) {
    return Tensor::borrow(memory + offset * 2, std::move(shape), dtype, Device::cpu(), std::move(strides));
  };
  // The parts of one [batch, seqlen, 3, heads, dim] tensor, and its transposed views.
  const std::vector<std::int64_t> strides{4096 * 3 * 32 * 128, 3 * 32 * 128, 128, 1};
  const Tensor q = view(0, {8, 4096, 32, 128}, strides), k = view(32 * 128, {8, 4096, 32, 128}, strides);
  EXPECT_FALSE(share_memory(q, k));
  EXPECT_FALSE(share_memory(q.transpose(1, 2), k));
  EXPECT_TRUE(share_memory(q, view(32 * 128 - 1, {8, 4096, 32, 128}, strides)));
  EXPECT_TRUE(share_memory(q.select(0, 7).select(0, 4095), q.transpose(0, 3)));
  // Strides without a common pattern: one byte in common, or none.
  EXPECT_TRUE(share_memory(view(0, {1000, 1000}, {100003, 7}), view(999 * 100003 + 500 * 7, {1}, {1})));
  EXPECT_FALSE(share_memory(view(0, {1000, 1000}, {100003, 7}), view(999 * 100003 + 500 * 7 + 1, {1}, {1})));
  // Claims of more than any memory holds end in an answer.
  EXPECT_TRUE(
      share_memory(view(0, {1 << 30, 1 << 30}, {1 << 30, (1 << 30) - 1}, DType::u8), view(5, {1 << 30, 1 << 30}, {1 << 30, 3}, DType::u8)));
  EXPECT_FALSE(share_memory(Tensor(), Tensor()));
}

/// An operand of an operation under test.
struct Operand {
  const char* name;
  Shape shape;
  DType dtype = DType::f32;
  bool written = false;
  const char* in_place = "";  ///< operands that may be this output's memory, as the header says
};
using Operands = std::vector<Tensor>;

struct Operation {
  const char* name;
  std::vector<Operand> operands;
  std::function<void(const Operands&)> call;
};

const DType kF32 = DType::f32, kI32 = DType::i32, kFp8 = DType::fp8_e4m3;

std::vector<Operation> all_operations() {
  std::vector<Operation> all;
  all.push_back({"gemm",
                 {{"a", {3, 5}}, {"b", {5, 4}}, {"d", {3, 4}, kF32, true, "residual"}, {"bias", {4}}, {"residual", {3, 4}}},
                 [](const Operands& t) { gemm(t[0], t[1], t[2], {.bias = &t[3], .residual = &t[4]}); }});
  all.push_back({"gemm",
                 {{"a", {3, 128}, kFp8}, {"b", {128, 4}, kFp8}, {"d", {3, 4}, DType::bf16, true}, {"a_scale", {3, 1}}, {"b_scale", {1, 1}}},
                 [](const Operands& t) { gemm(t[0], t[1], t[2], {.a_scale = &t[3], .b_scale = &t[4]}); }});
  all.push_back({"grouped_gemm",
                 {{"a", {3, 5}}, {"b", {2, 5, 4}}, {"offsets", {3}, kI32}, {"d", {3, 4}, kF32, true}, {"bias", {2, 4}}},
                 [](const Operands& t) { grouped_gemm(t[0], t[1], t[2], t[3], {.bias = &t[4]}); }});
  all.push_back({"k_grouped_gemm",
                 {{"a", {3, 5}}, {"b", {5, 4}}, {"offsets", {3}, kI32}, {"d", {2, 3, 4}, kF32, true}},
                 [](const Operands& t) { k_grouped_gemm(t[0], t[1], t[2], t[3]); }});
  const DType half = DType::f16, bytes = DType::u8;
  // Every group's first two columns: zeros would be refused.
  const auto matrix = [](const Tensor& values, const Tensor& metadata) {
    std::fill_n(metadata.data<std::uint8_t>(), metadata.numel(), std::uint8_t{0x44});
    return SparseMatrix{values, metadata};
  };
  all.push_back({"prune_2_4", {{"x", {3, 8}, half}, {"y", {3, 8}, half, true, "x"}}, [](const Operands& t) { prune_2_4(t[0], t[1]); }});
  all.push_back({"compress_2_4",
                 {{"dense", {3, 8}, half}, {"values", {3, 4}, half, true}, {"metadata", {1, 2, 128}, bytes, true}},
                 [](const Operands& t) {
                   compress_2_4(t[0], {t[1], t[2]});
                 }});
  all.push_back({"decompress_2_4",
                 {{"values", {3, 4}, half}, {"metadata", {1, 2, 128}, bytes}, {"dense", {3, 8}, half, true}},
                 [=](const Operands& t) { decompress_2_4(matrix(t[0], t[1]), t[2]); }});
  all.push_back({"sparse_gemm",
                 {{"values", {3, 4}, half},
                  {"metadata", {1, 2, 128}, bytes},
                  {"b", {8, 5}, half},
                  {"d", {3, 5}, half, true, "residual"},
                  {"bias", {5}, half},
                  {"residual", {3, 5}, half}},
                 [=](const Operands& t) { sparse_gemm(matrix(t[0], t[1]), t[2], t[3], {.bias = &t[4], .residual = &t[5]}); }});
  all.push_back({"sparse_linear",
                 {{"x", {5, 8}, half},
                  {"values", {3, 4}, half},
                  {"metadata", {1, 2, 128}, bytes},
                  {"y", {5, 3}, half, true, "residual"},
                  {"bias", {3}, half},
                  {"residual", {5, 3}, half}},
                 [=](const Operands& t) { sparse_linear(t[0], matrix(t[1], t[2]), t[3], {.bias = &t[4], .residual = &t[5]}); }});
  all.push_back({"block_sparse_gemm",
                 {{"a", {3, 8}, half},
                  {"b", {8, 5}, half},
                  {"d", {3, 5}, half, true},
                  {"bias", {5}, half},
                  {"a_mask", {1, 1}, bytes},
                  {"b_mask", {1, 1}, bytes},
                  {"d_mask", {1, 1}, bytes},
                  {"product_mask", {1, 1, 1}, bytes}},
                 [](const Operands& t) {
                   block_sparse_gemm(t[0], t[1], t[2],
                                     {.a_mask = &t[4], .b_mask = &t[5], .d_mask = &t[6], .product_mask = &t[7], .bias = &t[3]});
                 }});
  all.push_back(
      {"add", {{"a", {3, 4}}, {"b", {3, 4}}, {"y", {3, 4}, kF32, true, "a b"}}, [](const Operands& t) { add(t[0], t[1], t[2]); }});
  all.push_back({"mul", {{"a", {3, 4}}, {"b", {1, 4}}, {"y", {3, 4}, kF32, true, "a"}}, [](const Operands& t) { mul(t[0], t[1], t[2]); }});
  all.push_back({"silu", {{"x", {3, 4}}, {"y", {3, 4}, kF32, true, "x"}}, [](const Operands& t) { silu(t[0], t[1]); }});
  all.push_back({"gelu_erf", {{"x", {3, 4}}, {"y", {3, 4}, kF32, true, "x"}}, [](const Operands& t) { gelu_erf(t[0], t[1]); }});
  all.push_back({"gelu_tanh", {{"x", {3, 4}}, {"y", {3, 4}, kF32, true, "x"}}, [](const Operands& t) { gelu_tanh(t[0], t[1]); }});
  all.push_back({"cast", {{"x", {3, 4}}, {"y", {3, 4}, kI32, true, "x"}}, [](const Operands& t) { cast(t[0], t[1]); }});
  all.push_back({"cast", {{"x", {3, 4}}, {"y", {3, 4}, DType::bf16, true}}, [](const Operands& t) { cast(t[0], t[1]); }});
  all.push_back({"softmax", {{"x", {3, 4}}, {"y", {3, 4}, kF32, true, "x"}}, [](const Operands& t) { softmax(t[0], t[1]); }});
  all.push_back({"hadamard", {{"x", {3, 4}}, {"y", {3, 4}, kF32, true, "x"}, {"factors", {4}}}, [](const Operands& t) {
                   hadamard(t[0], t[1], {.factors = &t[2]});
                 }});
  all.push_back({"layer_norm",
                 {{"x", {3, 4}},
                  {"y", {3, 4}, kF32, true, "x residual"},
                  {"weight", {4}},
                  {"bias", {4}},
                  {"residual", {3, 4}},
                  {"sum", {3, 4}, kF32, true, "x residual"}},
                 [](const Operands& t) { layer_norm(t[0], t[1], {.weight = &t[2], .bias = &t[3], .residual = &t[4], .sum = &t[5]}); }});
  all.push_back({"rms_norm", {{"x", {3, 4}}, {"y", {3, 4}, kF32, true, "x"}, {"weight", {4}}}, [](const Operands& t) {
                   rms_norm(t[0], t[1], {.weight = &t[2]});
                 }});
  all.push_back({"rope",
                 {{"x", {2, 3, 2, 4}}, {"cos", {5, 2}}, {"sin", {5, 2}}, {"y", {2, 3, 2, 4}, kF32, true, "x"}, {"positions", {2, 3}, kI32}},
                 [](const Operands& t) { rope(t[0], t[1], t[2], t[3], {.positions = &t[4]}); }});
  all.push_back({"rope",
                 {{"x", {2, 3, 2, 4}}, {"cos", {5, 2}}, {"sin", {5, 2}}, {"y", {2, 3, 2, 4}, kF32, true, "x"}, {"offsets", {2}, kI32}},
                 [](const Operands& t) { rope(t[0], t[1], t[2], t[3], {.offsets = &t[4]}); }});
  all.push_back({"rope_table", {{"cos", {5, 2}, kF32, true}, {"sin", {5, 2}, kF32, true}, {"positions", {5}, kI32}}, [](const Operands& t) {
                   rope_table(t[0], t[1], {.positions = &t[2]});
                 }});
  all.push_back({"swiglu", {{"gate", {3, 4}}, {"up", {3, 4}}, {"y", {3, 4}, kF32, true, "gate up"}}, [](const Operands& t) {
                   swiglu(t[0], t[1], t[2]);
                 }});
  all.push_back(
      {"swiglu_interleaved", {{"x", {3, 8}}, {"y", {3, 4}, kF32, true}}, [](const Operands& t) { swiglu_interleaved(t[0], t[1]); }});
  all.push_back({"reduce", {{"x", {3, 4}}, {"y", {3}, kF32, true}}, [](const Operands& t) { reduce(Reduction::sum, t[0], t[1]); }});
  all.push_back({"transpose", {{"x", {3, 4}}, {"y", {4, 3}, kF32, true}}, [](const Operands& t) { transpose(t[0], t[1]); }});
  all.push_back({"embedding", {{"table", {7, 4}}, {"ids", {3}, DType::i64}, {"y", {3, 4}, kF32, true}}, [](const Operands& t) {
                   embedding(t[0], t[1], t[2]);
                 }});
  all.push_back({"log_mel", {{"samples", {1, 960}}, {"features", {1, 6, 5}, kF32, true}}, [](const Operands& t) {
                   const Stream cpu = Stream::standard(Device::cpu());
                   log_mel(t[0], LogMelTables::make(Tensor::zeros({5, 201}, DType::f32, cpu), cpu), t[1]);
                 }});
  all.push_back({"argmax",
                 {{"x", {3, 4}}, {"indices", {3}, kI32, true}, {"values", {3}, kF32, true}, {"workspace", {64}, DType::i64, true}},
                 [](const Operands& t) { argmax(t[0], t[1], {.values = &t[2], .workspace = &t[3]}); }});
  all.push_back({"topk",
                 {{"x", {3, 4}},
                  {"values", {3, 2}, kF32, true},
                  {"indices", {3, 2}, DType::i64, true},
                  {"starts", {3}, kI32},
                  {"ends", {3}, kI32},
                  {"workspace", {64}, DType::i64, true}},
                 [](const Operands& t) { topk(t[0], 2, t[1], t[2], {.starts = &t[3], .ends = &t[4], .workspace = &t[5]}); }});
  all.push_back({"moe_route",
                 {{"logits", {3, 8}}, {"weights", {3, 2}, kF32, true}, {"experts", {3, 2}, kI32, true}, {"bias", {8}}},
                 [](const Operands& t) { moe_route(t[0], t[1], t[2], {.bias = &t[3]}); }});
  all.push_back({"moe_permutation",
                 {{"experts", {3, 2}, kI32}, {"offsets", {5}, kI32, true}, {"rows", {6}, kI32, true}, {"places", {3, 2}, kI32, true}},
                 [](const Operands& t) { moe_permutation(t[0], 4, t[1], t[2], t[3]); }});
  all.push_back({"moe_dispatch", {{"x", {3, 4}}, {"places", {3, 2}, kI32}, {"y", {6, 4}, kF32, true}}, [](const Operands& t) {
                   moe_dispatch(t[0], t[1], t[2]);
                 }});
  all.push_back({"moe_combine",
                 {{"y", {6, 4}}, {"places", {3, 2}, kI32}, {"weights", {3, 2}}, {"out", {3, 4}, kF32, true, "addend"}, {"addend", {3, 4}}},
                 [](const Operands& t) { moe_combine(t[0], t[1], t[2], t[3], {.addend = &t[4]}); }});
  all.push_back({"moe_experts",
                 {{"x", {3, 4}},
                  {"weights", {3, 2}},
                  {"experts", {3, 2}, kI32},
                  {"w_gate_up", {5, 6, 4}},
                  {"w_down", {5, 4, 3}},
                  {"out", {3, 4}, kF32, true, "addend"},
                  {"shared_gate_up", {2, 4}},
                  {"shared_down", {4, 1}},
                  {"addend", {3, 4}}},
                 [](const Operands& t) {
                   moe_experts(t[0], t[1], t[2], t[3], t[4], t[5], {.shared_gate_up = &t[6], .shared_down = &t[7], .addend = &t[8]});
                 }});
  all.push_back(
      {"fused_moe",
       {{"x", {3, 4}}, {"logits", {3, 5}}, {"w_gate_up", {5, 6, 4}}, {"w_down", {5, 4, 3}}, {"out", {3, 4}, kF32, true}, {"bias", {5}}},
       [](const Operands& t) { fused_moe(t[0], t[1], 2, t[2], t[3], t[4], {.route = {.bias = &t[5]}}); }});
  const DType i8 = DType::i8, u8 = DType::u8;
  all.push_back({"quantize_activations", {{"x", {3, 8}}, {"values", {3, 8}, i8, true}, {"scales", {3}, kF32, true}}, [](const Operands& t) {
                   quantize_activations(t[0], t[1], t[2]);
                 }});
  all.push_back(
      {"quantize_ternary", {{"weight", {3, 8}}, {"values", {3, 2}, u8, true}, {"scales", {3}, kF32, true}}, [](const Operands& t) {
         quantize_ternary(t[0], {t[1], t[2]});
       }});
  all.push_back({"unpack_ternary", {{"values", {3, 2}, u8}, {"scales", {3}}, {"out", {3, 8}, i8, true}}, [](const Operands& t) {
                   unpack_ternary({t[0], t[1]}, t[2]);
                 }});
  all.push_back({"ternary_gemm",
                 {{"values", {4, 8}, i8},
                  {"x_scales", {4}},
                  {"the weight's values", {3, 2}, u8},
                  {"the weight's scales", {3}},
                  {"y", {4, 3}, kF32, true},
                  {"bias", {3}}},
                 [](const Operands& t) {
                   ternary_gemm(t[0], t[1], {t[2], t[3]}, t[4], {.bias = &t[5]});
                 }});
  all.push_back(
      {"bit_linear",
       {{"x", {4, 8}}, {"the weight's values", {3, 2}, u8}, {"the weight's scales", {3}}, {"y", {4, 3}, kF32, true}, {"bias", {3}}},
       [](const Operands& t) {
         bit_linear(t[0], {t[1], t[2]}, t[3], {.bias = &t[4]});
       }});
  const Shape of_keys{2, 3, 1, 4}, of_values{2, 3, 2, 5}, of_states{2, 2, 4, 5}, of_gates{2, 3, 2};
  all.push_back({"linear_attention",
                 {{"q", of_keys},
                  {"k", of_keys},
                  {"v", of_values},
                  {"o", of_values, kF32, true},
                  {"g", of_gates},
                  {"final_state", of_states, kF32, true}},
                 [](const Operands& t) { linear_attention(t[0], t[1], t[2], t[3], {.g = &t[4], .final_state = &t[5]}); }});
  all.push_back(
      {"linear_attention_step",
       {{"q", of_keys}, {"k", of_keys}, {"v", of_values}, {"o", of_values, kF32, true}, {"state", of_states, kF32, true}, {"g", of_gates}},
       [](const Operands& t) { linear_attention_step(t[0], t[1], t[2], t[3], t[4], {.g = &t[5]}); }});
  all.push_back({"linear_attention_backward",
                 {{"q", of_keys},
                  {"k", of_keys},
                  {"v", of_values},
                  {"d_o", of_values},
                  {"dq", of_keys, kF32, true},
                  {"dk", of_keys, kF32, true},
                  {"dv", of_values, kF32, true},
                  {"g", of_gates},
                  {"initial_state", of_states},
                  {"d_final_state", of_states},
                  {"dg", of_gates, kF32, true},
                  {"d_initial_state", of_states, kF32, true}},
                 [](const Operands& t) {
                   linear_attention_backward(
                       t[0], t[1], t[2], t[3], t[4], t[5], t[6],
                       {.g = &t[7], .initial_state = &t[8], .d_final_state = &t[9], .dg = &t[10], .d_initial_state = &t[11]});
                 }});
  const Shape of_x{2, 3, 2, 5}, of_steps{2, 3, 2}, of_heads{2};
  all.push_back({"mamba2",
                 {{"x", of_x},
                  {"dt", of_steps},
                  {"A", of_heads},
                  {"B", of_keys},
                  {"C", of_keys},
                  {"y", of_x, kF32, true},
                  {"D", of_heads},
                  {"z", of_x},
                  {"dt_bias", of_heads},
                  {"final_states", {2, 2, 5, 4}, kF32, true}},
                 [](const Operands& t) {
                   mamba2(t[0], t[1], t[2], t[3], t[4], t[5], {.d = &t[6], .z = &t[7], .dt_bias = &t[8], .final_states = &t[9]});
                 }});
  all.push_back(
      {"mamba2_step",
       {{"x", of_x},
        {"dt", of_steps},
        {"A", of_heads},
        {"B", of_keys},
        {"C", of_keys},
        {"states", {2, 2, 5, 4}, kF32, true},
        {"y", of_x, kF32, true},
        {"D", of_heads},
        {"z", of_x},
        {"dt_bias", of_heads}},
       [](const Operands& t) { mamba2_step(t[0], t[1], t[2], t[3], t[4], t[5], t[6], {.d = &t[7], .z = &t[8], .dt_bias = &t[9]}); }});
  all.push_back({"mamba2_backward",
                 {{"x", of_x},
                  {"dt", of_steps},
                  {"A", of_heads},
                  {"B", of_keys},
                  {"C", of_keys},
                  {"dy", of_x},
                  {"dx", of_x, kF32, true},
                  {"d_dt", of_steps, kF32, true},
                  {"dB", of_keys, kF32, true},
                  {"dC", of_keys, kF32, true},
                  {"D", of_heads},
                  {"z", of_x},
                  {"dt_bias", of_heads},
                  {"initial_states", {2, 2, 5, 4}},
                  {"d_final_states", {2, 2, 5, 4}},
                  {"dA", of_heads, kF32, true},
                  {"dD", of_heads, kF32, true},
                  {"dz", of_x, kF32, true},
                  {"d_dt_bias", of_heads, kF32, true},
                  {"d_initial_states", {2, 2, 5, 4}, kF32, true}},
                 [](const Operands& t) {
                   mamba2_backward(t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8], t[9],
                                   {.d = &t[10],
                                    .z = &t[11],
                                    .dt_bias = &t[12],
                                    .initial_states = &t[13],
                                    .d_final_states = &t[14],
                                    .da = &t[15],
                                    .dd = &t[16],
                                    .dz = &t[17],
                                    .d_dt_bias = &t[18],
                                    .d_initial_states = &t[19]});
                 }});
  const Shape of_chunks{2, 2, 2, 16}, of_chunk_states{2, 2, 2, 5, 4}, of_products{2, 2, 2, 16, 16}, of_long{2, 20, 2, 5},
      of_long_keys{2, 20, 2, 4};
  all.push_back({"mamba2_chunk_cumsum",
                 {{"dt", {2, 20, 2}},
                  {"A", of_heads},
                  {"dA_cumsum", of_chunks, kF32, true},
                  {"dt_out", of_chunks, kF32, true},
                  {"dt_bias", of_heads},
                  {"seq_idx", {2, 20}, kI32}},
                 [](const Operands& t) { mamba2_chunk_cumsum(t[0], t[1], t[2], t[3], {.dt_bias = &t[4], .seq_idx = &t[5]}); }});
  all.push_back({"mamba2_chunk_state",
                 {{"B", of_long_keys, half},
                  {"x", of_long, half},
                  {"dt", of_chunks},
                  {"dA_cumsum", of_chunks},
                  {"states", of_chunk_states, kF32, true}},
                 [](const Operands& t) { mamba2_chunk_state(t[0], t[1], t[2], t[3], t[4]); }});
  all.push_back({"mamba2_state_passing",
                 {{"states", of_chunk_states},
                  {"dA_chunk_cumsum", {2, 2, 2}},
                  {"passed", of_chunk_states, half, true},
                  {"final_states", {2, 2, 5, 4}, kF32, true}},
                 [](const Operands& t) { mamba2_state_passing(t[0], t[1], t[2], {.final_states = &t[3]}); }});
  all.push_back({"mamba2_bmm_chunk",
                 {{"C", of_long_keys, half}, {"B", of_long_keys, half}, {"CB", of_products, kF32, true}},
                 [](const Operands& t) { mamba2_bmm_chunk(t[0], t[1], t[2]); }});
  all.push_back(
      {"mamba2_chunk_scan",
       {{"CB", of_products},
        {"x", of_long, half},
        {"dt", of_chunks},
        {"dA_cumsum", of_chunks},
        {"C", of_long_keys, half},
        {"states", of_chunk_states, half},
        {"y", of_long, half, true},
        {"D", of_heads},
        {"z", of_long, half},
        {"ungated", of_long, half, true}},
       [](const Operands& t) { mamba2_chunk_scan(t[0], t[1], t[2], t[3], t[4], t[5], t[6], {.d = &t[7], .z = &t[8], .ungated = &t[9]}); }});
  all.push_back({"mamba2_chunk_cumsum_backward",
                 {{"dt", {2, 20, 2}},
                  {"A", of_heads},
                  {"d_dA_cumsum", of_chunks},
                  {"d_dt_out", of_chunks},
                  {"d_dt", {2, 20, 2}, kF32, true},
                  {"dt_bias", of_heads},
                  {"seq_idx", {2, 20}, kI32},
                  {"dA", of_heads, kF32, true},
                  {"d_dt_bias", of_heads, kF32, true}},
                 [](const Operands& t) {
                   mamba2_chunk_cumsum_backward(t[0], t[1], t[2], t[3], t[4],
                                                {.dt_bias = &t[5], .seq_idx = &t[6], .da = &t[7], .d_dt_bias = &t[8]});
                 }});
  all.push_back({"mamba2_chunk_state_backward",
                 {{"B", of_long_keys, half},
                  {"x", of_long, half},
                  {"dt", of_chunks},
                  {"dA_cumsum", of_chunks},
                  {"d_states", of_chunk_states},
                  {"dB", of_long_keys, half, true},
                  {"dx", of_long, half, true},
                  {"d_dt", of_chunks, kF32, true},
                  {"d_dA_cumsum", of_chunks, kF32, true}},
                 [](const Operands& t) { mamba2_chunk_state_backward(t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8]); }});
  all.push_back({"mamba2_state_passing_backward",
                 {{"passed", of_chunk_states, half},
                  {"dA_chunk_cumsum", {2, 2, 2}},
                  {"d_passed", of_chunk_states},
                  {"d_states", of_chunk_states, kF32, true},
                  {"d_dA_chunk_cumsum", {2, 2, 2}, kF32, true},
                  {"d_initial_states", {2, 2, 5, 4}, kF32, true}},
                 [](const Operands& t) { mamba2_state_passing_backward(t[0], t[1], t[2], t[3], t[4], {.d_initial_states = &t[5]}); }});
  all.push_back({"mamba2_bmm_chunk_backward",
                 {{"C", of_long_keys, half},
                  {"B", of_long_keys, half},
                  {"d_CB", of_products},
                  {"dC", of_long_keys, half, true},
                  {"dB", of_long_keys, half, true}},
                 [](const Operands& t) { mamba2_bmm_chunk_backward(t[0], t[1], t[2], t[3], t[4]); }});
  all.push_back({"mamba2_chunk_scan_backward",
                 {{"CB", of_products},
                  {"x", of_long, half},
                  {"dt", of_chunks},
                  {"dA_cumsum", of_chunks},
                  {"C", of_long_keys, half},
                  {"states", of_chunk_states, half},
                  {"dy", of_long, half},
                  {"d_CB", of_products, kF32, true},
                  {"dx", of_long, half, true},
                  {"d_dt", of_chunks, kF32, true},
                  {"d_dA_cumsum", of_chunks, kF32, true},
                  {"dC", of_long_keys, half, true},
                  {"d_states", of_chunk_states, kF32, true},
                  {"D", of_heads},
                  {"z", of_long, half},
                  {"ungated", of_long, half},
                  {"dD", of_heads, kF32, true},
                  {"dz", of_long, half, true}},
                 [](const Operands& t) {
                   mamba2_chunk_scan_backward(t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8], t[9], t[10], t[11], t[12],
                                              {.d = &t[13], .z = &t[14], .ungated = &t[15], .dd = &t[16], .dz = &t[17]});
                 }});
  all.push_back({"cast_fp8", {{"x", {3, 128}}, {"y", {3, 128}, kFp8, true}, {"scales", {3, 1}, kF32, true}}, [](const Operands& t) {
                   cast_fp8(t[0], t[1], t[2]);
                 }});
  all.push_back({"cast_fp8_blocks", {{"x", {3, 128}}, {"y", {3, 128}, kFp8, true}, {"scales", {1, 1}, kF32, true}}, [](const Operands& t) {
                   cast_fp8_blocks(t[0], t[1], t[2]);
                 }});
  all.push_back({"cast_fp8_grouped",
                 {{"x", {6, 128}}, {"sizes", {2}, kI32}, {"y", {2, 3, 128}, kFp8, true}, {"scales", {2, 3, 1}, kF32, true}},
                 [](const Operands& t) { cast_fp8_grouped(t[0], t[1], t[2], t[3]); }});
  all.push_back(
      {"causal_conv1d",
       {{"x", {2, 5, 3}},
        {"weight", {3, 4}},
        {"y", {2, 5, 3}, kF32, true},
        {"bias", {3}},
        {"initial_state", {2, 3, 3}},
        {"final_state", {2, 3, 3}, kF32, true}},
       [](const Operands& t) { causal_conv1d(t[0], t[1], t[2], {.bias = &t[3], .initial_state = &t[4], .final_state = &t[5]}); }});
  all.push_back({"causal_conv1d",
                 {{"x", {1, 5, 3}}, {"weight", {3, 4}}, {"y", {1, 5, 3}, kF32, true}, {"cu_seqlens", {3}, kI32}},
                 [](const Operands& t) { causal_conv1d(t[0], t[1], t[2], {.cu_seqlens = &t[3]}); }});
  all.push_back({"causal_conv1d_update",
                 {{"x", {2, 1, 3}}, {"state", {2, 3, 3}, kF32, true}, {"weight", {3, 4}}, {"y", {2, 1, 3}, kF32, true}, {"bias", {3}}},
                 [](const Operands& t) { causal_conv1d_update(t[0], t[1], t[2], t[3], {.bias = &t[4]}); }});
  all.push_back(
      {"causal_conv1d_backward",
       {{"dy", {2, 5, 3}},
        {"x", {2, 5, 3}},
        {"weight", {3, 4}},
        {"dx", {2, 5, 3}, kF32, true},
        {"bias", {3}},
        {"initial_state", {2, 3, 3}},
        {"d_final_state", {2, 3, 3}},
        {"d_weight", {3, 4}, kF32, true},
        {"d_bias", {3}, kF32, true},
        {"d_initial_state", {2, 3, 3}, kF32, true}},
       [](const Operands& t) {
         causal_conv1d_backward(
             t[0], t[1], t[2], t[3],
             {.bias = &t[4], .initial_state = &t[5], .d_final_state = &t[6], .d_weight = &t[7], .d_bias = &t[8], .d_initial_state = &t[9]});
       }});
  all.push_back({"gated_delta_rule",
                 {{"q", {1, 5, 2, 4}},
                  {"k", {1, 5, 2, 4}},
                  {"v", {1, 5, 2, 6}},
                  {"beta", {1, 5, 2}},
                  {"o", {1, 5, 2, 6}, kF32, true},
                  {"g", {1, 5, 2}},
                  {"initial_state", {2, 2, 4, 6}},
                  {"final_state", {2, 2, 4, 6}, kF32, true, "initial_state"},
                  {"cu_seqlens", {3}, kI32}},
                 [](const Operands& t) {
                   gated_delta_rule(t[0], t[1], t[2], t[3], t[4],
                                    {.g = &t[5], .initial_state = &t[6], .final_state = &t[7], .cu_seqlens = &t[8]});
                 }});
  all.push_back({"gated_delta_rule_step",
                 {{"q", {2, 1, 2, 4}},
                  {"k", {2, 1, 2, 4}},
                  {"v", {2, 1, 2, 6}},
                  {"beta", {2, 1, 2}},
                  {"state", {2, 2, 4, 6}, kF32, true},
                  {"o", {2, 1, 2, 6}, kF32, true},
                  {"g", {2, 1, 2}}},
                 [](const Operands& t) { gated_delta_rule_step(t[0], t[1], t[2], t[3], t[4], t[5], {.g = &t[6]}); }});
  all.push_back(
      {"gated_delta_rule_backward",
       {{"q", {1, 5, 2, 4}},
        {"k", {1, 5, 2, 4}},
        {"v", {1, 5, 2, 6}},
        {"beta", {1, 5, 2}},
        {"d_o", {1, 5, 2, 6}},
        {"dq", {1, 5, 2, 4}, kF32, true},
        {"dk", {1, 5, 2, 4}, kF32, true},
        {"dv", {1, 5, 2, 6}, kF32, true},
        {"d_beta", {1, 5, 2}, kF32, true},
        {"g", {1, 5, 2}},
        {"initial_state", {2, 2, 4, 6}},
        {"cu_seqlens", {3}, kI32},
        {"d_final_state", {2, 2, 4, 6}},
        {"dg", {1, 5, 2}, kF32, true},
        {"d_initial_state", {2, 2, 4, 6}, kF32, true}},
       [](const Operands& t) {
         gated_delta_rule_backward(
             t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8],
             {.g = &t[9], .initial_state = &t[10], .cu_seqlens = &t[11], .d_final_state = &t[12], .dg = &t[13], .d_initial_state = &t[14]});
       }});
  all.push_back({"conv1d", {{"x", {2, 5, 3}}, {"w", {4, 3, 3}}, {"y", {2, 3, 4}, kF32, true}, {"bias", {4}}}, [](const Operands& t) {
                   conv1d(t[0], t[1], t[2], {.bias = &t[3]});
                 }});
  all.push_back({"conv2d",
                 {{"x", {2, 5, 5, 3}}, {"w", {4, 3, 3, 3}}, {"y", {2, 3, 3, 4}, kF32, true}, {"bias", {4}}},
                 [](const Operands& t) { conv2d(t[0], t[1], t[2], {.bias = &t[3]}); }});
  all.push_back(
      {"attention",
       {{"q", {2, 3, 2, 8}},
        {"k", {2, 5, 2, 8}},
        {"v", {2, 5, 2, 8}},
        {"o", {2, 3, 2, 8}, kF32, true},
        {"lse", {2, 2, 3}, kF32, true},
        {"mask", {2, 2, 3, 5}},
        {"alibi_slopes", {2}},
        {"sink", {2}}},
       [](const Operands& t) { attention(t[0], t[1], t[2], t[3], {.alibi_slopes = &t[6], .sink = &t[7], .mask = &t[5], .lse = &t[4]}); }});
  all.push_back({"attention_varlen",
                 {{"q", {6, 2, 8}},
                  {"k", {5, 2, 8}},
                  {"v", {5, 2, 8}},
                  {"o", {6, 2, 8}, kF32, true},
                  {"cu_seqlens_q", {3}, kI32},
                  {"cu_seqlens_k", {3}, kI32},
                  {"seqused_q", {2}, kI32},
                  {"seqused_k", {2}, kI32},
                  {"lse", {2, 6}, kF32, true}},
                 [](const Operands& t) {
                   attention_varlen(t[0], t[1], t[2], t[3], {t[4], t[5], &t[6], &t[7]}, {.lse = &t[8]});
                 }});
  all.push_back({"attention_decode",
                 {{"q", {2, 1, 2, 8}},
                  {"k_cache", {2, 16, 2, 8}, kF32, true},
                  {"v_cache", {2, 16, 2, 8}, kF32, true},
                  {"o", {2, 1, 2, 8}, kF32, true},
                  {"seqlens", {2}, kI32},
                  {"new_k", {2, 1, 2, 8}},
                  {"new_v", {2, 1, 2, 8}},
                  {"rotary_cos", {16, 4}},
                  {"rotary_sin", {16, 4}},
                  {"lse", {2, 2, 1}, kF32, true},
                  {"leftpad", {2}, kI32}},
                 [](const Operands& t) {
                   attention_decode(
                       t[0], t[1], t[2], t[3],
                       {.seqlens = &t[4], .leftpad = &t[10], .new_k = &t[5], .new_v = &t[6], .rotary_cos = &t[7], .rotary_sin = &t[8]},
                       {.lse = &t[9]});
                 }});
  all.push_back(
      {"attention_decode",
       {{"q", {2, 1, 2, 8}},
        {"k_cache", {3, 16, 2, 8}},
        {"v_cache", {3, 16, 2, 8}},
        {"o", {2, 1, 2, 8}, kF32, true},
        {"block_table", {2, 1}, kI32},
        {"sink", {2}},
        {"lse", {2, 2, 1}, kF32, true}},
       [](const Operands& t) { attention_decode(t[0], t[1], t[2], t[3], {.block_table = &t[4]}, {.sink = &t[5], .lse = &t[6]}); }});
  const DType bf16 = DType::bf16;
  const DType fp8 = DType::fp8_e4m3;
  all.push_back({"indexer_scores",
                 {{"q", {3, 2, 128}, fp8},
                  {"k", {5, 128}, fp8},
                  {"weights", {3, 2}},
                  {"scores", {3, 5}, kF32, true},
                  {"k_scale", {5}},
                  {"starts", {3}, kI32},
                  {"ends", {3}, kI32}},
                 [](const Operands& t) { indexer_scores(t[0], t[1], t[2], t[3], {.k_scale = &t[4], .starts = &t[5], .ends = &t[6]}); }});
  all.push_back({"indexer_scores_paged",
                 {{"q", {2, 1, 2, 128}, fp8},
                  {"k_cache", {3, 64, 132}, DType::u8},
                  {"weights", {2, 1, 2}},
                  {"block_table", {2, 1}, kI32},
                  {"scores", {2, 1, 70}, kF32, true},
                  {"seqlens", {2}, kI32}},
                 [](const Operands& t) { indexer_scores_paged(t[0], t[1], t[2], t[3], t[4], {.seqlens = &t[5]}); }});
  all.push_back(
      {"vertical_slash_attention",
       {{"q", {1, 5, 2, 8}},
        {"k", {1, 5, 1, 8}},
        {"v", {1, 5, 1, 8}},
        {"vertical", {1, 2, 3}, kI32},
        {"slash", {1, 2, 3}, kI32},
        {"o", {1, 5, 2, 8}, kF32, true},
        {"seqlens", {1}, kI32},
        {"lse", {1, 2, 5}, kF32, true}},
       [](const Operands& t) { vertical_slash_attention(t[0], t[1], t[2], t[3], t[4], t[5], {.seqlens = &t[6], .lse = &t[7]}); }});
  all.push_back({"vertical_slash_index",
                 {{"vertical", {1, 2, 3}, kI32},
                  {"slash", {1, 2, 3}, kI32},
                  {"block_count", {1, 2, 2}, kI32, true},
                  {"block_offset", {1, 2, 2, 3}, kI32, true},
                  {"column_count", {1, 2, 2}, kI32, true},
                  {"column_index", {1, 2, 2, 3}, kI32, true},
                  {"seqlens", {1}, kI32}},
                 [](const Operands& t) {
                   vertical_slash_index(t[0], t[1], 100, {t[2], t[3], t[4], t[5]}, {.seqlens = &t[6]});
                 }});
  all.push_back({"nsa_selected",
                 {{"q", {1, 5, 2, 8}},
                  {"k", {1, 5, 1, 8}},
                  {"v", {1, 5, 1, 8}},
                  {"block_indices", {1, 5, 1, 2}, kI32},
                  {"o", {1, 5, 2, 8}, kF32, true},
                  {"block_counts", {1, 5, 1}, kI32},
                  {"lse", {1, 5, 2}, kF32, true}},
                 [](const Operands& t) { nsa_selected(t[0], t[1], t[2], t[3], t[4], {.block_counts = &t[5], .lse = &t[6]}); }});
  all.push_back({"nsa_select",
                 {{"q", {1, 70, 2, 8}}, {"k", {1, 2, 1, 8}}, {"lse", {1, 70, 2}}, {"block_indices", {1, 70, 1, 2}, kI32, true}},
                 [](const Operands& t) { nsa_select(t[0], t[1], t[2], t[3], {.block_size = 32}); }});
  all.push_back({"nsa_selected_backward",
                 {{"q", {1, 5, 2, 8}},
                  {"k", {1, 5, 1, 8}},
                  {"v", {1, 5, 1, 8}},
                  {"block_indices", {1, 5, 1, 2}, kI32},
                  {"o", {1, 5, 2, 8}},
                  {"lse", {1, 5, 2}},
                  {"d_o", {1, 5, 2, 8}},
                  {"dq", {1, 5, 2, 8}, kF32, true},
                  {"dk", {1, 5, 1, 8}, kF32, true},
                  {"dv", {1, 5, 1, 8}, kF32, true}},
                 [](const Operands& t) { nsa_selected_backward(t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8], t[9]); }});
  all.push_back({"mla_sparse_backward",
                 {{"q", {2, 2, 576}, bf16},
                  {"kv", {3, 576}, bf16},
                  {"indices", {2, 2}, kI32},
                  {"o", {2, 2, 512}, bf16},
                  {"lse", {2, 2}},
                  {"d_o", {2, 2, 512}, bf16},
                  {"dq", {2, 2, 576}, bf16, true},
                  {"dkv", {3, 576}, bf16, true},
                  {"topk_length", {2}, kI32}},
                 [](const Operands& t) { mla_sparse_backward(t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], {.topk_length = &t[8]}); }});
  all.push_back({"mla_append",
                 {{"latent", {2, 1, 512}, bf16},
                  {"rotary", {2, 1, 64}, bf16},
                  {"kv_cache", {2, 16, 576}, bf16, true},
                  {"seqlens", {2}, kI32},
                  {"block_table", {2, 1}, kI32},
                  {"rotary_cos", {16, 32}},
                  {"rotary_sin", {16, 32}}},
                 [](const Operands& t) {
                   mla_append(t[0], t[1], t[2], {.seqlens = &t[3], .block_table = &t[4], .rotary_cos = &t[5], .rotary_sin = &t[6]});
                 }});
  all.push_back({"mla_decode",
                 {{"q", {2, 1, 2, 576}, bf16},
                  {"kv_cache", {3, 16, 576}, bf16},
                  {"o", {2, 1, 2, 512}, bf16, true},
                  {"seqlens", {2}, kI32},
                  {"block_table", {2, 1}, kI32},
                  {"lse", {2, 2, 1}, kF32, true}},
                 [](const Operands& t) { mla_decode(t[0], t[1], t[2], {.seqlens = &t[3], .block_table = &t[4], .lse = &t[5]}); }});
  all.push_back({"mla_sparse",
                 {{"q", {2, 2, 576}, bf16},
                  {"kv", {5, 576}, bf16},
                  {"indices", {2, 3}, kI32},
                  {"o", {2, 2, 512}, bf16, true},
                  {"topk_length", {2}, kI32},
                  {"sink", {2}},
                  {"lse", {2, 2}, kF32, true},
                  {"max_logits", {2, 2}, kF32, true}},
                 [](const Operands& t) {
                   mla_sparse(t[0], t[1], t[2], t[3], {.topk_length = &t[4], .sink = &t[5], .lse = &t[6], .max_logits = &t[7]});
                 }});
  return all;
}

/// Two operands in one piece of memory, in which the second begins `distance` bytes after the end of the first.
std::pair<Tensor, Tensor> placed(const Operand& first, const Operand& second, std::int64_t distance) {
  const auto bytes = [](const Operand& operand) {
    return Tensor::empty(operand.shape, operand.dtype).numel() * static_cast<std::int64_t>(size_of(operand.dtype));
  };
  const std::int64_t margin = 64, at = (margin + bytes(first) + 7) / 8 * 8;
  const Tensor memory = Tensor::zeros({at + bytes(second) + margin}, DType::u8);
  const auto view = [&](const Operand& operand, std::int64_t offset) {
    return Tensor::borrow(static_cast<char*>(memory.data()) + offset, operand.shape, operand.dtype, Device::cpu(), {},
                          std::make_shared<Tensor>(memory));
  };
  return {view(first, at - bytes(first) - distance), view(second, at)};
}

TEST(SharedMemory, IsRefusedByEveryOperationUnlessDocumented) {
  for (const Operation& operation : all_operations()) {
    Operands apart;
    for (const Operand& operand : operation.operands) apart.push_back(Tensor::zeros(operand.shape, operand.dtype));
    EXPECT_NO_THROW(operation.call(apart)) << operation.name;
    for (std::size_t n = 0; n < operation.operands.size(); ++n) {
      const Operand& output = operation.operands[n];
      if (!output.written) continue;
      const std::string allowed = tw::format(" {} ", output.in_place);
      for (std::size_t m = 0; m < operation.operands.size(); ++m) {
        const Operand& other = operation.operands[m];
        if (m == n) continue;
        SCOPED_TRACE(tw::format("{}: {} over {}", operation.name, output.name, other.name));
        const auto with = [&](const Tensor& a, const Tensor& b) {
          Operands operands = apart;
          operands[n] = a;
          operands[m] = b;
          return operands;
        };
        const std::int64_t element = static_cast<std::int64_t>(std::max(size_of(output.dtype), size_of(other.dtype)));
        const auto [last, first] = placed(output, other, -element);  // the output's end over the other's beginning
        expect_error<InvalidArgument>([&] { operation.call(with(last, first)); },
                                      {operation.name, output.name, "shares memory with", other.name});
        const auto [before, after] = placed(output, other, 0);
        EXPECT_NO_THROW(operation.call(with(before, after)));
        if (output.shape != other.shape || size_of(output.dtype) != size_of(other.dtype)) continue;
        const Tensor same = Tensor::borrow(after.data(), output.shape, output.dtype, Device::cpu());
        if (allowed.find(tw::format(" {} ", other.name)) != std::string::npos)
          EXPECT_NO_THROW(operation.call(with(same, after)));
        else
          expect_error<InvalidArgument>([&] { operation.call(with(same, after)); }, {operation.name, "shares memory with"});
      }
    }
  }
}

TEST(SharedMemory, IsNotSeenInTensorsThatInterleave) {
  const Tensor packed = Tensor::zeros({2, 3, 4, 2, 8}, kF32);  // [batch, seqlen, q k v o, heads, dim]
  const auto part = [&](std::int64_t n) { return packed.select(2, n); };
  EXPECT_NO_THROW(attention(part(0), part(1), part(2), part(3)));
  const Tensor wide = Tensor::zeros({4, 12}, kF32);
  EXPECT_NO_THROW(gemm(wide.slice(1, 0, 4), wide.slice(1, 4, 8), wide.slice(1, 8, 12)));
  EXPECT_NO_THROW(softmax(wide.slice(1, 0, 3), wide.slice(1, 3, 6)));
  EXPECT_NO_THROW(transpose(wide.slice(1, 0, 4), wide.slice(1, 4, 8)));
  // Every row's scale after its elements.
  const Tensor rows = Tensor::zeros({3, 132}, DType::u8);
  const Tensor y = Tensor::borrow(rows.data(), {3, 128}, kFp8, Device::cpu(), {132, 1});
  const Tensor scales = Tensor::borrow(static_cast<char*>(rows.data()) + 128, {3, 1}, kF32, Device::cpu(), {33, 1});
  EXPECT_NO_THROW(cast_fp8(Tensor::zeros({3, 128}, kF32), y, scales));
  // Pages with keys and values side by side.
  const Tensor pages = Tensor::zeros({3, 2, 16, 2, 8}, kF32), q = Tensor::zeros({2, 1, 2, 8}, kF32), o = Tensor::zeros({2, 1, 2, 8}, kF32);
  const Tensor table = Tensor::zeros({2, 1}, kI32), lengths = Tensor::zeros({2}, kI32);
  EXPECT_NO_THROW(attention_decode(q, pages.select(1, 0), pages.select(1, 1), o,
                                   {.seqlens = &lengths, .block_table = &table, .new_k = &q, .new_v = &q}));
}

TEST(SharedMemory, OfOneOutputsElementsIsRefused) {
  const Tensor memory = Tensor::zeros({64}, kF32), x = Tensor::zeros({4, 4}, kF32);
  const auto y = [&](std::int64_t row, std::int64_t col) { return Tensor::borrow(memory.data(), {4, 4}, kF32, Device::cpu(), {row, col}); };
  expect_error<InvalidArgument>([&] { gemm(x, x, y(3, 1)); }, {"gemm: d is", "strides 3, 1", "whose elements overlap"});
  expect_error<InvalidArgument>([&] { softmax(x, y(1, 3)); }, {"softmax: y is", "strides 1, 3", "whose elements overlap"});
  EXPECT_NO_THROW(softmax(x, y(4, 5)));  // 0, 4, 5, 8, 9, 10: not nested, but all different
}

}  // namespace
}  // namespace tw::test
