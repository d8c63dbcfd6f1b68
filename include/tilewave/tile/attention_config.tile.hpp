#pragma once

#include "tilewave/tile/types.tile.hpp"

namespace tw {

/// How a batch lies in memory, where it is not simply [batch, head, row]: what is left out costs nothing.
enum AttentionForm {
  kEqualLengths = 0,
  kRagged = 1,  ///< lengths, or where sequences begin, are read from memory
  kSplit = 2,   ///< rows are the queries of all heads that share keys; several tiles divide the keys of one between them
  kPaged = 4    ///< a sequence's keys and values lie in pages of a table
};

/// What one compiled kernel is made for. The host names it by value; kernels/attention/heuristics.hpp chooses.
struct AttentionConfig {
  int head_dim, value_dim;  ///< D and DV: at least the tensors'
  int rows;                 ///< BM, a tile's queries: 64 for each warpgroup
  int keys;                 ///< BN, keys and values that arrive at a time
  int stages;               ///< slots of keys, and of values
  int form = kEqualLengths;

  // Schedule: what is fastest depends on the sizes above and on the rules. Each of these gives the same results, but for rounding.

  /// Blocks on a multiprocessor. With two, products of one run under the softmax of the other, and under its first loads and its last
  /// stores, of which short tiles have many; accumulators and weights must leave each of their threads enough of 104 registers.
  int min_blocks = 1;
  /// By how many blocks of keys the output lags behind the scores: by one where a warpgroup's own product runs under its softmax, else 0.
  int lag = 1;
  /// Two warpgroups leave room for the queries in registers: Q K^T then reads a third less of shared memory. Not where a third that loads
  /// without TMA needs the registers: the kernel sees to that.
  bool queries_in_registers = false;
  /// The queries' slot, unless they are in registers, is given back in the last block, after its scores, so that the next tile's are there
  /// in time. Else after the last block.
  bool queries_back_early = false;
  /// Whether a row's maximum has grown is found from its scores, before the exponents; else from the exponents' signs, half of a row at a
  /// time. Needed for rules that may show a row its first key in any block: Rules::anywhere.
  bool maxima_first = false;
  /// Rules that change scores everywhere do so in the halves in which exponents are computed, under the first's exponentials. Not in blocks
  /// that can be a row's first: they need the maximum of all. Not with maxima_first.
  bool rules_in_halves = false;

  friend constexpr bool operator==(const AttentionConfig&, const AttentionConfig&) = default;
};

}  // namespace tw
