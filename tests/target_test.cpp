// Which target and which tiles a GPU gets.

#include "runtime/target.hpp"

#include <gtest/gtest.h>

#include <string>

#include "kernels/generic_tiles.hpp"
#include "tests/expect_error.hpp"
#include "tilewave/error.hpp"
#include "tilewave/kernel.hpp"

namespace tw::test {
namespace {

TEST(Targets, HaveNames) {
  for (const GpuTarget target : {GpuTarget::automatic, GpuTarget::sm_90a, GpuTarget::cuda})
    EXPECT_EQ(parse_gpu_target(name_of(target)), target);
  expect_error<InvalidArgument>([] { parse_gpu_target("sm_80"); }, {"target is \"sm_80\"", "\"auto\", \"sm_90a\", \"cuda\""});
}

TEST(Targets, FollowFromTheComputeCapability) {
  EXPECT_EQ(best_target({9, 0}), GpuTarget::sm_90a);
  for (const ComputeCapability gpu : {ComputeCapability{8, 0}, {8, 6}, {8, 9}, {10, 0}, {12, 0}}) {
    EXPECT_EQ(best_target(gpu), GpuTarget::cuda);
    EXPECT_EQ(target_problem("a GPU", gpu), "");
    EXPECT_EQ(target_of_architecture(architecture(gpu)), GpuTarget::cuda);
    EXPECT_NO_THROW(require_target(GpuTarget::cuda, Device::cuda(1), gpu));
  }
  EXPECT_EQ(architecture({9, 0}), "sm_90a");
  EXPECT_EQ(architecture({8, 6}), "sm_86");
  EXPECT_EQ(architecture({10, 0}), "sm_100a");
  EXPECT_EQ(target_of_architecture("sm_90a"), GpuTarget::sm_90a);
  EXPECT_NO_THROW(require_target(GpuTarget::cuda, Device::cuda(), {9, 0}));
  expect_error<InvalidArgument>(
      [] {
        require_target(GpuTarget::sm_90a, Device::cuda(1), {8, 9});
      },
      {"target is sm_90a", "cuda:1 is sm_89"});
  expect_error<InvalidArgument>([] { target_of_architecture("sm_75"); }, {"arch is \"sm_75\"", "sm_80", "sm_120"});
}

TEST(Targets, AGpuThatIsTooOldIsNamed) {
  EXPECT_EQ(target_problem("Tesla T4", {7, 5}), "sm_75 (Tesla T4): Tilewave's GPU kernels need compute capability 8.0 or higher");
}

TEST(Targets, AKernelIsCompiledForAnother) {
  const KernelSpec spec = make_spec({"Some<int>", "some.tile.hpp", nullptr}, true, false, "some");
  const KernelSpec generic = for_target(spec, GpuTarget::cuda);
  EXPECT_EQ(generic.target, "tw::cuda::TargetFor<Kernel, true, false>");
  EXPECT_EQ(for_target(generic, GpuTarget::sm_90a).target, spec.target);
  KernelSpec other = spec;
  other.target = "mine::Target";
  expect_error<InvalidArgument>([&] { for_target(other, GpuTarget::cuda); }, {"kernel some", "mine::Target"});
}

TEST(Targets, AStreamOnTheCpuHasNone) {
  const Stream cpu = Stream::standard(Device::cpu());
  EXPECT_EQ(cpu.target(), GpuTarget::automatic);
  EXPECT_EQ(cpu.with_target(GpuTarget::cuda).target(), GpuTarget::automatic);
}

TEST(GenericTiles, FitTheSharedMemory) {
  for (const char* arch : {"sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120"}) {
    const int shared = max_shared_bytes(arch);
    const auto tiles = kernels::generic_tiles(shared);
    EXPECT_GE(tiles.size(), 3u) << arch;
    for (const kernels::CostedTile& t : tiles) {
      EXPECT_GE(t.stages, 2) << arch;
      const int warps = t.bm * t.bn / (t.bm == 128 ? 4096 : t.bn == 128 ? 2048 : 1024), staging = warps * 2048;
      EXPECT_LE(t.blocks * (t.stages * (t.bm + t.bn) * 128 + staging + 1024), shared + 1024) << arch << ' ' << t.bm << 'x' << t.bn;
    }
  }
  EXPECT_EQ(kernels::generic_tiles(max_shared_bytes("sm_90a"))[0].bn, 256);
  EXPECT_EQ(kernels::generic_tiles(max_shared_bytes("sm_86"))[0].bn, 128) << "two stages of 128 x 256 do not fit";
}

TEST(GenericTiles, LargeProductsTakeLargeTiles) {
  const auto tiles = kernels::generic_tiles(max_shared_bytes("sm_90a"));
  const auto time = [&](const kernels::CostedTile& t, int m, int n) { return kernels::product_time(t, (m / t.bm) * (n / t.bn), 64, 132); };
  EXPECT_LT(time(tiles.front(), 8192, 8192), time(tiles.back(), 8192, 8192));
  EXPECT_GT(time(tiles.front(), 256, 512), time(tiles.back(), 256, 512)) << "four tiles leave most multiprocessors idle";
}

}  // namespace
}  // namespace tw::test
