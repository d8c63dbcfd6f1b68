// gated_delta_rule_backward() against the reverse of the recurrence in double, on the CPU and, where there is one, on a GPU; its bad
// inputs.

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "kernels/gated_delta/case.hpp"
#include "kernels/gated_delta/wide_backward.tile.hpp"
#include "runtime/format.hpp"
#include "tests/compiled_kernels.hpp"
#include "tests/expect_error.hpp"
#include "tilewave/gated_delta.hpp"
#include "tilewave/launch.hpp"

namespace tw::kernels::gated_delta {
namespace {

class GatedDeltaBackward : public CaseTest {
 protected:
  struct Outputs {
    PlacedTensor dq, dk, dv, d_beta, dg, d_initial;
    Outputs(const Inputs& in, const Case& c, DType dtype, Device device)
        : dq(in.q.tensor().shape(), dtype, device, c.place),
          dk(in.k.tensor().shape(), dtype, device, c.place),
          dv(in.v.tensor().shape(), dtype, device, c.place),
          d_beta(in.beta.tensor().shape(), in.beta.tensor().dtype(), device, c.token_place),
          dg(in.g.tensor().shape(), DType::f32, device, c.token_place),
          d_initial(in.state.tensor().shape(), DType::f32, device, c.token_place) {}
  };
  static bool gated(const Case& c) { return c.lowest_gate < 0; }
  void run(const Case& c, const Inputs& in, const PlacedTensor& d_o, const PlacedTensor& d_final, const Outputs& out) {
    tw::gated_delta_rule_backward(in.q, in.k, in.v, in.beta, d_o, out.dq, out.dk, out.dv, out.d_beta,
                                  {.g = gated(c) ? &in.g.tensor() : nullptr,
                                   .scale = c.scale,
                                   .normalise_qk = c.normalise,
                                   .initial_state = c.initial ? &in.state.tensor() : nullptr,
                                   .cu_seqlens = in.offsets ? &*in.offsets : nullptr,
                                   .d_final_state = c.final ? &d_final.tensor() : nullptr,
                                   .dg = gated(c) ? &out.dg.tensor() : nullptr,
                                   .d_initial_state = c.initial ? &out.d_initial.tensor() : nullptr});
  }
  void expect_accurate(const char* name, const PlacedTensor& out, const std::vector<double>& exact, std::vector<double> naive,
                       const Case& c, const std::vector<double>& cancelled = {}) {
    SCOPED_TRACE(name);
    for (double& x : naive) x = round_to(out.tensor().dtype(), static_cast<float>(x));
    EXPECT_TRUE(accurate({.out = out.values(),
                          .reference = exact,
                          .naive = naive,
                          .arithmetic = arithmetic_of(dtype, Device::cpu()),
                          .factor = 3,
                          .cancelled = cancelled,
                          .cancelled_products = c.dim}));
    EXPECT_TRUE(out.gaps_intact());
  }
  void check(const Case& c) {
    SCOPED_TRACE(text(c));
    if (device.is_cuda() && dtype == DType::f32) GTEST_SKIP() << "f32 is for the CPU";
    Inputs in = inputs(c);
    PlacedTensor d_o(in.v.tensor().shape(), dtype, device, c.place), d_final(in.state.tensor().shape(), DType::f32, device);
    const std::vector<float> of_d_o = d_o.fill_random(random), of_d_final = d_final.fill_random(random);
    const Outputs out(in, c, dtype, device);
    if (!launched([&] { run(c, in, d_o, d_final, out); })) return;
    const std::vector<float> d_state = c.final ? of_d_final : std::vector<float>{};
    const PlainGradients exact = plain_gradients<double>(in.plain, of_d_o, d_state, [](double x) { return x; });
    const PlainGradients naive = plain_gradients<float>(in.plain, of_d_o, d_state, [&](float x) { return round_to(dtype, x); });
    expect_accurate("dq", out.dq, exact.dq, naive.dq, c);
    expect_accurate("dk", out.dk, exact.dk, naive.dk, c);
    expect_accurate("dv", out.dv, exact.dv, naive.dv, c);
    expect_accurate("d_beta", out.d_beta, exact.d_beta, naive.d_beta, c, exact.d_beta_terms);
    if (gated(c))
      expect_accurate("dg", out.dg, exact.dg, naive.dg, c, exact.dg_terms);
    else
      EXPECT_TRUE(out.dg.untouched());
    if (c.initial)
      expect_accurate("d_initial_state", out.d_initial, exact.d_initial_state, naive.d_initial_state, c, exact.d_initial_state_terms);
    else
      EXPECT_TRUE(out.d_initial.untouched());
  }
  /// A packed sequence of 70 tokens and one of 30, which then become NaN.
  void check_neighbours(const Case& c) {
    SCOPED_TRACE(text(c));
    Inputs in = inputs(c);
    PlacedTensor d_o(in.v.tensor().shape(), dtype, device), d_final(in.state.tensor().shape(), DType::f32, device);
    d_o.fill_random(random);
    d_final.fill_random(random);
    const Outputs clean(in, c, dtype, device), out(in, c, dtype, device);
    run(c, in, d_o, d_final, clean);
    for (PlacedTensor* const t : {&in.q, &in.k, &in.v, &in.beta, &in.g, &d_o}) {
      std::vector<float> values;
      for (const double x : t->values()) values.push_back(static_cast<float>(x));
      std::fill(values.begin() + static_cast<std::ptrdiff_t>(values.size() * 70 / 100), values.end(), kNaN);
      t->fill(values);
    }
    run(c, in, d_o, d_final, out);
    const auto expect_equal = [](const char* name, const PlacedTensor& a, const PlacedTensor& b) {
      const std::vector<double> x = a.values(), y = b.values();
      for (std::size_t i = 0; i < x.size() * 70 / 100; ++i) ASSERT_EQ(x[i], y[i]) << name << ", element " << i;
    };
    expect_equal("dq", clean.dq, out.dq);
    expect_equal("dk", clean.dk, out.dk);
    expect_equal("dv", clean.dv, out.dv);
    expect_equal("d_beta", clean.d_beta, out.d_beta);
    expect_equal("dg", clean.dg, out.dg);
  }
};

INSTANTIATE_TEST_SUITE_P(Ops, GatedDeltaBackward,
                         testing::Combine(testing::ValuesIn(kDevices), testing::Values(DType::f32, DType::f16, DType::bf16)),
                         CaseTest::name);

TEST_P(GatedDeltaBackward, AnyLength) {
  for (const std::int64_t length : {0, 1, 2, 63, 64, 65, 131}) {
    // A token's gradients are products of few numbers and its vectors: errors of one would be those of all elements.
    check({.lengths = {length, length},
           .heads_of_keys = length < 3 ? 16 : 1,
           .dim = 32,
           .values = 40,
           .initial = length == 0 || pick(2) == 0,
           .final = pick(2) == 0});
  }
}

TEST_P(GatedDeltaBackward, AnyDimensions) {
  // Of a single dimension, keys of norm 1 would cancel almost all of what reaches the initial state.
  check({.lengths = {67}, .dim = 1, .values = 50, .key_norm = 0.3f, .initial = true});
  for (const std::int64_t dim : {7, 64, 65, 128}) check({.lengths = {67}, .dim = dim, .values = 1 + pick(128), .initial = true});
  check({.lengths = {130}, .dim = 128, .values = 128, .initial = true});
}

TEST_P(GatedDeltaBackward, WideKeys) {
  for (const std::int64_t dim : {129, 192, 256}) check({.lengths = {67}, .dim = dim, .values = 20 + pick(60), .initial = true});
  check({.lengths = {130}, .heads_of_keys = 2, .group = 2, .dim = 256, .values = 64, .initial = true, .f32_beta = true});
  // Heads enough for errors that are those of a head's last gates.
  check({.lengths = {0, 1, 64, 100},
         .packed = true,
         .heads_of_keys = 4,
         .group = 4,
         .dim = 192,
         .values = 40,
         .lowest_gate = -20,
         .initial = dtype != DType::f16});
  check({.lengths = {70}, .dim = 200, .values = 32, .key_norm = 9, .normalise = true, .place = {.offset = 3, .gap = 5}});
  check({.lengths = {66}, .dim = 160, .values = 32, .lowest_gate = 0, .initial = true, .final = false});
  check({.lengths = {0, 0}, .dim = 160, .values = 16, .initial = true});
}

TEST_P(GatedDeltaBackward, WideValues) {
  for (const std::int64_t values : {129, 256, 300}) check({.lengths = {67}, .dim = 1 + pick(128), .values = values, .initial = true});
  check({.lengths = {66}, .dim = 256, .values = 256, .initial = true});
  check(
      {.lengths = {63, 2}, .packed = true, .heads_of_keys = 2, .group = 2, .dim = 150, .values = 160, .normalise = true, .initial = true});
}

TEST_P(GatedDeltaBackward, GatesFromNoneToStrong) {
  for (const float lowest : {0.0f, -0.01f, -1.0f, -20.0f}) {
    // What reaches the initial state through the strongest gates is below f16's range.
    check({.lengths = {150}, .dim = 64, .values = 32, .lowest_gate = lowest, .initial = dtype != DType::f16 || lowest > -20});
  }
}

TEST_P(GatedDeltaBackward, GatesThatForgetTheState) { check({.lengths = {150}, .dim = 64, .values = 32, .resets = true, .initial = true}); }

TEST_P(GatedDeltaBackward, BetaUpToTwoWithSmallKeys) {
  check({.lengths = {150}, .key_norm = 0.7f, .largest_beta = 2, .initial = true, .f32_beta = true});
  check({.lengths = {90}, .lowest_gate = 0, .key_norm = 0.3f, .largest_beta = 0});
}

TEST_P(GatedDeltaBackward, HeadsThatShareKeys) {
  check({.lengths = {66, 66}, .heads_of_keys = 2, .group = 3, .dim = 32, .values = 32, .initial = true});
  check({.lengths = {30}, .heads_of_keys = 3, .group = 1, .dim = 16, .values = 80, .f32_beta = true});
}

TEST_P(GatedDeltaBackward, PackedSequences) {
  check({.lengths = {0, 1, 63, 0, 64, 65, 100, 0}, .packed = true, .dim = 32, .values = 32, .initial = true});
  check(
      {.lengths = {67, 61}, .packed = true, .heads_of_keys = 2, .group = 2, .dim = 64, .values = 70, .normalise = true, .f32_beta = true});
  check({.lengths = {0, 0}, .packed = true, .dim = 16, .values = 16, .initial = true});
}

TEST_P(GatedDeltaBackward, NormalisesQueriesAndKeys) {
  check({.lengths = {90}, .heads_of_keys = 2, .dim = 96, .values = 32, .key_norm = 9, .normalise = true, .scale = 0.5f});
  check({.lengths = {20}, .heads_of_keys = 2, .group = 2, .dim = 40, .values = 32, .key_norm = 9, .normalise = true, .initial = true});
}

TEST_P(GatedDeltaBackward, Strides) {
  const Placement with_gaps{.offset = 3, .gap = 5}, by_heads{.order = {0, 2, 1, 3}};
  check({.lengths = {70, 70}, .heads_of_keys = 2, .dim = 24, .values = 24, .initial = true, .place = with_gaps, .token_place = {.gap = 1}});
  check({.lengths = {70}, .heads_of_keys = 2, .group = 2, .dim = 64, .values = 64, .initial = true, .place = by_heads});
}

TEST_P(GatedDeltaBackward, GatesOfChannelsAnyLength) {
  for (const std::int64_t length : {0, 1, 2, 63, 64, 65, 131}) {
    check({.lengths = {length, length},
           .heads_of_keys = length < 3 ? 16 : 1,
           .dim = 32,
           .values = 40,
           .channels = true,
           .initial = length == 0 || pick(2) == 0,
           .final = pick(2) == 0});
  }
}

TEST_P(GatedDeltaBackward, GatesOfChannelsAnyDimensions) {
  for (const std::int64_t dim : {7, 64, 65, 128})
    check({.lengths = {67}, .dim = dim, .values = 1 + pick(128), .channels = true, .initial = true});
  check({.lengths = {130}, .dim = 128, .values = 128, .channels = true, .initial = true, .f32_beta = true});
}

TEST_P(GatedDeltaBackward, GatesOfChannelsFromWeakToStrong) {
  for (const float lowest : {-0.001f, -0.1f, -1.0f, -5.0f, -20.0f}) {
    check({.lengths = {150},
           .dim = 64,
           .values = 32,
           .lowest_gate = lowest,
           .channels = true,
           .initial = dtype != DType::f16 || lowest > -20});
  }
}

TEST_P(GatedDeltaBackward, GatesOfChannelsAndSharedKeys) {
  check({.lengths = {66, 66}, .heads_of_keys = 2, .group = 3, .dim = 32, .values = 32, .channels = true, .initial = true});
  check({.lengths = {90}, .heads_of_keys = 2, .dim = 96, .values = 32, .channels = true, .key_norm = 9, .normalise = true, .scale = 0.5f});
}

TEST_P(GatedDeltaBackward, GatesOfChannelsThatForgetTheState) {
  check({.lengths = {150}, .dim = 64, .values = 32, .channels = true, .resets = true, .initial = true});
}

TEST_P(GatedDeltaBackward, GatesOfChannelsOfPackedSequences) {
  check({.lengths = {0, 1, 63, 0, 64, 65, 100, 0}, .packed = true, .dim = 32, .values = 32, .channels = true, .initial = true});
  check({.lengths = {0, 0}, .packed = true, .dim = 16, .values = 16, .channels = true, .initial = true});
}

TEST_P(GatedDeltaBackward, GatesOfChannelsOfAnyStrides) {
  const Placement with_gaps{.offset = 3, .gap = 5}, by_heads{.order = {0, 2, 1, 3}};
  check({.lengths = {70, 70},
         .heads_of_keys = 2,
         .dim = 24,
         .values = 24,
         .channels = true,
         .initial = true,
         .place = with_gaps,
         .token_place = {.gap = 1}});
  check({.lengths = {70}, .heads_of_keys = 2, .dim = 64, .values = 64, .channels = true, .place = by_heads});
}

/// What follows a sequence's last token in memory has no part in its gradients, and every run gives the same bits.
TEST_P(GatedDeltaBackward, OtherSequencesMayHoldNaN) {
  if (device.is_cuda() && dtype == DType::f32) GTEST_SKIP() << "f32 is for the CPU";
  for (const bool channels : {false, true})
    check_neighbours({.lengths = {70, 30}, .packed = true, .dim = 64, .values = 64, .channels = channels});
  check_neighbours({.lengths = {70, 30}, .packed = true, .dim = 160, .values = 140});
}

class GatedDeltaBackwardArguments : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override { skip_unless_present(GetParam()); }
  Tensor tensor(Shape shape, DType dtype = DType::bf16) { return Tensor::poisoned(std::move(shape), dtype, Stream::standard(GetParam())); }
};
INSTANTIATE_TEST_SUITE_P(Ops, GatedDeltaBackwardArguments, testing::ValuesIn(kDevices), device_name);

TEST_P(GatedDeltaBackwardArguments, AreRefusedByName) {
  const Shape keys{2, 5, 2, 8}, values{2, 5, 4, 16}, tokens{2, 5, 4};
  const Tensor q = tensor(keys), k = tensor(keys), v = tensor(values), beta = tensor(tokens), d_o = tensor(values);
  const Tensor dq = tensor(keys), dk = tensor(keys), dv = tensor(values), d_beta = tensor(tokens);
  const Tensor g = tensor(tokens, DType::f32), dg = tensor(tokens, DType::f32), other = tensor({2, 4, 16, 8}, DType::f32);
  const auto refused = [&](const Tensor& d_o_, const Tensor& dq_, const Tensor& dv_, const Tensor& d_beta_,
                           std::initializer_list<std::string_view> parts, const GatedDeltaBackwardOptions& options = {}) {
    expect_error<InvalidArgument>([&] { tw::gated_delta_rule_backward(q, k, v, beta, d_o_, dq_, dk, dv_, d_beta_, options); }, parts);
  };
  refused(q, dq, dv, d_beta, {"gated_delta_rule_backward: d_o is bf16[2, 5, 2, 8]", "v's shape"});
  refused(d_o, dv, dv, d_beta, {"dq is bf16[2, 5, 4, 16]", "q's shape"});
  refused(d_o, dq, dq, d_beta, {"dv is bf16[2, 5, 2, 8]", "v's shape"});
  refused(d_o, dq, dv, g, {"d_beta is f32[2, 5, 4]", "bf16"});
  refused(d_o, dk, dv, d_beta, {"shares memory", "dq"});
  refused(d_o, dq, v, d_beta, {"dv is", "shares memory with v"});
  refused(d_o, dq, dv, d_beta, {"dg is f32[2, 5, 4]", "g is not given"}, {.dg = &dg});
  refused(d_o, dq, dv, d_beta, {"dg is f32[2, 4, 16, 8]", "g's shape"}, {.g = &g, .dg = &other});
  refused(d_o, dq, dv, d_beta, {"initial_state is f32[2, 4, 16, 8]", "[2, 4, 8, 16]"}, {.initial_state = &other});
  refused(d_o, dq, dv, d_beta, {"d_final_state is f32[2, 4, 16, 8]", "[2, 4, 8, 16]"}, {.d_final_state = &other});
  refused(d_o, dq, dv, d_beta, {"d_initial_state is f32[2, 4, 16, 8]", "[2, 4, 8, 16]"}, {.d_initial_state = &other});
  const Tensor wide = tensor({2, 5, 4, 129}), d_wide = tensor({2, 5, 4, 129}), longer = tensor({2, 5, 2, 257});
  const Tensor of_channels = tensor({2, 5, 4, 8}, DType::f32), of_wide_channels = tensor({2, 5, 4, 129}, DType::f32);
  const auto refused_sizes = [&](const Tensor& q_, const Tensor& v_, std::initializer_list<std::string_view> parts, const Tensor* g_) {
    expect_error<InvalidArgument>([&] { tw::gated_delta_rule_backward(q_, q_, v_, beta, v_, dq, dk, dv, d_beta, {.g = g_}); }, parts);
  };
  refused_sizes(longer, v, {"q is bf16[2, 5, 2, 257]", "1 to 256"}, nullptr);
  refused_sizes(q, wide, {"v is bf16[2, 5, 4, 129]", "with gates of channels", "at most 128"}, &of_channels);
  refused_sizes(wide, v, {"g is f32[2, 5, 4, 129]", "up to 128 dimensions"}, &of_wide_channels);
  refused(d_wide, dq, dv, d_beta, {"d_o is bf16[2, 5, 4, 129]", "v's shape"});
  if (GetParam().is_cuda()) {
    const Tensor exact = tensor(keys, DType::f32), of_tokens = tensor({2, 5, 2}, DType::f32);
    expect_error<InvalidArgument>(
        [&] { tw::gated_delta_rule_backward(exact, exact, exact, of_tokens, exact, exact, exact, exact, of_tokens); },
        {"q is f32[2, 5, 2, 8]", "on a GPU f16 and bf16"});
  }
}

/// On the generic target within what GPUs of compute capability 8.6 and 8.9 have for a block.
TEST(GatedDeltaBackwardKernels, WideKeysCompileWithoutSpills) {
  skip_without_nvrtc();
  for (const bool generic : {false, true}) {
    std::vector<KernelSpec> specs;
    const int stages = generic ? 1 : 2;
    const auto add = [&](const std::string& type, bool pieces) {
      const KernelSpec spec = make_spec({"tw::kernels::gated_delta::" + type, kWideBackwardSource, nullptr}, pieces, pieces);
      specs.push_back(generic ? for_target(spec, GpuTarget::cuda) : spec);
    };
    for (const bool pieces : {false, true}) {
      const char* const dtype = pieces ? "tw::bf16" : "tw::f16";
      add(tw::format("Weights<{}>", dtype), pieces);
      add(tw::format("WideStates<{}, {}>", dtype, stages), pieces);
      add(tw::format("WideStateGradients<{}, {}>", dtype, stages), pieces);
      // The generic target's takes most of a minute to compile.
      if (pieces || !generic) add(tw::format("WideGradients<{}, float, {}, {}>", dtype, generic ? 2 : 7, stages), pieces);
    }
    compile_and_check(specs, generic ? "sm_86" : "sm_90a", expect_fast);
  }
}

}  // namespace
}  // namespace tw::kernels::gated_delta
