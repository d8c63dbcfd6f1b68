#pragma once

#include "microkernels/quantized_library.hpp"
#include "tilewave/tile/cpu/library.tile.hpp"

// What library() chooses from, apart for the tests.

namespace tw::cpu {

const Library* baseline_library();
const Library* avx2_library();    ///< null when not compiled in; to be called only where has_avx2()
const Library* avx512_library();  ///< null when not compiled in; to be called only where has_avx512()
/// The same for products with weights in fewer bits; null with them.
const QuantizedLibrary* baseline_quantized_library();
const QuantizedLibrary* avx2_quantized_library();
const QuantizedLibrary* avx512_quantized_library();

/// Of AVX2, in a file of their own. Null when not compiled in; to be used only where has_avx2().
RoundedDots avx2_rounded_dots_i8();
RoundedDots avx2_rounded_dots_u4();
RoundRow avx2_round_for_i8();
RoundRow avx2_round_for_u4();

/// Extensions of AVX-512, which come and go apart from each other. Null when not compiled in; to be used only where has_...().
Mma<int, signed char> avx512_vnni_mma();
RoundedDots avx512_vnni_rounded_dots_i8();
RoundedDots avx512_vnni_rounded_dots_u4();
RoundRow avx512_vnni_round_for_i8();
RoundRow avx512_vnni_round_for_u4();
RoundToI8 avx512_vnni_round_to_i8();
Mma<float, unsigned short> avx512_bf16_mma();
Stream<unsigned short> avx512_bf16_stream();
Narrow avx512_bf16_narrow();
Mma<float, unsigned short> avx512_amx_mma_bf16();
Mma<float, unsigned short> avx512_amx_mma_bf16_by_rows();
Mma<int, signed char> avx512_amx_mma_i8();

/// Whether this processor, under this operating system, runs the set (every extension that its source file is compiled with).
bool has_avx2();
bool has_avx512();
bool has_avx512_vnni();
bool has_avx512_bf16();
/// AMX's tiles of bf16 and int8, with both of the above, as all processors that have AMX do. The first call asks the operating system for
/// permission to use tiles, which it gives to the whole process.
bool has_avx512_amx();

/// avx512_library() with the products and roundings of those extensions that this processor has. To be called only where has_avx512() and
/// that is not null.
const Library* extended_avx512_library();
/// extended_avx512_library() with products on tiles; null when not compiled in. To be called only where has_avx512_amx().
const Library* amx_avx512_library();

}  // namespace tw::cpu
