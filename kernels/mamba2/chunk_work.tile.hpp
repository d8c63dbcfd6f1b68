#pragma once

#include "tilewave/tile/language.tile.hpp"

namespace tw::kernels::mamba2 {

/// M steps of one chunk, and N columns, of one head or of one group of heads.
struct ChunkWork {
  int batch, chunk, head, row0, col0;  ///< row0: in the chunk
  int first, count;                    ///< the chunk's steps
};
/// `p` has `chunks`, `chunk_size`, `length`, the number of steps, and `columns`, the number of tiles of N columns.
template <int M, int N>
TW_INLINE ChunkWork chunk_work(const auto& p, int heads, Tile t) {
  const int number = t.m / heads, batch = number / p.chunks, chunk = number - batch * p.chunks, row = t.n / p.columns;
  const int first = chunk * p.chunk_size;
  return {batch, chunk, t.m - number * heads, row * M, (t.n - row * p.columns) * N, first, min(p.chunk_size, p.length - first)};
}

}  // namespace tw::kernels::mamba2
