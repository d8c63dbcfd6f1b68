#pragma once

#include "kernels/attention/key_blocks.tile.hpp"

// From the columns and slashes of vertical-slash sparse attention (MInference; Jiang et al. 2024, arXiv 2407.02490) to what its tiles
// attend to. A column is a key that all queries from it on see; a slash is a distance d: query i sees key i - d.

namespace tw::kernels::attention {

/// After all keys.
inline constexpr int kNoKey = 0x7fffffff;

/// The distances of each head's slashes: distance d is bit d % 64 of word d / 64.
template <class Target>
struct SlashSets {
  Pointer<Target, const u64> bits;  ///< [head, words]
  int words;

  /// The head's largest distance below `end`; -1 if there is none.
  TW_INLINE int below(int head, int end) const {
    end = min(end, 64 * words);
    if (end <= 0) return -1;
    int word = (end - 1) / 64;
    const auto of_head = bits + static_cast<i64>(head) * words;
    u64 found = of_head[word] & ~u64{0} >> (64 * (word + 1) - end);
    while (found == 0 && word > 0) found = of_head[--word];
    return found == 0 ? -1 : 64 * word + highest_bit(found);
  }

 private:
  TW_INLINE static int highest_bit(u64 x) {
    int bit = 0;
    for (int step = 32; step > 0; step /= 2) {
      if (x >> step == 0) continue;
      x >>= step;
      bit += step;
    }
    return bit;
  }
};

/// Packs bytes, of which those of distances in use are not 0, into SlashSets. A tile is kWords words of one head.
struct PackSlashes {
  static constexpr const char* source = "kernels/attention/vertical_slash.tile.hpp";
  static constexpr int kWords = 128;

  template <class Target>
  struct On {
    struct Params {
      Pointer<Target, const u8> marks;  ///< [head, seqlen]
      Pointer<Target, u64> bits;        ///< [head, words]
      int seqlen, words;
    };
    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const int first = t.m * kWords;
      const auto marks = p.marks + static_cast<i64>(t.n) * p.seqlen;
      const auto bits = p.bits + static_cast<i64>(t.n) * p.words;
      block.parallel(min(kWords, p.words - first), [&](int i) {
        const int from = 64 * (first + i), count = min(64, p.seqlen - from);
        u64 word = 0;
        for (int bit = 0; bit < count; ++bit) word |= static_cast<u64>(marks[from + bit] != 0 ? 1 : 0) << bit;
        bits[first + i] = word;
      });
    }
  };
};

/// Sorts each head's columns in ascending order by counting for each how many come before it. Those outside the sequence become kNoKey. A
/// tile is kColumnsOfTile columns of one head.
struct SortColumns {
  static constexpr const char* source = "kernels/attention/vertical_slash.tile.hpp";
  static constexpr int kColumnsOfTile = 128;

  template <class Target>
  struct On {
    struct Params {
      Pointer<Target, const i32> columns;  ///< [head, count], in any order
      Pointer<Target, i32> sorted;         ///< [head, count]
      int count, seqlen;
    };
    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const int first = t.m * kColumnsOfTile;
      const auto columns = p.columns + static_cast<i64>(t.n) * p.count;
      const auto sorted = p.sorted + static_cast<i64>(t.n) * p.count;
      const auto key = [&](int n) {
        const int column = columns[n];
        return column >= 0 && column < p.seqlen ? column : kNoKey;
      };
      block.parallel(min(kColumnsOfTile, p.count - first), [&](int i) {
        const int n = first + i, own = key(n);
        int place = 0;
        for (int other = 0; other < p.count; ++other) {
          const int at = key(other);
          place += at < own || (at == own && other < n) ? 1 : 0;
        }
        sorted[place] = own;
      });
    }
  };
};

/// Copies the rows of each query head's columns side by side, 0 for those that are not in their sequence. A tile is R columns of one head.
template <class T>
struct CopyColumns {
  static constexpr const char* source = "kernels/attention/vertical_slash.tile.hpp";
  static constexpr int R = 8;

  template <class Target>
  struct On {
    using Row = Rows<Target, T, R, 128, 4, 16 / static_cast<int>(sizeof(T)) < 8 ? 4 : 8>;
    struct Params {
      Global<Target, const T, Row> in;     ///< [batch, kv_head, key, dim]
      Global<Target, T, Row> out;          ///< [batch, head, column, dim]
      Pointer<Target, const i32> columns;  ///< [batch * heads, count]
      Pointer<Target, const i32> seqlens;  ///< [batch], or null
      int count, heads_per_kv;
    };
    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const int first = t.m * R, head = t.n, batch = t.batch;
      const int seqlen = p.seqlens ? SequenceRows::clamp(p.seqlens[batch], p.in.rows) : p.in.rows;
      const auto columns = p.columns + static_cast<i64>(batch * p.out.size_i + head) * p.count;
      const auto row_of = [&](int row) {
        const int key = first + row < p.count ? columns[first + row] : kNoKey;
        return key < seqlen ? key : -1;
      };
      TW_NO_UNROLL
      for (int col = 0; col < p.in.cols; col += Row::cols) {
        Row x;
        block.gather(x, p.in, row_of, col, head / p.heads_per_kv, batch);
        block.store(x, p.out, first, col, head, batch);
      }
    }
  };
};

/// Where the blocks of each list are: list n has headers[n * header_stride] of them, whose first keys follow each other in ascending order
/// from blocks[n * block_stride] on.
template <class Integer>
struct SlashBlocks {
  Integer headers, blocks;  ///< headers: only a count, or the numbers before a BlockList's blocks
  i64 header_stride, block_stride;
  int size;  ///< keys of a block

  /// Whether a block of list n holds the key.
  TW_INLINE bool hold(i64 n, int key) const {
    const auto of_list = blocks + n * block_stride;
    int low = 0, high = headers[n * header_stride];  // blocks before `low` begin with the key or before it, those from `high` on after it
    while (low < high) {
      const int middle = (low + high) / 2;
      if (of_list[middle] <= key)
        low = middle + 1;
      else
        high = middle;
    }
    return low > 0 && key - of_list[low - 1] < size;
  }
};

/// Lists the blocks of keys that hold the slashes of each tile of queries.
///
/// Of the B = query_block queries before `end`, slash d needs the keys [end - B - d, end - d), or [0, B) where these begin before key 0.
/// From the largest distance on, a slash whose keys begin where the last range ends, or before that, extends the range by B keys. Otherwise
/// it begins a range of its own. Slashes of distances from `end` on are left out. This is MInference's choice, so ranges hold more than the
/// slashes, and the last one may reach past `end`.
///
/// A list is one thread's: each range depends on the one before.
struct ListSlashBlocks {
  static constexpr const char* source = "kernels/attention/vertical_slash.tile.hpp";
  static constexpr int kLists = 128;

  template <class Target>
  struct On {
    using Integers = Pointer<Target, const i32>;
    struct Params {
      SlashSets<Target> slashes;
      Integers seqlens;  ///< [batch], or null
      int seqlen, heads;
      int first_head;            ///< of the launch, of batch * heads
      int query_block;           ///< B
      int tile_rows;             ///< queries of a list, which divide B, as do the keys of a block
      int lists, lists_of_head;  ///< of the launch
      SlashBlocks<Pointer<Target, i32>> to;
      bool for_attention;  ///< the lists are BlockLists
      Integers columns;    ///< for_attention: [batch * heads, column_count], ascending
      int column_count;
    };
    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const int first = t.m * kLists;
      block.parallel(min(kLists, p.lists - first), [&](int i) { make_list(p, first + i); });
    }

   private:
    TW_INLINE static void make_list(const Params& p, int list) {
      const int of_launch = list / p.lists_of_head, head = p.first_head + of_launch, B = p.query_block;
      const int first_row = (list - of_launch * p.lists_of_head) * p.tile_rows, last_row = first_row + p.tile_rows - 1;
      const int end = first_row / B * B + B;
      const int seqlen = p.seqlens ? SequenceRows::clamp(p.seqlens[head / p.heads], p.seqlen) : p.seqlen;
      const bool used = first_row < seqlen;
      const auto blocks = p.to.blocks + list * p.to.block_stride;
      int count = 0, cut = 0;
      int slash = used ? p.slashes.below(head, end) : -1;
      int distance = min(slash, end - B);  // of the range [end - distance - B, end - distance)
      while (slash >= 0) {
        const int first_key = end - distance - B;
        for (int key = first_key; key < first_key + B && key <= last_row; key += p.to.size) {
          blocks[count++] = key;
          if (key + p.to.size - 1 > first_row) ++cut;
        }
        slash = p.slashes.below(head, distance);
        distance = min(slash, distance - B);
      }
      const auto header = p.to.headers + list * p.to.header_stride;
      header[BlockList::count] = count;
      if (!p.for_attention) return;
      header[BlockList::cut] = 0;  // the blocks are in ascending order
      header[BlockList::cut_first] = cut;
      header[BlockList::columns] = used ? columns_up_to(p, head, last_row) : 0;
    }
    TW_INLINE static int columns_up_to(const Params& p, int head, int key) {
      const auto columns = p.columns + static_cast<i64>(head) * p.column_count;
      int low = 0, high = p.column_count;
      while (low < high) {
        const int middle = (low + high) / 2;
        if (columns[middle] <= key)
          low = middle + 1;
        else
          high = middle;
      }
      return low;
    }
  };
};

/// The positions of each list's columns for Attention with kColumns, kNoKey for those that a block holds or that are there twice. A tile is
/// kColumnsOfTile columns of one list.
struct PlaceColumns {
  static constexpr const char* source = "kernels/attention/vertical_slash.tile.hpp";
  static constexpr int kColumnsOfTile = 512;

  template <class Target>
  struct On {
    using Integers = Pointer<Target, const i32>;
    struct Params {
      SlashBlocks<Integers> blocks;
      Integers columns;  ///< [batch * heads, column_count], ascending
      int column_count;
      int first_head, lists_of_head;
      Pointer<Target, i32> positions;  ///< [list, numbers]
      int numbers;
    };
    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const int list = t.m, first = t.n * kColumnsOfTile;
      const int seen = p.blocks.headers[list * p.blocks.header_stride + BlockList::columns];
      const auto columns = p.columns + static_cast<i64>(p.first_head + list / p.lists_of_head) * p.column_count;
      const auto positions = p.positions + static_cast<i64>(list) * p.numbers;
      block.parallel(min(kColumnsOfTile, p.numbers - first), [&](int i) {
        const int n = first + i;
        int position = kNoKey;
        if (n < seen && (n == 0 || columns[n - 1] != columns[n]) && !p.blocks.hold(list, columns[n])) position = columns[n];
        positions[n] = position;
      });
    }
  };
};

/// Lists the columns before each block of queries' end that none of its blocks of keys holds, in ascending order, once each.
struct ListColumns {
  static constexpr const char* source = "kernels/attention/vertical_slash.tile.hpp";
  static constexpr int rows = 4, C = 256;

  template <class Target>
  struct On {
    using Row = Rows<Target, i32, rows, C, 4, 8>;
    using Integers = Pointer<Target, const i32>;
    struct Params {
      SlashBlocks<Integers> blocks;
      Integers columns;  ///< [head, column_count], ascending
      Integers seqlens;  ///< [batch], or null
      int column_count, seqlen, heads;
      int lists, lists_of_head, query_block;
      Pointer<Target, i32> counts;   ///< [list]
      Pointer<Target, i32> indices;  ///< [list, column_count]
    };
    /// What a list selects from.
    struct Candidates {
      i64 list, columns;
      int count, end;  ///< columns to choose from, and the row after the last query
    };
    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      RowVector<Target, Candidates, Row> candidates;
      RowVector<Target, i32, Row> count;
      block.for_rows(candidates, [&](int row, int, Candidates& c) {
        const int list = t.m * rows + row, head = list / p.lists_of_head, first = (list - head * p.lists_of_head) * p.query_block;
        c = {list, static_cast<i64>(head) * p.column_count, 0, first + p.query_block};
        if (list >= p.lists) return;
        const int seqlen = p.seqlens ? SequenceRows::clamp(p.seqlens[head / p.heads], p.seqlen) : p.seqlen;
        if (first < seqlen) c.count = p.column_count;
      });
      make_lists<Row, C>(
          block, p.column_count, candidates, count, [&](int row) { return static_cast<i64>(t.m * rows + row) * p.column_count; }, p.indices,
          [&](i32 n, const Candidates& c) {
            if (n >= c.count) return 0;
            const int column = p.columns[c.columns + n];
            if (column >= c.end || (n > 0 && p.columns[c.columns + n - 1] == column)) return 0;
            return p.blocks.hold(c.list, column) ? 0 : column + 1;
          },
          [](const Row&, const Row&) {});
      if (!block.owns_rows(count)) return;
      block.for_rows(count, [&](int row, int, i32& n) {
        if (t.m * rows + row < p.lists) p.counts[t.m * rows + row] = n;
      });
    }
  };
};

/// Sets the results of queries after their sequence's end to 0, and their LSE to -infinity. A tile is R queries of one head.
template <class T>
struct ClearUnused {
  static constexpr const char* source = "kernels/attention/vertical_slash.tile.hpp";
  static constexpr int R = 64;

  template <class Target>
  struct On {
    struct Params {
      Global<Target, T> o;         ///< [batch, head, query, dim]
      Pointer<Target, float> lse;  ///< [batch, head, query], or null
      Pointer<Target, const i32> seqlens;
    };
    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const int head = t.n, batch = t.batch;
      const int first = max(t.m * R, SequenceRows::clamp(p.seqlens[batch], p.o.rows)), end = min(t.m * R + R, p.o.rows);
      if (first >= end) return;
      block.parallel((end - first) * p.o.cols,
                     [&](int n) { *p.o.template at<T>(first + n / p.o.cols, n % p.o.cols, head, batch) = tw::to<T>(0.0f); });
      if (!p.lse) return;
      const auto lse = p.lse + (static_cast<i64>(batch) * p.o.size_i + head) * p.o.rows;
      block.parallel(end - first, [&](int n) { lse[first + n] = -kInfinity; });
    }
  };
};

}  // namespace tw::kernels::attention
