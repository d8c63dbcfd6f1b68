#include "microkernels/isa.hpp"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include <immintrin.h>

#include "microkernels/rounded.hpp"

namespace tw::cpu {
namespace {

__m256i load(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i_u*>(from)); }
/// All bits of the first n of 8 lanes.
__m256i first_lanes(int n) { return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)); }

struct Rounding {
  /// The scale for n elements: their largest magnitude / 127, or 0 if its inverse would be infinite.
  static float scale_for(const float* x, int n) {
    __m256i largest = _mm256_setzero_si256();  // as bits, in whose order NaN is the largest
    for (int k = 0; k < n; k += 8) {
      const __m256i bits = _mm256_castps_si256(_mm256_maskload_ps(x + k, first_lanes(n - k)));
      largest = _mm256_max_epu32(largest, _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff)));
    }
    alignas(32) unsigned lanes[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), largest);
    unsigned bits = 0;
    for (const unsigned lane : lanes) bits = lane > bits ? lane : bits;
    const float scale = __builtin_bit_cast(float, bits) / 127.0f;
    return scale < __FLT_MIN__ ? 0 : scale;
  }

  /// codes[k] = x[k] / scale to the nearest, for k < n.
  static void round_codes(signed char* codes, const float* x, int n, float scale) {
    const __m256 factor = _mm256_set1_ps(scale == 0 ? 0 : 1 / scale);
    for (int k = 0; k < n; k += 8) {
      const __m256i code = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_maskload_ps(x + k, first_lanes(n - k)), factor));
      const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(code), _mm256_extracti128_si256(code, 1));
      const __m128i bytes = _mm_packs_epi16(words, words);
      __builtin_memcpy(codes + k, &bytes, static_cast<unsigned long>(least(n - k, 8)));
    }
  }
};

/// The sums of four neighbouring products of bytes, as f32. Pairs of products fit in 16 bits: of int8, |w| <= 128 and |x| <= 127.
__m256 sums_of_fours(__m256i sums_of_pairs) { return _mm256_cvtepi32_ps(_mm256_madd_epi16(sums_of_pairs, _mm256_set1_epi16(1))); }

float total(__m256 x) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

/// Elements of the weight between what is read and what is fetched into the cache: two rows of 2048. Rows and scales are too short for the
/// processor to see their streams coming.
constexpr int kAhead = 4096;
inline void fetch(const void* from, long bytes_ahead) { _mm_prefetch(static_cast<const char*>(from) + bytes_ahead, _MM_HINT_T0); }

/// `Rows` rows of x from the `at`-th on, against one row of the weight. The instruction multiplies unsigned by signed bytes, so the
/// weight's signs go to x. Two sums for each hide the latency of a multiply-add.
template <int Rows>
void dots_i8_of(float* sums, const QuantizedRow& row, const RoundedRows& x, int at, int row_bytes) {
  __m256 sum[Rows][2];
  for (auto& s : sum) s[0] = s[1] = _mm256_setzero_ps();
  const auto add = [&](const unsigned char* values, int block) __attribute__((always_inline)) {
    TILEWAVE_UNROLL(2)
    for (int half = 0; half < 2; ++half) {
      const __m256i w = load(values + 32 * half), magnitudes = _mm256_abs_epi8(w);
      TILEWAVE_UNROLL(4)
      for (int r = 0; r < Rows; ++r) {
        const long place = static_cast<long>(at + r) * x.blocks + block;
        const __m256i signed_x = _mm256_sign_epi8(load(x.codes + place * kInt8Block + 32 * half), w);
        sum[r][half] =
            _mm256_fmadd_ps(sums_of_fours(_mm256_maddubs_epi16(magnitudes, signed_x)), _mm256_set1_ps(x.scales[place]), sum[r][half]);
      }
    }
  };
  const int whole = row_bytes / kInt8Block, rest = row_bytes % kInt8Block;
  for (int block = 0; block < whole; ++block) {
    const unsigned char* const values = row.values + static_cast<long>(block) * kInt8Block;
    fetch(values, kAhead);
    add(values, block);
  }
  if (rest > 0) {
    unsigned char last[kInt8Block] = {};
    __builtin_memcpy(last, row.values + static_cast<long>(whole) * kInt8Block, static_cast<unsigned long>(rest));
    add(last, whole);
  }
  for (int r = 0; r < Rows; ++r) sums[at + r] = row.scale * total(_mm256_add_ps(sum[r][0], sum[r][1]));
}

/// Scales and zero points of 8 times 32 elements from the `first`-th 32 on, a multiple of 8.
struct Groups {
  __m256 scales, zeros;
};
[[gnu::always_inline]] inline Groups load_groups(const QuantizedRow& row, int first) {
  const auto repeated = [](auto load_scales, auto load_zeros, __m256i each, bool has_zeros) __attribute__((always_inline)) {
    const auto repeat = [&](__m256 x) { return _mm256_permutevar8x32_ps(x, each); };
    return Groups{repeat(_mm256_cvtph_ps(load_scales())),
                  has_zeros ? repeat(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(load_zeros()))) : _mm256_set1_ps(8)};
  };
  const bool has_zeros = row.zeros != nullptr;
  if (row.group == 32) {
    const auto* const scales = reinterpret_cast<const __m128i_u*>(row.scales + first);
    const __m256 zeros = has_zeros ? _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadu_si64(row.zeros + first))) : _mm256_set1_ps(8);
    return {_mm256_cvtph_ps(_mm_loadu_si128(scales)), zeros};
  }
  if (row.group == 64) {
    const int at = first / 2;
    return repeated([&] { return _mm_loadu_si64(row.scales + at); }, [&] { return _mm_loadu_si32(row.zeros + at); },
                    _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3), has_zeros);
  }
  const int at = first / 4;
  return repeated([&] { return _mm_loadu_si32(row.scales + at); }, [&] { return _mm_loadu_si16(row.zeros + at); },
                  _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1), has_zeros);
}

/// The same with int4, two blocks of 128 codes at a time, so that their 8 scales are loaded at once. 8 codes are in every 4 bytes, and a
/// group of 32 in 4 neighbouring sums. scale * zero * (sum of x) is subtracted for every 32 elements.
template <int Rows>
void dots_u4_of(float* sums, const QuantizedRow& row, const RoundedRows& x, int at, int row_bytes) {
  constexpr int kBytes = 128, kParts = 4;  // of 32 bytes: half of a block of x
  __m256 sum[Rows][2];
  for (auto& s : sum) s[0] = s[1] = _mm256_setzero_ps();
  const auto add = [&](const unsigned char* values, const Groups& groups, int block, int parts, int present_groups)
      __attribute__((always_inline)) {
    const __m256 excess = _mm256_mul_ps(groups.scales, groups.zeros);
    const __m256i present = first_lanes(present_groups);
    __m256 scales[Rows];
    for (int r = 0; r < Rows; ++r) {
      const long place = (static_cast<long>(at + r) * x.blocks + block) * 4;
      scales[r] = _mm256_mul_ps(groups.scales, _mm256_maskload_ps(x.scales + place, present));
      sum[r][0] = _mm256_fnmadd_ps(excess, _mm256_maskload_ps(x.sums + place, present), sum[r][0]);
    }
    TILEWAVE_UNROLL(4)
    for (int part = 0; part < parts; ++part) {
      const __m256i codes = load(values + 32 * part), low = _mm256_set1_epi8(15);
      const __m256i even = _mm256_and_si256(codes, low), odd = _mm256_and_si256(_mm256_srli_epi16(codes, 4), low);
      const __m256i each = _mm256_add_epi32(_mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1), _mm256_set1_epi32(2 * part));
      TILEWAVE_UNROLL(4)
      for (int r = 0; r < Rows; ++r) {
        const signed char* of_row = x.codes + (static_cast<long>(at + r) * x.blocks + block + part / 2) * kInt4Block + part % 2 * 32;
        const __m256i pairs = _mm256_add_epi16(_mm256_maddubs_epi16(even, load(of_row)), _mm256_maddubs_epi16(odd, load(of_row + 64)));
        sum[r][part % 2] = _mm256_fmadd_ps(sums_of_fours(pairs), _mm256_permutevar8x32_ps(scales[r], each), sum[r][part % 2]);
      }
    }
  };
  const int whole = row_bytes / kBytes, rest = row_bytes % kBytes;
  for (int n = 0; n < whole; ++n) {
    const unsigned char* values = row.values + static_cast<long>(n) * kBytes;
    fetch(values, kAhead / 2);
    fetch(values, kAhead / 2 + 64);
    fetch(row.scales + 8 * n, kAhead / 32 * 2);
    add(values, load_groups(row, 8 * n), 2 * n, kParts, 8);
  }
  if (rest > 0) {
    const int first_group = whole * 8 * 32 / row.group, groups = rest * 2 / row.group;
    unsigned char last[kBytes] = {}, zeros[8] = {};
    unsigned short scales[8] = {};
    __builtin_memcpy(last, row.values + static_cast<long>(whole) * kBytes, static_cast<unsigned long>(rest));
    QuantizedRow of_rest = row;
    for (int g = 0; g < groups; ++g) scales[g] = row.scales[first_group + g];
    of_rest.scales = scales;
    if (row.zeros != nullptr) {
      for (int g = 0; g < groups; ++g) zeros[g] = row.zeros[first_group + g];
      of_rest.zeros = zeros;
    }
    add(last, load_groups(of_rest, 0), 2 * whole, (rest + 63) / 64 * 2, rest / 16);
  }
  for (int r = 0; r < Rows; ++r) sums[at + r] = total(_mm256_add_ps(sum[r][0], sum[r][1]));
}

void rounded_dots_i8(float* sums, const QuantizedRow& row, const RoundedRows& x, int count, int depth) {
  in_parts<4>(count, [&]<int Rows>(int at) { dots_i8_of<Rows>(sums, row, x, at, depth); });
}

void rounded_dots_u4(float* sums, const QuantizedRow& row, const RoundedRows& x, int count, int depth) {
  in_parts<4>(count, [&]<int Rows>(int at) { dots_u4_of<Rows>(sums, row, x, at, depth / 2); });
}

}  // namespace

RoundRow avx2_round_for_i8() { return round_row<Rounding, kInt8Block>; }
RoundRow avx2_round_for_u4() { return round_row<Rounding, kInt4Block>; }
RoundedDots avx2_rounded_dots_i8() { return rounded_dots_i8; }
RoundedDots avx2_rounded_dots_u4() { return rounded_dots_u4; }

}  // namespace tw::cpu

#else

namespace tw::cpu {

RoundRow avx2_round_for_i8() { return nullptr; }
RoundRow avx2_round_for_u4() { return nullptr; }
RoundedDots avx2_rounded_dots_i8() { return nullptr; }
RoundedDots avx2_rounded_dots_u4() { return nullptr; }

}  // namespace tw::cpu

#endif
