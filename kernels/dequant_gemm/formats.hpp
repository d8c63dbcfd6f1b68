#pragma once

#include <string>
#include <type_traits>

#include "kernels/dequant_gemm/formats.tile.hpp"
#include "kernels/named.hpp"
#include "runtime/format.hpp"
#include "tilewave/quantized.hpp"

// A weight's format, and whose weight it is, as template arguments of kernels: as types and as text.

namespace tw::kernels::dequant_gemm {

template <WeightFormat format, int group, bool zeros>
constexpr auto format_type() {
  if constexpr (format == WeightFormat::int4)
    return std::type_identity<ScaledGroups<group, zeros>>{};
  else if constexpr (format == WeightFormat::int2)
    return std::type_identity<ScaledGroups<group, zeros, u2x4>>{};
  else if constexpr (format == WeightFormat::nf4)
    return std::type_identity<NormalFloats>{};
  else if constexpr (format == WeightFormat::fp4)
    return std::type_identity<ScaledFloats<f16>>{};
  else if constexpr (format == WeightFormat::mxfp4)
    return std::type_identity<ScaledFloats<e8m0>>{};
  else if constexpr (format == WeightFormat::fp8)
    return std::type_identity<ScaledRows<fp8_e4m3>>{};
  else
    return std::type_identity<ScaledRows<i8>>{};
}
/// The type for a kernel's values format, group and zeros.
template <auto k>
using FormatOf = typename decltype(format_type<k.format, k.group, k.zeros>())::type;

inline std::string format_name(WeightFormat format, int group, bool zeros) {
  const auto named = [](const char* name) { return tw::format("tw::kernels::dequant_gemm::{}", name); };
  if (format == WeightFormat::int4) return tw::format("{}<{}, {}>", named("ScaledGroups"), group, bool_name(zeros));
  if (format == WeightFormat::int2) return tw::format("{}<{}, {}, tw::u2x4>", named("ScaledGroups"), group, bool_name(zeros));
  if (format == WeightFormat::nf4) return named("NormalFloats");
  if (format == WeightFormat::fp4) return named("ScaledFloats<tw::f16>");
  if (format == WeightFormat::mxfp4) return named("ScaledFloats<tw::e8m0>");
  return named(format == WeightFormat::fp8 ? "ScaledRows<tw::fp8_e4m3>" : "ScaledRows<tw::i8>");
}

/// The last template argument of a kernel for groups of rows with weights of their own; empty for the default.
inline const char* weights_name(bool grouped) { return grouped ? ", tw::kernels::dequant_gemm::WeightOfGroup" : ""; }

/// The format whose Params are those of `format`: bytes of codes and scales of the same type.
constexpr WeightFormat params_format(WeightFormat format) {
  return format == WeightFormat::int2 || format == WeightFormat::fp4 ? WeightFormat::int4 : format;
}

}  // namespace tw::kernels::dequant_gemm
