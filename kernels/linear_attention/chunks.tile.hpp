#pragma once

#include "tilewave/tile/language.tile.hpp"

// Linear attention with a decay, of each head:
//
//   S_t = exp(g_t) S_(t-1) + k_t v_t^T,   o_t = scale S_t^T q_t
//
// In chunks of C steps, with G the cumulative sums of g inside a chunk and S the state before it:
//
//   o_i = scale (exp(G_i) S^T q_i + sum over j <= i of exp(G_i - G_j) (q_i k_j) v_j)
//   S'  = exp(G_C) S + sum over j of exp(G_C - G_j) k_j v_j^T
//
// Exponents are sums of gates over some steps of one chunk, never differences of sums over the sequence, and no product is divided by
// exp(G). So with g <= 0 every factor is at most 1.
//
// Backwards, from the last step to the first, the same formulas hold with the sums of the gates after each step, R_i = G_C - G_i, in the
// place of G, and with j >= i: these are the gradients. See README.md.

namespace tw::kernels::linear_attention {

/// Steps of a chunk: the rows of a warpgroup's accumulators.
inline constexpr int kChunk = 64;

/// Sequences and their chunks: of equal length, [batch, time], or packed one after the other in a tensor of batch 1. Chunks have numbers,
/// some of which may stand for nothing if sequences are packed.
template <class Target>
struct Chunks {
  Pointer<Target, const i32> cu_seqlens;  ///< [sequences + 1] offsets of packed sequences, or null
  int sequences;
  int length;        ///< of each sequence; of all together if they are packed
  int per_sequence;  ///< chunks of a sequence, if they are not packed

  struct Sequence {
    int batch;  ///< in the tensors
    int begin, size;
    int first_chunk;
    TW_INLINE constexpr int count() const { return ceil_div(size, kChunk); }
  };
  TW_INLINE Sequence sequence(int n) const {
    if (!cu_seqlens) return {n, 0, length, n * per_sequence};
    const auto found = Segments<Target>{cu_seqlens, sequences, length}.at(n);
    return {0, found.begin, found.size, found.begin / kChunk + n};
  }

  /// Rows `first` to `end` - 1 of the tensors, of which a chunk has the first kChunk.
  struct Chunk {
    int batch;
    int first, end;
    bool empty;
  };
  TW_INLINE Chunk chunk(int n) const {
    if (!cu_seqlens) {
      const int batch = n / per_sequence;
      return {batch, (n - batch * per_sequence) * kChunk, length, false};
    }
    const auto part = Segments<Target>{cu_seqlens, sequences, length}.find(n, kChunk);
    return {0, part.first, part.end, part.empty};
  }
};

}  // namespace tw::kernels::linear_attention
