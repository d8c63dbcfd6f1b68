#pragma once

#include "tilewave/tile/language.tile.hpp"
#include "tilewave/tile/row_numbers.tile.hpp"

// What the decoding kernels share: which keys a tile sees and where they are, the softmax, and where results go.

namespace tw::kernels::mla {

/// Columns of a latent key: those that are also the value, and those with the rotary embedding.
inline constexpr int kLatent = 512, kRotary = 64, kKey = kLatent + kRotary;
/// Rows of a tile: queries of one sequence.
inline constexpr int kRows = 64;

/// Where the keys of a sequence are.
enum class Cache {
  contiguous,   ///< side by side
  pages,        ///< in pages of a multiple of 64 tokens, of which 64 are copied at once
  small_pages,  ///< in pages of a multiple of 16 tokens, of which 16 are copied at once
  tokens,       ///< in pages of any size, a whole number of tokens apart, gathered token by token
  selected      ///< anywhere in it: each sequence, of one query, has a list of the keys that it sees
};
/// Keys that are copied at once to a block of `keys`.
constexpr int copied_rows(Cache cache, int keys) { return cache == Cache::pages ? min(keys, 64) : cache == Cache::small_pages ? 16 : keys; }
template <Cache kCache>
inline constexpr bool kCopiesPages = kCache == Cache::pages || kCache == Cache::small_pages;
/// Whether keys are gathered one by one. Those that do not exist then arrive as zeros.
template <Cache kCache>
inline constexpr bool kGathers = kCache == Cache::tokens || kCache == Cache::selected;

/// Tiles in order of rows, sequences last, by blocks that load the next tile while they finish one.
struct InTurn : RowMajor {
  static constexpr Dispatch dispatch = Dispatch::persistent;
};

/// Parameters that do not depend on how the cache is stored.
template <class Target>
struct DecodeParams {
  using Integers = Pointer<Target, const i32>;
  Global<Target, float> partial;      ///< [splits * batch, heads * seqlen_q, 512]: replaces o if the keys are split
  Pointer<Target, float> lse;         ///< [splits * batch, heads, seqlen_q], or null
  Global<Target, const i32> indices;  ///< selected: [batch, capacity], tokens of the cache
  Pointer<Target, const float> sink;  ///< selected: [heads], or null
  Pointer<Target, float> max_logits;  ///< selected: as lse
  Integers seqlens;                   ///< [batch]; null: the capacity
  Integers pages;                     ///< [batch, pages of a sequence]
  i64 pages_stride;
  int page_size;   ///< tokens of a page
  int page_step;   ///< rows from a page to the next, gathered
  int page_count;  ///< pages of the cache
  int capacity;    ///< tokens of a sequence, or entries of its list, at most
  int batch, heads, seqlen_q;
  int splits;  ///< of a sequence's keys
  bool causal;
  float scale_log2;  ///< scale * log2(e)

  /// Of a sequence.
  TW_INLINE int rows() const { return heads * seqlen_q; }
  TW_INLINE int token_of(int row) const { return static_cast<int>(static_cast<u32>(row) / static_cast<u32>(heads)); }
  /// Results of splits are ordered by heads, then tokens.
  TW_INLINE int by_head(int row) const { return (row - token_of(row) * heads) * seqlen_q + token_of(row); }
  /// Of the whole cache.
  TW_INLINE u32 tokens() const { return static_cast<u32>(page_count) * static_cast<u32>(page_size); }
  /// The keys that row `row` of a sequence sees: with `causal` the tokens of q are the last of the sequence.
  TW_INLINE int visible(int seqlen, int row) const { return causal ? max(min(seqlen - seqlen_q + token_of(row) + 1, seqlen), 0) : seqlen; }
};

/// The keys that a tile's rows see, in blocks.
struct DecodeWork {
  int batch, part, first_row;
  int seqlen;
  int whole;          ///< keys that all rows see
  int begin, blocks;  ///< of this split

  TW_INLINE static DecodeWork of(const auto& p, Tile t, int keys) {
    DecodeWork w;
    w.batch = t.batch;
    w.part = t.m;
    w.first_row = t.n * kRows;
    // Lengths on the device may be wrong: never access memory outside the cache.
    w.seqlen = p.seqlens ? max(min(static_cast<int>(p.seqlens[w.batch]), p.capacity), 0) : p.capacity;
    w.whole = p.visible(w.seqlen, w.first_row);
    const int all = ceil_div(p.visible(w.seqlen, min(w.first_row + kRows, p.rows()) - 1), keys);
    w.begin = all * w.part / p.splits;
    w.blocks = all * (w.part + 1) / p.splits - w.begin;
    return w;
  }
};

/// A token's page, and its index there.
struct InPage {
  int page, token;
  TW_INLINE static InPage find(const auto& p, const DecodeWork& w, int token) {
    const u32 size = static_cast<u32>(p.page_size), number = static_cast<u32>(token) / size;
    const int page = p.pages[w.batch * p.pages_stride + static_cast<int>(number)];
    return {max(min(page, p.page_count - 1), 0), static_cast<int>(static_cast<u32>(token) - number * size)};
  }
};

/// The number of a key's row in a cache that is gathered, or -1 where there is no key.
template <Cache kCache>
TW_INLINE int row_of_key(const auto& p, const DecodeWork& w, int key) {
  // There are no branches, so that the loads of all numbers overlap. A number that is no token wraps around, and its row is not used.
  if constexpr (kCache == Cache::selected) {
    const int entry = *p.indices.template at<const i32>(w.batch, min(key, w.seqlen - 1), 0, 0);
    const u32 token = static_cast<u32>(entry), size = static_cast<u32>(p.page_size);
    const u32 place = token / size * static_cast<u32>(p.page_step) + token % size;
    return key < w.seqlen && token < p.tokens() ? static_cast<int>(place) : -1;
  } else {
    const InPage at = InPage::find(p, w, min(key, w.seqlen - 1));
    return key < w.seqlen ? at.page * p.page_step + at.token : -1;
  }
}

/// Where the N keys from key0 on are, for load_keys(): one number for each row that is gathered, -1 where there is no key; a place for each
/// page. They are looked up once for all columns, before the producer waits for room.
template <Cache kCache, int N>
TW_INLINE auto places_of_keys(auto& producer, const auto& p, const DecodeWork& w, int key0) {
  if constexpr (kGathers<kCache>) {
    return row_numbers<N>(producer, [&p, &w, key0](int row) { return row_of_key<kCache>(p, w, key0 + row); });
  } else if constexpr (kCopiesPages<kCache>) {
    constexpr int count = copied_rows(kCache, N);
    struct Pages {
      InPage at[N / count];
    } pages;
    TW_UNROLL
    for (int n = 0; n < N / count; ++n)  // what comes after the last token does not matter
      pages.at[n] = InPage::find(p, w, min(key0 + n * count, w.seqlen - 1));
    return pages;
  } else {
    return 0;  // side by side
  }
}

/// Copies columns from `col` on of the keys from key0 on, which are at `places`.
template <Cache kCache, class S>
TW_INLINE void load_keys(auto& copy, const DecodeWork& w, int key0, const auto& places, const auto& from, S& to, int col) {
  if constexpr (kCache == Cache::contiguous) {
    copy.tile(from, to, key0, col, w.batch);
  } else if constexpr (kCopiesPages<kCache>) {
    constexpr int count = copied_rows(kCache, S::rows);
    TW_UNROLL
    for (int n = 0; n < S::rows / count; ++n) copy.part(from, to, n * count, count, places.at[n].token, col, places.at[n].page);
  } else {
    copy.gather(from, to, places, col);
  }
}

/// Scores of keys that a row must not see become -infinity.
TW_INLINE void hide_keys(auto& block, const auto& p, const DecodeWork& w, int key0, auto& scores) {
  block.for_each(scores, [&](int row, int col, auto& x) {
    if (key0 + col >= p.visible(w.seqlen, w.first_row + row)) x = -kInfinity;
  });
}

/// The entries of a list for a block of scores: one that is not a token of the cache selects no key. Other caches have none.
template <class Target, class Scores, Cache kCache>
struct Entries {
  TW_INLINE void read(auto&, const auto&, const DecodeWork&, int) {}
  TW_INLINE void hide_missing(auto&, const auto&, Scores&) const {}
};
template <class Target, class Scores>
struct Entries<Target, Scores, Cache::selected> {
  ColumnVector<Target, i32, Scores> tokens;

  TW_INLINE void read(auto& block, const auto& p, const DecodeWork& w, int key0) {
    block.load(tokens, p.indices, w.batch, key0, 0, 0, Fill{-1.0f});
  }
  /// Scores of keys that do not exist become -infinity.
  TW_INLINE void hide_missing(auto& block, const auto& p, Scores& scores) const {
    const u32 count = p.tokens();
    block.map(scores, tokens, [&](auto x, auto token) { return static_cast<u32>(token) < count ? x : decltype(x)(-kInfinity); });
  }
};

/// The softmax of rows of which two warpgroups have parts: the scores arrive block by block, in one of them.
template <class Target, class Scores, Cache kCache>
struct SharedSoftmax {
  using PerRow = RowVector<Target, float, Scores>;
  struct Nothing {};
  static constexpr bool selected = kCache == Cache::selected;
  /// A row's base is raised to its largest exponent only when that exceeds it by kSlack. All weights are then in the range of f16, and none
  /// is smaller than it would be otherwise.
  static constexpr float kSlack = 8.0f;
  /// The base of a row that has not seen a key. It is finite, so that -infinity minus it is -infinity.
  static constexpr float kUnseen = -1e30f;

  PerRow base;                                  ///< what the row's weights are relative to: weight = 2^(score * scale_log2 - base)
  PerRow sum;                                   ///< of the weights. This thread's part, until it is completed
  conditional<selected, PerRow, Nothing> most;  ///< the row's largest exponent, score * scale_log2

  TW_INLINE void begin(auto& block) {
    if constexpr (selected) block.fill(most, -kInfinity);
    block.fill(base, kUnseen);
    block.fill(sum, 0.0f);
  }
  /// Replaces scores by their weights, and adds these to the sums. rescale(decay) multiplies the output so far by a factor for each row.
  template <class Rescale>
  TW_INLINE void add(auto& one, const auto& p, const auto& exchange, Scores& scores, Rescale rescale) {
    PerRow largest;
    one.row_max(scores, largest, exchange);
    if constexpr (selected) one.for_rows(most, [&](int, int i, auto& x) { x = max(x, largest[i] * p.scale_log2); });
    PerRow next;
    one.for_rows(next, [&](int, int i, auto& b) {
      b = largest[i] * p.scale_log2;
      if (!(b > base[i] + kSlack)) b = base[i];
    });
    raise(one, next, rescale);
    one.rows(scores, [&](int i, auto row) {
      const auto b = base[i];
      sum[i] += row.map_partial_sum([&](auto score) { return exp2(score * p.scale_log2 - b); });
    });
  }
  /// The same for keys with scales s, by which the weights will be multiplied. Exponents are scores times the row's factor; log_scale is
  /// log2 s.
  template <class PerKey, class Rescale>
  TW_INLINE void add_scaled(auto& one, const auto& p, const auto& exchange, Scores& scores, const PerRow& factor, const PerKey& log_scale,
                            Rescale rescale) {
    PerRow next;
    if constexpr (selected) {
      if (p.max_logits) {
        one.row_max(scores, next, exchange);
        one.for_rows(most, [&](int, int i, auto& x) { x = max(x, next[i] * factor[i]); });
      }
    }
    // Weights times s are in the range of f16: the base is raised for the largest of these.
    one.map(scores, factor, log_scale, [](auto x, auto f, auto l) { return x * f + l; });
    one.row_max(scores, next, exchange);
    one.for_rows(next, [&](int, int i, auto& b) {
      if (!(b > base[i] + kSlack)) b = base[i];
    });
    raise(one, next, rescale);
    one.map(scores, base, log_scale, [](auto x, auto b, auto l) { return exp2(x - b - l); });
    one.rows(scores, [&](int i, auto row) { sum[i] += row.map_partial_sum([](auto e) { return e; }); });
  }
  /// Stores the rows' bases for the other warpgroup.
  TW_INLINE void publish(auto& one, const auto& to) {
    one.for_rows(base, [&](int row, int, auto& b) {
      if (one.owns_rows(base)) to[row] = b;
    });
  }
  /// Takes over the bases that the other warpgroup has published.
  template <class Rescale>
  TW_INLINE void follow(auto& one, const auto& published, Rescale rescale) {
    PerRow next;
    one.load(next, published);
    raise(one, next, rescale);
  }
  /// Combines what the warpgroups have of each row.
  TW_INLINE void complete(auto& block, const auto& exchange) {
    block.complete(sum, exchange);
    if constexpr (selected) block.combine_rows(most, exchange, [](auto a, auto b) { return max(a, b); });
  }
  /// Stores the rows' log-sum-exp, and their largest logits.
  TW_INLINE void store_lse(auto& block, const auto& p, const DecodeWork& w) {
    store_rows(block, p, w, p.lse, sum, [&](int i, auto all) { return all == 0.0f ? all - kInfinity : (base[i] + log2(all)) * kLn2; });
    if constexpr (selected) store_rows(block, p, w, p.max_logits, most, [&](int, auto x) { return x * kLn2; });
  }
  /// What the output must be multiplied by in the end.
  TW_INLINE void factors(auto& block, const auto& p, const DecodeWork& w, PerRow& factor) {
    block.for_rows(factor, [&](int row, int i, auto& x) {
      auto all = sum[i];
      if constexpr (selected) {
        if (p.sink && w.first_row + row < p.rows()) all += exp2(p.sink[w.first_row + row] * kLog2E - base[i]);
      }
      x = sum[i] == 0.0f ? sum[i] : reciprocal(all);
    });
  }

 private:
  /// Makes `next` the bases.
  template <class Rescale>
  TW_INLINE void raise(auto& block, const PerRow& next, Rescale rescale) {
    PerRow decay;
    block.for_rows(decay, [&](int, int i, auto& d) { d = exp2(base[i] - next[i]); });
    if (!block.any(decay, [](auto d) { return d != 1.0f; })) return;
    block.for_rows(base, [&](int, int i, auto& b) {
      sum[i] *= decay[i];
      b = next[i];
    });
    rescale(decay);
  }
  TW_INLINE static void store_rows(auto& block, const auto& p, const DecodeWork& w, const auto& to, PerRow& values, auto f) {
    if (!to) return;
    block.for_rows(values, [&](int row, int i, auto& x) {
      const int r = w.first_row + row;
      if (r < p.rows() && block.owns_rows(values)) to[static_cast<i64>(w.part * p.batch + w.batch) * p.rows() + p.by_head(r)] = f(i, x);
    });
  }
};

/// f(Constant<0>{}) to f(Constant<Count - 1>{}), Count 2 or 4: for each group of columns.
template <int Count>
TW_INLINE void for_groups(auto f) {
  static_assert(Count == 2 || Count == 4);
  f(Constant<0>{}), f(Constant<1>{});
  if constexpr (Count == 4) f(Constant<2>{}), f(Constant<3>{});
}

/// Multiplies the weights, which are in registers or, where products are synchronous, in memory, by each group of the keys' columns. A
/// group is released as soon as it has been read.
template <class Target, class K, class Output, int kGroups>
TW_INLINE void add_output(auto& block, auto& memory, const auto& weights, K* (&keys)[kGroups], Output (&out)[kGroups]) {
  for_groups<kGroups>([&](auto g) {
    const auto values = view<Contract::rows>(*keys[g.value]);
    if constexpr (products_are_synchronous<Target>)
      block.mma(out[g.value], memory.weights, values, false);
    else
      block.mma(out[g.value], weights, values, false);
  });
  for_groups<kGroups>([&](auto g) {
    block.wait(leave<kGroups - 1 - g.value>, out[g.value]);
    block.release(memory.keys);
  });
}

/// Stores columns of the output from `col` on, to p.o or as a split's.
TW_INLINE void store_output(auto& block, const auto& p, const DecodeWork& w, const auto& out, int col) {
  if (p.partial.data != nullptr) {
    block.scatter(
        out, p.partial,
        [&](int row) {
          const int r = w.first_row + row;
          return r < p.rows() ? p.by_head(r) : -1;
        },
        col, w.part * p.batch + w.batch);
  } else {
    block.scatter(
        out, p.o, [&](int row) { return w.first_row + row; }, col, w.batch);
  }
}

}  // namespace tw::kernels::mla
