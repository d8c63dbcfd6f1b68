// dequant_gemm() of x in 8-bit integers: the public function on the CPU, the kernel for many rows on the CPU target, on the analysis target
// and through the compiler, and both on GPUs.

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "kernels/dequant_gemm/reference.hpp"
#include "kernels/dequant_gemm/w4a8.hpp"
#include "kernels/generic_tiles.hpp"
#include "microkernels/quantized_library.hpp"
#include "runtime/dry_run.hpp"
#include "runtime/format.hpp"
#include "tests/compiled_kernels.hpp"
#include "tests/expect_error.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"
#include "tilewave/analyze.hpp"
#include "tilewave/tile/cpu/target.tile.hpp"
#include "tilewave/tile/cuda/code_pairs.tile.hpp"

namespace tw::kernels::dequant_gemm {
namespace {

using namespace tw::test;
using Layout = QuantizedMatrix::Layout;

// Those of kW4A8Tiles in fewer slots, so that rings are used several times.
constexpr WideTile kTile32{128, 32, 2, 2, 2}, kTile64{128, 64, 2, 3, 2}, kTile128{128, 128, 2, 2, 2}, kTile192{128, 192, 2, 2, 2};

template <bool zeros, DType dtype, WideTile tile, Activation activation = Activation::none, bool split = false>
constexpr W4A8Kernel kKernel{zeros, dtype, activation, split, tile};

struct Case {
  std::int64_t m, n, k;
  int splits = 0;
  bool bias = false, accumulate = false;
  std::int64_t gap = 0;
  Activation activation = Activation::none;

  bool pairs() const { return activation == Activation::swiglu; }
  std::int64_t columns() const { return pairs() ? n / 2 : n; }
};

/// The elements of a matrix on the CPU.
std::vector<float> values_of(const Tensor& t) {
  std::vector<float> values;
  for (std::int64_t i = 0; i < t.numel(); ++i) values.push_back(static_cast<float>(t.at({i / t.shape(1), i % t.shape(1)})));
  return values;
}

/// Rows of integers of the whole range, each with a scale, and what they are multiplied by.
struct Operands {
  Tensor x, x_scales, bias, before;
  QuantizedMatrix w;

  Operands(const Case& c, const Layout& layout, DType dtype, std::mt19937_64& random)
      : x(Tensor::empty({c.m, c.k + 16}, DType::i8).slice(1, 0, c.k)),
        x_scales(Tensor::random({c.m}, DType::f32, random())),
        bias(Tensor::random({c.n}, dtype, random())),
        before(c.accumulate ? Tensor::random({c.m, c.columns()}, dtype, random()) : Tensor()),
        w(quantize(Tensor::random({c.n, c.k}, DType::f32, random()), layout)) {
    for (std::int64_t r = 0; r < c.m; ++r) {
      x_scales.data<float>()[r] = 0.002f + 0.004f * std::abs(x_scales.data<float>()[r]);
      for (std::int64_t i = 0; i < c.k; ++i)
        x.data<signed char>()[r * (c.k + 16) + i] = static_cast<signed char>(static_cast<int>(random() % 256) - 128);
    }
  }

  /// What y is, and how much a result may differ: `x_error` is that of an element of x, relative, and `w_error` that of an element of W.
  std::vector<Bounded> expected(const Case& c, double x_error, double w_error) const {
    const Sums exact = plain(values_of(x), decode(w), c.m, c.n, c.k);
    const auto sum = [&](std::int64_t r, std::int64_t n) {
      const auto at = static_cast<std::size_t>(r * c.n + n);
      const double scale = x_scales.at({r}), added = (c.bias ? bias.at({n}) : 0.0) + (c.accumulate ? before.at({r, n}) : 0.0);
      // In f32 one product and one sum for each group, and a few more.
      const double rounding = (static_cast<double>(c.k) / 32 + 16) * 0x1p-24 + x_error + w_error;
      return Bounded{exact.values[at] * scale + added,
                     (exact.magnitudes[at] * scale + std::abs(added) + (c.bias ? std::abs(bias.at({n})) : 0.0)) * rounding};
    };
    std::vector<Bounded> result;
    for (std::int64_t r = 0; r < c.m; ++r) {
      for (std::int64_t i = 0; i < c.columns(); ++i) {
        Bounded one = c.pairs() ? swiglu(sum(r, 2 * i), sum(r, 2 * i + 1)) : sum(r, i);
        if (c.activation == Activation::relu) one.value = std::max(one.value, 0.0);
        result.push_back(one);
      }
    }
    return result;
  }
};

double last_of(DType dtype) { return dtype == DType::bf16 ? 0x1p-8 : dtype == DType::f16 ? 0x1p-11 : 0x1p-24; }

void expect_close(const std::vector<double>& results, const std::vector<Bounded>& expected, DType dtype) {
  ASSERT_EQ(results.size(), expected.size());
  for (std::size_t i = 0; i < results.size(); ++i) {
    const auto& [value, error] = expected[i];
    ASSERT_LE(std::abs(results[i] - value), error * (1 + last_of(dtype)) + last_of(dtype) * std::abs(value) + 0x1p-24)
        << i << ": " << results[i] << ", exactly " << value;
  }
}

/// Runs the kernels for one case on the CPU target, twice.
template <W4A8Kernel kernel>
void check(const Case& given, std::mt19937_64& random) {
  Case c = given;
  c.activation = kernel.activation;
  SCOPED_TRACE(tw::format("{} m {} n {} k {} splits {} gap {}", type_of(kernel), c.m, c.n, c.k, c.splits, c.gap));
  const Operands of(c, {WeightFormat::int4, 128, kernel.zeros}, kernel.dtype, random);
  const Device device = Device::cpu();
  PlacedTensor y({c.m, c.columns()}, kernel.dtype, device, {.gap = c.gap}), again({c.m, c.columns()}, kernel.dtype, device);
  if (c.accumulate) y.fill(values_of(of.before)), again.fill(values_of(of.before));
  const Stream stream = Stream::standard(device);
  for (PlacedTensor* out : {&y, &again}) {
    const DequantGemmOptions options{
        .accumulate = c.accumulate, .bias = c.bias ? &of.bias : nullptr, .activation = kernel.activation, .x_scales = &of.x_scales};
    const Call call{of.x, of.w, *out, options, stream};
    const WidePlan plan{kernel.tile, c.splits};
    const Tensor partial = Tensor::poisoned({std::max(1, c.splits), c.n, (c.m + 3) / 4 * 4}, DType::f32).slice(2, 0, c.m);
    constexpr W4A8Kernel product{kernel.zeros, kernel.dtype, kernel.split ? Activation::none : kernel.activation, kernel.split,
                                 kernel.tile};
    launch_cpu<W4A8HostKernel<product>>(wide_grid(call, plan), [&](auto& bind, auto& p) { bind_w4a8(bind, p, call, plan, partial); });
    if constexpr (kernel.split) {
      const auto sum = [&]<WideSum k>() {
        launch_cpu<WideHostSum<k>>(wide_sum_grid(call), [&](auto& bind, auto& p) { bind_wide_sum(bind, p, call, partial); });
      };
      if (c.accumulate)
        sum.template operator()<WideSum{kernel.dtype, Activation::none, true}>();
      else
        sum.template operator()<WideSum{kernel.dtype, kernel.activation, false}>();
    }
  }
  const std::vector<double> results = y.values();
  EXPECT_EQ(results, again.values());
  expect_close(results, of.expected(c, 0, 0), kernel.dtype);
  EXPECT_TRUE(y.gaps_intact());
}

class W4A8 : public testing::Test {
 protected:
  void SetUp() override { cpu::set_poison_released_slots(true); }
  std::mt19937_64 random = random_engine();
};

TEST_F(W4A8, ManyRowsAreCorrectOnTheCpu) {
  // One group, one slot, and several with a part of one.
  for (const auto& [m, n, k] : {std::tuple{1, 1, 128}, {33, 200, 256}, {70, 129, 1152}}) {
    check<kKernel<false, DType::bf16, kTile32>>({.m = m, .n = n, .k = k, .bias = true}, random);
    check<kKernel<true, DType::f16, kTile64, Activation::relu>>({.m = m, .n = n, .k = k, .bias = true, .gap = 1}, random);
    check<kKernel<true, DType::bf16, kTile128>>({.m = 3 * m, .n = n, .k = k, .gap = 3}, random);
    check<kKernel<false, DType::f16, kTile192>>({.m = 4 * m, .n = n, .k = k, .bias = true}, random);
  }
}
TEST_F(W4A8, GatesOnTheCpu) {
  constexpr Activation swiglu = Activation::swiglu;
  for (const auto& [m, n, k] : {std::tuple{1, 2, 128}, {70, 262, 384}}) {
    check<kKernel<true, DType::bf16, kTile32, swiglu>>({.m = m, .n = n, .k = k, .bias = true}, random);
    check<kKernel<false, DType::f16, kTile192, swiglu>>({.m = 3 * m, .n = n, .k = k, .gap = 1}, random);
    check<kKernel<false, DType::bf16, kTile64, swiglu, true>>({.m = m, .n = n, .k = k, .splits = k > 256 ? 2 : 1, .bias = true}, random);
  }
}
TEST_F(W4A8, SplitsOfKAreCorrectOnTheCpu) {
  for (const int splits : {1, 2, 3}) {
    check<kKernel<true, DType::bf16, kTile128, Activation::none, true>>(
        {.m = 70, .n = 129, .k = 1408, .splits = splits, .bias = true, .accumulate = true, .gap = 1}, random);
    check<kKernel<false, DType::f16, kTile32, Activation::relu, true>>({.m = 37, .n = 130, .k = 1408, .splits = splits, .bias = true},
                                                                       random);
  }
}

/// The instructions that decode on a GPU, run here: every code and zero point at every place.
TEST_F(W4A8, DecodesEveryCodeLikeTheFormula) {
  for (u32 codes = 0; codes < 65536; ++codes) {
    const u32 centred = cuda::DecodePair<u4x2, i8, CentredTimes16>::decode(codes, {});
    for (int n = 0; n < 4; ++n)
      ASSERT_EQ(static_cast<int>(static_cast<i8>(centred >> 8 * n & 0xffu)), 16 * (static_cast<int>(codes >> 4 * n & 15u) - 8)) << codes;
    for (int zero = 0; zero < 16; ++zero) {
      using Less = cuda::DecodePair<u4x2, i8, LessZero>;
      const u32 less = Less::decode(codes, Less::prepare(static_cast<float>(zero)));
      for (int n = 0; n < 4; ++n)
        ASSERT_EQ(static_cast<int>(static_cast<i8>(less >> 8 * n & 0xffu)), static_cast<int>(codes >> 4 * n & 15u) - zero) << codes;
    }
  }
}

/// The public function: few rows, as integers or in f32, and many, in y's dtype.
TEST_F(W4A8, MultipliesLikeTheReference) {
  for (const Layout& layout : {Layout{WeightFormat::int4, 32}, Layout{WeightFormat::int4, 128, true}}) {
    for (const std::int64_t m : {1, 5, 16, 17, 40}) {
      for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
        const bool gated = m == 5;
        const Case c{.m = m,
                     .n = 34,
                     .k = 128 * (1 + static_cast<std::int64_t>(random() % 4)),
                     .bias = m != 16,
                     .accumulate = m == 16,
                     .activation = gated     ? Activation::swiglu
                                   : m == 17 ? Activation::relu
                                             : Activation::none};
        SCOPED_TRACE(tw::format("{} {} m {} k {}", text_of(layout), name_of(dtype), c.m, c.k));
        const Operands of(c, layout, dtype, random);
        const Tensor y = Tensor::poisoned({c.m, c.columns()}, dtype);
        if (c.accumulate) y.copy_from(of.before);
        tw::dequant_gemm(
            of.x, of.w, y,
            {.accumulate = c.accumulate, .bias = c.bias ? &of.bias : nullptr, .activation = c.activation, .x_scales = &of.x_scales});
        const std::vector<float> stored = values_of(y);
        const std::vector<double> results(stored.begin(), stored.end());
        // Unsigned codes are summed before zero points are subtracted, and rows of f32 are summed one by one.
        const double few = static_cast<double>(c.k) * 0x1p-22, many = last_of(dtype);
        expect_close(results, of.expected(c, m > 16 ? many : few, m > 16 ? many : few), dtype);
      }
    }
  }
}

TEST_F(W4A8, ScaleThatIsNotANumberStaysInItsRow) {
  const Case c{.m = 3, .n = 20, .k = 256};
  const Operands of(c, {WeightFormat::int4, 128}, DType::f32, random);
  of.x_scales.data<float>()[1] = std::nanf("");
  const Tensor y = Tensor::poisoned({3, 20}, DType::f32);
  tw::dequant_gemm(of.x, of.w, y, {.x_scales = &of.x_scales});
  for (std::int64_t i = 0; i < 60; ++i) EXPECT_EQ(std::isnan(y.at({i / 20, i % 20})), i / 20 == 1) << i;
}

TEST_F(W4A8, ErrorsNameTheArgument) {
  const Case c{.m = 2, .n = 6, .k = 128};
  const Operands of(c, {WeightFormat::int4, 32}, DType::f32, random);
  const Tensor y = Tensor::poisoned({2, 6}, DType::f32);
  const auto refused = [&](const char* part, const Tensor& x, const QuantizedMatrix& w, const Tensor& to, const Tensor* scales) {
    expect_error<InvalidArgument>([&] { tw::dequant_gemm(x, w, to, {.x_scales = scales}); }, {"dequant_gemm", part});
  };
  const Tensor floats = Tensor::random({2, 128}, DType::f32, 1), longer = Tensor::random({3}, DType::f32, 1);
  const Tensor half = Tensor::random({2}, DType::f16, 1);
  refused("i8 with x_scales", of.x, of.w, y, nullptr);
  refused("x_scales are given for x", floats, of.w, y, &of.x_scales);
  refused("x_scales are f32[3]", of.x, of.w, y, &longer);
  refused("x_scales are f16[2]", of.x, of.w, y, &half);
  refused("the weight is int8", of.x, quantize(Tensor::random({6, 128}, DType::f32, 1), {}), y, &of.x_scales);
  refused("y is i32[2, 6]", of.x, of.w, Tensor::empty({2, 6}, DType::i32), &of.x_scales);
  for (int i = 0; i < 12; ++i) EXPECT_TRUE(std::isnan(y.data<float>()[i]));
}

/// A call of a shape, without memory.
struct Shapes {
  Shapes(std::int64_t m, std::int64_t n, std::int64_t k, const Layout& layout, DType dtype = DType::bf16)
      : x(placeholder({m, k}, DType::i8)),
        x_scales(placeholder({m}, DType::f32)),
        y(placeholder({m, n}, dtype)),
        weight{.format = WeightFormat::int4,
               .values = placeholder({n, k / 2}, DType::u8),
               .scales = placeholder({n, k / layout.group}, DType::f16),
               .zeros = layout.zero_points ? placeholder({n, k / layout.group}, DType::u8) : Tensor(),
               .group = layout.group} {
    options.x_scales = &x_scales;
  }
  Shapes(const Shapes&) = delete;
  Call call() const { return {x, weight, y, options, Stream::standard(Device::cpu())}; }

  Tensor x, x_scales, y;
  QuantizedMatrix weight;
  DequantGemmOptions options;
};

TEST_F(W4A8, ReadsTheWeightOnceForEachColumnOfTiles) {
  constexpr std::int64_t m = 300, n = 256, k = 2048;
  const Shapes shapes(m, n, k, {WeightFormat::int4, 128, true});
  const Call call = shapes.call();
  const WidePlan plan{kTile192, 0};
  const Analysis counted = analyze<W4A8HostKernel<kKernel<true, DType::bf16, kTile192>>>(
      wide_grid(call, plan), [&](auto& bind, auto& p) { bind_w4a8(bind, p, call, plan, {}); });
  constexpr std::int64_t tiles_of_x = 2, tiles_of_w = 2;
  EXPECT_GE(counted.global_read, tiles_of_x * (n * k / 2 + n * (k / 128) * 3) + tiles_of_w * m * k);
  EXPECT_EQ(counted.global_written, m * n * 2u);
  EXPECT_EQ(counted.operations.inside[static_cast<std::size_t>(OperandType::i8)], 2u * m * n * k);
}

TEST_F(W4A8, IsChosenByTypeAndAlignment) {
  const auto chosen = [](std::int64_t m, std::int64_t k, const Layout& layout, DType dtype = DType::bf16) {
    return is_w4a8(Shapes(m, 64, k, layout, dtype).call());
  };
  EXPECT_TRUE(chosen(17, 2048, {WeightFormat::int4, 128}));
  EXPECT_TRUE(chosen(4096, 128, {WeightFormat::int4, 128, true}, DType::f16));
  EXPECT_FALSE(chosen(16, 2048, {WeightFormat::int4, 128}));
  EXPECT_FALSE(chosen(17, 2048, {WeightFormat::int4, 32}));
  EXPECT_FALSE(chosen(17, 2048, {WeightFormat::int4, 128}, DType::f32));
  EXPECT_FALSE(chosen(17, 0, {WeightFormat::int4, 128}));
}

TEST_F(W4A8, PlansFillTheMultiprocessors) {
  const auto plan = [](std::int64_t m) { return plan_w4a8(Shapes(m, 4096, 4096, {WeightFormat::int4, 128}).call(), 132); };
  EXPECT_EQ(plan(4096).tile, kW4A8Tiles[3]);
  EXPECT_EQ(plan(4096).splits, 0);
  EXPECT_EQ(plan(32).tile, kW4A8Tiles[0]);
  EXPECT_GE(plan(32).splits * 32, 96);  // tiles
}

TEST_F(W4A8, LaunchesNothingElse) {
  DryRun run(typical_gpu("sm_90a"));
  const Stream stream(run.device());
  const auto launches = [&](std::int64_t m, int group) {
    const QuantizedMatrix w = QuantizedMatrix::allocate(4096, 4096, {WeightFormat::int4, group}).to(run.device());
    const Tensor x = Tensor::empty({m, 4096}, DType::i8, stream), x_scales = Tensor::empty({m}, DType::f32, stream),
                 y = Tensor::empty({m, 4096}, DType::bf16, stream);
    const std::size_t before = run.kernels().size();
    tw::dequant_gemm(x, w, y, {.stream = stream, .x_scales = &x_scales});
    std::vector<std::string> types;
    for (std::size_t i = before; i < run.kernels().size(); ++i) types.push_back(run.kernels()[i].type);
    return types;
  };
  const std::vector<std::string> many = launches(4096, 128), few = launches(16, 128), narrow = launches(4096, 32);
  ASSERT_EQ(many.size(), 1u);
  EXPECT_NE(many[0].find("W4A8Gemm<"), std::string::npos) << many[0];
  ASSERT_EQ(few.size(), 2u);
  EXPECT_NE(few[1].find("SkinnyDequantGemm<"), std::string::npos) << few[1];
  ASSERT_GE(narrow.size(), 1u);
  EXPECT_NE(narrow.back().find("::DequantGemm<"), std::string::npos) << narrow.back();
}

/// Every tile, as models launch them.
TEST_F(W4A8, CompilesForGpusWithoutSpills) {
  skip_without_nvrtc();
  std::vector<KernelSpec> specs;
  for (const bool zeros : {false, true}) {
    for (const WideTile& tile : kW4A8Tiles) {
      for (const Activation activation : {zeros ? Activation::none : Activation::gelu_tanh, Activation::swiglu}) {
        const W4A8Kernel kernel{.zeros = zeros, .dtype = zeros ? DType::f16 : DType::bf16, .activation = activation, .tile = tile};
        specs.push_back(make_spec({type_of(kernel), "kernels/dequant_gemm/w4a8.tile.hpp", nullptr}, true, true));
      }
      const W4A8Kernel split{.zeros = zeros, .split = true, .tile = tile};
      specs.push_back(make_spec({type_of(split), "kernels/dequant_gemm/w4a8.tile.hpp", nullptr}, true, true));
    }
  }
  const auto check = [](const KernelSpec& spec, const CompiledKernel& kernel) {
    expect_fast(spec, kernel);
    EXPECT_NE(kernel.tensor_core_instruction.find("wgmma"), std::string::npos) << spec.type;
  };
  compile_and_check(specs, "sm_90a", check);
}

/// Every tile, with and without splits of K, through tensors with elements around them that must stay.
TEST_F(W4A8, EveryTileMultipliesOnAGpu_cuda) {
  skip_without_cuda();
  const Device gpu = Device::cuda();
  const Stream stream = Stream::standard(gpu);
  if (generic_shared_bytes(stream) > 0) GTEST_SKIP() << "kernels for Hopper GPUs";
  for (const bool zeros : {false, true}) {
    for (const DType dtype : {DType::bf16, DType::f16}) {
      for (const Activation activation : {Activation::none, Activation::swiglu}) {
        Case c{.m = 291, .n = 402, .k = 1152, .bias = true, .activation = activation};
        const Operands of(c, {WeightFormat::int4, 128, zeros}, dtype, random);
        const QuantizedMatrix w = of.w.to(gpu);
        PlacedTensor x({c.m, c.k}, DType::i8, gpu, {.gap = 16, .align = 16});
        x.fill(values_of(of.x));
        const Tensor x_scales = of.x_scales.to(gpu), bias = of.bias.to(gpu);
        const std::vector<Bounded> expected = of.expected(c, 0, 0);
        for (const WideTile& tile : kW4A8Tiles) {
          for (const int splits : {0, 1, 3}) {
            for (const std::int64_t gap : {6, 1}) {  // rows of y that TMA can store, and others
              SCOPED_TRACE(tw::format("zeros {} {} {} gap {}", zeros, name_of(dtype), describe(WidePlan{tile, splits}), gap));
              PlacedTensor y({c.m, c.columns()}, dtype, gpu, {.gap = gap}), again({c.m, c.columns()}, dtype, gpu, {.gap = gap});
              const bool ran = launched([&] {
                for (PlacedTensor* out : {&y, &again}) {
                  const DequantGemmOptions options{.bias = &bias, .activation = activation, .stream = stream, .x_scales = &x_scales};
                  run_w4a8({x, w, *out, options, stream}, {tile, splits});
                }
              });
              if (!ran) continue;
              const std::vector<double> results = y.values();
              EXPECT_EQ(results, again.values());
              expect_close(results, expected, dtype);
              EXPECT_TRUE(y.gaps_intact());
            }
          }
        }
      }
    }
  }
}

/// The other ways of the public function: few rows of x, and groups of 32.
TEST_F(W4A8, MultipliesOnAGpu_cuda) {
  skip_without_cuda();
  const Device gpu = Device::cuda();
  for (const Layout& layout : {Layout{WeightFormat::int4, 32, true}, Layout{WeightFormat::int4, 128}}) {
    for (const std::int64_t m : {1, 16, 17, 300}) {
      const Case c{.m = m, .n = 134, .k = 384, .bias = true};
      SCOPED_TRACE(tw::format("{} m {}", text_of(layout), m));
      const Operands of(c, layout, DType::bf16, random);
      const Tensor y = Tensor::poisoned({c.m, c.n}, DType::bf16, Stream::standard(gpu));
      const Tensor bias = of.bias.to(gpu), x_scales = of.x_scales.to(gpu);
      if (!launched([&] { tw::dequant_gemm(of.x.to(gpu), of.w.to(gpu), y, {.bias = &bias, .x_scales = &x_scales}); })) return;
      const std::vector<float> stored = values_of(y.to(Device::cpu()));
      const std::vector<double> results(stored.begin(), stored.end());
      expect_close(results, of.expected(c, 0x1p-8, 0x1p-8), DType::bf16);
    }
  }
}

}  // namespace
}  // namespace tw::kernels::dequant_gemm
