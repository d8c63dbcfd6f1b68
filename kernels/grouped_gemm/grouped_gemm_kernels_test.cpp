// The GPU's kernels: on the CPU target, through the compiler, and what a call launches.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "kernels/grouped_gemm/kernels.hpp"
#include "kernels/grouped_gemm/reference.hpp"
#include "runtime/dry_run.hpp"
#include "runtime/format.hpp"
#include "tests/accuracy.hpp"
#include "tests/compiled_kernels.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"
#include "tilewave/tile/cpu/target.tile.hpp"

namespace tw::kernels::grouped_gemm {
namespace {

using namespace tw::test;
using Offsets = std::vector<std::int32_t>;

Tensor tensor_of(const Offsets& offsets) {
  return Tensor::from(std::span<const std::int32_t>(offsets), {static_cast<std::int64_t>(offsets.size())});
}

struct Shapes {
  Tensor a, b, offsets, d;
  GroupedGemmOptions options;
  Call call() const { return {a, b, offsets, d, options, Stream::standard(Device::cpu())}; }
};

std::vector<gemm::RowsOfTile> list_tiles(const Call& call, const ProductTile& tile, int count) {
  const Tensor tiles = Tensor::poisoned({count, ListedGroups::numbers}, DType::i32, call.stream);
  launch_cpu<ListGroupTiles<kListed>>({.m = call.groups()}, [&](auto& bind, auto& p) { bind_list(bind, p, call, tile, tiles); });
  std::vector<gemm::RowsOfTile> result;
  for (int i = 0; i < count; ++i) {
    const auto* const entry = tiles.data<std::int32_t>() + i * ListedGroups::numbers;
    result.push_back({entry[0], entry[1], entry[2]});
  }
  return result;
}

TEST(GroupedGemmKernels, EveryRowIsInOneTile) {
  std::mt19937_64 random = random_engine();
  for (int n = 0; n < 200; ++n) {
    const int groups = 1 + static_cast<int>(random() % 700), rows = static_cast<int>(random() % 900);
    const ProductTile tile{.bm = 64, .bn = 64, .cluster = 1 + static_cast<int>(random() % 2)};
    Offsets offsets{0};
    for (int g = 1; g < groups; ++g)
      offsets.push_back(random() % 2 ? offsets.front() : static_cast<int>(random() % (static_cast<unsigned>(rows) + 1)));
    offsets.push_back(rows);
    std::sort(offsets.begin(), offsets.end());
    const Shapes shapes{Tensor::zeros({rows, 1}, DType::bf16),
                        Tensor::zeros({groups, 1, 1}, DType::bf16),
                        tensor_of(offsets),
                        Tensor::zeros({rows, 1}, DType::bf16),
                        {}};
    std::vector<int> seen(static_cast<std::size_t>(rows), -1);
    for (const gemm::RowsOfTile& t : list_tiles(shapes.call(), tile, list_size(rows, groups, tile))) {
      if (t.group < 0) continue;
      ASSERT_LT(t.first, t.end);
      ASSERT_EQ(t.end, offsets[static_cast<std::size_t>(t.group) + 1]);
      for (int r = t.first; r < std::min(t.end, t.first + tile.bm * tile.cluster); ++r) {
        ASSERT_EQ(seen[static_cast<std::size_t>(r)], -1) << "row " << r << " is in two tiles";
        seen[static_cast<std::size_t>(r)] = t.group;
      }
    }
    for (int r = 0; r < rows; ++r) {
      const int group = seen[static_cast<std::size_t>(r)];
      ASSERT_GE(group, 0) << "row " << r << " is in no tile";
      ASSERT_LE(offsets[static_cast<std::size_t>(group)], r);
      ASSERT_GT(offsets[static_cast<std::size_t>(group) + 1], r);
    }
  }
}

/// A list that is shorter than wrong offsets need is not left, and all of it is written.
TEST(GroupedGemmKernels, TheListIsNeverLeft) {
  const Shapes shapes{Tensor::zeros({100, 1}, DType::bf16),
                      Tensor::zeros({4, 1, 1}, DType::bf16),
                      tensor_of({0, 100, 0, 100, 0}),
                      Tensor::zeros({100, 1}, DType::bf16),
                      {}};
  const std::vector<gemm::RowsOfTile> tiles = list_tiles(shapes.call(), {.bm = 64, .bn = 64}, 3);
  EXPECT_EQ(tiles[0].group, 0);
  EXPECT_EQ(tiles[1].group, 0);
  EXPECT_EQ(tiles[2].group, 2);
  EXPECT_EQ(tiles[2].first, 0);
}

/// Runs the products' kernel on the CPU target, with each tile that the CPU has microkernels for.
template <Kernel kernel>
void check(const Offsets& offsets, std::int64_t m, std::int64_t n, std::int64_t k, std::mt19937_64& random) {
  SCOPED_TRACE(tw::format("{} m {} n {} k {}", type_of(kernel), m, n, k));
  const auto groups = static_cast<std::int64_t>(offsets.size()) - 1;
  const std::int64_t width = kernel.activation == Activation::swiglu ? n / 2 : n;
  PlacedTensor a({m, k}, kernel.dtype, Device::cpu()), b({groups, n, k}, kernel.dtype, Device::cpu());
  PlacedTensor d({m, width}, kernel.out, Device::cpu()), bias({groups, n}, kernel.out, Device::cpu());
  const std::vector<float> a_values = a.fill_random(random), b_stored = b.fill_random(random, 0.1f), bias_values = bias.fill_random(random);
  const Shapes shapes{a, b, tensor_of(offsets), d, {.bias = &bias.tensor(), .activation = kernel.activation}};
  const Call call = shapes.call();
  const Tensor tiles = Tensor::zeros({list_size(call.m(), call.groups(), kernel.tile), ListedGroups::numbers}, DType::i32, call.stream);
  launch_cpu<ListGroupTiles<kListed>>({.m = call.groups()}, [&](auto& bind, auto& p) { bind_list(bind, p, call, kernel.tile, tiles); });
  launch_cpu<HostKernel<kernel>>(grid_of(call, kernel.tile),
                                 [&](auto& bind, auto& p) { bind_grouped(bind, p, call, kernel.b_rows, tiles); });
  std::vector<float> b_values(b_stored.size());  // [groups, k, n]
  for (std::int64_t g = 0; g < groups; ++g)
    for (std::int64_t i = 0; i < n; ++i)
      for (std::int64_t j = 0; j < k; ++j)
        b_values[static_cast<std::size_t>((g * k + j) * n + i)] = b_stored[static_cast<std::size_t>((g * n + i) * k + j)];
  const PlainCall plain{{offsets, m}, a_values, b_values, bias_values, n, k, kernel.activation};
  const auto exact = evaluate(plain, 0, [](const gemm::PlainCall& one) { return gemm::reference(one); });
  const auto naive = evaluate(plain, 0, [](const gemm::PlainCall& one) { return gemm::naive(one, kernel.out, false); });
  EXPECT_TRUE(accurate({d.values(), exact, naive, arithmetic_of(kernel.out, Device::cpu()), k}));
  EXPECT_TRUE(d.gaps_intact());
}

TEST(GroupedGemmKernels, ProductsOnTheCpuTarget) {
  cpu::set_poison_released_slots(true);
  std::mt19937_64 random = random_engine();
  for (const Offsets& offsets : {Offsets{0, 200}, Offsets{0, 0, 63, 64, 64, 129, 200}, Offsets{0, 128, 200}}) {
    check<Kernel{.tile = {64, 64, 2, 1, 2}}>(offsets, 200, 130, 200, random);
    check<Kernel{.tile = {64, 64, 3, 2, 2}}>(offsets, 200, 200, 136, random);
    check<Kernel{.dtype = DType::f16, .out = DType::f16, .b_rows = true, .activation = Activation::swiglu, .tile = {128, 64, 2, 1, 4}}>(
        offsets, 200, 136, 72, random);
  }
}

TEST(GroupedGemmKernels, FewRowsMakeAShortList) {
  EXPECT_EQ(list_size(8, 256, {.bm = 64}), 8);
  EXPECT_EQ(list_size(1000, 8, {.bm = 128, .cluster = 2}), 3 + 8);
  EXPECT_EQ(list_size(0, 8, {.bm = 128}), 1);
}

TEST(GroupedGemmKernels, TilesFollowFromTheSizeOfGroups) {
  const auto tile = [](std::int64_t m, std::int64_t groups, std::int64_t n, std::int64_t k, bool b_rows = false) {
    const Shapes shapes{
        Tensor::zeros({m, k}, DType::bf16), placeholder({groups, n, k}, DType::bf16), Tensor(), Tensor::zeros({m, n}, DType::bf16), {}};
    return choose_tile(shapes.call(), b_rows, 132, 0);
  };
  EXPECT_EQ(tile(8, 256, 4096, 7168).bm, 64);
  EXPECT_EQ(tile(8192, 8, 4096, 7168).bm, 128);
  EXPECT_EQ(tile(8192, 8, 4096, 7168).bn, 256);
  EXPECT_EQ(tile(700, 8, 96, 64, true).bn % 64, 0);
}

/// The host reads nothing from the device, so a graph can be captured: the list and the products, and one launch over the depth.
TEST(GroupedGemmKernels, AreFewLaunches) {
  DryRun run(typical_gpu("sm_90a"));
  const Stream stream(run.device());
  const auto make = [&](Shape shape, DType dtype = DType::bf16) { return Tensor::empty(std::move(shape), dtype, stream); };
  const Tensor a = make({100, 256}), b = make({8, 256, 512}), d = make({100, 256}), offsets = make({9}, DType::i32);
  tw::grouped_gemm(a, b, offsets, d, {.activation = Activation::swiglu, .stream = stream});
  ASSERT_EQ(run.kernels().size(), 2u);
  EXPECT_NE(run.kernels()[0].type.find("ListGroupTiles"), std::string::npos);
  EXPECT_NE(run.kernels()[1].type.find("::GroupedGemm"), std::string::npos);
  tw::k_grouped_gemm(a.transpose(0, 1), d, offsets, make({8, 256, 256}, DType::f32), {.accumulate = true, .stream = stream});
  ASSERT_EQ(run.kernels().size(), 3u);
  EXPECT_NE(run.kernels()[2].type.find("KGroupedGemm"), std::string::npos);
}

/// Every tile that the heuristic may choose, on Hopper GPUs and on others.
TEST(GroupedGemmKernels, CompileForGpusWithoutSpills) {
  skip_without_nvrtc();
  for (const GpuTarget target : {GpuTarget::automatic, GpuTarget::cuda}) {
    const bool generic = target == GpuTarget::cuda;
    std::vector<Kernel> kernels{{.form = Kernel::list}};
    for (const ProductTile& tile : configs(generic ? 99 << 10 : 0)) {
      if (generic && tile.bn > 128) continue;
      kernels.push_back({.tile = tile});
      if (tile.bn % 64 != 0) continue;
      kernels.push_back({.form = Kernel::k_grouped, .tile = tile});
      if (tile.bm == 128)
        kernels.push_back({.dtype = DType::f16, .out = DType::f16, .b_rows = true, .activation = Activation::swiglu, .tile = tile});
      if (valid(tile, true, true)) kernels.push_back({.form = Kernel::k_grouped, .out = DType::f32, .addends = true, .tile = tile});
    }
    std::vector<KernelSpec> specs;
    for (const Kernel& k : kernels) {
      specs.push_back(make_spec({type_of(k), source_of(k), nullptr}, true, true));
      if (generic) specs.back() = for_target(specs.back(), target);
    }
    compile_and_check(specs, generic ? "sm_86" : "sm_90a", expect_fast);
  }
}

}  // namespace
}  // namespace tw::kernels::grouped_gemm
