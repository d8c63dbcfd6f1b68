#pragma once

#include "tilewave/tile/language.tile.hpp"

// What the family's kernels share: where sequences and their tokens are, which keys a token sees, and the lists of blocks of a tile.

namespace tw::kernels::nsa {

/// Tokens of a tile, at most: an entry of a tile's list has a bit for each.
inline constexpr int kMostTokens = 8;

/// Neighbouring tokens of one sequence, whose heads of one group are the rows of a tile.
struct TokenTile {
  int sequence;
  int row;             ///< of the tile's first token, counted over all sequences
  int count;           ///< tokens; 0: the tile is empty
  int position;        ///< of the first token in its sequence
  int span;            ///< tokens that a key stands for
  int k_batch, k_row;  ///< where the sequence's keys begin
  int keys;            ///< that exist

  /// The number of keys that a token of the tile sees: those whose last token is not after it.
  TW_INLINE int visible(int token) const {
    const int seen = position + token + 1;
    if (seen <= 0) return 0;
    return min(span == 1 ? seen : static_cast<int>(static_cast<u32>(seen) / static_cast<u32>(span)), keys);
  }
};

/// The sequences of a call. Offsets and lengths are in device memory and may be wrong: they are clamped to the tensors.
template <class Target>
struct Sequences {
  using Integers = Pointer<Target, const i32>;
  Integers cu_q, cu_k;  ///< [count + 1]: sequences are packed; or null
  Integers tokens;      ///< [count]: tokens of each sequence up to its last query; null: `length`, of packed ones as many as queries
  int count;
  int queries, keys;  ///< of a sequence; of all together if they are packed
  int length;
  int span;  ///< tokens that a key stands for

  TW_INLINE int tiles_of_sequence(int tokens_of_tile) const { return ceil_div(queries, tokens_of_tile); }
  /// The number of tiles of all sequences.
  static constexpr int tiles(int count, int queries, bool packed, int tokens_of_tile) {
    return packed ? Segments<Target>::tiles(queries, count, tokens_of_tile) : count * ceil_div(queries, tokens_of_tile);
  }
  TW_INLINE TokenTile find(int m, int tokens_of_tile) const {
    TokenTile t;
    int first, size, length_of = length;
    if (cu_q) {
      const Segments<Target> packed{cu_q, count, queries};
      const auto part = packed.find(m, tokens_of_tile);
      const auto all = packed.at(part.segment);
      const auto its_keys = Segments<Target>{cu_k, count, keys}.at(part.segment);
      t.sequence = part.segment;
      t.row = part.first;
      t.count = part.empty ? 0 : min(part.end - part.first, tokens_of_tile);
      t.k_batch = 0;
      t.k_row = its_keys.begin;
      t.keys = its_keys.size;
      first = part.first - all.begin;
      size = length_of = all.size;
    } else {
      const u32 tiles = static_cast<u32>(tiles_of_sequence(tokens_of_tile));
      t.sequence = static_cast<int>(static_cast<u32>(m) / tiles);
      first = (m - t.sequence * static_cast<int>(tiles)) * tokens_of_tile;
      t.row = t.sequence * queries + first;
      t.count = min(queries - first, tokens_of_tile);
      t.k_batch = t.sequence;
      t.k_row = 0;
      t.keys = keys;
      size = queries;
    }
    if (tokens) length_of = max(min(static_cast<int>(tokens[t.sequence]), kLongest), 0);
    t.span = span;
    t.position = length_of - size + first;
    t.keys = min(t.keys, static_cast<int>(static_cast<u32>(length_of) / static_cast<u32>(span)));
    return t;
  }

 private:
  static constexpr int kLongest = 1 << 30;
};

/// For each tile and head of keys, the blocks that one of its tokens selects, the last block first. An entry is block * 256 + mask, where
/// bit n of the mask is set if the tile's token n selects the block.
template <class Target>
struct TileLists {
  Pointer<Target, const i32> entries;  ///< [tiles, heads, capacity]; null: all tokens see all blocks
  Pointer<Target, const i32> sizes;    ///< [tiles, heads]
  int capacity, heads;
  int parts;  ///< of a block: its keys arrive so many steps one after the other

  TW_INLINE i64 list(int m, int head) const { return static_cast<i64>(m) * heads + head; }
};

/// A tile of tokens and the steps of its keys, N at a time.
struct ListWork : TokenTile {
  int m, head;  ///< head: of keys
  int steps;

  TW_INLINE static ListWork of(const auto& p, Tile t, int tokens_of_tile, int keys_of_step) {
    ListWork w;
    static_cast<TokenTile&>(w) = p.sequences.find(t.m, tokens_of_tile);
    w.m = t.m;
    w.head = t.n;
    w.steps = 0;
    if (w.count > 0)
      w.steps = p.lists.entries ? p.lists.sizes[p.lists.list(t.m, t.n)] * p.lists.parts : ceil_div(w.visible(w.count - 1), keys_of_step);
    return w;
  }
};

/// The keys of a step, and the tokens that see them.
struct Step {
  int key;   ///< the first key
  int mask;  ///< bit n: token n of the tile selects the block

  TW_INLINE static Step of(const auto& p, const ListWork& w, int step, int keys_of_step) {
    if (!p.lists.entries) return {(w.steps - 1 - step) * keys_of_step, (1 << kMostTokens) - 1};
    const u32 parts = static_cast<u32>(p.lists.parts), entry = static_cast<u32>(step) / parts,
              part = static_cast<u32>(step) - entry * parts;
    const int found = p.lists.entries[p.lists.list(w.m, w.head) * p.lists.capacity + static_cast<int>(entry)];
    const int block = found >> kMostTokens;
    return {(block * static_cast<int>(parts) + static_cast<int>(part)) * keys_of_step, found & ((1 << kMostTokens) - 1)};
  }
};

/// Tiles of one head of keys after the other, so that these stay in the L2 cache; the last tokens, which see the most keys, first.
struct HeadByHead {
  static constexpr Dispatch dispatch = Dispatch::dynamic;
  TW_INLINE static constexpr Tile at(const TileGrid& grid, int i) {
    const u32 m = static_cast<u32>(grid.m), head = static_cast<u32>(i) / m;
    return {grid.m - 1 - static_cast<int>(static_cast<u32>(i) - head * m), static_cast<int>(head), 0};
  }
};

/// Rows of a Fragment whose products this thread takes part in: those of its warpgroup, on the generic target of its warp, on the CPU all.
struct ProductRows {
  int first, count;

  template <class F>
  TW_INLINE static ProductRows of([[maybe_unused]] const auto& block) {
#if TW_ON_GPU
    if constexpr (requires { block.warpgroup; })
      return {block.warpgroup * 64, 64};
    else
      return {F::warp_row(block.at), F::warp_rows};
#else
    return {0, F::rows};
#endif
  }
};

/// The tokens whose rows a thread's products compute.
struct TokenRange {
  int first, last;  ///< inclusive

  template <class F>
  TW_INLINE static TokenRange of(const auto& block, int rows_of_token) {
    const ProductRows rows = ProductRows::of<F>(block);
    return {rows.first / rows_of_token, (rows.first + rows.count - 1) / rows_of_token};
  }
  TW_INLINE int bits() const { return (2 << last) - (1 << first); }
};

/// Scores of a step that a row must not see become -infinity: those of tokens that did not select the block, and of later keys.
template <int Group>
TW_INLINE void hide(auto& block, const ListWork& w, const Step& step, auto& scores) {
  block.for_each(scores, [&](int row, int col, auto& x) {
    const int token = row / Group;
    if ((step.mask >> token & 1) == 0 || step.key + col >= w.visible(token)) x = -kInfinity;
  });
}

/// Whether a row of `tokens` sees a key of the step, and whether all of them see all.
TW_INLINE bool any_sees(const ListWork& w, const Step& step, const TokenRange& tokens) {
  return (step.mask & tokens.bits()) != 0 && step.key < w.visible(tokens.last);
}
TW_INLINE bool all_see(const ListWork& w, const Step& step, const TokenRange& tokens, int keys_of_step) {
  return (step.mask & tokens.bits()) == tokens.bits() && step.key + keys_of_step <= w.visible(tokens.first);
}

}  // namespace tw::kernels::nsa
