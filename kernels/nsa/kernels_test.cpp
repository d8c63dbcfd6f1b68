// Compiles for GPUs the kernels that calls launch and that are not registered.

#include <gtest/gtest.h>

#include <vector>

#include "kernels/nsa/kernels.hpp"
#include "tests/compiled_kernels.hpp"
#include "tests/support.hpp"
#include "tilewave/kernel.hpp"

namespace tw::kernels::nsa {
namespace {

using namespace tw::test;

void expect_all_fast(std::vector<KernelSpec> all, GpuTarget target, const char* arch) {
  if (target == GpuTarget::cuda)
    for (KernelSpec& spec : all) spec = for_target(spec, target);
  compile_and_check(all, arch, expect_fast);
}

TEST(NsaKernels, CompileForHopperGpusWithoutSpills) {
  skip_without_nvrtc();
  expect_all_fast(unregistered(0), GpuTarget::automatic, "sm_90a");
}

TEST(NsaKernels, CompileForOtherGpusWithoutSpills) {
  skip_without_nvrtc();
  for (const auto& [arch, shared] : {std::pair{"sm_80", 163 * 1024}, std::pair{"sm_86", 99 * 1024}})
    expect_all_fast(unregistered(shared), GpuTarget::cuda, arch);
}

}  // namespace
}  // namespace tw::kernels::nsa
