#pragma once

// All that an instruction set provides, from its class V (pack.hpp, rows.hpp); internal to each file that includes it.

#include "microkernels/dots.hpp"
#include "microkernels/pack.hpp"
#include "microkernels/quantized.hpp"

namespace tw::cpu {
namespace {

template <class V>
constexpr Library kLibrary{V::kIsa,
                           mma<V>,
                           mma_widening<V, V, BF16>,
                           mma_widening<V, typename V::Exact, I8>,
                           pack<V, F32>,
                           pack<V, F16>,
                           pack<V, E4M3>,
                           pack<V, E5M2>,
                           pack<V, BF16>,
                           pack<V, I8>,
                           stream_f32<V>,
                           stream_bf16<V>,
                           narrow_bf16<V>,
                           narrow_f16<V>,
                           widen_bf16<V>,
                           widen_f16<V>,
                           dots<V, F32>,
                           dots<V, BF16>,
                           dots<V, F16>,
                           add_rows<V>,
                           V::exponentials,
                           V::largest,
                           nullptr};

template <class V>
constexpr QuantizedLibrary kQuantizedLibrary{.dequantize_i8 = dequantize_i8,
                                             .dequantize_e4m3 = dequantize_e4m3<V>,
                                             .dequantize_u4 = dequantize_u4<V>,
                                             .dequantize_numbers = dequantize_numbers<V>,
                                             .dots_i8 = quantized_dots<V, dequantize_i8>,
                                             .dots_e4m3 = dots_e4m3<V>,
                                             .dots_u4 = quantized_dots<V, dequantize_u4<V>>,
                                             .dots_numbers = quantized_dots<V, dequantize_numbers<V>>,
                                             .round_for_i8 = nullptr,
                                             .round_for_u4 = nullptr,
                                             .round_to_i8 = nullptr,
                                             .rounded_dots_i8 = nullptr,
                                             .rounded_dots_u4 = nullptr};

}  // namespace
}  // namespace tw::cpu
