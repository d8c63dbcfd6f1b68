// quantize(), dequantize() and dequant_gemm() against loops in double; bad inputs.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <random>
#include <tuple>
#include <vector>

#include "kernels/dequant_gemm/call.hpp"
#include "kernels/dequant_gemm/reference.hpp"
#include "microkernels/isa.hpp"
#include "microkernels/quantized_library.hpp"
#include "runtime/format.hpp"
#include "tests/accuracy.hpp"
#include "tests/expect_error.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"
#include "tilewave/elementwise.hpp"
#include "tilewave/quantized.hpp"

namespace tw::kernels::dequant_gemm {
namespace {

using namespace tw::test;
using Layout = QuantizedMatrix::Layout;

const std::vector<Layout> kLayouts = {{WeightFormat::int8},      {WeightFormat::fp8},
                                      {WeightFormat::int4, 32},  {WeightFormat::int4, 32, true},
                                      {WeightFormat::int4, 128}, {WeightFormat::int4, 128, true},
                                      {WeightFormat::int2, 32},  {WeightFormat::int2, 128, true},
                                      {WeightFormat::nf4},       {WeightFormat::fp4},
                                      {WeightFormat::mxfp4}};

std::string name_of_layout(const Layout& l) {
  if (l.format != WeightFormat::int4 && l.format != WeightFormat::int2) return std::string(name_of(l.format));
  return tw::format("{}_{}{}", name_of(l.format), l.group, l.zero_points ? "_zeros" : "");
}

/// The group that K is a multiple of.
std::int64_t group_of(const Layout& l) { return l.format == WeightFormat::nf4 ? 64 : codes_in_byte(l.format) == 1 ? 1 : l.group; }

/// The scale of an element as a number.
double scale_of(const QuantizedMatrix& w, std::int64_t n, std::int64_t k) {
  if (w.group == 0) return w.scales.at({n});
  const double scale = w.scales.at({n, k / w.group});
  return w.format == WeightFormat::mxfp4 ? std::exp2(scale - 127) : scale;
}

/// Rows of very different magnitudes, one of them 0, and some of one sign.
Tensor random_weight(std::int64_t n, std::int64_t k, std::mt19937_64& random) {
  const Tensor w = Tensor::random({n, k}, DType::f32, random());
  for (std::int64_t i = 0; i < n; ++i) {
    const float factor = i % 7 == 3 ? 0.0f : std::exp2(static_cast<float>(random() % 24) - 18);
    for (std::int64_t c = 0; c < k; ++c) {
      float& x = w.data<float>()[i * k + c];
      x = factor * (i % 5 == 2 ? std::abs(x) : x);
    }
  }
  return w;
}

/// Columns that every layout allows.
constexpr std::int64_t kWide = 384;

class Quantized : public testing::TestWithParam<Layout> {
 protected:
  std::mt19937_64 random = random_engine();
};
INSTANTIATE_TEST_SUITE_P(Formats, Quantized, testing::ValuesIn(kLayouts), [](const auto& i) { return name_of_layout(i.param); });

TEST_P(Quantized, ErrorIsWithinTheStatedBound) {
  const Tensor w = random_weight(40, kWide, random);
  const QuantizedMatrix q = quantize(w, GetParam());
  const std::vector<double> decoded = decode(q);
  for (std::int64_t n = 0; n < 40; ++n) {
    for (std::int64_t k = 0; k < kWide; ++k) {
      const double exact = w.at({n, k}), error = std::abs(decoded[static_cast<std::size_t>(n * kWide + k)] - exact);
      const double scale = scale_of(q, n, k);
      double bound = scale / 2 * (1 + 0x1p-15);  // quotients of up to 127 are rounded in f32, too
      if (q.format == WeightFormat::fp8) bound = std::max(std::abs(exact) / 16, scale / 1024) * (1 + 0x1p-15);
      if (q.format == WeightFormat::int4 || q.format == WeightFormat::int2)
        bound = GetParam().zero_points ? 0.51 * scale + 0x1p-21 : scale / 2 * (1 + 0x1p-10) + 0x1p-22;
      if (q.format == WeightFormat::nf4) bound = 0.1520 * scale;  // half of the largest gap, next to -1
      // Midpoints are 5, 2.5 and 1.25, and below 1 steps are 0.5. A microscale's largest elements are up to 8, and become 6.
      if (q.format == WeightFormat::fp4) bound = std::max(std::abs(exact) / 5, scale / 4) * (1 + 0x1p-9) + 0x1p-22;
      if (q.format == WeightFormat::mxfp4) bound = std::max(std::abs(exact) / 4, scale / 4);
      ASSERT_LE(error, bound) << n << ", " << k << ": " << exact << ", scale " << scale;
    }
  }
  // Every code is used: scales are no larger than the largest magnitude needs.
  for (std::int64_t n = 0; n < 40 && q.format == WeightFormat::int8; ++n) {
    double largest = 0;
    for (std::int64_t k = 0; k < kWide; ++k) largest = std::max(largest, std::abs(q.values.at({n, k})));
    EXPECT_EQ(largest, n % 7 == 3 ? 0 : 127);
  }
}

TEST_P(Quantized, TakesEveryFloatType) {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    const Tensor w = Tensor::random({5, kWide}, dtype, random());
    const QuantizedMatrix a = quantize(w, GetParam()), b = quantize(w.to(DType::f32), GetParam());
    EXPECT_EQ(decode(a), decode(b));
  }
}

TEST_P(Quantized, DequantizesToEveryFloatType) {
  const QuantizedMatrix q = quantize(random_weight(11, kWide, random), GetParam());
  const std::vector<double> exact = decode(q);
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    const Tensor out = Tensor::poisoned({11, kWide}, dtype), by_tiles = Tensor::poisoned({11, kWide}, dtype);
    dequantize(q, out);
    dequantize_with_tiles(q, by_tiles);
    for (std::int64_t n = 0; n < 11; ++n) {
      for (std::int64_t k = 0; k < kWide; ++k) {
        const float once = round_to(dtype, static_cast<float>(exact[static_cast<std::size_t>(n * kWide + k)]));
        ASSERT_EQ(out.at({n, k}), once) << name_of(dtype) << " " << n << ", " << k;
        ASSERT_EQ(by_tiles.at({n, k}), once) << name_of(dtype) << " " << n << ", " << k;
      }
    }
  }
}

/// The elements of x that are rounded together (quantized.hpp): none where the processor has no products of 8-bit integers.
std::int64_t rounded_together(const QuantizedMatrix& w, std::int64_t m) {
  const cpu::QuantizedLibrary& library = cpu::quantized_library();
  if (w.format == WeightFormat::int8 && m > 16) return library.round_to_i8 != nullptr ? w.columns() : 0;
  if (library.round_for_i8 == nullptr) return 0;
  if (w.format == WeightFormat::int8) return 64;
  return w.format == WeightFormat::int4 && m <= 16 ? 128 : 0;
}

/// What rows of x become before they are multiplied.
std::vector<float> rounded(std::vector<float> x, const QuantizedMatrix& w, std::int64_t m) {
  const std::int64_t block = rounded_together(w, m), k = w.columns();
  if (block == 0) return x;
  for (std::int64_t r = 0; r < m; ++r) {
    for (std::int64_t first = 0; first < k; first += block) {
      const std::span<float> part(x.data() + r * k + first, static_cast<std::size_t>(std::min(block, k - first)));
      float largest = 0;
      for (const float v : part) largest = std::max(largest, std::abs(v));
      const float scale = largest / 127, factor = scale == 0 ? 0 : 1 / scale;
      for (float& v : part) {
        const float exact = v;
        v = scale * std::nearbyint(v * factor);
        EXPECT_LE(std::abs(v - exact), largest / 254 * (1 + 0x1p-13f));
      }
    }
  }
  return x;
}

/// The most that a sum in f32 differs from the exact one, before it is rounded to the result's type.
double sum_error(const QuantizedMatrix& w, std::span<const float> x, std::int64_t n) {
  // Unsigned codes are up to 255 or 15, so the terms may be larger than those of the result, by what is subtracted in the end.
  double magnitudes = 0;
  for (std::int64_t k = 0; k < w.columns(); ++k) {
    double code = 6;  // of 4-bit floats
    if (w.format == WeightFormat::int8) code = 255;
    if (w.format == WeightFormat::fp8) code = 448;
    if (w.format == WeightFormat::int4) code = 15;
    if (w.format == WeightFormat::int2) code = 3;
    if (w.format == WeightFormat::nf4) code = 1;
    const double largest = code * scale_of(w, n, k);
    magnitudes += largest * std::abs(static_cast<double>(x[static_cast<std::size_t>(k)]));
  }
  // At least 16 sums side by side, or 8 of panels, and a few more additions in the end; x' itself has the rounding of one product.
  return (static_cast<double>(w.columns()) / 8 + 40) * 0x1p-24 * magnitudes;
}

struct Product {
  std::int64_t m, n, k;
  DType dtype = DType::f32;
  DequantGemmOptions options = {};
  bool bias = false;
  std::int64_t gap = 0;  ///< elements between the rows of x and y
};

void expect_product(const Layout& layout, const Product& p, std::mt19937_64& random) {
  SCOPED_TRACE(tw::format("{} M {} N {} K {} {} gap {}", name_of_layout(layout), p.m, p.n, p.k, name_of(p.dtype), p.gap));
  const QuantizedMatrix w = quantize(random_weight(p.n, p.k, random), layout);
  const Tensor x = Tensor::random({p.m, p.k + p.gap}, p.dtype, random()).slice(1, p.gap, p.k + p.gap);
  const bool pairs = p.options.activation == Activation::swiglu;
  const std::int64_t columns = pairs ? p.n / 2 : p.n;
  const Tensor whole =
      p.options.accumulate ? Tensor::random({p.m, p.n + p.gap}, p.dtype, random()) : Tensor::poisoned({p.m, columns + p.gap}, p.dtype);
  const Tensor y = whole.slice(1, 0, columns), bias = Tensor::random({p.n}, p.dtype, random());
  std::vector<float> before, inputs;
  for (std::int64_t r = 0; r < p.m; ++r) {
    for (std::int64_t i = 0; i < p.n && p.options.accumulate; ++i) before.push_back(static_cast<float>(y.at({r, i})));
    for (std::int64_t k = 0; k < p.k; ++k) inputs.push_back(static_cast<float>(x.at({r, k})));
  }
  DequantGemmOptions options = p.options;
  if (p.bias) options.bias = &bias;
  tw::dequant_gemm(x, w, y, options);
  const std::vector<double> decoded = decode(w);
  inputs = rounded(std::move(inputs), w, p.m);
  const Sums exact = plain(inputs, decoded, p.m, p.n, p.k);
  // gemm's panels round the weight to x's type.
  const bool panels = p.m > 16 && rounded_together(w, p.m) == 0;
  const double panel = panels && p.dtype != DType::f32 ? (p.dtype == DType::bf16 ? 0x1p-8 : 0x1p-11) : 0;
  /// What the activation is applied to.
  const auto sum = [&](std::int64_t r, std::int64_t i) {
    const auto at = static_cast<std::size_t>(r * p.n + i);
    double expected = exact.values[at] + (p.bias ? bias.at({i}) : 0.0);
    // Sums with y's old value and the bias are rounded, too, and their result may be small.
    double added = p.bias ? std::abs(bias.at({i})) : 0;
    if (p.options.accumulate) expected += before[at], added += std::abs(before[at]);
    double error = sum_error(w, std::span(inputs).subspan(static_cast<std::size_t>(r * p.k), static_cast<std::size_t>(p.k)), i) +
                   panel * exact.magnitudes[at] + 0x1p-23 * (added + exact.magnitudes[at]);
    if (p.dtype == DType::f16 && panels) error += 0x1p-25 * 5 * static_cast<double>(p.k);  // subnormal elements of panels; |x| < 5
    return Bounded{expected, error};
  };
  for (std::int64_t r = 0; r < p.m; ++r) {
    for (std::int64_t i = 0; i < columns; ++i) {
      auto [expected, error] = pairs ? swiglu(sum(r, 2 * i), sum(r, 2 * i + 1)) : sum(r, i);
      if (p.options.activation == Activation::relu) expected = std::max(expected, 0.0);
      error += std::abs(expected) * (p.dtype == DType::bf16 ? 0x1p-8 : p.dtype == DType::f16 ? 0x1p-11 : 0x1p-24);
      if (p.dtype == DType::f16) error += 0x1p-24;  // subnormal results
      ASSERT_LE(std::abs(y.at({r, i}) - expected), error) << r << ", " << i << ": " << y.at({r, i}) << ", exactly " << expected;
    }
    for (std::int64_t i = columns; i < whole.shape(1) && !p.options.accumulate; ++i)
      ASSERT_TRUE(std::isnan(whole.at({r, i}))) << "column " << i;
  }
}

TEST_P(Quantized, MultipliesLikeTheReference) {
  const std::int64_t group = group_of(GetParam());
  for (const std::int64_t m : {1, 2, 3, 7, 16, 17, 37}) {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      for (int i = 0; i < 2; ++i) {
        std::int64_t k = 1 + static_cast<std::int64_t>(random() % 700);
        k = (k + group - 1) / group * group;
        const auto n = 1 + static_cast<std::int64_t>(random() % 40);
        expect_product(GetParam(), {.m = m, .n = n, .k = k, .dtype = dtype, .bias = i == 1, .gap = i == 1 ? 3 : 0}, random);
      }
    }
  }
}

TEST_P(Quantized, AddsAndActivates) {
  for (const std::int64_t m : {2, 19}) {
    expect_product(GetParam(), {.m = m, .n = 33, .k = 128, .options = {.accumulate = true}, .bias = true}, random);
    expect_product(GetParam(), {.m = m, .n = 33, .k = 128, .dtype = DType::bf16, .options = {.activation = Activation::relu}, .bias = true},
                   random);
  }
  // The other activations are the same functions for any sums.
  const QuantizedMatrix w = quantize(Tensor::random({9, 128}, DType::f32, random()), GetParam());
  const Tensor x = Tensor::random({3, 128}, DType::f32, random()), sums = Tensor::empty({3, 9}, DType::f32),
               y = Tensor::poisoned({3, 9}, DType::f32);
  tw::dequant_gemm(x, w, sums);
  tw::dequant_gemm(x, w, y, {.activation = Activation::gelu_erf});
  for (std::int64_t i = 0; i < 27; ++i) {
    const double s = sums.data<float>()[i];
    EXPECT_NEAR(y.data<float>()[i], s * 0.5 * std::erfc(-s / std::sqrt(2.0)), 1e-6 * std::abs(s) + 1e-6);
  }
}

TEST_P(Quantized, GatesLikeTheReference) {
  // Rows of W that are not a multiple of what a thread takes, and several of these.
  for (const std::int64_t m : {1, 3, 16, 19, 130}) {
    for (const std::int64_t n : {2, 34, 262}) {
      const DType dtype = m % 2 == 0 ? DType::f32 : DType::bf16;  // results are too large for f16
      expect_product(
          GetParam(),
          {.m = m, .n = n, .k = 128, .dtype = dtype, .options = {.activation = Activation::swiglu}, .bias = n != 34, .gap = m % 2}, random);
    }
  }
}

TEST_P(Quantized, RowsDoNotDependOnEachOther) {
  const QuantizedMatrix w = quantize(Tensor::random({70, kWide}, DType::f32, random()), GetParam());
  const Tensor x = Tensor::random({16, kWide}, DType::f32, random()), all = Tensor::poisoned({16, 70}, DType::f32);
  tw::dequant_gemm(x, w, all);
  for (std::int64_t r = 0; r < 16; ++r) {
    for (const std::int64_t m : {1, 2, 5}) {
      if (r + m > 16) continue;
      const Tensor some = Tensor::poisoned({m, 70}, DType::f32);
      tw::dequant_gemm(x.slice(0, r, r + m), w, some);
      EXPECT_EQ(max_difference(some, all.slice(0, r, r + m)), 0);
    }
  }
}

TEST_P(Quantized, EmptyOperands) {
  const QuantizedMatrix none = quantize(Tensor::empty({0, kWide}, DType::f32), GetParam());
  tw::dequant_gemm(Tensor::random({3, kWide}, DType::f32, 1), none, Tensor::empty({3, 0}, DType::f32));
  const QuantizedMatrix w = quantize(Tensor::random({4, kWide}, DType::f32, 1), GetParam());
  tw::dequant_gemm(Tensor::empty({0, kWide}, DType::f32), w, Tensor::empty({0, 4}, DType::f32));
  const QuantizedMatrix flat = quantize(Tensor::empty({4, 0}, DType::f32), GetParam());
  const Tensor y = Tensor::poisoned({2, 4}, DType::f32);
  tw::dequant_gemm(Tensor::empty({2, 0}, DType::f32), flat, y);
  for (int i = 0; i < 8; ++i) EXPECT_EQ(y.data<float>()[i], 0);
}

TEST_P(Quantized, NotANumberReachesTheResult) {
  const QuantizedMatrix w = quantize(Tensor::random({5, kWide}, DType::f32, random()), GetParam());
  for (const float bad : {kNaN, kInf}) {
    const Tensor x = Tensor::random({2, kWide}, DType::f32, random()), y = Tensor::empty({2, 5}, DType::f32);
    x.data<float>()[77] = bad;
    tw::dequant_gemm(x, w, y);
    for (std::int64_t i = 0; i < 5; ++i) {
      EXPECT_FALSE(std::isfinite(y.at({0, i})));
      EXPECT_TRUE(std::isfinite(y.at({1, i})));
    }
  }
}

/// Every instruction set of this processor, not only the one that library() chose.
TEST_P(Quantized, InstructionSetsAgree) {
  std::vector<const cpu::QuantizedLibrary*> sets = {cpu::baseline_quantized_library()};
  if (cpu::has_avx2() && cpu::avx2_quantized_library() != nullptr) sets.push_back(cpu::avx2_quantized_library());
  if (cpu::has_avx512() && cpu::avx512_quantized_library() != nullptr) sets.push_back(cpu::avx512_quantized_library());
  const QuantizedMatrix w = quantize(random_weight(6, kWide, random), GetParam());
  const std::vector<double> decoded = decode(w);
  const Tensor x = Tensor::random({5, kWide}, DType::f32, random());
  const std::span<const float> inputs(x.data<float>(), static_cast<std::size_t>(x.numel()));
  const Sums exact = plain(inputs, decoded, 5, 6, kWide);
  for (const cpu::QuantizedLibrary* set : sets) {
    for (std::int64_t n = 0; n < 6; ++n) {
      const cpu::QuantizedRow row = QuantizedRows(w)[n];
      const bool int8 = w.format == WeightFormat::int8, fp8 = w.format == WeightFormat::fp8, int4 = w.format == WeightFormat::int4;
      std::vector<float> wide(kWide), sums(5);
      (int8   ? set->dequantize_i8
       : fp8  ? set->dequantize_e4m3
       : int4 ? set->dequantize_u4
              : set->dequantize_numbers)(wide.data(), row, 0, kWide);
      for (std::int64_t k = 0; k < kWide; ++k)
        ASSERT_EQ(wide[static_cast<std::size_t>(k)], static_cast<float>(decoded[static_cast<std::size_t>(n * kWide + k)]));
      for (const int count : {5, 1}) {
        (int8   ? set->dots_i8
         : fp8  ? set->dots_e4m3
         : int4 ? set->dots_u4
                : set->dots_numbers)(sums.data(), row, x.data<float>(), kWide, count, kWide);
        for (std::int64_t r = 0; r < count; ++r) {
          const auto at = static_cast<std::size_t>(r * 6 + n);
          EXPECT_NEAR(sums[static_cast<std::size_t>(r)], exact.values[at], exact.magnitudes[at] * 0x1p-20 + 1e-30);
        }
      }
    }
  }
}

/// The products with rounded rows of every instruction set that has them, against the rounded numbers themselves.
TEST_P(Quantized, InstructionSetsAgreeOnRoundedRows) {
  const bool int8 = GetParam().format == WeightFormat::int8;
  if (!int8 && GetParam().format != WeightFormat::int4) GTEST_SKIP() << "rows are rounded for int8 and int4";
  struct Set {
    cpu::RoundRow round;
    cpu::RoundedDots dots;
  };
  std::vector<Set> sets;
  if (cpu::has_avx2() && cpu::avx2_round_for_i8() != nullptr)
    sets.push_back(int8 ? Set{cpu::avx2_round_for_i8(), cpu::avx2_rounded_dots_i8()}
                        : Set{cpu::avx2_round_for_u4(), cpu::avx2_rounded_dots_u4()});
  if (cpu::has_avx512_vnni() && cpu::avx512_vnni_round_for_i8() != nullptr)
    sets.push_back(int8 ? Set{cpu::avx512_vnni_round_for_i8(), cpu::avx512_vnni_rounded_dots_i8()}
                        : Set{cpu::avx512_vnni_round_for_u4(), cpu::avx512_vnni_rounded_dots_u4()});
  if (sets.empty()) GTEST_SKIP() << "no instruction set of this processor rounds rows";
  const std::int64_t elements = int8 ? cpu::kInt8Block : cpu::kInt4Block, scales_of_block = int8 ? 1 : 4;
  constexpr int kRows = 15;  // eight, four, two and one together
  for (const std::int64_t k : {std::int64_t{int8 ? 100 : 128}, kWide, std::int64_t{640}}) {
    const QuantizedMatrix w = quantize(random_weight(3, k, random), GetParam());
    const std::vector<double> decoded = decode(w);
    const Tensor x = Tensor::random({kRows, k}, DType::f32, random());
    const std::int64_t blocks = (k + elements - 1) / elements;
    for (const Set& set : sets) {
      std::vector<signed char> codes(static_cast<std::size_t>(kRows * blocks * elements));
      std::vector<float> scales(static_cast<std::size_t>(kRows * blocks * 4)), sums(scales.size()), got(kRows);
      const cpu::RoundedRows rounded{codes.data(), scales.data(), sums.data(), static_cast<int>(blocks)};
      for (int r = 0; r < kRows; ++r) set.round(rounded, r, x.data<float>() + r * k, static_cast<int>(k));
      const auto value = [&](std::int64_t r, std::int64_t i) {
        const std::int64_t block = r * blocks + i / elements, at = i % elements;
        const double scale = scales[static_cast<std::size_t>(block * scales_of_block + (int8 ? 0 : at / 32))];
        const double v = scale * codes[static_cast<std::size_t>(block * elements + (int8 ? at : at % 2 * 64 + at / 2))];
        EXPECT_NEAR(v, x.at({r, i}), scale * 0.5001);
        return v;
      };
      for (std::int64_t n = 0; n < 3; ++n) {
        set.dots(got.data(), QuantizedRows(w)[n], rounded, kRows, static_cast<int>(k));
        for (std::int64_t r = 0; r < kRows; ++r) {
          double exact = 0, magnitudes = 0;
          for (std::int64_t i = 0; i < k; ++i) {
            exact += value(r, i) * decoded[static_cast<std::size_t>(n * k + i)];
            magnitudes += std::abs(value(r, i)) * 255 * scale_of(w, n, i);
          }
          ASSERT_NEAR(got[static_cast<std::size_t>(r)], exact, magnitudes * 0x1p-20) << "k " << k << ", row " << r;
        }
      }
    }
  }
}

TEST_P(Quantized, TheSameOnAGpu_cuda) {
  skip_without_cuda();
  const QuantizedMatrix w = quantize(random_weight(70, kWide, random), GetParam()), on_gpu = w.to(Device::cuda());
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
    const Tensor out = Tensor::poisoned({70, kWide}, dtype),
                 gpu_out = Tensor::poisoned({70, kWide}, dtype, Stream::standard(Device::cuda()));
    dequantize(w, out);
    if (!launched([&] { dequantize(on_gpu, gpu_out); })) return;
    EXPECT_EQ(max_difference(out, gpu_out.to(Device::cpu())), 0) << name_of(dtype);
  }
}

TEST_P(Quantized, MultipliesOnAGpu_cuda) {
  skip_without_cuda();
  const Stream stream = Stream::standard(Device::cuda());
  for (const DType dtype : {DType::bf16, DType::f16}) {
    const double last = dtype == DType::bf16 ? 0x1p-8 : 0x1p-11;
    // From 16 rows of W an SM on, and from 32, tiles have more of them.
    const std::int64_t units = device_info(Device::cuda()).units;
    for (const std::int64_t n : {std::int64_t{71}, 16 * units + 33, 32 * units + 33}) {
      const QuantizedMatrix w = quantize(Tensor::random({n, kWide}, DType::f32, random()), GetParam()), on_gpu = w.to(Device::cuda());
      const std::vector<double> decoded = decode(w);
      const Tensor bias = Tensor::random({n}, dtype, random()), gpu_bias = bias.to(Device::cuda());
      for (std::int64_t m = 1; m <= 17; ++m) {
        SCOPED_TRACE(tw::format("{} m {} n {}", name_of(dtype), m, n));
        // Rows that are not aligned, after and before elements that must stay.
        const Tensor wide = Tensor::random({m, kWide + 3}, dtype, random());
        const Tensor gpu_x = wide.to(Device::cuda()).slice(1, 1, kWide + 1);
        const Tensor y = Tensor::poisoned({m, n + 1}, dtype, stream), again = Tensor::poisoned({m, n + 1}, dtype, stream);
        const bool ran = launched([&] {
          for (const Tensor* out : {&y, &again})
            tw::dequant_gemm(gpu_x, on_gpu, out->slice(1, 0, n), {.bias = &gpu_bias, .constant_weight = true});
        });
        if (!ran) return;
        const Tensor result = y.to(Device::cpu()), second = again.to(Device::cpu());
        std::vector<float> inputs;
        for (std::int64_t i = 0; i < m * kWide; ++i) inputs.push_back(static_cast<float>(wide.at({i / kWide, i % kWide + 1})));
        const Sums exact = plain(inputs, decoded, m, n, kWide);
        // Up to 16 rows the codes are exact, but for nf4's numbers, and sums are in f32; more rows take a weight that is rounded to x's
        // type.
        const double each = m <= 16 && GetParam().format != WeightFormat::nf4 ? kWide * 0x1p-24 : last;
        for (std::int64_t i = 0; i < m * n; ++i) {
          const auto at = static_cast<std::size_t>(i);
          const double expected = exact.values[at] + bias.at({i % n}), got = result.at({i / n, i % n});
          ASSERT_LE(std::abs(got - expected), exact.magnitudes[at] * each + std::abs(expected) * last + 0x1p-20) << i;
          ASSERT_EQ(got, second.at({i / n, i % n})) << i;
        }
        for (std::int64_t r = 0; r < m; ++r) ASSERT_TRUE(std::isnan(result.at({r, n}))) << r;
      }
    }
  }
}

/// Weights are read while the launch before still runs. What that launch writes must not be.
TEST_P(Quantized, ChainsOnAGpu_cuda) {
  skip_without_cuda();
  constexpr std::int64_t kSide = 2048, kLayers = 4;
  const Stream stream = Stream::standard(Device::cuda());
  std::vector<QuantizedMatrix> layers;
  for (std::int64_t i = 0; i < kLayers; ++i)
    layers.push_back(quantize(Tensor::random({kSide, kSide}, DType::f32, random()), GetParam()).to(Device::cuda()));
  const std::vector<double> decoded = decode(layers.front().to(Device::cpu()));
  for (const std::int64_t m : {1, 16}) {
    const Tensor x = Tensor::random({m, kSide}, DType::bf16, random()), gpu_x = x.to(Device::cuda());
    /// The outputs of all layers.
    const auto run = [&](bool constant_weight) {
      std::vector<Tensor> all;
      for (std::int64_t i = 0; i < kLayers; ++i) all.push_back(Tensor::poisoned({m, kSide}, DType::bf16, stream));
      for (std::size_t i = 0; i < layers.size(); ++i)
        tw::dequant_gemm(i == 0 ? gpu_x : all[i - 1], layers[i], all[i], {.constant_weight = constant_weight});
      return all;
    };
    if (!launched([&] { run(false); })) return;
    const std::vector<Tensor> apart = run(false);
    const Tensor first = apart.front().to(Device::cpu()), last = apart.back().to(Device::cpu());
    std::vector<float> inputs;
    for (std::int64_t i = 0; i < m * kSide; ++i) inputs.push_back(static_cast<float>(x.at({i / kSide, i % kSide})));
    const Sums exact = plain(inputs, decoded, m, kSide, kSide);
    const double each = GetParam().format != WeightFormat::nf4 ? kSide * 0x1p-24 : 0x1p-8;
    for (std::int64_t i = 0; i < m * kSide; ++i) {
      const auto at = static_cast<std::size_t>(i);
      ASSERT_LE(std::abs(first.at({i / kSide, i % kSide}) - exact.values[at]),
                exact.magnitudes[at] * each + std::abs(exact.values[at]) * 0x1p-8)
          << i;
    }
    for (int repetition = 0; repetition < 200; ++repetition)
      ASSERT_EQ(max_difference(run(true).back().to(Device::cpu()), last), 0) << "m " << m << ", repetition " << repetition;
  }
}

TEST_P(Quantized, GatesOnAGpu_cuda) {
  skip_without_cuda();
  const Stream stream = Stream::standard(Device::cuda());
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
    const double last = dtype == DType::bf16 ? 0x1p-8 : dtype == DType::f16 ? 0x1p-11 : 0x1p-10;  // of tf32
    for (const std::int64_t m : {1, 8, 16, 17, 64, 300}) {
      for (const std::int64_t n : {70, 4646}) {  // also tiles of 32 rows of W
        SCOPED_TRACE(tw::format("{} m {} n {}", name_of(dtype), m, n));
        const QuantizedMatrix w = quantize(Tensor::random({n, kWide}, DType::f32, random()), GetParam()), on_gpu = w.to(Device::cuda());
        const Tensor bias = Tensor::random({n}, dtype, random()), gpu_bias = bias.to(Device::cuda());
        const Tensor x = Tensor::random({m, kWide}, dtype, random()), gpu_x = x.to(Device::cuda());
        const Tensor y = Tensor::poisoned({m, n / 2 + 1}, dtype, stream);
        const DequantGemmOptions options{.bias = &gpu_bias, .activation = Activation::swiglu};
        if (!launched([&] { tw::dequant_gemm(gpu_x, on_gpu, y.slice(1, 0, n / 2), options); })) return;
        const Tensor result = y.to(Device::cpu());
        std::vector<float> inputs;
        for (std::int64_t i = 0; i < m * kWide; ++i) inputs.push_back(static_cast<float>(x.at({i / kWide, i % kWide})));
        const Sums exact = plain(inputs, decode(w), m, n, kWide);
        const bool codes = dtype != DType::f32 && m <= 16 && GetParam().format != WeightFormat::nf4;
        const auto sum = [&](std::int64_t r, std::int64_t i) {
          const auto at = static_cast<std::size_t>(r * n + i);
          return Bounded{exact.values[at] + bias.at({i}),
                         (exact.magnitudes[at] + std::abs(bias.at({i}))) * (kWide * 0x1p-24 + (codes ? 0 : last))};
        };
        for (std::int64_t r = 0; r < m; ++r) {
          for (std::int64_t i = 0; i < n / 2; ++i) {
            const Bounded expected = swiglu(sum(r, 2 * i), sum(r, 2 * i + 1));
            ASSERT_LE(std::abs(result.at({r, i}) - expected.value), expected.error + std::abs(expected.value) * last + 0x1p-20)
                << r << ", " << i;
          }
          ASSERT_TRUE(std::isnan(result.at({r, n / 2}))) << r;
        }
      }
    }
  }
}

TEST_P(Quantized, AddsOnAGpu_cuda) {
  skip_without_cuda();
  const QuantizedMatrix w = quantize(Tensor::random({71, kWide}, DType::f32, random()), GetParam()), on_gpu = w.to(Device::cuda());
  for (const std::int64_t m : {1, 16}) {
    const Tensor x = Tensor::random({m, kWide}, DType::bf16, random()), y = Tensor::random({m, 71}, DType::bf16, random());
    const Tensor gpu_y = y.to(Device::cuda());
    if (!launched([&] { tw::dequant_gemm(x.to(Device::cuda()), on_gpu, gpu_y, {.accumulate = true}); })) return;
    const Tensor result = gpu_y.to(Device::cpu());
    std::vector<float> inputs;
    for (std::int64_t i = 0; i < x.numel(); ++i) inputs.push_back(static_cast<float>(x.data<bf16>()[i]));
    const Sums exact = plain(inputs, decode(w), m, 71, kWide);
    const double weight = GetParam().format == WeightFormat::nf4 ? 0x1p-8 : 0;
    for (std::int64_t i = 0; i < m * 71; ++i) {
      const auto at = static_cast<std::size_t>(i);
      const double expected = exact.values[at] + y.at({i / 71, i % 71});
      EXPECT_NEAR(result.at({i / 71, i % 71}), expected,
                  (exact.magnitudes[at] + 4) * (kWide * 0x1p-24 + weight) + std::abs(expected) * 0x1p-8)
          << m;
    }
  }
}

TEST(QuantizedFormats, EveryCodeOfFourBitsDecodesAsDefined) {
  constexpr float floats[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
  for (const WeightFormat format : {WeightFormat::fp4, WeightFormat::mxfp4, WeightFormat::nf4}) {
    const QuantizedMatrix w = QuantizedMatrix::allocate(256, 64, {format});
    // Row n has byte n everywhere: every code in both places.
    for (std::int64_t i = 0; i < w.values.numel(); ++i) w.values.data<u8>()[i] = static_cast<u8>(i / 32);
    float scale = 1;
    if (format == WeightFormat::fp4) std::fill_n(w.scales.data<f16>(), w.scales.numel(), f16(scale = 0.25f));
    if (format == WeightFormat::mxfp4) std::fill_n(w.scales.data<u8>(), w.scales.numel(), u8{129}), scale = 4;
    if (format == WeightFormat::nf4) std::fill_n(w.scales.data<float>(), w.scales.numel(), scale = 3.0f);
    const Tensor out = Tensor::poisoned({256, 64}, DType::f32), by_tiles = Tensor::poisoned({256, 64}, DType::f32);
    dequantize(w, out);
    dequantize_with_tiles(w, by_tiles);
    for (std::int64_t i = 0; i < out.numel(); ++i) {
      const auto code = static_cast<std::size_t>(i / 64 >> i % 2 * 4 & 15);
      const float expected = scale * (format == WeightFormat::nf4 ? kNormalFloats[code] : floats[code]);
      ASSERT_EQ(bit_cast<u32>(by_tiles.data<float>()[i]), bit_cast<u32>(expected)) << name_of(format) << " code " << code;
      ASSERT_EQ(out.data<float>()[i], expected) << name_of(format) << " code " << code;
      ASSERT_EQ(std::signbit(out.data<float>()[i]), std::signbit(expected)) << name_of(format) << " code " << code;
    }
  }
}

TEST(QuantizedFormats, MicroscalesAreThoseOfTheSpecification) {
  const Tensor w = Tensor::empty({6, 32}, DType::f32);
  std::fill_n(w.data<float>(), 6 * 32, 0.0f);
  // The largest magnitude and the scale's exponent: floor(log2) - 2.
  constexpr std::array largest = {0.0f, 6.0f, 7.9f, 8.0f, 0.1f, 3e38f};
  constexpr std::array exponents = {-127, 0, 0, 1, -6, 125};
  for (std::size_t n = 0; n < 6; ++n) w.data<float>()[n * 32 + 7] = largest[n];
  const QuantizedMatrix q = quantize(w, {WeightFormat::mxfp4});
  for (std::size_t n = 0; n < 6; ++n) EXPECT_EQ(q.scales.data<u8>()[n], exponents[n] + 127) << n;
  EXPECT_EQ(decode(q)[2 * 32 + 7], 6.0);  // 7.9 saturates
  // A scale of 255 is NaN.
  q.scales.data<u8>()[1] = 255;
  const Tensor out = Tensor::empty({6, 32}, DType::f32);
  dequantize(q, out);
  EXPECT_TRUE(std::isnan(out.data<float>()[32 + 7]));
}

TEST(QuantizedFormats, NamesAreParsed) {
  for (const Layout& layout : kLayouts) EXPECT_EQ(parse_weight_layout(text_of(layout)), layout) << text_of(layout);
  EXPECT_EQ(parse_weight_layout("int2"), (Layout{WeightFormat::int2, 32}));
  EXPECT_EQ(text_of({WeightFormat::int2, 128, true}), "int2:128:zeros");
  expect_error<InvalidArgument>([] { parse_weight_layout("nf4:64"); }, {"weights are \"nf4:64\"", "nf4, fp4, mxfp4"});
}

/// Sizes around those of tiles, and of steps of K.
TEST(QuantizedRows, ManyRowsOfAnySizes) {
  std::mt19937_64 random = random_engine();
  for (const std::int64_t m : {17, 63, 65, 128, 129, 257}) {
    for (const std::int64_t n : {1, 191, 193, 259}) {
      const std::int64_t k = std::array{1, 3, 65, 191, 193, 390}[random() % 6];
      expect_product({WeightFormat::int8}, {.m = m, .n = n, .k = k, .bias = true, .gap = 1}, random);
    }
    for (const DType dtype : {DType::bf16, DType::f16})
      expect_product({WeightFormat::int8}, {.m = m, .n = 70, .k = 200, .dtype = dtype, .options = {.accumulate = true}}, random);
  }
}

/// Many rows of int8 are rounded with one scale, and products of integers are exact.
TEST(QuantizedRows, ManyRowsDoNotDependOnEachOther) {
  const QuantizedMatrix w = quantize(Tensor::random({270, kWide}, DType::f32, 1), {});
  const Tensor x = Tensor::random({300, kWide}, DType::f32, 2), all = Tensor::poisoned({300, 270}, DType::f32);
  const Tensor again = Tensor::poisoned({300, 270}, DType::f32), some = Tensor::poisoned({20, 270}, DType::f32);
  tw::dequant_gemm(x, w, all);
  tw::dequant_gemm(x, w, again);
  EXPECT_EQ(max_difference(all, again), 0);
  if (rounded_together(w, 20) == 0) GTEST_SKIP() << "no products of 8-bit integers";
  tw::dequant_gemm(x.slice(0, 100, 120), w, some);
  EXPECT_EQ(max_difference(all.slice(0, 100, 120), some), 0);
}

TEST(QuantizedRows, ManyRowsWithZerosAndNotANumber) {
  const QuantizedMatrix w = quantize(Tensor::random({33, 100}, DType::f32, 1), {});
  const Tensor bias = Tensor::random({33}, DType::f32, 2);
  for (const float bad : {kNaN, kInf, -kInf}) {
    const Tensor x = Tensor::random({20, 100}, DType::f32, 3), y = Tensor::poisoned({20, 33}, DType::f32);
    x.data<float>()[7 * 100 + 99] = bad;
    std::fill_n(x.data<float>() + 8 * 100, 100, 0.0f);
    tw::dequant_gemm(x, w, y, {.bias = &bias});
    for (std::int64_t r = 0; r < 20; ++r) {
      for (std::int64_t i = 0; i < 33; ++i) {
        EXPECT_EQ(std::isfinite(y.at({r, i})), r != 7) << r << ", " << i;
        if (r == 8) {
          EXPECT_EQ(y.at({r, i}), bias.at({i}));
        }
      }
    }
  }
}

/// Sums that fit 32 bits, and sums that would not.
TEST(QuantizedRows, ManyRowsOfTheLargestSums) {
  for (const std::int64_t k : {131072, 140000}) {
    const Tensor weight = Tensor::empty({1, k}, DType::f32), x = Tensor::empty({17, k}, DType::f32),
                 y = Tensor::poisoned({17, 1}, DType::f32);
    std::fill_n(weight.data<float>(), k, -0.5f);
    std::fill_n(x.data<float>(), 17 * k, 2.0f);
    tw::dequant_gemm(x, quantize(weight, {}), y);
    for (std::int64_t r = 0; r < 17; ++r) EXPECT_NEAR(y.at({r, 0}), -static_cast<double>(k), 1e-6 * static_cast<double>(k));
  }
}

TEST(QuantizedErrors, NameTheArgument) {
  const auto refused = [](const char* part, const Tensor& w, const Layout& layout) {
    expect_error<InvalidArgument>([&] { quantize(w, layout); }, {"quantize", part});
  };
  const Tensor w = Tensor::random({4, 96}, DType::f32, 1);
  refused("multiple of the group of 128", w, {WeightFormat::int4, 128});
  refused("group is 64; 32 and 128", w, {WeightFormat::int4, 64});
  refused("format is plain", w, {WeightFormat::plain});
  refused("must be [N, K]", w.reshape({384}), {});
  refused("f32, f16 and bf16", w.to(DType::i32), {});
  const Tensor bad = Tensor::random({4, 96}, DType::f32, 1), large = Tensor::random({4, 96}, DType::f32, 1);
  bad.data<float>()[96 * 2 + 5] = kNaN;
  for (const Layout& layout : kLayouts)
    if (96 % group_of(layout) == 0) refused("row 2 of the weight has an element that is not finite", bad, layout);
  large.data<float>()[96 + 5] = 1e6f;
  for (const WeightFormat format : {WeightFormat::int4, WeightFormat::int2, WeightFormat::fp4})
    refused("row 1 of the weight has a magnitude of", large, {format, 32});
  refused("for nf4 its columns must be a multiple of the group of 64", w, {WeightFormat::nf4});

  const QuantizedMatrix q = quantize(w, {WeightFormat::int4, 32});
  const Tensor x = Tensor::random({2, 96}, DType::f32, 1), y = Tensor::poisoned({2, 4}, DType::f32);
  const auto product_refused = [&](const char* part, const Tensor& a, const QuantizedMatrix& b, const Tensor& d,
                                   const DequantGemmOptions& o = {}) {
    expect_error<InvalidArgument>([&] { tw::dequant_gemm(a, b, d, o); }, {"dequant_gemm", part});
  };
  product_refused("weight is empty", x, {}, y);
  product_refused("[M, 96]", x.slice(1, 0, 95), q, y);
  product_refused("y is", x, q, y.slice(1, 0, 3));
  product_refused("f32", x, q, y.to(DType::f16));
  product_refused("adjacent", Tensor::random({96, 2}, DType::f32, 1).transpose(0, 1), q, y);
  const Tensor halves = Tensor::poisoned({2, 2}, DType::f32);
  product_refused("y is", x, q, y, {.activation = Activation::swiglu});
  product_refused("the weight has 3 rows; swiglu", x, q.slice(0, 3), halves, {.activation = Activation::swiglu});
  product_refused("accumulate", x, q, halves, {.accumulate = true, .activation = Activation::swiglu});
  product_refused("accumulate", x, q, y, {.accumulate = true, .activation = Activation::relu});
  const Tensor bias = Tensor::random({5}, DType::f32, 1);
  product_refused("bias", x, q, y, {.bias = &bias});
  QuantizedMatrix wrong = q;
  wrong.scales = wrong.scales.slice(1, 0, 2);
  product_refused("scales", x, wrong, y);
  wrong = q;
  wrong.values = wrong.values.reshape({2, 96});
  product_refused("scales", x, wrong, y);
  wrong = q;
  wrong.group = 48;
  product_refused("group", x, wrong, y);
  wrong = q;
  wrong.format = WeightFormat::int8;
  product_refused("values", x, wrong, y);
  for (int i = 0; i < 8; ++i) EXPECT_TRUE(std::isnan(y.data<float>()[i]));
}

}  // namespace
}  // namespace tw::kernels::dequant_gemm
