#pragma once

#include <compare>
#include <string>

#include "kernels/gemm/variants.hpp"
#include "kernels/named.hpp"
#include "tilewave/gemm_with.hpp"

// The family's GPU kernels by the values that name them: no template is instantiated on the host for a tile size, a layout or an epilogue.

namespace tw::kernels::gemm {

/// Gemm<Operands, Epilogue, Tiles>.
struct GemmKernel {
  DType dtype, out;
  bool a_rows = false, b_rows = false;  ///< A is stored [K, M]; B is stored [K, N]
  bool partial = false;                 ///< f32 sums over splits of K, for SumPartials
  Activation activation = Activation::none;
  bool addends = false;                            ///< D is read as C, or a residual is
  const detail::EpilogueInfo* epilogue = nullptr;  ///< a user's, instead of what the four before say
  Config tile{};
  auto operator<=>(const GemmKernel&) const = default;
};
std::string type_of(const GemmKernel& kernel);

/// SumPartials.
struct SumKernel {
  DType dtype;
  Activation activation = Activation::none;
  bool addends = false;
  auto operator<=>(const SumKernel&) const = default;
};
std::string type_of(const SumKernel& kernel);

/// Gemv.
struct GemvKernel {
  DType dtype;
  Activation activation = Activation::none;
  bool addends = false;
  auto operator<=>(const GemvKernel&) const = default;
};
std::string type_of(const GemvKernel& kernel);

/// BlockScaledGemm.
std::string block_scaled_type_of(const Config& tile);

}  // namespace tw::kernels::gemm
