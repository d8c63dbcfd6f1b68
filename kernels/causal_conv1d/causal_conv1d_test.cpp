// causal_conv1d(), its update and its gradients against loops in double, on the CPU and, where there is one, on a GPU; their bad inputs.

#include "tilewave/causal_conv1d.hpp"
#include "tests/compiled_kernels.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <optional>
#include <random>
#include <span>
#include <tuple>
#include <vector>

#include "kernels/causal_conv1d/causal_conv1d.tile.hpp"
#include "kernels/causal_conv1d/reference.hpp"
#include "kernels/causal_conv1d/variants.hpp"
#include "runtime/format.hpp"
#include "tests/accuracy.hpp"
#include "tests/expect_error.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"

namespace tw::kernels::causal_conv1d {
namespace {

using namespace tw::test;

/// Sequences of these lengths; without `packed` all are equally long, and a batch.
struct Case {
  std::vector<std::int64_t> lengths = {7, 7};
  bool packed = false;
  std::int64_t channels = 70, width = 4;
  bool bias = true, silu = true, initial = false, final = false, f32_weight = false;
  Placement x_place = {}, y_place = {}, state_place = {};
};

class CausalConv1d : public testing::TestWithParam<std::tuple<Device, DType>> {
 protected:
  void SetUp() override { skip_unless_present(device); }

  /// A case's inputs, as tensors and as the reference takes them.
  struct Inputs {
    PlacedTensor x, weight, bias, initial;
    std::optional<Tensor> offsets;
    PlainCall plain;
  };
  Inputs inputs(const Case& c) {
    const auto n = static_cast<std::int64_t>(c.lengths.size()),
               tokens = std::accumulate(c.lengths.begin(), c.lengths.end(), std::int64_t{0});
    const DType w = c.f32_weight ? DType::f32 : dtype;
    Inputs in{{shape_of(c), dtype, device, c.x_place},
              {{c.channels, c.width}, w, device, {.offset = 1}},
              {{c.channels}, w, device, {.offset = 1, .step = 2}},
              {{n, c.channels, c.width - 1}, dtype, device, c.state_place},
              {},
              {.channels = c.channels, .taps = c.width, .silu = c.silu}};
    in.plain.x = in.x.fill_random(random);
    in.plain.weight = in.weight.fill_random(random);
    const std::vector<float> bias = in.bias.fill_random(random), initial = in.initial.fill_random(random);
    if (c.bias) in.plain.bias = bias;
    if (c.initial) in.plain.initial_state = initial;
    std::vector<std::int32_t> offsets{0};
    for (const std::int64_t length : c.lengths) offsets.push_back(offsets.back() + static_cast<std::int32_t>(length));
    in.plain.offsets.assign(offsets.begin(), offsets.end());
    if (c.packed) in.offsets = Tensor::from(std::span<const std::int32_t>(offsets), {n + 1}).to(device);
    EXPECT_EQ(in.plain.x.size(), static_cast<std::size_t>(tokens * c.channels));
    return in;
  }
  static Shape shape_of(const Case& c) {
    const auto n = static_cast<std::int64_t>(c.lengths.size());
    if (c.packed) return {1, std::accumulate(c.lengths.begin(), c.lengths.end(), std::int64_t{0}), c.channels};
    return {n, c.lengths.empty() ? 3 : c.lengths[0], c.channels};
  }
  static std::string text(const Case& c) {
    std::string lengths;
    for (const std::int64_t length : c.lengths) lengths += tw::format(" {}", length);
    return tw::format("lengths{} packed {} channels {} width {} bias {} silu {} initial {} final {}", lengths, c.packed, c.channels,
                      c.width, c.bias, c.silu, c.initial, c.final);
  }
  template <class T>
  std::vector<double> rounded(const std::vector<T>& values, DType to) {
    std::vector<double> all;
    for (const T v : values) all.push_back(round_to(to, static_cast<float>(v)));
    return all;
  }
  testing::AssertionResult is_accurate(const PlacedTensor& out, const std::vector<double>& exact, const std::vector<float>& naive,
                                       double factor = 2) {
    const DType type = out.tensor().dtype();
    return accurate({.out = out.values(),
                     .reference = exact,
                     .naive = rounded(naive, type),
                     .arithmetic = arithmetic_of(type, Device::cpu()),
                     .factor = factor});
  }

  void check(const Case& c) {
    SCOPED_TRACE(text(c));
    Inputs in = inputs(c);
    PlacedTensor y(shape_of(c), dtype, device, c.y_place), final_state(in.initial.tensor().shape(), dtype, device, c.state_place);
    tw::causal_conv1d(in.x, in.weight, y,
                      {.bias = c.bias ? &in.bias.tensor() : nullptr,
                       .initial_state = c.initial ? &in.initial.tensor() : nullptr,
                       .final_state = c.final ? &final_state.tensor() : nullptr,
                       .cu_seqlens = in.offsets ? &*in.offsets : nullptr,
                       .silu = c.silu});
    const auto exact = plain<double>(in.plain);
    EXPECT_TRUE(is_accurate(y, exact.y, plain<float>(in.plain).y));
    EXPECT_TRUE(y.gaps_intact());
    if (c.final)
      EXPECT_EQ(final_state.values(), exact.final_state);
    else
      EXPECT_TRUE(final_state.untouched());
    EXPECT_TRUE(final_state.gaps_intact());
  }

  void check_gradients(const Case& c) {
    SCOPED_TRACE(text(c));
    Inputs in = inputs(c);
    const Shape of_state = in.initial.tensor().shape();
    const DType w = in.weight.tensor().dtype();
    PlacedTensor dy(shape_of(c), dtype, device, c.y_place), dx(shape_of(c), dtype, device, c.x_place);
    PlacedTensor d_weight({c.channels, c.width}, w, device, {.gap = 1}), d_bias({c.channels}, w, device, {.step = 2});
    PlacedTensor d_initial(of_state, dtype, device, c.state_place), d_final(of_state, dtype, device, c.state_place);
    const std::vector<float> of_y = dy.fill_random(random), of_final = d_final.fill_random(random);
    tw::causal_conv1d_backward(dy, in.x, in.weight, dx,
                               {.bias = c.bias ? &in.bias.tensor() : nullptr,
                                .initial_state = c.initial ? &in.initial.tensor() : nullptr,
                                .cu_seqlens = in.offsets ? &*in.offsets : nullptr,
                                .silu = c.silu,
                                .d_final_state = c.final ? &d_final.tensor() : nullptr,
                                .d_weight = &d_weight.tensor(),
                                .d_bias = c.bias ? &d_bias.tensor() : nullptr,
                                .d_initial_state = c.initial ? &d_initial.tensor() : nullptr});
    const std::vector<float> none;
    const auto exact = plain_gradients<double>(in.plain, of_y, c.final ? of_final : none);
    const auto naive = plain_gradients<float>(in.plain, of_y, c.final ? of_final : none);
    EXPECT_TRUE(is_accurate(dx, exact.dx, naive.dx, 3));
    EXPECT_TRUE(is_accurate(d_weight, exact.d_weight, naive.d_weight, 3));
    if (c.bias)
      EXPECT_TRUE(is_accurate(d_bias, exact.d_bias, naive.d_bias, 3));
    else
      EXPECT_TRUE(d_bias.untouched());
    if (c.initial)
      EXPECT_TRUE(is_accurate(d_initial, exact.d_initial_state, naive.d_initial_state, 3));
    else
      EXPECT_TRUE(d_initial.untouched());
    for (const PlacedTensor* out : {&dx, &d_weight, &d_bias, &d_initial}) EXPECT_TRUE(out->gaps_intact());
  }
  void check_both(const Case& c) {
    check(c);
    check_gradients(c);
  }
  int pick(int n) { return std::uniform_int_distribution(0, n - 1)(random); }

  const Device device = std::get<0>(GetParam());
  const DType dtype = std::get<1>(GetParam());
  std::mt19937_64 random = random_engine();
};

INSTANTIATE_TEST_SUITE_P(Ops, CausalConv1d,
                         testing::Combine(testing::ValuesIn(kDevices), testing::Values(DType::f32, DType::f16, DType::bf16)),
                         [](const auto& instance) {
                           return tw::format("{}_{}", std::get<0>(instance.param).is_cuda() ? "cuda" : "cpu",
                                             name_of(std::get<1>(instance.param)));
                         });

TEST_P(CausalConv1d, AnyLengthAndWidth) {
  for (const std::int64_t width : {2, 3, 4}) {
    for (const std::int64_t length : {0, 1, 2, 3, 4, 5, 15, 16, 17, 64, 131})
      check_both({.lengths = {length, length}, .channels = 37, .width = width, .initial = pick(2) == 0, .final = pick(2) == 0});
  }
}

TEST_P(CausalConv1d, AnyNumberOfChannels) {
  for (const std::int64_t channels : {0, 1, 7, 8, 64, 511, 512, 513, 1024, 1032})
    check_both({.lengths = {5 + pick(20)}, .channels = channels, .initial = true, .final = true});
  check_both({.lengths = {}, .channels = 5});
}

TEST_P(CausalConv1d, Options) {
  for (const bool bias : {false, true})
    for (const bool silu : {false, true})
      for (const bool f32_weight : {false, true})
        check_both({.lengths = {19, 19},
                    .channels = 48,
                    .width = 2 + pick(3),
                    .bias = bias,
                    .silu = silu,
                    .initial = bias == silu,
                    .final = !f32_weight,
                    .f32_weight = f32_weight});
}

TEST_P(CausalConv1d, PackedSequences) {
  check_both({.lengths = {0, 1, 2, 3, 0, 40, 16, 129, 4, 0}, .packed = true, .channels = 33, .initial = true, .final = true});
  check_both({.lengths = {150}, .packed = true, .width = 3});
  check_both({.lengths = {0, 0}, .packed = true, .channels = 24, .initial = true, .final = true});
  for (int n = 0; n < random_cases(4); ++n) {
    std::vector<std::int64_t> lengths;
    for (int i = 1 + pick(5); i > 0; --i) lengths.push_back(pick(60));
    check_both(
        {.lengths = lengths, .packed = true, .channels = 8 * (1 + pick(9)), .width = 2 + pick(3), .initial = pick(2) == 0, .final = true});
  }
}

TEST_P(CausalConv1d, Strides) {
  const Placement channels_first{.order = {0, 2, 1}}, with_gaps{.offset = 3, .gap = 5};
  check_both({.lengths = {21, 21}, .initial = true, .final = true, .x_place = channels_first, .y_place = channels_first});
  check_both({.lengths = {21, 21},
              .channels = 64,
              .initial = true,
              .final = true,
              .x_place = {.offset = 8, .gap = 8, .align = 8},
              .y_place = with_gaps,
              .state_place = channels_first});
  check_both({.lengths = {9, 9},
              .channels = 64,
              .initial = true,
              .final = true,
              .x_place = with_gaps,
              .y_place = {.step = 2},
              .state_place = with_gaps});
}

/// Token after token, or a few at a time, gives what all of them at once do, to the bit.
TEST_P(CausalConv1d, UpdatesContinueASequence) {
  for (const std::int64_t width : {2, 3, 4}) {
    const Case c{.lengths = {11, 11, 11}, .channels = 77, .width = width, .initial = true};
    Inputs in = inputs(c);
    PlacedTensor y(shape_of(c), dtype, device), expected(shape_of(c), dtype, device),
        final_state(in.initial.tensor().shape(), dtype, device);
    tw::causal_conv1d(
        in.x, in.weight, expected,
        {.bias = &in.bias.tensor(), .initial_state = &in.initial.tensor(), .final_state = &final_state.tensor(), .silu = true});
    for (std::int64_t at = 0; at < 11;) {
      const std::int64_t end = std::min<std::int64_t>(at + 1 + pick(4), 11);
      tw::causal_conv1d_update(in.x.tensor().slice(1, at, end), in.initial, in.weight, y.tensor().slice(1, at, end),
                               {.bias = &in.bias.tensor(), .silu = true});
      at = end;
    }
    EXPECT_EQ(y.values(), expected.values());
    EXPECT_EQ(in.initial.values(), final_state.values());
  }
}

class CausalConv1dArguments : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override { skip_unless_present(GetParam()); }
  Tensor tensor(Shape shape, DType dtype = DType::bf16) { return Tensor::poisoned(std::move(shape), dtype, Stream::standard(GetParam())); }
};
INSTANTIATE_TEST_SUITE_P(Ops, CausalConv1dArguments, testing::ValuesIn(kDevices), device_name);

TEST_P(CausalConv1dArguments, AreRefusedByName) {
  const Tensor x = tensor({2, 5, 8}), y = tensor({2, 5, 8}), weight = tensor({8, 4}), state = tensor({2, 8, 3}), row = tensor({8});
  const Tensor f32_row = tensor({8}, DType::f32), other = tensor({2, 8, 5}), offsets = tensor({3}, DType::i32),
               one = tensor({1}, DType::i32);
  const auto refused = [&](const Tensor& in, const Tensor& w, const Tensor& out, std::initializer_list<std::string_view> parts,
                           CausalConv1dOptions options = {}) {
    expect_error<InvalidArgument>([&] { tw::causal_conv1d(in, w, out, options); }, parts);
  };
  refused(tensor({2, 5, 8}, DType::i32), weight, y, {"causal_conv1d: x is i32[2, 5, 8]", "f32, f16 and bf16"});
  refused(tensor({5, 8}), weight, tensor({5, 8}), {"x is bf16[5, 8]", "[batch, seqlen, channels]"});
  refused(x, weight, other, {"y is bf16[2, 8, 5]", "x's shape"});
  refused(x, weight, x, {"y is", "shares memory with x"});
  refused(x, tensor({8, 4}, DType::f16), y, {"weight is f16[8, 4]", "x's dtype, bf16, or f32"});
  for (const Shape& shape : {Shape{8, 1}, Shape{8, 5}, Shape{7, 4}, Shape{8}})
    refused(x, tensor(shape), y, {"weight is", "[8, width]", "2 to 4"});
  refused(x, weight, y, {"bias is f32[8]", "bf16"}, {.bias = &f32_row});
  refused(x, weight, y, {"bias is bf16[8, 4]", "[8]"}, {.bias = &weight});
  refused(x, weight, y, {"initial_state is bf16[2, 8, 5]", "[2, 8, 3]"}, {.initial_state = &other});
  refused(x, weight, y, {"final_state is bf16[2, 8, 5]", "[2, 8, 3]"}, {.final_state = &other});
  refused(x, weight, y, {"final_state is", "shares memory with initial_state"}, {.initial_state = &state, .final_state = &state});
  refused(x, weight, y, {"x is bf16[2, 5, 8]", "its batch must be 1"}, {.cu_seqlens = &offsets});
  refused(x, weight, y, {"cu_seqlens is i32[1]", "at least one sequence"}, {.cu_seqlens = &one});
  refused(x, weight, y, {"cu_seqlens is bf16[8]", "i32"}, {.cu_seqlens = &row});

  const auto refused_update = [&](const Tensor& in, const Tensor& s, std::initializer_list<std::string_view> parts) {
    expect_error<InvalidArgument>([&] { tw::causal_conv1d_update(in, s, weight, tensor(in.shape())); }, parts);
  };
  refused_update(tensor({2, 17, 8}), state, {"causal_conv1d_update: x is bf16[2, 17, 8]", "1 to 16 tokens"});
  refused_update(tensor({2, 0, 8}), state, {"1 to 16 tokens"});
  refused_update(tensor({3, 1, 8}), state, {"bf16[2, 8, 3]", "[3, 8, 3]"});

  const auto refused_backward = [&](const Tensor& dy, std::initializer_list<std::string_view> parts,
                                    CausalConv1dBackwardOptions options = {}) {
    expect_error<InvalidArgument>([&] { tw::causal_conv1d_backward(dy, x, weight, y, options); }, parts);
  };
  const Tensor dy = tensor({2, 5, 8});
  refused_backward(other, {"causal_conv1d_backward: dy is bf16[2, 8, 5]", "x's shape"});
  refused_backward(y, {"dx is", "shares memory with dy"});
  refused_backward(dy, {"d_weight is bf16[8]", "weight's shape"}, {.d_weight = &row});
  refused_backward(dy, {"d_weight is", "shares memory with weight"}, {.d_weight = &weight});
  refused_backward(dy, {"d_bias is f32[8]"}, {.d_bias = &f32_row});
  refused_backward(dy, {"d_initial_state is bf16[2, 8, 5]"}, {.d_initial_state = &other});
  refused_backward(dy, {"d_final_state is bf16[2, 8, 5]"}, {.d_final_state = &other});
}

TEST(CausalConv1dKernels, CompileWithoutSpills) {
  skip_without_nvrtc();
  compile_and_check(all_specs(), "sm_90a", expect_fast);
}

}  // namespace
}  // namespace tw::kernels::causal_conv1d
