// cast_fp8_heads() and head_scales() against their formulas and against hadamard(), bit for bit, on the CPU and, where there is one, on a
// GPU; their bad inputs.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/cast_fp8/variants.hpp"
#include "runtime/format.hpp"
#include "tests/accuracy.hpp"
#include "tests/compiled_kernels.hpp"
#include "tests/expect_error.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"
#include "tilewave/cast_fp8.hpp"
#include "tilewave/hadamard.hpp"

namespace tw::kernels::cast_fp8 {
namespace {

using namespace tw::test;

/// [batch, seqlen, heads, dim], and how many heads have scales of their own.
struct Case {
  std::int64_t batch, seqlen, heads, dim, scales;
  Placement place = {};
  std::int64_t row(std::int64_t b, std::int64_t s, std::int64_t h) const { return ((b * seqlen + s) * heads + h) * dim; }
};

class CastFp8Heads : public testing::TestWithParam<std::tuple<Device, DType>> {
 protected:
  void SetUp() override { skip_unless_present(device); }

  /// Some elements are far larger than the others, as in the activations that a rotation is for.
  std::vector<float> numbers(std::int64_t count) {
    std::vector<float> x(static_cast<std::size_t>(count));
    std::normal_distribution<float> normal;
    for (float& value : x) value = round_to(dtype, normal(random) * (random() % 100 == 0 ? 30.0f : 1.0f));
    return x;
  }
  std::vector<float> random_signs(std::int64_t count) {
    std::vector<float> signs(static_cast<std::size_t>(count));
    for (float& sign : signs) sign = random() % 2 == 0 ? 1.0f : -1.0f;
    return signs;
  }
  static std::vector<float> values(const Tensor& t) {
    const Tensor host = t.to(Device::cpu()).to(DType::f32);
    return {host.data<float>(), host.data<float>() + host.numel()};
  }
  static float scale_of(float amax) { return std::isfinite(amax) ? std::max(amax, 1e-4f) / 448 : kNaN; }
  static void expect_same(const std::vector<float>& out, const std::vector<float>& expected, const char* what) {
    ASSERT_EQ(out.size(), expected.size());
    for (std::size_t i = 0; i < out.size(); ++i) {
      if (std::isnan(expected[i]))
        ASSERT_TRUE(std::isnan(out[i])) << what << " " << i << " is " << out[i];
      else
        ASSERT_EQ(out[i], expected[i]) << what << " " << i;
    }
  }

  /// The scales and the cast of `x_values` are those of `rotated`, f32 and of the same shape.
  void expect_cast(const Case& c, const PlacedTensor& x, const std::vector<float>& rotated, const CastFp8HeadsOptions& options) {
    std::vector<float> scales;
    for (std::int64_t b = 0; b < c.batch; ++b) {
      for (std::int64_t g = 0; g < c.scales; ++g) {
        float amax = 0;
        for (std::int64_t s = 0; s < c.seqlen; ++s)
          for (std::int64_t h = g * (c.heads / c.scales); h < (g + 1) * (c.heads / c.scales); ++h)
            for (std::int64_t d = 0; d < c.dim; ++d) {
              const float size = std::abs(rotated[static_cast<std::size_t>(c.row(b, s, h) + d)]);
              amax = std::isnan(size) || std::isnan(amax) ? kNaN : std::max(amax, size);
            }
        scales.push_back(scale_of(amax));
      }
    }
    const PlacedTensor out_scales({c.batch, c.scales}, DType::f32, device, {.offset = 1, .gap = 2});
    head_scales(x, out_scales, options);
    const std::vector<double> got = out_scales.values();
    expect_same({got.begin(), got.end()}, scales, "scale");
    EXPECT_TRUE(out_scales.gaps_intact());

    // Larger ones than needed, and a smaller one, which saturates.
    for (const float factor : {1.0f, 1.7f, 0.3f}) {
      std::vector<float> given = scales, expected(rotated.size());
      for (float& scale : given) scale *= factor;
      PlacedTensor in_scales({c.batch, c.scales}, DType::f32, device, {.offset = 3});
      in_scales.fill(given);
      for (std::int64_t b = 0; b < c.batch; ++b)
        for (std::int64_t s = 0; s < c.seqlen; ++s)
          for (std::int64_t h = 0; h < c.heads; ++h)
            for (std::int64_t d = 0; d < c.dim; ++d) {
              const auto i = static_cast<std::size_t>(c.row(b, s, h) + d);
              expected[i] =
                  static_cast<float>(fp8_e4m3(rotated[i] / given[static_cast<std::size_t>(b * c.scales + h / (c.heads / c.scales))]));
            }
      const PlacedTensor y({c.batch, c.seqlen, c.heads, c.dim}, DType::fp8_e4m3, device, c.place);
      cast_fp8_heads(x, y, in_scales, options);
      const std::vector<double> bytes = y.values();
      expect_same({bytes.begin(), bytes.end()}, expected, "element");
      EXPECT_TRUE(y.gaps_intact());
    }
  }
  void check(const Case& c, bool rotate, bool with_signs, const std::vector<float>& x_values) {
    SCOPED_TRACE(
        tw::format("[{}, {}, {}, {}] of {} scales, rotate {} signs {}", c.batch, c.seqlen, c.heads, c.dim, c.scales, rotate, with_signs));
    const Shape shape = {c.batch, c.seqlen, c.heads, c.dim};
    PlacedTensor x(shape, dtype, device, c.place);
    x.fill(x_values);
    std::vector<float> rotated = x_values;
    PlacedTensor signs({c.dim}, DType::f32, device, {.offset = 1});
    signs.fill(random_signs(c.dim));
    if (rotate) {
      const Tensor in_f32 = Tensor::poisoned(shape, DType::f32, Stream::standard(device));
      hadamard(x, in_f32, {.scale = 1 / std::sqrt(static_cast<float>(c.dim)), .factors = with_signs ? &signs.tensor() : nullptr});
      rotated = values(in_f32);
    }
    expect_cast(c, x, rotated, {.rotate = rotate, .signs = with_signs ? &signs.tensor() : nullptr});
  }
  void check(const Case& c, bool rotate, bool with_signs = false) {
    check(c, rotate, with_signs, numbers(c.batch * c.seqlen * c.heads * c.dim));
  }

  const Device device = std::get<0>(GetParam());
  const DType dtype = std::get<1>(GetParam());
  std::mt19937_64 random = random_engine();
};

INSTANTIATE_TEST_SUITE_P(Ops, CastFp8Heads,
                         testing::Combine(testing::ValuesIn(kDevices), testing::Values(DType::f32, DType::f16, DType::bf16)),
                         [](const auto& instance) {
                           return tw::format("{}_{}", std::get<0>(instance.param).is_cuda() ? "cuda" : "cpu",
                                             name_of(std::get<1>(instance.param)));
                         });

TEST_P(CastFp8Heads, AnyShape) {
  for (const std::int64_t dim : {1, 8, 16, 63, 64, 80, 96, 128, 192, 256, 300, 2048}) check({2, 37, 4, dim, 2}, false);
  for (const std::int64_t seqlen : {0, 1, 31, 32, 33, 255, 256, 257, 700}) check({1, seqlen, 3, 64, 3}, false);
  check({3, 20, 6, 128, 1}, false);
  check({0, 20, 6, 128, 1}, false);
}

TEST_P(CastFp8Heads, Rotated) {
  for (std::int64_t dim = 2; dim <= 2048; dim *= 2) {
    for (const bool signs : {false, true}) check({2, dim > 512 ? 9 : 45, 4, dim, 2}, true, signs);
  }
  for (const std::int64_t seqlen : {1, 129, 600}) check({1, seqlen, 2, 128, 1}, true, true);
}

TEST_P(CastFp8Heads, AnyStrides) {
  for (const Placement& place : {Placement{.order = {0, 2, 1, 3}}, Placement{.offset = 3, .gap = 5},
                                 Placement{.offset = 16, .gap = 16, .align = 16}, Placement{.step = 2}}) {
    for (const bool rotate : {false, true}) check({2, 21, 4, 64, 2, place}, rotate, rotate);
  }
}

TEST_P(CastFp8Heads, ZerosAndBadNumbers) {
  const Case c{2, 40, 4, 64, 2};
  const auto count = static_cast<std::size_t>(c.batch * c.seqlen * c.heads * c.dim);
  check(c, false, false, std::vector<float>(count, 0.0f));
  check(c, true, true, std::vector<float>(count, 0.0f));
  for (const float bad : {kNaN, kInf, -kInf}) {
    std::vector<float> x = numbers(static_cast<std::int64_t>(count));
    x[static_cast<std::size_t>(c.row(1, 17, 2) + 5)] = bad;  // its sequence's second scale becomes NaN, and no other
    check(c, false, false, x);
  }
}

/// Attention needs only the products of rows, which a rotation leaves as they are.
TEST_P(CastFp8Heads, RotationsKeepProducts) {
  const Case c{1, 64, 1, 128, 1};
  const std::int64_t count = c.seqlen * c.dim;
  const Shape shape = {1, c.seqlen, 1, c.dim};
  PlacedTensor q(shape, dtype, device), k(shape, dtype, device), signs({c.dim}, DType::f32, device);
  const std::vector<float> of_q = numbers(count), of_k = numbers(count);
  q.fill(of_q), k.fill(of_k);
  signs.fill(random_signs(c.dim));
  const auto cast = [&](const PlacedTensor& x, bool rotate) {
    const Tensor y = Tensor::poisoned(shape, DType::fp8_e4m3, Stream::standard(device)),
                 scales = Tensor::poisoned({1, 1}, DType::f32, Stream::standard(device));
    const CastFp8HeadsOptions options{.rotate = rotate, .signs = rotate ? &signs.tensor() : nullptr};
    head_scales(x, scales, options);
    cast_fp8_heads(x, y, scales, options);
    std::vector<float> result = values(y);
    for (float& value : result) value *= values(scales)[0];
    return result;
  };
  const auto product = [&](const std::vector<float>& a, const std::vector<float>& b, std::int64_t i, std::int64_t j) {
    double sum = 0;
    for (std::int64_t d = 0; d < c.dim; ++d)
      sum += static_cast<double>(a[static_cast<std::size_t>(i * c.dim + d)]) * b[static_cast<std::size_t>(j * c.dim + d)];
    return sum;
  };
  for (const bool rotate : {false, true}) {
    const std::vector<float> cast_q = cast(q, rotate), cast_k = cast(k, rotate);
    double error = 0, size = 0;
    for (std::int64_t i = 0; i < c.seqlen; ++i)
      for (std::int64_t j = 0; j < c.seqlen; ++j) {
        const double exact = product(of_q, of_k, i, j);
        error += std::pow(product(cast_q, cast_k, i, j) - exact, 2);
        size += exact * exact;
      }
    // Both operands are rounded by up to 2^-4 of themselves, 0.026 on average.
    EXPECT_LT(std::sqrt(error / size), 0.06) << "rotate " << rotate;
  }
}

class CastFp8HeadsArguments : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override { skip_unless_present(GetParam()); }
  Tensor tensor(Shape shape, DType dtype = DType::bf16) { return Tensor::poisoned(std::move(shape), dtype, Stream::standard(GetParam())); }
};
INSTANTIATE_TEST_SUITE_P(Ops, CastFp8HeadsArguments, testing::ValuesIn(kDevices), device_name);

TEST_P(CastFp8HeadsArguments, AreRefusedByName) {
  const DType f8 = DType::fp8_e4m3, f32 = DType::f32;
  const Tensor x = tensor({2, 5, 4, 64}), y = tensor({2, 5, 4, 64}, f8), scales = tensor({2, 2}, f32), signs = tensor({64}, f32);
  const auto refused = [&](const Tensor& from, const Tensor& to, const Tensor& s, std::initializer_list<std::string_view> parts,
                           const CastFp8HeadsOptions& options = {}) {
    expect_error<InvalidArgument>([&] { cast_fp8_heads(from, to, s, options); }, parts);
  };
  refused(tensor({2, 5, 4, 64}, DType::i8), y, scales, {"cast_fp8_heads: x is i8[2, 5, 4, 64]"});
  refused(tensor({5, 4, 64}), y, scales, {"x is bf16[5, 4, 64]", "[batch, seqlen, heads, head_dim]"});
  refused(tensor({2, 5, 4, 2049}), tensor({2, 5, 4, 2049}, f8), scales, {"x is bf16[2, 5, 4, 2049]", "1 to 2048"});
  refused(x, tensor({2, 5, 4, 64}), scales, {"y is bf16[2, 5, 4, 64]", "must be fp8_e4m3"});
  refused(x, tensor({2, 5, 4, 32}, f8), scales, {"y is fp8_e4m3[2, 5, 4, 32]", "x's shape"});
  refused(x, y, tensor({2, 2}), {"scales is bf16[2, 2]", "f32"});
  refused(x, y, tensor({1, 2}, f32), {"scales is f32[1, 2]", "f32[2, kv_heads]"});
  refused(x, y, tensor({2, 3}, f32), {"x has 4 heads and scales 3", "multiple"});
  refused(x, y, tensor({2, 0}, f32), {"x has 4 heads and scales 0", "multiple"});
  refused(x, Tensor::borrow(x.data(), x.shape(), f8, x.device()), scales, {"y is", "shares memory with x"});
  refused(x, y, scales, {"signs is given, but rotate is false"}, {.signs = &signs});
  const Tensor few = tensor({32}, f32), odd = tensor({2, 5, 4, 96}), odd_y = tensor({2, 5, 4, 96}, f8);
  refused(x, y, scales, {"signs is f32[32]", "f32[64]"}, {.rotate = true, .signs = &few});
  refused(odd, odd_y, scales, {"x is bf16[2, 5, 4, 96]", "power of two from 2 to 2048"}, {.rotate = true});
  expect_error<InvalidArgument>(
      [&] {
        head_scales(x, Tensor::borrow(scales.data(), {2, 2}, f32, x.device(), {0, 1}));
      },
      {"head_scales: scales", "stride 0"});
  expect_error<InvalidArgument>([&] { head_scales(odd, scales, {.rotate = true}); }, {"head_scales: x is bf16[2, 5, 4, 96]"});
}

TEST(CastFp8HeadsKernels, CompileWithoutSpills) {
  skip_without_nvrtc();
  compile_and_check(all_head_specs(), "sm_90a", expect_fast);
}

}  // namespace
}  // namespace tw::kernels::cast_fp8
