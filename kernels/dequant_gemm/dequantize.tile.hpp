#pragma once

#include "kernels/dequant_gemm/formats.tile.hpp"
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

/// out = W for the other Formats (formats.tile.hpp), code by code.
template <class Format, class Out, int R, int C>
struct DequantizeCodes {
  static constexpr const char* source = "kernels/dequant_gemm/dequantize.tile.hpp";

  template <class Target>
  struct On {
    using Codes = typename Format::Codes;
    using Scale = typename Format::Scale;
    using Values = Rows<Target, float, R, C, 4, 8>;
    struct Params {
      Global<Target, const u8> codes;
      Global<Target, const Scale> scales;
      Global<Target, const u8> zeros;  ///< without elements if symmetric
      Global<Target, Out, Values> out;
    };

    static void compute(auto& block, const Params& p, Tile t) {
      const int row0 = t.m * R, col0 = t.n * C;
      Values x;
      block.fill(x, 0.0f);
      block.for_each(x, [&](int row, int col, auto& value) {
        const int n = row0 + row, k = col0 + col, g = k / Format::group;
        if (n >= p.out.rows || k >= p.out.cols) return;
        const u32 codes = *p.codes.template at<const u8>(n, k / codes_in<Codes>, 0, 0);
        const float number = value_of_code<Codes>(codes, k % codes_in<Codes>);
        const auto scale = static_cast<float>(*p.scales.template at<const Scale>(n, g, 0, 0));
        using Decode = typename Format::template Decode<float>;
        if constexpr (is_same<Decode, FromZero>) {
          const float zero = p.zeros.rows == 0 ? Format::middle : static_cast<float>(*p.zeros.template at<const u8>(n, g, 0, 0));
          value = Decode{}(number, ScaleAndZero<float>{scale, zero});
        } else {
          value = Decode{}(number, scale);
        }
      });
      block.store(x, p.out, row0, col0);
    }
  };
};

}  // namespace tw::kernels::dequant_gemm
