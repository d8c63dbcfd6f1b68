// mla_sparse_backward() against loops in double, in both of its forms, on the CPU and, where there is one, on a GPU; and what it refuses.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/mla/listed_gradients.tile.hpp"
#include "kernels/mla/sparse_backward.hpp"
#include "kernels/nsa/reference.hpp"
#include "runtime/format.hpp"
#include "runtime/stream.hpp"
#include "tests/accuracy.hpp"
#include "tests/bad_input.hpp"
#include "tests/compiled_kernels.hpp"
#include "tests/expect_error.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"
#include "tilewave/gemm_with.hpp"
#include "tilewave/launch.hpp"
#include "tilewave/mla.hpp"

namespace tw::kernels::mla {
namespace {

using namespace tw::test;

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

struct Case {
  std::int64_t tokens = 5, heads = 16, topk = 20, kv_tokens = 30;
  double holes = 0.2;    ///< share of entries that name no row
  bool lengths = false;  ///< topk_length is given
  bool f32 = false;      ///< dkv is of f32
  bool deterministic = false;
  float scale = 0;
  bool strided = false;                   ///< tensors that are not aligned and have gaps
  std::optional<GradientForm> form = {};  ///< instead of the one that mla_sparse_backward() chooses; dkv is then of f32

  std::string describe() const {
    return tw::format("tokens {} heads {} topk {} of {} holes {} lengths {} f32 {} deterministic {} scale {} strided {} form {}", tokens,
                      heads, topk, kv_tokens, holes, lengths, f32, deterministic, scale, strided, form ? static_cast<int>(*form) : -1);
  }
};

class MlaSparseBackward : public testing::TestWithParam<std::tuple<Device, DType>> {
 protected:
  void SetUp() override { skip_unless_present(device); }
  void check(Case c);
  void check_form(const Case& c);

  const Device device = std::get<0>(GetParam());
  const DType dtype = std::get<1>(GetParam());
  std::mt19937_64 random = random_engine();
};

void MlaSparseBackward::check(Case c) {
  check_form(c);
  const bool together = gradient_form(Stream::standard(device), c.deterministic) == GradientForm::together;
  if (c.deterministic || (device.is_cuda() && !together)) return;  // there is no other form
  c.form = together ? GradientForm::in_parts : GradientForm::together;
  c.f32 = true;
  check_form(c);
}

void MlaSparseBackward::check_form(const Case& c) {
  SCOPED_TRACE(c.describe());
  const auto pick = [&](std::int64_t below) { return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(below)); };
  const Placement gaps = c.strided ? Placement{.offset = 3, .gap = 5} : Placement{};
  const Placement by_head = c.strided ? Placement{.order = {1, 0, 2}, .offset = 3, .gap = 5} : Placement{};
  const Shape of_q{c.tokens, c.heads, kMlaKeyDim}, of_o{c.tokens, c.heads, kMlaLatentDim};
  PlacedTensor q(of_q, dtype, device, by_head), kv({c.kv_tokens, kMlaKeyDim}, dtype, device, gaps), o(of_o, dtype, device, by_head),
      d_o(of_o, dtype, device, by_head), dq(of_q, dtype, device, by_head), lse({c.tokens, c.heads}, DType::f32, device),
      dkv({c.kv_tokens, kMlaKeyDim}, c.f32 ? DType::f32 : dtype, device), lists({c.tokens, c.topk}, DType::i32, device, gaps),
      topk_length({c.tokens}, DType::i32, device);
  const std::vector<float> q_values = q.fill_random(random), d_o_values = d_o.fill_random(random);
  std::vector<float> kv_values = kv.fill_random(random);
  // An odd row is named only by entries that do not count.
  nsa::PlainCall plain{.tokens = c.tokens,
                       .kv_heads = 1,
                       .group = c.heads,
                       .head_dim = kMlaKeyDim,
                       .value_dim = kMlaLatentDim,
                       .keys = c.kv_tokens,
                       .scale = c.scale > 0 ? c.scale : 1 / 24.0};
  const std::int64_t missing[] = {-1, c.kv_tokens, -(std::int64_t{1} << 31), std::int64_t{1} << 30};
  std::vector<float> indices, lengths;
  std::vector<bool> named(at(c.kv_tokens));
  for (std::int64_t token = 0; token < c.tokens; ++token) {
    const std::int64_t length = c.lengths ? pick(c.topk + 3) - 1 : c.topk;
    lengths.push_back(static_cast<float>(length));
    auto& seen = plain.seen.emplace_back();
    for (std::int64_t n = 0; n < c.topk; ++n) {
      const bool hole = std::uniform_real_distribution<double>()(random) < c.holes;
      const std::int64_t row = pick((c.kv_tokens + 1) / 2) * 2;
      indices.push_back(static_cast<float>(hole ? missing[pick(4)] : n < length ? row : std::min(row + 1, c.kv_tokens - 1)));
      if (hole || n >= length) continue;
      seen.push_back(row);
      named[at(row)] = true;
    }
  }
  for (std::int64_t row = 0; row < c.kv_tokens; ++row)
    if (!named[at(row)]) std::fill_n(kv_values.begin() + row * kMlaKeyDim, kMlaKeyDim, kNaN);
  kv.fill(kv_values);
  lists.fill(indices);
  topk_length.fill(lengths);
  const Tensor* const given = c.lengths ? &topk_length.tensor() : nullptr;
  const auto backward = [&](const Tensor& to_q, const Tensor& to_kv) {
    const MlaSparseBackwardOptions options{.topk_length = given, .scale = c.scale, .deterministic = c.deterministic};
    if (!c.form) return mla_sparse_backward(q, kv, lists, o, lse, d_o, to_q, to_kv, options);
    fill_bytes(to_kv.data(), static_cast<std::size_t>(to_kv.numel()) * sizeof(float), 0, Stream::standard(device));
    run_sparse_backward(*c.form, q, kv, lists, o, lse, d_o, to_q, to_kv, options);
  };
  const auto run = [&] {
    mla_sparse(q, kv, lists, o, {.topk_length = given, .scale = c.scale, .lse = &lse.tensor()});
    backward(dq, dkv);
  };
  if (!launched(run)) return;

  std::vector<float> v_values;
  for (float& x : kv_values) x = std::isnan(x) ? 0.0f : x;
  for (std::int64_t row = 0; row < c.kv_tokens; ++row)
    v_values.insert(v_values.end(), kv_values.begin() + row * kMlaKeyDim, kv_values.begin() + row * kMlaKeyDim + kMlaLatentDim);
  plain.q = q_values, plain.k = kv_values, plain.v = v_values;
  const std::vector<double> of_op = o.values();
  auto expected = nsa::evaluate_gradients<double>(plain, d_o_values, nsa::reference(plain).o, [](double x) { return x; });
  auto naive = nsa::evaluate_gradients<float>(plain, d_o_values, of_op, nsa::rounding_to(dtype));
  for (auto* const gradients : {&expected, &naive})
    for (std::size_t n = 0; n < gradients->dv.size(); ++n)
      gradients->dk[n / kMlaLatentDim * kMlaKeyDim + n % kMlaLatentDim] += gradients->dv[n];
  const auto expect_accurate = [&](const char* name, const PlacedTensor& got, const std::vector<double>& reference,
                                   const std::vector<double>& unfused, const std::vector<double>& cancelled) {
    EXPECT_TRUE(accurate({.out = got.values(),
                          .reference = reference,
                          .naive = unfused,
                          .arithmetic = arithmetic_of(dtype, device),
                          .factor = 3,
                          .cancelled = cancelled,
                          .cancelled_products = kMlaLatentDim}))
        << name;
    EXPECT_TRUE(got.gaps_intact()) << name;
  };
  expect_accurate("dq", dq, expected.dq, naive.dq, expected.dq_size);
  expect_accurate("dkv", dkv, expected.dk, naive.dk, expected.dk_size);
  const std::vector<double> sums = dkv.values();
  for (std::int64_t row = 0; row < c.kv_tokens; ++row) {
    for (std::int64_t col = 0; col < kMlaKeyDim && !named[at(row)]; ++col) ASSERT_EQ(sums[at(row * kMlaKeyDim + col)], 0) << row;
  }
  if (!c.deterministic) return;
  for (int n = 0; n < 3; ++n) {
    PlacedTensor dq_again(of_q, dtype, device), dkv_again(dkv.tensor().shape(), dkv.tensor().dtype(), device);
    backward(dq_again, dkv_again);
    EXPECT_EQ(dq_again.values(), dq.values());
    EXPECT_EQ(dkv_again.values(), sums);
  }
}

std::string case_name(const testing::TestParamInfo<std::tuple<Device, DType>>& info) {
  const auto& [device, dtype] = info.param;
  return tw::format("{}_{}", device.is_cuda() ? "cuda" : "cpu", name_of(dtype));
}

INSTANTIATE_TEST_SUITE_P(Ops, MlaSparseBackward, testing::Combine(testing::ValuesIn(kDevices), testing::Values(DType::bf16, DType::f16)),
                         case_name);

TEST_P(MlaSparseBackward, Sizes) {
  for (const std::int64_t heads : {1, 3, 16, 64, 130}) check({.tokens = 3, .heads = heads});
  for (const std::int64_t topk : {1, 7, 8, 65, 130}) check({.tokens = 2, .topk = topk, .kv_tokens = 200});
  check({.tokens = 40, .heads = 8, .topk = 33, .kv_tokens = 50, .f32 = true});
}

TEST_P(MlaSparseBackward, Lists) {
  check({.topk = 12, .holes = 1});
  check({.holes = 0.9, .f32 = true});
  check({.tokens = 9, .lengths = true});
  check({.tokens = 9, .topk = 40, .kv_tokens = 3, .holes = 0, .lengths = true});  // each row is named many times
}

TEST_P(MlaSparseBackward, TheSameBits) {
  check({.tokens = 30, .topk = 50, .kv_tokens = 9, .holes = 0.1, .f32 = true, .deterministic = true});
  check({.tokens = 30, .topk = 50, .kv_tokens = 90, .lengths = true, .deterministic = true});
}

TEST_P(MlaSparseBackward, ScalesAndStrides) {
  check({.scale = 0.2f});
  check({.lengths = true, .strided = true});
}

TEST_P(MlaSparseBackward, OfNothing) {
  const auto empty = [&](Shape shape, DType type) { return PlacedTensor(std::move(shape), type, device); };
  PlacedTensor dq = empty({3, 4, 576}, dtype), dkv({5, 576}, dtype, device);
  PlacedTensor q = empty({3, 4, 576}, dtype), kv = empty({5, 576}, dtype), o = empty({3, 4, 512}, dtype), d_o = empty({3, 4, 512}, dtype),
               lse = empty({3, 4}, DType::f32), lists = empty({3, 0}, DType::i32);
  for (PlacedTensor* t : {&q, &kv, &d_o}) t->fill_random(random);
  const auto run = [&] {
    mla_sparse(q, kv, lists, o, {.lse = &lse.tensor()});
    mla_sparse_backward(q, kv, lists, o, lse, d_o, dq, dkv);
  };
  if (!launched(run)) return;
  for (const double x : dq.values()) ASSERT_EQ(x, 0);
  for (const double x : dkv.values()) ASSERT_EQ(x, 0);
  PlacedTensor none = empty({0, 4, 576}, dtype), no_o = empty({0, 4, 512}, dtype), all(dkv.tensor().shape(), dtype, device);
  mla_sparse_backward(none, kv, empty({0, 2}, DType::i32), no_o, empty({0, 4}, DType::f32), no_o, none, all);
  for (const double x : all.values()) ASSERT_EQ(x, 0);
}

class MlaSparseBackwardBadInput : public BadInput {};

INSTANTIATE_TEST_SUITE_P(Ops, MlaSparseBackwardBadInput, testing::ValuesIn(kDevices), device_name);

TEST_P(MlaSparseBackwardBadInput, IsRefused) {
  const PlacedTensor q = make({2, 4, 576}), kv = make({7, 576}), o = make({2, 4, 512}), lse = make({2, 4}, DType::f32),
                     d_o = make({2, 4, 512}), dq = make({2, 4, 576}), dkv = make({7, 576}), lists = make({2, 3}, DType::i32);
  const auto refused = [&](const Tensor& a, const Tensor& b, const Tensor& i, const Tensor& r, const Tensor& l, const Tensor& g,
                           const Tensor& to_a, const Tensor& to_b, std::initializer_list<std::string_view> parts,
                           const MlaSparseBackwardOptions& options = {}) {
    expect_error<InvalidArgument>([&] { mla_sparse_backward(a, b, i, r, l, g, to_a, to_b, options); }, parts);
    EXPECT_TRUE(dq.untouched() && dkv.untouched());
  };
  refused(make({2, 4, 512}), kv, lists, o, lse, d_o, dq, dkv, {"mla_sparse_backward", "q is bf16[2, 4, 512]", "576"});
  refused(make({2, 4, 576}, DType::f32), kv, lists, o, lse, d_o, dq, dkv, {"q is f32[2, 4, 576]", "bf16 and f16"});
  refused(q, make({7, 1, 576}), lists, o, lse, d_o, dq, dkv, {"kv is bf16[7, 1, 576]", "[kv_tokens, 576]"});
  refused(q, make({7, 576}, DType::f16), lists, o, lse, d_o, dq, dkv, {"kv is f16[7, 576]", "bf16"});
  refused(q, kv, make({3, 3}, DType::i32), o, lse, d_o, dq, dkv, {"indices is i32[3, 3]", "i32[2, topk]"});
  refused(q, kv, make({2, 3}, DType::i64), o, lse, d_o, dq, dkv, {"indices is i64[2, 3]", "i32"});
  refused(q, kv, lists, make({2, 4, 576}), lse, d_o, dq, dkv, {"o is bf16[2, 4, 576]", "bf16[2, 4, 512]"});
  refused(q, kv, lists, o, make({4, 2}, DType::f32), d_o, dq, dkv, {"lse is f32[4, 2]", "f32[2, 4]"});
  refused(q, kv, lists, o, lse, make({2, 3, 512}), dq, dkv, {"d_o is bf16[2, 3, 512]", "bf16[2, 4, 512]"});
  refused(q, kv, lists, o, lse, d_o, make({2, 4, 512}), dkv, {"dq is bf16[2, 4, 512]", "bf16[2, 4, 576]"});
  refused(q, kv, lists, o, lse, d_o, dq, make({6, 576}), {"dkv is bf16[6, 576]", "7, 576"});
  refused(q, kv, lists, o, lse, d_o, dq, make({7, 576}, DType::f16), {"dkv is f16[7, 576]", "f32 and bf16"});
  refused(q, kv, lists, o, lse, d_o, dq, dkv, {"scale is -1"}, {.scale = -1});
  const PlacedTensor lengths = make({3}, DType::i32);
  refused(q, kv, lists, o, lse, d_o, dq, dkv, {"topk_length is i32[3]", "i32[2]"}, {.topk_length = &lengths.tensor()});
  refused(dq, kv, lists, o, lse, d_o, dq, dkv, {"dq", "q"});
  refused(q, dkv, lists, o, lse, d_o, dq, dkv, {"dkv", "kv"});
}

TEST(MlaSparseBackwardKernels, CompileWithoutSpills) {
  skip_without_nvrtc();
  std::vector<KernelInfo> kernels = {kernel_info<CopyListed<bf16>>, kernel_info<StackRows<bf16>>, kernel_info<AddListed<bf16>>,
                                     kernel_info<ListedGradients<bf16, 64>>, kernel_info<ListedGradients<f16, 64>>};
  for (const KernelInfo& info : gemm_with_kernels<ListedWeights<bf16>, bf16>()) kernels.push_back(info);
  for (const KernelInfo& info : gemm_with_kernels<ListedScoreGradients<bf16>, bf16>()) kernels.push_back(info);
  std::vector<KernelSpec> specs;
  for (const KernelInfo& info : kernels) specs.push_back(make_spec(info, true, true));
  compile_and_check(specs, "sm_90a", expect_fast);
}

}  // namespace
}  // namespace tw::kernels::mla
