#include "tile/cpu/isa.hpp"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

// GCC 12 takes the deliberately undefined operands inside its own header for mistakes of ours.
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include <immintrin.h>

#include "tile/cpu/pack.hpp"

namespace tw::cpu {
namespace {

struct Avx512 {
  static constexpr const char* kIsa = "avx512";
  using Register = __m512;
  static constexpr int kWidth = 16;
  static constexpr int kRows = 8, kVectors = 3;  // 24 of 32 registers: three panels of b against 8 + 8 rows of a
  static constexpr int kDepth = 128;             // four panels of 8 KB

  static Register zero() { return _mm512_setzero_ps(); }
  static Register load(const float* from) { return _mm512_loadu_ps(from); }
  static void store(float* to, Register x) { _mm512_storeu_ps(to, x); }
  static Register broadcast(const float* from) { return _mm512_set1_ps(*from); }
  static Register add(Register x, Register y) { return _mm512_add_ps(x, y); }
  static Register multiply_add(Register x, Register y, Register z) { return _mm512_fmadd_ps(x, y, z); }

  static __m256i load_16bit(const unsigned short* bits) { return _mm256_loadu_si256(reinterpret_cast<const __m256i_u*>(bits)); }
  static Register widen(F32, const float* bits) { return load(bits); }
  static Register widen(F16, const unsigned short* bits) { return _mm512_cvtph_ps(load_16bit(bits)); }
  static Register widen(BF16, const unsigned short* bits) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_16bit(bits)), 16));
  }

  static Register low_pairs(Register x, Register y) {
    return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(x), _mm512_castps_pd(y)));
  }
  static Register high_pairs(Register x, Register y) {
    return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(x), _mm512_castps_pd(y)));
  }

  static void transpose(Register (&v)[kWidth]) {
    Register lanes[kWidth];  // lanes[4 q + c]: in its 128-bit lane l, rows 4 q .. 4 q + 3 of column 4 l + c
    TILEWAVE_UNROLL(16)
    for (int q = 0; q < kWidth; q += 4) {
      const Register low0 = _mm512_unpacklo_ps(v[q], v[q + 1]), high0 = _mm512_unpackhi_ps(v[q], v[q + 1]);
      const Register low1 = _mm512_unpacklo_ps(v[q + 2], v[q + 3]), high1 = _mm512_unpackhi_ps(v[q + 2], v[q + 3]);
      lanes[q] = low_pairs(low0, low1);
      lanes[q + 1] = high_pairs(low0, low1);
      lanes[q + 2] = low_pairs(high0, high1);
      lanes[q + 3] = high_pairs(high0, high1);
    }
    // Lanes 0 and 2 of both operands, or lanes 1 and 3; twice that is a transposition of 4 x 4 lanes.
    constexpr int kEven = 0x88, kOdd = 0xdd;
    TILEWAVE_UNROLL(16)
    for (int c = 0; c < 4; ++c) {
      const Register even0 = _mm512_shuffle_f32x4(lanes[c], lanes[4 + c], kEven), odd0 = _mm512_shuffle_f32x4(lanes[c], lanes[4 + c], kOdd);
      const Register even1 = _mm512_shuffle_f32x4(lanes[8 + c], lanes[12 + c], kEven);
      const Register odd1 = _mm512_shuffle_f32x4(lanes[8 + c], lanes[12 + c], kOdd);
      v[c] = _mm512_shuffle_f32x4(even0, even1, kEven);
      v[4 + c] = _mm512_shuffle_f32x4(odd0, odd1, kEven);
      v[8 + c] = _mm512_shuffle_f32x4(even0, even1, kOdd);
      v[12 + c] = _mm512_shuffle_f32x4(odd0, odd1, kOdd);
    }
  }
};

}  // namespace

const Library* avx512_library() { return &kLibrary<Avx512>; }

}  // namespace tw::cpu

#else

namespace tw::cpu {

const Library* avx512_library() { return nullptr; }

}  // namespace tw::cpu

#endif
