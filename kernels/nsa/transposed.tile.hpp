#pragma once

#include "kernels/nsa/work.tile.hpp"

// From the blocks of each tile of tokens to the tokens of each block of keys, for the gradients of keys and values. Tokens of a list are
// ascending, so sums over them have the same order in every run.

namespace tw::kernels::nsa {

/// Blocks of keys, of a step each, counted over all sequences.
template <class Target>
struct KeyBlocks {
  Sequences<Target> sequences;
  int block_keys;
  int count;  ///< for each head of keys; some may be empty if sequences are packed

  /// The number of the first block of a sequence.
  TW_INLINE int first(int sequence) const {
    if (sequences.cu_k) return max(min(static_cast<int>(sequences.cu_k[sequence]), sequences.keys), 0) / block_keys + sequence;
    return sequence * ceil_div(sequences.keys, block_keys);
  }
  struct Place {
    int sequence, k_batch;
    int key;   ///< the block's first key in its sequence
    int row;   ///< the same in k
    int keys;  ///< of the block that exist
  };
  TW_INLINE Place find(int n) const {
    if (sequences.cu_k) {
      const Segments<Target> packed{sequences.cu_k, sequences.count, sequences.keys};
      const auto part = packed.find(n, block_keys);
      return {part.segment, 0, part.first - packed.at(part.segment).begin, part.first,
              part.empty ? 0 : min(part.end - part.first, block_keys)};
    }
    const u32 blocks = static_cast<u32>(ceil_div(sequences.keys, block_keys));
    const int sequence = static_cast<int>(static_cast<u32>(n) / blocks), key = (n - sequence * static_cast<int>(blocks)) * block_keys;
    return {sequence, sequence, key, key, min(sequences.keys - key, block_keys)};
  }
  /// The same for a number of blocks that the host knows.
  static constexpr int total(int count, int keys, bool packed, int block_keys) {
    return packed ? Segments<Target>::tiles(keys, count, block_keys) : count * ceil_div(keys, block_keys);
  }
};

/// masks[head, block, tile] = the tokens of the tile that see the block, a bit for each. `masks` is 0 before. A tile is that of the
/// attention kernels.
struct MarkBlocks {
  static constexpr const char* source = "kernels/nsa/transposed.tile.hpp";

  template <class Target>
  struct On {
    struct Params {
      KeyBlocks<Target> blocks;
      Sequences<Target> sequences;
      TileLists<Target> lists;
      Pointer<Target, u8> masks;  ///< [heads, blocks, tiles]
      int tokens;                 ///< of a tile
      int tiles;
    };

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const ListWork w = ListWork::of(p, t, p.tokens, p.blocks.block_keys);
      if (w.steps == 0) return;
      const i64 first = static_cast<i64>(t.n) * p.blocks.count + p.blocks.first(w.sequence);
      block.parallel(w.steps, [&](int n) {
        const Step step = Step::of(p, w, n, p.blocks.block_keys);
        int mask = 0;
        for (int token = 0; token < w.count; ++token)
          if ((step.mask >> token & 1) != 0 && step.key < w.visible(token)) mask |= 1 << token;
        // A block's last steps may lie after the sequence's end, where there is no block of keys: none of the tokens sees them.
        if (mask != 0) p.masks[(first + step.key / p.blocks.block_keys) * p.tiles + t.m] = static_cast<u8>(mask);
      });
    }
  };
};

TW_INLINE int count_bits(int mask) {
  int count = 0;
  for (; mask != 0; mask &= mask - 1) ++count;
  return count;
}

/// counts[i] = the tokens that see block i of all heads.
template <int C>
struct CountTokens {
  static constexpr const char* source = "kernels/nsa/transposed.tile.hpp";

  template <class Target>
  struct On {
    using Row = Rows<Target, i32, 1, C, 4, 4>;
    struct Params {
      Pointer<Target, const u8> masks;  ///< [heads * blocks, tiles]
      Pointer<Target, i32> counts;      ///< [heads * blocks]
      int tiles;
    };

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const auto masks = p.masks + static_cast<i64>(t.m) * p.tiles;
      Row counts;
      block.fill(counts, 0);
      TW_NO_UNROLL
      for (int first = 0; first < p.tiles; first += C) {
        block.for_each(counts, [&](int, int col, auto& x) {
          if (first + col < p.tiles) x += count_bits(masks[first + col]);
        });
      }
      RowVector<Target, i32, Row> sum;
      block.rows(counts, [&](int i, auto row) { sum[i] = row.sum(); });
      block.for_rows(sum, [&](int, int, auto& x) {
        if (block.owns_rows(sum)) p.counts[t.m] = x;
      });
    }
  };
};

/// begins[i] = the number of tokens that see the blocks before i, and tokens[begins[i]] ... = those that see block i, ascending.
template <int C>
struct ListTokens {
  static constexpr const char* source = "kernels/nsa/transposed.tile.hpp";

  template <class Target>
  struct On {
    using Row = Rows<Target, i32, 1, C, 4, 4>;
    struct Params {
      Sequences<Target> sequences;
      Pointer<Target, const u8> masks;    ///< [blocks, tiles], of all heads
      Pointer<Target, const i32> counts;  ///< [blocks]
      Pointer<Target, i32> begins;        ///< [blocks + 1]
      Pointer<Target, i32> tokens;
      int blocks, tiles, tokens_of_tile;
    };
    struct Memory {
      VectorBuffer<Target, float, C> counts, until;
      explicit constexpr Memory(auto& block) : counts(block), until(block) {}
    };

    TW_INLINE static void compute(auto& block, const Params& p, Tile t, Memory& memory) {
      Row before;
      block.fill(before, 0);
      TW_NO_UNROLL
      for (int first = 0; first < t.m; first += C) {
        block.for_each(before, [&](int, int col, auto& x) {
          if (first + col < t.m) x += p.counts[first + col];
        });
      }
      RowVector<Target, i32, Row> sum;
      block.rows(before, [&](int i, auto row) { sum[i] = row.sum(); });
      int next = sum[0];
      const int end = next + p.counts[t.m];
      block.parallel(1, [&](int) {
        p.begins[t.m] = next;
        if (t.m + 1 == p.blocks) p.begins[p.blocks] = end;
      });
      const auto masks = p.masks + static_cast<i64>(t.m) * p.tiles;
      TW_NO_UNROLL
      for (int first = 0; first < p.tiles && next < end; first += C) {
        block.sync();  // the sums of the tiles before have been read
        block.parallel(C, [&](int i) { memory.counts[i] = first + i < p.tiles ? static_cast<float>(count_bits(masks[first + i])) : 0.0f; });
        block.cumsum(memory.counts, memory.until);
        block.parallel(C, [&](int i) {
          if (first + i >= p.tiles) return;
          int mask = masks[first + i];
          if (mask == 0) return;
          int to = next + static_cast<int>(memory.until[i] - memory.counts[i]);
          const int row = p.sequences.find(first + i, p.tokens_of_tile).row;
          for (int token = 0; mask != 0; ++token, mask >>= 1)
            if ((mask & 1) != 0) p.tokens[to++] = row + token;
        });
        next += static_cast<int>(memory.until[C - 1]);
      }
    }
  };
};

}  // namespace tw::kernels::nsa
