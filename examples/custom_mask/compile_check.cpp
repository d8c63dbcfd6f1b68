// Compiles the mask's kernel for the GPU. This needs NVRTC but no GPU. The kernel must not spill registers or cause a performance warning
// of the compiler. Exit code 77 if NVRTC is missing.
#include <cstdio>
#include <tilewave/attention_with.hpp>

#include "document_mask.tile.hpp"

int main() {
  const tw::DeviceReport found = tw::find_devices();
  if (found.nvrtc.empty()) {
    std::printf("skipped: %s\n", found.nvrtc_problem.c_str());
    return 77;
  }
  int failures = 0;
  for (const tw::KernelInfo& info : {tw::attention_with_kernel<SameDocument, tw::bf16, 64>({.causal = true}),
                                     tw::attention_with_kernel<SameDocument, tw::f16, 128>({.causal = true})}) {
    const tw::CompiledKernel kernel = tw::compile(tw::make_spec(info, true, true));
    const bool good = kernel.spill_bytes == 0 && kernel.performance_losses.empty() && !kernel.tensor_core_instruction.empty();
    failures += !good;
    std::printf("%s: %s, %d registers, %d spilled bytes\n", info.type.data(), good ? "good" : "BAD", kernel.registers, kernel.spill_bytes);
    for (const std::string& message : kernel.performance_losses) std::printf("  %s\n", message.c_str());
  }
  return failures != 0;
}
