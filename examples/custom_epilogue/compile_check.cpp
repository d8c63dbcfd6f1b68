// Compiles the epilogue's kernels for the GPU, which needs NVRTC and no GPU: they must not spill registers, nor lose performance in a way
// that the compiler reports. Exit code 77 when NVRTC is not there.
#include <cstdio>
#include <tilewave/gemm_with.hpp>

#include "row_argmax.tile.hpp"

int main() {
  const tw::DeviceReport found = tw::find_devices();
  if (found.nvrtc.empty()) {
    std::printf("skipped: %s\n", found.nvrtc_problem.c_str());
    return 77;
  }
  // The first has the largest tiles.
  const tw::KernelInfo info = tw::gemm_with_kernels<RowArgmax, tw::bf16>().front();
  const tw::CompiledKernel kernel = tw::compile(tw::make_spec(info, true, true));
  const bool good = kernel.spill_bytes == 0 && kernel.performance_losses.empty() && !kernel.tensor_core_instruction.empty();
  std::printf("%s: %s, %d registers, %d spilled bytes\n", info.type.data(), good ? "good" : "BAD", kernel.registers, kernel.spill_bytes);
  for (const std::string& message : kernel.performance_losses) std::printf("  %s\n", message.c_str());
  return good ? 0 : 1;
}
