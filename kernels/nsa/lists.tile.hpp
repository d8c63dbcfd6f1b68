#pragma once

#include "kernels/nsa/work.tile.hpp"

namespace tw::kernels::nsa {

/// Sets 32-bit words to 0.
struct Zero {
  static constexpr const char* source = "kernels/nsa/lists.tile.hpp";
  static constexpr int words = 4096;  ///< of a tile

  template <class Target>
  struct On {
    struct Params {
      Pointer<Target, i32> to;
      i64 count;
    };
    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const i64 first = static_cast<i64>(t.m) * words;
      block.parallel(words, [&](int i) {
        if (first + i < p.count) p.to[first + i] = 0;
      });
    }
  };
};

/// Makes the TileLists of a call from the blocks that each token selects. A tile is that of the attention kernels, some tokens and a head
/// of keys, with up to `Capacity` entries. Entries that name no block, or one whose first key the token does not see, are left out; a block
/// that a token names several times counts once.
template <int Capacity>
struct MakeLists {
  static constexpr const char* source = "kernels/nsa/lists.tile.hpp";

  template <class Target>
  struct On {
    struct Params {
      Sequences<Target> sequences;
      Pointer<Target, const i32> indices;  ///< [tokens, heads, slots], any strides
      i64 token_stride, head_stride, slot_stride;
      Pointer<Target, const i32> counts;  ///< [tokens, heads]: only so many slots count; or null
      int slots, heads;
      int block_size;                ///< keys of a block
      int tokens;                    ///< of a tile, at most kMostTokens
      Pointer<Target, i32> entries;  ///< as TileLists
      Pointer<Target, i32> sizes;
      int capacity;
    };
    struct Memory {
      List<Target, u64, Capacity> named, blocks;
      explicit constexpr Memory(auto& block) : named(block), blocks(block) {}
    };

    TW_INLINE static void compute(auto& block, const Params& p, Tile t, Memory& memory) {
      const TokenTile tile = p.sequences.find(t.m, p.tokens);
      const int head = t.n;
      block.clear(memory.named);
      block.clear(memory.blocks);
      block.parallel(tile.count * p.slots, [&](int i) {
        const int token = static_cast<int>(static_cast<u32>(i) / static_cast<u32>(p.slots)), slot = i - token * p.slots;
        const i64 row = tile.row + token;
        if (p.counts && slot >= p.counts[row * p.heads + head]) return;
        const int named = p.indices[row * p.token_stride + head * p.head_stride + slot * p.slot_stride];
        if (named < 0 || static_cast<i64>(named) * p.block_size >= tile.visible(token)) return;
        block.append(memory.named, static_cast<u64>(named) << kMostTokens | static_cast<u64>(token));
      });
      const int named = block.size(memory.named);
      block.sort(memory.named);
      // The first entry of a block collects the tokens of the others.
      block.parallel(named, [&](int i) {
        const u64 number = memory.named[i] >> kMostTokens;
        if (i > 0 && memory.named[i - 1] >> kMostTokens == number) return;
        u64 mask = 0;
        for (int n = i; n < named && memory.named[n] >> kMostTokens == number; ++n)
          mask |= u64{1} << static_cast<int>(memory.named[n] & (kMostTokens - 1));
        block.append(memory.blocks, number << kMostTokens | mask);
      });
      const int blocks = block.size(memory.blocks);
      block.sort(memory.blocks);
      const i64 list = static_cast<i64>(t.m) * p.heads + head;
      block.parallel(blocks, [&](int i) { p.entries[list * p.capacity + i] = static_cast<i32>(memory.blocks[i]); });
      block.parallel(1, [&](int) { p.sizes[list] = blocks; });
    }
  };
};

}  // namespace tw::kernels::nsa
