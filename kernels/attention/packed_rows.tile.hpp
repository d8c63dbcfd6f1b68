#pragma once

#include "tilewave/tile/attention_work.tile.hpp"

// Packed sequences in attention's backward pass: the launches before and after the products.

namespace tw::kernels::attention {

/// The backward pass's own tensors (LSE, delta, the sum for dQ) have each sequence's queries from a multiple of this many rows on, so that
/// no block of queries has rows of two sequences. All kernels' blocks of queries divide it.
inline constexpr int kPaddedQueries = 128;

/// The row at which the queries of sequence `i` begin there, if they begin at row `begin` of the packed tensors.
TW_INLINE int padded_begin(int begin, int i) { return (begin / kPaddedQueries + i) * kPaddedQueries; }

/// The sequence of each kPaddedQueries rows of those tensors.
template <class Target>
struct PaddedQueries {
  Pointer<Target, const i32> sequences;  ///< one for each kPaddedQueries rows; null: the queries are not packed
  Pointer<Target, const i32> cu, used;   ///< as CheckedSequences writes them

  struct Place {
    int begin;  ///< row of the packed tensors at which the sequence begins
    int first;  ///< the query of the row that was asked for. Negative before the first sequence
    int size;   ///< queries in use
  };
  TW_INLINE Place at(int row) const {
    const int i = sequences[row / kPaddedQueries], begin = cu[i];
    return {begin, row - padded_begin(begin, i), used[i]};
  }
};

/// Reads the offsets and lengths of packed sequences and makes wrong ones right: offsets are clamped to the tensors and never decrease,
/// lengths are clamped to the sequences. So no two sequences overlap, and the kernels that follow need not check again. A tile is one
/// sequence, whose offset is compared with C others at a time; one more tile writes the end of the last sequence.
template <int C>
struct CheckedSequences {
  static constexpr const char* source = "kernels/attention/packed_rows.tile.hpp";

  template <class Target>
  struct On {
    using Row = Rows<Target, float, 1, C, 4, 1>;
    struct Side {
      Pointer<Target, const i32> cu, used;  ///< [batch + 1]; [batch], or null
      Pointer<Target, i32> to_cu, to_used;  ///< [batch + 1]; [batch]
      int rows;                             ///< of the packed tensor
    };
    struct Params {
      Side q, k;
      int batch;
      Pointer<Target, i32> sequences;  ///< [blocks]: see PaddedQueries
      int blocks;
    };

    /// The largest of the numbers f(0), ..., f(i), all from 0 to 2^15 - 1: f32 holds them exactly.
    TW_INLINE static int largest(auto& block, int i, auto f) {
      Row most;
      block.fill(most, 0.0f);
      TW_NO_UNROLL
      for (int first = 0; first <= i; first += C) {
        block.for_each(most, [&](int, int col, auto& x) {
          if (first + col <= i) x = max(x, static_cast<float>(f(first + col)));
        });
      }
      RowVector<Target, float, Row> result;
      block.rows(most, [&](int n, auto row) { result[n] = row.max(); });
      return static_cast<int>(result[0]);
    }
    /// Writes sequence i's numbers. Returns its first row and the row after its last one, used or not.
    TW_INLINE static tw::KeyRange check(auto& block, const Side& side, int i, int batch) {
      constexpr int kLow = 1 << 15;  // offsets have up to 29 bits, which f32 does not hold: the largest is found in two halves
      const auto at = [&](int n) { return SequenceRows::clamp(side.cu[n], side.rows); };
      const int high = largest(block, i, [&](int n) { return at(n) / kLow; });
      const int begin = high * kLow + largest(block, i, [&](int n) { return at(n) / kLow == high ? at(n) % kLow : 0; });
      const int end = i < batch ? max(at(i + 1), begin) : begin;
      block.parallel(1, [&](int) {
        side.to_cu[i] = begin;
        if (i < batch) side.to_used[i] = side.used ? SequenceRows::clamp(side.used[i], end - begin) : end - begin;
      });
      return {begin, end};
    }

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const int i = t.m;
      const tw::KeyRange q = check(block, p.q, i, p.batch);
      check(block, p.k, i, p.batch);
      if (i == p.batch) return;
      const int first = i == 0 ? 0 : padded_begin(q.begin, i) / kPaddedQueries;
      const int end = i + 1 == p.batch ? p.blocks : padded_begin(q.end, i + 1) / kPaddedQueries;
      block.parallel(end - first, [&](int n) { p.sequences[first + n] = i; });
    }
  };
};

/// Sets the gradients of rows that are not in use to 0: rows before, between and after the sequences. A tile is the rows from the last one
/// in use of a sequence to the beginning of the next one, of one head of dQ, dK or dV.
template <class T>
struct ZeroUnused {
  static constexpr const char* source = "kernels/attention/packed_rows.tile.hpp";

  template <class Target>
  struct On {
    using Integers = Pointer<Target, const i32>;
    struct Params {
      Global<Target, T> dq, dk, dv;         ///< [1, head, row, dim]
      Integers cu_q, cu_k, used_q, used_k;  ///< as CheckedSequences writes them
      int batch, heads, kv_heads;
    };

    TW_INLINE static void zero(auto& block, const auto& to, int head, const Integers& cu, const Integers& used, int i, int batch) {
      const int begin = i > 0 ? cu[i - 1] + used[i - 1] : 0, end = i < batch ? cu[i] : to.rows;
      constexpr int kRows = 1 << 16;  // times the columns: an int
      TW_NO_UNROLL
      for (int row = begin; row < end; row += kRows) {
        block.parallel(min(end - row, kRows) * to.cols,
                       [&](int n) { *to.template at<T>(row + n / to.cols, n % to.cols, head, 0) = tw::to<T>(0.0f); });
      }
    }
    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      if (t.n < p.heads)
        zero(block, p.dq, t.n, p.cu_q, p.used_q, t.m, p.batch);
      else if (t.n < p.heads + p.kv_heads)
        zero(block, p.dk, t.n - p.heads, p.cu_k, p.used_k, t.m, p.batch);
      else
        zero(block, p.dv, t.n - p.heads - p.kv_heads, p.cu_k, p.used_k, t.m, p.batch);
    }
  };
};

}  // namespace tw::kernels::attention
