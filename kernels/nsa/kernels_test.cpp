// Compiles for GPUs the kernels that calls launch and that are not registered.

#include <gtest/gtest.h>

#include <vector>

#include "kernels/nsa/kernels.hpp"
#include "tests/support.hpp"
#include "tilewave/kernel.hpp"

namespace tw::kernels::nsa {
namespace {

using namespace tw::test;

void expect_fast(std::vector<KernelSpec> all, GpuTarget target, const char* arch) {
  if (target == GpuTarget::cuda)
    for (KernelSpec& spec : all) spec = for_target(spec, target);
  const auto done = [&](std::size_t i, const CompiledKernel& kernel) {
    EXPECT_EQ(kernel.spill_bytes, 0) << all[i].type;
    EXPECT_TRUE(kernel.performance_losses.empty()) << all[i].type << ": " << kernel.performance_losses.front();
  };
  compile_all(all, 0, done, arch);
}

TEST(NsaKernels, DoNotSpill) {
  skip_without_nvrtc();
  expect_fast(unregistered(0), GpuTarget::automatic, "sm_90a");
}

TEST(NsaKernels, DoNotSpillOnTheGenericTarget) {
  skip_without_nvrtc();
  for (const auto& [arch, shared] : {std::pair{"sm_80", 163 * 1024}, std::pair{"sm_86", 99 * 1024}})
    expect_fast(unregistered(shared), GpuTarget::cuda, arch);
}

}  // namespace
}  // namespace tw::kernels::nsa
