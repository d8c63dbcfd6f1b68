// The C interface's functions against those of C++ that they call, on the CPU: the same bits.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

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
#include "tilewave/mamba2.hpp"
#include "tilewave/mamba2_chunks.hpp"
#include "tilewave/mla.hpp"
#include "tilewave/moe.hpp"
#include "tilewave/norm.hpp"
#include "tilewave/nsa.hpp"
#include "tilewave/quantized.hpp"
#include "tilewave/quantized_layouts.hpp"
#include "tilewave/reduce.hpp"
#include "tilewave/rope.hpp"
#include "tilewave/softmax.hpp"
#include "tilewave/sparse_gemm.hpp"
#include "tilewave/swiglu.hpp"
#include "tilewave/tensor.hpp"
#include "tilewave/tilewave.h"
#include "tilewave/topk.hpp"
#include "tilewave/transpose.hpp"
#include "tilewave/vertical_slash.hpp"

namespace tw::test {
namespace {

tw_dtype dtype_of(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return TW_F32;
    case DType::f16:
      return TW_F16;
    case DType::bf16:
      return TW_BF16;
    case DType::fp8_e4m3:
      return TW_FP8_E4M3;
    case DType::fp8_e5m2:
      return TW_FP8_E5M2;
    case DType::i8:
      return TW_I8;
    case DType::i32:
      return TW_I32;
    case DType::i64:
      return TW_I64;
    case DType::u8:
      return TW_U8;
    default:
      return TW_BOOL;
  }
}

/// A tensor as C knows it. The memory stays the tensor's.
class InC {
 public:
  explicit InC(const Tensor& t) : tensor_{} {
    tensor_.data = t.data();
    tensor_.dtype = dtype_of(t.dtype());
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

/// That f of C, which writes into poisoned memory, gives what f of C++ does.
void expect_same(Shape shape, DType dtype, const std::function<tw_status(const Tensor&)>& in_c,
                 const std::function<void(const Tensor&)>& in_cpp) {
  const Tensor y = poisoned(shape, dtype), expected = poisoned(shape, dtype);
  EXPECT_OK(in_c(y));
  in_cpp(expected);
  EXPECT_TRUE(same_bits(y, expected));
}

TEST(CInterface, Version) {
  const std::string version = tw_version();
  EXPECT_EQ(std::count(version.begin(), version.end(), '.'), 2) << version;
}

TEST(CInterface, Elements) {
  const Tensor a = Tensor::random({3, 5, 7}, DType::bf16, 1), b = Tensor::random({3, 1, 7}, DType::bf16, 2);
  const auto binary = [&](auto in_c, auto in_cpp) {
    expect_same(
        a.shape(), DType::bf16, [&](const Tensor& y) { return in_c(InC(a), InC(b), InC(y), nullptr); },
        [&](const Tensor& y) { in_cpp(a, b, y, {}); });
  };
  binary(tw_add, add);
  binary(tw_mul, mul);
  const auto unary = [&](auto in_c, auto in_cpp, Shape shape, DType dtype = DType::bf16) {
    expect_same(
        std::move(shape), dtype, [&](const Tensor& y) { return in_c(InC(a), InC(y), nullptr); },
        [&](const Tensor& y) { in_cpp(a, y, {}); });
  };
  unary(tw_silu, silu, a.shape());
  unary(tw_gelu_erf, gelu_erf, a.shape());
  unary(tw_gelu_tanh, gelu_tanh, a.shape());
  unary(tw_transpose, transpose, {3, 7, 5});
  for (const DType dtype :
       {DType::f32, DType::f16, DType::fp8_e4m3, DType::fp8_e5m2, DType::i8, DType::i32, DType::i64, DType::u8, DType::boolean})
    unary(tw_cast, cast, a.shape(), dtype);
  expect_same(
      a.shape(), DType::bf16, [&](const Tensor& y) { return tw_swiglu(InC(a), InC(a), InC(y), nullptr); },
      [&](const Tensor& y) { swiglu(a, a, y); });
  const Tensor even = Tensor::random({4, 6}, DType::f32, 3);
  expect_same(
      {4, 3}, DType::f32, [&](const Tensor& y) { return tw_swiglu_interleaved(InC(even), InC(y), nullptr); },
      [&](const Tensor& y) { swiglu_interleaved(even, y); });
  const Tensor one = Tensor::random({}, DType::f32, 4);
  expect_same(
      {}, DType::f32, [&](const Tensor& y) { return tw_add(InC(one), InC(one), InC(y), nullptr); },
      [&](const Tensor& y) { add(one, one, y); });
}

TEST(CInterface, Gemm) {
  const Tensor a = Tensor::random({33, 70}, DType::f32, 1), b = Tensor::random({70, 21}, DType::f32, 2),
               bias = Tensor::random({21}, DType::f32, 3), residual = Tensor::random({33, 21}, DType::f32, 4);
  expect_same(
      {33, 21}, DType::f32, [&](const Tensor& d) { return tw_gemm(InC(a), InC(b), InC(d), nullptr, nullptr); },
      [&](const Tensor& d) { tw::gemm(a, b, d); });
  const InC bias_in_c(bias), residual_in_c(residual);
  tw_gemm_options options = {};
  options.struct_size = sizeof options;
  options.has_alpha = 1, options.alpha = 0.5f;
  options.activation = TW_ACTIVATION_GELU_TANH;
  options.bias = bias_in_c;
  options.residual = residual_in_c;
  expect_same(
      {33, 21}, DType::f32, [&](const Tensor& d) { return tw_gemm(InC(a), InC(b), InC(d), &options, nullptr); },
      [&](const Tensor& d) {
        tw::gemm(a, b, d, {.alpha = 0.5f, .bias = &bias, .activation = Activation::gelu_tanh, .residual = &residual});
      });
  const Tensor d = poisoned({33, 21}, DType::f32);
  const int unknown = 6;
  std::memcpy(&options.activation, &unknown, sizeof unknown);
  expect_refused(tw_gemm(InC(a), InC(b), InC(d), &options, nullptr), "options.activation is 6");
}

TEST(CInterface, GroupedProducts) {
  const Tensor a = Tensor::random({9, 40}, DType::bf16, 1), b = Tensor::random({3, 40, 22}, DType::bf16, 2),
               bias = Tensor::random({3, 22}, DType::bf16, 3);
  const std::vector<std::int32_t> numbers{0, 4, 4, 9};
  const Tensor offsets = Tensor::from(std::span<const std::int32_t>(numbers), {4});
  const InC bias_in_c(bias);
  tw_grouped_gemm_options options = {};
  options.struct_size = sizeof options;
  options.bias = bias_in_c;
  options.activation = TW_ACTIVATION_SWIGLU;
  expect_same(
      {9, 11}, DType::bf16, [&](const Tensor& d) { return tw_grouped_gemm(InC(a), InC(b), InC(offsets), InC(d), &options, nullptr); },
      [&](const Tensor& d) { grouped_gemm(a, b, offsets, d, {.bias = &bias, .activation = Activation::swiglu}); });
  const Tensor at = a.transpose(0, 1);
  expect_same(
      {3, 40, 40}, DType::f32, [&](const Tensor& d) { return tw_k_grouped_gemm(InC(at), InC(a), InC(offsets), InC(d), 0, nullptr); },
      [&](const Tensor& d) { k_grouped_gemm(at, a, offsets, d); });
  const Tensor sums = Tensor::zeros({3, 40, 40}, DType::f32);
  EXPECT_OK(tw_k_grouped_gemm(InC(at), InC(a), InC(offsets), InC(sums), 1, nullptr));
  EXPECT_OK(tw_k_grouped_gemm(InC(at), InC(a), InC(offsets), InC(sums), 1, nullptr));
  const Tensor twice = Tensor::zeros({3, 40, 40}, DType::f32);
  k_grouped_gemm(at, a, offsets, twice, {.accumulate = true});
  k_grouped_gemm(at, a, offsets, twice, {.accumulate = true});
  EXPECT_TRUE(same_bits(sums, twice));
  expect_refused(tw_grouped_gemm(InC(a), InC(b), InC(a), InC(poisoned({9, 22}, DType::bf16)), nullptr, nullptr), "offsets is bf16[9, 40]");
}

TEST(CInterface, SparseProducts) {
  const Tensor w = Tensor::random({20, 72}, DType::bf16, 1), x = Tensor::random({9, 72}, DType::bf16, 2),
               bias = Tensor::random({20}, DType::bf16, 3), pruned = poisoned({20, 72}, DType::bf16);
  EXPECT_OK(tw_prune_2_4(InC(w), InC(pruned), nullptr));
  const SparseMatrix sparse{poisoned({20, 36}, DType::bf16), poisoned(SparseMatrix::metadata_shape(20, 72, DType::bf16), DType::u8)};
  const InC values(sparse.values), metadata(sparse.metadata), bias_in_c(bias);
  expect_refused(tw_compress_2_4(InC(w), values, metadata, nullptr, nullptr), "row 0 has");
  EXPECT_OK(tw_compress_2_4(InC(pruned), values, metadata, nullptr, nullptr));
  const Tensor back = poisoned({20, 72}, DType::bf16);
  EXPECT_OK(tw_decompress_2_4(values, metadata, InC(back), nullptr));
  EXPECT_TRUE(same_bits(back, pruned));
  tw_sparse_gemm_options options = {};
  options.struct_size = sizeof options;
  options.bias = bias_in_c;
  options.activation = TW_ACTIVATION_SILU;
  options.has_alpha = 1;
  options.alpha = 0.5f;
  expect_same(
      {9, 20}, DType::bf16, [&](const Tensor& y) { return tw_sparse_linear(InC(x), values, metadata, InC(y), &options, nullptr); },
      [&](const Tensor& y) { sparse_linear(x, sparse, y, {.alpha = 0.5f, .bias = &bias, .activation = Activation::silu}); });
  const Tensor b = x.transpose(0, 1);
  expect_same(
      {20, 9}, DType::bf16, [&](const Tensor& d) { return tw_sparse_gemm(values, metadata, InC(b), InC(d), nullptr, nullptr); },
      [&](const Tensor& d) { sparse_gemm(sparse, b, d); });
  expect_refused(tw_sparse_gemm(values, metadata, InC(x), InC(back), nullptr, nullptr), "b is bf16[9, 72]");
}

TEST(CInterface, LinearAttention) {
  const Tensor q = Tensor::random({2, 9, 2, 8}, DType::bf16, 1), k = Tensor::random({2, 9, 2, 8}, DType::bf16, 2),
               v = Tensor::random({2, 9, 4, 16}, DType::bf16, 3);
  const Tensor g = Tensor::random({4}, DType::f32, 4), state = Tensor::random({2, 4, 8, 16}, DType::f32, 5),
               last = poisoned({2, 4, 8, 16}, DType::f32);
  const InC g_in_c(g), state_in_c(state), last_in_c(last);
  tw_linear_attention_options options = {};
  options.struct_size = sizeof options;
  options.has_scale = 1;
  options.scale = 0.5f;
  options.g = g_in_c;
  options.initial_state = state_in_c;
  options.final_state = last_in_c;
  const Tensor expected = poisoned(last.shape(), DType::f32);
  expect_same(
      v.shape(), DType::bf16, [&](const Tensor& o) { return tw_linear_attention(InC(q), InC(k), InC(v), InC(o), &options, nullptr); },
      [&](const Tensor& o) { linear_attention(q, k, v, o, {.scale = 0.5f, .g = &g, .initial_state = &state, .final_state = &expected}); });
  EXPECT_TRUE(same_bits(last, expected));
  tw_linear_attention_step_options step = {};
  step.struct_size = sizeof step;
  step.g = g_in_c;
  expect_same(
      v.shape(), DType::bf16,
      [&](const Tensor& o) { return tw_linear_attention_step(InC(q), InC(k), InC(v), InC(o), last_in_c, &step, nullptr); },
      [&](const Tensor& o) { linear_attention_step(q, k, v, o, expected, {.g = &g}); });
  EXPECT_TRUE(same_bits(last, expected));

  const Tensor d_o = Tensor::random(v.shape(), DType::bf16, 6), dk = poisoned(k.shape(), DType::bf16),
               dv = poisoned(v.shape(), DType::bf16);
  const Tensor dg = poisoned({2, 9, 4}, DType::f32), d_initial = poisoned(state.shape(), DType::f32);
  const InC dk_in_c(dk), dv_in_c(dv), dg_in_c(dg), d_initial_in_c(d_initial);
  tw_linear_attention_backward_options backward = {};
  backward.struct_size = sizeof backward;
  backward.g = g_in_c;
  backward.initial_state = backward.d_final_state = state_in_c;
  backward.dg = dg_in_c;
  backward.d_initial_state = d_initial_in_c;
  const Tensor of_k = poisoned(k.shape(), DType::bf16), of_v = poisoned(v.shape(), DType::bf16);
  const Tensor of_g = poisoned(dg.shape(), DType::f32), of_initial = poisoned(state.shape(), DType::f32);
  expect_same(
      q.shape(), DType::bf16,
      [&](const Tensor& dq) {
        return tw_linear_attention_backward(InC(q), InC(k), InC(v), InC(d_o), InC(dq), dk_in_c, dv_in_c, &backward, nullptr);
      },
      [&](const Tensor& dq) {
        linear_attention_backward(q, k, v, d_o, dq, of_k, of_v,
                                  {.g = &g, .initial_state = &state, .d_final_state = &state, .dg = &of_g, .d_initial_state = &of_initial});
      });
  EXPECT_TRUE(same_bits(dk, of_k) && same_bits(dv, of_v) && same_bits(dg, of_g) && same_bits(d_initial, of_initial));
  expect_refused(tw_linear_attention(InC(q), InC(k), InC(q), InC(v), nullptr, nullptr), "o is bf16[2, 9, 4, 16]");
}

TEST(CInterface, Mamba2) {
  const Tensor x = Tensor::random({2, 9, 4, 8}, DType::bf16, 1), dt = Tensor::random({2, 9, 4}, DType::bf16, 2),
               b = Tensor::random({2, 9, 2, 16}, DType::bf16, 3), c = Tensor::random({2, 9, 2, 16}, DType::bf16, 4),
               z = Tensor::random(x.shape(), DType::bf16, 5);
  const Tensor a = Tensor::from<float>(std::vector<float>{-1, -0.5f, 0, -20}, {4}), d = Tensor::random({4, 8}, DType::f32, 6),
               bias = Tensor::random({4}, DType::f32, 7), state = Tensor::random({2, 4, 8, 16}, DType::f32, 8),
               last = poisoned(state.shape(), DType::f32), expected = poisoned(state.shape(), DType::f32);
  const InC d_in_c(d), z_in_c(z), bias_in_c(bias), state_in_c(state), last_in_c(last);
  tw_mamba2_options options = {};
  options.struct_size = sizeof options;
  options.d = d_in_c;
  options.z = z_in_c;
  options.dt_bias = bias_in_c;
  options.dt_softplus = 1;
  options.initial_states = state_in_c;
  options.final_states = last_in_c;
  expect_same(
      x.shape(), DType::bf16,
      [&](const Tensor& y) { return tw_mamba2(InC(x), InC(dt), InC(a), InC(b), InC(c), InC(y), &options, nullptr); },
      [&](const Tensor& y) {
        mamba2(x, dt, a, b, c, y,
               {.d = &d, .z = &z, .dt_bias = &bias, .dt_softplus = true, .initial_states = &state, .final_states = &expected});
      });
  EXPECT_TRUE(same_bits(last, expected));
  tw_mamba2_step_options step = {};
  step.struct_size = sizeof step;
  step.has_dt_limit = 1;
  step.dt_min = 0.25f;
  step.dt_max = 0.5f;
  const Tensor indices = Tensor::from<std::int32_t>(std::vector<std::int32_t>{1, 0}, {2});
  const InC indices_in_c(indices);
  step.state_indices = indices_in_c;
  expect_same(
      x.shape(), DType::bf16,
      [&](const Tensor& y) { return tw_mamba2_step(InC(x), InC(dt), InC(a), InC(b), InC(c), last_in_c, InC(y), &step, nullptr); },
      [&](const Tensor& y) { mamba2_step(x, dt, a, b, c, expected, y, {.dt_min = 0.25f, .dt_max = 0.5f, .state_indices = &indices}); });
  EXPECT_TRUE(same_bits(last, expected));

  const Tensor dy = Tensor::random(x.shape(), DType::bf16, 9);
  const auto outputs = [&] {
    return std::vector<Tensor>{poisoned(dt.shape(), DType::bf16),  poisoned(b.shape(), DType::bf16),   poisoned(c.shape(), DType::bf16),
                               poisoned(a.shape(), DType::f32),    poisoned(d.shape(), DType::f32),    poisoned(z.shape(), DType::bf16),
                               poisoned(bias.shape(), DType::f32), poisoned(state.shape(), DType::f32)};
  };
  const std::vector<Tensor> got = outputs(), wanted = outputs();
  const InC d_dt(got[0]), db(got[1]), dc(got[2]), da(got[3]), dd(got[4]), dz(got[5]), d_bias(got[6]), d_initial(got[7]);
  const Tensor numbers = Tensor::zeros({2, 9}, DType::i32);
  const InC numbers_in_c(numbers);
  tw_mamba2_backward_options backward = {};
  backward.struct_size = sizeof backward;
  backward.d = d_in_c;
  backward.z = z_in_c;
  backward.dt_bias = bias_in_c;
  backward.dt_softplus = 1;
  backward.initial_states = backward.d_final_states = state_in_c;
  backward.seq_idx = numbers_in_c;
  backward.da = da;
  backward.dd = dd;
  backward.dz = dz;
  backward.d_dt_bias = d_bias;
  backward.d_initial_states = d_initial;
  expect_same(
      x.shape(), DType::bf16,
      [&](const Tensor& dx) {
        return tw_mamba2_backward(InC(x), InC(dt), InC(a), InC(b), InC(c), InC(dy), InC(dx), d_dt, db, dc, &backward, nullptr);
      },
      [&](const Tensor& dx) {
        mamba2_backward(x, dt, a, b, c, dy, dx, wanted[0], wanted[1], wanted[2],
                        {.d = &d,
                         .z = &z,
                         .dt_bias = &bias,
                         .dt_softplus = true,
                         .initial_states = &state,
                         .seq_idx = &numbers,
                         .d_final_states = &state,
                         .da = &wanted[3],
                         .dd = &wanted[4],
                         .dz = &wanted[5],
                         .d_dt_bias = &wanted[6],
                         .d_initial_states = &wanted[7]});
      });
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(same_bits(got[i], wanted[i])) << i;
  expect_refused(tw_mamba2(InC(x), InC(dt), InC(a), InC(b), InC(x), InC(x), nullptr, nullptr), "C is bf16[2, 9, 4, 8]");
}

TEST(CInterface, Mamba2InFiveSteps) {
  const Tensor x = Tensor::random({2, 20, 4, 8}, DType::bf16, 1), dt = Tensor::random({2, 20, 4}, DType::bf16, 2),
               b = Tensor::random({2, 20, 2, 16}, DType::bf16, 3), c = Tensor::random({2, 20, 2, 16}, DType::bf16, 4),
               z = Tensor::random(x.shape(), DType::bf16, 5), d = Tensor::random({4}, DType::f32, 6),
               bias = Tensor::random({4}, DType::f32, 7), initial = Tensor::random({2, 4, 8, 16}, DType::f32, 8);
  const Tensor a = Tensor::from<float>(std::vector<float>{-1, -0.5f, 0, -20}, {4}), numbers = Tensor::zeros({2, 20}, DType::i32);
  const Shape of_steps{2, 4, 2, 16}, of_states{2, 2, 4, 8, 16}, of_products{2, 2, 2, 16, 16};
  // In C the batch and its chunks are one dimension.
  const auto merged = [](const Tensor& t) {
    return Tensor::borrow(t.data(), {4, t.shape(2), t.shape(3), t.shape(4)}, t.dtype(), t.device());
  };
  const Tensor sizes = poisoned(of_steps, DType::f32), wanted_sizes = poisoned(of_steps, DType::f32);
  const InC bias_in_c(bias), numbers_in_c(numbers), d_in_c(d), z_in_c(z);
  tw_mamba2_chunk_cumsum_options cumsum = {};
  cumsum.struct_size = sizeof cumsum;
  cumsum.dt_bias = bias_in_c;
  cumsum.dt_softplus = 1;
  cumsum.has_dt_limit = 1;
  cumsum.dt_min = 0.25f;
  cumsum.dt_max = 0.5f;
  cumsum.seq_idx = numbers_in_c;
  expect_same(
      of_steps, DType::f32,
      [&](const Tensor& to) { return tw_mamba2_chunk_cumsum(InC(dt), InC(a), InC(to), InC(sizes), &cumsum, nullptr); },
      [&](const Tensor& to) {
        mamba2_chunk_cumsum(dt, a, to, wanted_sizes,
                            {.dt_bias = &bias, .dt_softplus = true, .dt_min = 0.25f, .dt_max = 0.5f, .seq_idx = &numbers});
      });
  EXPECT_TRUE(same_bits(sizes, wanted_sizes));
  const Tensor sums = poisoned(of_steps, DType::f32), added = poisoned(of_states, DType::f32), states = poisoned(of_states, DType::bf16),
               cb = poisoned(of_products, DType::f32);
  mamba2_chunk_cumsum(dt, a, sums, sizes);
  mamba2_chunk_state(b, x, sizes, sums, added);
  mamba2_state_passing(added, sums.select(3, 15), states);
  mamba2_bmm_chunk(c, b, cb);
  expect_same(
      of_states, DType::f32,
      [&](const Tensor& to) { return tw_mamba2_chunk_state(InC(b), InC(x), InC(sizes), InC(sums), InC(merged(to)), nullptr); },
      [&](const Tensor& to) { mamba2_chunk_state(b, x, sizes, sums, to); });
  const Tensor last = poisoned(initial.shape(), DType::f32), wanted_last = poisoned(initial.shape(), DType::f32);
  const Tensor decays = sums.select(3, 15);
  expect_same(
      of_states, DType::bf16,
      [&](const Tensor& to) {
        return tw_mamba2_state_passing(InC(merged(added)), InC(decays), InC(merged(to)), InC(initial), InC(last), nullptr);
      },
      [&](const Tensor& to) { mamba2_state_passing(added, decays, to, {.initial_states = &initial, .final_states = &wanted_last}); });
  EXPECT_TRUE(same_bits(last, wanted_last));
  for (const bool causal : {false, true})
    expect_same(
        of_products, DType::f32, [&](const Tensor& to) { return tw_mamba2_bmm_chunk(InC(c), InC(b), InC(merged(to)), causal, nullptr); },
        [&](const Tensor& to) { mamba2_bmm_chunk(c, b, to, {.causal = causal}); });
  const Tensor ungated = poisoned(x.shape(), DType::bf16), wanted_ungated = poisoned(x.shape(), DType::bf16);
  const InC ungated_in_c(ungated);
  tw_mamba2_chunk_scan_options scan = {};
  scan.struct_size = sizeof scan;
  scan.d = d_in_c;
  scan.z = z_in_c;
  scan.ungated = ungated_in_c;
  expect_same(
      x.shape(), DType::bf16,
      [&](const Tensor& to) {
        return tw_mamba2_chunk_scan(InC(merged(cb)), InC(x), InC(sizes), InC(sums), InC(c), InC(merged(states)), InC(to), &scan, nullptr);
      },
      [&](const Tensor& to) { mamba2_chunk_scan(cb, x, sizes, sums, c, states, to, {.d = &d, .z = &z, .ungated = &wanted_ungated}); });
  EXPECT_TRUE(same_bits(ungated, wanted_ungated));

  // Gradients. A pair of tensors for each output: from C, and from C++.
  const auto outputs = [](const Tensor& like, DType dtype) {
    return std::pair{poisoned(like.shape(), dtype), poisoned(like.shape(), dtype)};
  };
  const auto in_f32 = [&](const Tensor& like) { return outputs(like, DType::f32); };
  const auto expect_equal = [](std::initializer_list<std::pair<Tensor, Tensor>> all) {
    for (const auto& [from_c, from_cpp] : all) EXPECT_TRUE(same_bits(from_c, from_cpp));
  };
  const Tensor dy = Tensor::random(x.shape(), DType::bf16, 9), d_sums = Tensor::random(of_steps, DType::f32, 10),
               d_sizes = Tensor::random(of_steps, DType::f32, 11), d_cb = Tensor::random(of_products, DType::f32, 12),
               d_states = Tensor::random(of_states, DType::f32, 13);
  const auto d_dt = outputs(dt, DType::bf16), da = in_f32(a), d_bias = in_f32(bias);
  const InC da_in_c(da.first), d_bias_in_c(d_bias.first);
  tw_mamba2_chunk_cumsum_backward_options cumsum_backward = {};
  cumsum_backward.struct_size = sizeof cumsum_backward;
  cumsum_backward.dt_bias = bias_in_c;
  cumsum_backward.dt_softplus = 1;
  cumsum_backward.has_dt_limit = 1;
  cumsum_backward.dt_min = 0.25f;
  cumsum_backward.dt_max = 0.5f;
  cumsum_backward.seq_idx = numbers_in_c;
  cumsum_backward.da = da_in_c;
  cumsum_backward.d_dt_bias = d_bias_in_c;
  EXPECT_OK(tw_mamba2_chunk_cumsum_backward(InC(dt), InC(a), InC(d_sums), InC(d_sizes), InC(d_dt.first), &cumsum_backward, nullptr));
  mamba2_chunk_cumsum_backward(dt, a, d_sums, d_sizes, d_dt.second,
                               {.dt_bias = &bias,
                                .dt_softplus = true,
                                .dt_min = 0.25f,
                                .dt_max = 0.5f,
                                .seq_idx = &numbers,
                                .da = &da.second,
                                .d_dt_bias = &d_bias.second});
  expect_equal({d_dt, da, d_bias});

  const auto db = outputs(b, DType::bf16), dx = outputs(x, DType::bf16), of_dt = in_f32(sizes), of_sums = in_f32(sums);
  EXPECT_OK(tw_mamba2_chunk_state_backward(InC(b), InC(x), InC(sizes), InC(sums), InC(merged(d_states)), InC(db.first), InC(dx.first),
                                           InC(of_dt.first), InC(of_sums.first), nullptr));
  mamba2_chunk_state_backward(b, x, sizes, sums, d_states, db.second, dx.second, of_dt.second, of_sums.second);
  expect_equal({db, dx, of_dt, of_sums});

  const auto d_added = in_f32(added), d_decays = in_f32(decays), d_initial = in_f32(initial);
  EXPECT_OK(tw_mamba2_state_passing_backward(InC(merged(states)), InC(decays), InC(merged(d_states)), InC(merged(d_added.first)),
                                             InC(d_decays.first), InC(initial), InC(d_initial.first), nullptr));
  mamba2_state_passing_backward(states, decays, d_states, d_added.second, d_decays.second,
                                {.d_final_states = &initial, .d_initial_states = &d_initial.second});
  expect_equal({d_added, d_decays, d_initial});

  const auto dc = outputs(c, DType::bf16);
  for (const bool causal : {false, true}) {
    EXPECT_OK(tw_mamba2_bmm_chunk_backward(InC(c), InC(b), InC(merged(d_cb)), InC(dc.first), InC(db.first), causal, nullptr));
    mamba2_bmm_chunk_backward(c, b, d_cb, dc.second, db.second, {.causal = causal});
    expect_equal({dc, db});
  }

  const auto of_cb = in_f32(cb), of_state = in_f32(states), dd = in_f32(d), dz = outputs(z, DType::bf16);
  const InC dd_in_c(dd.first), dz_in_c(dz.first);
  tw_mamba2_chunk_scan_backward_options scan_backward = {};
  scan_backward.struct_size = sizeof scan_backward;
  scan_backward.d = d_in_c;
  scan_backward.z = z_in_c;
  scan_backward.ungated = ungated_in_c;
  scan_backward.dd = dd_in_c;
  scan_backward.dz = dz_in_c;
  EXPECT_OK(tw_mamba2_chunk_scan_backward(InC(merged(cb)), InC(x), InC(sizes), InC(sums), InC(c), InC(merged(states)), InC(dy),
                                          InC(merged(of_cb.first)), InC(dx.first), InC(of_dt.first), InC(of_sums.first), InC(dc.first),
                                          InC(merged(of_state.first)), &scan_backward, nullptr));
  mamba2_chunk_scan_backward(cb, x, sizes, sums, c, states, dy, of_cb.second, dx.second, of_dt.second, of_sums.second, dc.second,
                             of_state.second, {.d = &d, .z = &z, .ungated = &ungated, .dd = &dd.second, .dz = &dz.second});
  expect_equal({of_cb, dx, of_dt, of_sums, dc, of_state, dd, dz});

  expect_refused(tw_mamba2_bmm_chunk(InC(c), InC(b), InC(sums), 0, nullptr),
                 "it must have 4 dimensions, the first of 2 batches times 2 chunks");
}

TEST(CInterface, BlockSparseProducts) {
  const Tensor a = Tensor::random({100, 200}, DType::bf16, 1), b = Tensor::random({200, 70}, DType::bf16, 2),
               bias = Tensor::random({70}, DType::bf16, 3);
  const std::vector<std::uint8_t> numbers{1, 0, 0, 1, 0, 0, 1, 0};
  const Tensor mask = Tensor::from(std::span<const std::uint8_t>(numbers), {2, 4});
  const InC mask_in_c(mask), bias_in_c(bias);
  tw_block_sparse_gemm_options options = {};
  options.struct_size = sizeof options;
  options.block = 64;
  options.a_mask = mask_in_c;
  options.bias = bias_in_c;
  options.activation = TW_ACTIVATION_RELU;
  expect_same(
      {100, 70}, DType::bf16, [&](const Tensor& d) { return tw_block_sparse_gemm(InC(a), InC(b), InC(d), &options, nullptr); },
      [&](const Tensor& d) { block_sparse_gemm(a, b, d, {.block = 64, .a_mask = &mask, .bias = &bias, .activation = Activation::relu}); });
  options.block = 0;
  expect_refused(tw_block_sparse_gemm(InC(a), InC(b), InC(poisoned({100, 70}, DType::bf16)), &options, nullptr), "blocks of 128");
}

TEST(CInterface, WeightsInFewerBits) {
  const Tensor w = Tensor::random({21, 128}, DType::f32, 1), x = Tensor::random({5, 128}, DType::f32, 2),
               bias = Tensor::random({21}, DType::f32, 3);
  const InC bias_in_c(bias);
  tw_dequant_gemm_options options = {};
  options.struct_size = sizeof options;
  options.bias = bias_in_c;
  options.activation = TW_ACTIVATION_RELU;
  using Layout = QuantizedMatrix::Layout;
  for (const Layout& layout : {Layout{WeightFormat::int8}, Layout{WeightFormat::fp8}, Layout{WeightFormat::int4, 32, true}}) {
    const QuantizedMatrix expected = quantize(w, layout), given = QuantizedMatrix::allocate(21, 128, layout);
    const InC zeros(expected.zeros), given_zeros(given.zeros);
    const tw_tensor* const no_zeros = nullptr;
    EXPECT_OK(tw_quantize(InC(w), InC(given.values), InC(given.scales), layout.zero_points ? given_zeros : no_zeros, nullptr));
    EXPECT_TRUE(same_bits(given.values, expected.values) && same_bits(given.scales, expected.scales));
    EXPECT_TRUE(!layout.zero_points || same_bits(given.zeros, expected.zeros));
    expect_same(
        {5, 21}, DType::f32,
        [&](const Tensor& y) {
          return tw_dequant_gemm(InC(x), InC(expected.values), InC(expected.scales), layout.zero_points ? zeros : no_zeros, InC(y),
                                 &options, nullptr);
        },
        [&](const Tensor& y) { tw::dequant_gemm(x, expected, y, {.bias = &bias, .activation = Activation::relu}); });
  }
  for (const auto& [layout, format] : {std::pair{Layout{WeightFormat::int4, 32}, TW_WEIGHT_INT4},
                                       {Layout{WeightFormat::int2, 32, true}, TW_WEIGHT_INT2},
                                       {Layout{WeightFormat::nf4}, TW_WEIGHT_NF4},
                                       {Layout{WeightFormat::fp4}, TW_WEIGHT_FP4},
                                       {Layout{WeightFormat::mxfp4}, TW_WEIGHT_MXFP4}}) {
    const QuantizedMatrix expected = quantize(w, layout), given = QuantizedMatrix::allocate(21, 128, layout);
    const InC zeros(expected.zeros), given_zeros(given.zeros);
    const tw_tensor* const no_zeros = nullptr;
    EXPECT_OK(tw_quantize_to(InC(w), format, InC(given.values), InC(given.scales), layout.zero_points ? given_zeros : no_zeros, nullptr));
    EXPECT_TRUE(same_bits(given.values, expected.values) && same_bits(given.scales, expected.scales));
    options.format = format;
    expect_same(
        {5, 21}, DType::f32,
        [&](const Tensor& y) {
          return tw_dequant_gemm(InC(x), InC(expected.values), InC(expected.scales), layout.zero_points ? zeros : no_zeros, InC(y),
                                 &options, nullptr);
        },
        [&](const Tensor& y) { tw::dequant_gemm(x, expected, y, {.bias = &bias, .activation = Activation::relu}); });
    expect_same(
        {21, 128}, DType::bf16,
        [&](const Tensor& out) {
          return tw_dequantize(InC(expected.values), InC(expected.scales), layout.zero_points ? zeros : no_zeros, format, InC(out),
                               nullptr);
        },
        [&](const Tensor& out) { tw::dequantize(expected, out); });
  }
  const QuantizedMatrix gated = quantize(w, {WeightFormat::nf4}).slice(0, 20);
  const Tensor gated_bias = bias.slice(0, 0, 20);
  const InC gated_bias_in_c(gated_bias);
  options.format = TW_WEIGHT_NF4, options.bias = gated_bias_in_c, options.activation = TW_ACTIVATION_SWIGLU;
  expect_same(
      {5, 10}, DType::f32,
      [&](const Tensor& y) { return tw_dequant_gemm(InC(x), InC(gated.values), InC(gated.scales), nullptr, InC(y), &options, nullptr); },
      [&](const Tensor& y) { tw::dequant_gemm(x, gated, y, {.bias = &gated_bias, .activation = Activation::swiglu}); });
  const QuantizedMatrix int4_groups = quantize(w, {WeightFormat::int4, 128});
  const Tensor integers = Tensor::empty({5, 128}, DType::i8), x_scales = Tensor::empty({5}, DType::f32);
  quantize_activations(x, integers, x_scales);
  const InC x_scales_in_c(x_scales);
  options = {};
  options.struct_size = sizeof options;
  options.x_scales = x_scales_in_c;
  expect_same(
      {5, 21}, DType::bf16,
      [&](const Tensor& y) {
        return tw_dequant_gemm(InC(integers), InC(int4_groups.values), InC(int4_groups.scales), nullptr, InC(y), &options, nullptr);
      },
      [&](const Tensor& y) { tw::dequant_gemm(integers, int4_groups, y, {.x_scales = &x_scales}); });
  options.bias = bias_in_c, options.activation = TW_ACTIVATION_RELU, options.x_scales = nullptr;
  const Tensor y = poisoned({5, 21}, DType::f32);
  options.format = static_cast<tw_weight_format>(8);
  const QuantizedMatrix int4 = quantize(w, {WeightFormat::int4, 32});
  expect_refused(tw_dequant_gemm(InC(x), InC(int4.values), InC(int4.scales), nullptr, InC(y), &options, nullptr), "options.format is 8");
  const QuantizedMatrix int8 = quantize(w, {});
  expect_refused(tw_dequant_gemm(InC(x), InC(w), InC(int8.scales), nullptr, InC(y), nullptr, nullptr), "values are");
  expect_refused(tw_dequant_gemm(InC(x), InC(int8.values), InC(int8.scales), InC(int8.scales), InC(y), nullptr, nullptr),
                 "zeros are given");
  expect_refused(tw_quantize(InC(w), InC(int8.values), InC(x), nullptr, nullptr), "scales are");
  expect_refused(tw_dequantize(InC(int8.values), InC(int8.scales), nullptr, TW_WEIGHT_BY_DTYPE, InC(y), nullptr), "f32[5, 21]");
}

TEST(CInterface, TernaryWeights) {
  const Tensor w = Tensor::random({21, 128}, DType::f32, 1), x = Tensor::random({5, 128}, DType::f32, 2),
               bias = Tensor::random({21}, DType::f32, 3);
  const InC bias_in_c(bias);
  tw_bit_linear_options options = {};
  options.struct_size = sizeof options;
  options.bias = bias_in_c;
  const TernaryMatrix expected = quantize_ternary(w), given = TernaryMatrix::allocate(21, 128);
  EXPECT_OK(tw_quantize_ternary(InC(w), InC(given.values), InC(given.scales), nullptr));
  EXPECT_TRUE(same_bits(given.values, expected.values) && same_bits(given.scales, expected.scales));
  const Tensor integers = Tensor::empty({5, 128}, DType::i8), scales = Tensor::empty({5}, DType::f32);
  expect_same(
      {5, 128}, DType::i8, [&](const Tensor& to) { return tw_quantize_activations(InC(x), InC(to), InC(scales), nullptr); },
      [&](const Tensor& to) { tw::quantize_activations(x, to, scales); });
  tw::quantize_activations(x, integers, scales);
  expect_same(
      {21, 128}, DType::i8, [&](const Tensor& out) { return tw_unpack_ternary(InC(given.values), InC(given.scales), InC(out), nullptr); },
      [&](const Tensor& out) { tw::unpack_ternary(given, out); });
  expect_same(
      {5, 21}, DType::bf16,
      [&](const Tensor& y) {
        return tw_ternary_gemm(InC(integers), InC(scales), InC(given.values), InC(given.scales), InC(y), nullptr, nullptr);
      },
      [&](const Tensor& y) { tw::ternary_gemm(integers, scales, given, y); });
  expect_same(
      {5, 21}, DType::f32,
      [&](const Tensor& y) { return tw_bit_linear(InC(x), InC(given.values), InC(given.scales), InC(y), &options, nullptr); },
      [&](const Tensor& y) { tw::bit_linear(x, given, y, {.bias = &bias}); });
  const Tensor sums = Tensor::zeros({5, 21}, DType::f32), twice = Tensor::zeros({5, 21}, DType::f32);
  options.accumulate = 1;
  for (int i = 0; i < 2; ++i) {
    EXPECT_OK(tw_bit_linear(InC(x), InC(given.values), InC(given.scales), InC(sums), &options, nullptr));
    bit_linear(x, given, twice, {.accumulate = true, .bias = &bias});
  }
  EXPECT_TRUE(same_bits(sums, twice));
  const Tensor packed = Tensor::zeros({2, 12}, DType::u8);
  for (int i = 0; i < 24; ++i) packed.data<std::uint8_t>()[i] = static_cast<std::uint8_t>(i % 3 | i % 2 << 4);
  const TernaryMatrix converted = convert_bitnet(packed, 0.5f), to = TernaryMatrix::allocate(8, 12);
  EXPECT_OK(tw_convert_bitnet(InC(packed), 0.5f, InC(to.values), InC(to.scales), nullptr));
  EXPECT_TRUE(same_bits(to.values, converted.values) && same_bits(to.scales, converted.scales));
  expect_refused(tw_convert_bitnet(InC(packed), 0.5f, InC(given.values), InC(to.scales), nullptr), "values is u8[21, 32]");
  expect_refused(tw_bit_linear(InC(w), InC(to.values), InC(to.scales), InC(sums), nullptr, nullptr), "x is f32[21, 128]");
}

TEST(CInterface, CausalConvolutions) {
  const Tensor x = Tensor::random({2, 9, 5}, DType::f32, 1), weight = Tensor::random({5, 4}, DType::f32, 2),
               bias = Tensor::random({5}, DType::f32, 3), state = Tensor::random({2, 5, 3}, DType::f32, 4),
               dy = Tensor::random({2, 9, 5}, DType::f32, 5);
  const Tensor last = Tensor::zeros(state.shape(), DType::f32), expected_last = Tensor::zeros(state.shape(), DType::f32);
  const InC bias_in_c(bias), state_in_c(state), last_in_c(last);
  tw_causal_conv1d_options options = {};
  options.struct_size = sizeof options;
  options.bias = bias_in_c, options.initial_state = state_in_c, options.final_state = last_in_c, options.silu = 1;
  expect_same(
      x.shape(), DType::f32, [&](const Tensor& y) { return tw_causal_conv1d(InC(x), InC(weight), InC(y), &options, nullptr); },
      [&](const Tensor& y) {
        tw::causal_conv1d(x, weight, y, {.bias = &bias, .initial_state = &state, .final_state = &expected_last, .silu = true});
      });
  EXPECT_TRUE(same_bits(last, expected_last));
  const Tensor one = x.slice(1, 0, 1);
  expect_same(
      {2, 1, 5}, DType::f32,
      [&](const Tensor& y) { return tw_causal_conv1d_update(InC(one), InC(last), InC(weight), nullptr, InC(y), 0, nullptr); },
      [&](const Tensor& y) { tw::causal_conv1d_update(one, expected_last, weight, y); });
  EXPECT_TRUE(same_bits(last, expected_last));
  const Tensor d_weight = poisoned(weight.shape(), DType::f32), d_bias = poisoned(bias.shape(), DType::f32),
               d_state = poisoned(state.shape(), DType::f32);
  const Tensor of_weight = poisoned(weight.shape(), DType::f32), of_bias = poisoned(bias.shape(), DType::f32),
               of_state = poisoned(state.shape(), DType::f32);
  expect_same(
      x.shape(), DType::f32,
      [&](const Tensor& dx) {
        return tw_causal_conv1d_backward(InC(dy), InC(x), InC(weight), InC(last), InC(dx), InC(d_weight), InC(d_bias), InC(d_state),
                                         &options, nullptr);
      },
      [&](const Tensor& dx) {
        tw::causal_conv1d_backward(dy, x, weight, dx,
                                   {.bias = &bias,
                                    .initial_state = &state,
                                    .silu = true,
                                    .d_final_state = &last,
                                    .d_weight = &of_weight,
                                    .d_bias = &of_bias,
                                    .d_initial_state = &of_state});
      });
  EXPECT_TRUE(same_bits(d_weight, of_weight) && same_bits(d_bias, of_bias) && same_bits(d_state, of_state));
  expect_refused(tw_causal_conv1d(InC(x), InC(x), InC(dy), nullptr, nullptr), "weight is f32[2, 9, 5]");
}

TEST(CInterface, GatedDeltaRule) {
  const Tensor q = Tensor::random({1, 9, 1, 8}, DType::f32, 1), v = Tensor::random({1, 9, 2, 6}, DType::f32, 2),
               beta = Tensor::random({1, 9, 2}, DType::f32, 3), g = Tensor::zeros({1, 9, 2}, DType::f32);
  const Tensor state = Tensor::zeros({1, 2, 8, 6}, DType::f32), expected = Tensor::zeros({1, 2, 8, 6}, DType::f32);
  const InC g_in_c(g), state_in_c(state);
  tw_gated_delta_options options = {};
  options.struct_size = sizeof options;
  options.g = g_in_c, options.has_scale = 1, options.scale = 0.5f, options.normalise_qk = 1, options.final_state = state_in_c;
  expect_same(
      v.shape(), DType::f32,
      [&](const Tensor& o) { return tw_gated_delta_rule(InC(q), InC(q), InC(v), InC(beta), InC(o), &options, nullptr); },
      [&](const Tensor& o) {
        gated_delta_rule(q, q, v, beta, o, {.g = &g, .scale = 0.5f, .normalise_qk = true, .final_state = &expected});
      });
  EXPECT_TRUE(same_bits(state, expected));
  const Tensor of_channels = Tensor::empty({1, 9, 2, 8}, DType::f32);
  std::fill_n(of_channels.data<float>(), of_channels.numel(), -0.5f);
  const InC of_channels_in_c(of_channels);
  options.g = of_channels_in_c;
  expect_same(
      v.shape(), DType::f32,
      [&](const Tensor& o) { return tw_gated_delta_rule(InC(q), InC(q), InC(v), InC(beta), InC(o), &options, nullptr); },
      [&](const Tensor& o) {
        gated_delta_rule(q, q, v, beta, o, {.g = &of_channels, .scale = 0.5f, .normalise_qk = true, .final_state = &expected});
      });
  EXPECT_TRUE(same_bits(state, expected));
  expect_refused(tw_gated_delta_rule_step(InC(q), InC(q), InC(v), InC(beta), InC(state), InC(v), &options, nullptr), "must be null");
  expect_same(
      v.shape(), DType::f32,
      [&](const Tensor& o) { return tw_gated_delta_rule_step(InC(q), InC(q), InC(v), InC(beta), InC(state), InC(o), nullptr, nullptr); },
      [&](const Tensor& o) { gated_delta_rule_step(q, q, v, beta, expected, o); });
  EXPECT_TRUE(same_bits(state, expected));
  expect_refused(tw_gated_delta_rule(InC(q), InC(v), InC(v), InC(beta), InC(v), nullptr, nullptr), "k is f32[1, 9, 2, 6]");
  const auto like = [](const Tensor& t) { return Tensor::zeros(t.shape(), t.dtype()); };
  const Tensor dk = like(q), dv = like(v), d_beta = like(beta), dg = like(g), d_initial = like(state);
  const Tensor of_k = like(q), of_v = like(v), of_beta = like(beta), of_g = like(g), of_initial = like(state);
  const InC dg_in_c(dg), d_initial_in_c(d_initial);
  tw_gated_delta_backward_options backward = {};
  backward.struct_size = sizeof backward;
  backward.g = g_in_c, backward.has_scale = 1, backward.scale = 0.5f, backward.normalise_qk = 1, backward.dg = dg_in_c;
  backward.initial_state = backward.d_final_state = state_in_c, backward.d_initial_state = d_initial_in_c;
  expect_same(
      q.shape(), DType::f32,
      [&](const Tensor& dq) {
        return tw_gated_delta_rule_backward(InC(q), InC(q), InC(v), InC(beta), InC(v), InC(dq), InC(dk), InC(dv), InC(d_beta), &backward,
                                            nullptr);
      },
      [&](const Tensor& dq) {
        gated_delta_rule_backward(q, q, v, beta, v, dq, of_k, of_v, of_beta,
                                  {.g = &g,
                                   .scale = 0.5f,
                                   .normalise_qk = true,
                                   .initial_state = &state,
                                   .d_final_state = &state,
                                   .dg = &of_g,
                                   .d_initial_state = &of_initial});
      });
  EXPECT_TRUE(same_bits(dk, of_k) && same_bits(dv, of_v) && same_bits(d_beta, of_beta) && same_bits(dg, of_g) &&
              same_bits(d_initial, of_initial));
  const Tensor dg_of_channels = like(of_channels), expected_dg = like(of_channels);
  const InC dg_of_channels_in_c(dg_of_channels);
  backward.g = of_channels_in_c, backward.dg = dg_of_channels_in_c, backward.d_initial_state = nullptr;
  expect_same(
      q.shape(), DType::f32,
      [&](const Tensor& dq) {
        return tw_gated_delta_rule_backward(InC(q), InC(q), InC(v), InC(beta), InC(v), InC(dq), InC(dk), InC(dv), InC(d_beta), &backward,
                                            nullptr);
      },
      [&](const Tensor& dq) {
        gated_delta_rule_backward(
            q, q, v, beta, v, dq, of_k, of_v, of_beta,
            {.g = &of_channels, .scale = 0.5f, .normalise_qk = true, .initial_state = &state, .d_final_state = &state, .dg = &expected_dg});
      });
  EXPECT_TRUE(same_bits(dg_of_channels, expected_dg));
}

TEST(CInterface, PublishedWeights) {
  const auto words = [](Shape shape, int first) {
    const Tensor t = Tensor::empty(std::move(shape), DType::i32);
    for (std::int64_t i = 0; i < t.numel(); ++i)
      t.data<i32>()[i] = static_cast<i32>(0x9e3779b9u * static_cast<u32>(i + first)) & 0x77777777;
    return t;
  };
  const Tensor awq = words({64, 3}, 1), gptq = words({8, 24}, 2), packed = words({24, 8}, 3), zeros = words({2, 3}, 4),
               packed_zeros = words({3, 2}, 5), scales = Tensor::random({2, 24}, DType::f16, 6),
               by_row = Tensor::random({24, 2}, DType::bf16, 7);
  const tw_tensor* const none = nullptr;
  const auto expect_converted = [&](const QuantizedMatrix& expected, auto convert) {
    const QuantizedMatrix given = QuantizedMatrix::allocate(24, 64, {WeightFormat::int4, 32, true});
    EXPECT_OK(convert(InC(given.values), InC(given.scales), InC(given.zeros)));
    EXPECT_TRUE(same_bits(given.values, expected.values) && same_bits(given.scales, expected.scales));
    for (std::int64_t i = 0; i < given.zeros.numel(); ++i)
      EXPECT_EQ(given.zeros.data<u8>()[i], expected.zeros.numel() == 0 ? 8 : expected.zeros.data<u8>()[i]);
  };
  const auto converted_by = [&](const Tensor& weight, const Tensor& z, const Tensor& s, tw_weight_layout layout) {
    return [&, layout](const tw_tensor* v, const tw_tensor* to_s, const tw_tensor* to_z) {
      return tw_convert_weight(InC(weight), InC(z), InC(s), none, layout, v, to_s, to_z, nullptr);
    };
  };
  expect_converted(convert_awq(awq, zeros, scales), converted_by(awq, zeros, scales, TW_WEIGHT_LAYOUT_AWQ));
  expect_converted(convert_gptq(gptq, zeros, scales), converted_by(gptq, zeros, scales, TW_WEIGHT_LAYOUT_GPTQ));
  expect_converted(convert_gptq(gptq, zeros, scales, {.zeros_minus_one = false}),
                   converted_by(gptq, zeros, scales, TW_WEIGHT_LAYOUT_GPTQ_V2));
  expect_converted(convert_compressed_tensors(packed, by_row, &packed_zeros),
                   converted_by(packed, packed_zeros, by_row, TW_WEIGHT_LAYOUT_COMPRESSED_TENSORS));
  expect_converted(convert_compressed_tensors(packed, by_row), [&](const tw_tensor* v, const tw_tensor* s, const tw_tensor* z) {
    return tw_convert_weight(InC(packed), none, InC(by_row), none, TW_WEIGHT_LAYOUT_COMPRESSED_TENSORS, v, s, z, nullptr);
  });
  const QuantizedMatrix out = QuantizedMatrix::allocate(24, 64, {WeightFormat::int4, 32, true});
  const auto refused = [&](const tw_tensor* z, tw_weight_layout layout, const tw_tensor* v, const tw_tensor* to_z, const char* part) {
    expect_refused(tw_convert_weight(InC(awq), z, InC(scales), none, layout, v, InC(out.scales), to_z, nullptr), part);
  };
  refused(none, TW_WEIGHT_LAYOUT_AWQ, InC(out.values), InC(out.zeros), "qzeros is null");
  refused(InC(zeros), TW_WEIGHT_LAYOUT_AWQ, InC(out.values), none, "to_zeros is null");
  refused(InC(zeros), TW_WEIGHT_LAYOUT_AWQ, InC(out.scales), InC(out.zeros), "values are");
  refused(InC(zeros), static_cast<tw_weight_layout>(4), InC(out.values), InC(out.zeros), "layout is 4");
}

TEST(CInterface, ScaledFp8) {
  const Tensor x = Tensor::random({40, 256}, DType::f32, 1), w = Tensor::random({256, 384}, DType::f32, 2);
  Tensor y = poisoned({40, 256}, DType::fp8_e4m3), v = poisoned({256, 384}, DType::fp8_e4m3), y_scales = poisoned({40, 2}, DType::f32),
         v_scales = poisoned({2, 3}, DType::f32);
  EXPECT_OK(tw_cast_fp8(InC(x), InC(y), InC(y_scales), 1, nullptr));
  EXPECT_OK(tw_cast_fp8_blocks(InC(w), InC(v), InC(v_scales), 0, nullptr));
  const Tensor y_expected = poisoned(y.shape(), DType::fp8_e4m3), y_scales_expected = poisoned(y_scales.shape(), DType::f32),
               v_expected = poisoned(v.shape(), DType::fp8_e4m3), v_scales_expected = poisoned(v_scales.shape(), DType::f32);
  cast_fp8(x, y_expected, y_scales_expected, {.kind = Fp8Scales::powers_of_two});
  cast_fp8_blocks(w, v_expected, v_scales_expected);
  EXPECT_TRUE(same_bits(y, y_expected) && same_bits(y_scales, y_scales_expected));
  EXPECT_TRUE(same_bits(v, v_expected) && same_bits(v_scales, v_scales_expected));

  const InC y_scales_in_c(y_scales), v_scales_in_c(v_scales);
  tw_gemm_options options = {};
  options.struct_size = sizeof options;
  options.a_scale = y_scales_in_c, options.b_scale = v_scales_in_c;
  expect_same(
      {40, 384}, DType::bf16, [&](const Tensor& d) { return tw_gemm(InC(y), InC(v), InC(d), &options, nullptr); },
      [&](const Tensor& d) { tw::gemm(y, v, d, {.a_scale = &y_scales, .b_scale = &v_scales}); });

  const Tensor gate = x.slice(1, 0, 128), up = x.slice(1, 128, 256);
  const Tensor gated_scales = poisoned({40, 1}, DType::f32), expected_scales = poisoned({40, 1}, DType::f32);
  expect_same(
      {40, 128}, DType::fp8_e4m3,
      [&](const Tensor& out) { return tw_cast_fp8_swiglu(InC(gate), InC(up), InC(out), InC(gated_scales), 1, nullptr); },
      [&](const Tensor& out) { cast_fp8_swiglu(gate, up, out, expected_scales, {.kind = Fp8Scales::powers_of_two}); });
  EXPECT_TRUE(same_bits(gated_scales, expected_scales));

  const Tensor sizes = integers({30, 10}, {2}), grouped_scales = poisoned({2, 32, 2}, DType::f32);
  expect_same(
      {2, 32, 256}, DType::fp8_e4m3,
      [&](const Tensor& out) { return tw_cast_fp8_grouped(InC(x), InC(sizes), InC(out), InC(grouped_scales), 0, nullptr); },
      [&](const Tensor& out) {
        cast_fp8_grouped(x, sizes, out, poisoned({2, 32, 2}, DType::f32));
      });
}

TEST(CInterface, Fp8OfHeads) {
  const Tensor x = Tensor::random({2, 20, 4, 64}, DType::bf16, 1), signs = Tensor::random({64}, DType::f32, 2);
  for (const bool rotate : {false, true}) {
    const Tensor scales = poisoned({2, 2}, DType::f32), expected_scales = poisoned({2, 2}, DType::f32);
    const InC signs_in_c(signs);
    const CastFp8HeadsOptions options{.rotate = rotate, .signs = rotate ? &signs : nullptr};
    EXPECT_OK(tw_head_scales(InC(x), InC(scales), rotate, rotate ? signs_in_c.get() : nullptr, nullptr));
    head_scales(x, expected_scales, options);
    EXPECT_TRUE(same_bits(scales, expected_scales));
    expect_same(
        x.shape(), DType::fp8_e4m3,
        [&](const Tensor& y) {
          return tw_cast_fp8_heads(InC(x), InC(y), InC(scales), rotate, rotate ? signs_in_c.get() : nullptr, nullptr);
        },
        [&](const Tensor& y) { cast_fp8_heads(x, y, scales, options); });
  }
  expect_refused(tw_head_scales(InC(x), InC(poisoned({2, 3}, DType::f32)), 0, nullptr, nullptr), "x has 4 heads and scales 3");
}

TEST(CInterface, Convolutions) {
  const Tensor x = Tensor::random({2, 9, 8, 3}, DType::f32, 1), w = Tensor::random({4, 3, 2, 3}, DType::f32, 2),
               bias = Tensor::random({4}, DType::f32, 3), line = Tensor::random({2, 9, 3}, DType::f32, 4),
               taps = Tensor::random({4, 3, 3}, DType::f32, 5);
  const InC bias_in_c(bias);
  tw_conv_options options = {};
  options.struct_size = sizeof options;
  options.stride[1] = 2;
  options.padding[0] = 1;
  options.dilation[0] = 2;
  options.bias = bias_in_c;
  options.activation = TW_ACTIVATION_RELU;
  expect_same(
      {2, 7, 4, 4}, DType::f32, [&](const Tensor& y) { return tw_conv2d(InC(x), InC(w), InC(y), &options, nullptr); },
      [&](const Tensor& y) {
        conv2d(x, w, y, {.stride = {1, 2}, .padding = {1, 0}, .dilation = {2, 1}, .bias = &bias, .activation = Activation::relu});
      });
  expect_same(
      {2, 7, 4}, DType::f32, [&](const Tensor& y) { return tw_conv1d(InC(line), InC(taps), InC(y), &options, nullptr); },
      [&](const Tensor& y) { conv1d(line, taps, y, {.padding = 1, .dilation = 2, .bias = &bias, .activation = Activation::relu}); });
}

TEST(CInterface, Rows) {
  const Tensor x = Tensor::random({5, 33}, DType::f16, 1), weight = Tensor::random({33}, DType::f16, 2),
               bias = Tensor::random({33}, DType::f16, 3), residual = Tensor::random({5, 33}, DType::f16, 4),
               sum = poisoned({5, 33}, DType::f16), expected_sum = poisoned({5, 33}, DType::f16);
  const InC weight_in_c(weight), bias_in_c(bias), residual_in_c(residual), sum_in_c(sum);
  tw_norm_options options = {};
  options.struct_size = sizeof options;
  options.weight = weight_in_c;
  options.residual = residual_in_c;
  options.sum = sum_in_c;
  expect_same(
      x.shape(), DType::f16, [&](const Tensor& y) { return tw_rms_norm(InC(x), InC(y), &options, nullptr); },
      [&](const Tensor& y) { rms_norm(x, y, {.weight = &weight, .residual = &residual, .sum = &expected_sum}); });
  EXPECT_TRUE(same_bits(sum, expected_sum));
  options.bias = bias_in_c;
  options.has_epsilon = 1, options.epsilon = 0.25f;
  expect_same(
      x.shape(), DType::f16, [&](const Tensor& y) { return tw_layer_norm(InC(x), InC(y), &options, nullptr); },
      [&](const Tensor& y) {
        layer_norm(x, y, {.epsilon = 0.25f, .weight = &weight, .bias = &bias, .residual = &residual, .sum = &expected_sum});
      });
  expect_same(
      x.shape(), DType::f32, [&](const Tensor& y) { return tw_softmax(InC(x), InC(y), 3, nullptr); },
      [&](const Tensor& y) { softmax(x, y, {.scale = 3}); });
  const Tensor rows = Tensor::random({3, 24}, DType::f32, 7), factors = Tensor::random({24}, DType::f32, 8);
  expect_same(
      rows.shape(), DType::bf16, [&](const Tensor& y) { return tw_hadamard(InC(rows), InC(y), InC(factors), 0.5f, nullptr); },
      [&](const Tensor& y) { hadamard(rows, y, {.scale = 0.5f, .factors = &factors}); });
  expect_same(
      rows.shape(), DType::f32, [&](const Tensor& y) { return tw_hadamard(InC(rows), InC(y), nullptr, 2, nullptr); },
      [&](const Tensor& y) { hadamard(rows, y, {.scale = 2}); });
  for (int reduction = TW_SUM; reduction <= TW_ABS_MAX; ++reduction) {
    expect_same(
        {33}, DType::f32, [&](const Tensor& y) { return tw_reduce(static_cast<tw_reduction>(reduction), InC(x), InC(y), 0, nullptr); },
        [&](const Tensor& y) { reduce(static_cast<Reduction>(reduction), x, y, {.dim = 0}); });
  }
}

TEST(CInterface, RopeAndEmbedding) {
  const Tensor positions = integers({3, 0, 7, 2}, {4}), sin = poisoned({4, 8}, DType::f32), expected_sin = poisoned({4, 8}, DType::f32);
  expect_same(
      {4, 8}, DType::f32, [&](const Tensor& cos) { return tw_rope_table(InC(cos), InC(sin), 500, 0, InC(positions), nullptr); },
      [&](const Tensor& cos) { rope_table(cos, expected_sin, {.theta = 500, .positions = &positions}); });
  EXPECT_TRUE(same_bits(sin, expected_sin));
  const Tensor x = Tensor::random({2, 4, 3, 20}, DType::f32, 1), offsets = integers({1, 0}, {2});
  const InC positions_in_c(positions), offsets_in_c(offsets);
  tw_rope_options options = {};
  options.struct_size = sizeof options;
  options.interleaved = 1;
  options.positions = positions_in_c;
  expect_same(
      x.shape(), DType::f32, [&](const Tensor& y) { return tw_rope(InC(x), InC(sin), InC(sin), InC(y), &options, nullptr); },
      [&](const Tensor& y) { rope(x, sin, sin, y, {.pairing = RopePairing::interleaved, .positions = &positions}); });
  options = {};
  options.struct_size = sizeof options;
  options.offsets = offsets_in_c;
  expect_same(
      x.shape(), DType::f32, [&](const Tensor& y) { return tw_rope(InC(x), InC(sin), InC(sin), InC(y), &options, nullptr); },
      [&](const Tensor& y) { rope(x, sin, sin, y, {.offsets = &offsets}); });
  const Tensor table = Tensor::random({9, 6}, DType::f32, 2);
  expect_same(
      {4, 6}, DType::f32, [&](const Tensor& y) { return tw_embedding(InC(table), InC(positions), InC(y), 2, nullptr); },
      [&](const Tensor& y) { embedding(table, positions, y, {.scale = 2}); });
}

TEST(CInterface, LargestElements) {
  const Tensor x = Tensor::random({3, 40}, DType::f32, 1), ends = integers({40, 2, 9}, {3}), values = poisoned({3, 4}, DType::f32),
               expected_values = poisoned({3, 4}, DType::f32), largest = poisoned({3}, DType::f32),
               expected_largest = poisoned({3}, DType::f32);
  expect_same(
      {3}, DType::i32, [&](const Tensor& y) { return tw_argmax(InC(x), InC(y), InC(largest), nullptr); },
      [&](const Tensor& y) { argmax(x, y, {.values = &expected_largest}); });
  EXPECT_TRUE(same_bits(largest, expected_largest));
  const InC ends_in_c(ends);
  tw_topk_options options = {};
  options.struct_size = sizeof options;
  options.smallest = options.unsorted = 1;
  options.ends = ends_in_c;
  expect_same(
      {3, 4}, DType::i64, [&](const Tensor& y) { return tw_topk(InC(x), 4, InC(values), InC(y), &options, nullptr); },
      [&](const Tensor& y) { topk(x, 4, expected_values, y, {.largest = false, .sorted = false, .ends = &ends}); });
  EXPECT_TRUE(same_bits(values, expected_values));
}

TEST(CInterface, MixtureOfExperts) {
  const Tensor logits = Tensor::random({5, 8}, DType::bf16, 1), bias = Tensor::random({8}, DType::f32, 2);
  const Tensor weights = poisoned({5, 3}, DType::f32), expected_weights = poisoned({5, 3}, DType::f32);
  const InC bias_in_c(bias);
  tw_moe_route_options route = {};
  route.struct_size = sizeof route;
  route.score = TW_MOE_SIGMOID;
  route.group_score = TW_MOE_SUM_OF_TWO;
  route.bias = bias_in_c;
  route.groups = 4;
  route.groups_taken = 2;
  route.renormalise = route.has_scale = 1;
  route.scale = 2.5f;
  const MoeRouteOptions in_cpp{.score = MoeScore::sigmoid,
                               .bias = &bias,
                               .groups = 4,
                               .groups_taken = 2,
                               .group_score = MoeGroupScore::sum_of_two,
                               .renormalise = true,
                               .scale = 2.5f};
  expect_same(
      {5, 3}, DType::i32, [&](const Tensor& y) { return tw_moe_route(InC(logits), InC(weights), InC(y), &route, nullptr); },
      [&](const Tensor& y) { moe_route(logits, expected_weights, y, in_cpp); });
  EXPECT_TRUE(same_bits(weights, expected_weights));
  expect_same(
      {5, 3}, DType::i32, [&](const Tensor& y) { return tw_moe_route(InC(logits), InC(weights), InC(y), nullptr, nullptr); },
      [&](const Tensor& y) { moe_route(logits, expected_weights, y); });
  EXPECT_TRUE(same_bits(weights, expected_weights));

  const Tensor experts = integers({3, 1, 2, 0, 7, 3, 5, 4, 3, 1, 6, 2, 3, 2, 8}, {5, 3});
  const Tensor offsets = poisoned({6}, DType::i32), rows = poisoned({15}, DType::i32), places = poisoned({5, 3}, DType::i32);
  const Tensor expected_offsets = poisoned({6}, DType::i32), expected_rows = poisoned({15}, DType::i32);
  EXPECT_OK(tw_moe_permutation(InC(experts), 5, 1, InC(offsets), InC(rows), InC(places), nullptr));
  const Tensor expected_places = poisoned({5, 3}, DType::i32);
  moe_permutation(experts, 5, expected_offsets, expected_rows, expected_places, {.first_expert = 1});
  EXPECT_TRUE(same_bits(offsets, expected_offsets) && same_bits(rows, expected_rows) && same_bits(places, expected_places));

  const Tensor x = Tensor::random({5, 16}, DType::bf16, 3), addend = Tensor::random({5, 16}, DType::bf16, 4);
  const Tensor results = Tensor::random({15, 16}, DType::bf16, 5);
  const Tensor sorted = Tensor::zeros({15, 16}, DType::bf16, Stream::standard(Device::cpu()));
  const Tensor expected_sorted = Tensor::zeros({15, 16}, DType::bf16, Stream::standard(Device::cpu()));
  EXPECT_OK(tw_moe_dispatch(InC(x), InC(places), InC(sorted), nullptr, nullptr));
  moe_dispatch(x, places, expected_sorted);
  EXPECT_TRUE(same_bits(sorted, expected_sorted));
  expect_same(
      {5, 16}, DType::bf16,
      [&](const Tensor& y) { return tw_moe_combine(InC(results), InC(places), InC(weights), InC(addend), InC(y), nullptr); },
      [&](const Tensor& y) { moe_combine(results, places, weights, y, {.addend = &addend}); });

  const Tensor gate_up = Tensor::random({5, 24, 16}, DType::bf16, 6), down = Tensor::random({5, 16, 12}, DType::bf16, 7);
  const Tensor shared_gate_up = Tensor::random({8, 16}, DType::bf16, 8), shared_down = Tensor::random({16, 4}, DType::bf16, 9);
  const InC shared_gate_up_in_c(shared_gate_up), shared_down_in_c(shared_down), addend_in_c(addend);
  tw_moe_experts_options options = {};
  options.struct_size = sizeof options;
  options.first_expert = 1;
  options.shared_gate_up = shared_gate_up_in_c;
  options.shared_down = shared_down_in_c;
  options.addend = addend_in_c;
  const MoeExpertsOptions of_experts{.first_expert = 1, .shared_gate_up = &shared_gate_up, .shared_down = &shared_down, .addend = &addend};
  expect_same(
      {5, 16}, DType::bf16,
      [&](const Tensor& y) {
        return tw_moe_experts(InC(x), InC(weights), InC(experts), InC(gate_up), InC(down), InC(y), &options, nullptr);
      },
      [&](const Tensor& y) { moe_experts(x, weights, experts, gate_up, down, y, of_experts); });
  expect_same(
      {5, 16}, DType::bf16,
      [&](const Tensor& y) { return tw_fused_moe(InC(x), InC(logits), 2, InC(gate_up), InC(down), InC(y), &route, &options, nullptr); },
      [&](const Tensor& y) { fused_moe(x, logits, 2, gate_up, down, y, {.route = in_cpp, .experts = of_experts}); });

  const Tensor fp8_x = Tensor::random({5, 128}, DType::bf16, 10), addend_of_fp8 = Tensor::random({5, 128}, DType::bf16, 11);
  const auto weight = [](Shape shape, std::uint64_t seed) {
    return Tensor::random(std::move(shape), DType::f32, seed).to(DType::fp8_e4m3);
  };
  const Tensor w[] = {weight({5, 256, 128}, 12), weight({5, 128, 128}, 13), weight({256, 128}, 14), weight({128, 128}, 15)};
  const Tensor s[] = {Tensor::random({5, 2, 1}, DType::f32, 16), Tensor::random({5, 1, 1}, DType::f32, 17),
                      Tensor::random({2, 1}, DType::f32, 18), Tensor::random({1, 1}, DType::f32, 19)};
  const InC w2(w[2]), w3(w[3]), s0(s[0]), s1(s[1]), s2(s[2]), s3(s[3]), addend_of_fp8_in_c(addend_of_fp8);
  tw_moe_experts_options fp8_options = {};
  fp8_options.struct_size = sizeof fp8_options;
  fp8_options.shared_gate_up = w2, fp8_options.shared_down = w3, fp8_options.addend = addend_of_fp8_in_c;
  fp8_options.gate_up_scale = s0, fp8_options.down_scale = s1;
  fp8_options.shared_gate_up_scale = s2, fp8_options.shared_down_scale = s3;
  const MoeExpertsOptions of_fp8{.shared_gate_up = &w[2],
                                 .shared_down = &w[3],
                                 .addend = &addend_of_fp8,
                                 .gate_up_scale = &s[0],
                                 .down_scale = &s[1],
                                 .shared_gate_up_scale = &s[2],
                                 .shared_down_scale = &s[3]};
  expect_same(
      {5, 128}, DType::bf16,
      [&](const Tensor& y) {
        return tw_moe_experts(InC(fp8_x), InC(weights), InC(experts), InC(w[0]), InC(w[1]), InC(y), &fp8_options, nullptr);
      },
      [&](const Tensor& y) { moe_experts(fp8_x, weights, experts, w[0], w[1], y, of_fp8); });
  const QuantizedMatrix packed_gate_up = quantize(Tensor::random({5 * 64, 128}, DType::f32, 20), {WeightFormat::mxfp4});
  const QuantizedMatrix packed_down = quantize(Tensor::random({5 * 128, 32}, DType::f32, 21), {WeightFormat::mxfp4});
  const Tensor packed[] = {packed_gate_up.values.reshape({5, 64, 64}), packed_down.values.reshape({5, 128, 16}),
                           packed_gate_up.scales.reshape({5, 64, 4}), packed_down.scales.reshape({5, 128, 1})};
  const InC packed_scale(packed[2]), packed_down_scale(packed[3]);
  tw_moe_experts_options packed_options = {};
  packed_options.struct_size = sizeof packed_options;
  packed_options.gate_up_scale = packed_scale, packed_options.down_scale = packed_down_scale;
  expect_same(
      {5, 128}, DType::bf16,
      [&](const Tensor& y) {
        return tw_moe_experts(InC(fp8_x), InC(weights), InC(experts), InC(packed[0]), InC(packed[1]), InC(y), &packed_options, nullptr);
      },
      [&](const Tensor& y) {
        moe_experts(fp8_x, weights, experts, packed[0], packed[1], y, {.gate_up_scale = &packed[2], .down_scale = &packed[3]});
      });
  const Tensor sorted_scales = poisoned({15, 1}, DType::f32), expected_sorted_scales = poisoned({15, 1}, DType::f32);
  const Tensor fp8_sorted = Tensor::zeros({15, 128}, DType::fp8_e4m3, Stream::standard(Device::cpu()));
  const Tensor expected_fp8 = Tensor::zeros({15, 128}, DType::fp8_e4m3, Stream::standard(Device::cpu()));
  EXPECT_OK(tw_moe_dispatch(InC(fp8_x), InC(places), InC(fp8_sorted), InC(sorted_scales), nullptr));
  moe_dispatch(fp8_x, places, expected_fp8, {.scales = &expected_sorted_scales});
  EXPECT_TRUE(same_bits(fp8_sorted, expected_fp8) && same_bits(sorted_scales, expected_sorted_scales));

  const int wrong = 2;
  std::memcpy(&route.score, &wrong, sizeof wrong);
  expect_refused(tw_moe_route(InC(logits), InC(weights), InC(experts), &route, nullptr), "options.score is 2; see tw_moe_score");
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

TEST_F(CInterfaceAttention, Fp8) {
  const auto narrow = [](const Tensor& t) {
    const Tensor y = Tensor::empty(t.shape(), DType::fp8_e4m3);
    cast(t, y);
    return y;
  };
  const Tensor q8 = narrow(q), k8 = narrow(k), v8 = narrow(v);
  const std::array<float, 4> factors[] = {{0.5f, 1.5f, 0.7f, 1.1f}, {0.9f, 0.3f, 1.2f, 0.8f}, {2, 3, 4, 5}};
  std::vector<Tensor> descales;
  for (const auto& f : factors) descales.push_back(Tensor::from(std::span<const float>(f), {2, 2}));
  const InC q_descale(descales[0]), k_descale(descales[1]), v_descale(descales[2]);
  tw_attention_options options = attention_options();
  options.q_descale = q_descale, options.k_descale = k_descale, options.v_descale = v_descale;
  EXPECT_OK(tw_attention(InC(q8), InC(k8), InC(v8), InC(o), &options, nullptr));
  attention(q8, k8, v8, expected, {.q_descale = &descales[0], .k_descale = &descales[1], .v_descale = &descales[2]});
  EXPECT_TRUE(same_bits(o, expected));
  options.k_descale = nullptr;
  EXPECT_OK(tw_attention(InC(q8), InC(k8), InC(v8), InC(o), &options, nullptr));
  EXPECT_FALSE(same_bits(o, expected));
}

TEST_F(CInterfaceAttention, Dropout) {
  tw_attention_options options = attention_options();
  options.dropout = 0.3f;
  options.dropout_seed = 5, options.dropout_offset = 6;
  EXPECT_OK(tw_attention(InC(q), InC(k), InC(v), InC(o), &options, nullptr));
  attention(q, k, v, expected, {.dropout = 0.3f, .dropout_seed = 5, .dropout_offset = 6});
  EXPECT_TRUE(same_bits(o, expected));
  const std::array<std::int64_t, 2> numbers = {5, 6};
  const Tensor state = Tensor::from(std::span<const std::int64_t>(numbers), {2});
  const InC state_in_c(state);
  options.dropout_seed = options.dropout_offset = 0;
  options.dropout_state = state_in_c;
  EXPECT_OK(tw_attention(InC(q), InC(k), InC(v), InC(o), &options, nullptr));
  EXPECT_TRUE(same_bits(o, expected));
  const Tensor mask = Tensor::empty({2, 4, 37, 90}, DType::boolean), expected_mask = Tensor::empty(mask.shape(), DType::boolean);
  EXPECT_OK(tw_attention_dropout_mask(InC(mask), &options, nullptr));
  attention_dropout_mask(expected_mask, {.dropout = 0.3f, .dropout_seed = 5, .dropout_offset = 6});
  EXPECT_TRUE(same_bits(mask, expected_mask));
  options.dropout = 1;
  EXPECT_EQ(tw_attention(InC(q), InC(k), InC(v), InC(o), &options, nullptr), TW_INVALID_ARGUMENT);
}

TEST_F(CInterfaceAttention, Blocks) {
  const Tensor mask = Tensor::zeros({1, 4, 1, 2}, DType::boolean, Stream::standard(Device::cpu()));
  for (const int i : {0, 3, 4, 5}) static_cast<unsigned char*>(mask.data())[i] = 1;
  const std::array<std::int32_t, 8> entries = {0, 9, 1, -1, 1, 0, 1, 1};
  const std::array<std::int32_t, 4> numbers = {2, 1, 2, 0};
  const Tensor indices = Tensor::from(std::span<const std::int32_t>(entries), {1, 4, 1, 2}),
               counts = Tensor::from(std::span<const std::int32_t>(numbers), {1, 4, 1});
  const InC mask_in_c(mask), indices_in_c(indices), counts_in_c(counts);
  AttentionBlocks blocks{.mask = &mask, .key_block = 64};
  tw_attention_options options = attention_options();
  options.block_mask = mask_in_c;
  options.key_block = 64;
  EXPECT_OK(tw_attention(InC(q), InC(k), InC(v), InC(o), &options, nullptr));
  attention(q, k, v, expected, {.blocks = &blocks});
  EXPECT_TRUE(same_bits(o, expected));
  options.block_mask = nullptr;
  options.block_indices = indices_in_c, options.block_counts = counts_in_c;
  EXPECT_OK(tw_attention(InC(q), InC(k), InC(v), InC(o), &options, nullptr));
  EXPECT_TRUE(same_bits(o, expected));
  options.block_counts = nullptr;  // the last head's list has a block then
  EXPECT_OK(tw_attention(InC(q), InC(k), InC(v), InC(o), &options, nullptr));
  EXPECT_FALSE(same_bits(o, expected));
  options.query_block = 100;
  EXPECT_EQ(tw_attention(InC(q), InC(k), InC(v), InC(o), &options, nullptr), TW_INVALID_ARGUMENT);
  options.query_block = 0;
  options.block_indices = nullptr;
  EXPECT_EQ(tw_attention(InC(q), InC(k), InC(v), InC(o), &options, nullptr), TW_INVALID_ARGUMENT);
  EXPECT_NE(std::string(tw_last_error()).find("key_block 64"), std::string::npos);
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

TEST_F(CInterfaceAttention, Backward) {
  const Tensor sink = Tensor::random({4}, DType::f32, 5), lse = poisoned({2, 4, 37}, DType::f32),
               d_o = Tensor::random(q.shape(), DType::bf16, 6), d_sink = poisoned({4}, DType::f32),
               expected_d_sink = poisoned({4}, DType::f32);
  const auto gradients = [&] {
    return std::array{poisoned(q.shape(), DType::bf16), poisoned(k.shape(), DType::bf16), poisoned(v.shape(), DType::bf16)};
  };
  const auto call = [&](const std::array<Tensor, 3>& out, const tw_attention_backward_options* options) {
    return tw_attention_backward(InC(q), InC(k), InC(v), InC(o), InC(lse), InC(d_o), InC(out[0]), InC(out[1]), InC(out[2]), options,
                                 nullptr);
  };
  const auto expect_gradients = [&](const tw_attention_backward_options* options, const AttentionBackwardOptions& in_cpp) {
    AttentionOptions forward = in_cpp.forward;
    forward.lse = &lse;
    attention(q, k, v, o, forward);
    const auto out = gradients(), expected_out = gradients();
    EXPECT_OK(call(out, options));
    attention_backward(q, k, v, o, lse, d_o, expected_out[0], expected_out[1], expected_out[2], in_cpp);
    for (std::size_t i = 0; i < out.size(); ++i) EXPECT_TRUE(same_bits(out[i], expected_out[i]));
  };
  expect_gradients(nullptr, {});

  const InC sink_in_c(sink), d_sink_in_c(d_sink);
  tw_attention_options forward = attention_options();
  forward.causal = 1;
  forward.softcap = 2;
  forward.sink = sink_in_c;
  tw_attention_backward_options options = {};
  options.struct_size = sizeof options;
  options.forward = &forward;
  options.d_sink = d_sink_in_c;
  expect_gradients(&options, {.forward = {.causal = true, .softcap = 2, .sink = &sink}, .d_sink = &expected_d_sink});
  EXPECT_TRUE(same_bits(d_sink, expected_d_sink));
  options.d_sink = nullptr;
  options.deterministic = 1;
  expect_gradients(&options, {.forward = {.causal = true, .softcap = 2, .sink = &sink}, .deterministic = true});

  const Tensor mask = Tensor::random({4, 1, 90}, DType::f32, 7), d_mask = poisoned(mask.shape(), DType::f32),
               expected_d_mask = poisoned(mask.shape(), DType::f32);
  const InC mask_in_c(mask), d_mask_in_c(d_mask);
  forward.mask = mask_in_c;
  options.d_mask = d_mask_in_c;
  expect_gradients(
      &options,
      {.forward = {.causal = true, .softcap = 2, .sink = &sink, .mask = &mask}, .d_mask = &expected_d_mask, .deterministic = true});
  EXPECT_TRUE(same_bits(d_mask, expected_d_mask));
  forward.mask = nullptr;
  expect_refused(call(gradients(), &options), "forward.mask is not given");
  options.d_mask = nullptr;

  const auto out = gradients(), untouched = gradients();
  expect_refused(call({k, out[1], out[2]}, nullptr), "dq is bf16[2, 90, 2, 64]");
  expect_refused(
      tw_attention_backward(InC(q), InC(k), InC(v), InC(o), nullptr, InC(d_o), InC(out[0]), InC(out[1]), InC(out[2]), nullptr, nullptr),
      "lse is null");
  forward.struct_size = 0;
  expect_refused(call(out, &options), "options.forward.struct_size is 0");
  options.struct_size = 1;
  expect_refused(call(out, &options), "options.struct_size is 1");
  options = {};
  options.struct_size = sizeof options;
  options.d_sink = d_sink_in_c;
  expect_refused(call(out, &options), "forward.sink is not given");
  for (std::size_t i = 0; i < out.size(); ++i) EXPECT_TRUE(same_bits(out[i], untouched[i]));
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

TEST_F(CInterfaceAttention, GradientsOfPackedSequences) {
  const auto random = [](std::int64_t rows, std::int64_t heads, unsigned seed) {
    return Tensor::random({rows, heads, 64}, DType::bf16, seed);
  };
  const Tensor packed_q = random(70, 4, 1), packed_k = random(110, 2, 2), packed_v = random(110, 2, 3), packed_d_o = random(70, 4, 4),
               packed_o = poisoned(packed_q.shape(), DType::bf16), packed_lse = poisoned({4, 70}, DType::f32),
               sinks = Tensor::random({4}, DType::f32, 5), d_sink = poisoned({4}, DType::f32), expected_d_sink = poisoned({4}, DType::f32);
  const Tensor cu_q = integers({0, 30, 30, 70}, {4}), cu_k = integers({0, 50, 60, 110}, {4}), used_q = integers({30, 0, 25}, {3}),
               used_k = integers({17, 10, 50}, {3}), one = integers({0}, {1});
  const InC sink_in_c(sinks), d_sink_in_c(d_sink);
  tw_attention_options forward = attention_options();
  forward.causal = 1;
  forward.sink = sink_in_c;
  tw_attention_backward_options options = {};
  options.struct_size = sizeof options;
  options.forward = &forward;
  options.d_sink = d_sink_in_c;
  const auto gradients = [&] {
    return std::array{poisoned(packed_q.shape(), DType::bf16), poisoned(packed_k.shape(), DType::bf16),
                      poisoned(packed_v.shape(), DType::bf16)};
  };
  const auto call = [&](const std::array<Tensor, 3>& out, const Tensor& offsets_k, bool used) {
    return tw_attention_varlen_backward(InC(packed_q), InC(packed_k), InC(packed_v), InC(packed_o), InC(packed_lse), InC(packed_d_o),
                                        InC(out[0]), InC(out[1]), InC(out[2]), InC(cu_q), InC(offsets_k),
                                        used ? InC(used_q).get() : nullptr, used ? InC(used_k).get() : nullptr, &options, nullptr);
  };
  for (const bool used : {false, true}) {
    const PackedSequences sequences{cu_q, cu_k, used ? &used_q : nullptr, used ? &used_k : nullptr};
    AttentionOptions in_cpp{.causal = true, .sink = &sinks, .lse = &packed_lse};
    attention_varlen(packed_q, packed_k, packed_v, packed_o, sequences, in_cpp);
    const auto out = gradients(), expected_out = gradients();
    EXPECT_OK(call(out, cu_k, used));
    attention_varlen_backward(packed_q, packed_k, packed_v, packed_o, packed_lse, packed_d_o, expected_out[0], expected_out[1],
                              expected_out[2], sequences, {.forward = in_cpp, .d_sink = &expected_d_sink});
    for (std::size_t i = 0; i < out.size(); ++i) EXPECT_TRUE(same_bits(out[i], expected_out[i]));
    EXPECT_TRUE(same_bits(d_sink, expected_d_sink));
  }
  const auto out = gradients(), untouched = gradients();
  expect_refused(call(out, one, false), "cu_seqlens_k is i32[1]");
  for (std::size_t i = 0; i < out.size(); ++i) EXPECT_TRUE(same_bits(out[i], untouched[i]));
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

TEST_F(CInterfaceAttention, ChunksAndAMargin) {
  const Tensor out = poisoned(q.shape(), DType::bf16), expected_out = poisoned(q.shape(), DType::bf16);
  tw_attention_options options = attention_options();
  options.attention_chunk = 5;
  options.sm_margin = 3;
  EXPECT_OK(tw_attention(InC(q), InC(k), InC(v), InC(out), &options, nullptr));
  attention(q, k, v, expected_out, {.attention_chunk = 5});
  EXPECT_TRUE(same_bits(out, expected_out));
  attention(q, k, v, expected_out);
  EXPECT_FALSE(same_bits(out, expected_out));
  options.sm_margin = -1;
  expect_refused(tw_attention(InC(q), InC(k), InC(v), InC(out), &options, nullptr), "sm_margin is -1");
}

TEST_F(CInterfaceAttention, QueryValues) {
  const Tensor out = poisoned(q.shape(), DType::bf16), expected_out = poisoned(q.shape(), DType::bf16),
               qv = Tensor::random(q.shape(), DType::bf16, 17);
  const InC qv_in_c(qv);
  tw_attention_options options = attention_options();
  options.qv = qv_in_c;
  EXPECT_OK(tw_attention(InC(q), InC(k), InC(v), InC(out), &options, nullptr));
  attention(q, k, v, expected_out, {.qv = &qv});
  EXPECT_TRUE(same_bits(out, expected_out));
  const Tensor wrong = Tensor::random({3}, DType::bf16, 1);
  const InC wrong_in_c(wrong);
  options.qv = wrong_in_c;
  expect_refused(tw_attention(InC(q), InC(k), InC(v), InC(out), &options, nullptr), "qv is bf16[3]");
}

TEST(CInterface, DecodePlan) {
  tw_decode_problem problem = {};
  problem.struct_size = sizeof problem;
  problem.cuda_device = -1;
  problem.batch = 1, problem.seqlen_q = 1, problem.heads = 8, problem.kv_heads = 2, problem.seqlen_k = 4096;
  int32_t num_splits = -1;
  EXPECT_OK(tw_decode_plan(&problem, &num_splits));
  EXPECT_EQ(num_splits, decode_plan({.batch = 1, .seqlen_q = 1, .heads = 8, .kv_heads = 2, .seqlen_k = 4096}, Device::cpu()));
  num_splits = -1;
  problem.attention_chunk = -4;
  expect_refused(tw_decode_plan(&problem, &num_splits), "attention_chunk is -4");
  EXPECT_EQ(num_splits, -1);
  expect_refused(tw_decode_plan(nullptr, &num_splits), "problem is null");
  expect_refused(tw_decode_plan(&problem, nullptr), "num_splits is null");
}

TEST_F(CInterfaceAttention, DecodeOfPackedTokens) {
  const Tensor packed_q = Tensor::random({6, 4, 64}, DType::bf16, 1), new_k = Tensor::random({3, 2, 64}, DType::bf16, 7),
               new_v = Tensor::random({3, 2, 64}, DType::bf16, 8), out = poisoned(packed_q.shape(), DType::bf16),
               expected_out = poisoned(packed_q.shape(), DType::bf16);
  const Tensor cu_q = integers({0, 5, 6}, {3}), cu_new = integers({0, 1, 3}, {3}), seqlens = integers({50, 61}, {2});
  const auto cache = [](unsigned seed) { return Tensor::random({2, 80, 2, 64}, DType::bf16, seed); };
  const Tensor k_cache = cache(5), v_cache = cache(6), expected_k = cache(5), expected_v = cache(6);
  const InC seqlens_in_c(seqlens), new_k_in_c(new_k), new_v_in_c(new_v), cu_q_in_c(cu_q), cu_new_in_c(cu_new);
  tw_cache_options options = {};
  options.struct_size = sizeof options;
  options.seqlens = seqlens_in_c;
  options.new_k = new_k_in_c;
  options.new_v = new_v_in_c;
  options.cu_seqlens_q = cu_q_in_c;
  options.cu_seqlens_new = cu_new_in_c;
  EXPECT_OK(tw_attention_decode(InC(packed_q), InC(k_cache), InC(v_cache), InC(out), &options, nullptr, nullptr));
  attention_decode(packed_q, expected_k, expected_v, expected_out,
                   {.seqlens = &seqlens, .cu_seqlens_q = &cu_q, .cu_seqlens_new = &cu_new, .new_k = &new_k, .new_v = &new_v});
  EXPECT_TRUE(same_bits(out, expected_out));
  EXPECT_TRUE(same_bits(k_cache, expected_k));
  EXPECT_TRUE(same_bits(v_cache, expected_v));
}

TEST(CInterface, SparseLatentAttention) {
  const Tensor q = Tensor::random({3, 4, 576}, DType::bf16, 1), kv = Tensor::random({40, 576}, DType::bf16, 2);
  const Tensor indices = integers({3, 39, -1, 0, 0, 7, 50, 8, 1}, {3, 3}), lengths = integers({3, 2, 1}, {3});
  const Tensor sink = Tensor::random({4}, DType::f32, 3);
  const InC lengths_in_c(lengths), sink_in_c(sink);
  const Tensor lse = poisoned({3, 4}, DType::f32), max_logits = poisoned({3, 4}, DType::f32);
  const Tensor expected_lse = poisoned({3, 4}, DType::f32), expected_max = poisoned({3, 4}, DType::f32);
  const InC lse_in_c(lse), max_in_c(max_logits);
  tw_mla_sparse_options options = {};
  options.struct_size = sizeof options;
  options.topk_length = lengths_in_c;
  options.sink = sink_in_c;
  options.scale = 0.1f;
  options.num_splits = 2;
  options.lse = lse_in_c;
  options.max_logits = max_in_c;
  expect_same(
      {3, 4, 512}, DType::bf16, [&](const Tensor& o) { return tw_mla_sparse(InC(q), InC(kv), InC(indices), InC(o), &options, nullptr); },
      [&](const Tensor& o) {
        tw::mla_sparse(
            q, kv, indices, o,
            {.topk_length = &lengths, .scale = 0.1f, .sink = &sink, .lse = &expected_lse, .max_logits = &expected_max, .num_splits = 2});
      });
  EXPECT_TRUE(same_bits(lse, expected_lse));
  EXPECT_TRUE(same_bits(max_logits, expected_max));
  expect_same(
      {3, 4, 512}, DType::bf16, [&](const Tensor& o) { return tw_mla_sparse(InC(q), InC(kv), InC(indices), InC(o), nullptr, nullptr); },
      [&](const Tensor& o) { tw::mla_sparse(q, kv, indices, o); });
  options.num_splits = 200;
  expect_refused(tw_mla_sparse(InC(q), InC(kv), InC(indices), InC(poisoned({3, 4, 512}, DType::bf16)), &options, nullptr),
                 "num_splits is 200");

  const Tensor o = poisoned({3, 4, 512}, DType::bf16), d_o = Tensor::random({3, 4, 512}, DType::bf16, 9);
  tw::mla_sparse(q, kv, indices, o, {.topk_length = &lengths, .scale = 0.1f, .lse = &lse});
  tw_mla_sparse_backward_options backward = {};
  backward.struct_size = sizeof backward;
  backward.topk_length = lengths_in_c;
  backward.scale = 0.1f;
  backward.deterministic = 1;
  const Tensor dkv = poisoned(kv.shape(), DType::bf16), expected_dkv = poisoned(kv.shape(), DType::bf16);
  expect_same(
      q.shape(), DType::bf16,
      [&](const Tensor& dq) {
        return tw_mla_sparse_backward(InC(q), InC(kv), InC(indices), InC(o), InC(lse), InC(d_o), InC(dq), InC(dkv), &backward, nullptr);
      },
      [&](const Tensor& dq) {
        tw::mla_sparse_backward(q, kv, indices, o, lse, d_o, dq, expected_dkv,
                                {.topk_length = &lengths, .scale = 0.1f, .deterministic = true});
      });
  EXPECT_TRUE(same_bits(dkv, expected_dkv));
}

TEST(CInterface, VerticalSlashAttention) {
  const Tensor q = Tensor::random({1, 150, 4, 64}, DType::bf16, 1), k = Tensor::random({1, 150, 2, 64}, DType::bf16, 2),
               v = Tensor::random({1, 150, 2, 32}, DType::bf16, 3);
  const Tensor vertical = integers({0, 9, 0, 100, 149, 3, 7, 7}, {1, 4, 2}), slash = integers({0, 70, 3, 1}, {1, 4, 1}),
               seqlens = integers({140}, {1});
  const Tensor lse = poisoned({1, 4, 150}, DType::f32), expected_lse = poisoned({1, 4, 150}, DType::f32);
  const InC lse_in_c(lse), seqlens_in_c(seqlens);
  tw_vertical_slash_options options = {};
  options.struct_size = sizeof options;
  options.query_block = 128;
  options.scale = 0.1f;
  options.seqlens = seqlens_in_c;
  options.lse = lse_in_c;
  VerticalSlashOptions expected{.query_block = 128, .scale = 0.1f, .seqlens = &seqlens, .lse = &expected_lse};
  expect_same(
      {1, 150, 4, 32}, DType::bf16,
      [&](const Tensor& o) {
        return tw_vertical_slash_attention(InC(q), InC(k), InC(v), InC(vertical), InC(slash), InC(o), &options, nullptr);
      },
      [&](const Tensor& o) { vertical_slash_attention(q, k, v, vertical, slash, o, expected); });
  EXPECT_TRUE(same_bits(lse, expected_lse));
  expect_same(
      {1, 150, 4, 32}, DType::bf16,
      [&](const Tensor& o) {
        return tw_vertical_slash_attention(InC(q), InC(k), InC(v), InC(vertical), InC(slash), InC(o), nullptr, nullptr);
      },
      [&](const Tensor& o) { vertical_slash_attention(q, k, v, vertical, slash, o); });

  const auto lists = [] {
    return std::array{poisoned({1, 4, 2}, DType::i32), poisoned({1, 4, 2, 1}, DType::i32), poisoned({1, 4, 2}, DType::i32),
                      poisoned({1, 4, 2, 2}, DType::i32)};
  };
  const auto got = lists(), wanted = lists();
  const auto index = [&] {
    return tw_vertical_slash_index(InC(vertical), InC(slash), 150, InC(got[0]), InC(got[1]), InC(got[2]), InC(got[3]), &options, nullptr);
  };
  EXPECT_OK(index());
  vertical_slash_index(vertical, slash, 150, {wanted[0], wanted[1], wanted[2], wanted[3]}, expected);
  for (std::size_t n = 0; n < got.size(); ++n) EXPECT_TRUE(same_bits(got[n], wanted[n])) << n;
  options.query_block = 32;
  expect_refused(index(), "query_block is 32");
}

TEST(CInterface, NativeSparseAttention) {
  const Tensor q = Tensor::random({1, 100, 4, 64}, DType::bf16, 1), k = Tensor::random({1, 100, 2, 64}, DType::bf16, 2),
               v = Tensor::random({1, 100, 2, 32}, DType::bf16, 3), d_o = Tensor::random({1, 100, 4, 32}, DType::bf16, 4);
  const Tensor k_cmp = Tensor::random({1, 3, 2, 64}, DType::bf16, 5), v_cmp = Tensor::random({1, 3, 2, 32}, DType::bf16, 6);
  const Tensor lse = poisoned({1, 100, 4}, DType::f32), lists = poisoned({1, 100, 2, 2}, DType::i32),
               expected_lists = poisoned({1, 100, 2, 2}, DType::i32);
  const Tensor offsets = integers({0, 40, 100}, {2 + 1}), counts = Tensor::zeros({1, 100, 2}, DType::i32);
  std::fill_n(counts.data<std::int32_t>(), counts.numel(), 1);
  const InC lse_in_c(lse), offsets_in_c(offsets), counts_in_c(counts);
  tw_nsa_options options = {};
  options.struct_size = sizeof options;
  options.block_size = 32;
  options.scale = 0.1f;
  options.lse = lse_in_c;
  const NsaOptions expected{.block_size = 32, .scale = 0.1f, .lse = &lse};
  expect_same(
      {1, 100, 4, 32}, DType::bf16,
      [&](const Tensor& o) { return tw_nsa_compressed(InC(q), InC(k_cmp), InC(v_cmp), InC(o), &options, nullptr); },
      [&](const Tensor& o) { nsa_compressed(q, k_cmp, v_cmp, o, expected); });
  tw_nsa_select_options select = {};
  select.struct_size = sizeof select;
  select.block_size = 32;
  select.scale = 0.1f;
  select.initial_blocks = -1;
  select.local_blocks = 1;
  EXPECT_OK(tw_nsa_select(InC(q), InC(k_cmp), InC(lse), InC(lists), &select, nullptr));
  nsa_select(q, k_cmp, lse, expected_lists, {.block_size = 32, .scale = 0.1f, .initial_blocks = 0, .local_blocks = 1});
  EXPECT_TRUE(same_bits(lists, expected_lists));
  select.local_blocks = -2;
  expect_refused(tw_nsa_select(InC(q), InC(k_cmp), InC(lse), InC(lists), &select, nullptr), "local_blocks is -2");

  expect_same(
      {1, 100, 4, 32}, DType::bf16,
      [&](const Tensor& o) { return tw_nsa_selected(InC(q), InC(k), InC(v), InC(lists), InC(o), &options, nullptr); },
      [&](const Tensor& o) { nsa_selected(q, k, v, lists, o, expected); });
  options.cu_seqlens = offsets_in_c;
  options.block_counts = counts_in_c;
  NsaOptions packed = expected;
  packed.cu_seqlens = &offsets;
  packed.block_counts = &counts;
  const Tensor o = poisoned({1, 100, 4, 32}, DType::bf16), expected_o = poisoned({1, 100, 4, 32}, DType::bf16);
  EXPECT_OK(tw_nsa_selected(InC(q), InC(k), InC(v), InC(lists), InC(o), &options, nullptr));
  nsa_selected(q, k, v, lists, expected_o, packed);
  EXPECT_TRUE(same_bits(o, expected_o));

  const auto gradients = [&] {
    return std::array{poisoned(q.shape(), DType::bf16), poisoned(k.shape(), DType::bf16), poisoned(v.shape(), DType::bf16)};
  };
  const auto got = gradients(), wanted = gradients();
  EXPECT_OK(tw_nsa_selected_backward(InC(q), InC(k), InC(v), InC(lists), InC(o), InC(lse), InC(d_o), InC(got[0]), InC(got[1]), InC(got[2]),
                                     &options, nullptr));
  nsa_selected_backward(q, k, v, lists, o, lse, d_o, wanted[0], wanted[1], wanted[2], packed);
  for (std::size_t n = 0; n < got.size(); ++n) EXPECT_TRUE(same_bits(got[n], wanted[n])) << n;
  const Tensor got_k = poisoned(k_cmp.shape(), DType::bf16), got_v = poisoned(v_cmp.shape(), DType::bf16),
               wanted_k = poisoned(k_cmp.shape(), DType::bf16), wanted_v = poisoned(v_cmp.shape(), DType::bf16);
  options.cu_seqlens = nullptr;
  options.block_counts = nullptr;
  EXPECT_OK(tw_nsa_compressed_backward(InC(q), InC(k_cmp), InC(v_cmp), InC(o), InC(lse), InC(d_o), InC(got[0]), InC(got_k), InC(got_v),
                                       &options, nullptr));
  nsa_compressed_backward(q, k_cmp, v_cmp, o, lse, d_o, wanted[0], wanted_k, wanted_v, expected);
  EXPECT_TRUE(same_bits(got[0], wanted[0]));
  EXPECT_TRUE(same_bits(got_k, wanted_k));
  EXPECT_TRUE(same_bits(got_v, wanted_v));

  const Tensor gates = Tensor::random({1, 100, 4}, DType::f32, 7);
  expect_same(
      {1, 100, 4, 32}, DType::bf16,
      [&](const Tensor& y) { return tw_nsa_combine(InC(y), InC(o), InC(gates), nullptr, nullptr, InC(d_o), InC(gates), nullptr); },
      [&](const Tensor& y) {
        nsa_combine(y, {&o, nullptr, &d_o}, {&gates, nullptr, &gates});
      });
  options.block_size = 33;
  expect_refused(tw_nsa_compressed(InC(q), InC(k_cmp), InC(v_cmp), InC(o), &options, nullptr), "block_size is 33");
}

TEST(CInterface, Indexer) {
  const DType fp8 = DType::fp8_e4m3;
  const Tensor q = Tensor::random({3, 16, 128}, DType::f32, 1).to(fp8), k = Tensor::random({40, 128}, DType::f32, 2).to(fp8);
  const Tensor scale = Tensor::random({40}, DType::f32, 3), weights = Tensor::random({3, 16}, DType::f32, 4);
  const Tensor starts = integers({0, 5, 9}, {3}), ends = integers({40, 30, 9}, {3});
  const InC scale_in_c(scale), starts_in_c(starts), ends_in_c(ends);
  tw_indexer_options options = {};
  options.struct_size = sizeof options;
  options.k_scale = scale_in_c;
  options.starts = starts_in_c;
  options.ends = ends_in_c;
  options.causal = 1;
  options.no_clear = 1;
  options.num_splits = 2;
  expect_same(
      {3, 40}, DType::f32, [&](const Tensor& y) { return tw_indexer_scores(InC(q), InC(k), InC(weights), InC(y), &options, nullptr); },
      [&](const Tensor& y) {
        indexer_scores(q, k, weights, y,
                       {.k_scale = &scale, .starts = &starts, .ends = &ends, .causal = true, .clear = false, .num_splits = 2});
      });
  const Tensor half_q = q.to(DType::f32).to(DType::f16), half_k = k.to(DType::f32).to(DType::f16);
  expect_same(
      {3, 40}, DType::f32,
      [&](const Tensor& y) { return tw_indexer_scores(InC(half_q), InC(half_k), InC(weights), InC(y), nullptr, nullptr); },
      [&](const Tensor& y) { indexer_scores(half_q, half_k, weights, y); });
  expect_refused(tw_indexer_scores(InC(q), InC(k), InC(weights), InC(poisoned({3, 40}, DType::f32)), nullptr, nullptr),
                 "k_scale is missing");

  const Tensor paged_q = q.reshape({1, 3, 16, 128}), paged_weights = weights.reshape({1, 3, 16});
  const Tensor cache = Tensor::zeros({2, 64, 132}, DType::u8), table = integers({1, 0}, {1, 2}), seqlens = integers({70}, {1});
  for (std::int64_t i = 0; i < cache.numel(); ++i) cache.data<std::uint8_t>()[i] = static_cast<std::uint8_t>(i * 37 % 100);  // no NaN
  const InC seqlens_in_c(seqlens);
  tw_indexer_paged_options paged = {};
  paged.struct_size = sizeof paged;
  paged.seqlens = seqlens_in_c;
  paged.not_causal = 1;
  paged.no_clear = 1;
  paged.num_splits = 2;
  expect_same(
      {1, 3, 100}, DType::f32,
      [&](const Tensor& y) {
        return tw_indexer_scores_paged(InC(paged_q), InC(cache), InC(paged_weights), InC(table), InC(y), &paged, nullptr);
      },
      [&](const Tensor& y) {
        indexer_scores_paged(paged_q, cache, paged_weights, table, y,
                             {.seqlens = &seqlens, .causal = false, .clear = false, .num_splits = 2});
      });
  expect_same(
      {1, 3, 100}, DType::f32,
      [&](const Tensor& y) {
        return tw_indexer_scores_paged(InC(paged_q), InC(cache), InC(paged_weights), InC(table), InC(y), nullptr, nullptr);
      },
      [&](const Tensor& y) { indexer_scores_paged(paged_q, cache, paged_weights, table, y); });
  paged.num_splits = -1;
  expect_refused(tw_indexer_scores_paged(InC(paged_q), InC(cache), InC(paged_weights), InC(table), InC(poisoned({1, 3, 100}, DType::f32)),
                                         &paged, nullptr),
                 "num_splits is -1");
}

TEST(CInterface, LatentAttention) {
  const Tensor q = Tensor::random({2, 3, 4, 576}, DType::bf16, 1), kv = Tensor::random({5, 16, 576}, DType::bf16, 2);
  const Tensor seqlens = integers({20, 32}, {2}), pages = integers({3, 1, 0, 4}, {2, 2});
  const InC seqlens_in_c(seqlens), pages_in_c(pages);
  const Tensor lse = poisoned({2, 4, 3}, DType::f32), expected_lse = poisoned(lse.shape(), DType::f32);
  const InC lse_in_c(lse);
  tw_mla_options options = {};
  options.struct_size = sizeof options;
  options.seqlens = seqlens_in_c;
  options.block_table = pages_in_c;
  options.scale = 0.1f;
  options.not_causal = 1;
  options.lse = lse_in_c;
  options.max_seqlen = 32;
  options.num_splits = 2;
  options.check_contents = 1;
  expect_same(
      {2, 3, 4, 512}, DType::bf16, [&](const Tensor& o) { return tw_mla_decode(InC(q), InC(kv), InC(o), &options, nullptr); },
      [&](const Tensor& o) {
        tw::mla_decode(q, kv, o,
                       {.seqlens = &seqlens, .block_table = &pages, .scale = 0.1f, .causal = false, .lse = &expected_lse, .num_splits = 2});
      });
  EXPECT_TRUE(same_bits(lse, expected_lse));
  const Tensor full = Tensor::random({2, 40, 576}, DType::bf16, 3);
  expect_same(
      {2, 3, 4, 512}, DType::bf16, [&](const Tensor& o) { return tw_mla_decode(InC(q), InC(full), InC(o), nullptr, nullptr); },
      [&](const Tensor& o) { tw::mla_decode(q, full, o); });
  const Tensor latent = Tensor::random({2, 3, 512}, DType::bf16, 4), rotary = Tensor::random({2, 3, 64}, DType::bf16, 5),
               cos = Tensor::random({40, 32}, DType::f32, 6), sin = Tensor::random({40, 32}, DType::f32, 7);
  const Tensor before = integers({17, 29}, {2});
  const InC before_in_c(before), cos_in_c(cos), sin_in_c(sin);
  const auto cache = [] { return Tensor::random({5, 16, 576}, DType::bf16, 2); };
  const Tensor appended = cache(), expected = cache();
  tw_mla_append_options append = {};
  append.struct_size = sizeof append;
  append.seqlens = before_in_c;
  append.block_table = pages_in_c;
  append.rotary_cos = cos_in_c;
  append.rotary_sin = sin_in_c;
  append.rotary_half_split = 1;
  append.check_contents = 1;
  EXPECT_OK(tw_mla_append(InC(latent), InC(rotary), InC(appended), &append, nullptr));
  tw::mla_append(
      latent, rotary, expected,
      {.seqlens = &before, .block_table = &pages, .rotary_cos = &cos, .rotary_sin = &sin, .rotary_pairing = RopePairing::half_split});
  EXPECT_TRUE(same_bits(appended, expected));
  EXPECT_FALSE(same_bits(appended, cache()));
  EXPECT_OK(tw_mla_append(InC(latent), InC(rotary), InC(full), nullptr, nullptr));
  append.rotary_sin = nullptr;
  expect_refused(tw_mla_append(InC(latent), InC(rotary), InC(appended), &append, nullptr), "rotary_cos is given without rotary_sin");
  options.scale = -1;
  expect_refused(tw_mla_decode(InC(q), InC(kv), InC(poisoned({2, 3, 4, 512}, DType::bf16)), &options, nullptr), "mla_decode: scale is -1");
}

TEST_F(CInterfaceAttention, BadInput) {
  const auto call = [&](const tw_tensor* q_in_c, const tw_attention_options* options) {
    return tw_attention(q_in_c, InC(k), InC(v), InC(o), options, nullptr);
  };
  expect_refused(call(nullptr, nullptr), "q is null");
  tw_tensor wrong = *InC(q).get();
  wrong.rank = 5;
  expect_refused(call(&wrong, nullptr), "q has rank 5; 0 to 4 are allowed");
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
