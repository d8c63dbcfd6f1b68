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

/// Sets the gradients of rows that are not in use to 0: rows before, between and after the sequences. A tile is R rows of dQ, dK or dV, of
/// all heads.
template <class T, int R>
struct ZeroUnused {
  static constexpr const char* source = "kernels/attention/packed_rows.tile.hpp";

  template <class Target>
  struct On {
    using Integers = Pointer<Target, const i32>;
    struct Params {
      Global<Target, T> dq, dk, dv;         ///< [1, head, row, dim]
      Integers cu_q, cu_k, used_q, used_k;  ///< as CheckedSequences writes them
      int batch;
    };

    TW_INLINE static void zero_rows(auto& block, const auto& to, int begin, int end) {
      for (int head = 0; head < to.size_i; ++head)
        block.parallel((end - begin) * to.cols,
                       [&](int n) { *to.template at<T>(begin + n / to.cols, n % to.cols, head, 0) = tw::to<T>(0.0f); });
    }
    /// Gap i lies before sequence i: from the end of what sequence i - 1 uses. The last one ends with the tensor.
    TW_INLINE static void zero_gaps(auto& block, const auto& to, const Integers& cu, const Integers& used, int batch, int row0) {
      const int rows_end = min(row0 + R, to.rows);
      int low = -1, high = batch;  // gap `low` ends before row0 or there, gap `high` after it
      while (high - low > 1) {
        const int middle = (low + high) / 2;
        (cu[middle] <= row0 ? low : high) = middle;
      }
      TW_NO_UNROLL
      for (int i = high; i <= batch; ++i) {
        const int begin = i > 0 ? cu[i - 1] + used[i - 1] : 0, end = i < batch ? cu[i] : to.rows;
        if (begin >= rows_end) return;
        const int first = max(begin, row0), last = min(end, rows_end);
        if (first < last) zero_rows(block, to, first, last);
      }
    }
    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      if (t.n == 0) return zero_gaps(block, p.dq, p.cu_q, p.used_q, p.batch, t.m * R);
      zero_gaps(block, t.n == 1 ? p.dk : p.dv, p.cu_k, p.used_k, p.batch, t.m * R);
    }
  };
};

}  // namespace tw::kernels::attention
