// The kernels that calls launch, compiled for GPUs: those that are not registered.

#include <gtest/gtest.h>

#include <vector>

#include "kernels/linear_attention/call.hpp"
#include "kernels/linear_attention/gradients.tile.hpp"
#include "kernels/linear_attention/recurrence.tile.hpp"
#include "kernels/linear_attention/states.tile.hpp"
#include "kernels/linear_attention/walk.tile.hpp"
#include "tests/compiled_kernels.hpp"
#include "tests/support.hpp"
#include "tilewave/launch.hpp"

namespace tw::kernels::linear_attention {
namespace {

using namespace tw::test;

void expect_all_fast(std::vector<KernelSpec> specs, GpuTarget target, const char* arch) {
  if (target == GpuTarget::cuda)
    for (KernelSpec& spec : specs) spec = for_target(spec, target);
  compile_and_check(specs, arch, expect_fast);
}

KernelSpec outputs(int dim, int columns, StateForm form) {
  return make_spec({type_of_outputs({DType::f16, dim, columns, form}), Outputs<f16, 64, 64, StateForm::as_stored>::source, nullptr}, true,
                   true);
}

TEST(LinearAttentionKernels, CompileForHopperGpusWithoutSpills) {
  skip_without_nvrtc();
  using AnyWalk = Walk<f16, 128, kWalkColumns, kWalkStages>;
  using AnyStates = States<f16, kStatesColumns, kStages>;
  expect_all_fast({outputs(64, 64, StateForm::as_stored), outputs(64, 128, StateForm::transposed),
                   outputs(128, outputs_columns(128), StateForm::as_stored), outputs(256, outputs_columns(256), StateForm::as_stored),
                   outputs(256, outputs_columns(256), StateForm::transposed),
                   make_spec({type_of_walk({DType::f16, 64, 64}), AnyWalk::source, nullptr}, true, true),
                   make_spec({type_of_walk({DType::bf16, 128, 128}), AnyWalk::source, nullptr}, false, false),
                   make_spec({type_of_states({DType::bf16, kStatesColumns}), AnyStates::source, nullptr}, false, false),
                   make_spec(kernel_info<Recurrence<bf16, 256, recurrence_columns(256), recurrence_warps(256)>>, true, true),
                   make_spec(kernel_info<Recurrence<float, 128, recurrence_columns(128), recurrence_warps(128), false>>, false, false)},
                  GpuTarget::automatic, "sm_90a");
}

TEST(LinearAttentionKernels, CompileForOtherGpusWithoutSpills) {
  skip_without_nvrtc();
  expect_all_fast({outputs(64, 64, StateForm::as_stored), outputs(128, outputs_columns(128), StateForm::as_stored),
                   outputs(128, outputs_columns(128), StateForm::transposed),
                   make_spec(kernel_info<Recurrence<float, 256, recurrence_columns(256), recurrence_warps(256)>>, true, true),
                   make_spec(kernel_info<Recurrence<f16, 64, recurrence_columns(64), recurrence_warps(64)>>, false, false),
                   make_spec(kernel_info<GateProducts<bf16, 16, 256>>, true, true), make_spec(kernel_info<OwnSteps<32, 128>>, true, true),
                   make_spec(kernel_info<GateGradients<4, 128>>, true, true), make_spec(kernel_info<MatrixProduct<16, 128>>, true, true),
                   make_spec(kernel_info<SumOfHeads<bf16, 32, 128>>, true, true)},
                  GpuTarget::cuda, "sm_86");
}

}  // namespace
}  // namespace tw::kernels::linear_attention
