#include "microkernels/isa.hpp"

#if defined(__AVX512F__) && defined(__AVX512VNNI__)

// GCC 12 takes the deliberately undefined operands inside its own header for mistakes of ours.
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include <immintrin.h>

#include "microkernels/microkernel.hpp"
#include "microkernels/rounded.hpp"

namespace tw::cpu {
namespace {

/// The instruction multiplies unsigned by signed bytes. Columns become unsigned by adding 128, so the sums of a row start with -128 times
/// the sum of the row's elements. All of it is exact modulo 2^32: the instruction does not saturate.
struct Vnni {
  using Element = signed char;
  using Sum = int;
  using Register = __m512i;
  static constexpr int kWidth = 16;
  static constexpr int kRows = 8, kVectors = 3;  // 24 of 32 registers: three panels of b against 8 + 8 rows of a
  static constexpr int kDepth = 128;             // four panels of 8 KB
  static constexpr bool kStarts = true;

  [[gnu::always_inline]] static Register zero() { return _mm512_setzero_si512(); }
  [[gnu::always_inline]] static Register start(int sum) { return _mm512_set1_epi32(sum); }
  [[gnu::always_inline]] static Register columns(const signed char* from) {
    return _mm512_xor_si512(_mm512_loadu_si512(from), _mm512_set1_epi8(-128));
  }
  [[gnu::always_inline]] static Register row(const signed char* from) {
    int group;
    __builtin_memcpy(&group, from, sizeof group);
    return _mm512_set1_epi32(group);
  }
  [[gnu::always_inline]] static Register multiply_add(Register row, Register columns, Register sum) {
    return _mm512_dpbusd_epi32(sum, columns, row);
  }
  static void accumulate(int* to, Register sum, bool overwrite) {
    _mm512_storeu_si512(to, overwrite ? sum : _mm512_add_epi32(_mm512_loadu_si512(to), sum));
  }
};

void mma_vnni(int* acc, long acc_stride, const signed char* a, const signed char* b, int rows, int cols, int depth, int panel_depth,
              bool overwrite) {
  constexpr int kBlock = 512;
  for (int block = 0; block < rows; block += kBlock) {
    const int in_block = least(rows - block, kBlock);
    const signed char* block_a = a + static_cast<long>(block) * panel_depth;
    alignas(64) int start[kBlock];
    for (int row = 0; row < in_block; row += kPanelRows) {
      const signed char* panel = block_a + static_cast<long>(row) * panel_depth;
      __m512i sums = _mm512_setzero_si512();
      for (int k = 0; k < groups_of<signed char>(depth); ++k)
        sums = _mm512_dpbusd_epi32(sums, _mm512_set1_epi8(1), _mm512_loadu_si512(panel + k * kLine<signed char>));
      _mm512_store_si512(start + row, _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_slli_epi32(sums, 7)));
    }
    mma_starting_with<Vnni>(start, acc + block * acc_stride, acc_stride, block_a, b, in_block, cols, depth, panel_depth, overwrite);
  }
}

constexpr int kBlockBytes = 64;  ///< of a weight, in both formats

__mmask64 first_bytes(int n) { return n >= 64 ? ~__mmask64{0} : (__mmask64{1} << n) - 1; }
__mmask16 first_floats(int n) { return n >= 16 ? static_cast<__mmask16>(~0u) : static_cast<__mmask16>((1u << n) - 1u); }

struct Rounding {
  /// The scale for n elements: their largest magnitude / 127, or 0 if its inverse would be infinite.
  static float scale_for(const float* x, int n) {
    __m512i largest = _mm512_setzero_si512();  // as bits, in whose order NaN is the largest
    for (int k = 0; k < n; k += 16) {
      const __m512i bits = _mm512_maskz_loadu_epi32(first_floats(n - k), x + k);
      largest = _mm512_max_epu32(largest, _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)));
    }
    const float scale = __builtin_bit_cast(float, _mm512_reduce_max_epu32(largest)) / 127.0f;
    return scale < __FLT_MIN__ ? 0 : scale;
  }

  /// codes[k] = x[k] / scale to the nearest, for k < n.
  static void round_codes(signed char* codes, const float* x, int n, float scale) {
    const __m512 factor = _mm512_set1_ps(scale == 0 ? 0 : 1 / scale);
    for (int k = 0; k < n; k += 16) {
      const __mmask16 present = first_floats(n - k);
      const __m512i code = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_maskz_loadu_ps(present, x + k), factor));
      _mm_mask_storeu_epi8(codes + k, present, _mm512_cvtsepi32_epi8(code));
    }
  }
};

float round_to_i8(signed char* codes, const float* x, int depth) {
  const float scale = Rounding::scale_for(x, depth);
  Rounding::round_codes(codes, x, depth, scale);
  return scale - scale == 0 ? scale : __builtin_nanf("");
}

/// A block of int8 as unsigned bytes, which are 128 too large: the sum of x is subtracted for it in the end.
struct Int8Blocks {
  const QuantizedRow& row;
  __m512i values = {};

  void load(int block, int bytes) {
    const __m512i stored = _mm512_maskz_loadu_epi8(first_bytes(bytes), row.values + static_cast<long>(block) * kBlockBytes);
    values = _mm512_xor_si512(stored, _mm512_set1_epi8(-128));
  }
  __m512 dot(const signed char* x) const {
    return _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(_mm512_setzero_si512(), values, _mm512_loadu_si512(x)));
  }
};

/// `Rows` rows of x from the `at`-th on, against one row of the weight. Two sums for each hide the latency of a multiply-add.
template <int Rows>
void dots_i8_of(float* sums, Int8Blocks& w, const RoundedRows& x, int at, int row_bytes) {
  __m512 sum[Rows][2];
  for (auto& s : sum) s[0] = s[1] = _mm512_setzero_ps();
  const auto add = [&](int block, int which, int bytes) __attribute__((always_inline)) {
    w.load(block, bytes);
    TILEWAVE_UNROLL(8)
    for (int r = 0; r < Rows; ++r) {
      const long place = static_cast<long>(at + r) * x.blocks + block;
      sum[r][which] = _mm512_fmadd_ps(w.dot(x.codes + place * kInt8Block), _mm512_set1_ps(x.scales[place]), sum[r][which]);
    }
  };
  const int whole = row_bytes / kBlockBytes;
  int block = 0;
  for (; block + 2 <= whole; block += 2) {
    add(block, 0, kBlockBytes);
    add(block + 1, 1, kBlockBytes);
  }
  if (block < whole) add(block++, 0, kBlockBytes);
  if (row_bytes % kBlockBytes > 0) add(block, 1, row_bytes % kBlockBytes);
  for (int r = 0; r < Rows; ++r)
    sums[at + r] = w.row.scale * (_mm512_reduce_add_ps(_mm512_add_ps(sum[r][0], sum[r][1])) - 128 * x.sums[at + r]);
}

/// Scales and zero points of 16 times 32 elements from the `first`-th 32 on.
struct Groups {
  __m512 scales, zeros;
};
inline Groups load_groups(const QuantizedRow& row, int first, __mmask16 present) {
  const __m512 symmetric = _mm512_set1_ps(8);
  if (row.group == 32) {
    return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(present, row.scales + first)),
            row.zeros == nullptr ? symmetric : _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(present, row.zeros + first)))};
  }
  const auto groups = static_cast<__mmask8>((1 << (__builtin_popcount(present) + 3) / 4) - 1);
  const __m512i each = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
  const auto repeated = [&](__m128 four) { return _mm512_permutexvar_ps(each, _mm512_castps128_ps512(four)); };
  return {
      repeated(_mm_cvtph_ps(_mm_maskz_loadu_epi16(groups, row.scales + first / 4))),
      row.zeros == nullptr ? symmetric : repeated(_mm_cvtepi32_ps(_mm_cvtepu8_epi32(_mm_maskz_loadu_epi8(groups, row.zeros + first / 4))))};
}

/// Bytes of an int4 row between what is read and what is fetched into the cache: two rows of 2048 elements. A row and its scales are too
/// short for the processor to see two streams coming.
constexpr int kAhead = 2048;

/// The same with int4, four blocks of 128 codes at a time, so that their 16 scales are loaded at once. 8 codes are in every 4 bytes, and a
/// group of 32 in 4 neighbouring sums. scale * zero * (sum of x) is subtracted for every 32 elements.
template <int Rows>
void dots_u4_of(float* sums, const QuantizedRow& row, const RoundedRows& x, int at, int row_bytes) {
  __m512 sum[Rows];
  for (auto& s : sum) s = _mm512_setzero_ps();
  const auto add = [&](int first, int blocks, int bytes) __attribute__((always_inline)) {
    const auto present = static_cast<__mmask16>((1u << bytes / 16) - 1u);
    const Groups groups = load_groups(row, 4 * first, present);
    _mm_prefetch(row.scales + 4 * first + kAhead / 16, _MM_HINT_T0);
    const __m512 excess = _mm512_mul_ps(groups.scales, groups.zeros);
    __m512 scales[Rows];
    for (int r = 0; r < Rows; ++r) {
      const long place = (static_cast<long>(at + r) * x.blocks + first) * 4;
      scales[r] = _mm512_mul_ps(groups.scales, _mm512_maskz_loadu_ps(present, x.scales + place));
      sum[r] = _mm512_fnmadd_ps(excess, _mm512_maskz_loadu_ps(present, x.sums + place), sum[r]);
    }
    TILEWAVE_UNROLL(4)
    for (int block = 0; block < blocks; ++block) {
      _mm_prefetch(row.values + static_cast<long>(first + block) * kBlockBytes + kAhead, _MM_HINT_T0);
      const __m512i codes =
          _mm512_maskz_loadu_epi8(first_bytes(bytes - block * kBlockBytes), row.values + static_cast<long>(first + block) * kBlockBytes);
      const __m512i even = _mm512_and_si512(codes, _mm512_set1_epi8(15));
      const __m512i odd = _mm512_and_si512(_mm512_srli_epi16(codes, 4), _mm512_set1_epi8(15));
      const __m512i each =
          _mm512_add_epi32(_mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3), _mm512_set1_epi32(4 * block));
      TILEWAVE_UNROLL(8)
      for (int r = 0; r < Rows; ++r) {
        const signed char* of_row = x.codes + (static_cast<long>(at + r) * x.blocks + first + block) * kInt4Block;
        const __m512i dot = _mm512_dpbusd_epi32(_mm512_setzero_si512(), even, _mm512_loadu_si512(of_row));
        const __m512i both = _mm512_dpbusd_epi32(dot, odd, _mm512_loadu_si512(of_row + 64));
        sum[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(both), _mm512_permutexvar_ps(each, scales[r]), sum[r]);
      }
    }
  };
  constexpr int kTogether = 4 * kBlockBytes;
  int first = 0;
  for (; (first + 4) * kBlockBytes <= row_bytes; first += 4) add(first, 4, kTogether);
  if (const int rest = row_bytes % kTogether; rest > 0) add(first, (rest + kBlockBytes - 1) / kBlockBytes, rest);
  for (int r = 0; r < Rows; ++r) sums[at + r] = _mm512_reduce_add_ps(sum[r]);
}

void rounded_dots_i8(float* sums, const QuantizedRow& row, const RoundedRows& x, int count, int depth) {
  Int8Blocks w{row};
  in_parts<8>(count, [&]<int Rows>(int at) { dots_i8_of<Rows>(sums, w, x, at, depth); });
}

void rounded_dots_u4(float* sums, const QuantizedRow& row, const RoundedRows& x, int count, int depth) {
  in_parts<8>(count, [&]<int Rows>(int at) { dots_u4_of<Rows>(sums, row, x, at, depth / 2); });
}

}  // namespace

Mma<int, signed char> avx512_vnni_mma() { return mma_vnni; }
RoundRow avx512_vnni_round_for_i8() { return round_row<Rounding, kInt8Block>; }
RoundRow avx512_vnni_round_for_u4() { return round_row<Rounding, kInt4Block>; }
RoundToI8 avx512_vnni_round_to_i8() { return round_to_i8; }
RoundedDots avx512_vnni_rounded_dots_i8() { return rounded_dots_i8; }
RoundedDots avx512_vnni_rounded_dots_u4() { return rounded_dots_u4; }

}  // namespace tw::cpu

#else

namespace tw::cpu {

Mma<int, signed char> avx512_vnni_mma() { return nullptr; }
RoundRow avx512_vnni_round_for_i8() { return nullptr; }
RoundRow avx512_vnni_round_for_u4() { return nullptr; }
RoundToI8 avx512_vnni_round_to_i8() { return nullptr; }
RoundedDots avx512_vnni_rounded_dots_i8() { return nullptr; }
RoundedDots avx512_vnni_rounded_dots_u4() { return nullptr; }

}  // namespace tw::cpu

#endif
