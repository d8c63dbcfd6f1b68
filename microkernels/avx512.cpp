#include "microkernels/isa.hpp"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

// GCC 12 takes the deliberately undefined operands inside its own header for mistakes of ours.
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include <immintrin.h>

#include "microkernels/codes.hpp"
#include "microkernels/table.hpp"

namespace tw::cpu {
namespace {

struct Avx512 {
  static constexpr const char* kIsa = "avx512";
  using Element = float;
  using Sum = float;
  using Register = __m512;
  static constexpr int kWidth = 16;
  static constexpr int kRows = 8, kVectors = 3;  // 24 of 32 registers: three panels of b against 8 + 8 rows of a
  static constexpr int kDepth = 128;             // four panels of 8 KB
  static constexpr bool kStarts = false;

  [[gnu::always_inline]] static Register zero() { return _mm512_setzero_ps(); }
  [[gnu::always_inline]] static Register load(const float* from) { return _mm512_loadu_ps(from); }
  static void store(float* to, Register x) { _mm512_storeu_ps(to, x); }
  [[gnu::always_inline]] static Register columns(const float* from) { return load(from); }
  [[gnu::always_inline]] static Register row(const float* from) { return _mm512_set1_ps(*from); }
  [[gnu::always_inline]] static Register multiply_add(Register x, Register y, Register z) { return _mm512_fmadd_ps(x, y, z); }
  static void accumulate(float* to, Register sum, bool overwrite) { store(to, overwrite ? sum : _mm512_add_ps(load(to), sum)); }

  static __m128i load_quarter(const void* bits) { return _mm_loadu_si128(static_cast<const __m128i_u*>(bits)); }
  static __m256i load_half(const void* bits) { return _mm256_loadu_si256(static_cast<const __m256i_u*>(bits)); }
  static __m512i load_bits(const void* bits) { return _mm512_loadu_si512(bits); }

  static Register widen(F32, const float* bits) { return load(bits); }
  static Register widen(BF16, const unsigned short* groups) { return _mm512_castsi512_ps(load_bits(groups)); }
  static Register widen(I8, const signed char* groups) { return _mm512_castsi512_ps(load_bits(groups)); }
  static Register widen(F16, const unsigned short* bits) { return _mm512_cvtph_ps(load_half(bits)); }
  static Register widen(E5M2, const unsigned char* bits) {
    return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(load_quarter(bits)), 8));
  }
  static Register widen(E4M3, const unsigned char* bits) {
    // As f16 bits its exponent has a bias of 15 instead of 7, and its NaN is 1.875.
    const __m256i codes = _mm256_cvtepu8_epi16(load_quarter(bits)), magnitudes = _mm256_and_si256(codes, _mm256_set1_epi16(0x7f));
    const __m256i signs = _mm256_slli_epi16(_mm256_sub_epi16(codes, magnitudes), 8);
    const __m256i halves = _mm256_or_si256(signs, _mm256_slli_epi16(magnitudes, 7));
    const __mmask16 nan = _mm256_cmpeq_epi16_mask(magnitudes, _mm256_set1_epi16(0x7f));
    return _mm512_mul_ps(_mm512_cvtph_ps(_mm256_mask_mov_epi16(halves, nan, _mm256_set1_epi16(0x7e00))), _mm512_set1_ps(256.0f));
  }

  /// 32 elements divided by 256: as f16 bits their exponents have a bias of 15 instead of 7.
  static constexpr float kFiniteE4M3Factor = 256;
  static void widen_finite_e4m3(const unsigned char* bits, Register (&out)[2]) {
    // The arithmetic shift keeps the sign, and the mask drops its copy.
    const __m512i high = _mm512_slli_epi16(_mm512_cvtepu8_epi16(load_half(bits)), 8);
    const __m512i halves = _mm512_and_si512(_mm512_srai_epi16(high, 1), _mm512_set1_epi16(static_cast<short>(0xbfff)));
    out[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
    out[1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
  }

  static void widen_codes(const unsigned char* bits, Register (&out)[2]) {
    __m128i codes[2];
    unpack_codes<4>(bits, codes);
    for (int j = 0; j < 2; ++j) out[j] = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(codes[j]));
  }
  template <int kBits>
  static void lookup(const unsigned char* bits, const float* numbers, Register (&out)[2]) {
    __m128i codes[2];
    unpack_codes<kBits>(bits, codes);
    for (int j = 0; j < 2; ++j) out[j] = _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(codes[j]), load(numbers));
  }

  template <class Element>
  static Register interleave(Element element, const typename Element::Bits* const* k, int first) {
    return widen(element, k[0] + first);
  }
  static Register interleave(BF16, const unsigned short* const* k, int first) {
    const __m512i k0 = _mm512_cvtepu16_epi32(load_half(k[0] + first)), k1 = _mm512_cvtepu16_epi32(load_half(k[1] + first));
    return _mm512_castsi512_ps(_mm512_or_si512(k0, _mm512_slli_epi32(k1, 16)));
  }
  static Register interleave(I8, const signed char* const* k, int first) {
    const __m512i k0 = _mm512_cvtepu8_epi32(load_quarter(k[0] + first)), k1 = _mm512_cvtepu8_epi32(load_quarter(k[1] + first));
    const __m512i k2 = _mm512_cvtepu8_epi32(load_quarter(k[2] + first)), k3 = _mm512_cvtepu8_epi32(load_quarter(k[3] + first));
    const __m512i k01 = _mm512_or_si512(k0, _mm512_slli_epi32(k1, 8)), k23 = _mm512_or_si512(k2, _mm512_slli_epi32(k3, 8));
    return _mm512_castsi512_ps(_mm512_or_si512(k01, _mm512_slli_epi32(k23, 16)));
  }

  static void split(BF16, const unsigned short* groups, Register (&out)[2]) {
    const __m512i both = load_bits(groups);
    out[0] = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
    out[1] = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(~0xffff)));
  }
  static void split(I8, const signed char* groups, Register (&out)[4]) {
    const __m512i all = load_bits(groups);
    out[0] = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(all, 24), 24));
    out[1] = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(all, 16), 24));
    out[2] = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(all, 8), 24));
    out[3] = _mm512_cvtepi32_ps(_mm512_srai_epi32(all, 24));
  }

  static void stream_line(float* to, const float* from) { _mm512_stream_ps(to, load(from)); }
  static __m512i rounded(const float* from) {  // in the upper halves
    const Register x = load(from);
    const __m512i bits = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    return _mm512_mask_or_epi32(up, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), bits, _mm512_set1_epi32(0x400000));
  }
  static __m512i narrowed(const float* from) {
    const __m256i low = _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded(from), 16));
    const __m256i high = _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded(from + 16), 16));
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
  }
  static void stream_narrowed(unsigned short* to, const float* from) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), narrowed(from));
  }
  static void store_narrowed(unsigned short* to, const float* from) { _mm512_storeu_si512(to, narrowed(from)); }

  static void store_f16(unsigned short* to, const float* from) {
    _mm256_storeu_si256(reinterpret_cast<__m256i_u*>(to), _mm512_cvtps_ph(load(from), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  static void store_widened(float* to, const unsigned short* from) {
    store(to, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_half(from)), 16)));
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

  /// exp2() of math.tile.hpp without exponents of 128 and above, in as many registers as there are.
  static float exponentials(float* x, float scale, float base, int n) {
    const Register by = _mm512_set1_ps(scale), less = _mm512_set1_ps(base), magic = _mm512_set1_ps(12582912.0f);
    static constexpr float kRest[] = {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f};
    const auto exponential = [&](float* at) __attribute__((always_inline)) {
      const Register exponent = _mm512_fmsub_ps(load(at), by, less);
      const Register shifted = _mm512_add_ps(exponent, magic), f = _mm512_sub_ps(exponent, _mm512_sub_ps(shifted, magic));
      Register p = _mm512_set1_ps(1.540353e-4f);
      for (const float coefficient : kRest) p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(coefficient));
      const __mmask16 normal = _mm512_cmp_ps_mask(exponent, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
      const __m512i power = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);
      const Register result = _mm512_castsi512_ps(_mm512_maskz_add_epi32(normal, _mm512_castps_si512(p), power));
      store(at, result);
      return result;
    };
    Register sums[4] = {zero(), zero(), zero(), zero()};
    int k = 0;
    for (; k + 64 <= n; k += 64) {
      TILEWAVE_UNROLL(4)
      for (int j = 0; j < 4; ++j) sums[j] = _mm512_add_ps(sums[j], exponential(x + k + j * kWidth));
    }
    for (; k < n; k += kWidth) sums[0] = _mm512_add_ps(sums[0], exponential(x + k));
    return _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(sums[0], sums[1]), _mm512_add_ps(sums[2], sums[3])));
  }

  /// The instruction gives its second operand if one is NaN.
  static float largest(const float* x, int n) {
    Register found[4];
    for (Register& f : found) f = _mm512_set1_ps(-__builtin_inff());
    int k = 0;
    for (; k + 64 <= n; k += 64) {
      TILEWAVE_UNROLL(4)
      for (int j = 0; j < 4; ++j) found[j] = _mm512_max_ps(load(x + k + j * kWidth), found[j]);
    }
    for (; k < n; k += kWidth) found[0] = _mm512_max_ps(load(x + k), found[0]);
    return _mm512_reduce_max_ps(_mm512_max_ps(_mm512_max_ps(found[0], found[1]), _mm512_max_ps(found[2], found[3])));
  }

  struct Exact;
};

struct Avx512::Exact : Avx512 {
  using Sum = int;
  static void accumulate(int* to, Register sum, bool overwrite) {
    const __m512i exact = _mm512_cvtps_epi32(sum);
    _mm512_storeu_si512(to, overwrite ? exact : _mm512_add_epi32(exact, load_bits(to)));
  }
};

}  // namespace

const Library* avx512_library() { return &kLibrary<Avx512>; }
const QuantizedLibrary* avx512_quantized_library() { return &kQuantizedLibrary<Avx512>; }

}  // namespace tw::cpu

#else

namespace tw::cpu {

const Library* avx512_library() { return nullptr; }
const QuantizedLibrary* avx512_quantized_library() { return nullptr; }

}  // namespace tw::cpu

#endif
