#pragma once

#include "tilewave/tile/language.tile.hpp"

// A stable counting sort of assignments by expert, without atomics. A key is unique: expert * chunk + number. Its rank, the number of
// smaller keys, is where the assignment comes in its chunk; and the rank of expert * chunk is where the expert's assignments begin. Up to
// a few thousand assignments are one chunk. More are ranked in chunks, and cumulative sums of the beginnings say where each chunk's go.

namespace tw::kernels::moe {

template <class Target>
struct Assignments {
  Pointer<Target, const i32> experts;  ///< [count]
  Pointer<Target, i32> places;         ///< [count]
  Pointer<Target, i32> rows;           ///< [count], or null
  int count;
  int k;  ///< of a token
  int first_expert, n_experts;
  int chunk, chunks;

  /// Assignments to experts elsewhere belong to an expert after the last one. So they come last.
  TW_INLINE int expert(int n) const {
    const u32 e = static_cast<u32>(experts[n]) - static_cast<u32>(first_expert);
    return e < static_cast<u32>(n_experts) ? static_cast<int>(e) : n_experts;
  }
  TW_INLINE void put(int n, int expert, int row) const {
    const bool here = expert < n_experts;
    places[n] = here ? row : -1;
    if (rows) rows[row] = here ? n / k : -1;
  }
};

/// Ranks R keys of a chunk: compares each with all of the chunk, C at a time. The keys are those of the assignments and, after them, of
/// the beginnings of all experts and of the end.
template <int R, int C>
struct RankAssignments {
  static constexpr const char* source = "kernels/moe/permute.tile.hpp";

  template <class Target>
  struct On {
    using Counts = Rows<Target, i32, R, C, 4, 1>;
    struct Params {
      Assignments<Target> all;
      Pointer<Target, i32> begins;  ///< [experts + 1, chunks]; with one chunk these are the offsets
    };

    static void compute(auto& block, const Params& p, Tile t) {
      const auto& all = p.all;
      const int first = t.n * all.chunk, size = min(all.chunk, all.count - first), item0 = t.m * R;
      const auto key_of = [&](int n) { return all.expert(first + n) * all.chunk + n; };
      Counts counts, others;
      RowVector<Target, i32, Counts> key{}, rank{};
      block.for_rows(key, [&](int row, int, i32& own) {
        const int item = item0 + row;
        own = item < size ? key_of(item) : (item - all.chunk) * all.chunk;
      });
      block.fill(counts, 0);
      for (int col0 = 0; col0 < size; col0 += C) {
        block.for_each(others, [&](int, int col, i32& other) { other = col0 + col < size ? key_of(col0 + col) : detail::largest<i32>; });
        block.map(counts, others, key, [](i32 n, i32 other, i32 own) { return other < own ? n + 1 : n; });
      }
      block.rows(counts, [&](int i, auto row) { rank[i] = row.sum(); });
      if (!block.owns_rows(rank)) return;
      block.for_rows(rank, [&](int row, int, i32& r) {
        const int item = item0 + row, boundary = item - all.chunk;
        if (item < size && all.chunks == 1)
          all.put(item, all.expert(item), r);
        else if (item < size)
          all.places[first + item] = r;
        else if (boundary >= 0 && boundary <= all.n_experts)
          p.begins[boundary * all.chunks + t.n] = r;
      });
    }
  };
};

inline constexpr int kMostChunks = 512;

/// Cumulative sums of where an expert begins in the chunks. The last sum is where it begins in the whole: no key counts in two chunks.
struct SumBegins {
  static constexpr const char* source = "kernels/moe/permute.tile.hpp";
  static constexpr int rows = 4;

  template <class Target>
  struct On {
    using Begins = Rows<Target, i32, rows, kMostChunks>;
    struct Params {
      Global<Target, i32> begins;   ///< [experts + 1, chunks]; replaced by their sums
      Global<Target, i32> offsets;  ///< [experts + 1, 1]
    };

    static void compute(auto& block, const Params& p, Tile t) {
      Begins x;
      RowVector<Target, i32, Begins> total;
      block.load(x, p.begins, t.m * rows, 0);
      block.rows(x, [&](int i, auto row) { total[i] = row.sum(); });
      block.row_cumsum(x);
      block.store(x, p.begins, t.m * rows, 0);
      block.store(total, p.offsets, t.m * rows, 0);
    }
  };
};

/// Adds to an assignment's rank in its chunk what comes before the chunk's assignments to its expert.
struct PlaceAssignments {
  static constexpr const char* source = "kernels/moe/permute.tile.hpp";
  static constexpr int tile = 512;

  template <class Target>
  struct On {
    struct Params {
      Assignments<Target> all;          ///< places: the ranks
      Pointer<Target, const i32> sums;  ///< [experts + 1, chunks]
    };

    static void compute(auto& block, const Params& p, Tile t) {
      const auto& all = p.all;
      const int first = t.m * tile;
      block.parallel(min(tile, all.count - first), [&](int i) {
        const int n = first + i, chunk = n / all.chunk, expert = all.expert(n);
        const auto sums = p.sums + static_cast<i64>(expert) * all.chunks;
        // In chunks before this one: all keys below the next expert's, less those below this expert's. In this one: the rank, less the
        // keys below this expert's. Of the whole: all keys below this expert's.
        int before = 0;
        if (chunk > 0) before = expert < all.n_experts ? sums[all.chunks + chunk - 1] : chunk * all.chunk;
        const int rank = all.places[n];
        all.put(n, expert, sums[all.chunks - 1] + before - sums[chunk] + rank);
      });
    }
  };
};

}  // namespace tw::kernels::moe
