// The kernels for many rows of x, which dequant_gemm() uses on GPUs only: on the CPU target, on the analysis target and through the
// compiler.

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "kernels/dequant_gemm/kernels.hpp"
#include "kernels/dequant_gemm/reference.hpp"
#include "kernels/generic_tiles.hpp"
#include "runtime/dry_run.hpp"
#include "runtime/format.hpp"
#include "tests/compiled_kernels.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"
#include "tilewave/analyze.hpp"
#include "tilewave/tile/cpu/target.tile.hpp"
#include "tilewave/tile/cuda/code_pairs.tile.hpp"

namespace tw::kernels::dequant_gemm {
namespace {

using namespace tw::test;
using Layout = QuantizedMatrix::Layout;

// Those of kWideTiles in fewer slots, so that rings are used several times.
constexpr WideTile kTile32{256, 32, 2, 3, 2}, kTile64{192, 64, 2, 4, 2}, kTile128{128, 128, 2, 3, 2}, kTile256{128, 256, 2, 2, 2};

template <WeightFormat format, DType dtype, int group = 0, bool zeros = false, WideTile tile = kTile128,
          Activation activation = Activation::none, bool split = false>
constexpr WideKernel kKernel{format, group, zeros, dtype, activation, split, tile};

const std::vector<Layout> kEveryLayout = {{WeightFormat::int8},
                                          {WeightFormat::fp8},
                                          {WeightFormat::int4, 32, true},
                                          {WeightFormat::int4, 32},
                                          {WeightFormat::int4, 128, true},
                                          {WeightFormat::int4, 128},
                                          {WeightFormat::int2, 32, true},
                                          {WeightFormat::int2, 128},
                                          {WeightFormat::nf4},
                                          {WeightFormat::fp4},
                                          {WeightFormat::mxfp4}};

struct Case {
  std::int64_t m, n, k;
  int splits = 0;
  bool bias = false, accumulate = false;
  std::int64_t gap = 0;
};

/// Runs the kernels for one case on the CPU target, twice, and compares with loops in double.
template <WideKernel kernel>
void check(const Case& c, std::mt19937_64& random) {
  SCOPED_TRACE(tw::format("{} m {} n {} k {} splits {} bias {} accumulate {} gap {}", type_of(kernel), c.m, c.n, c.k, c.splits, c.bias,
                          c.accumulate, c.gap));
  const QuantizedMatrix w =
      quantize(Tensor::random({c.n, c.k}, DType::f32, random()), {kernel.format, kernel.group > 0 ? kernel.group : 32, kernel.zeros});
  const Device device = Device::cpu();
  PlacedTensor x({c.m, c.k}, kernel.dtype, device, {.gap = c.gap, .align = 8});
  constexpr bool pairs = kernel.activation == Activation::swiglu;
  const std::int64_t columns = pairs ? c.n / 2 : c.n;
  PlacedTensor y({c.m, columns}, kernel.dtype, device, {.gap = c.gap}), again({c.m, columns}, kernel.dtype, device);
  PlacedTensor bias({c.n}, kernel.dtype, device);
  const std::vector<float> inputs = x.fill_random(random), biases = bias.fill_random(random);
  std::vector<float> before(static_cast<std::size_t>(c.m * c.n), 0.0f);
  if (c.accumulate) before = y.fill_random(random), again.fill(before);
  const Stream stream = Stream::standard(device);
  for (PlacedTensor* out : {&y, &again}) {
    const DequantGemmOptions options{
        .accumulate = c.accumulate, .bias = c.bias ? &bias.tensor() : nullptr, .activation = kernel.activation};
    const Call call{x, w, *out, options, stream};
    const WidePlan plan{kernel.tile, c.splits};
    const Tensor partial = Tensor::poisoned({std::max(1, c.splits), c.n, (c.m + 3) / 4 * 4}, DType::f32).slice(2, 0, c.m);
    constexpr WideKernel product{
        kernel.format, kernel.group, kernel.zeros, kernel.dtype, kernel.split ? Activation::none : kernel.activation,
        kernel.split,  kernel.tile};
    launch_cpu<WideHostKernel<product>>(wide_grid(call, plan), [&](auto& bind, auto& p) { bind_wide(bind, p, call, plan, partial); });
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
  const Sums exact = plain(inputs, decode(w), c.m, c.n, c.k);
  const std::vector<double> results = y.values();
  EXPECT_EQ(results, again.values());
  const double last = kernel.dtype == DType::bf16 ? 0x1p-8 : 0x1p-11;
  // Weights in groups are rounded to x's type. Of f16, elements that are less than 2^-14 have an error of up to 2^-25; |x| < 6.
  const double weight = kernel.group > 0 ? last : 0, subnormal = kernel.group > 0 && kernel.dtype == DType::f16 ? 0x1p-25 * 6 : 0;
  const auto sum = [&](std::size_t i) {
    const double added = before[i] + (c.bias ? biases[i % static_cast<std::size_t>(c.n)] : 0.0f);
    const double error = ((static_cast<double>(c.k) + 8) * 0x1p-24 + weight) * (exact.magnitudes[i] + std::abs(added)) +
                         subnormal * static_cast<double>(c.k);
    return Bounded{exact.values[i] + added, error};
  };
  for (std::size_t i = 0; i < results.size(); ++i) {
    auto [expected, error] = pairs ? swiglu(sum(2 * i), sum(2 * i + 1)) : sum(i);
    if (kernel.activation == Activation::relu) expected = std::max(expected, 0.0);
    ASSERT_LE(std::abs(results[i] - expected), error * (1 + last) + last * std::abs(expected) + 0x1p-24)
        << i << ": " << results[i] << ", exactly " << expected;
  }
  EXPECT_TRUE(y.gaps_intact());
}

class WideDequantGemm : public testing::Test {
 protected:
  void SetUp() override { cpu::set_poison_released_slots(true); }
  std::mt19937_64 random = random_engine();
};

TEST_F(WideDequantGemm, OfInt8IsCorrectOnTheCpu) {
  for (const auto& [m, n, k] : {std::tuple{1, 1, 1}, {33, 300, 261}, {64, 257, 384}}) {
    check<kKernel<WeightFormat::int8, DType::bf16, 0, false, kTile32, Activation::relu>>({.m = m, .n = n, .k = k, .bias = true}, random);
    check<kKernel<WeightFormat::int8, DType::bf16, 0, false, kTile256>>({.m = 5 * m, .n = n, .k = k, .bias = true, .gap = 1}, random);
  }
}
TEST_F(WideDequantGemm, OfFp8IsCorrectOnTheCpu) {
  for (const auto& [m, n, k] : {std::tuple{1, 1, 3}, {129, 130, 261}, {64, 257, 384}}) {
    check<kKernel<WeightFormat::fp8, DType::f16>>({.m = m, .n = n, .k = k, .gap = 3}, random);
    check<kKernel<WeightFormat::fp8, DType::f16, 0, false, kTile64>>({.m = m, .n = n, .k = k, .bias = true}, random);
  }
}
TEST_F(WideDequantGemm, OfInt4IsCorrectOnTheCpu) {
  // A part of a slot, one slot, and several.
  for (const auto& [m, n, groups] : {std::tuple{1, 1, 1}, {17, 200, 8}, {65, 193, 21}}) {
    check<kKernel<WeightFormat::int4, DType::bf16, 32, true, kTile256>>({.m = 4 * m, .n = n, .k = 32 * groups, .bias = true}, random);
    check<kKernel<WeightFormat::int4, DType::f16, 32, false, kTile64>>({.m = m, .n = n, .k = 32 * groups}, random);
    check<kKernel<WeightFormat::int4, DType::f16, 128, true>>({.m = m, .n = n, .k = 128 * groups, .gap = 1}, random);
    check<kKernel<WeightFormat::int4, DType::bf16, 128, false, kTile32>>({.m = m, .n = n, .k = 128 * groups, .bias = true}, random);
  }
}
TEST_F(WideDequantGemm, OfOtherFormatsIsCorrectOnTheCpu) {
  for (const auto& [m, n, groups] : {std::tuple{1, 1, 1}, {37, 200, 13}}) {
    check<kKernel<WeightFormat::int2, DType::bf16, 32, false, kTile32>>({.m = m, .n = n, .k = 32 * groups, .bias = true}, random);
    check<kKernel<WeightFormat::int2, DType::f16, 128, true>>({.m = m, .n = n, .k = 128 * groups}, random);
    check<kKernel<WeightFormat::nf4, DType::bf16, 64, false, kTile32>>({.m = m, .n = n, .k = 64 * groups}, random);
    check<kKernel<WeightFormat::fp4, DType::bf16, 32>>({.m = m, .n = n, .k = 32 * groups, .gap = 1}, random);
    check<kKernel<WeightFormat::mxfp4, DType::f16, 32, false, kTile64>>({.m = m, .n = n, .k = 32 * groups, .bias = true}, random);
  }
}
TEST_F(WideDequantGemm, SplitsOfKAreCorrectOnTheCpu) {
  constexpr WideKernel int8 = kKernel<WeightFormat::int8, DType::bf16, 0, false, kTile32, Activation::relu, true>;
  constexpr WideKernel int4 = kKernel<WeightFormat::int4, DType::bf16, 32, true, kTile128, Activation::none, true>;
  for (const int splits : {1, 2, 3}) {
    check<int8>({.m = 37, .n = 130, .k = 1029, .splits = splits, .bias = true}, random);
    check<int4>({.m = 70, .n = 129, .k = 1440, .splits = splits, .bias = true, .accumulate = true, .gap = 1}, random);
  }
}
TEST_F(WideDequantGemm, GatesOnTheCpu) {
  constexpr Activation swiglu = Activation::swiglu;
  for (const auto& [m, n, k] : {std::tuple{1, 2, 128}, {37, 262, 384}, {300, 130, 1152}}) {
    check<kKernel<WeightFormat::int8, DType::bf16, 0, false, kTile32, swiglu>>({.m = m, .n = n, .k = k, .bias = true}, random);
    check<kKernel<WeightFormat::int4, DType::f16, 32, true, kTile64, swiglu>>({.m = m, .n = n, .k = k, .gap = 1}, random);
    check<kKernel<WeightFormat::nf4, DType::bf16, 64, false, kTile128, swiglu>>({.m = m, .n = n, .k = k, .bias = true}, random);
    check<kKernel<WeightFormat::int4, DType::bf16, 128, false, kTile256, swiglu>>({.m = m, .n = n, .k = k, .gap = 1}, random);
    check<kKernel<WeightFormat::mxfp4, DType::bf16, 32, false, kTile128, swiglu, true>>(
        {.m = m, .n = n, .k = k, .splits = k > 256 ? 2 : 1, .bias = true}, random);
  }
}
TEST_F(WideDequantGemm, NotANumberStaysInItsRow) {
  const QuantizedMatrix w = quantize(Tensor::random({40, 352}, DType::f32, random()), {WeightFormat::int4, 32});
  const Tensor x = Tensor::random({3, 352}, DType::f16, random()), y = Tensor::poisoned({3, 40}, DType::f16);
  x.data<f16>()[352 + 349] = f16(std::nanf(""));
  constexpr WideKernel kernel = kKernel<WeightFormat::int4, DType::f16, 32, false, kTile64>;
  const DequantGemmOptions options;
  const Call call{x, w, y, options, Stream::standard(Device::cpu())};
  const WidePlan plan{kernel.tile, 0};
  launch_cpu<WideHostKernel<kernel>>(wide_grid(call, plan), [&](auto& bind, auto& p) { bind_wide(bind, p, call, plan, {}); });
  for (std::int64_t i = 0; i < 120; ++i) EXPECT_EQ(std::isnan(y.at({i / 40, i % 40})), i / 40 == 1) << i;
}

/// The instructions that decode on a GPU, run here: every pair of codes, with every zero point, against the formula rounded once.
template <class T>
float half_of(u32 pair, int n) {
  return static_cast<float>(bit_cast<T>(static_cast<u16>(pair >> 16 * n)));
}
template <class T>
void check_pairs() {
  const std::vector<float> scales = {0.0f, 0x1p-24f, 1.0f, -0.37f, 0.0123f, 5e-6f, 1000.0f};
  for (const float exact_scale : scales) {
    const float scale = static_cast<float>(f16(exact_scale));
    for (u32 codes = 0; codes < 256; ++codes) {
      for (int zero = 0; zero < 16; ++zero) {
        using Pair = cuda::DecodePair<u4x2, T, FromZero>;
        const u32 pair = Pair::decode(codes, Pair::prepare({scale, static_cast<float>(zero)}));
        for (int n = 0; n < 2; ++n)
          ASSERT_EQ(half_of<T>(pair, n), static_cast<float>(T(static_cast<float>(static_cast<int>(codes >> 4 * n & 15u) - zero) * scale)))
              << codes << " zero " << zero << " scale " << scale;
      }
      using Floats = cuda::DecodePair<fp4x2, T, TimesF16>;
      const u32 floats = Floats::decode(codes, Floats::prepare(scale));
      for (int n = 0; n < 2; ++n)
        ASSERT_EQ(half_of<T>(floats, n), static_cast<float>(T(static_cast<float>(fp4x2{static_cast<u8>(codes)}.get(n)) * scale))) << codes;
      using Normals = cuda::DecodePair<u4x2, T, TimesNormalFloat>;
      const u32 normals = Normals::decode(codes, scale);
      for (int n = 0; n < 2; ++n)
        ASSERT_EQ(half_of<T>(normals, n), static_cast<float>(T(kNormalFloats[codes >> 4 * n & 15u] * scale))) << codes;
    }
    for (u32 codes = 0; codes < 16; ++codes) {
      for (int zero = 0; zero < 4; ++zero) {
        using Pair = cuda::DecodePair<u2x4, T, FromZero>;
        const u32 pair = Pair::decode(codes, Pair::prepare({scale, static_cast<float>(zero)}));
        for (int n = 0; n < 2; ++n)
          ASSERT_EQ(half_of<T>(pair, n), static_cast<float>(T(static_cast<float>(static_cast<int>(codes >> 2 * n & 3u) - zero) * scale)));
      }
    }
  }
  for (u32 codes = 0; codes < 65536; codes += 1 + codes % 7) {
    const u32 integers = cuda::DecodePair<i8, T, AsStored>::decode(codes, {}),
              floats = cuda::DecodePair<fp8_e4m3, T, AsStored>::decode(codes, {});
    for (int n = 0; n < 2; ++n) {
      const auto byte = static_cast<u8>(codes >> 8 * n);
      ASSERT_EQ(half_of<T>(integers, n), static_cast<float>(static_cast<i8>(byte)));
      if (byte % 128 == 127) continue;  // NaN, which a weight does not have
      const auto value = static_cast<float>(bit_cast<fp8_e4m3>(byte));
      ASSERT_EQ(half_of<T>(floats, n), value);
      ASSERT_EQ(std::signbit(half_of<T>(floats, n)), std::signbit(value));
    }
  }
}
TEST_F(WideDequantGemm, DecodesEveryPairOfCodesLikeTheFormula) {
  check_pairs<bf16>();
  check_pairs<f16>();
}
/// -0 stays -0, which a product of a scale with it must not change.
TEST_F(WideDequantGemm, KeepsTheSignOfZero) {
  using Pair = cuda::DecodePair<fp4x2, bf16, TimesF16>;
  EXPECT_EQ(Pair::decode(0x08, Pair::prepare(3.0f)), 0x00008000u);
  EXPECT_EQ(Pair::decode(0x80, Pair::prepare(3.0f)), 0x80000000u);
}

/// Every tile, with and without splits of K, through tensors with elements around them that must stay.
TEST_F(WideDequantGemm, EveryTileMultipliesOnAGpu_cuda) {
  skip_without_cuda();
  const Device gpu = Device::cuda();
  const Stream stream = Stream::standard(gpu);
  if (generic_shared_bytes(stream) > 0) GTEST_SKIP() << "kernels for Hopper GPUs";
  for (const Layout& layout : kEveryLayout) {
    for (const DType dtype : {DType::bf16, DType::f16}) {
      constexpr std::int64_t m = 291, n = 403, k = 1152;
      const QuantizedMatrix w = quantize(Tensor::random({n, k}, DType::f32, random()), layout), on_gpu = w.to(gpu);
      PlacedTensor x({m, k}, dtype, gpu, {.gap = 8}), bias({n}, dtype, gpu);
      const std::vector<float> inputs = x.fill_random(random), biases = bias.fill_random(random);
      const Sums exact = plain(inputs, decode(w), m, n, k);
      const double last = dtype == DType::bf16 ? 0x1p-8 : 0x1p-11, weight = codes_in_byte(layout.format) > 1 ? last : 0;
      for (const WideTile& tile : kWideTiles) {
        for (const int splits : {0, 1, 2, 3}) {
          for (const std::int64_t gap : {5, 1}) {  // rows of y that TMA can store, and others
            const bool accumulate = splits == 1;
            SCOPED_TRACE(tw::format("{} {} {} gap {}", text_of(layout), name_of(dtype), describe(WidePlan{tile, splits}), gap));
            PlacedTensor y({m, n}, dtype, gpu, {.gap = gap}), again({m, n}, dtype, gpu, {.gap = gap});
            std::vector<float> before(static_cast<std::size_t>(m * n), 0.0f);
            if (accumulate) before = y.fill_random(random), again.fill(before);
            const bool ran = launched([&] {
              for (PlacedTensor* out : {&y, &again}) {
                const DequantGemmOptions options{.accumulate = accumulate, .bias = &bias.tensor(), .stream = stream};
                run_wide({x, on_gpu, *out, options, stream}, {tile, splits});
              }
            });
            if (!ran) continue;
            const std::vector<double> results = y.values();
            EXPECT_EQ(results, again.values());
            for (std::size_t i = 0; i < results.size(); ++i) {
              const double added = before[i] + static_cast<double>(biases[i % n]), expected = exact.values[i] + added;
              const double error = (k * 0x1p-24 + weight) * (exact.magnitudes[i] + std::abs(added)) + (weight > 0 ? 0x1p-25 * 6 * k : 0);
              ASSERT_LE(std::abs(results[i] - expected), error * (1 + last) + last * std::abs(expected) + 0x1p-20) << i;
            }
            EXPECT_TRUE(y.gaps_intact());
          }
        }
      }
    }
  }
}

/// A call of a shape, without memory.
struct Shapes {
  Shapes(std::int64_t m, std::int64_t n, std::int64_t k, const Layout& layout, DType dtype = DType::bf16, bool accumulate = false)
      : x(placeholder({m, k}, dtype)), y(placeholder({m, n}, dtype)), options{.accumulate = accumulate} {
    weight = QuantizedMatrix::allocate(0, k, layout);
    for (Tensor* t : {&weight.values, &weight.scales, &weight.zeros}) {
      Shape shape = t->shape();
      if (shape.empty() || (t == &weight.zeros && !layout.zero_points)) continue;
      shape[0] = n;
      *t = placeholder(shape, t->dtype());
    }
  }
  Call call() const { return {x, weight, y, options, Stream::standard(Device::cpu())}; }

  Tensor x, y;
  QuantizedMatrix weight = {};
  DequantGemmOptions options;
};

TEST_F(WideDequantGemm, ReadsTheWeightOnceForEachColumnOfTiles) {
  constexpr std::int64_t m = 300, n = 256, k = 2048;
  const Shapes shapes(m, n, k, {WeightFormat::int4, 32, true});
  const Call call = shapes.call();
  const WidePlan plan{kTile256, 0};
  const Analysis counted = analyze<WideHostKernel<kKernel<WeightFormat::int4, DType::bf16, 32, true, kTile256>>>(
      wide_grid(call, plan), [&](auto& bind, auto& p) { bind_wide(bind, p, call, plan, {}); });
  constexpr std::int64_t tiles_of_x = 2, tiles_of_w = 2;
  EXPECT_EQ(counted.global_read, tiles_of_x * (n * k / 2 + n * (k / 32) * 3) + tiles_of_w * m * k * 2);
  EXPECT_EQ(counted.global_written, m * n * 2u);
  EXPECT_EQ(counted.operations.inside[static_cast<std::size_t>(OperandType::bf16)], 2u * m * n * k);
}

TEST_F(WideDequantGemm, IsChosenByTypeAndAlignment) {
  const Layout int8{WeightFormat::int8}, int4{WeightFormat::int4, 32};
  const auto chosen = [](const Shapes& shapes) { return is_wide(shapes.call()); };
  EXPECT_TRUE(chosen({17, 64, 2048, int8}));
  EXPECT_TRUE(chosen({4096, 64, 32, int4, DType::f16}));
  EXPECT_FALSE(chosen({17, 64, 2056, int8}));  // rows of W are not whole 16 bytes
  EXPECT_FALSE(chosen({17, 64, 2048, int8, DType::f32}));
  EXPECT_FALSE(chosen({17, 64, 0, int8}));
}

TEST_F(WideDequantGemm, PlansFillTheMultiprocessors) {
  const Layout int4{WeightFormat::int4, 128};
  const auto plan = [](const Shapes& shapes) { return plan_wide(shapes.call(), 132); };
  const WidePlan large = plan({4096, 4096, 4096, int4});
  EXPECT_EQ(large.tile, kWideTiles[3]);
  EXPECT_EQ(large.splits, 0);
  const WidePlan small = plan({32, 4096, 4096, int4});
  EXPECT_EQ(small.tile, kWideTiles[0]);
  EXPECT_GE(small.splits * 16, 100);  // tiles
  EXPECT_EQ(plan({64, 4096, 4096, int4}).tile, kWideTiles[1]);
  // y is added to where the splits are.
  EXPECT_GE(plan({4096, 4096, 4096, int4, DType::bf16, true}).splits, 1);
  // The least K has one split.
  EXPECT_EQ(plan({4096, 64, 32, {WeightFormat::int4, 32}}).splits, 0);
}

TEST_F(WideDequantGemm, LaunchesNothingElse) {
  DryRun run(typical_gpu("sm_90a"));
  const Stream stream(run.device());
  const QuantizedMatrix w = QuantizedMatrix::allocate(4096, 4096, {WeightFormat::int4, 128}).to(run.device());
  const auto launches = [&](std::int64_t m, bool accumulate) {
    const Tensor x = Tensor::empty({m, 4096}, DType::bf16, stream), y = Tensor::empty({m, 4096}, DType::bf16, stream);
    const std::size_t before = run.kernels().size();
    tw::dequant_gemm(x, w, y, {.accumulate = accumulate, .stream = stream});
    std::vector<std::string> types;
    for (std::size_t i = before; i < run.kernels().size(); ++i) types.push_back(run.kernels()[i].type);
    return types;
  };
  const std::vector<std::string> one = launches(4096, false), two = launches(4096, true);
  ASSERT_EQ(one.size(), 1u);
  EXPECT_NE(one[0].find("::DequantGemm<"), std::string::npos) << one[0];
  ASSERT_EQ(two.size(), 2u);
  EXPECT_NE(two[1].find("SumTransposed"), std::string::npos) << two[1];
}

/// Every tile of every format, as models launch them.
TEST_F(WideDequantGemm, CompilesForGpusWithoutSpills) {
  skip_without_nvrtc();
  std::vector<KernelSpec> specs;
  const auto add = [&](const std::string& type) {
    specs.push_back(make_spec({type, "kernels/dequant_gemm/dequant_gemm.tile.hpp", nullptr}, true, true));
  };
  for (const Layout& layout : kEveryLayout) {
    for (const WideTile& tile : kWideTiles) {
      const DType dtype = layout.group == 128 || layout.format == WeightFormat::mxfp4 ? DType::f16 : DType::bf16;
      Shapes shapes(64, 4096, 4096, layout, dtype);
      shapes.options.activation = layout.format == WeightFormat::int8 ? Activation::gelu_erf : Activation::none;
      add(type_of(wide_kernel(shapes.call(), {tile, 0})));
      // How a sum ends does not depend on how its weights are decoded.
      if (layout.format != WeightFormat::int8 && layout.format != WeightFormat::nf4 && !(layout.group == 32 && layout.zero_points))
        continue;
      add(type_of(wide_kernel(shapes.call(), {tile, 2})));
      shapes.options.activation = Activation::swiglu;
      add(type_of(wide_kernel(shapes.call(), {tile, 0})));
    }
  }
  for (const bool addends : {false, true}) add(type_of(WideSum{DType::bf16, Activation::none, addends}));
  add(type_of(WideSum{DType::bf16, Activation::swiglu, false}));
  const auto check = [](const KernelSpec& spec, const CompiledKernel& kernel) {
    expect_fast(spec, kernel);
    const bool multiplies = spec.type.find("SumTransposed") == std::string::npos;
    EXPECT_EQ(kernel.tensor_core_instruction.find("wgmma") != std::string::npos, multiplies) << spec.type;
  };
  compile_and_check(specs, "sm_90a", check);
}

}  // namespace
}  // namespace tw::kernels::dequant_gemm
