#include "tile/cpu/isa.hpp"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include <immintrin.h>

#include "tile/cpu/pack.hpp"

namespace tw::cpu {
namespace {

struct Avx2 {
  static constexpr const char* kIsa = "avx2";
  using Register = __m256;
  static constexpr int kWidth = 8;
  static constexpr int kRows = 6, kVectors = 2;  // 12 of 16 registers: one panel of b against 6 + 6 + 4 rows of a
  static constexpr int kDepth = 256;             // two panels of 16 KB

  static Register zero() { return _mm256_setzero_ps(); }
  static Register load(const float* from) { return _mm256_loadu_ps(from); }
  static void store(float* to, Register x) { _mm256_storeu_ps(to, x); }
  static Register broadcast(const float* from) { return _mm256_broadcast_ss(from); }
  static Register add(Register x, Register y) { return _mm256_add_ps(x, y); }
  static Register multiply_add(Register x, Register y, Register z) { return _mm256_fmadd_ps(x, y, z); }

  static __m128i load_16bit(const unsigned short* bits) { return _mm_loadu_si128(reinterpret_cast<const __m128i_u*>(bits)); }
  static Register widen(F32, const float* bits) { return load(bits); }
  static Register widen(F16, const unsigned short* bits) { return _mm256_cvtph_ps(load_16bit(bits)); }
  static Register widen(BF16, const unsigned short* bits) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_16bit(bits)), 16));
  }

  static Register low_pairs(Register x, Register y) {
    return _mm256_castpd_ps(_mm256_unpacklo_pd(_mm256_castps_pd(x), _mm256_castps_pd(y)));
  }
  static Register high_pairs(Register x, Register y) {
    return _mm256_castpd_ps(_mm256_unpackhi_pd(_mm256_castps_pd(x), _mm256_castps_pd(y)));
  }

  static void transpose(Register (&v)[kWidth]) {
    Register lanes[kWidth];  // lanes[4 q + c]: in its 128-bit lane l, rows 4 q .. 4 q + 3 of column 4 l + c
    TILEWAVE_UNROLL(16)
    for (int q = 0; q < kWidth; q += 4) {
      const Register low0 = _mm256_unpacklo_ps(v[q], v[q + 1]), high0 = _mm256_unpackhi_ps(v[q], v[q + 1]);
      const Register low1 = _mm256_unpacklo_ps(v[q + 2], v[q + 3]), high1 = _mm256_unpackhi_ps(v[q + 2], v[q + 3]);
      lanes[q] = low_pairs(low0, low1);
      lanes[q + 1] = high_pairs(low0, low1);
      lanes[q + 2] = low_pairs(high0, high1);
      lanes[q + 3] = high_pairs(high0, high1);
    }
    TILEWAVE_UNROLL(16)
    for (int c = 0; c < 4; ++c) {
      v[c] = _mm256_permute2f128_ps(lanes[c], lanes[4 + c], 0x20);
      v[4 + c] = _mm256_permute2f128_ps(lanes[c], lanes[4 + c], 0x31);
    }
  }
};

}  // namespace

const Library* avx2_library() { return &kLibrary<Avx2>; }

}  // namespace tw::cpu

#else

namespace tw::cpu {

const Library* avx2_library() { return nullptr; }

}  // namespace tw::cpu

#endif
