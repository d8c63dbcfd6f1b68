#include "kernels/gemm/kernels.hpp"

#include "kernels/check.hpp"

namespace tw::kernels::gemm {

namespace {

/// A slot's rows have 128 bytes.
std::string tiles_of(const Config& c, std::size_t element_bytes) {
  return tw::format("tw::kernels::gemm::Tiles<{}, {}, {}, {}, {}, {}>", c.bm, c.bn, 128 / element_bytes, c.stages, c.cluster, c.band);
}
const char* contract_of(bool rows) { return rows ? "tw::Contract::rows" : "tw::Contract::columns"; }

std::string epilogue_of(const GemmKernel& k) {
  if (k.epilogue != nullptr) return std::string(k.epilogue->type);
  if (k.partial || k.dtype == DType::i8) return tw::format("tw::StoreSums<{}>", element_name(k.out));
  return linear_name(k.out, k.activation, {.addends = k.addends, .scales = size_of(k.dtype) == 1});
}

}  // namespace

std::string type_of(const GemmKernel& k) {
  return tw::format("tw::kernels::gemm::Gemm<tw::kernels::gemm::Operands<{}, {}, {}>, {}, {}, {}>", element_name(k.dtype),
                    contract_of(k.a_rows), contract_of(k.b_rows), epilogue_of(k), tiles_of(k.tile, size_of(k.dtype)), bool_name(k.partial));
}

std::string type_of(const SumKernel& k) {
  return tw::format("tw::kernels::gemm::SumPartials<{}, {}, {}>", linear_name(k.dtype, k.activation, {.addends = k.addends}), kSum.rows,
                    kSum.cols);
}

std::string type_of(const GemvKernel& k) {
  return tw::format("tw::kernels::gemm::Gemv<{}, {}, {}, {}, {}>", element_name(k.dtype),
                    linear_name(k.dtype, k.activation, {.addends = k.addends}), kGemv.rows, kGemv.piece, kGemv.warps);
}

std::string block_scaled_type_of(const Config& tile) {
  return tw::format("tw::kernels::gemm::BlockScaledGemm<tw::bf16, {}>", tiles_of(tile, 1));
}

}  // namespace tw::kernels::gemm
