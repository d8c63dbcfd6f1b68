#pragma once

#include <compare>
#include <string>
#include <string_view>
#include <type_traits>

#include "kernels/gemm/block_scaled.tile.hpp"
#include "kernels/gemm/skinny.tile.hpp"
#include "kernels/gemm/stream_k.tile.hpp"
#include "kernels/gemm/variants.hpp"
#include "kernels/named.hpp"
#include "kernels/rows.hpp"
#include "tilewave/gemm_with.hpp"

namespace tw::kernels::gemm {

/// One of the family's GPU kernels by the values that name it: no template is instantiated on the host for a tile size, a layout or an
/// epilogue.
struct Kernel {
  enum Form {
    whole,        ///< A B and the epilogue: Gemm
    stream_k,     ///< the same in shares of K: StreamKGemm
    partial,      ///< f32 sums over splits of K: Gemm
    sum,          ///< the sum of those, and the epilogue: SumPartials
    gemv,         ///< one row of A: Gemv
    skinny,       ///< few rows of A: SkinnyGemm
    block_scaled  ///< BlockScaledGemm
  };
  DType dtype = DType::bf16;  ///< of A and, unless `mixed_fp8`, of B
  Form form = whole;
  DType fp8_result = DType::bf16;  ///< of D, where A and B are fp8
  Layout layout = {};
  Activation activation = Activation::none;
  bool addends = false;      ///< D is read as C, or a residual is
  bool begins = false;       ///< the same, and the sums begin with it
  bool row_scales = false;   ///< a scale for each row of A and each column of B
  bool interleaved = false;  ///< B's halves are interleaved: see Operands
  bool mixed_fp8 = false;    ///< B is of the other kind of fp8
  Config tile{};
  const detail::EpilogueInfo* epilogue = nullptr;  ///< a user's, instead of the activation and the addends
  auto operator<=>(const Kernel&) const = default;
};

/// The elements of D, if a call does not choose.
constexpr DType result_of(DType operands) { return is_8bit_float(operands) ? DType::bf16 : operands == DType::i8 ? DType::i32 : operands; }
constexpr DType result_of(const Kernel& k) { return is_8bit_float(k.dtype) ? k.fp8_result : result_of(k.dtype); }
constexpr DType dtype_of_b(const Kernel& k) {
  if (!k.mixed_fp8) return k.dtype;
  return k.dtype == DType::fp8_e4m3 ? DType::fp8_e5m2 : DType::fp8_e4m3;
}

/// What the epilogue of `k` does beside alpha, bias and activation.
constexpr LinearOptions linear_options(const Kernel& k) {
  return {
      .addends = k.addends && !k.begins, .scales = is_8bit_float(k.dtype) && !k.row_scales, .begins = k.begins, .row_scales = k.row_scales};
}

/// The type for the run-time compiler, and the file that defines it.
std::string type_of(const Kernel& kernel);
std::string_view source_of(const Kernel& kernel);
const detail::NamedKernel& named(const Kernel& kernel);

/// For people: "gemm_bf16_nt_128x256_gelu_erf". `pieces`: as in make_spec().
std::string name_of(const Kernel& kernel, bool pieces);

/// The same kernel as a type: for Params, which are those of every tile, layout and activation, and for the analysis target.
template <Kernel k, class Act>
constexpr auto host_kernel() {
  using T = ElementOf<k.dtype>;
  using Out = ElementOf<result_of(k)>;
  using End = Linear<Out, Act, linear_options(k)>;
  using Steps =
      Tiles<k.tile.bm, k.tile.bn, kStepBytes / static_cast<int>(sizeof(T)), k.tile.stages, k.tile.cluster, k.tile.band, k.tile.teams>;
  using In = Operands<T, k.layout.a_rows ? Contract::rows : Contract::columns, k.layout.b_rows ? Contract::rows : Contract::columns,
                      k.interleaved>;
  if constexpr (k.form == Kernel::partial)
    return std::type_identity<Gemm<In, StoreSums<float>, Steps, true>>{};
  else if constexpr (k.form == Kernel::sum)
    return std::type_identity<SumPartials<End, kSum.rows, kSum.cols>>{};
  else if constexpr (k.form == Kernel::gemv)
    return std::type_identity<Gemv<T, End, kGemv.rows, kGemv.piece, kGemv.warps>>{};
  else if constexpr (k.form == Kernel::skinny)
    return std::type_identity<SkinnyGemm<T, End, k.tile.bm, k.tile.bn, k.tile.stages, kSkinnyWarps>>{};
  else if constexpr (k.form == Kernel::block_scaled)
    return std::type_identity<BlockScaledGemm<bf16, Steps>>{};
  else if constexpr (k.form == Kernel::stream_k)
    return std::type_identity<StreamKGemm<In, End, Steps>>{};
  else
    return std::type_identity<Gemm<In, conditional<is_same<T, i8>, StoreSums<Out>, End>, Steps>>{};
}
template <Kernel k, class Act = FunctorOf<k.activation>>
using HostKernel = typename decltype(host_kernel<k, Act>())::type;

}  // namespace tw::kernels::gemm
