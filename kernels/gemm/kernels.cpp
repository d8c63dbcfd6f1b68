#include "kernels/gemm/kernels.hpp"

#include "kernels/check.hpp"

namespace tw::kernels::gemm {

std::string type_of(const Kernel& k) {
  const Config& c = k.tile;
  const std::string linear = linear_name(result_of(k), k.activation, linear_options(k));
  const std::string tiles = tw::format("tw::kernels::gemm::Tiles<{}, {}, {}, {}, {}, {}, {}>", c.bm, c.bn, kStepBytes / size_of(k.dtype),
                                       c.stages, c.cluster, c.band, c.teams);
  if (k.form == Kernel::sum) return tw::format("tw::kernels::gemm::SumPartials<{}, {}, {}>", linear, kSum.rows, kSum.cols);
  if (k.form == Kernel::block_scaled) return tw::format("tw::kernels::gemm::BlockScaledGemm<tw::bf16, {}>", tiles);
  if (k.form == Kernel::gemv)
    return tw::format("tw::kernels::gemm::Gemv<{}, {}, {}, {}, {}>", element_name(k.dtype), linear, kGemv.rows, kGemv.piece, kGemv.warps);
  if (k.form == Kernel::skinny)
    return tw::format("tw::kernels::gemm::SkinnyGemm<{}, {}, {}, {}, {}, {}>", element_name(k.dtype), linear, c.bm, c.bn, c.stages,
                      kSkinnyWarps);
  const bool partial = k.form == Kernel::partial;
  const std::string epilogue = k.epilogue != nullptr             ? std::string(k.epilogue->type)
                               : partial || k.dtype == DType::i8 ? tw::format("tw::StoreSums<{}>", partial ? "float" : "tw::i32")
                                                                 : linear;
  const auto contract = [](bool rows) { return rows ? "tw::Contract::rows" : "tw::Contract::columns"; };
  std::string operands = tw::format("{}, {}, {}", element_name(k.dtype), contract(k.layout.a_rows), contract(k.layout.b_rows));
  if (k.interleaved || k.mixed_fp8) operands += tw::format(", {}, {}", bool_name(k.interleaved), element_name(dtype_of_b(k)));
  if (k.form == Kernel::stream_k)
    return tw::format("tw::kernels::gemm::StreamKGemm<tw::kernels::gemm::Operands<{}>, {}, {}>", operands, epilogue, tiles);
  return tw::format("tw::kernels::gemm::Gemm<tw::kernels::gemm::Operands<{}>, {}, {}, {}>", operands, epilogue, tiles, bool_name(partial));
}

std::string_view source_of(const Kernel& k) {
  if (k.epilogue != nullptr) return k.epilogue->source;
  if (k.form == Kernel::block_scaled) return "kernels/gemm/block_scaled.tile.hpp";
  if (k.form == Kernel::stream_k) return "kernels/gemm/stream_k.tile.hpp";
  const bool skinny = k.form == Kernel::sum || k.form == Kernel::gemv || k.form == Kernel::skinny;
  return skinny ? "kernels/gemm/skinny.tile.hpp" : "tilewave/tile/gemm.tile.hpp";
}

const detail::NamedKernel& named(const Kernel& kernel) {
  static KernelTable<Kernel> table(type_of, source_of);
  return table[kernel];
}

std::string name_of(const Kernel& k, bool pieces) {
  constexpr const char* kActivations[] = {"", "_relu", "_gelu_erf", "_gelu_tanh", "_silu", "_swiglu"};
  const std::string_view dtype = k.dtype == DType::f32 ? "tf32" : k.dtype == DType::fp8_e4m3 ? "fp8" : tw::name_of(k.dtype);
  std::string name = tw::format("{}_{}", k.form == Kernel::gemv ? "gemv" : "gemm", dtype);
  if (k.mixed_fp8) name += tw::format("_{}", tw::name_of(dtype_of_b(k)));
  if (k.form == Kernel::sum) {
    name += "_sum_partials";
  } else if (k.form == Kernel::block_scaled) {
    name += "_block_scaled";
  } else if (k.form == Kernel::skinny) {
    name += tw::format("_skinny_{}x{}", k.tile.bm, k.tile.bn);
  } else if (k.form != Kernel::gemv) {
    name += tw::format("_{}_{}x{}", k.layout.a_rows ? "tn" : k.layout.b_rows ? "nn" : "nt", k.tile.bm, k.tile.bn);
    if (k.form == Kernel::partial) name += "_partial";
    if (k.form == Kernel::stream_k) name += "_stream_k";
  }
  if (result_of(k) != result_of(k.dtype)) name += tw::format("_to_{}", tw::name_of(result_of(k)));
  if (k.row_scales) name += "_row_scales";
  return tw::format("{}{}{}{}{}{}{}", name, k.tile.cluster > 1 ? "_cluster" : "", k.tile.teams > 1 ? "_teams" : "",
                    k.interleaved ? "_interleaved" : "",
                    k.begins    ? "_begins"
                    : k.addends ? "_addends"
                                : "",
                    kActivations[static_cast<std::size_t>(k.activation)], pieces ? "" : "_strided");
}

}  // namespace tw::kernels::gemm
