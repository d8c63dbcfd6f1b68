#include "kernels/registry.hpp"

#include "kernels/attention/variants.hpp"
#include "kernels/cast_fp8/variants.hpp"
#include "kernels/convolution/variants.hpp"
#include "kernels/elementwise/variants.hpp"
#include "kernels/embedding/variants.hpp"
#include "kernels/gemm/variants.hpp"
#include "kernels/norm/variants.hpp"
#include "kernels/reduce/variants.hpp"
#include "kernels/rope/variants.hpp"
#include "kernels/softmax/variants.hpp"
#include "kernels/swiglu/variants.hpp"
#include "kernels/topk/variants.hpp"
#include "kernels/transpose/variants.hpp"

namespace tw {

std::vector<RegisteredKernel> registered_kernels() {
  std::vector<RegisteredKernel> all;
  const auto add = [&](const char* family, const std::vector<KernelSpec>& specs) {
    for (const KernelSpec& spec : specs) all.push_back({family, spec});
  };
  add("gemm", kernels::gemm::registered());
  add("attention", kernels::attention::registered());
  add("convolution", kernels::convolution::registered());
  add("elementwise", kernels::elementwise::registered());
  add("transpose", kernels::transpose::registered());
  add("reduce", kernels::reduce::registered());
  add("embedding", kernels::embedding::registered());
  add("softmax", kernels::softmax::registered());
  add("norm", kernels::norm::registered());
  add("swiglu", kernels::swiglu::registered());
  add("rope", kernels::rope::registered());
  add("cast_fp8", kernels::cast_fp8::registered());
  add("topk", kernels::topk::registered());
  return all;
}

}  // namespace tw
