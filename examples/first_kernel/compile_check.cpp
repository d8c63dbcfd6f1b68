// Compiles every kernel of the examples for the GPU. This needs NVRTC but no GPU. No kernel may spill registers or cause a performance
// warning of the compiler. Exit code 77 if NVRTC is missing.
#include <cstdio>
#include <tilewave/launch.hpp>
#include <vector>

#include "matmul_relu.tile.hpp"
#include "print.tile.hpp"
#include "step1_elementwise.tile.hpp"
#include "step2_row_reduction.tile.hpp"
#include "step3_matmul.tile.hpp"
#include "step4_attention_scores.tile.hpp"
#include "step5_rotary.tile.hpp"

int main() {
  const tw::DeviceReport found = tw::find_devices();
  if (found.nvrtc.empty()) {
    std::printf("skipped: %s\n", found.nvrtc_problem.c_str());
    return 77;
  }
  const std::vector<tw::KernelInfo> kernels = {tw::kernel_info<SiluMul<16, 128>>,
                                               tw::kernel_info<RmsNorm<8, 1024>>,
                                               tw::kernel_info<Matmul<tw::f16, 128, 64, 64, 4>>,
                                               tw::kernel_info<AttentionScores<tw::bf16, 64, 64, 128>>,
                                               tw::kernel_info<Rotary<32, 128>>,
                                               tw::kernel_info<Print>,
                                               tw::kernel_info<MatmulRelu>};
  int failures = 0;
  for (const tw::KernelInfo& info : kernels) {
    for (const bool tma : {true, false}) {
      const tw::KernelSpec spec = tw::make_spec(info, tma, tma);
      const tw::CompiledKernel kernel = tw::compile(spec);
      const bool good =
          kernel.spill_bytes == 0 && kernel.performance_losses.empty() && (!kernel.module.loads || !kernel.tensor_core_instruction.empty());
      failures += !good;
      std::printf("%-45s %s: %s, %3d registers, %d spilled bytes, %6d bytes of shared memory, %4.0f ms\n", spec.type.c_str(),
                  tma ? "TMA    " : "without", good ? "good" : "BAD", kernel.registers, kernel.spill_bytes, kernel.module.shared_bytes,
                  kernel.compile_ms);
      for (const std::string& message : kernel.performance_losses) std::printf("  %s\n", message.c_str());
    }
  }
  return failures != 0;
}
