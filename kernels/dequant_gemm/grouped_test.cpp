// Products of groups of rows: the kernels on the CPU target and through the compiler, GroupedProducts on the CPU and, where there is one,
// on a GPU.

#include "kernels/dequant_gemm/grouped.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <random>
#include <set>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "kernels/dequant_gemm/reference.hpp"
#include "kernels/generic_tiles.hpp"
#include "runtime/dry_run.hpp"
#include "runtime/format.hpp"
#include "tests/compiled_kernels.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"
#include "tilewave/analyze.hpp"
#include "tilewave/tile/cpu/target.tile.hpp"

namespace tw::kernels::dequant_gemm {
namespace {

using namespace tw::test;
using Offsets = std::vector<std::int32_t>;

// The tiles that calls use, but with fewer slots, so that each slot is filled several times.
constexpr SkinnyTile kTile8{32, 8, 3}, kTile16{32, 16, 2, 8, 1}, kShort{16, 8, 2};
constexpr WideTile kTile32{256, 32, 2, 3, 64}, kTile64{192, 64, 2, 4, 64}, kTile128{128, 128, 2, 3, 64}, kTile256{128, 256, 2, 2, 64};

Tensor tensor_of(const Offsets& offsets, Device device = Device::cpu()) {
  return Tensor::from(std::span<const std::int32_t>(offsets), {static_cast<std::int64_t>(offsets.size())}).to(device);
}

struct Case {
  Offsets offsets;
  std::int64_t rows, n, k;  ///< of x and y, of each weight, and of both
  std::int64_t gap = 0;     ///< elements after each row of y

  std::int64_t groups() const { return static_cast<std::int64_t>(offsets.size()) - 1; }
  std::int64_t begin(std::int64_t g) const { return offsets[static_cast<std::size_t>(g)]; }
};

/// The tensors of a case, and the products in double. Weights of groups without rows are NaN, where the format has it.
struct Problem {
  Problem(const Case& c, const QuantizedMatrix::Layout& layout, DType type, Device device, std::mt19937_64& random)
      : dtype(type),
        weight(quantize(Tensor::random({c.groups() * c.n, c.k}, DType::f32, random()), layout)),
        x({c.rows, c.k}, type, device),
        y({c.rows, c.n}, type, device, {.gap = c.gap}),
        again({c.rows, c.n}, type, device) {
    const std::vector<float> inputs = x.fill_random(random);
    const auto row_size = static_cast<std::size_t>(c.k);
    exact.values.assign(static_cast<std::size_t>(c.rows * c.n), std::nan(""));
    exact.magnitudes = exact.values;
    for (std::int64_t g = 0; g < c.groups(); ++g) {
      const std::int64_t begin = c.begin(g), size = c.begin(g + 1) - begin;
      const QuantizedMatrix own = weight.slice(g * c.n, (g + 1) * c.n);
      if (size == 0) {
        if (layout.format == WeightFormat::mxfp4)
          for (std::int64_t i = 0; i < own.scales.numel(); ++i) own.scales.data<std::uint8_t>()[i] = 255;
        continue;
      }
      const auto first = static_cast<std::size_t>(begin);
      const Sums sums =
          plain(std::span(inputs).subspan(first * row_size, static_cast<std::size_t>(size) * row_size), decode(own), size, c.n, c.k);
      const auto at = static_cast<std::ptrdiff_t>(begin * c.n);
      std::copy(sums.values.begin(), sums.values.end(), exact.values.begin() + at);
      std::copy(sums.magnitudes.begin(), sums.magnitudes.end(), exact.magnitudes.begin() + at);
    }
    weight = weight.to(device);
  }
  /// `rounded`: weights are rounded to x's type.
  void check(bool rounded, std::int64_t k) const {
    const std::vector<double> results = y.values();
    const std::vector<double> repeated = again.values();
    const double last = dtype == DType::bf16 ? 0x1p-8 : 0x1p-11, of_weight = rounded ? last : 0;
    // Of f16, elements of W that are less than 2^-14 have an error of up to 2^-25; |x| < 6.
    const double subnormal = rounded && dtype == DType::f16 ? 0x1p-25 * 6 * static_cast<double>(k) : 0;
    for (std::size_t i = 0; i < results.size(); ++i) {
      if (std::isnan(exact.values[i])) {
        ASSERT_TRUE(std::isnan(results[i])) << i << " is in no group, and has been written: " << results[i];
        continue;
      }
      const double error = ((static_cast<double>(k) + 8) * 0x1p-24 + of_weight) * exact.magnitudes[i] + subnormal;
      ASSERT_LE(std::abs(results[i] - exact.values[i]), error * (1 + last) + last * std::abs(exact.values[i]) + 0x1p-24)
          << i << ": " << results[i] << ", exactly " << exact.values[i];
      ASSERT_EQ(results[i], repeated[i]) << i;
    }
    EXPECT_TRUE(y.gaps_intact());
  }

  DType dtype;
  QuantizedMatrix weight;
  PlacedTensor x, y, again;
  Sums exact;
};

Tensor list_on_cpu(const Offsets& offsets, std::int64_t rows, int tile_rows) {
  const int groups = static_cast<int>(offsets.size()) - 1, m = static_cast<int>(rows);
  const Tensor tiles = Tensor::zeros({grouped_gemm::list_size(m, groups, tile_rows), grouped_gemm::ListedGroups::numbers}, DType::i32,
                                     Stream::standard(Device::cpu()));
  const Tensor of_groups = tensor_of(offsets);
  launch_cpu<grouped_gemm::ListGroupTiles<grouped_gemm::kListed>>(
      {.m = groups}, [&](auto&, auto& p) { grouped_gemm::bind_list(p, of_groups, m, tile_rows, tiles); });
  return tiles;
}

template <auto kernel>
constexpr bool is_wide_kernel = std::is_same_v<std::remove_cv_t<decltype(kernel)>, WideKernel>;
template <auto kernel>
constexpr auto host_kernel() {
  if constexpr (is_wide_kernel<kernel>)
    return std::type_identity<WideHostKernel<kernel>>{};
  else
    return std::type_identity<SkinnyHostKernel<kernel>>{};
}

/// Runs a kernel on the CPU target, twice.
template <auto kernel>
void check(const Case& c, std::mt19937_64& random) {
  SCOPED_TRACE(tw::format("{} rows {} n {} k {}", type_of(kernel), c.rows, c.n, c.k));
  cpu::set_poison_released_slots(true);
  const Problem problem(c, {kernel.format, kernel.group, kernel.zeros}, kernel.dtype, Device::cpu(), random);
  const Tensor tiles = list_on_cpu(c.offsets, c.rows, kernel.tile.x_rows);
  const DequantGemmOptions none;
  for (const PlacedTensor* out : {&problem.y, &problem.again}) {
    const Call call{problem.x, problem.weight, *out, none, Stream::standard(Device::cpu())};
    launch_cpu<typename decltype(host_kernel<kernel>())::type>(
        grouped_grid(call, kernel.tile, tiles), [&](auto& bind, auto& p) { bind_grouped(bind, p, call, kernel.tile, tiles); });
  }
  problem.check(
      requires { kernel.split; }, c.k);
}

template <WeightFormat format, DType dtype, SkinnyTile tile, int group = 32>
constexpr SkinnyKernel kSkinny{.format = format, .group = group, .dtype = dtype, .tile = tile, .grouped = true};
template <WeightFormat format, DType dtype, WideTile tile, int group = 32>
constexpr WideKernel kWide{.format = format, .group = group, .dtype = dtype, .tile = tile, .grouped = true};

/// Rows before the first group and after the last one, empty groups, groups of a row, of a tile's rows, and of more.
const Offsets kRagged{2, 3, 3, 4, 12, 12, 31, 48, 48};

TEST(GroupedDequantGemm, OfFewRowsIsCorrectOnTheCpu) {
  std::mt19937_64 random = random_engine();
  // A part of a slot, and several; fewer rows of W than a tile, and tiles that reach into the next group's weight.
  for (const auto& [n, k] : {std::pair{7, 32}, {33, 1312}, {48, 2176}}) {
    const Case c{kRagged, 50, n, k, 3};
    check<kSkinny<WeightFormat::mxfp4, DType::bf16, kTile8>>(c, random);
    check<kSkinny<WeightFormat::mxfp4, DType::f16, kTile16>>(c, random);
    check<kSkinny<WeightFormat::int4, DType::bf16, kShort>>(c, random);
    check<kSkinny<WeightFormat::int4, DType::f16, kTile8>>(c, random);
  }
  check<kSkinny<WeightFormat::int4, DType::bf16, kTile16, 128>>({kRagged, 50, 40, 1280}, random);
}

TEST(GroupedDequantGemm, OfManyRowsIsCorrectOnTheCpu) {
  std::mt19937_64 random = random_engine();
  const Offsets large{5, 69, 69, 70, 400, 656, 656};
  for (const auto& [n, k] : {std::pair{8, 32}, {200, 672}}) {
    check<kWide<WeightFormat::mxfp4, DType::bf16, kTile32>>({kRagged, 50, n, k, 3}, random);
    check<kWide<WeightFormat::int4, DType::f16, kTile64>>({large, 660, n, k}, random);
    check<kWide<WeightFormat::mxfp4, DType::f16, kTile128>>({large, 660, n, k, 8}, random);
    check<kWide<WeightFormat::mxfp4, DType::bf16, kTile256>>({large, 660, n, k, 1}, random);
  }
  check<kWide<WeightFormat::int4, DType::bf16, kTile256, 128>>({large, 660, 136, 256}, random);
}

/// One row each of many groups, as when one token is decoded.
TEST(GroupedDequantGemm, OneRowEachIsCorrectOnTheCpu) {
  std::mt19937_64 random = random_engine();
  Offsets offsets(101, 4);
  for (std::size_t g = 0; g < offsets.size(); ++g) offsets[g] = (g > 3) + (g > 40) + (g > 41) + (g > 99);
  check<kSkinny<WeightFormat::mxfp4, DType::bf16, kTile8>>({offsets, 4, 32, 96}, random);
}

/// Only the weights of groups that have rows are read, once, however many groups there are.
TEST(GroupedDequantGemm, ReadsTheWeightsOfItsRowsOnce) {
  constexpr std::int64_t rows = 4, n = 64, k = 1024, groups = 300, used = 3;
  constexpr SkinnyKernel kernel = kSkinny<WeightFormat::mxfp4, DType::bf16, kTile8>;
  Offsets offsets(groups + 1, 4);
  for (std::size_t g = 0; g < offsets.size(); ++g) offsets[g] = 2 * (g > 17) + (g > 18) + (g > 250);
  const QuantizedMatrix weight{.format = WeightFormat::mxfp4,
                               .values = placeholder({groups * n, k / 2}, DType::u8),
                               .scales = placeholder({groups * n, k / 32}, DType::u8),
                               .group = 32};
  const Tensor x = placeholder({rows, k}, DType::bf16), y = placeholder({rows, n}, DType::bf16), tiles = list_on_cpu(offsets, rows, 8);
  const DequantGemmOptions none;
  const Call call{x, weight, y, none, Stream::standard(Device::cpu())};
  const Analysis counted = analyze<SkinnyHostKernel<kernel>>(grouped_grid(call, kernel.tile, tiles),
                                                             [&](auto& bind, auto& p) { bind_grouped(bind, p, call, kernel.tile, tiles); });
  EXPECT_EQ(counted.global_written, rows * n * 2u);
  const std::uint64_t weights = used * (n * k / 2 + n * k / 32);
  EXPECT_GE(counted.global_read, weights);
  EXPECT_LE(counted.global_read, weights + used * (n / 32) * 8 * k * 2);  // and x, 8 rows at most for each tile
}

TEST(GroupedDequantGemm, TilesFollowFromTheSizeOfGroups) {
  const auto rows_of = [](std::int64_t rows, std::int64_t groups, std::int64_t generic = 0) {
    return x_rows(choose_grouped_tile(rows, groups, generic));
  };
  EXPECT_EQ(rows_of(8, 256), 8);
  EXPECT_EQ(rows_of(1024, 256), 8);
  EXPECT_EQ(rows_of(2048, 256), 16);
  EXPECT_EQ(rows_of(4096, 128), 64);
  EXPECT_EQ(rows_of(32768, 256), 256);
  EXPECT_TRUE(std::holds_alternative<SkinnyTile>(choose_grouped_tile(64, 128, 0)));
  EXPECT_TRUE(std::holds_alternative<WideTile>(choose_grouped_tile(32768, 256, 0)));
  // Any GPU has the kernel for few rows.
  EXPECT_EQ(rows_of(1, 8, 99 << 10), 8);
  EXPECT_EQ(rows_of(32768, 8, 99 << 10), 16);
  // GPT-OSS with one token: 360 tiles of 32 rows on 264 blocks take as long as 528.
  const auto fitted = [](std::int64_t n) { return fit_grouped(kTile8, WeightFormat::mxfp4, n, 4, 132, 0); };
  EXPECT_EQ(fitted(2880), (SkinnyTile{16, 8, 8, 8, 2}));
  EXPECT_EQ(fitted(5760), (SkinnyTile{32, 8, 6, 8, 2}));
}

/// Two products with the same groups share the list, and the products of one shape are one kernel.
TEST(GroupedDequantGemm, LaunchesAListAndTheProducts) {
  for (const auto& [rows, kernel] : {std::pair<std::int64_t, std::string>{8, "::SkinnyDequantGemm<"}, {4096, "::DequantGemm<"}}) {
    DryRun run(typical_gpu("sm_90a"));
    const Stream stream(run.device());
    const Tensor offsets = Tensor::empty({9}, DType::i32, stream), x = Tensor::empty({rows, 64}, DType::bf16, stream),
                 y = Tensor::empty({rows, 96}, DType::bf16, stream);
    const QuantizedMatrix w = QuantizedMatrix::allocate(8 * 96, 64, {WeightFormat::mxfp4}).to(run.device());
    const GroupedProducts products(offsets, rows, stream);
    ASSERT_EQ(run.kernels().size(), 1u);
    EXPECT_NE(run.kernels()[0].type.find("ListGroupTiles"), std::string::npos) << run.kernels()[0].type;
    products.multiply(x, w, y);
    products.multiply(x, w, y);
    ASSERT_EQ(run.kernels().size(), 2u);
    const std::string& type = run.kernels()[1].type;
    EXPECT_NE(type.find(kernel), std::string::npos) << type;
    EXPECT_NE(type.find("WeightOfGroup"), std::string::npos) << type;
  }
}

/// What layers launch on Hopper GPUs, and the kernel of other GPUs.
TEST(GroupedDequantGemm, CompilesForGpusWithoutSpills) {
  skip_without_nvrtc();
  for (const GpuTarget target : {GpuTarget::automatic, GpuTarget::cuda}) {
    std::vector<KernelSpec> specs;
    std::set<std::string> added;  // n does not change every tile
    const auto add = [&](const std::string& type, const char* source) {
      if (!added.insert(type).second) return;
      specs.push_back(make_spec({type, source, nullptr}, true, true));
      if (target == GpuTarget::cuda) specs.back() = for_target(specs.back(), target);
    };
    const std::int64_t generic = target == GpuTarget::cuda ? 99 << 10 : 0;
    for (const auto& [format, group] : {std::pair{WeightFormat::mxfp4, 32}, {WeightFormat::int4, 32}, {WeightFormat::int4, 128}}) {
      const DType dtype = group == 128 ? DType::f16 : DType::bf16;
      for (const GroupedTile& tile : grouped_tiles()) {
        if (const auto* wide = std::get_if<WideTile>(&tile)) {
          if (generic == 0)
            add(type_of(WideKernel{.format = format, .group = group, .dtype = dtype, .tile = *wide, .grouped = true}),
                "kernels/dequant_gemm/dequant_gemm.tile.hpp");
          continue;
        }
        for (const std::int64_t n : {2880, 5760}) {
          const SkinnyTile fitted = fit_grouped(std::get<SkinnyTile>(tile), format, n, 4, 132, generic);
          add(type_of(SkinnyKernel{.format = format, .group = group, .dtype = dtype, .tile = fitted, .grouped = true}),
              "kernels/dequant_gemm/skinny.tile.hpp");
        }
      }
    }
    const auto check = [](const KernelSpec& spec, const CompiledKernel& kernel) {
      expect_fast(spec, kernel);
      EXPECT_NE(kernel.tensor_core_instruction.find("mma"), std::string::npos) << spec.type;
    };
    compile_and_check(specs, target == GpuTarget::cuda ? "sm_86" : "sm_90a", check);
  }
}

class GroupedProductsOn : public testing::TestWithParam<Device> {};
INSTANTIATE_TEST_SUITE_P(Ops, GroupedProductsOn, testing::ValuesIn(kDevices), device_name);

TEST_P(GroupedProductsOn, AreCorrect) {
  const Device device = GetParam();
  skip_unless_present(device);
  std::mt19937_64 random = random_engine();
  const Stream stream = Stream::standard(device);
  std::vector<QuantizedMatrix::Layout> layouts = {{WeightFormat::mxfp4}};
  // The CPU rounds x for int4.
  if (device.is_cuda()) layouts.insert(layouts.end(), {{WeightFormat::int4, 32}, {WeightFormat::int4, 128}});
  for (const QuantizedMatrix::Layout& layout : layouts) {
    for (const DType dtype : {DType::bf16, DType::f16}) {
      for (const Case& c :
           {Case{kRagged, 50, 72, 1280, 3}, Case{{0, 1, 1, 1, 2}, 2, 136, 384}, Case{{0, 70, 70, 201, 500}, 500, 200, 640}}) {
        SCOPED_TRACE(tw::format("{} {} rows {} n {} k {}", text_of(layout), name_of(dtype), c.rows, c.n, c.k));
        const Problem problem(c, layout, dtype, device, random);
        const auto run = [&](const Tensor& offsets, auto... tile) {
          const GroupedProducts products(offsets, c.rows, tile..., stream);
          for (const PlacedTensor* out : {&problem.y, &problem.again}) products.multiply(problem.x, problem.weight, *out);
        };
        const Tensor offsets = tensor_of(c.offsets, device);
        if (!launched([&] { run(offsets); })) return;
        problem.check(true, c.k);
        if (!device.is_cuda() || generic_shared_bytes(stream) > 0) continue;
        for (const GroupedTile& tile : grouped_tiles()) {
          SCOPED_TRACE(describe(tile));
          run(offsets, tile);
          problem.check(std::holds_alternative<WideTile>(tile), c.k);
        }
      }
    }
  }
}

}  // namespace
}  // namespace tw::kernels::dequant_gemm
