#pragma once

#include "kernels/cast_fp8/cast_fp8.tile.hpp"
#include "tilewave/tile/language.tile.hpp"

namespace tw::kernels::mla {

/// Writes new tokens into a latent cache and applies the rotary embedding to their keys (in f32, rounded once). A tile is one token.
/// `Stored`: T, or fp8_e4m3, whose scales are a group's largest magnitude / 448.
template <class T, class Table, class Stored>
struct Append {
  static constexpr const char* source = "kernels/mla/append.tile.hpp";

  template <class Target>
  struct On {
    using Latent = Rows<Target, float, 4, 128, 4, 4>;  // a row is a group of columns
    using Half = Rows<Target, float, 1, 128, 4, 1>;    // of which 32 columns exist: one for each lane of a warp
    using Integers = Pointer<Target, const i32>;
    struct Params {
      Global<Target, const T, Latent> latent;             ///< [batch, seqlen_new, 4, 128]
      Global<Target, const T, Half> first_in, second_in;  ///< [batch, seqlen_new, 32]: the two halves of the pairs
      Global<Target, Stored, Latent> latent_out;          ///< [batch, capacity, 4, 128] or [pages, page_size, 4, 128]
      Pointer<Target, float> scales;                      ///< of latent_out's groups, if it is fp8
      i64 scales_stride_page, scales_stride_token;
      Global<Target, T, Half> first_out, second_out;
      Global<Target, const Table, Half> cos, sin;  ///< [positions, 32]; without rows nothing is rotated
      Integers seqlens;                            ///< [batch]; null: 0
      Integers pages;                              ///< [batch, pages of a sequence], or null
      i64 pages_stride;
      int capacity;
    };

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const int b = t.n;
      const i64 token = (p.seqlens ? static_cast<int>(p.seqlens[b]) : 0) + i64{t.m};
      // Lengths and pages on the device may be wrong: never access memory outside the cache.
      if (token < 0 || token >= p.capacity) return;
      const u32 page_size = static_cast<u32>(p.latent_out.size_i);  // without pages, each sequence's cache is one page
      const u32 number = p.pages ? static_cast<u32>(token) / page_size : 0;
      const int at = static_cast<int>(static_cast<u32>(token) - number * page_size);
      const int page = p.pages ? static_cast<int>(p.pages[b * p.pages_stride + static_cast<int>(number)]) : b;
      if (page < 0 || page >= p.latent_out.size_j) return;

      Latent latent;
      block.load(latent, p.latent, 0, 0, t.m, b);
      if constexpr (sizeof(Stored) == 1) {
        RowVector<Target, float, Latent> scale;
        cast_fp8::scale_rows<Target>(block, latent, scale, false);
        const auto to = p.scales + (page * p.scales_stride_page + at * p.scales_stride_token);
        block.for_rows(scale, [&](int row, int, auto& s) {
          if (block.owns_rows(scale)) to[row] = s;
        });
      }
      block.store(latent, p.latent_out, 0, 0, at, page);
      Half first, second;
      block.load(first, p.first_in, t.m, 0, b);
      block.load(second, p.second_in, t.m, 0, b);
      if (p.cos.rows > 0) {
        const int row = static_cast<int>(token < p.cos.rows ? token : p.cos.rows - 1);
        ColumnVector<Target, float, Half> cosines, sines;
        block.load(cosines, p.cos, row, 0);
        block.load(sines, p.sin, row, 0);
        const Half old = first;
        block.map(first, second, cosines, sines, [](auto x, auto y, auto c, auto s) { return x * c - y * s; });
        block.map(second, old, cosines, sines, [](auto y, auto x, auto c, auto s) { return y * c + x * s; });
      }
      block.store(first, p.first_out, at, 0, page);
      block.store(second, p.second_out, at, 0, page);
    }
  };
};

}  // namespace tw::kernels::mla
