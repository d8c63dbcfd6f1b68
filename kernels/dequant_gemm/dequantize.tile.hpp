#pragma once

#include "tilewave/tile/language.tile.hpp"

// Weights in fewer bits back to a floating-point type, as tilewave/quantized.hpp defines the formats.

namespace tw::kernels::dequant_gemm {

/// out(n, k) = scales(n) * values(n, k), for Code i8 or fp8_e4m3.
template <class Code, class Out, int R, int C>
struct DequantizeRows {
  static constexpr const char* source = "kernels/dequant_gemm/dequantize.tile.hpp";

  template <class Target>
  struct On {
    using Values = Rows<Target, float, R, C, 4, 8>;
    struct Params {
      Global<Target, const Code, Values> values;
      Global<Target, const float> scales;  ///< [N, 1]
      Global<Target, Out, Values> out;
    };

    static void compute(auto& block, const Params& p, Tile t) {
      const int row0 = t.m * R, col0 = t.n * C;
      Values x;
      block.load(x, p.values, row0, col0);
      block.for_each(x, [&](int row, int, auto& value) {
        if (row0 + row < p.scales.rows) value = value * *p.scales.template at<const float>(row0 + row, 0, 0, 0);
      });
      block.store(x, p.out, row0, col0);
    }
  };
};

/// out(n, k) = scales(n, g) * (code(n, k) - zeros(n, g)), g = k / Group, for two codes in a byte. An element of `out` is a word of the two
/// results, and so are C and the columns.
template <class Out, int Group, int R, int C>
struct DequantizeGroups {
  static constexpr const char* source = "kernels/dequant_gemm/dequantize.tile.hpp";
  using Word = conditional<sizeof(Out) == 2, i32, i64>;
  struct Pair {
    Out even, odd;
  };

  template <class Target>
  struct On {
    static constexpr int width = 16 / static_cast<int>(sizeof(Word));
    using Codes = Rows<Target, u8, R, C, 4, width>;
    using Words = Rows<Target, Word, R, C, 4, width>;
    struct Params {
      Global<Target, const u8, Codes> codes;
      Global<Target, const f16> scales;
      Global<Target, const u8> zeros;  ///< without elements if symmetric
      Global<Target, Word, Words> out;
    };

    static void compute(auto& block, const Params& p, Tile t) {
      const int row0 = t.m * R, col0 = t.n * C;
      Codes codes;
      Words words;
      block.load(codes, p.codes, row0, col0);
      block.fill(words, Word{0});
      block.for_each(words, codes, [&](int row, int col, Word& word, u8 both) {
        const int n = row0 + row, group = (col0 + col) / (Group / 2);
        if (n >= p.scales.rows || group >= p.scales.cols) return;
        const float scale = static_cast<float>(*p.scales.template at<const f16>(n, group, 0, 0));
        const float zero = p.zeros.rows == 0 ? 8.0f : static_cast<float>(*p.zeros.template at<const u8>(n, group, 0, 0));
        const Pair pair{to<Out>((value_of_code<u4x2>(both, 0) - zero) * scale), to<Out>((value_of_code<u4x2>(both, 1) - zero) * scale)};
        word = bit_cast<Word>(pair);
      });
      block.store(words, p.out, row0, col0);
    }
  };
};

}  // namespace tw::kernels::dequant_gemm
