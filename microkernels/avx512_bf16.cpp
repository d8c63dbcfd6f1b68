#include "microkernels/isa.hpp"

#if defined(__AVX512F__) && defined(__AVX512BF16__)

// GCC 12 takes the deliberately undefined operands inside its own header for mistakes of ours.
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include <immintrin.h>

#include "microkernels/microkernel.hpp"
#include "microkernels/rows.hpp"

namespace tw::cpu {
namespace {

struct Bf16 {
  using Element = unsigned short;
  using Sum = float;
  using Register = __m512;
  static constexpr int kWidth = 16;
  static constexpr int kRows = 8, kVectors = 3;  // 24 of 32 registers: three panels of b against 8 + 8 rows of a
  static constexpr int kDepth = 128;             // four panels of 8 KB
  static constexpr bool kStarts = false;

  [[gnu::always_inline]] static Register zero() { return _mm512_setzero_ps(); }
  [[gnu::always_inline]] static __m512i columns(const unsigned short* from) { return _mm512_loadu_si512(from); }
  [[gnu::always_inline]] static __m512i row(const unsigned short* from) {
    int group;
    __builtin_memcpy(&group, from, sizeof group);
    return _mm512_set1_epi32(group);
  }
  [[gnu::always_inline]] static Register multiply_add(__m512i row, __m512i columns, Register sum) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(row), reinterpret_cast<__m512bh>(columns));
  }
  static void accumulate(float* to, Register sum, bool overwrite) {
    _mm512_storeu_ps(to, overwrite ? sum : _mm512_add_ps(_mm512_loadu_ps(to), sum));
  }

  static __m512i narrowed(const float* from) {
    const __m512 low = _mm512_loadu_ps(from), high = _mm512_loadu_ps(from + 16);
    constexpr int kSubnormal = 0x20;
    if (_mm512_fpclass_ps_mask(low, kSubnormal) | _mm512_fpclass_ps_mask(high, kSubnormal)) [[unlikely]] {
      alignas(64) unsigned short one_by_one[32];  // the instruction takes these for 0
      for (int k = 0; k < 32; ++k) narrow_one(one_by_one[k], from[k]);
      return _mm512_load_si512(one_by_one);
    }
    return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
  }
  static void stream_narrowed(unsigned short* to, const float* from) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), narrowed(from));
  }
  static void store_narrowed(unsigned short* to, const float* from) { _mm512_storeu_si512(to, narrowed(from)); }
};

}  // namespace

Mma<float, unsigned short> avx512_bf16_mma() { return mma<Bf16>; }
Stream<unsigned short> avx512_bf16_stream() { return stream_bf16<Bf16>; }
Narrow avx512_bf16_narrow() { return narrow_bf16<Bf16>; }

}  // namespace tw::cpu

#else

namespace tw::cpu {

Mma<float, unsigned short> avx512_bf16_mma() { return nullptr; }
Stream<unsigned short> avx512_bf16_stream() { return nullptr; }
Narrow avx512_bf16_narrow() { return nullptr; }

}  // namespace tw::cpu

#endif
