#pragma once

#include "tilewave/tile/cuda/code_pairs.tile.hpp"
#include "tilewave/tile/cuda/divided.tile.hpp"

// The same products with a left operand in codes of 8, 4 or 2 bits, which become pairs of 16-bit floats on their way from shared memory to
// the tensor cores. Integers and small floats are exact in bf16 and f16. Such a code is put into the bits of a float, and one multiply-add
// of a pair corrects the exponent and subtracts the zero point: 1.4 instructions for each 4-bit integer, 2 for each 4-bit float, 1.25
// to 2.5 for each code of 8 bits. Conversion instructions would take four times as long. NormalFloats are rounded, and come from a table in
// the lanes of the warp.

namespace tw::cuda {

/// Decodes eight neighbouring codes to four pairs of T, which are (0, 4), (1, 5), (2, 6), (3, 7), or in order: (0, 1), (2, 3), (4, 5), (6,
/// 7).
template <class Codes, class T>
struct CodePairs;

struct PairsOfHalves {
  /// Elements of the other operand in the order of the pairs.
  static TW_INLINE u32 pair_of(const u32* words, int k) {
    return ptx::permute_bytes(words[k / 2], words[k / 2 + 2], k % 2 == 0 ? 0x5410u : 0x7632u);
  }
};
struct PairsInOrder {
  static TW_INLINE u32 pair_of(const u32* words, int k) { return words[k]; }
};

template <int kBits, class T>
struct CodePairs<SmallIntegers<kBits, false>, T> : PairsOfHalves {
  static constexpr bool wide = is_same<T, bf16>;
  static constexpr u32 one = wide ? 0x3f803f80u : 0x3c003c00u;
  static constexpr u32 above = wide ? 0x43004300u : 0x64006400u;  ///< 128 or 1024, whose last bits are a code's: 128 + code
  static constexpr u32 mask = ((1u << kBits) - 1u) * 0x10001u;

  /// What decode() adds for a zero point: -(128 + zero), twice.
  static TW_INLINE u32 minus(u32 zero) { return (above | 0x80008000u | zero) | zero << 16; }
  static TW_INLINE void decode(const u32* codes, u32 minus_zero, u32* pairs) {
    raise(codes, pairs);
    TW_UNROLL
    for (int k = 0; k < 4; ++k) pairs[k] = multiply_add_pairs<T>(pairs[k], one, minus_zero);
  }
  /// The same, but pairs stay above their numbers by raised_by(zero). That, times the other operand's sum, is to be subtracted from the
  /// products' sum. Not in f16, where 1024 times a sum would cost three digits.
  static constexpr bool can_raise = wide;
  static TW_INLINE float raised_by(u32 zero) { return 128.0f + static_cast<float>(zero); }
  static TW_INLINE void raise(const u32* codes, u32* pairs) {
    const u32 halves = kBits == 4 ? codes[0] : ptx::permute_bytes(codes[0], 0, 0x4140u);  // codes 4 to 7 begin at bit 16
    TW_UNROLL
    for (int k = 0; k < 4; ++k) pairs[k] = masked_or(halves >> kBits * k, mask, above);
  }
};
template <class T>
struct CodePairs<fp4x2, T> : PairsOfHalves {
  static TW_INLINE void decode(const u32* codes, u32, u32* pairs) {
    constexpr bool wide = is_same<T, bf16>;
    constexpr u32 magnitude = wide ? 0x01c001c0u : 0x0e000e00u, bias = wide ? 0x7e807e80u : 0x74007400u;  // 2^126 or 2^14
    const auto left = [&](int by) { return by >= 0 ? codes[0] << by : codes[0] >> -by; };
    TW_UNROLL
    for (int k = 0; k < 4; ++k)  // sign, exponent and mantissa go where T has them
      pairs[k] =
          multiply_add_pairs<T>(masked_or(left(12 - 4 * k), 0x80008000u, left((wide ? 6 : 9) - 4 * k) & magnitude), bias, kMinusZeros);
  }
};
/// Codes of u4x2 that are numbers of NormalFloats, which lanes 0 to 15 of a warp hold, and 16 to 31 again. All lanes decode together.
struct NormalFloatCodes {};
template <class T>
struct CodePairs<NormalFloatCodes, T> : PairsInOrder {
  static TW_INLINE void decode(const u32* codes, u32, u32* pairs) {
#if TW_ON_GPU
    const u32 own = bit_cast<u16>(T(normal_float(static_cast<int>(ptx::thread_index() % 16))));
    const auto number = [&](int n) { return ptx::shuffle(own, static_cast<int>(codes[0] >> 4 * n)); };  // of a lane only 5 bits count
#else
    const auto number = [&](int n) { return u32{bit_cast<u16>(T(normal_float(static_cast<int>(codes[0] >> 4 * n & 15u))))}; };
#endif
    TW_UNROLL
    for (int k = 0; k < 4; ++k) pairs[k] = ptx::permute_bytes(number(2 * k), number(2 * k + 1), 0x5410u);
  }
};
/// The codes of a format, or T's own, as CodePairs names them.
template <class Scales, class Codes, class T>
struct PairsOf {
  using Type = CodePairs<Codes, T>;
};
template <class Scales, class T>
requires(is_same<typename Scales::Format::template Decode<T>, TimesNormalFloat>) struct PairsOf<Scales, u4x2, T> {
  using Type = CodePairs<NormalFloatCodes, T>;
};

template <>
struct CodePairs<i8, f16> : PairsInOrder {
  static TW_INLINE void decode(const u32* codes, u32, u32* pairs) {
    TW_UNROLL
    for (int k = 0; k < 4; ++k) {  // 1024 + 128 + code
      const u32 pair = ptx::permute_bytes(codes[k / 2] ^ 0x80808080u, 0x64646464u, k % 2 == 0 ? 0x4140u : 0x4342u);
      pairs[k] = multiply_add_pairs<f16>(pair, 0x3c003c00u, 0xe480e480u);
    }
  }
};
template <>
struct CodePairs<i8, bf16> : PairsInOrder {
  static TW_INLINE void decode(const u32* codes, u32, u32* pairs) {
    TW_UNROLL
    for (int k = 0; k < 4; ++k) {  // a bf16 has room for 7 bits: 128 + those, minus 128, or 256 if the code is negative
      const u32 pair = ptx::permute_bytes(codes[k / 2], 0, k % 2 == 0 ? 0x4140u : 0x4342u);
      pairs[k] =
          multiply_add_pairs<bf16>(masked_or(pair, 0x007f007fu, 0x43004300u), 0x3f803f80u, masked_or(pair, 0x00800080u, 0xc300c300u));
    }
  }
};
template <class T>
struct CodePairs<fp8_e4m3, T> : PairsInOrder {
  static TW_INLINE void decode(const u32* codes, u32, u32* pairs) {
    constexpr bool wide = is_same<T, bf16>;
    constexpr u32 magnitude = wide ? 0x07f007f0u : 0x3f803f80u, bias = wide ? 0x7b807b80u : 0x5c005c00u;  // 2^120 or 2^8
    TW_UNROLL
    for (int k = 0; k < 4; ++k) {  // sign, exponent and mantissa go where T has them
      const u32 pair = ptx::permute_bytes(codes[k / 2], 0, k % 2 == 0 ? 0x1404u : 0x3424u);
      pairs[k] = multiply_add_pairs<T>(masked_or(pair, 0x80008000u, pair >> (wide ? 4 : 1) & magnitude), bias, 0x80008000u);
    }
  }
};

/// The scales of a warp's codes in groups, as they are stored. A lane holds those of the rows whose codes it decodes.
template <int R, int C, class F, int Warps>
struct DividedScales {
  static_assert(R % 16 == 0 && is_divided_group<C / Warps, F::group>, TW_DIVIDED_SCALES);
  using Format = F;
  using Scale = typename F::Scale;
  static constexpr int group = F::group;
  static constexpr int groups = C / Warps / group;                              ///< of a warp
  static constexpr int scale_bytes = groups * static_cast<int>(sizeof(Scale));  ///< of a row
  u32 scales[R / 8][(scale_bytes + 3) / 4];                                     ///< one after the other
  u32 zeros[R / 8][(groups + 3) / 4];                                           ///< a byte each

  TW_INLINE float scale(int r, int g) const {
    constexpr int bits = 8 * static_cast<int>(sizeof(Scale)), in_word = 32 / bits;
    const u32 word = scales[r][g / in_word];
    if constexpr (in_word == 1) {
      return bit_cast<float>(word);
    } else {
      Scale x;
      x.bits = static_cast<decltype(x.bits)>(word >> g % in_word * bits);
      return static_cast<float>(x);
    }
  }
  TW_INLINE u32 zero(int r, int g) const {
    if constexpr (F::zeros)
      return zeros[r][g / 4] >> g % 4 * 8 & 0xffu;
    else
      return static_cast<u32>(F::middle);
  }
};

/// Loads the scales and zero points of the groups from column col0 on. The first 8 rows begin at row0, each further 8 `apart` rows later.
/// Outside the tensors they are zeros.
template <int R, int C, class Format, int Warps, class G, class H>
TW_INLINE void load_divided_scales(const Position& at, DividedScales<R, C, Format, Warps>& to, const G& scales, const H& zeros, int row0,
                                   int col0, int apart) {
  using D = DividedScales<R, C, Format, Warps>;
  using Scale = typename D::Scale;
  const int first = col0 / D::group + at.block_warp() * D::groups;
  const auto rows = [&](auto load) {
    TW_UNROLL
    for (int r = 0; r < R / 8; ++r) {
      TW_UNROLL
      for (u32& four : to.zeros[r]) four = 0;
      TW_UNROLL
      for (u32& two : to.scales[r]) two = 0;
      load(r, row0 + r * apart + divided_row(at.lane));
    }
  };
  const auto scale_at = [&](int row, int g) { return scales.template piece_at<const Scale>(row, first + g, 0, 0); };
  const auto zero_at = [&](int row, int g) { return zeros.template piece_at<const u8>(row, first + g, 0, 0); };
  constexpr int row_bytes = D::scale_bytes;
  if constexpr ((row_bytes == 16 || row_bytes == 8 || row_bytes == 4) && (!Format::zeros || D::groups % 4 == 0)) {
    bool whole = scales.template whole_pieces<Scale, D::groups>();
    if constexpr (Format::zeros) whole = whole && zeros.template whole_pieces<u8, D::groups>();
    if (whole) {
      return rows([&](int r, int row) {
        const bool inside = scales.inside(row, first);
        if constexpr (row_bytes == 16)
          ptx::load_16_if(inside, scale_at(row, 0), to.scales[r]);
        else if constexpr (row_bytes == 8)
          ptx::load_8_if(inside, scale_at(row, 0), to.scales[r]);
        else
          ptx::load_4_if(inside, scale_at(row, 0), to.scales[r][0]);
        if constexpr (Format::zeros && D::groups == 8)
          ptx::load_8_if(inside, zero_at(row, 0), to.zeros[r]);
        else if constexpr (Format::zeros)
          ptx::load_4_if(inside, zero_at(row, 0), to.zeros[r][0]);
      });
    }
  }
  rows([&](int r, int row) {
    TW_UNROLL
    for (int g = 0; g < D::groups; ++g) {
      constexpr int bytes = static_cast<int>(sizeof(Scale)), in_word = 4 / bytes;
      const bool inside = scales.inside(row, first + g);
      u32 scale = 0, zero = 0;
      if constexpr (bytes == 4)
        ptx::load_4_if(inside, scale_at(row, g), scale);
      else if constexpr (bytes == 2)
        ptx::load_2_if(inside, scale_at(row, g), scale);
      else
        ptx::load_1_if(inside, scale_at(row, g), scale);
      to.scales[r][g / in_word] |= scale << g % in_word * bytes * 8;
      if constexpr (Format::zeros) ptx::load_1_if(inside, zero_at(row, g), zero);
      to.zeros[r][g / 4] |= zero << g % 4 * 8;
    }
  });
}

/// The same for scales in a slot: strips that hold those of a row one after the other. Zero points come from memory.
template <int R, int C, class Format, int Warps, class S, int Count, class H>
TW_INLINE void load_divided_scales(const Position& at, DividedScales<R, C, Format, Warps>& to, const S (&strips)[Count], const H& zeros,
                                   int row0, int col0) {
  using D = DividedScales<R, C, Format, Warps>;
  constexpr int bytes = D::scale_bytes;
  static_assert(S::rows == R && Count * 16 == bytes * Warps && 16 % bytes == 0, TW_DIVIDED_STRIPS);
  const int first = at.block_warp() * bytes;
  TW_UNROLL
  for (int r = 0; r < R / 8; ++r) {
    const int row = r * 8 + divided_row(at.lane);
    const u8* const from = strips[first / 16].bytes + row * 16 + first % 16;
    if constexpr (bytes >= 4) {
      TW_UNROLL
      for (int word = 0; word < bytes / 4; ++word) to.scales[r][word] = reinterpret_cast<const u32*>(from)[word];
    } else {
      to.scales[r][0] = bytes == 2 ? *reinterpret_cast<const u16*>(from) : *from;
    }
    if constexpr (Format::zeros) {
      TW_UNROLL
      for (u32& four : to.zeros[r]) four = 0;
      TW_UNROLL
      for (int g = 0; g < D::groups; ++g) {
        const int group = col0 / D::group + at.block_warp() * D::groups + g;
        u32 zero = 0;
        ptx::load_1_if(zeros.inside(row0 + row, group), zeros.template piece_at<const u8>(row0 + row, group, 0, 0), zero);
        to.zeros[r][g / 4] |= zero << g % 4 * 8;
      }
    }
  }
}

/// Sixteen 2-bit codes minus 2, times 64: in the top bits of bytes, where inverting a code's upper bit subtracts 2 from it. Byte t of word
/// i is code 4 t + i. Inverting costs nothing: it is part of the instruction that masks.
TW_INLINE void centre_codes(u32 codes, u32* words) {
  TW_UNROLL
  for (int i = 0; i < 4; ++i) words[i] = masked_xor(codes << (6 - 2 * i), 0xc0c0c0c0u, 0x80808080u);
}
/// Sixteen bytes in the same order.
TW_INLINE void order_as_codes(const u32* x, u32* words) {
  const u32 low[2] = {ptx::permute_bytes(x[0], x[1], 0x5140u), ptx::permute_bytes(x[2], x[3], 0x5140u)};
  const u32 high[2] = {ptx::permute_bytes(x[0], x[1], 0x7362u), ptx::permute_bytes(x[2], x[3], 0x7362u)};
  words[0] = ptx::permute_bytes(low[0], low[1], 0x5410u);
  words[1] = ptx::permute_bytes(low[0], low[1], 0x7632u);
  words[2] = ptx::permute_bytes(high[0], high[1], 0x5410u);
  words[3] = ptx::permute_bytes(high[0], high[1], 0x7632u);
}

/// sums(r, n) += the sum over the warp's columns of (code(r, c) - 2) * operand(n, c), where the 2-bit codes are the tile's R rows. The
/// products are summed as integers, and their sum over the tile is exact in f32.
template <int R, int N, int C, int Warps, class S>
TW_INLINE void add_divided_integers([[maybe_unused]] const Position& at, [[maybe_unused]] DividedSums<R, N, Warps>& sums,
                                    [[maybe_unused]] const S& tile, [[maybe_unused]] const DividedOperand<i8, N, C, Warps>& operand) {
  static_assert(is_same<typename S::Element, u2x4>, "operands of i8 are multiplied by 2-bit codes");
  static_assert(S::rows == R && S::cols * 4 == C, TW_DIVIDED_CODES);
#if TW_ON_GPU
  using D = DividedOperand<i8, N, C, Warps>;
  static_assert(D::share <= 1 << 16, "64 times a sum fits an integer");
  const int row = divided_row(at.lane), col = D::col(at, 0);
  i32 total[R / 16][N / 8][4] = {};
  TW_UNROLL
  for (int n = 0; n < D::share / D::run; ++n) {
    u32 right[N / 8][4];
    TW_UNROLL
    for (int column = 0; column < N / 8; ++column) order_as_codes(operand.x[n][column], right[column]);
    TW_UNROLL
    for (int r = 0; r < R; r += 16) {
      u32 codes[2], upper[4], lower[4];  // of a row and the one 8 below
      TW_UNROLL
      for (int half = 0; half < 2; ++half)
        ptx::load_shared_4(ptx::address(tile.bytes) + static_cast<u32>(S::offset(row + r + half * 8, (n * D::run + col) / 4)), codes[half]);
      centre_codes(codes[0], upper);
      centre_codes(codes[1], lower);
      TW_UNROLL
      for (int k = 0; k < 4; k += 2) {
        const u32 left[4] = {upper[k], lower[k], upper[k + 1], lower[k + 1]};
        TW_UNROLL
        for (int column = 0; column < N / 8; ++column) Mma<i8>::add(total[r / 16][column], left, right[column] + k);
      }
    }
  }
  TW_UNROLL
  for (int i = 0; i < sums.size; ++i) sums.x[i] += static_cast<float>(total[i / (N / 2)][i / 4 % (N / 8)][i % 4] >> 6);
#endif
}

/// sums(r, n) += the sum over the warp's columns of scale(r, c) * number(r, c) * operand(n, c), where the codes of the numbers are the
/// tile's R rows, or in groups of 8 as add_divided() has them: see number_of_code(). Codes of 8 bits are the numbers and have no scale
/// here.
template <bool kGroups = false, class T, int R, int N, int C, int Warps, class S, class Scales>
TW_INLINE void add_divided_codes([[maybe_unused]] const Position& at, [[maybe_unused]] DividedSums<R, N, Warps>& sums,
                                 [[maybe_unused]] const S& tile, [[maybe_unused]] const DividedOperand<T, N, C, Warps>& operand,
                                 [[maybe_unused]] const Scales& scales) {
  using Codes = typename S::Element;
  constexpr int in_byte = codes_in<Codes>;
  constexpr int parts = kGroups ? Warps : 1;  // of the columns, each in rows of its own
  static_assert(S::rows == R * parts && S::cols * in_byte * parts == C, TW_DIVIDED_CODES);
  static_assert((in_byte > 1) == !is_same<Scales, Unscaled>, "codes of 4 and 2 bits have DividedScales, 8-bit ones have none");
#if TW_ON_GPU
  using Pairs = typename PairsOf<Scales, Codes, T>::Type;
  using Operand = DividedOperand<T, N, C, Warps>;
  constexpr int share = Operand::share, group = min(Scales::group, share), width = Operand::width;
  const int row = (kGroups ? at.block_warp() * 8 : 0) + divided_row(at.lane),
            col = (kGroups ? 0 : at.block_warp() * share) + at.lane % 4 * width;
  constexpr int group_rows = kGroups ? Warps * 8 : 8;            // rows from one group of 8 to the next
  constexpr int eight_rows = S::offset(8, 0) - S::offset(0, 0);  // the same for all rows and columns
  // The operand's sums take as many products as 16 rows do. For 16 columns and 32 rows that costs more than it saves.
  constexpr bool raised = requires { requires Pairs::can_raise; }
  &&R >= 2 * N*(N / 8);
  u32 first[share / 32];  // of row 0, in shared memory
  TW_UNROLL
  for (int n = 0; n < share / 32; ++n) first[n] = ptx::address(tile.bytes) + static_cast<u32>(S::offset(row, (n * 32 + col) / in_byte));
  const auto decode = [&](int r, int n, u32 minus_zero, u32* pairs) {
    u32 codes[2];
    const u32 from = first[n] + static_cast<u32>(r / 8 * group_rows / 8 * eight_rows);
    if constexpr (in_byte == 1)
      ptx::load_shared_8(from, codes);
    else if constexpr (in_byte == 2)
      ptx::load_shared_4(from, codes[0]);
    else
      ptx::load_shared_2(from, codes[0]);
    if constexpr (raised)
      Pairs::raise(codes, pairs);
    else
      Pairs::decode(codes, minus_zero, pairs);
  };
  TW_UNROLL
  for (int g = 0; g < share / group; ++g) {
    [[maybe_unused]] float of_ones[N / 8][4] = {};  // the operand's sums over the group
    if constexpr (raised) {
      TW_UNROLL
      for (int n = g * (group / 32); n < (g + 1) * (group / 32); ++n) {
        TW_UNROLL
        for (int k = 0; k < 4; k += 2) {
          const u32 ones[4] = {Pairs::one, Pairs::one, Pairs::one, Pairs::one};
          TW_UNROLL
          for (int column = 0; column < N / 8; ++column) {
            const u32 right[2] = {Pairs::pair_of(operand.x[n][column], k), Pairs::pair_of(operand.x[n][column], k + 1)};
            Mma<T>::add(of_ones[column], ones, right);
          }
        }
      }
    }
    TW_UNROLL
    for (int r = 0; r < R; r += 16) {
      u32 minus_upper = 0, minus_lower = 0;
      if constexpr (requires { Pairs::minus(0u); }) {
        minus_upper = Pairs::minus(scales.zero(r / 8, g));
        minus_lower = Pairs::minus(scales.zero(r / 8 + 1, g));
      }
      // A product waits for the one before that adds to its sums. Groups have few, and adding their sums takes longer.
      constexpr bool two_chains = in_byte == 1;
      float of_group[N / 8][4] = {}, odd[N / 8][4] = {};
      TW_UNROLL
      for (int n = g * (group / 32); n < (g + 1) * (group / 32); ++n) {
        u32 upper[4], lower[4];  // of a row and the one 8 below
        decode(r, n, minus_upper, upper);
        decode(r + 8, n, minus_lower, lower);
        TW_UNROLL
        for (int k = 0; k < 4; k += 2) {
          const u32 left[4] = {upper[k], lower[k], upper[k + 1], lower[k + 1]};
          TW_UNROLL
          for (int column = 0; column < N / 8; ++column) {
            const u32 right[2] = {Pairs::pair_of(operand.x[n][column], k), Pairs::pair_of(operand.x[n][column], k + 1)};
            Mma<T>::add(two_chains && k == 2 ? odd[column] : of_group[column], left, right);
          }
        }
      }
      float upper_scale = 1.0f, lower_scale = 1.0f;
      if constexpr (in_byte > 1) {
        upper_scale = scales.scale(r / 8, g);
        lower_scale = scales.scale(r / 8 + 1, g);
      }
      TW_UNROLL
      for (int i = 0; i < N / 2; ++i) {
        float sum = of_group[i / 4][i % 4];
        if constexpr (two_chains) sum += odd[i / 4][i % 4];
        if constexpr (raised) sum -= of_ones[i / 4][i % 2] * Pairs::raised_by(scales.zero(r / 8 + i % 4 / 2, g));
        sums.x[r / 16 * (N / 2) + i] += sum * (i % 4 < 2 ? upper_scale : lower_scale);
      }
    }
  }
#endif
}

}  // namespace tw::cuda
