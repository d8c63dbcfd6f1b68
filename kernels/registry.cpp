#include "kernels/registry.hpp"

#include "kernels/attention/variants.hpp"
#include "kernels/convolution/variants.hpp"
#include "kernels/gemm/variants.hpp"

namespace tw {

std::vector<RegisteredKernel> registered_kernels() {
  std::vector<RegisteredKernel> all;
  const auto add = [&](const char* family, const std::vector<KernelSpec>& specs) {
    for (const KernelSpec& spec : specs) all.push_back({family, spec});
  };
  add("gemm", kernels::gemm::registered());
  add("attention", kernels::attention::registered());
  add("convolution", kernels::convolution::registered());
  return all;
}

}  // namespace tw
