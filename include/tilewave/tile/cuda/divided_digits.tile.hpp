#pragma once

#include "tilewave/tile/cuda/divided.tile.hpp"

// The same products with a left operand of 8-bit integers, which the tensor cores multiply as they are: the right operand becomes integers
// of two digits instead. Codes are multiplied many times and operands are converted once, so this takes a fraction of the instructions that
// decoding takes.

namespace tw::cuda {

/// What the integers of an operand's rows are multiplied by: a power of two for each row of a warp's columns.
template <int N, int Warps>
struct DigitScales {
  static constexpr int warps = Warps;
  float x[N / 8][2];  ///< of the rows that are this lane's columns of sums
};

/// The largest magnitude in upper and in lower halves of four words, as bits. Those of floats are in the order of the numbers, NaN last.
template <class T>
TW_INLINE u32 largest_of(const u32 (&words)[4]) {
  u32 largest = 0;
  TW_UNROLL
  for (const u32 word : words) largest = ptx::max_of_pairs(largest, word & 0x7fff7fffu);
  return largest;
}
/// Replaces eight elements by the upper digits of x * power, rounded to integers below 2^14, and then the lower ones.
template <class T>
TW_INLINE void words_to_digits(u32 (&words)[4], float power) {
  u32 digits[4];
  TW_UNROLL
  for (int half = 0; half < 2; ++half) {
    u32 numbers[4];  // their lower two bytes, + 128, so that the lower digit is rounded to nearest
    TW_UNROLL
    for (int k = 0; k < 4; ++k)
      numbers[k] = bit_cast<u32>(half_of<T>(words[half * 2 + k / 2], k % 2) * power + (kFixedPointRounding + 128.0f));
    const u32 first = ptx::permute_bytes(numbers[0], numbers[1], 0x5140u), second = ptx::permute_bytes(numbers[2], numbers[3], 0x5140u);
    digits[half] = ptx::permute_bytes(first, second, 0x7632u);
    digits[2 + half] = ptx::permute_bytes(first, second, 0x5410u) ^ 0x80808080u;
  }
  TW_UNROLL
  for (int k = 0; k < 4; ++k) words[k] = digits[k];
}

/// Replaces the elements of an operand by integers below 2^14, 256 * upper + lower digit. Of a lane's eight columns the upper digits come
/// first.
template <class T, int N, int C, int Warps>
TW_INLINE void make_digits(const Position& at, DividedOperand<T, N, C, Warps>& operand, DigitScales<N, Warps>& scales) {
  using D = DividedOperand<T, N, C, Warps>;
  static_assert(sizeof(T) == 2 && D::share <= 1024, TW_DIGITS);
  TW_UNROLL
  for (int r = 0; r < N / 8; ++r) {
    u32 largest = 0;
    TW_UNROLL
    for (int n = 0; n < D::share / D::run; ++n) largest = ptx::max_of_pairs(largest, largest_of<T>(operand.x[n][r]));
    largest = ptx::max_of_pairs(largest, ptx::shuffle_xor(largest, 1));
    largest = ptx::max_of_pairs(largest, ptx::shuffle_xor(largest, 2));
    const float peak = half_of<T>(max(largest & 0xffffu, largest >> 16), 0);
    const float power = fixed_point_power(peak), scale = fixed_point_scale(peak);
    TW_UNROLL
    for (int i = 0; i < 2; ++i) scales.x[r][i] = ptx::shuffle(scale, (at.lane % 4 * 2 + i) * 4);
    TW_UNROLL
    for (int n = 0; n < D::share / D::run; ++n) words_to_digits<T>(operand.x[n][r], power);
  }
}

/// sums(r, n) += the sum over the warp's columns of code(r, c) * number(n, c), where the codes are the tile's R rows, or in groups of 8 as
/// add_divided() has them. The sum over the tile is exact, and rounded once.
template <bool kGroups = false, class T, int R, int N, int C, int Warps, class S>
TW_INLINE void add_divided_digits([[maybe_unused]] const Position& at, [[maybe_unused]] DividedSums<R, N, Warps>& sums,
                                  [[maybe_unused]] const S& tile, [[maybe_unused]] const DividedOperand<T, N, C, Warps>& right,
                                  [[maybe_unused]] const DigitScales<N, Warps>& scales) {
  constexpr int parts = kGroups ? Warps : 1;  // of the columns, each in rows of its own
  static_assert(is_same<typename S::Element, i8> && S::rows == R * parts && S::cols * parts == C, TW_DIVIDED_CODES);
#if TW_ON_GPU
  using D = DividedOperand<T, N, C, Warps>;
  const int row = (kGroups ? at.block_warp() * 8 : 0) + divided_row(at.lane),
            col = (kGroups ? 0 : at.block_warp() * D::share) + at.lane % 4 * 8;
  constexpr int group = kGroups ? Warps * 8 : 8;  // rows from one group of 8 to the next
  TW_UNROLL
  for (int r = 0; r < R; r += 16) {
    i32 upper[2][N / 8][4] = {}, lower[2][N / 8][4] = {};  // of even and odd runs: a product waits for the one before that adds to its sums
    TW_UNROLL
    for (int n = 0; n < D::share / D::run; ++n) {
      u32 above[2], below[2];  // of a row and the one 8 below
      ptx::load_shared_8(ptx::address(tile.bytes) + static_cast<u32>(S::offset(row + r / 8 * group, n * D::run + col)), above);
      ptx::load_shared_8(ptx::address(tile.bytes) + static_cast<u32>(S::offset(row + (r / 8 + 1) * group, n * D::run + col)), below);
      const u32 left[4] = {above[0], below[0], above[1], below[1]};
      TW_UNROLL
      for (int column = 0; column < N / 8; ++column) {
        Mma<i8>::add(upper[n % 2][column], left, right.x[n][column]);
        Mma<i8>::add(lower[n % 2][column], left, right.x[n][column] + 2);
      }
    }
    TW_UNROLL
    for (int i = 0; i < N / 2; ++i) {
      const int column = i / 4, k = i % 4;
      const i32 number = (upper[0][column][k] + upper[1][column][k]) * 256 + lower[0][column][k] + lower[1][column][k];
      sums.x[r / 16 * (N / 2) + i] += static_cast<float>(number) * scales.x[column][k % 2];
    }
  }
#endif
}

}  // namespace tw::cuda
