#include "kernels/registry.hpp"

#include "kernels/attention/variants.hpp"
#include "kernels/bitnet/variants.hpp"
#include "kernels/block_sparse_gemm/kernels.hpp"
#include "kernels/cast_fp8/variants.hpp"
#include "kernels/causal_conv1d/variants.hpp"
#include "kernels/convolution/tuning.hpp"
#include "kernels/convolution/variants.hpp"
#include "kernels/decode_step/decode_step.hpp"
#include "kernels/dequant_gemm/variants.hpp"
#include "kernels/elementwise/variants.hpp"
#include "kernels/embedding/variants.hpp"
#include "kernels/gated_delta/variants.hpp"
#include "kernels/gemm/tuning.hpp"
#include "kernels/gemm/variants.hpp"
#include "kernels/grouped_gemm/kernels.hpp"
#include "kernels/hadamard/variants.hpp"
#include "kernels/indexer/kernels.hpp"
#include "kernels/linear_attention/call.hpp"
#include "kernels/log_mel/variants.hpp"
#include "kernels/mamba2/call.hpp"
#include "kernels/mla/kernels.hpp"
#include "kernels/moe/variants.hpp"
#include "kernels/norm/tuning.hpp"
#include "kernels/norm/variants.hpp"
#include "kernels/nsa/kernels.hpp"
#include "kernels/reduce/variants.hpp"
#include "kernels/rope/variants.hpp"
#include "kernels/softmax/tuning.hpp"
#include "kernels/softmax/variants.hpp"
#include "kernels/sparse_gemm/kernels.hpp"
#include "kernels/swiglu/variants.hpp"
#include "kernels/topk/variants.hpp"
#include "kernels/transpose/variants.hpp"
#include "kernels/tuner.hpp"
#include "runtime/target.hpp"

namespace tw {

std::vector<RegisteredKernel> registered_kernels() {
  std::vector<RegisteredKernel> all;
  const auto add = [&](const char* family, const std::vector<KernelVariant>& variants, std::span<const ShapeKey> shape) {
    for (const KernelVariant& variant : variants) all.push_back({family, variant.spec, shape, variant.analyze});
  };
  add("gemm", kernels::gemm::registered(), kernels::gemm::kShape);
  add("grouped_gemm", kernels::grouped_gemm::registered(), kernels::grouped_gemm::kShape);
  add("attention", kernels::attention::registered(), kernels::attention::kShape);
  add("mla", kernels::mla::registered(), kernels::mla::kShape);
  add("indexer", kernels::indexer::registered(), kernels::indexer::kShape);
  add("nsa", kernels::nsa::registered(), kernels::nsa::kShape);
  add("convolution", kernels::convolution::registered(), kernels::convolution::kShape);
  add("causal_conv1d", kernels::causal_conv1d::registered(), kernels::causal_conv1d::kShape);
  add("gated_delta", kernels::gated_delta::registered(), kernels::gated_delta::kShape);
  add("elementwise", kernels::elementwise::registered(), kernels::elementwise::kShape);
  add("transpose", kernels::transpose::registered(), kernels::transpose::kShape);
  add("reduce", kernels::reduce::registered(), kernels::reduce::kShape);
  add("embedding", kernels::embedding::registered(), kernels::embedding::kShape);
  add("softmax", kernels::softmax::registered(), kernels::softmax::kShape);
  add("hadamard", kernels::hadamard::registered(), kernels::hadamard::kShape);
  add("norm", kernels::norm::registered(), kernels::norm::kShape);
  add("swiglu", kernels::swiglu::registered(), kernels::swiglu::kShape);
  add("rope", kernels::rope::registered(), kernels::rope::kShape);
  add("cast_fp8", kernels::cast_fp8::registered(), kernels::cast_fp8::kShape);
  add("topk", kernels::topk::registered(), kernels::topk::kShape);
  add("dequant_gemm", kernels::dequant_gemm::registered(), kernels::dequant_gemm::kShape);
  add("bitnet", kernels::bitnet::registered(), kernels::bitnet::kShape);
  add("log_mel", kernels::log_mel::registered(), kernels::log_mel::kShape);
  add("moe", kernels::moe::registered(), kernels::moe::kShape);
  add("sparse_gemm", kernels::sparse_gemm::registered(), kernels::sparse_gemm::kShape);
  add("block_sparse_gemm", kernels::block_sparse_gemm::registered(), kernels::block_sparse_gemm::kShape);
  add("linear_attention", kernels::linear_attention::registered(), kernels::linear_attention::kShape);
  add("mamba2", kernels::mamba2::registered(), kernels::mamba2::kShape);
  add("decode_step", kernels::decode_step::registered(), kernels::decode_step::kShape);
  return all;
}

std::vector<RegisteredKernel> registered_kernels(std::string_view arch, GpuTarget target) {
  std::vector<RegisteredKernel> all = registered_kernels();
  if (target != GpuTarget::cuda) return all;
  constexpr std::string_view kOtherTiles[] = {"gemm",        "attention",        "mla",         "indexer",
                                              "nsa",         "convolution",      "sparse_gemm", "block_sparse_gemm",
                                              "gated_delta", "linear_attention", "mamba2",      "decode_step"};
  const auto tiles_differ = [&](const RegisteredKernel& kernel) {
    return std::ranges::find(kOtherTiles, kernel.family) != std::end(kOtherTiles);
  };
  std::erase_if(all, tiles_differ);
  for (RegisteredKernel& kernel : all) kernel.spec = for_target(kernel.spec, target);
  const auto add = [&](const char* family, const std::vector<KernelSpec>& specs) {
    for (const KernelSpec& spec : specs) all.push_back({family, spec, {}, nullptr});
  };
  const int shared = max_shared_bytes(arch);
  add("gemm", kernels::gemm::registered_generic(shared));
  add("attention", kernels::attention::registered_generic(shared));
  add("mla", kernels::mla::registered_generic(shared));
  add("indexer", kernels::indexer::registered_generic(shared));
  add("nsa", kernels::nsa::registered_generic(shared));
  add("convolution", kernels::convolution::registered_generic(shared));
  add("sparse_gemm", kernels::sparse_gemm::registered_generic(shared));
  add("block_sparse_gemm", kernels::block_sparse_gemm::registered_generic(shared));
  add("gated_delta", kernels::gated_delta::registered_generic());
  add("linear_attention", kernels::linear_attention::registered_generic());
  add("mamba2", kernels::mamba2::registered_generic());
  return all;
}

std::vector<TunableFamily> tunable_families() {
  const std::vector<DType> floats{DType::bf16, DType::f16, DType::f32};
  return {
      {"gemm", kernels::gemm::kTuneShape, {DType::bf16, DType::f16, DType::f32, DType::fp8_e4m3, DType::i8}, kernels::gemm::tune_problem},
      {"convolution", kernels::convolution::kTuneShape, floats, kernels::convolution::tune_problem},
      {"attention", kernels::attention::kTuneShape, {DType::bf16, DType::f16}, kernels::attention::tune_problem},
      {"decode", kernels::attention::kTuneDecodeShape, {DType::bf16, DType::f16}, kernels::attention::tune_decode_problem},
      {"softmax", kernels::softmax::kTuneShape, floats, kernels::softmax::tune_problem},
      {"norm", kernels::norm::kTuneShape, floats, kernels::norm::tune_problem}};
}

}  // namespace tw
