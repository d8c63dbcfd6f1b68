#pragma once

#include "kernels/indexer/head_sums.tile.hpp"

namespace tw::kernels::indexer {

inline constexpr int kDim = 128;   ///< elements of a head
inline constexpr int kKeys = 128;  ///< keys of a step
inline constexpr int kPage = 64;   ///< keys of a page

/// Where the keys are.
enum class Cache {
  contiguous,  ///< rows of one matrix
  pages        ///< in pages of 64 keys: each sequence has a list of its pages
};

/// Tiles of the last queries first: under a causal mask they see the most keys.
struct LastFirst {
  static constexpr Dispatch dispatch = Dispatch::dynamic;
  TW_INLINE static constexpr Tile at(const TileGrid& grid, int i) {
    const u32 part = static_cast<u32>(i) / static_cast<u32>(grid.m), m = static_cast<u32>(i) - part * static_cast<u32>(grid.m);
    const u32 batch = part / static_cast<u32>(grid.n), n = part - batch * static_cast<u32>(grid.n);
    return {grid.m - 1 - static_cast<int>(m), static_cast<int>(n), static_cast<int>(batch)};
  }
};

/// The keys that a query sees: begin to end - 1.
struct KeyRange {
  int begin, end;
};

/// The keys and queries of a tile.
struct IndexerWork {
  int batch, query, queries;     ///< the tile's first query, counted in its sequence, and how many there are
  int column, column_end;        ///< columns of the scores that the tile writes
  int key, end;                  ///< the first key of the first step; keys from `end` on are not seen by any query
  int steps;                     ///< of kKeys keys
  int common_begin, common_end;  ///< keys that all queries of the tile see
  TW_INLINE int keys_end() const { return key + steps * kKeys; }
};

/// scores[q, k] = k_scale[k] * sum over heads h of weights[q, h] * max(0, q[q, h, :] . k[k, :]), and -infinity for keys that a query does
/// not see. A product that is NaN makes a score NaN.
///
/// Keys are the rows of a product and heads of queries its columns, so that a thread sums over heads in its own registers. A tile has
/// `Queries` queries, whose heads stay in shared memory; keys stream through a ring. With more than 128 columns there are two products in
/// flight in turn: one is summed while the other is multiplied. Queries with fewer than `Heads` heads have heads of zeros.
template <class T, int Heads, int Queries, int Stages, Cache kCache>
struct Indexer {
  static constexpr const char* source = "kernels/indexer/indexer.tile.hpp";
  static constexpr bool scaled = is_fp8<T>;
  static constexpr int groups = Heads * Queries > 128 ? 2 : 1;  ///< products of a step
  static constexpr int group = Queries / groups;                ///< queries of a product
  static constexpr int columns = group * Heads;
  static_assert(group * groups == Queries && columns <= 128, "a product has up to 128 columns");

  template <class Target>
  struct On {
    static constexpr int rows = kKeys;
    static constexpr int vector_bytes = 64;
    static constexpr bool paged = kCache == Cache::pages;
    /// The queries of the next tile arrive while this one is computed, where there is room.
    static constexpr int query_stages = sizeof(T) == 1 && !products_are_synchronous<Target> ? 2 : 1;
    using Q = Shared<Target, T, columns, kDim>;
    using K = Shared<Target, T, kKeys, kDim>;
    static constexpr int together = paged ? kPage : kKeys;  ///< keys whose scales are side by side
    using Scales = SharedVector<Target, float, together>;
    using Acc = Fragment<Target, float, kKeys, columns>;
    using HalfWeights = ColumnVector<Target, float, Acc>;
    using Sums = HeadSums<Target, Acc, Heads>;
    using KeyScales = typename Sums::Scales;
    using Work = IndexerWork;
    using Schedule = LastFirst;

    struct Params {
      Global<Target, const T, Q> q;                ///< [batch * queries, heads, 128]
      Global<Target, const T, K> k;                ///< [keys, 128], or [pages, 64, 128]
      Global<Target, const float, Scales> scales;  ///< [1, keys], or [pages, 64]
      Pointer<Target, const float> weights;        ///< [batch * queries, heads]
      Pointer<Target, float> scores;               ///< [batch * queries, columns]
      Pointer<Target, const i32> starts, ends;     ///< contiguous: [queries], or null; pages: `ends` has lengths
      Pointer<Target, const i32> pages;            ///< [batch, pages of a sequence]
      i64 weights_stride, weights_step, scores_stride, pages_stride;
      int page_count;  ///< pages of the cache
      int queries;     ///< of a sequence
      int heads;
      int keys;       ///< of a sequence, at most
      int columns;    ///< of the scores
      int part;       ///< columns of a tile, a multiple of kKeys
      bool by_query;  ///< pages: `ends` is [batch, queries] instead of [batch]
      bool causal;    ///< query q of a sequence sees the keys before keys - queries + q + 1
      bool clear;     ///< write -infinity where a query does not see a key; otherwise nothing

      TW_INLINE KeyRange range(int batch, int query) const {
        if constexpr (paged) {
          const int length = ends ? max(min(static_cast<int>(ends[by_query ? batch * queries + query : batch]), keys), 0) : keys;
          return {0, causal ? min(length - queries + query + 1, length) : length};
        } else {
          KeyRange range{0, causal ? min(keys - queries + query + 1, keys) : keys};
          if (starts) range.begin = max(range.begin, static_cast<int>(starts[query]));
          if (ends) range.end = min(range.end, static_cast<int>(ends[query]));
          return range;
        }
      }
      /// The page of a key that a sequence has: it may be none of the cache.
      TW_INLINE int page_of(int batch, int key) const { return pages[batch * pages_stride + key / kPage]; }
      TW_INLINE bool exists(int batch, int key) const {
        if constexpr (paged) return static_cast<u32>(page_of(batch, key)) < static_cast<u32>(page_count);
        return true;
      }
    };
    struct Queried {
      Q of[groups];
    };
    struct Slot {
      K k;
      Scales scales[kKeys / together];
    };
    struct Unscaled {
      K k;
    };
    struct Memory {
      Ring<Target, Queried, query_stages> q;
      Ring<Target, conditional<scaled, Slot, Unscaled>, Stages> keys;
      VectorBuffer<Target, float, columns> first, second;  ///< halves of the weights of each product's queries
      explicit constexpr Memory(auto& block) : q(block), keys(block), first(block), second(block) {}
    };

    TW_INLINE static Work work(const Params& p, Tile t) {
      Work w;
      w.batch = t.batch;
      w.query = t.m * Queries;
      w.queries = min(p.queries - w.query, Queries);
      w.column = t.n * p.part;
      w.column_end = min(w.column + p.part, p.columns);
      int begin = p.keys, end = 0;
      w.common_begin = 0;
      w.common_end = w.queries == Queries ? p.keys : 0;  // otherwise each row is looked at
      TW_NO_UNROLL
      for (int n = 0; n < w.queries; ++n) {
        const KeyRange range = p.range(w.batch, w.query + n);
        w.common_begin = max(w.common_begin, range.begin);
        w.common_end = min(w.common_end, range.end);
        if (range.begin >= range.end) continue;
        begin = min(begin, range.begin);
        end = max(end, range.end);
      }
      begin = max(begin, w.column);
      w.end = min(end, w.column_end);
      w.key = begin / kKeys * kKeys;
      w.steps = w.end > begin ? ceil_div(w.end - w.key, kKeys) : 0;
      if (w.steps == 0) w.key = w.column;
      return w;
    }
    TW_INLINE static int steps(const Params&, const Work& w) { return w.steps; }

    TW_INLINE static void load(auto& producer, const Params& p, const Work& w, int step, Memory& memory) {
      if (step == 0) {
        producer.put(memory.q, [&](auto copy, Queried& q) {
          TW_NO_UNROLL
          for (int n = 0; n < Queries; ++n) {
            const int query = w.query + min(n, w.queries - 1);  // the results of a repeated one are dropped
            copy.part(p.q, q.of[n / group], n % group * Heads, Heads, 0, 0, w.batch * p.queries + query);
          }
        });
      }
      const int key0 = w.key + step * kKeys;
      producer.put(memory.keys, [&](auto copy, auto& slot) {
        if constexpr (paged) {
          TW_UNROLL
          for (int half = 0; half < kKeys / kPage; ++half) {
            // What comes after the last key, or is on a page that does not exist, does not matter.
            const int page = max(min(p.page_of(w.batch, min(key0 + half * kPage, w.end - 1)), p.page_count - 1), 0);
            copy.part(p.k, slot.k, half * kPage, kPage, 0, 0, page);
            copy.vector(p.scales, slot.scales[half], page, 0);
          }
        } else {
          copy.tile(p.k, slot.k, key0, 0);
          if constexpr (scaled) copy.vector(p.scales, slot.scales[0], 0, key0);
        }
      });
    }

    TW_INLINE static void compute(auto& block, const Params& p, const Work& w, Memory& memory, auto&) {
      if (p.clear) {
        clear(block, p, w, w.column, w.key);
        clear(block, p, w, max(w.keys_end(), w.column), w.column_end);
      }
      if (w.steps == 0) return;
      HalfWeights first, second;
      block.sync();  // the last tile's weights have been read
      read_weights(block, p, w, 0, memory.first);
      if constexpr (groups == 2) read_weights(block, p, w, group, memory.second);
      block.sync();
      block.load(first, memory.first);
      if constexpr (groups == 2) block.load(second, memory.second);

      const Queried& q = block.take(memory.q);
      Acc acc;
      KeyScales scale;
      if constexpr (groups == 1 || products_are_synchronous<Target>) {
        TW_NO_UNROLL
        for (int step = 0; step < w.steps; ++step) {
          const auto& slot = block.take(memory.keys);
          multiply(block, acc, slot.k, q.of[0]);
          read_scales(block, slot, scale);
          block.wait(leave<0>, acc);
          if constexpr (groups == 1) block.release(memory.keys);
          store(block, p, w, step, 0, acc, first, scale);
          if constexpr (groups == 2) {
            multiply(block, acc, slot.k, q.of[1]);
            block.wait(leave<0>, acc);
            block.release(memory.keys);
            store(block, p, w, step, group, acc, second, scale);
          }
        }
      } else {
        // No product is in flight where the loop begins again: the assembler would serialize products that it cannot tell apart.
        Acc other;
        int step = 0;
        TW_NO_UNROLL
        for (; step + 1 < w.steps; step += 2) {
          const auto& slot = block.take(memory.keys);
          block.mma(acc, slot.k, q.of[0], true);
          block.mma(other, slot.k, q.of[1], true);
          read_scales(block, slot, scale);
          block.wait(leave<1>, acc);
          store(block, p, w, step, 0, acc, first, scale);
          const auto& next = block.take(memory.keys);
          block.mma(acc, next.k, q.of[0], true);
          block.wait(leave<1>, other);
          block.release(memory.keys);
          store(block, p, w, step, group, other, second, scale);
          block.mma(other, next.k, q.of[1], true);
          read_scales(block, next, scale);
          block.wait(leave<1>, acc);
          store(block, p, w, step + 1, 0, acc, first, scale);
          block.wait(leave<0>, other);
          block.release(memory.keys);
          store(block, p, w, step + 1, group, other, second, scale);
        }
        if (step < w.steps) {
          const auto& slot = block.take(memory.keys);
          block.mma(acc, slot.k, q.of[0], true);
          block.mma(other, slot.k, q.of[1], true);
          read_scales(block, slot, scale);
          block.wait(leave<1>, acc);
          store(block, p, w, step, 0, acc, first, scale);
          block.wait(leave<0>, other);
          block.release(memory.keys);
          store(block, p, w, step, group, other, second, scale);
        }
      }
      block.release(memory.q);
    }
    TW_INLINE static void finish(auto&, const Params&, const Work&, Memory&, auto&) {}

   private:
    TW_INLINE static i64 row_of(const Params& p, const Work& w, int n) {
      return (static_cast<i64>(w.batch) * p.queries + w.query + n) * p.scores_stride;
    }
    /// Columns that no step writes.
    TW_INLINE static void clear(auto& block, const Params& p, const Work& w, int begin, int end) {
      TW_NO_UNROLL
      for (int n = 0; n < w.queries; ++n) {
        const auto to = p.scores + (row_of(p, w, n) + begin);
        block.parallel(end - begin, [&](int i) { to[i] = -kInfinity; });
      }
    }
    /// Halves of the weights of a product's columns, as HeadSums takes them. Heads and queries that do not exist have 0.
    TW_INLINE static void read_weights(auto& block, const Params& p, const Work& w, int n0, auto& to) {
      block.parallel(columns, [&](int i) {
        const int n = n0 + i / Heads, head = i % Heads;
        to[i] = 0.0f;
        if (n < w.queries && head < p.heads)
          to[i] = 0.5f * p.weights[(static_cast<i64>(w.batch) * p.queries + w.query + n) * p.weights_stride + head * p.weights_step];
      });
    }
    TW_INLINE static void multiply(auto& block, Acc& acc, const auto& k, const Q& q) {
      if constexpr (sizeof(T) == 2 && products_are_synchronous<Target>) {
        // In two halves: the compiler would leave a loop in the product of 128 elements, and the accumulators in memory.
        constexpr int half = kDim / 2;
        block.mma(acc, view_columns<0, half>(k), view_columns<0, half>(q), true);
        block.mma(acc, view_columns<half, half>(k), view_columns<half, half>(q), false);
      } else {
        block.mma(acc, k, q, true);
      }
    }
    TW_INLINE static void read_scales(auto& block, const auto& slot, KeyScales& scale) {
      if constexpr (scaled) {
        Sums::read(block, scale, [&](int row) { return slot.scales[row / together][row % together]; });
        block.fence();  // scales are read before the slot is released
        block.sync_warpgroup();
      }
    }
    /// Sums over heads and writes a step's scores of the queries from n0 on.
    TW_INLINE static void store(auto& block, const Params& p, const Work& w, int step, int n0, Acc& acc, const HalfWeights& half_weights,
                                const KeyScales& scale) {
      Sums sums;
      sums.sum(block, acc, half_weights);
      if constexpr (scaled) sums.multiply(block, scale);
      const int key0 = w.key + step * kKeys;
      const bool whole =
          key0 >= w.common_begin && key0 + kKeys <= w.common_end && p.exists(w.batch, key0) && p.exists(w.batch, key0 + kPage);
      const auto to = p.scores + (row_of(p, w, n0) + key0);
      if (whole) {
        sums.for_each(block, [&](int row, int n, const auto& x) { to[n * p.scores_stride + row] = x; });
      } else {
        sums.for_each(block, [&](int row, int n, const auto& x) {
          const int key = key0 + row;
          if (n0 + n >= w.queries || key >= w.column_end) return;
          const KeyRange range = p.range(w.batch, w.query + n0 + n);
          if (key >= range.begin && key < range.end && p.exists(w.batch, key))
            to[n * p.scores_stride + row] = x;
          else if (p.clear)
            to[n * p.scores_stride + row] = -kInfinity;
        });
      }
    }
  };
};

}  // namespace tw::kernels::indexer
