#include "microkernels/isa.hpp"

#if defined(__AVX512F__) && defined(__AVX512VNNI__)

// GCC 12 takes the deliberately undefined operands inside its own header for mistakes of ours.
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include <immintrin.h>

#include "microkernels/microkernel.hpp"

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

  static Register zero() { return _mm512_setzero_si512(); }
  static Register start(int sum) { return _mm512_set1_epi32(sum); }
  static Register columns(const signed char* from) { return _mm512_xor_si512(_mm512_loadu_si512(from), _mm512_set1_epi8(-128)); }
  static Register row(const signed char* from) {
    int group;
    __builtin_memcpy(&group, from, sizeof group);
    return _mm512_set1_epi32(group);
  }
  static Register multiply_add(Register row, Register columns, Register sum) { return _mm512_dpbusd_epi32(sum, columns, row); }
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

}  // namespace

Mma<int, signed char> avx512_vnni_mma() { return mma_vnni; }

}  // namespace tw::cpu

#else

namespace tw::cpu {

Mma<int, signed char> avx512_vnni_mma() { return nullptr; }

}  // namespace tw::cpu

#endif
