#pragma once

#include "tilewave/tile/language.tile.hpp"

namespace tw::kernels::attention {

/// Writes new keys and values into a cache, and applies the rotary embedding to keys and queries (in f32, rounded once). A tile is up to
/// eight heads of one token: the first seqlen_new tokens are new keys and values, the rest are queries.
template <class T, class Table>
struct Append {
  static constexpr const char* source = "kernels/attention/append.tile.hpp";
  static constexpr int heads = 8;

  template <class Target>
  struct On {
    using Half = Rows<Target, float, heads, 64, 4, 4>;
    using Rest = Rows<Target, T, heads, 128, 4, 16 / static_cast<int>(sizeof(T)) < 8 ? 4 : 8>;
    /// Heads [batch, seqlen, heads, ...] and their destinations: the two halves of the dimensions to rotate, and the rest, which is copied.
    /// Either may be empty.
    struct Heads {
      Global<Target, const T, Half> first_in, second_in;
      Global<Target, T, Half> first_out, second_out;
      Global<Target, const T, Rest> rest_in;
      Global<Target, T, Rest> rest_out;
    };
    struct Params {
      Heads k, q;  ///< k's output is the cache: [cache_batch, capacity, kv_heads, ...] or [pages, page_size, ...]
      Global<Target, const T, Rest> v_in;
      Global<Target, T, Rest> v_out;
      Global<Target, const Table, Half> cos, sin;  ///< [positions, rotary_dim / 2]
      const i32* seqlens;                          ///< [batch]; null: 0
      const i32* batch_idx;                        ///< [batch], or null
      const i32* leftpad;                          ///< [batch], or null
      const i32* block_table;                      ///< [tables, pages of a sequence], or null
      i64 block_table_stride;                      ///< between rows
      int tables;
      const i32* cu_new;  ///< [batch + 1]: offsets of packed new tokens; or null
      int batch;          ///< sequences
      int capacity;       ///< tokens per sequence
      int seqlen_new;
      int query_step;  ///< difference between the positions of consecutive queries
    };

    TW_INLINE static void copy(auto& block, const auto& in, const auto& out, int row0, int token, int at, int batch, int to) {
      TW_NO_UNROLL
      for (int col = 0; col < in.cols; col += Rest::cols) {
        Rest x;
        block.load(x, in, row0, col, token, batch);
        block.store(x, out, row0, col, at, to);
      }
    }
    /// Rotates the heads of a token, from row0 on, and stores them at [to, at] of the output.
    TW_INLINE static void rotate(auto& block, const Params& p, const Heads& x, i64 position, int row0, int token, int at, int batch,
                                 int to) {
      const i64 last = p.cos.rows - 1;
      const int table_row = static_cast<int>(position < 0 ? 0 : position < last ? position : last);
      TW_NO_UNROLL
      for (int col = 0; col < x.first_in.cols; col += Half::cols) {
        Half first, second;
        ColumnVector<Target, float, Half> cosines, sines;
        block.load(first, x.first_in, row0, col, token, batch);
        block.load(second, x.second_in, row0, col, token, batch);
        block.load(cosines, p.cos, table_row, col);
        block.load(sines, p.sin, table_row, col);
        const Half old = first;
        block.map(first, second, cosines, sines, [](auto a, auto b, auto c, auto s) { return a * c - b * s; });
        block.map(second, old, cosines, sines, [](auto b, auto a, auto c, auto s) { return b * c + a * s; });
        block.store(first, x.first_out, row0, col, at, to);
        block.store(second, x.second_out, row0, col, at, to);
      }
      copy(block, x.rest_in, x.rest_out, row0, token, at, batch, to);
    }

    /// The last sequence whose packed tokens begin at or before `token`.
    TW_INLINE static int sequence_of(const Params& p, int token) {
      int low = 0, high = p.batch;
      while (high - low > 1) {
        const int middle = (low + high) / 2;
        (p.cu_new[middle] <= token ? low : high) = middle;
      }
      return low;
    }

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const int row0 = t.m * heads;
      int b = t.batch, number = t.n;  // index of the token within the sequence's new tokens
      if (p.cu_new) {
        b = sequence_of(p, t.n);
        number = t.n - p.cu_new[b];
        if (number < 0 || t.n >= p.cu_new[b + 1]) return;
      }
      const i64 seqlen = p.seqlens ? p.seqlens[b] : 0;
      const i64 first_position = seqlen - (p.leftpad ? p.leftpad[b] : 0);
      if (t.n >= p.seqlen_new) {
        const int query = t.n - p.seqlen_new;
        if (row0 < p.q.first_in.rows) rotate(block, p, p.q, first_position + query * p.query_step, row0, query, query, b, b);
        return;
      }
      // Lengths and pages on the device may be wrong: never access memory outside the cache.
      const i64 token = seqlen + number;
      if (row0 >= p.v_in.rows || token < 0 || token >= p.capacity) return;
      const u32 page_size = static_cast<u32>(p.v_out.size_i);  // without pages, each sequence's cache is one page
      const u32 page = p.block_table ? static_cast<u32>(token) / page_size : 0;
      const int at = static_cast<int>(static_cast<u32>(token) - page * page_size);
      int to = p.batch_idx ? p.batch_idx[b] : b;
      if (p.block_table) {
        if (to < 0 || to >= p.tables) return;
        to = p.block_table[to * p.block_table_stride + page];
      }
      if (to < 0 || to >= p.v_out.size_j) return;
      rotate(block, p, p.k, first_position + number, row0, t.n, at, t.batch, to);
      copy(block, p.v_in, p.v_out, row0, t.n, at, t.batch, to);
    }
  };
};

}  // namespace tw::kernels::attention
