// Compiles for GPUs the kernels that calls launch and that are not registered.

#include <gtest/gtest.h>

#include <vector>

#include "kernels/mamba2/chunk_output_gradients.tile.hpp"
#include "kernels/mamba2/chunks.hpp"
#include "tests/compiled_kernels.hpp"
#include "tests/support.hpp"
#include "tilewave/launch.hpp"

namespace tw::kernels::mamba2 {
namespace {

using namespace tw::test;

/// `vectorized`: operands qualify for pieces of 16 bytes.
std::vector<KernelSpec> specs(bool vectorized) {
  const auto update = [&](const UpdateKernel& kernel) {
    return make_spec({type_of_update(kernel), Update<f16, f16, f16, 64, 64>::source, nullptr}, vectorized, vectorized);
  };
  return {update({DType::bf16, DType::bf16, DType::bf16, 128}),
          update({DType::f16, DType::f32, DType::f32, 64}),
          update({DType::f16, DType::f16, DType::f16, 64}),
          update({DType::bf16, DType::f32, DType::f32, 256}),
          update({DType::bf16, DType::bf16, DType::bf16, 256}),
          update({DType::f32, DType::f32, DType::f32, 128}),
          make_spec(kernel_info<StepSizes<float, kSizeRows, kSizeHeads>>, vectorized, vectorized),
          make_spec(kernel_info<ScaleInputs<bf16, 32, 128>>, vectorized, vectorized),
          make_spec(kernel_info<ScaleInputs<float, 16, 256>>, vectorized, vectorized),
          make_spec(kernel_info<SkipAndGate<bf16, 32, 128>>, vectorized, vectorized),
          make_spec(kernel_info<SkipAndGate<float, 16, 256>>, vectorized, vectorized),
          make_spec(kernel_info<OutputGradients<bf16, 16, 128>>, vectorized, vectorized),
          make_spec(kernel_info<OutputGradients<float, 8, 256>>, vectorized, vectorized),
          make_spec(kernel_info<InputGradients<bf16, 16, 128>>, vectorized, vectorized),
          make_spec(kernel_info<InputGradients<float, 8, 256>>, vectorized, vectorized),
          make_spec(kernel_info<SizeGradients<bf16, kSizeRows, kSizeHeads>>, vectorized, vectorized),
          make_spec(kernel_info<SizeGradients<float, kSizeRows, kSizeHeads>>, vectorized, vectorized),
          make_spec(kernel_info<ChunkExponents<bf16, kExponentHeads>>, vectorized, vectorized),
          make_spec(kernel_info<ChunkExponents<float, kExponentHeads>>, vectorized, vectorized),
          make_spec(kernel_info<ChunkCumsum<bf16, kCumsumHeads, kLargestChunk>>, vectorized, vectorized),
          make_spec(kernel_info<ChunkState<f16>>, vectorized, vectorized),
          make_spec(kernel_info<StatePassing<float, kPassedElements>>, vectorized, vectorized),
          make_spec(kernel_info<ChunkProducts<bf16>>, vectorized, vectorized),
          make_spec(kernel_info<ChunkScan<f16>>, vectorized, vectorized),
          make_spec(kernel_info<ChunkCumsumGradients<bf16, kCumsumHeads, kLargestChunk>>, vectorized, vectorized),
          make_spec(kernel_info<StatePassingGradients<bf16, kPassedElements>>, vectorized, vectorized),
          make_spec(kernel_info<AddedInputGradients<bf16>>, vectorized, vectorized),
          make_spec(kernel_info<KeyGradients<bf16, UntilEnd>>, vectorized, vectorized),
          make_spec(kernel_info<KeyGradients<f16, FromStart>>, vectorized, vectorized),
          make_spec(kernel_info<AddedStepGradients<kCumsumHeads, kLargestChunk>>, vectorized, vectorized),
          make_spec(kernel_info<ChunkState<bf16, FromStart>>, vectorized, vectorized),
          make_spec(kernel_info<ProductGradients<bf16, false>>, vectorized, vectorized),
          make_spec(kernel_info<ProductGradients<f16, true>>, vectorized, vectorized),
          make_spec(kernel_info<ScoreGradients<bf16>>, vectorized, vectorized),
          make_spec(kernel_info<ScanInputGradients<f16>>, vectorized, vectorized),
          make_spec(kernel_info<ScanStepGradients<kCumsumHeads, kLargestChunk>>, vectorized, vectorized),
          make_spec(kernel_info<SumOfRuns>, vectorized, vectorized)};
}

/// Of Hopper's target alone.
std::vector<KernelSpec> walks(bool copied) {
  const auto walk = [&](DType dtype, bool gated) {
    return make_spec({type_of_scan({dtype, gated}), Scan<f16, 128, 64, true>::source, nullptr}, copied, copied);
  };
  return {walk(DType::bf16, true), walk(DType::bf16, false), walk(DType::f16, true)};
}

void expect_all_fast(std::vector<KernelSpec> all, GpuTarget target, const char* arch) {
  if (target == GpuTarget::cuda)
    for (KernelSpec& spec : all) spec = for_target(spec, target);
  compile_and_check(all, arch, expect_fast);
}

TEST(Mamba2Kernels, CompileForHopperGpusWithoutSpills) {
  skip_without_nvrtc();
  for (const bool vectorized : {true, false}) {
    expect_all_fast(specs(vectorized), GpuTarget::automatic, "sm_90a");
    expect_all_fast(walks(vectorized), GpuTarget::automatic, "sm_90a");
  }
}

TEST(Mamba2Kernels, CompileForOtherGpusWithoutSpills) {
  skip_without_nvrtc();
  expect_all_fast(specs(true), GpuTarget::cuda, "sm_86");
}

}  // namespace
}  // namespace tw::kernels::mamba2
