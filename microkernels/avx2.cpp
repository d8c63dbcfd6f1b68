#include "microkernels/isa.hpp"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include <immintrin.h>

#include "microkernels/codes.hpp"
#include "microkernels/table.hpp"

namespace tw::cpu {
namespace {

struct Avx2 {
  static constexpr const char* kIsa = "avx2";
  static constexpr Exponentials exponentials = nullptr;
  static constexpr LargestOf largest = nullptr;
  using Element = float;
  using Sum = float;
  using Register = __m256;
  static constexpr int kWidth = 8;
  static constexpr int kRows = 6, kVectors = 2;  // 12 of 16 registers: one panel of b against 6 + 6 + 4 rows of a
  static constexpr int kDepth = 256;             // two panels of 16 KB
  static constexpr bool kStarts = false;

  [[gnu::always_inline]] static Register zero() { return _mm256_setzero_ps(); }
  [[gnu::always_inline]] static Register load(const float* from) { return _mm256_loadu_ps(from); }
  static void store(float* to, Register x) { _mm256_storeu_ps(to, x); }
  [[gnu::always_inline]] static Register columns(const float* from) { return load(from); }
  [[gnu::always_inline]] static Register row(const float* from) { return _mm256_broadcast_ss(from); }
  [[gnu::always_inline]] static Register multiply_add(Register x, Register y, Register z) { return _mm256_fmadd_ps(x, y, z); }
  static void accumulate(float* to, Register sum, bool overwrite) { store(to, overwrite ? sum : _mm256_add_ps(load(to), sum)); }

  static __m128i load_half(const void* bits) { return _mm_loadu_si128(static_cast<const __m128i_u*>(bits)); }
  static __m128i load_quarter(const void* bits) { return _mm_loadu_si64(bits); }
  static __m256i load_bits(const void* bits) { return _mm256_loadu_si256(static_cast<const __m256i_u*>(bits)); }

  static Register widen(F32, const float* bits) { return load(bits); }
  static Register widen(BF16, const unsigned short* groups) { return _mm256_castsi256_ps(load_bits(groups)); }
  static Register widen(I8, const signed char* groups) { return _mm256_castsi256_ps(load_bits(groups)); }
  static Register widen(F16, const unsigned short* bits) { return _mm256_cvtph_ps(load_half(bits)); }
  static Register widen(E5M2, const unsigned char* bits) {
    return _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(load_quarter(bits)), 8));
  }
  static Register widen(E4M3, const unsigned char* bits) {
    // As f16 bits its exponent has a bias of 15 instead of 7, and its NaN is 1.875.
    const __m128i codes = _mm_cvtepu8_epi16(load_quarter(bits)), magnitudes = _mm_and_si128(codes, _mm_set1_epi16(0x7f));
    const __m128i signs = _mm_slli_epi16(_mm_sub_epi16(codes, magnitudes), 8);
    const __m128i nan = _mm_cmpeq_epi16(magnitudes, _mm_set1_epi16(0x7f));
    const __m128i halves = _mm_or_si128(_mm_or_si128(signs, _mm_slli_epi16(magnitudes, 7)), _mm_and_si128(nan, _mm_set1_epi16(0x7e00)));
    return _mm256_mul_ps(_mm256_cvtph_ps(halves), _mm256_set1_ps(256.0f));
  }

  /// 32 bytes as integers of 32 bits.
  static void widen_bytes(const __m128i (&bytes)[2], __m256i (&out)[4]) {
    for (int j = 0; j < 2; ++j) {
      out[2 * j] = _mm256_cvtepu8_epi32(bytes[j]);
      out[2 * j + 1] = _mm256_cvtepu8_epi32(_mm_srli_si128(bytes[j], 8));
    }
  }
  static void widen_codes(const unsigned char* bits, Register (&out)[4]) {
    __m128i codes[2];
    __m256i wide[4];
    unpack_codes<4>(bits, codes);
    widen_bytes(codes, wide);
    for (int j = 0; j < 4; ++j) out[j] = _mm256_cvtepi32_ps(wide[j]);
  }
  template <int kBits>
  static void lookup(const unsigned char* bits, const float* numbers, Register (&out)[4]) {
    __m128i codes[2];
    __m256i wide[4];
    unpack_codes<kBits>(bits, codes);
    widen_bytes(codes, wide);
    for (int j = 0; j < 4; ++j) {
      out[j] = _mm256_permutevar8x32_ps(load(numbers), wide[j]);
      if constexpr (kBits == 4) {  // a register holds half of the table
        const Register upper = _mm256_permutevar8x32_ps(load(numbers + 8), wide[j]);
        out[j] = _mm256_blendv_ps(out[j], upper, _mm256_castsi256_ps(_mm256_slli_epi32(wide[j], 28)));
      }
    }
  }

  template <class Element>
  static Register interleave(Element element, const typename Element::Bits* const* k, int first) {
    return widen(element, k[0] + first);
  }
  static Register interleave(BF16, const unsigned short* const* k, int first) {
    const __m128i k0 = load_half(k[0] + first), k1 = load_half(k[1] + first);
    return _mm256_castsi256_ps(_mm256_set_m128i(_mm_unpackhi_epi16(k0, k1), _mm_unpacklo_epi16(k0, k1)));
  }
  static Register interleave(I8, const signed char* const* k, int first) {
    const __m128i k01 = _mm_unpacklo_epi8(load_quarter(k[0] + first), load_quarter(k[1] + first));
    const __m128i k23 = _mm_unpacklo_epi8(load_quarter(k[2] + first), load_quarter(k[3] + first));
    return _mm256_castsi256_ps(_mm256_set_m128i(_mm_unpackhi_epi16(k01, k23), _mm_unpacklo_epi16(k01, k23)));
  }

  static void split(BF16, const unsigned short* groups, Register (&out)[2]) {
    const __m256i both = load_bits(groups);
    out[0] = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
    out[1] = _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(~0xffff)));
  }
  static void split(I8, const signed char* groups, Register (&out)[4]) {
    const __m256i all = load_bits(groups);
    out[0] = _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(all, 24), 24));
    out[1] = _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(all, 16), 24));
    out[2] = _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(all, 8), 24));
    out[3] = _mm256_cvtepi32_ps(_mm256_srai_epi32(all, 24));
  }

  static void stream_line(float* to, const float* from) {
    _mm256_stream_ps(to, load(from));
    _mm256_stream_ps(to + 8, load(from + 8));
  }
  static __m256i rounded(const float* from) {  // in the upper halves
    const Register x = load(from);
    const __m256i bits = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const Register nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    return _mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(up), _mm256_castsi256_ps(quiet), nan));
  }
  static __m256i narrowed(const float* from) {
    const __m256i low = _mm256_srli_epi32(rounded(from), 16), high = _mm256_srli_epi32(rounded(from + 8), 16);
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
  }
  static void stream_narrowed(unsigned short* to, const float* from) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), narrowed(from));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + 16), narrowed(from + 16));
  }
  static void store_narrowed(unsigned short* to, const float* from) {
    _mm256_storeu_si256(reinterpret_cast<__m256i_u*>(to), narrowed(from));
    _mm256_storeu_si256(reinterpret_cast<__m256i_u*>(to + 16), narrowed(from + 16));
  }

  static void store_f16(unsigned short* to, const float* from) {
    _mm_storeu_si128(reinterpret_cast<__m128i_u*>(to), _mm256_cvtps_ph(load(from), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  static void store_widened(float* to, const unsigned short* from) {
    store(to, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_half(from)), 16)));
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

  struct Exact;
};

struct Avx2::Exact : Avx2 {
  using Sum = int;
  static void accumulate(int* to, Register sum, bool overwrite) {
    const __m256i exact = _mm256_cvtps_epi32(sum);
    _mm256_storeu_si256(reinterpret_cast<__m256i_u*>(to), overwrite ? exact : _mm256_add_epi32(exact, load_bits(to)));
  }
};

}  // namespace

const Library* avx2_library() { return &kLibrary<Avx2>; }
const QuantizedLibrary* avx2_quantized_library() { return &kQuantizedLibrary<Avx2>; }

}  // namespace tw::cpu

#else

namespace tw::cpu {

const Library* avx2_library() { return nullptr; }
const QuantizedLibrary* avx2_quantized_library() { return nullptr; }

}  // namespace tw::cpu

#endif
