#pragma once

#include "tilewave/tile/language.tile.hpp"

namespace tw::kernels::attention {

/// Copies the tokens in use of a cache to contiguous memory of type To, sequence by sequence. A tile is up to eight heads of one token.
template <class T, class To = T>
struct GatherPages {
  static constexpr const char* source = "kernels/attention/gather.tile.hpp";
  static constexpr int heads = 8;

  template <class Target>
  struct On {
    using Row = Rows<Target, T, heads, 128, 4, 16 / static_cast<int>(sizeof(T)) < 8 ? 4 : 8>;
    using Integers = Pointer<Target, const i32>;
    struct Params {
      Global<Target, const T, Row> in;  ///< [pages, page_size, heads, dim], or [cache_batch, capacity, heads, dim]
      Global<Target, To, Row> out;      ///< [batch, capacity, heads, dim]
      Integers seqlens;                 ///< [batch]; null: the capacity
      Integers leftpad;                 ///< [batch], or null
      Integers batch_idx;               ///< [batch]: maps batch index to a row of the table; null: the identity
      Integers cu_added;                ///< [batch + 1]: offsets of the tokens that each sequence has beyond its length; or null
      Integers pages;                   ///< [tables, pages of a sequence]; null: each entry of the cache is one page
      i64 pages_stride;                 ///< between rows of the table
      int tables;
      int added;  ///< tokens beyond each sequence's length if cu_added is null
    };

    TW_INLINE static int clamp(int x, int most) { return max(min(x, most), 0); }

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const int row0 = t.m * heads, token = t.n, b = t.batch, capacity = p.out.size_i;
      const int added = p.cu_added ? clamp(p.cu_added[b + 1] - p.cu_added[b], capacity) : p.added;
      const int length = p.seqlens ? clamp(p.seqlens[b], capacity) + added : capacity;
      if (token >= length || (p.leftpad && token < p.leftpad[b])) return;
      // Lengths and pages on the device may be wrong: never access memory outside the cache.
      const int row = p.batch_idx ? clamp(p.batch_idx[b], p.tables - 1) : b;
      const int number = token / p.in.size_i;
      const int page = clamp(p.pages ? p.pages[row * p.pages_stride + number] : row, p.in.size_j - 1);
      TW_NO_UNROLL
      for (int col = 0; col < p.in.cols; col += Row::cols) {
        Row x;
        block.load(x, p.in, row0, col, token - number * p.in.size_i, page);
        block.store(x, p.out, row0, col, token, b);
      }
    }
  };
};

}  // namespace tw::kernels::attention
