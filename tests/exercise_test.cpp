// The kernels that the GLM-ASR exercise names (`tilewave bench exercise` times them), each called once on numbers like those of a layer, on
// the CPU and, where there is one, on a GPU, against plain loops in double. The families' own tests look at every shape and stride.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <random>
#include <span>
#include <tuple>
#include <vector>

#include "kernels/attention/reference.hpp"
#include "kernels/elementwise/reference.hpp"
#include "kernels/gemm/reference.hpp"
#include "kernels/norm/reference.hpp"
#include "kernels/rope/reference.hpp"
#include "kernels/softmax/reference.hpp"
#include "kernels/swiglu/reference.hpp"
#include "runtime/format.hpp"
#include "tests/accuracy.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"
#include "tilewave/attention.hpp"
#include "tilewave/elementwise.hpp"
#include "tilewave/gemm.hpp"
#include "tilewave/norm.hpp"
#include "tilewave/rope.hpp"
#include "tilewave/softmax.hpp"
#include "tilewave/swiglu.hpp"

namespace tw::test {
namespace {

// Small, of the model's proportions; tokens and widths are no multiples of tiles.
constexpr std::int64_t kTokens = 77, kWidth = 160, kMlp = 328, kHeads = 4, kHeadDim = 64;

class Exercise : public testing::TestWithParam<std::tuple<Device, DType>> {
 protected:
  void SetUp() override { skip_unless_present(device()); }
  Device device() const { return std::get<0>(GetParam()); }
  DType dtype() const { return std::get<1>(GetParam()); }

  PlacedTensor make(Shape shape) const { return PlacedTensor(std::move(shape), dtype(), device()); }

  /// Holds `y` against the exact values and those of the same operations in the dtype.
  void expect_accurate(const PlacedTensor& y, const std::vector<double>& reference, const std::vector<double>& naive, Arithmetic arithmetic,
                       std::int64_t terms) const {
    const std::vector<double> out = y.values();
    EXPECT_TRUE(accurate({.out = out, .reference = reference, .naive = naive, .arithmetic = arithmetic, .terms = terms}));
    EXPECT_TRUE(y.gaps_intact());
  }
  /// Of ops without products: `plain`.operator()<Real>() gives the values in arithmetic of type Real.
  template <class F>
  void expect_accurate(const PlacedTensor& y, F plain) const {
    std::vector<double> naive;
    for (const float x : plain.template operator()<float>()) naive.push_back(round_to(dtype(), x));
    // Nothing is multiplied by tensor cores.
    expect_accurate(y, plain.template operator()<double>(), naive, arithmetic_of(dtype(), Device::cpu()), kWidth);
  }
  /// y = f(x), with the function of a Real.
  template <class F>
  void expect_elements(void (*f)(const Tensor& x, const Tensor& y, const ElementwiseOptions& options), F plain) const {
    std::mt19937_64 random = random_engine();
    PlacedTensor x = make({kTokens, kMlp}), y = make({kTokens, kMlp});
    const std::vector<float> values = x.fill_random(random, 3);
    f(x, y, {});
    expect_accurate(y, [&]<class Real>() {
      std::vector<Real> result;
      for (const float value : values) result.push_back(plain(static_cast<Real>(value)));
      return result;
    });
  }
  /// weight and bias of a norm near 1 and 0, as trained ones are.
  std::vector<float> fill_near(PlacedTensor& tensor, float centre, std::mt19937_64& random) const {
    std::normal_distribution<float> normal(centre, 0.1f);
    std::vector<float> values(static_cast<std::size_t>(tensor.tensor().numel()));
    for (float& x : values) x = round_to(dtype(), normal(random));
    tensor.fill(values);
    return values;
  }
  void expect_softmax(bool in_place) const {
    std::mt19937_64 random = random_engine();
    PlacedTensor x = make({kHeads * kTokens, kTokens}), y = make({kHeads * kTokens, kTokens});
    const std::vector<float> values = x.fill_random(random, 2);
    softmax(x, in_place ? x : y);
    expect_accurate(in_place ? x : y, [&]<class Real>() { return kernels::softmax::plain<Real>(values, kHeads * kTokens, kTokens, 1); });
  }
  void expect_product(const PlacedTensor& y, const kernels::gemm::PlainCall& call) const {
    const Arithmetic arithmetic = arithmetic_of(dtype(), device());
    expect_accurate(y, kernels::gemm::reference(call), kernels::gemm::naive(call, dtype(), arithmetic == Arithmetic::tf32), arithmetic,
                    call.k);
  }
  /// y = activation(x w^T + bias), with the weight stored [out, in].
  void expect_linear(Activation activation) const {
    std::mt19937_64 random = random_engine();
    PlacedTensor x = make({kTokens, kWidth}), bias = make({kMlp}), y = make({kTokens, kMlp});
    PlacedTensor w({kWidth, kMlp}, dtype(), device(), {.order = {1, 0}});
    const std::vector<float> x_values = x.fill_random(random), bias_values = bias.fill_random(random);
    const std::vector<float> w_values = w.fill_random(random, 1 / std::sqrt(static_cast<float>(kWidth)));
    gemm(x, w, y, {.bias = &bias.tensor(), .activation = activation});
    expect_product(y, {.m = kTokens, .n = kMlp, .k = kWidth, .a = x_values, .b = w_values, .bias = bias_values, .activation = activation});
  }
};

TEST_P(Exercise, Silu) {
  expect_elements(silu, [](auto x) { return kernels::elementwise::silu(x); });
}

TEST_P(Exercise, GeluTanh) {
  expect_elements(gelu_tanh, [](auto x) { return kernels::elementwise::gelu_tanh(x); });
}

TEST_P(Exercise, Softmax) { expect_softmax(false); }

TEST_P(Exercise, SoftmaxInPlace) { expect_softmax(true); }

TEST_P(Exercise, RmsNorm) {
  std::mt19937_64 random = random_engine();
  PlacedTensor x = make({kTokens, kWidth}), weight = make({kWidth}), y = make({kTokens, kWidth});
  const std::vector<float> x_values = x.fill_random(random), weight_values = fill_near(weight, 1, random);
  rms_norm(x, y, {.epsilon = 1e-5f, .weight = &weight.tensor()});
  const kernels::norm::PlainCall call{.h = x_values, .cols = kWidth, .weight = weight_values, .epsilon = 1e-5, .rms = true};
  expect_accurate(y, [&]<class Real>() {
    return kernels::norm::plain<Real>(call, [&](Real v) { return is_same<Real, float> ? round_to(dtype(), static_cast<float>(v)) : v; });
  });
}

TEST_P(Exercise, LayerNorm) {
  std::mt19937_64 random = random_engine();
  PlacedTensor x = make({kTokens, kWidth}), weight = make({kWidth}), bias = make({kWidth}), y = make({kTokens, kWidth});
  const std::vector<float> x_values = x.fill_random(random), weight_values = fill_near(weight, 1, random);
  const std::vector<float> bias_values = fill_near(bias, 0, random);
  layer_norm(x, y, {.epsilon = 1e-5f, .weight = &weight.tensor(), .bias = &bias.tensor()});
  const kernels::norm::PlainCall call{.h = x_values, .cols = kWidth, .weight = weight_values, .bias = bias_values, .epsilon = 1e-5};
  expect_accurate(y, [&]<class Real>() { return kernels::norm::plain<Real>(call, [](Real v) { return v; }); });
}

TEST_P(Exercise, RopeCosSin) {
  constexpr std::int64_t kHalf = 64;
  PlacedTensor cos = make({kTokens, kHalf}), sin = make({kTokens, kHalf});
  rope_table(cos, sin, {.theta = 10000});
  const auto expect_table = [&](const PlacedTensor& table, auto f) {
    expect_accurate(table, [&]<class Real>() {
      std::vector<Real> result;
      for (std::int64_t position = 0; position < kTokens; ++position)
        for (std::int64_t k = 0; k < kHalf; ++k) result.push_back(f(static_cast<Real>(kernels::rope::angle(position, k, kHalf, 10000))));
      return result;
    });
  };
  expect_table(cos, [](auto angle) { return std::cos(angle); });
  expect_table(sin, [](auto angle) { return std::sin(angle); });
}

TEST_P(Exercise, FusedSwiglu) {
  std::mt19937_64 random = random_engine();
  PlacedTensor gate = make({kTokens, kMlp}), up = make({kTokens, kMlp}), y = make({kTokens, kMlp});
  const std::vector<float> gate_values = gate.fill_random(random, 3), up_values = up.fill_random(random);
  swiglu(gate, up, y);
  expect_accurate(y, [&]<class Real>() { return kernels::swiglu::plain<Real>(gate_values, up_values); });
}

/// Both products in one: the columns of gate and up alternate.
TEST_P(Exercise, FusedLinearSwiglu) {
  std::mt19937_64 random = random_engine();
  PlacedTensor x = make({kTokens, kWidth}), y = make({kTokens, kMlp / 2});
  PlacedTensor w({kWidth, kMlp}, dtype(), device(), {.order = {1, 0}});
  // A product of two tf32 sums is off by more than one: these operands are tf32 already.
  const auto fill = [&](PlacedTensor& tensor, float sigma) {
    std::vector<float> values = tensor.fill_random(random, sigma);
    for (float& value : values) value = bit_cast<float>(bit_cast<u32>(value) & ~0x1fffu);
    tensor.fill(values);
    return values;
  };
  const std::vector<float> x_values = fill(x, 1), w_values = fill(w, 1 / std::sqrt(static_cast<float>(kWidth)));
  gemm(x, w, y, {.activation = Activation::swiglu});
  expect_product(y, {.m = kTokens, .n = kMlp, .k = kWidth, .a = x_values, .b = w_values, .activation = Activation::swiglu});
}

TEST_P(Exercise, Linear) { expect_linear(Activation::none); }

TEST_P(Exercise, AttentionScores) {
  std::mt19937_64 random = random_engine();
  PlacedTensor q = make({kHeads, kTokens, kHeadDim}), scores = make({kHeads, kTokens, kTokens});
  PlacedTensor k({kHeads, kHeadDim, kTokens}, dtype(), device(), {.order = {0, 2, 1}});  // stored [heads, tokens, head_dim]
  const std::vector<float> q_values = q.fill_random(random), k_values = k.fill_random(random);
  const float scale = 1 / std::sqrt(static_cast<float>(kHeadDim));
  gemm(q, k, scores, {.alpha = scale});
  expect_product(scores, {.m = kTokens,
                          .n = kTokens,
                          .k = kHeadDim,
                          .batch = kHeads,
                          .a = q_values,
                          .b = k_values,
                          .a_batched = true,
                          .b_batched = true,
                          .alpha = scale});
}

TEST_P(Exercise, AttentionOutput) {
  std::mt19937_64 random = random_engine();
  PlacedTensor p = make({kHeads, kTokens, kTokens}), v = make({kHeads, kTokens, kHeadDim}), o = make({kHeads, kTokens, kHeadDim});
  std::vector<float> p_values(static_cast<std::size_t>(kHeads * kTokens * kTokens));
  std::uniform_real_distribution<float> weight(0, 2.0f / kTokens);  // as a softmax gives
  for (float& x : p_values) x = round_to(dtype(), weight(random));
  p.fill(p_values);
  const std::vector<float> v_values = v.fill_random(random);
  gemm(p, v, o);
  expect_product(
      o, {.m = kTokens, .n = kHeadDim, .k = kTokens, .batch = kHeads, .a = p_values, .b = v_values, .a_batched = true, .b_batched = true});
}

TEST_P(Exercise, FusedLinearGelu) { expect_linear(Activation::gelu_tanh); }

/// As in the encoder: every head its own keys, every query sees every key; and as in the decoder: groups of heads share keys, causal.
TEST_P(Exercise, FusedAttention) {
  if (dtype() == DType::f32 && device().is_cuda()) GTEST_SKIP() << "skipped: attention on a GPU is of 16-bit types";
  std::mt19937_64 random = random_engine();
  for (const bool decoder : {false, true}) {
    SCOPED_TRACE(decoder ? "decoder" : "encoder");
    const std::int64_t kv_heads = decoder ? 1 : kHeads, head_dim = decoder ? 128 : kHeadDim;
    PlacedTensor q = make({1, kTokens, kHeads, head_dim}), k = make({1, kTokens, kv_heads, head_dim});
    PlacedTensor v = make({1, kTokens, kv_heads, head_dim}), o = make({1, kTokens, kHeads, head_dim});
    const std::vector<float> q_values = q.fill_random(random), k_values = k.fill_random(random), v_values = v.fill_random(random);
    attention(q, k, v, o, {.causal = decoder});
    const kernels::attention::PlainCall call{.batch = 1,
                                             .heads = kHeads,
                                             .kv_heads = kv_heads,
                                             .seqlen_q = kTokens,
                                             .seqlen_k = kTokens,
                                             .head_dim = head_dim,
                                             .q = q_values,
                                             .k = k_values,
                                             .v = v_values,
                                             .scale = 1 / std::sqrt(static_cast<double>(head_dim)),
                                             .causal = decoder};
    expect_accurate(o, kernels::attention::reference(call).o, kernels::attention::naive(call, dtype()).o, arithmetic_of(dtype(), device()),
                    kTokens);
  }
}

INSTANTIATE_TEST_SUITE_P(Ops, Exercise, testing::Combine(testing::ValuesIn(kDevices), testing::Values(DType::f32, DType::bf16)),
                         [](const auto& instance) {
                           return tw::format("{}_{}", std::get<0>(instance.param).is_cuda() ? "cuda" : "cpu",
                                             name_of(std::get<1>(instance.param)));
                         });

}  // namespace
}  // namespace tw::test
