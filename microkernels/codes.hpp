#pragma once

// Weights in codes of 4 or 2 bits, for every instruction set of x86 from AVX2 on; internal to each file that includes it.

#include <immintrin.h>

namespace tw::cpu {
namespace {

/// 32 codes, two or four to a byte, as bytes in order.
template <int kBits>
void unpack_codes(const unsigned char* bits, __m128i (&codes)[2]) {
  const auto* const from = reinterpret_cast<const __m128i_u*>(bits);
  const __m128i low = _mm_set1_epi8((1 << kBits) - 1);
  const __m128i packed = kBits == 4 ? _mm_loadu_si128(from) : _mm_loadl_epi64(from);
  const auto code = [&](int n) { return _mm_and_si128(_mm_srli_epi16(packed, kBits * n), low); };
  if constexpr (kBits == 4) {
    codes[0] = _mm_unpacklo_epi8(code(0), code(1)), codes[1] = _mm_unpackhi_epi8(code(0), code(1));
  } else {
    const __m128i first = _mm_unpacklo_epi8(code(0), code(1)), last = _mm_unpacklo_epi8(code(2), code(3));
    codes[0] = _mm_unpacklo_epi16(first, last), codes[1] = _mm_unpackhi_epi16(first, last);
  }
}

}  // namespace
}  // namespace tw::cpu
