#pragma once

#include "kernels/linear_attention/chunks.tile.hpp"

namespace tw::kernels::linear_attention {

/// Cumulative sums of gates inside each chunk, in powers of two: from the chunk's start up to each step, and after each step to the chunk's
/// end. Steps after the sequence's end have no gate. A tile is one chunk of R heads.
template <int R>
struct ChunkDecay {
  static constexpr const char* source = "kernels/linear_attention/decay.tile.hpp";
  /// exp2 of this is 0, and so are all products with it: a gate of -infinity forgets the state. A sum of a chunk's gates stays finite, so
  /// no difference of two sums is NaN.
  static constexpr float kLowest = -160.0f;

  template <class Target>
  struct On {
    using Gates = Rows<Target, float, R, kChunk, 4, 2>;
    struct Params {
      Global<Target, const float> g;             ///< [batch, head, time], or without elements
      Global<Target, float> from_start, to_end;  ///< [head, chunk * kChunk + step]
      Chunks<Target> chunks;
    };

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const auto chunk = p.chunks.chunk(t.m);
      if (chunk.empty) return;
      const int head0 = t.n * R, left = chunk.end - chunk.first;
      Gates sums, later;
      load(block, p, sums, head0, chunk, 0);
      load(block, p, later, head0, chunk, 1);  // from one step later, so that nothing has to be subtracted
      block.row_cumsum(sums);
      block.store(sums, p.from_start, head0, t.m * kChunk);
      block.for_each(later, [&](int, int col, auto& x) {
        if (col + 1 >= min(left, kChunk)) x = 0.0f;
      });
      block.row_cumsum(later, Backward{});
      block.store(later, p.to_end, head0, t.m * kChunk);
    }

   private:
    TW_INLINE static void load(auto& block, const Params& p, Gates& gates, int head0, const auto& chunk, int steps) {
      block.load(gates, p.g, head0, chunk.first + steps, chunk.batch);
      block.for_each(gates, [&](int, int col, auto& x) { x = chunk.first + steps + col < chunk.end ? max(x * kLog2E, kLowest) : 0.0f; });
    }
  };
};

}  // namespace tw::kernels::linear_attention
