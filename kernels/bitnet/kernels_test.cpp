// The GPU's kernels on the CPU target, on the analysis target and through the compiler.

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "kernels/bitnet/kernels.hpp"
#include "kernels/bitnet/product_case.hpp"
#include "kernels/generic_tiles.hpp"
#include "runtime/dry_run.hpp"
#include "runtime/format.hpp"
#include "tests/compiled_kernels.hpp"
#include "tilewave/analyze.hpp"
#include "tilewave/tile/cpu/target.tile.hpp"
#include "tilewave/tile/cuda/divided_codes.tile.hpp"

namespace tw::kernels::bitnet {
namespace {

using namespace tw::test;

class BitNetKernels : public testing::Test {
 protected:
  void SetUp() override { cpu::set_poison_released_slots(true); }

  template <SkinnyKernel kernel>
  void check_skinny(const ProductCase& c) {
    SCOPED_TRACE(tw::format("{} m {} n {} k {}", type_of(kernel), c.m, c.n, c.k));
    const ProductOperands of(c, kernel.dtype, Device::cpu(), random);
    const BitLinearOptions options{.accumulate = c.accumulate, .bias = c.bias ? &of.bias.tensor() : nullptr, .constant_weight = true};
    const Call call{of.x, of.x_scales, of.weight, of.y, options, Stream::standard(Device::cpu())};
    launch_cpu<SkinnyHostKernel<kernel>>(skinny_grid(call, kernel.tile), [&](auto& bind, auto& p) { bind_skinny(bind, p, call); });
    of.expect_right(kernel.dtype);
  }
  template <WideKernel kernel>
  void check_wide(const ProductCase& c) {
    SCOPED_TRACE(tw::format("{} m {} n {} k {}", type_of(kernel), c.m, c.n, c.k));
    const ProductOperands of(c, kernel.dtype, Device::cpu(), random);
    const BitLinearOptions options{.bias = c.bias ? &of.bias.tensor() : nullptr};
    const Call call{of.x, of.x_scales, of.weight, of.y, options, Stream::standard(Device::cpu())};
    const bool transposed = kernel.tile.x_rows >= 128 && size_of(kernel.dtype) == 2;
    launch_cpu<WideHostKernel<kernel>>(wide_grid(call, kernel.tile),
                                       [&](auto& bind, auto& p) { bind_wide(bind, p, call, of.y, c.bias, transposed); });
    of.expect_right(kernel.dtype);
  }
  std::mt19937_64 random = random_engine();
};

TEST_F(BitNetKernels, ProductsOfFewRowsAreExactOnTheCpu) {
  constexpr SkinnyKernel narrow{DType::bf16, false, {16, 8, 2}}, wide{DType::f32, true, {32, 16, 2, 8, 1}};
  constexpr SkinnyKernel four_warps{DType::f16, false, {32, 8, 2, 4, 2}};
  for (const std::int64_t k : {64, 1984, 2048, 4160}) {
    check_skinny<narrow>({.m = 1, .n = 33, .k = k});
    check_skinny<narrow>({.m = 8, .n = 16, .k = k, .bias = true, .gap = 3});
    check_skinny<wide>({.m = 13, .n = 70, .k = k, .bias = true, .accumulate = true});
    check_skinny<four_warps>({.m = 5, .n = 31, .k = k, .gap = 1});
  }
}

// Those of kWideTiles in fewer slots, so that rings are used several times.
constexpr WideTile kTile64x32{64, 32, 2, 3, 2}, kTile64x64{64, 64, 2, 3, 2}, kTile32{256, 32, 2, 3, 2}, kTile64{192, 64, 2, 4, 2},
    kTile128{128, 128, 2, 3, 2}, kTile256{128, 256, 2, 2, 2};

TEST_F(BitNetKernels, ProductsOfManyRowsAreExactOnTheCpu) {
  for (const auto& [m, n, k] : {std::tuple{1, 1, 64}, {33, 300, 704}, {140, 257, 1088}}) {
    check_wide<WideKernel{DType::bf16, kTile32}>({.m = m, .n = n, .k = k, .bias = true, .align = 16});
    check_wide<WideKernel{DType::f16, kTile64}>({.m = m, .n = n, .k = k, .gap = 3, .align = 16});
    check_wide<WideKernel{DType::bf16, kTile128}>({.m = m, .n = n, .k = k, .gap = 1, .align = 16});
    check_wide<WideKernel{DType::f32, kTile128}>({.m = m, .n = n, .k = k, .align = 16});
    check_wide<WideKernel{DType::f16, kTile64x32}>({.m = m, .n = n, .k = k, .align = 16});
    check_wide<WideKernel{DType::f32, kTile64x64}>({.m = m, .n = n, .k = k, .bias = true, .align = 16});
    check_wide<WideKernel{DType::bf16, kTile256}>({.m = 2 * m, .n = n, .k = k, .align = 16});
  }
}

/// The other kernels, which the public functions use on GPUs only.
TEST_F(BitNetKernels, QuantisersAgreeWithTheCpu) {
  for (const std::int64_t k : {4, 516, 1300}) {  // up to three pieces of 512 columns
    constexpr std::int64_t m = 11;
    const Tensor x = Tensor::random({m, k}, DType::bf16, random());
    const Tensor values = Tensor::poisoned({m, k}, DType::i8), scales = Tensor::poisoned({m}, DType::f32),
                 expected = Tensor::poisoned({m, k}, DType::i8);
    const Tensor expected_scales = Tensor::poisoned({m}, DType::f32), column = scales.reshape({m, 1});
    launch_cpu<QuantizeActivations<bf16, 4, 512, 4, 8>>({.m = tiles_of(m, 4)}, [&](auto& bind, auto& p) {
      bind(p.x, x);
      bind(p.values, values);
      bind(p.scales, column);
    });
    quantize_activations(x, expected, expected_scales);
    for (std::int64_t i = 0; i < m * k; ++i) ASSERT_EQ(values.data<i8>()[i], expected.data<i8>()[i]) << k << ": " << i;
    for (std::int64_t i = 0; i < m; ++i) ASSERT_EQ(scales.data<float>()[i], expected_scales.data<float>()[i]) << k << ": " << i;

    const std::int64_t pieces = (k + 255) / 256;
    const Tensor sums = Tensor::poisoned({m, pieces}, DType::f32), sum = Tensor::zeros({1, 1}, DType::f32);
    launch_cpu<AbsoluteSums<bf16, 8, 256, 8>>({.m = tiles_of(m, 8), .n = static_cast<int>(pieces)}, [&](auto& bind, auto& p) {
      bind(p.w, x);
      bind(p.sums, sums);
    });
    for (std::int64_t i = 0; i < m * pieces; ++i) sum.data<float>()[0] += sums.data<float>()[i];
    const TernaryMatrix w = TernaryMatrix::allocate(m, k), by_cpu = quantize_ternary(x);
    const Tensor w_scales = w.scales.reshape({m, 1});
    launch_cpu<QuantizeTernary<bf16, 8, 256>>({.m = tiles_of(m, 8), .n = tiles_of(k / 4, 256)}, [&](auto& bind, auto& p) {
      bind(p.w, x);
      bind(p.sum, sum);
      bind(p.values, w.values);
      bind(p.scales, w_scales);
      p.per_element = 1.0f / static_cast<float>(m * k);
    });
    const float scale = w.scales.data<float>()[0];
    EXPECT_NEAR(scale, by_cpu.scales.data<float>()[0], scale * 0x1p-20f);
    const std::vector<int> numbers = numbers_of(w);
    for (std::int64_t i = 0; i < m * k; ++i)
      ASSERT_EQ(numbers[static_cast<std::size_t>(i)], plain_ternary(static_cast<float>(x.data<bf16>()[i]), scale)) << i;

    const Tensor unpacked = Tensor::poisoned({m, k}, DType::i8);
    launch_cpu<UnpackTernary<8, 256>>({.m = tiles_of(m, 8), .n = tiles_of(k, 256)}, [&](auto& bind, auto& p) {
      bind(p.values, w.values);
      bind(p.out, unpacked);
    });
    for (std::int64_t i = 0; i < m * k; ++i) ASSERT_EQ(unpacked.data<i8>()[i], numbers[static_cast<std::size_t>(i)]) << i;
  }
}

TEST_F(BitNetKernels, SumsAreScaledAndAdded) {
  constexpr std::int64_t m = 9, n = 300;
  const Tensor sums = Tensor::empty({m, n}, DType::i32), row = Tensor::random({m, 1}, DType::f32, 1),
               column = Tensor::random({1, n}, DType::f32, 2);
  for (std::int64_t i = 0; i < m * n; ++i) sums.data<i32>()[i] = static_cast<i32>(random() % 20000) - 10000;
  const Tensor y = Tensor::poisoned({m, n}, DType::f32), none;
  const auto run = [&](const Tensor* added) {
    launch_cpu<ScaleSums<i32, float, 8, 256, 4>>({.m = tiles_of(m, 8), .n = tiles_of(n, 256)}, [&](auto& bind, auto& p) {
      bind(p.sums, sums);
      bind(p.x_scales, row);
      bind(p.scales, column);
      bind(p.bias, nullptr);
      bind(p.added, added);
      bind(p.y, y);
    });
  };
  run(nullptr);
  for (std::int64_t i = 0; i < m * n; ++i) {
    const float expected = static_cast<float>(sums.data<i32>()[i]) * row.data<float>()[i / n] * column.data<float>()[i % n];
    ASSERT_EQ(y.data<float>()[i], expected) << i;
  }
  const Tensor before = y.to(Device::cpu());
  run(&y);
  for (std::int64_t i = 0; i < m * n; ++i) ASSERT_EQ(y.data<float>()[i], 2 * before.data<float>()[i]) << i;
}

/// What a lane decodes, by the same instructions on the CPU: every byte, at every place of a word.
TEST_F(BitNetKernels, DecodesEveryCodeLikeTheFormula) {
  using Decode = cuda::DecodePair<u2x4, i8, CentredTimes64>;
  for (u32 byte = 0; byte < 256; ++byte) {
    const u32 four = Decode::decode(byte, {});
    for (int i = 0; i < 4; ++i)
      ASSERT_EQ(static_cast<i8>(four >> 8 * i), (static_cast<int>(byte >> 2 * i & 3) - 2) * 64) << byte << " " << i;
    for (int place = 0; place < 4; ++place) {
      u32 words[4];
      cuda::centre_codes((byte << 8 * place) | 0x5au << 8 * ((place + 1) % 4), words);
      for (int i = 0; i < 4; ++i)
        ASSERT_EQ(static_cast<i8>(words[i] >> 8 * place), (static_cast<int>(byte >> 2 * i & 3) - 2) * 64)
            << byte << " " << place << " " << i;
    }
  }
  const u32 x[4] = {0x03020100, 0x07060504, 0x0b0a0908, 0x0f0e0d0c};
  u32 words[4];
  cuda::order_as_codes(x, words);
  for (u32 i = 0; i < 4; ++i)
    for (u32 t = 0; t < 4; ++t) EXPECT_EQ(words[i] >> 8 * t & 0xff, 4 * t + i);
}

/// Every tile, through tensors with elements around them that must stay.
TEST_F(BitNetKernels, EveryTileMultipliesOnAGpu_cuda) {
  skip_without_cuda();
  const Device gpu = Device::cuda();
  const Stream stream = Stream::standard(gpu);
  const std::int64_t generic = generic_shared_bytes(stream);
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
    for (const std::int64_t m : {1, 8, 11}) {
      for (const int rows : {16, 32}) {
        for (const bool accumulate : {false, true}) {
          const ProductOperands of({.m = m, .n = 403, .k = 2112, .bias = true, .accumulate = accumulate, .gap = 5}, dtype, gpu, random);
          const BitLinearOptions options{.accumulate = accumulate, .bias = &of.bias.tensor(), .stream = stream};
          const Call call{of.x, of.x_scales, of.weight, of.y, options, stream};
          SkinnyKernel kernel = skinny_kernel(call, 132, generic);
          kernel.tile.rows = rows, kernel.tile.stages = 3;
          SCOPED_TRACE(tw::format("{} {}", name_of(dtype), describe(kernel.tile)));
          if (launched([&] { run_skinny(call, kernel); })) of.expect_right(dtype);
        }
      }
    }
    if (generic > 0) continue;
    for (const WideTile& tile : kWideTiles) {
      for (const std::int64_t gap : {16, 5}) {  // rows of y that TMA can store, and others
        for (const bool accumulate : {false, true}) {
          const ProductOperands of({.m = 291, .n = 403, .k = 1152, .bias = accumulate, .accumulate = accumulate, .gap = gap, .align = 16},
                                   dtype, gpu, random);
          const BitLinearOptions options{.accumulate = accumulate, .bias = accumulate ? &of.bias.tensor() : nullptr, .stream = stream};
          SCOPED_TRACE(tw::format("{} {} gap {}", name_of(dtype), describe(tile), gap));
          if (launched([&] { run_wide({of.x, of.x_scales, of.weight, of.y, options, stream}, tile); })) of.expect_right(dtype);
        }
      }
    }
  }
}

/// A call of a shape, without memory.
struct Shapes {
  Shapes(std::int64_t m, std::int64_t n, std::int64_t k, DType dtype = DType::bf16, bool accumulate = false)
      : x(placeholder({m, k}, DType::i8)),
        x_scales(placeholder({m}, DType::f32)),
        y(placeholder({m, n}, dtype)),
        weight{placeholder({n, k / 4}, DType::u8), placeholder({n}, DType::f32)},
        options{.accumulate = accumulate} {}
  Call call() const { return {x, x_scales, weight, y, options, Stream::standard(Device::cpu())}; }

  Tensor x, x_scales, y;
  TernaryMatrix weight;
  BitLinearOptions options;
};

TEST_F(BitNetKernels, ReadTheWeightOnce) {
  constexpr std::int64_t n = 256, k = 2048;
  const Shapes few(5, n, k), many(300, n, k);
  constexpr SkinnyKernel skinny{};
  const Analysis once = analyze<SkinnyHostKernel<skinny>>(skinny_grid(few.call(), skinny.tile),
                                                          [&](auto& bind, auto& p) { bind_skinny(bind, p, few.call()); });
  constexpr std::int64_t tiles = n / 16;
  // In each tile x, which the last even step would read beyond, and its scales; the scales of W are fetched and read.
  EXPECT_EQ(once.global_written, 5 * n * 2u);
  EXPECT_EQ(once.operations.inside[static_cast<std::size_t>(OperandType::i8)], 2u * 5 * n * k);
  EXPECT_GE(once.global_read, static_cast<std::uint64_t>(n * k / 4 + tiles * 5 * k));
  EXPECT_LE(once.global_read, static_cast<std::uint64_t>(n * k / 4 + tiles * (5 * k + 5 * 4) + 2 * n * 4));
  constexpr WideKernel wide{.tile = kTile256};
  const Analysis counted = analyze<WideHostKernel<wide>>(
      wide_grid(many.call(), wide.tile), [&](auto& bind, auto& p) { bind_wide(bind, p, many.call(), many.y, false, true); });
  constexpr std::int64_t tiles_of_x = 2, tiles_of_w = 2;
  // Both halves of a tile read the scales of W; past x's last row, the second one reads the last scale again.
  const std::int64_t of_w = n * k / 4 + 2 * n * 4, of_x = 300 * k + 300 * 4 + 4;
  EXPECT_EQ(counted.global_read, static_cast<std::uint64_t>(tiles_of_x * of_w + tiles_of_w * of_x));
  EXPECT_EQ(counted.global_written, 300 * n * 2u);
  EXPECT_EQ(counted.operations.inside[static_cast<std::size_t>(OperandType::i8)], 2u * 300 * n * k);
}

TEST_F(BitNetKernels, AreChosenByRowsAndAlignment) {
  EXPECT_TRUE(is_skinny(Shapes(1, 64, 2048).call()));
  EXPECT_TRUE(is_skinny(Shapes(16, 64, 64, DType::f32).call()));
  EXPECT_FALSE(is_skinny(Shapes(17, 64, 2048).call()));
  EXPECT_FALSE(is_skinny(Shapes(1, 64, 2052).call()));  // rows of W are not whole 16 bytes
  EXPECT_FALSE(is_skinny(Shapes(1, 64, 0).call()));
  EXPECT_TRUE(is_wide(Shapes(17, 64, 2048).call()));
  EXPECT_FALSE(is_wide(Shapes(17, 64, 2052).call()));
  const auto tile = [](std::int64_t m, std::int64_t n, std::int64_t generic = 0) {
    return skinny_kernel(Shapes(m, n, 2048).call(), 132, generic).tile;
  };
  EXPECT_EQ(tile(1, 2560), (SkinnyTile{16, 8, 12, 8, 2}));
  EXPECT_EQ(tile(1, 16384), (SkinnyTile{32, 8, 6, 8, 2}));
  EXPECT_EQ(tile(9, 2560), (SkinnyTile{32, 16, 6, 8, 1}));
  EXPECT_EQ(tile(9, 2048), (SkinnyTile{16, 16, 12, 8, 1}));
  EXPECT_GE(tile(9, 2560, 99 << 10).stages, 2);
  const auto wide = [](std::int64_t m, std::int64_t n, std::int64_t k) { return wide_tile(Shapes(m, n, k).call(), 132); };
  EXPECT_EQ(wide(4096, 16384, 16384), kWideTiles[5]);
  EXPECT_EQ(wide(24, 16384, 16384), kWideTiles[0]);
  EXPECT_EQ(wide(32, 2560, 2560), kWideTiles[0]);  // 40 tiles instead of 10
}

/// A decoding step calls the product in a captured graph, so it must neither allocate nor launch anything else.
TEST_F(BitNetKernels, AreOneLaunch) {
  DryRun run(typical_gpu("sm_90a"));
  const Stream stream(run.device());
  const TernaryMatrix w = TernaryMatrix::allocate(2560, 6912).to(run.device());
  const auto launches = [&](std::int64_t m, bool accumulate) {
    const Tensor x = Tensor::empty({m, 6912}, DType::i8, stream), scales = Tensor::empty({m}, DType::f32, stream);
    const Tensor y = Tensor::empty({m, 2560}, DType::bf16, stream);
    const std::size_t before = run.kernels().size();
    ternary_gemm(x, scales, w, y, {.accumulate = accumulate, .stream = stream, .constant_weight = true});
    std::vector<std::string> types;
    for (std::size_t i = before; i < run.kernels().size(); ++i) types.push_back(run.kernels()[i].type);
    return types;
  };
  for (const std::int64_t m : {1, 16}) {
    const std::vector<std::string> types = launches(m, true);
    ASSERT_EQ(types.size(), 1u);
    EXPECT_NE(types[0].find("SkinnyTernaryGemm"), std::string::npos) << types[0];
  }
  ASSERT_EQ(launches(100, false).size(), 1u);
  const std::vector<std::string> two = launches(100, true);
  ASSERT_EQ(two.size(), 2u);
  EXPECT_NE(two[0].find("::TernaryGemm<float"), std::string::npos) << two[0];
  EXPECT_NE(two[1].find("ScaleSums<"), std::string::npos) << two[1];
}

/// What models launch, on Hopper GPUs and on others.
TEST_F(BitNetKernels, CompileForGpusWithoutSpills) {
  skip_without_nvrtc();
  for (const GpuTarget target : {GpuTarget::automatic, GpuTarget::cuda}) {
    const std::int64_t generic = target == GpuTarget::cuda ? 99 << 10 : 0;
    std::vector<KernelSpec> specs;
    const auto add = [&](const std::string& type) {
      specs.push_back(make_spec({type, "kernels/bitnet/products.tile.hpp", nullptr}, true, true));
      if (target == GpuTarget::cuda) specs.back() = for_target(specs.back(), target);
    };
    for (const auto& [m, n] : {std::pair{1, 2560}, {8, 16384}, {16, 16384}, {16, 2048}})
      add(type_of(skinny_kernel(Shapes(m, n, 2048, n == 2560 ? DType::bf16 : DType::f32, n == 2048).call(), 132, generic)));
    if (generic == 0) {
      for (const WideTile& tile : kWideTiles) add(type_of(WideKernel{tile.x_rows == 128 ? DType::f16 : DType::bf16, tile}));
      add(type_of(WideKernel{DType::f32, kWideTiles.back()}));
    }
    const auto check = [](const KernelSpec& spec, const CompiledKernel& kernel) {
      expect_fast(spec, kernel);
      const char* const instruction = spec.type.find("Skinny") != std::string::npos ? "mma.sync" : "wgmma";
      EXPECT_NE(kernel.tensor_core_instruction.find(instruction), std::string::npos) << spec.type;
    };
    compile_and_check(specs, target == GpuTarget::cuda ? "sm_86" : "sm_90a", check);
  }
}

}  // namespace
}  // namespace tw::kernels::bitnet
