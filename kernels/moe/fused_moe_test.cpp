// moe_experts() and fused_moe() against loops, on the CPU and, where there is one, on a GPU.

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <optional>
#include <random>
#include <span>
#include <vector>

#include "kernels/cast_fp8/reference.hpp"
#include "kernels/dequant_gemm/reference.hpp"
#include "kernels/moe/reference.hpp"
#include "runtime/format.hpp"
#include "tests/accuracy.hpp"
#include "tests/expect_error.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"
#include "tilewave/cast_fp8.hpp"
#include "tilewave/moe.hpp"
#include "tilewave/quantized.hpp"
#include "tilewave/swiglu.hpp"

namespace tw::kernels::moe {
namespace {

using namespace tw::test;

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }
std::span<const float> part(const std::vector<float>& all, std::int64_t n, std::int64_t size) {
  return std::span(all).subspan(index(n * size), index(size));
}

struct Sizes {
  std::int64_t tokens, hidden, inner;
  int experts, k;
  std::int64_t shared = 0;  ///< the shared expert's width
  bool addend = false;
  int first_expert = 0;
  int strangers = 0;  ///< of so many assignments about one goes to an expert that is not here
  std::int64_t gap = 0;
};

/// The tensors of a layer, and what they hold.
struct Layer {
  Layer(const Sizes& s, DType type, Device device, std::mt19937_64& random)
      : sizes(s),
        dtype(type),
        x({s.tokens, s.hidden}, type, device, {.gap = s.gap}),
        w_gate_up({s.experts, 2 * s.inner, s.hidden}, type, device, {.gap = s.gap}),
        w_down({s.experts, s.hidden, s.inner}, type, device, {.gap = s.gap}),
        shared_gate_up({2 * s.shared, s.hidden}, type, device),
        shared_down({s.hidden, s.shared}, type, device),
        addend({s.tokens, s.hidden}, type, device, {.gap = s.gap}),
        out({s.tokens, s.hidden}, type, device, {.gap = s.gap}),
        weights({s.tokens, s.k}, DType::f32, device, {.gap = s.gap}),
        experts({s.tokens, s.k}, DType::i32, device) {
    const float by_hidden = 1 / std::sqrt(static_cast<float>(s.hidden)), by_inner = 1 / std::sqrt(static_cast<float>(s.inner));
    x_values = x.fill_random(random);
    gate_up_values = w_gate_up.fill_random(random, by_hidden);
    down_values = w_down.fill_random(random, by_inner);
    shared_gate_up_values = shared_gate_up.fill_random(random, by_hidden);
    shared_down_values = shared_down.fill_random(random, by_inner);
    addend_values = addend.fill_random(random);
    weight_values = weights.fill_random(random);
    const auto pick = [&](int below) { return static_cast<int>(random() % static_cast<unsigned>(below)); };
    for (std::int64_t a = 0; a < s.tokens * s.k; ++a) {
      const bool stranger = s.strangers > 0 && pick(s.strangers) == 0;
      expert_values.push_back(static_cast<float>(stranger ? s.first_expert + s.experts + pick(5) : s.first_expert + pick(s.experts)));
    }
    experts.fill(expert_values);
  }
  MoeExpertsOptions options() const {
    MoeExpertsOptions result{.first_expert = sizes.first_expert};
    if (sizes.shared > 0) {
      result.shared_gate_up = &shared_gate_up.tensor();
      result.shared_down = &shared_down.tensor();
    }
    if (sizes.addend) result.addend = &addend.tensor();
    return result;
  }
  /// The layer in double; `round` is applied to all that is stored, `round_gate_up` to gate and up.
  using Round = std::function<double(double)>;
  std::vector<double> evaluate(const Round& round, const Round& round_gate_up = std::identity()) const {
    std::vector<double> result;
    const std::int64_t h = sizes.hidden, gate_up = 2 * sizes.inner * h, down = h * sizes.inner;
    for (std::int64_t t = 0; t < sizes.tokens; ++t) {
      const std::span<const float> token = part(x_values, t, h);
      std::vector<double> sum(index(h), 0);
      if (sizes.shared > 0) sum = mlp_reference(token, shared_gate_up_values, shared_down_values, round, round_gate_up);
      for (std::int64_t i = 0; sizes.addend && i < h; ++i) sum[index(i)] += addend_values[index(t * h + i)];
      for (double& value : sum) value = round(value);
      for (std::int64_t n = 0; n < sizes.k; ++n) {
        const auto e = static_cast<std::int64_t>(expert_values[index(t * sizes.k + n)]) - sizes.first_expert;
        if (e < 0 || e >= sizes.experts) continue;
        const std::vector<double> y =
            mlp_reference(token, part(gate_up_values, e, gate_up), part(down_values, e, down), round, round_gate_up);
        for (std::int64_t i = 0; i < h; ++i) sum[index(i)] += weight_values[index(t * sizes.k + n)] * y[index(i)];
      }
      for (const double value : sum) result.push_back(round(value));
    }
    return result;
  }

  Sizes sizes;
  DType dtype;
  PlacedTensor x, w_gate_up, w_down, shared_gate_up, shared_down, addend, out, weights, experts;
  std::vector<float> x_values, gate_up_values, down_values, shared_gate_up_values, shared_down_values, addend_values, weight_values;
  std::vector<float> expert_values;
};

class FusedMoe : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override { skip_unless_present(device); }
  std::vector<DType> dtypes() const {
    return device.is_cuda() ? std::vector{DType::bf16, DType::f16} : std::vector{DType::bf16, DType::f16, DType::f32};
  }
  int pick(int below) { return static_cast<int>(random() % static_cast<unsigned>(below)); }
  void check(const Sizes& s, DType dtype) {
    SCOPED_TRACE(tw::format("{} tokens of {}, experts {} x {}, k {}, shared {}, addend {}, first {}, {}", s.tokens, s.hidden, s.experts,
                            s.inner, s.k, s.shared, s.addend, s.first_expert, name_of(dtype)));
    const Layer layer(s, dtype, device, random);
    if (!launched([&] { moe_experts(layer.x, layer.weights, layer.experts, layer.w_gate_up, layer.w_down, layer.out, layer.options()); }))
      return;
    const std::vector<double> exact = layer.evaluate([](double value) { return value; });
    const std::vector<double> naive =
        layer.evaluate([&](double value) { return static_cast<double>(round_to(dtype, static_cast<float>(value))); });
    const std::vector<double> got = layer.out.values();
    EXPECT_TRUE(accurate({got, exact, naive, arithmetic_of(dtype, device), s.inner}));
    EXPECT_TRUE(layer.out.gaps_intact());
  }

  const Device device = GetParam();
  std::mt19937_64 random = random_engine();
};

INSTANTIATE_TEST_SUITE_P(Ops, FusedMoe, testing::ValuesIn(kDevices), device_name);

TEST_P(FusedMoe, Layers) {
  for (const DType dtype : dtypes()) {
    check({.tokens = 1, .hidden = 64, .inner = 32, .experts = 8, .k = 2}, dtype);
    check({.tokens = 33, .hidden = 128, .inner = 64, .experts = 8, .k = 4, .shared = 64, .addend = true}, dtype);
    check({.tokens = 20, .hidden = 64, .inner = 48, .experts = 60, .k = 4, .shared = 96}, dtype);
    check({.tokens = 150, .hidden = 40, .inner = 24, .experts = 3, .k = 2, .addend = true}, dtype);
  }
}

/// A few experts have all tokens, a tile's rows and more; others none.
TEST_P(FusedMoe, UnevenExperts) {
  check({.tokens = 256, .hidden = 64, .inner = 64, .experts = 1, .k = 1}, DType::bf16);
  check({.tokens = 4, .hidden = 64, .inner = 64, .experts = 512, .k = 8}, DType::bf16);
}

TEST_P(FusedMoe, AnySizes) {
  for (int n = 0; n < random_cases(12); ++n) {
    const int experts = 1 + pick(12);
    check({.tokens = pick(40),
           .hidden = 1 + pick(100),
           .inner = 1 + pick(70),
           .experts = experts,
           .k = 1 + pick(6),
           .shared = pick(2) * (1 + pick(50)),
           .addend = pick(2) == 0,
           .first_expert = pick(20),
           .strangers = pick(4),
           .gap = pick(3)},
          pick(2) == 0 ? DType::bf16 : DType::f16);
  }
}

/// Ranks that have a part of the experts each give the parts of the sum.
TEST_P(FusedMoe, ExpertsElsewhereContributeNothing) {
  check({.tokens = 30, .hidden = 64, .inner = 32, .experts = 4, .k = 4, .first_expert = 8, .strangers = 2}, DType::bf16);
  check({.tokens = 30, .hidden = 64, .inner = 32, .experts = 4, .k = 4, .shared = 16, .first_expert = -2, .strangers = 1}, DType::bf16);
}

/// More assignments than one chunk of the permutation.
TEST_P(FusedMoe, ManyTokens) { check({.tokens = 700, .hidden = 24, .inner = 8, .experts = 16, .k = 8}, DType::bf16); }

/// A weight of fp8_e4m3, [.., rows, cols], with scales of blocks, and what it stands for.
struct Fp8Weight {
  Fp8Weight(std::int64_t experts, std::int64_t rows, std::int64_t cols, Device device, std::mt19937_64& random)
      : size(rows * cols),
        weight({experts, rows, cols}, DType::fp8_e4m3, device),
        scale({experts, rows / 128, cols / 128}, DType::f32, device) {
    std::normal_distribution<float> normal(0, 1 / std::sqrt(static_cast<float>(cols)));
    std::vector<float> scales;
    for (std::int64_t e = 0; e < experts; ++e) {
      std::vector<float> x(index(size));
      for (float& value : x) value = normal(random);
      const cast_fp8::PlainResult cast = cast_fp8::plain(x, rows, cols, 128, false);
      codes.insert(codes.end(), cast.y.begin(), cast.y.end());
      scales.insert(scales.end(), cast.scales.begin(), cast.scales.end());
      for (std::int64_t i = 0; i < size; ++i)
        values.push_back(cast.y[index(i)] * cast.scales[index(i / cols / 128 * (cols / 128) + i % cols / 128)]);
    }
    weight.fill(codes);
    scale.fill(scales);
  }
  std::int64_t size;
  PlacedTensor weight, scale;
  std::vector<float> codes, values;
};

/// An expert with gate and up as halves, whose inputs are cast as on the device.
std::vector<double> fp8_mlp(std::span<const float> x, std::span<const float> w_gate_up, std::span<const float> w_down) {
  const auto cast = [](std::span<const float> row) {
    cast_fp8::PlainResult result = cast_fp8::plain(row, 1, static_cast<std::int64_t>(row.size()), 1, false);
    for (std::size_t i = 0; i < row.size(); ++i) result.y[i] *= result.scales[i / 128];
    return result.y;
  };
  const auto product = [](std::span<const float> w, const std::vector<float>& row) {
    std::vector<float> result;
    for (std::size_t n = 0; n < w.size() / row.size(); ++n) {
      double sum = 0;
      for (std::size_t i = 0; i < row.size(); ++i) sum += static_cast<double>(w[n * row.size() + i]) * row[i];
      result.push_back(round_to(DType::bf16, static_cast<float>(sum)));
    }
    return result;
  };
  const std::vector<float> both = product(w_gate_up, cast(x));
  std::vector<float> gated(both.size() / 2);
  for (std::size_t i = 0; i < gated.size(); ++i) gated[i] = both[i] / (1 + std::exp(-both[i])) * both[gated.size() + i];
  const std::vector<float> result = product(w_down, cast(gated));
  return {result.begin(), result.end()};
}

TEST_P(FusedMoe, Fp8Weights) {
  struct Case {
    std::int64_t tokens, hidden, inner;
    int experts, k;
    std::int64_t shared;
    bool addend;
  };
  for (const Case& c : {Case{1, 128, 128, 3, 2, 0, false}, Case{37, 256, 128, 4, 2, 0, true}, Case{20, 128, 256, 5, 3, 128, false},
                        Case{70, 384, 128, 2, 1, 256, true}}) {
    SCOPED_TRACE(tw::format("{} tokens of {}, experts {} x {}, k {}, shared {}", c.tokens, c.hidden, c.experts, c.inner, c.k, c.shared));
    const Layer layer({.tokens = c.tokens, .hidden = c.hidden, .inner = 1, .experts = c.experts, .k = c.k, .strangers = 5}, DType::bf16,
                      device, random);
    const Fp8Weight gate_up(c.experts, 2 * c.inner, c.hidden, device, random), down(c.experts, c.hidden, c.inner, device, random);
    const Fp8Weight shared_gate_up(1, 2 * c.shared, c.hidden, device, random), shared_down(1, c.hidden, c.shared, device, random);
    const Tensor shared_weights[] = {shared_gate_up.weight.tensor().select(0, 0), shared_down.weight.tensor().select(0, 0)};
    const Tensor shared_scales[] = {shared_gate_up.scale.tensor().select(0, 0), shared_down.scale.tensor().select(0, 0)};
    MoeExpertsOptions options{.addend = c.addend ? &layer.addend.tensor() : nullptr,
                              .gate_up_scale = &gate_up.scale.tensor(),
                              .down_scale = &down.scale.tensor()};
    if (c.shared > 0) {
      options.shared_gate_up = &shared_weights[0], options.shared_down = &shared_weights[1];
      options.shared_gate_up_scale = &shared_scales[0], options.shared_down_scale = &shared_scales[1];
    }
    if (!launched([&] { moe_experts(layer.x, layer.weights, layer.experts, gate_up.weight, down.weight, layer.out, options); })) return;
    std::vector<double> expected;
    for (std::int64_t t = 0; t < c.tokens; ++t) {
      const std::span<const float> token = part(layer.x_values, t, c.hidden);
      std::vector<double> sum(index(c.hidden), 0);
      const auto add = [&](double weight, const std::vector<double>& y) {
        for (std::size_t i = 0; i < y.size(); ++i) sum[i] += weight * y[i];
      };
      if (c.shared > 0) add(1, fp8_mlp(token, shared_gate_up.values, shared_down.values));
      if (c.addend) {
        const std::span<const float> row = part(layer.addend_values, t, c.hidden);
        add(1, {row.begin(), row.end()});
      }
      for (double& value : sum) value = round_to(DType::bf16, static_cast<float>(value));
      for (std::int64_t n = 0; n < c.k; ++n) {
        const auto e = static_cast<std::int64_t>(layer.expert_values[index(t * c.k + n)]);
        if (e < 0 || e >= c.experts) continue;
        add(layer.weight_values[index(t * c.k + n)],
            fp8_mlp(token, part(gate_up.values, e, gate_up.size), part(down.values, e, down.size)));
      }
      for (const double value : sum) expected.push_back(round_to(DType::bf16, static_cast<float>(value)));
    }
    // A gate or up that is rounded the other way to bf16 may be the largest of its group and change the scale by 2^-8. That moves one in 16
    // of the group's activations to the next e4m3 number, by 1/16: 1.6 % of the group in the root mean square.
    const std::vector<double> got = layer.out.values();
    ASSERT_EQ(got.size(), expected.size());
    double error = 0, norm = 0;
    for (std::size_t i = 0; i < got.size(); ++i) {
      error += (got[i] - expected[i]) * (got[i] - expected[i]);
      norm += expected[i] * expected[i];
    }
    EXPECT_LE(std::sqrt(error), 0.02 * std::sqrt(norm));
    const double root_mean_square = std::sqrt(norm / static_cast<double>(got.size()));
    for (std::size_t i = 0; i < got.size(); ++i)
      ASSERT_NEAR(got[i], expected[i], 0.1 * root_mean_square + 0.01 * std::abs(expected[i])) << i;
    EXPECT_TRUE(layer.out.gaps_intact());
  }
}

TEST_P(FusedMoe, RefusesFp8WeightsThatDoNotFit) {
  const auto zeros = [&](Shape shape, DType dtype = DType::fp8_e4m3) {
    return Tensor::zeros(std::move(shape), dtype, Stream::standard(device));
  };
  const Layer layer({.tokens = 3, .hidden = 128, .inner = 128, .experts = 2, .k = 2}, DType::bf16, device, random);
  const Tensor gate_up = zeros({2, 256, 128}), down = zeros({2, 128, 128}), gate_up_scale = zeros({2, 2, 1}, DType::f32),
               down_scale = zeros({2, 1, 1}, DType::f32), wrong = zeros({2, 1, 2}, DType::f32), shared = zeros({256, 128}),
               shared_down = zeros({128, 128}), shared_scale = zeros({2, 1}, DType::f32);
  using Parts = std::initializer_list<std::string_view>;
  const auto refuse = [&](const Tensor& w_gate_up, const Tensor& w_down, const MoeExpertsOptions& options, Parts parts) {
    expect_error<InvalidArgument>([&] { moe_experts(layer.x, layer.weights, layer.experts, w_gate_up, w_down, layer.out, options); },
                                  parts);
  };
  refuse(gate_up, down, {}, {"gate_up_scale is not given; w_gate_up is fp8_e4m3[2, 256, 128]"});
  refuse(gate_up, down, {.gate_up_scale = &gate_up_scale}, {"down_scale is not given"});
  refuse(gate_up, down, {.gate_up_scale = &gate_up_scale, .down_scale = &wrong}, {"down_scale is f32[2, 1, 2]", "[2, 1, 1]"});
  refuse(gate_up, layer.w_down, {.gate_up_scale = &gate_up_scale}, {"w_down is bf16[2, 128, 128]"});
  refuse(layer.w_gate_up, layer.w_down, {.down_scale = &down_scale}, {"down_scale is given, but w_down is bf16[2, 128, 128]"});
  refuse(zeros({2, 128, 128}), zeros({2, 128, 64}), {.gate_up_scale = &down_scale}, {"w_down is fp8_e4m3[2, 128, 64]", "multiples of 128"});
  refuse(gate_up, down,
         {.shared_gate_up = &shared,
          .shared_down = &shared_down,
          .gate_up_scale = &gate_up_scale,
          .down_scale = &down_scale,
          .shared_gate_up_scale = &shared_scale},
         {"shared_down_scale is not given"});
  const Tensor half = zeros({3, 128}, DType::f16);
  expect_error<InvalidArgument>(
      [&] {
        moe_experts(half, layer.weights, layer.experts, gate_up, down, zeros({3, 128}, DType::f16),
                    {.gate_up_scale = &gate_up_scale, .down_scale = &down_scale});
      },
      {"x is f16[3, 128]", "must be bf16"});
  EXPECT_TRUE(layer.out.untouched());
}

/// Weights of u8 with scales of groups, [experts, rows, cols / 2] or of one expert [rows, cols / 2], and what they stand for.
struct PackedWeight {
  PackedWeight(std::int64_t experts, std::int64_t rows, std::int64_t cols, const QuantizedMatrix::Layout& layout, Device device,
               std::mt19937_64& random) {
    std::normal_distribution<float> normal(0, 1 / std::sqrt(static_cast<float>(cols)));
    std::vector<float> x(index(experts * rows * cols));
    for (float& value : x) value = normal(random);
    const QuantizedMatrix all = quantize(Tensor::from(std::span<const float>(x), {experts * rows, cols}), layout);
    for (const double value : dequant_gemm::decode(all)) values.push_back(static_cast<float>(value));
    matrix = all.to(device);
    weight = matrix.values.reshape({experts, rows, cols / 2});
    scale = matrix.scales.reshape({experts, rows, cols / matrix.group});
  }
  QuantizedMatrix matrix;
  Tensor weight, scale;
  std::vector<float> values;
};

/// A layer with such weights.
struct PackedLayer : Layer {
  PackedLayer(const Sizes& s, DType type, const QuantizedMatrix::Layout& layout, Device device, std::mt19937_64& random)
      : Layer(s, type, device, random),
        gate_up(s.experts, 2 * s.inner, s.hidden, layout, device, random),
        down(s.experts, s.hidden, s.inner, layout, device, random) {
    gate_up_values = gate_up.values, down_values = down.values;
    if (s.shared == 0) return;
    for (const auto& [one, rows, cols] : {std::tuple{&one_gate_up, 2 * s.shared, s.hidden}, {&one_down, s.hidden, s.shared}})
      one->emplace(1, rows, cols, layout, device, random);
    shared_gate_up_values = one_gate_up->values, shared_down_values = one_down->values;
    for (const auto& [one, tensors] : {std::pair{&one_gate_up, of_gate_up}, {&one_down, of_down}})
      tensors[0] = (*one)->weight.select(0, 0), tensors[1] = (*one)->scale.select(0, 0);
  }
  MoeExpertsOptions packed_options() const {
    MoeExpertsOptions result = options();
    result.gate_up_scale = &gate_up.scale, result.down_scale = &down.scale;
    if (sizes.shared > 0) {
      result.shared_gate_up = &of_gate_up[0], result.shared_gate_up_scale = &of_gate_up[1];
      result.shared_down = &of_down[0], result.shared_down_scale = &of_down[1];
    }
    return result;
  }
  void run() const { moe_experts(x, weights, experts, gate_up.weight, down.weight, out, packed_options()); }
  void check() const {
    const auto rounded = [&](double value) { return static_cast<double>(round_to(dtype, static_cast<float>(value))); };
    const std::vector<double> exact = evaluate(std::identity()), naive = evaluate(rounded, rounded), got = out.values();
    EXPECT_TRUE(accurate({got, exact, naive, arithmetic_of(dtype, out.tensor().device()), sizes.inner}));
    EXPECT_TRUE(out.gaps_intact());
  }

  PackedWeight gate_up, down;
  std::optional<PackedWeight> one_gate_up, one_down;  ///< the shared expert's
  Tensor of_gate_up[2], of_down[2];                   ///< their tensors: weight and scale
};

TEST_P(FusedMoe, Mxfp4Weights) {
  for (const DType dtype : dtypes()) {
    for (const Sizes& s : {Sizes{.tokens = 1, .hidden = 64, .inner = 32, .experts = 8, .k = 2},
                           Sizes{.tokens = 33, .hidden = 128, .inner = 64, .experts = 8, .k = 4, .shared = 64, .addend = true},
                           Sizes{.tokens = 20, .hidden = 96, .inner = 160, .experts = 60, .k = 4, .shared = 96, .gap = 1},
                           Sizes{.tokens = 150, .hidden = 32, .inner = 32, .experts = 3, .k = 2, .addend = true},
                           Sizes{.tokens = 4, .hidden = 64, .inner = 64, .experts = 512, .k = 8},  // most experts are empty
                           Sizes{.tokens = 30, .hidden = 64, .inner = 32, .experts = 4, .k = 4, .first_expert = 8, .strangers = 2},
                           Sizes{.tokens = 683, .hidden = 32, .inner = 32, .experts = 16, .k = 3}}) {  // 2049 assignments
      SCOPED_TRACE(tw::format("{} tokens of {}, experts {} x {}, k {}, shared {}, {}", s.tokens, s.hidden, s.experts, s.inner, s.k,
                              s.shared, name_of(dtype)));
      const PackedLayer layer(s, dtype, {WeightFormat::mxfp4}, device, random);
      if (!launched([&] { layer.run(); })) return;
      layer.check();
      const std::vector<double> first = layer.out.values();
      layer.run();
      EXPECT_EQ(layer.out.values(), first);
    }
  }
}

/// Of experts with equal logits the lower ones are taken, and a whole layer is the routing and the experts.
TEST_P(FusedMoe, Mxfp4WeightsOfTiedExperts) {
  PackedLayer layer({.tokens = 21, .hidden = 64, .inner = 32, .experts = 16, .k = 4, .shared = 32, .addend = true}, DType::bf16,
                    {WeightFormat::mxfp4}, device, random);
  PlacedTensor logits({21, 16}, DType::bf16, device);
  std::vector<float> values(21 * 16);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = i < 16 ? 1.0f : static_cast<float>(random() % 3);
  logits.fill(values);
  const MoeRouteOptions route{.renormalise = true};
  moe_route(logits, layer.weights, layer.experts, route);
  if (!launched([&] { layer.run(); })) return;
  for (std::size_t a = 0; a < layer.expert_values.size(); ++a) {
    layer.expert_values[a] = static_cast<float>(layer.experts.values()[a]);
    layer.weight_values[a] = static_cast<float>(layer.weights.values()[a]);
  }
  EXPECT_EQ(std::vector<float>(layer.expert_values.begin(), layer.expert_values.begin() + 4), (std::vector<float>{0, 1, 2, 3}));
  layer.check();
  const PlacedTensor fused({21, 64}, DType::bf16, device);
  fused_moe(layer.x, logits, 4, layer.gate_up.weight, layer.down.weight, fused, {.route = route, .experts = layer.packed_options()});
  EXPECT_EQ(fused.values(), layer.out.values());
}

/// Each assignment is that of dequant_gemm() with a single row, which is how the CPU rounds x for int4.
TEST_P(FusedMoe, Int4Weights) {
  for (const int group : {32, 128}) {
    const PackedLayer layer({.tokens = 6, .hidden = 256, .inner = 128, .experts = 5, .k = 2}, DType::bf16, {WeightFormat::int4, group},
                            device, random);
    if (!launched([&] { layer.run(); })) return;
    const PlacedTensor both({1, 256}, DType::bf16, device), gated({1, 128}, DType::bf16, device), results({12, 256}, DType::bf16, device),
        expected({6, 256}, DType::bf16, device);
    PlacedTensor places({6, 2}, DType::i32, device);
    std::vector<float> numbers;
    for (std::int64_t a = 0; a < 12; ++a) {
      const auto e = static_cast<std::int64_t>(layer.expert_values[index(a)]);
      tw::dequant_gemm(layer.x.tensor().slice(0, a / 2, a / 2 + 1), layer.gate_up.matrix.slice(e * 256, (e + 1) * 256), both);
      swiglu_interleaved(both, gated);
      tw::dequant_gemm(gated, layer.down.matrix.slice(e * 256, (e + 1) * 256), results.tensor().slice(0, a, a + 1));
      numbers.push_back(static_cast<float>(a));
    }
    places.fill(numbers);
    moe_combine(results, places, layer.weights, expected);
    EXPECT_EQ(layer.out.values(), expected.values());
  }
}

TEST_P(FusedMoe, RefusesPackedWeightsThatDoNotFit) {
  const auto zeros = [&](Shape shape, DType dtype = DType::u8) { return Tensor::zeros(std::move(shape), dtype, Stream::standard(device)); };
  const Layer layer({.tokens = 3, .hidden = 128, .inner = 64, .experts = 2, .k = 2}, DType::bf16, device, random);
  const Tensor gate_up = zeros({2, 128, 64}), down = zeros({2, 128, 32}), gate_up_scale = zeros({2, 128, 4}),
               down_scale = zeros({2, 128, 2}), f32_scale = zeros({2, 128, 4}, DType::f32), of_128 = zeros({2, 128, 1}),
               of_128_f16 = zeros({2, 128, 1}, DType::f16), shared = zeros({128, 64}), shared_down = zeros({128, 32}),
               shared_scale = zeros({128, 4});
  using Parts = std::initializer_list<std::string_view>;
  const auto refuse = [&](const Tensor& w_gate_up, const Tensor& w_down, const MoeExpertsOptions& options, Parts parts) {
    expect_error<InvalidArgument>([&] { moe_experts(layer.x, layer.weights, layer.experts, w_gate_up, w_down, layer.out, options); },
                                  parts);
  };
  refuse(gate_up, down, {}, {"gate_up_scale is not given; w_gate_up is u8[2, 128, 64]"});
  refuse(gate_up, down, {.gate_up_scale = &gate_up_scale}, {"down_scale is not given"});
  refuse(gate_up, down, {.gate_up_scale = &f32_scale}, {"gate_up_scale is f32[2, 128, 4]", "u8 (mxfp4) or f16 (int4)"});
  refuse(gate_up, down, {.gate_up_scale = &of_128}, {"gate_up_scale is u8[2, 128, 1]", "it must be [2, 128, 4]"});
  refuse(gate_up, down, {.gate_up_scale = &gate_up_scale, .down_scale = &of_128_f16}, {"down_scale is f16[2, 128, 1]", "[2, 128, 2]"});
  refuse(gate_up, layer.w_down, {}, {"w_down is bf16[2, 128, 64]", "u8"});
  refuse(gate_up, zeros({2, 128, 64}), {}, {"w_down is u8[2, 128, 64]", "it must be [2, 128, 32]"});
  refuse(zeros({2, 128, 63}), down, {}, {"w_gate_up is u8[2, 128, 63]", "[experts, 2 I, 64]"});
  refuse(zeros({2, 48, 64}), zeros({2, 128, 12}), {.gate_up_scale = &f32_scale}, {"gate_up_scale is f32"});
  const Tensor narrow = zeros({2, 48, 64}), narrow_scale = zeros({2, 48, 4});
  refuse(narrow, zeros({2, 128, 12}), {.gate_up_scale = &narrow_scale, .down_scale = &down_scale},
         {"w_down is u8[2, 128, 12]", "24 columns", "multiple of 32"});
  refuse(zeros({2, 64, 128}).transpose(1, 2), down, {.gate_up_scale = &gate_up_scale}, {"w_gate_up is u8[2, 128, 64]", "contiguous"});
  const Tensor odd = zeros({2 * 128 * 64 + 8}).slice(0, 8, 2 * 128 * 64 + 8).reshape({2, 128, 64});
  refuse(odd, down, {.gate_up_scale = &gate_up_scale}, {"w_gate_up is u8[2, 128, 64]", "multiple of 16 bytes"});
  const Tensor transposed = zeros({2, 4, 128}).transpose(1, 2);
  refuse(gate_up, down, {.gate_up_scale = &transposed}, {"gate_up_scale is u8[2, 128, 4]", "contiguous"});
  refuse(layer.w_gate_up, layer.w_down, {.down_scale = &down_scale}, {"down_scale is given, but w_down is bf16[2, 128, 64]"});
  MoeExpertsOptions both{.shared_gate_up = &shared, .shared_down = &shared_down, .shared_gate_up_scale = &shared_scale};
  both.gate_up_scale = &gate_up_scale, both.down_scale = &down_scale;
  refuse(gate_up, down, both, {"shared_down_scale is not given"});
  both.shared_down = &shared;
  refuse(gate_up, down, both, {"shared_down is u8[128, 64]", "[128, 32]"});
  EXPECT_TRUE(layer.out.untouched());
}

TEST_P(FusedMoe, RoutesFirst) {
  const Sizes sizes{.tokens = 21, .hidden = 64, .inner = 32, .experts = 16, .k = 4, .shared = 32, .addend = true};
  Layer layer(sizes, DType::bf16, device, random);
  PlacedTensor logits({21, 16}, DType::bf16, device), bias({16}, DType::f32, device);
  logits.fill_random(random);
  bias.fill_random(random, 0.2f);
  const MoeRouteOptions route{.score = MoeScore::sigmoid,
                              .bias = &bias.tensor(),
                              .groups = 4,
                              .groups_taken = 2,
                              .group_score = MoeGroupScore::sum_of_two,
                              .renormalise = true,
                              .scale = 2.5f};
  moe_route(logits, layer.weights, layer.experts, route);
  moe_experts(layer.x, layer.weights, layer.experts, layer.w_gate_up, layer.w_down, layer.out, layer.options());
  const PlacedTensor fused({21, 64}, DType::bf16, device);
  fused_moe(layer.x, logits, 4, layer.w_gate_up, layer.w_down, fused, {.route = route, .experts = layer.options()});
  EXPECT_EQ(fused.values(), layer.out.values());
}

TEST_P(FusedMoe, InPlaceAndTheSameEveryTime) {
  const Layer layer({.tokens = 50, .hidden = 64, .inner = 32, .experts = 8, .k = 3, .addend = true}, DType::bf16, device, random);
  const auto run = [&](const Tensor& out) {
    moe_experts(layer.x, layer.weights, layer.experts, layer.w_gate_up, layer.w_down, out, layer.options());
  };
  run(layer.out);
  const std::vector<double> first = layer.out.values();
  for (int i = 0; i < 3; ++i) {
    run(layer.out);
    EXPECT_EQ(layer.out.values(), first);
  }
  run(layer.addend);
  EXPECT_EQ(layer.addend.values(), first);
}

/// Replays follow what the tensors hold then, the routing too.
TEST_P(FusedMoe, Graphs) {
  const Stream stream(device);
  Layer layer({.tokens = 9, .hidden = 64, .inner = 32, .experts = 12, .k = 3, .shared = 16}, DType::bf16, device, random);
  PlacedTensor logits({9, 12}, DType::f32, device);
  logits.fill_random(random);
  Stream::standard(device).synchronize();
  const Graph graph = Graph::capture(stream, [&] {
    fused_moe(layer.x, logits, 3, layer.w_gate_up, layer.w_down, layer.out, {.experts = layer.options(), .stream = stream});
  });
  for (int i = 0; i < 3; ++i) {
    logits.fill_random(random);
    layer.x.fill_random(random);
    const PlacedTensor expected({9, 64}, DType::bf16, device);
    fused_moe(layer.x, logits, 3, layer.w_gate_up, layer.w_down, expected, {.experts = layer.options()});
    Stream::standard(device).synchronize();
    graph.replay(stream);
    stream.synchronize();
    EXPECT_EQ(layer.out.values(), expected.values());
  }
}

TEST_P(FusedMoe, RefusesWhatItCannotTake) {
  const Layer layer({.tokens = 3, .hidden = 8, .inner = 4, .experts = 5, .k = 2, .shared = 4}, DType::bf16, device, random);
  const auto zeros = [&](Shape shape, DType dtype = DType::bf16) {
    return Tensor::zeros(std::move(shape), dtype, Stream::standard(device));
  };
  struct Operands {
    Tensor x, weights, experts, w_gate_up, w_down, out;
  };
  const Operands good{layer.x, layer.weights, layer.experts, layer.w_gate_up, layer.w_down, layer.out};
  using Parts = std::initializer_list<std::string_view>;
  const auto refuse = [&](const Operands& t, const MoeExpertsOptions& options, Parts parts) {
    expect_error<InvalidArgument>([&] { moe_experts(t.x, t.weights, t.experts, t.w_gate_up, t.w_down, t.out, options); }, parts);
  };
  const auto with = [&](Tensor Operands::*member, const Tensor& other, Parts parts) {
    Operands t = good;
    t.*member = other;
    refuse(t, {}, parts);
  };
  with(&Operands::x, zeros({3, 8}, DType::i32), {"moe_experts: x is i32[3, 8]", "f16 and bf16"});
  if (device.is_cuda()) with(&Operands::x, zeros({3, 8}, DType::f32), {"x is f32[3, 8]", "on the CPU also f32"});
  with(&Operands::x, zeros({24}), {"x is bf16[24]", "[tokens, H]"});
  with(&Operands::weights, zeros({3, 3}, DType::f32), {"weights is f32[3, 3]", "experts' shape, i32[3, 2]"});
  with(&Operands::weights, zeros({3, 2}), {"weights is bf16[3, 2]", "f32"});
  with(&Operands::experts, zeros({2, 2}, DType::i32), {"experts is i32[2, 2]", "contiguous, [3, k] with k from 1 to 16"});
  with(&Operands::experts, zeros({3, 17}, DType::i32), {"experts is i32[3, 17]", "k from 1 to 16"});
  with(&Operands::experts, zeros({3, 4}, DType::i32).slice(1, 0, 2), {"experts is i32[3, 2]", "contiguous"});
  with(&Operands::w_gate_up, zeros({5, 7, 8}), {"w_gate_up is bf16[5, 7, 8]", "[experts, 2 I, 8]"});
  with(&Operands::w_gate_up, zeros({5, 8, 7}), {"w_gate_up is bf16[5, 8, 7]", "[experts, 2 I, 8]"});
  with(&Operands::w_gate_up, zeros({0, 8, 8}), {"the number of w_gate_up's experts is 0; it must be 1 to 512"});
  with(&Operands::w_gate_up, zeros({8, 8}), {"w_gate_up is bf16[8, 8]", "3 dimensions"});
  with(&Operands::w_gate_up, zeros({5, 8, 8}, DType::f16), {"w_gate_up is f16[5, 8, 8]", "bf16"});
  with(&Operands::w_down, zeros({5, 8, 5}), {"w_down is bf16[5, 8, 5]", "[5, 8, 4]"});
  with(&Operands::out, zeros({3, 7}), {"out is bf16[3, 7]", "x's shape, bf16[3, 8]"});
  with(&Operands::out, layer.x, {"out is", "shares memory with x"});
  const Tensor odd = zeros({7, 8}), down = zeros({8, 5}), addend = zeros({3, 7}), gate_up = layer.shared_gate_up;
  refuse(good, {.shared_gate_up = &gate_up}, {"shared_gate_up is given without shared_down"});
  refuse(good, {.shared_down = &down}, {"shared_down is given without shared_gate_up"});
  refuse(good, {.shared_gate_up = &odd, .shared_down = &down}, {"shared_gate_up is bf16[7, 8]", "[2 S, 8]"});
  refuse(good, {.shared_gate_up = &gate_up, .shared_down = &down}, {"shared_down is bf16[8, 5]", "[8, 4]"});
  refuse(good, {.addend = &addend}, {"addend is bf16[3, 7]", "out's shape, bf16[3, 8]"});
  const auto refuse_fused = [&](const Tensor& logits, int k, const MoeRouteOptions& route, Parts parts) {
    expect_error<InvalidArgument>([&] { fused_moe(layer.x, logits, k, layer.w_gate_up, layer.w_down, layer.out, {.route = route}); },
                                  parts);
  };
  refuse_fused(zeros({2, 5}, DType::f32), 2, {}, {"fused_moe: logits is f32[2, 5]", "x's 3 tokens"});
  refuse_fused(zeros({3, 5}, DType::f32), 6, {}, {"k is 6, but the groups taken have 5 of the 5 experts"});
  refuse_fused(zeros({3, 5}, DType::f32), 2, {.groups = 2}, {"groups is 2", "divide the 5 experts"});
  EXPECT_TRUE(layer.out.untouched());
}

}  // namespace
}  // namespace tw::kernels::moe
