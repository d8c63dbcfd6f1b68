// The kernel for few rows of x, which dequant_gemm() uses on GPUs only: on the CPU target, on the analysis target and through the compiler.

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/dequant_gemm/reference.hpp"
#include "kernels/dequant_gemm/skinny.hpp"
#include "runtime/dry_run.hpp"
#include "runtime/format.hpp"
#include "tests/compiled_kernels.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"
#include "tilewave/analyze.hpp"
#include "tilewave/tile/cpu/target.tile.hpp"
#include "tilewave/tile/cuda/divided_codes.tile.hpp"

namespace tw::kernels::dequant_gemm {
namespace {

using namespace tw::test;
using Layout = QuantizedMatrix::Layout;

constexpr SkinnyTile kTile8{32, 8, 3}, kTile16{32, 16, 2, 8, 1}, kShort{16, 8, 2}, kShort16{16, 16, 2, 8, 1};
constexpr SkinnyTile kOne{32, 1, 3}, kShortOne{16, 1, 2};
constexpr SkinnyTile kFewWarps{16, 8, 2, 4, 3}, kManyWarps{16, 8, 2, 16, 1};

template <WeightFormat format, DType dtype, int group = 0, bool zeros = false, bool addends = false, SkinnyTile tile = kTile8,
          Activation activation = Activation::none>
constexpr SkinnyKernel kKernel{format, group, zeros, dtype, activation, addends, tile};

/// Whether the group is for the caller to choose.
constexpr bool has_groups(WeightFormat format) { return format == WeightFormat::int4 || format == WeightFormat::int2; }

struct Case {
  std::int64_t m, n, k;
  bool bias = false;
  std::int64_t gap = 0, offset = 0;
};

template <SkinnyKernel kernel>
void launch_on_cpu(const Call& call) {
  launch_cpu<SkinnyHostKernel<kernel>>(skinny_grid(call, kernel.tile), [&](auto& bind, auto& p) { bind_skinny(bind, p, call); });
}

/// Runs the kernel for one case on the CPU target, twice, and compares with loops in double.
template <SkinnyKernel kernel>
void check(const Case& c, std::mt19937_64& random) {
  SCOPED_TRACE(tw::format("{} m {} n {} k {} bias {} gap {} offset {}", type_of(kernel), c.m, c.n, c.k, c.bias, c.gap, c.offset));
  const Layout layout = has_groups(kernel.format) ? Layout{kernel.format, kernel.group, kernel.zeros} : Layout{kernel.format};
  const QuantizedMatrix w = quantize(Tensor::random({c.n, c.k}, DType::f32, random()), layout);
  const Device device = Device::cpu();
  PlacedTensor x({c.m, c.k}, kernel.dtype, device, {.offset = c.offset, .gap = c.gap});
  constexpr bool pairs = kernel.activation == Activation::swiglu;
  const std::int64_t columns = pairs ? c.n / 2 : c.n;
  PlacedTensor y({c.m, columns}, kernel.dtype, device, {.offset = c.offset, .gap = c.gap}), again({c.m, columns}, kernel.dtype, device);
  PlacedTensor bias({c.n}, kernel.dtype, device);
  const std::vector<float> inputs = x.fill_random(random), biases = bias.fill_random(random);
  std::vector<float> before(static_cast<std::size_t>(c.m * c.n), 0.0f);
  if (kernel.addends) before = y.fill_random(random), again.fill(before);
  const DequantGemmOptions options{
      .accumulate = kernel.addends, .bias = c.bias ? &bias.tensor() : nullptr, .activation = kernel.activation, .constant_weight = true};
  const Stream stream = Stream::standard(device);
  launch_on_cpu<kernel>({x, w, y, options, stream});
  launch_on_cpu<kernel>({x, w, again, options, stream});

  const Sums exact = plain(inputs, decode(w), c.m, c.n, c.k);
  const std::vector<double> results = y.values();
  EXPECT_EQ(results, again.values());
  const double last = kernel.dtype == DType::bf16 ? 0x1p-8 : 0x1p-11;
  const auto sum = [&](std::size_t i) {
    const double added = before[i] + (c.bias ? biases[i % static_cast<std::size_t>(c.n)] : 0.0f);
    // Codes are exact, but for nf4's numbers: every product and sum is rounded in f32, one after the other at worst, and the result once.
    double error = (static_cast<double>(c.k) + 8) * 0x1p-24 * (exact.magnitudes[i] + std::abs(added));
    if (kernel.format == WeightFormat::nf4) error += last / 2 * exact.magnitudes[i];
    return Bounded{exact.values[i] + added, error};
  };
  for (std::size_t i = 0; i < results.size(); ++i) {
    auto [expected, error] = pairs ? swiglu(sum(2 * i), sum(2 * i + 1)) : sum(i);
    if (kernel.activation == Activation::relu) expected = std::max(expected, 0.0);
    ASSERT_LE(std::abs(results[i] - expected), error + last * std::abs(expected) + 0x1p-24)
        << i << ": " << results[i] << ", exactly " << expected;
  }
  EXPECT_TRUE(y.gaps_intact());
}

template <WeightFormat format, DType dtype, int group = 0, bool zeros = false>
void check_format() {
  cpu::set_poison_released_slots(true);
  std::mt19937_64 random = random_engine();
  // One group, one less and one more than a slot, several slots; int8 and fp8 have no groups, so any K.
  const std::int64_t unit = group > 0 ? group : 32, odd = group > 0 ? 0 : 5;
  for (const std::int64_t k : {unit + odd, 1024 - unit + odd, std::int64_t{1024}, 2048 + unit + odd}) {
    for (const std::int64_t n : {1, 33, 70}) {
      check<kKernel<format, dtype, group, zeros>>({.m = 1, .n = n, .k = k, .bias = true}, random);
      check<kKernel<format, dtype, group, zeros>>({.m = 8, .n = n, .k = k, .gap = 3, .offset = 1}, random);
      check<kKernel<format, dtype, group, zeros, true, kTile16>>({.m = 13, .n = n, .k = k, .bias = true, .gap = 1}, random);
      check<kKernel<format, dtype, group, zeros, true, kShort>>({.m = 2, .n = n, .k = k}, random);
      check<kKernel<format, dtype, group, zeros, false, kShort16, Activation::relu>>({.m = 16, .n = n, .k = k, .bias = true}, random);
    }
  }
}

TEST(SkinnyDequantGemm, OtherNumbersOfWarpsAreCorrectOnTheCpu) {
  std::mt19937_64 random = random_engine();
  for (const std::int64_t m : {1, 7}) {
    check<kKernel<WeightFormat::int8, DType::bf16, 0, false, true, kFewWarps>>({.m = m, .n = 37, .k = 1317, .bias = true}, random);
    check<kKernel<WeightFormat::int4, DType::bf16, 32, true, false, kFewWarps>>({.m = m, .n = 37, .k = 1568}, random);
    check<kKernel<WeightFormat::int8, DType::bf16, 0, false, false, kManyWarps>>({.m = m, .n = 37, .k = 4133}, random);
    check<kKernel<WeightFormat::int4, DType::bf16, 128, false, true, kManyWarps>>({.m = m, .n = 37, .k = 4224, .bias = true}, random);
  }
}

template <WeightFormat format, int group = 0, bool zeros = false>
void check_pairs() {
  cpu::set_poison_released_slots(true);
  std::mt19937_64 random = random_engine();
  for (const std::int64_t n : {2, 34, 70}) {
    check<kKernel<format, DType::bf16, group, zeros, false, kTile8, Activation::swiglu>>({.m = 1, .n = n, .k = 1152, .bias = true}, random);
    check<kKernel<format, DType::f16, group, zeros, false, kTile16, Activation::swiglu>>({.m = 13, .n = n, .k = 128, .gap = 1}, random);
    check<kKernel<format, DType::bf16, group, zeros, false, kShort, Activation::swiglu>>({.m = 7, .n = n, .k = 384, .bias = true}, random);
    check<kKernel<format, DType::f16, group, zeros, false, kManyWarps, Activation::swiglu>>({.m = 8, .n = n, .k = 384}, random);
  }
}
TEST(SkinnyDequantGemm, GatesOnTheCpu) {
  check_pairs<WeightFormat::int8>();
  check_pairs<WeightFormat::int4, 32, true>();
  check_pairs<WeightFormat::mxfp4, 32>();
}

TEST(SkinnyDequantGemm, OfInt8IsCorrectOnTheCpu) {
  check_format<WeightFormat::int8, DType::bf16>();
  check_format<WeightFormat::int8, DType::f16>();
}
TEST(SkinnyDequantGemm, OfFp8IsCorrectOnTheCpu) {
  check_format<WeightFormat::fp8, DType::bf16>();
  check_format<WeightFormat::fp8, DType::f16>();
}
TEST(SkinnyDequantGemm, OfInt4InGroupsOf32IsCorrectOnTheCpu) {
  check_format<WeightFormat::int4, DType::bf16, 32>();
  check_format<WeightFormat::int4, DType::f16, 32, true>();
}
TEST(SkinnyDequantGemm, OfInt4InGroupsOf128IsCorrectOnTheCpu) {
  check_format<WeightFormat::int4, DType::f16, 128>();
  check_format<WeightFormat::int4, DType::bf16, 128, true>();
}

TEST(SkinnyDequantGemm, OfInt2IsCorrectOnTheCpu) {
  check_format<WeightFormat::int2, DType::bf16, 32, true>();
  check_format<WeightFormat::int2, DType::f16, 128>();
}
TEST(SkinnyDequantGemm, OfNormalFloatsIsCorrectOnTheCpu) {
  check_format<WeightFormat::nf4, DType::bf16, 64>();
  check_format<WeightFormat::nf4, DType::f16, 64>();
}
TEST(SkinnyDequantGemm, OfFloatsOfFourBitsIsCorrectOnTheCpu) {
  check_format<WeightFormat::fp4, DType::bf16, 32>();
  check_format<WeightFormat::mxfp4, DType::bf16, 32>();
  check_format<WeightFormat::mxfp4, DType::f16, 32>();
}

TEST(SkinnyDequantGemm, OneRowInTheRingIsCorrectOnTheCpu) {
  cpu::set_poison_released_slots(true);
  std::mt19937_64 random = random_engine();
  for (const std::int64_t k : {128, 1024, 2176}) {
    for (const std::int64_t n : {1, 70}) {
      const Case c{.m = 1, .n = n, .k = k, .bias = true};
      check<kKernel<WeightFormat::int4, DType::bf16, 32, true, false, kOne>>(c, random);
      check<kKernel<WeightFormat::int4, DType::f16, 128, false, true, kShortOne>>(c, random);
      check<kKernel<WeightFormat::nf4, DType::bf16, 64, false, false, kOne>>(c, random);
      check<kKernel<WeightFormat::mxfp4, DType::bf16, 32, false, false, kOne>>(c, random);
    }
  }
}

TEST(SkinnyDequantGemm, EveryNumberOfRowsIsCorrect) {
  std::mt19937_64 random = random_engine();
  for (std::int64_t m = 1; m <= 16; ++m)
    check<kKernel<WeightFormat::int4, DType::bf16, 32, false, false, kTile16>>({.m = m, .n = 37, .k = 1056, .gap = m % 3}, random);
}

TEST(SkinnyDequantGemm, NotANumberStaysInItsRow) {
  std::mt19937_64 random = random_engine();
  const QuantizedMatrix w = quantize(Tensor::random({40, 1088}, DType::f32, random()), {WeightFormat::int4, 32});
  const Tensor x = Tensor::random({3, 1088}, DType::bf16, random()), y = Tensor::poisoned({3, 40}, DType::bf16);
  x.data<bf16>()[1088 + 1085] = bf16(std::nanf(""));
  launch_on_cpu<kKernel<WeightFormat::int4, DType::bf16, 32>>({x, w, y, {}, Stream::standard(Device::cpu())});
  for (std::int64_t i = 0; i < 120; ++i) EXPECT_EQ(std::isnan(y.at({i / 40, i % 40})), i / 40 == 1) << i;
}

/// What a lane decodes, by the same instructions on the CPU: every code of every type, at every place of a word.
template <class Codes, class T>
std::vector<float> decoded(const u32* words, u32 minus_zero) {
  u32 pairs[4];
  cuda::CodePairs<Codes, T>::decode(words, minus_zero, pairs);
  std::vector<float> values;
  for (const u32 pair : pairs)
    for (int n = 0; n < 2; ++n) values.push_back(static_cast<float>(bit_cast<T>(static_cast<u16>(pair >> 16 * n))));
  return values;
}
/// Codes in groups: every code and zero point at every place. `number_of` is a code's number, less its zero point.
template <class Codes, class T>
void check_groups(auto number_of) {
  using Pairs = cuda::CodePairs<Codes, T>;
  constexpr bool from_zero = requires { Pairs::minus(0u); };
  constexpr int bits = std::is_same_v<Codes, u2x4> ? 2 : 4;
  constexpr u32 codes = 1u << bits;
  for (u32 code = 0; code < codes; ++code) {
    for (u32 zero = 0; zero < (from_zero ? codes : 1u); ++zero) {
      for (int place = 0; place < 8; ++place) {
        const u32 word = ((0x9c3a5f07u & ~((codes - 1u) << bits * place)) | code << bits * place) & (bits == 4 ? ~0u : 0xffffu);
        u32 minus_zero = 0;
        if constexpr (from_zero) minus_zero = Pairs::minus(zero);
        const std::vector<float> values = decoded<Codes, T>(&word, minus_zero);
        if constexpr (requires { requires Pairs::can_raise; }) {
          u32 raised[4];
          Pairs::raise(&word, raised);
          for (std::size_t n = 0; n < 8; ++n)
            EXPECT_EQ(static_cast<float>(bit_cast<T>(static_cast<u16>(raised[n / 2] >> 16 * (n % 2)))), values[n] + Pairs::raised_by(zero));
        }
        // The other operand's eight elements, numbered, show the order.
        u32 numbers[4];
        for (u32 n = 0; n < 4; ++n)
          numbers[n] = bit_cast<u16>(T(static_cast<float>(2 * n))) | u32{bit_cast<u16>(T(static_cast<float>(2 * n + 1)))} << 16;
        for (int k = 0; k < 4; ++k) {
          for (int n = 0; n < 2; ++n) {
            const auto index = static_cast<int>(static_cast<float>(bit_cast<T>(static_cast<u16>(Pairs::pair_of(numbers, k) >> 16 * n))));
            EXPECT_EQ(values[static_cast<std::size_t>(2 * k + n)],
                      number_of(word >> bits * index & (codes - 1u)) - static_cast<float>(zero));
          }
        }
      }
    }
  }
}
template <class T>
void check_decoding() {
  for (u32 code = 0; code < 256; ++code) {
    for (int place = 0; place < 8; ++place) {
      u8 bytes[8];
      for (int n = 0; n < 8; ++n) bytes[n] = static_cast<u8>(n == place ? code : 37 * n + 1);
      u32 words[2];
      std::memcpy(words, bytes, 8);
      const std::vector<float> integers = decoded<i8, T>(words, 0), floats = decoded<fp8_e4m3, T>(words, 0);
      for (std::size_t n = 0; n < 8; ++n) {
        EXPECT_EQ(integers[n], static_cast<float>(static_cast<i8>(bytes[n]))) << int{bytes[n]};
        if (bytes[n] % 128 == 127) continue;  // NaN, which a weight does not have
        EXPECT_EQ(floats[n], static_cast<float>(bit_cast<fp8_e4m3>(bytes[n]))) << int{bytes[n]};
      }
    }
  }
  check_groups<u4x2, T>([](u32 code) { return static_cast<float>(code); });
  check_groups<u2x4, T>([](u32 code) { return static_cast<float>(code); });
  check_groups<fp4x2, T>([](u32 code) { return static_cast<float>(fp4x2{static_cast<u8>(code)}.get(0)); });
  check_groups<cuda::NormalFloatCodes, T>([](u32 code) { return static_cast<float>(T(kNormalFloats[code])); });
}
TEST(SkinnyDequantGemm, DecodesEveryCodeExactly) {
  check_decoding<bf16>();
  check_decoding<f16>();
}

/// A call of a shape, without memory.
struct Shapes {
  Shapes(std::int64_t m, std::int64_t n, std::int64_t k, const Layout& layout, DType dtype = DType::bf16, bool accumulate = false)
      : x(placeholder({m, k}, dtype)), y(placeholder({m, n}, dtype)), options{.accumulate = accumulate} {
    weight.format = layout.format;
    if (codes_in_byte(layout.format) > 1) {
      const bool normal = layout.format == WeightFormat::nf4;
      weight.group = normal ? 64 : layout.group;
      weight.values = placeholder({n, k / codes_in_byte(layout.format)}, DType::u8);
      const DType scale = normal ? DType::f32 : layout.format == WeightFormat::mxfp4 ? DType::u8 : DType::f16;
      weight.scales = placeholder({n, k / weight.group}, scale);
      if (layout.zero_points) weight.zeros = placeholder({n, k / weight.group}, DType::u8);
    } else {
      weight.values = placeholder({n, k}, layout.format == WeightFormat::int8 ? DType::i8 : DType::fp8_e4m3);
      weight.scales = placeholder({n}, DType::f32);
    }
  }
  Call call() const { return {x, weight, y, options, Stream::standard(Device::cpu())}; }

  Tensor x, y;
  QuantizedMatrix weight = {};
  DequantGemmOptions options;
};

TEST(SkinnyDequantGemm, ReadsTheWeightOnce) {
  constexpr std::int64_t m = 5, n = 96, k = 2048;
  const auto count = [&]<SkinnyKernel kernel>(const Layout& layout) {
    const Shapes shapes(m, n, k, layout);
    const Call call = shapes.call();
    return analyze<SkinnyHostKernel<kernel>>(skinny_grid(call, kernel.tile), [&](auto& bind, auto& p) { bind_skinny(bind, p, call); });
  };
  const Analysis int8 = count.operator()<kKernel<WeightFormat::int8, DType::bf16>>({WeightFormat::int8});
  const Analysis nf4 = count.operator()<kKernel<WeightFormat::nf4, DType::bf16, 64>>({WeightFormat::nf4});
  const Analysis int4 = count.operator()<kKernel<WeightFormat::int4, DType::bf16, 32, true>>({WeightFormat::int4, 32, true});
  const std::uint64_t x = 3 * m * k * 2;  // once for each 32 rows of W
  EXPECT_EQ(int8.global_read, x + n * k + n * 4);
  EXPECT_EQ(int4.global_read, x + n * k / 2 + n * (k / 32) * 3);
  EXPECT_EQ(nf4.global_read, x + n * k / 2 + n * (k / 64) * 4);
  for (const Analysis& each : {int8, int4, nf4}) {
    EXPECT_EQ(each.global_written, m * n * 2u);
    EXPECT_EQ(each.operations.inside[static_cast<std::size_t>(OperandType::bf16)], 2u * m * n * k);
  }
}

TEST(SkinnyDequantGemm, IsChosenByRowsAndAlignment) {
  const Layout int8{WeightFormat::int8}, int4{WeightFormat::int4, 32}, int2{WeightFormat::int2, 32}, nf4{WeightFormat::nf4};
  const auto chosen = [](const Shapes& shapes) { return is_skinny(shapes.call()); };
  EXPECT_TRUE(chosen({1, 64, 2048, int8}));
  EXPECT_TRUE(chosen({16, 64, 32, int4, DType::f16}));
  EXPECT_TRUE(chosen({16, 64, 64, int2}));
  EXPECT_TRUE(chosen({1, 64, 64, nf4}));
  EXPECT_FALSE(chosen({17, 64, 2048, int8}));
  EXPECT_FALSE(chosen({1, 64, 32, int2}));    // 8 bytes
  EXPECT_FALSE(chosen({1, 64, 2056, int8}));  // rows of W are not whole 16 bytes
  EXPECT_FALSE(chosen({1, 64, 2048, int8, DType::f32}));
  EXPECT_FALSE(chosen({1, 64, 0, int8}));
  const auto tile = [](const Shapes& shapes, std::int64_t generic = 0) { return skinny_kernel(shapes.call(), 132, generic).tile; };
  EXPECT_EQ(tile({1, 12288, 2048, int8}), (SkinnyTile{32, 8, 3, 8, 2}));
  EXPECT_EQ(tile({8, 12288, 2048, int8}), (SkinnyTile{32, 8, 3, 8, 2}));
  EXPECT_EQ(tile({8, 3072, 2048, int8}), (SkinnyTile{16, 8, 6, 8, 2}));
  EXPECT_EQ(tile({9, 12288, 2048, int4}), (SkinnyTile{32, 16, 6, 8, 1}));
  EXPECT_EQ(tile({9, 8192, 2048, int4}), (SkinnyTile{64, 16, 3, 8, 1}));      // one round of tiles
  EXPECT_EQ(tile({9, 8192, 2048, {WeightFormat::int4, 32, true}}).rows, 32);  // zero points take registers
  EXPECT_EQ(tile({1, 2048, 6144, int4}), (SkinnyTile{16, 1, 6, 8, 2}));
  EXPECT_EQ(tile({1, 3072, 2048, int4}), (SkinnyTile{32, 1, 4, 8, 2}));
  EXPECT_EQ(tile({1, 12288, 2048, int2}), (SkinnyTile{64, 1, 4, 8, 2}));
  EXPECT_EQ(tile({1, 2048, 6144, int4}, 99 << 10).x_rows, 8);
  EXPECT_EQ(tile({1, 2048, 6112, int4}).x_rows, 8);  // rows of scales are not whole 16 bytes
  EXPECT_EQ(tile({9, 12288, 2048, int8}, 99 << 10), (SkinnyTile{32, 16, 2, 8, 1}));
}

/// A decoding step calls it in a captured graph, so it must neither allocate nor launch anything else.
TEST(SkinnyDequantGemm, IsOneLaunch) {
  DryRun run(typical_gpu("sm_90a"));
  const Stream stream(run.device());
  for (const Layout& layout : {Layout{WeightFormat::int8}, Layout{WeightFormat::int4, 32, true}, Layout{WeightFormat::int2, 32},
                               Layout{WeightFormat::nf4}, Layout{WeightFormat::fp4}, Layout{WeightFormat::mxfp4}}) {
    const QuantizedMatrix w = QuantizedMatrix::allocate(2048, 6144, layout).to(run.device());
    const Tensor bias = Tensor::empty({2048}, DType::bf16, stream);
    for (const std::int64_t m : {1, 16}) {
      const Tensor x = Tensor::empty({m, 6144}, DType::bf16, stream), y = Tensor::empty({m, 2048}, DType::bf16, stream);
      const std::size_t before = run.kernels().size();
      tw::dequant_gemm(x, w, y, {.accumulate = true, .bias = &bias, .stream = stream, .constant_weight = true});
      ASSERT_EQ(run.kernels().size(), before + 1);
      EXPECT_NE(run.kernels().back().type.find("SkinnyDequantGemm"), std::string::npos);
    }
  }
  EXPECT_EQ(run.kernels().size(), 12u);
}

/// What models launch, on Hopper GPUs and on others: every format with the tiles of narrow and of wide layers.
TEST(SkinnyDequantGemm, CompilesForGpusWithoutSpills) {
  skip_without_nvrtc();
  for (const GpuTarget target : {GpuTarget::automatic, GpuTarget::cuda}) {
    std::vector<KernelSpec> specs;
    const std::int64_t generic = target == GpuTarget::cuda ? 99 << 10 : 0;
    for (const Layout& layout :
         {Layout{WeightFormat::int8}, Layout{WeightFormat::fp8}, Layout{WeightFormat::int4, 32}, Layout{WeightFormat::int4, 128, true},
          Layout{WeightFormat::int2, 32, true}, Layout{WeightFormat::nf4}, Layout{WeightFormat::fp4}, Layout{WeightFormat::mxfp4}}) {
      for (const auto& [m, n] : {std::pair{1, 2048}, std::pair{1, 12288}, std::pair{8, 12288}, std::pair{16, 8192}}) {
        if (target == GpuTarget::cuda && m < 16) continue;  // the most registers are enough
        const Shapes shapes(m, n, 2048, layout, layout.zero_points ? DType::f16 : DType::bf16, n == 2048);
        const std::string type = type_of(skinny_kernel(shapes.call(), 132, generic));
        specs.push_back(make_spec({type, "kernels/dequant_gemm/skinny.tile.hpp", nullptr}, true, true));
        if (target == GpuTarget::cuda) specs.back() = for_target(specs.back(), target);
        if (layout.group != 128) continue;
        SkinnyKernel gated = skinny_kernel(shapes.call(), 132, generic);
        gated.activation = Activation::swiglu, gated.addends = false;
        specs.push_back(make_spec({type_of(gated), "kernels/dequant_gemm/skinny.tile.hpp", nullptr}, true, true));
        if (target == GpuTarget::cuda) specs.back() = for_target(specs.back(), target);
      }
    }
    const auto check = [](const KernelSpec& spec, const CompiledKernel& kernel) {
      expect_fast(spec, kernel);
      EXPECT_NE(kernel.tensor_core_instruction.find("mma.sync"), std::string::npos) << spec.type;
    };
    compile_and_check(specs, target == GpuTarget::cuda ? "sm_86" : "sm_90a", check);
  }
}

}  // namespace
}  // namespace tw::kernels::dequant_gemm
