// gated_delta_rule() and its steps against a recurrence in double, on the CPU and, where there is one, on a GPU; their bad inputs.

#include "tilewave/gated_delta.hpp"
#include "tests/compiled_kernels.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "kernels/gated_delta/case.hpp"
#include "kernels/gated_delta/gated_delta.tile.hpp"
#include "kernels/gated_delta/wide.tile.hpp"
#include "runtime/format.hpp"
#include "tests/accuracy.hpp"
#include "tests/expect_error.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"
#include "tilewave/launch.hpp"

namespace tw::kernels::gated_delta {
namespace {

using namespace tw::test;

class GatedDelta : public CaseTest {
 protected:
  GatedDeltaOptions options(const Case& c, const Inputs& in, const PlacedTensor& state) {
    return {.g = c.lowest_gate < 0 ? &in.g.tensor() : nullptr,
            .scale = c.scale,
            .normalise_qk = c.normalise,
            .initial_state = c.initial ? &in.state.tensor() : nullptr,
            .final_state = c.final ? &state.tensor() : nullptr,
            .cu_seqlens = in.offsets ? &*in.offsets : nullptr};
  }

  /// `chunk`: tokens whose gates are added up; 1 for steps.
  void expect_results(const Case& c, const Inputs& in, const PlacedTensor& o, const PlacedTensor& state, std::int64_t chunk) {
    const PlainResult exact = plain<double>(in.plain, chunk, [](double x) { return x; });
    // Steps are f32 whatever the dtype; chunks round the operands of their products.
    const PlainResult naive = plain<float>(in.plain, chunk, [&](float x) { return round_to(dtype, x); });
    std::vector<double> rounded = naive.o;
    for (double& x : rounded) x = round_to(dtype, static_cast<float>(x));
    const Arithmetic arithmetic = arithmetic_of(dtype, Device::cpu());
    EXPECT_TRUE(accurate({.out = o.values(), .reference = exact.o, .naive = rounded, .arithmetic = arithmetic}));
    EXPECT_TRUE(o.gaps_intact());
    if (c.final)
      EXPECT_TRUE(accurate({.out = state.values(), .reference = exact.state, .naive = naive.state, .arithmetic = arithmetic}));
    else
      EXPECT_TRUE(state.untouched());
    EXPECT_TRUE(state.gaps_intact());
  }
  void check(const Case& c) {
    SCOPED_TRACE(text(c));
    Inputs in = inputs(c);
    PlacedTensor o(in.v.tensor().shape(), dtype, device, c.place), state(in.state.tensor().shape(), DType::f32, device, c.token_place);
    tw::gated_delta_rule(in.q, in.k, in.v, in.beta, o, options(c, in, state));
    expect_results(c, in, o, state, device.is_cuda() && dtype == DType::f32 ? 1 : kChunk);
  }
  /// The same in steps of a few tokens.
  void check_steps(Case c) {
    SCOPED_TRACE("steps: " + text(c));
    c.initial = true;
    Inputs in = inputs(c);
    PlacedTensor o(in.v.tensor().shape(), dtype, device, c.place);
    const std::int64_t length = c.lengths.at(0);
    for (std::int64_t at = 0; at < length;) {
      const std::int64_t end = std::min(at + 1 + pick(4), length);
      const auto part = [&](const PlacedTensor& t) { return t.tensor().slice(1, at, end); };
      const Tensor g = part(in.g);
      tw::gated_delta_rule_step(part(in.q), part(in.k), part(in.v), part(in.beta), in.state, part(o),
                                {.g = c.lowest_gate < 0 ? &g : nullptr, .scale = c.scale, .normalise_qk = c.normalise});
      at = end;
    }
    expect_results(c, in, o, in.state, 1);
  }
  /// A packed sequence of 70 tokens and one of 30, which then become NaN.
  void check_neighbours(const Case& c) {
    SCOPED_TRACE(text(c));
    Inputs in = inputs(c);
    PlacedTensor o(in.v.tensor().shape(), dtype, device), clean(in.v.tensor().shape(), dtype, device);
    PlacedTensor state(in.state.tensor().shape(), DType::f32, device), clean_state(in.state.tensor().shape(), DType::f32, device);
    tw::gated_delta_rule(in.q, in.k, in.v, in.beta, clean, options(c, in, clean_state));
    const auto poison = [](PlacedTensor& t) {
      std::vector<float> values;
      for (const double x : t.values()) values.push_back(static_cast<float>(x));
      std::fill(values.begin() + static_cast<std::ptrdiff_t>(values.size() * 70 / 100), values.end(), kNaN);
      t.fill(values);
    };
    for (PlacedTensor* const t : {&in.q, &in.k, &in.v, &in.beta, &in.g}) poison(*t);
    tw::gated_delta_rule(in.q, in.k, in.v, in.beta, o, options(c, in, state));
    const std::vector<double> with = o.values(), without = clean.values(), end = state.values(), clean_end = clean_state.values();
    for (std::size_t i = 0; i < with.size() * 70 / 100; ++i) ASSERT_EQ(with[i], without[i]) << "element " << i;
    for (std::size_t i = 0; i < end.size() / 2; ++i) ASSERT_EQ(end[i], clean_end[i]) << "element " << i << " of the state";
  }
};

INSTANTIATE_TEST_SUITE_P(Ops, GatedDelta,
                         testing::Combine(testing::ValuesIn(kDevices), testing::Values(DType::f32, DType::f16, DType::bf16)),
                         CaseTest::name);

TEST_P(GatedDelta, AnyLength) {
  for (const std::int64_t length : {0, 1, 2, 63, 64, 65, 127, 131, 200})
    check({.lengths = {length, length}, .dim = 32, .values = 40, .initial = pick(2) == 0, .final = length > 0 || pick(2) == 0});
}

TEST_P(GatedDelta, AnyDimensions) {
  for (const std::int64_t dim : {1, 7, 16, 63, 64, 65, 96, 128})
    check({.lengths = {67}, .dim = dim, .values = 20 + pick(130), .initial = true});
  check({.lengths = {130}, .dim = 128, .values = 128, .initial = true});
}

TEST_P(GatedDelta, WideKeys) {
  check({.lengths = {67, 67}, .dim = 129, .values = 20 + pick(130), .initial = true});
  check({.lengths = {130}, .heads_of_keys = 2, .group = 2, .dim = 256, .values = 64, .initial = true, .f32_beta = true});
  // A state's error in f32 is mostly that of its last gate, one number for all its elements: only of several heads is the L2 norm an
  // average.
  check({.lengths = {0, 1, 64, 100}, .packed = true, .heads_of_keys = 4, .group = 4, .dim = 192, .values = 70, .lowest_gate = -20});
  check({.lengths = {70}, .dim = 200, .values = 32, .key_norm = 9, .normalise = true, .place = {.offset = 3, .gap = 5}});
  check_steps({.lengths = {7, 7}, .heads_of_keys = 2, .group = 2, .dim = 256, .values = 100});
  check_steps({.lengths = {7}, .dim = 160, .values = 33, .key_norm = 9, .normalise = true, .f32_beta = true});
}

TEST_P(GatedDelta, GatesFromNoneToStrong) {
  for (const float lowest : {0.0f, -0.01f, -1.0f, -20.0f})
    check({.lengths = {150}, .dim = 64, .values = 32, .lowest_gate = lowest, .initial = true});
}

TEST_P(GatedDelta, GatesThatForgetTheState) {
  check({.lengths = {150}, .dim = 64, .values = 32, .resets = true, .initial = true});
  check_steps({.lengths = {7}, .dim = 64, .values = 32, .resets = true});
}

TEST_P(GatedDelta, BetaUpToTwoWithSmallKeys) {
  check({.lengths = {150}, .key_norm = 0.7f, .largest_beta = 2, .initial = true, .f32_beta = true});
  check({.lengths = {150}, .lowest_gate = 0, .key_norm = 0.3f, .largest_beta = 2});
}

TEST_P(GatedDelta, HeadsThatShareKeys) {
  check({.lengths = {66, 66}, .heads_of_keys = 2, .group = 3, .dim = 32, .values = 32, .initial = true});
  check({.lengths = {30}, .heads_of_keys = 3, .group = 1, .dim = 16, .values = 80, .f32_beta = true});
}

TEST_P(GatedDelta, PackedSequences) {
  check({.lengths = {0, 1, 63, 0, 64, 65, 100, 0}, .packed = true, .dim = 32, .values = 32, .initial = true});
  check({.lengths = {64, 64}, .packed = true, .dim = 64, .values = 70, .f32_beta = true});
  check({.lengths = {0, 0}, .packed = true, .dim = 16, .values = 16, .initial = true});
}

TEST_P(GatedDelta, NormalisesQueriesAndKeys) {
  check({.lengths = {90}, .heads_of_keys = 2, .dim = 96, .values = 32, .key_norm = 9, .normalise = true, .scale = 0.5f});
  check_steps({.lengths = {9, 9}, .dim = 96, .values = 48, .key_norm = 9, .normalise = true});
}

TEST_P(GatedDelta, Strides) {
  const Placement with_gaps{.offset = 3, .gap = 5}, by_heads{.order = {0, 2, 1, 3}};
  check({.lengths = {70, 70}, .heads_of_keys = 2, .dim = 24, .values = 24, .initial = true, .place = with_gaps, .token_place = {.gap = 1}});
  check({.lengths = {70, 70}, .heads_of_keys = 2, .group = 2, .dim = 64, .values = 64, .initial = true, .place = by_heads});
  check({.lengths = {20}, .dim = 8, .values = 8, .place = {.step = 2}, .token_place = {.step = 3}});
}

TEST_P(GatedDelta, Steps) {
  check_steps({.lengths = {11, 11, 11}, .heads_of_keys = 2, .group = 2, .dim = 128, .values = 100});
  check_steps({.lengths = {7}, .dim = 40, .values = 33, .lowest_gate = 0, .f32_beta = true, .scale = 1.0f});
}

/// What follows a sequence's last token in memory has no part in its results.
TEST_P(GatedDelta, OtherSequencesMayHoldNaN) {
  for (const bool channels : {false, true})
    check_neighbours({.lengths = {70, 30}, .packed = true, .dim = 64, .values = 64, .channels = channels});
  check_neighbours({.lengths = {70, 30}, .packed = true, .dim = 160, .values = 64});
}

TEST_P(GatedDelta, GatesOfChannelsAnyLength) {
  for (const std::int64_t length : {0, 1, 2, 17, 63, 64, 65, 127, 131, 193})
    check({.lengths = {length, length}, .dim = 32, .values = 40, .channels = true, .initial = pick(2) == 0, .final = length > 0});
}

TEST_P(GatedDelta, GatesOfChannelsAnyDimensions) {
  for (const std::int64_t dim : {1, 7, 63, 64, 65, 128})
    check({.lengths = {67}, .dim = dim, .values = 20 + pick(130), .channels = true, .initial = true});
  check({.lengths = {130}, .dim = 128, .values = 128, .channels = true, .initial = true, .f32_beta = true});
}

TEST_P(GatedDelta, GatesOfChannelsFromWeakToStrong) {
  for (const float lowest : {-0.001f, -0.1f, -1.0f, -5.0f, -20.0f})
    check({.lengths = {150}, .dim = 64, .values = 32, .lowest_gate = lowest, .channels = true, .initial = true});
}

TEST_P(GatedDelta, GatesOfChannelsThatForgetTheState) {
  check({.lengths = {150}, .dim = 64, .values = 32, .channels = true, .resets = true, .initial = true});
  check_steps({.lengths = {7}, .dim = 64, .values = 32, .channels = true, .resets = true});
}

TEST_P(GatedDelta, GatesOfChannelsAndSharedKeys) {
  check({.lengths = {66, 66}, .heads_of_keys = 2, .group = 3, .dim = 32, .values = 32, .channels = true, .initial = true});
  check({.lengths = {90}, .heads_of_keys = 2, .dim = 96, .values = 32, .channels = true, .key_norm = 9, .normalise = true});
}

TEST_P(GatedDelta, GatesOfChannelsOfPackedSequences) {
  check({.lengths = {0, 1, 63, 0, 64, 65, 100, 0}, .packed = true, .dim = 32, .values = 32, .channels = true, .initial = true});
  check({.lengths = {71, 29}, .packed = true, .dim = 80, .values = 70, .channels = true, .f32_beta = true});
}

TEST_P(GatedDelta, GatesOfChannelsOfAnyStrides) {
  const Placement with_gaps{.offset = 3, .gap = 5}, by_heads{.order = {0, 2, 1, 3}};
  check({.lengths = {70, 70},
         .heads_of_keys = 2,
         .dim = 24,
         .values = 24,
         .channels = true,
         .initial = true,
         .place = with_gaps,
         .token_place = {.gap = 1}});
  check({.lengths = {70}, .heads_of_keys = 2, .dim = 64, .values = 64, .channels = true, .place = by_heads, .token_place = by_heads});
}

TEST_P(GatedDelta, StepsWithGatesOfChannels) {
  check_steps({.lengths = {11, 11, 11}, .heads_of_keys = 2, .group = 2, .dim = 128, .values = 100, .channels = true});
  check_steps({.lengths = {7}, .dim = 40, .values = 33, .lowest_gate = -20, .channels = true, .f32_beta = true, .scale = 1.0f});
  check_steps({.lengths = {9, 9}, .dim = 96, .values = 48, .channels = true, .key_norm = 9, .normalise = true});
}

class GatedDeltaArguments : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override { skip_unless_present(GetParam()); }
  Tensor tensor(Shape shape, DType dtype = DType::bf16) { return Tensor::poisoned(std::move(shape), dtype, Stream::standard(GetParam())); }
};
INSTANTIATE_TEST_SUITE_P(Ops, GatedDeltaArguments, testing::ValuesIn(kDevices), device_name);

TEST_P(GatedDeltaArguments, AreRefusedByName) {
  const Tensor q = tensor({2, 5, 2, 8}), k = tensor({2, 5, 2, 8}), v = tensor({2, 5, 4, 16}), beta = tensor({2, 5, 4}),
               o = tensor({2, 5, 4, 16});
  const Tensor g = tensor({2, 5, 4}, DType::f32), state = tensor({2, 4, 8, 16}, DType::f32), other = tensor({2, 4, 16, 8}, DType::f32);
  const Tensor offsets = tensor({3}, DType::i32), one = tensor({1}, DType::i32), long_ones = tensor({2, 5, 2, 257}),
               wide = tensor({2, 5, 2, 129});
  const auto refused = [&](const Tensor& q_, const Tensor& k_, const Tensor& v_, const Tensor& beta_, const Tensor& o_,
                           std::initializer_list<std::string_view> parts, GatedDeltaOptions options = {}) {
    expect_error<InvalidArgument>([&] { tw::gated_delta_rule(q_, k_, v_, beta_, o_, options); }, parts);
  };
  refused(tensor({2, 5, 2, 8}, DType::i32), k, v, beta, o, {"gated_delta_rule: q is i32[2, 5, 2, 8]", "f32, f16 and bf16"});
  refused(tensor({5, 2, 8}), k, v, beta, o, {"q is bf16[5, 2, 8]", "[batch, seqlen, heads, dim]"});
  refused(long_ones, long_ones, v, beta, o, {"q is bf16[2, 5, 2, 257]", "1 to 256"});
  refused(q, v, v, beta, o, {"k is bf16[2, 5, 4, 16]", "q's shape"});
  refused(q, k, tensor({2, 6, 4, 16}), beta, o, {"v is bf16[2, 6, 4, 16]", "batch and seqlen"});
  refused(q, k, tensor({2, 5, 3, 16}), beta, o, {"v is bf16[2, 5, 3, 16]", "a multiple of those of q"});
  refused(q, k, tensor({2, 5, 4, 16}, DType::f16), beta, o, {"v is f16[2, 5, 4, 16]", "bf16"});
  refused(q, k, v, tensor({2, 5, 2}), o, {"beta is bf16[2, 5, 2]", "[2, 5, 4]"});
  refused(q, k, v, tensor({2, 5, 4}, DType::f16), o, {"beta is f16[2, 5, 4]", "bf16, or f32"});
  refused(q, k, v, beta, v, {"o is", "shares memory with v"});
  refused(q, k, v, beta, q, {"o is bf16[2, 5, 2, 8]", "v's shape"});
  refused(q, k, v, beta, o, {"g is bf16[2, 5, 4]", "f32"}, {.g = &beta});
  const Tensor of_channels = tensor({2, 5, 4, 129}, DType::f32);
  refused(wide, wide, v, beta, o, {"g is f32[2, 5, 4, 129]", "up to 128 dimensions"}, {.g = &of_channels});
  const Tensor of_values = tensor({2, 5, 4, 16}, DType::f32);
  refused(q, k, v, beta, o, {"g is f32[2, 5, 4, 16]", "[2, 5, 4] or [2, 5, 4, 8]"}, {.g = &of_values});
  refused(q, k, v, beta, o, {"initial_state is f32[2, 4, 16, 8]", "[2, 4, 8, 16]"}, {.initial_state = &other});
  refused(q, k, v, beta, o, {"final_state is f32[2, 4, 16, 8]", "[2, 4, 8, 16]"}, {.final_state = &other});
  refused(q, k, v, beta, o, {"q is bf16[2, 5, 2, 8]", "its batch must be 1"}, {.cu_seqlens = &offsets});
  refused(q, k, v, beta, o, {"cu_seqlens is i32[1]", "at least one sequence"}, {.cu_seqlens = &one});
  refused(q, k, v, beta, o, {"scale is inf", "finite"}, {.scale = kInf});
  expect_error<InvalidArgument>([&] { tw::gated_delta_rule_step(q, k, v, beta, other, o, {.g = &g}); },
                                {"gated_delta_rule_step: state is f32[2, 4, 16, 8]"});
}

/// A block of the generic target has 138 KB, which GPUs of compute capability 8.0 have.
TEST(GatedDeltaKernels, WideKeysCompileWithoutSpills) {
  skip_without_nvrtc();
  for (const bool generic : {false, true}) {
    std::vector<KernelSpec> specs;
    for (const bool pieces : {false, true}) {
      const char* const dtype = pieces ? "tw::bf16" : "tw::f16";
      const auto add = [&](std::string type, const char* source) {
        const KernelSpec spec = make_spec({std::move(type), source, nullptr}, pieces, pieces);
        specs.push_back(generic ? for_target(spec, GpuTarget::cuda) : spec);
      };
      add(tw::format("tw::kernels::gated_delta::WideWalk<{}, {}>", dtype, generic ? 1 : 2), kWideSource);
      add(tw::format("tw::kernels::gated_delta::Prepare<{}, float, 256>", dtype), kSource);
    }
    compile_and_check(specs, generic ? "sm_80" : "sm_90a", expect_fast);
  }
}

TEST(GatedDeltaKernels, StepsCompileWithoutSpills) {
  skip_without_nvrtc();
  std::vector<KernelSpec> specs;
  for (const char* const arguments :
       {"float, float, 128, true", "tw::bf16, tw::bf16, 128, true", "tw::f16, float, 64, false", "tw::bf16, float, 256, false",
        "float, float, 256, true", "float, float, 128, true, true", "tw::bf16, float, 128, false, true"})
    for (const bool pieces : {false, true})
      specs.push_back(make_spec({tw::format("tw::kernels::gated_delta::Step<{}>", arguments), kSource, nullptr}, pieces, pieces));
  for (const auto& [target, arch] : {std::pair{GpuTarget::automatic, "sm_90a"}, std::pair{GpuTarget::cuda, "sm_86"}}) {
    for (KernelSpec& spec : specs)
      if (target == GpuTarget::cuda) spec = for_target(spec, target);
    compile_and_check(specs, arch, expect_fast);
  }
}

}  // namespace
}  // namespace tw::kernels::gated_delta
