#pragma once

#include "tilewave/tile/types.tile.hpp"

namespace tw {

/// How a batch lies in memory, if not as [batch, head, row] in its own scale. A kernel contains only the code for its own form.
enum AttentionForm {
  kEqualLengths = 0,
  kRagged = 1,        ///< lengths and offsets of sequences are read from memory
  kSplit = 2,         ///< rows are the queries of all heads that share keys, and several tiles split the keys of a sequence
  kPaged = 4,         ///< a sequence's keys and values are in the pages of a table
  kDescaled = 8,      ///< queries, keys and values are multiplied by factors in memory, one for each batch and key head
  kListed = 16,       ///< a tile sees only the blocks of keys in its list, which another kernel wrote to memory
  kQueryValues = 32,  ///< a second query of each row is multiplied by the values, and added to the scores
  kColumns = 64       ///< with kListed: a tile also sees single keys, which another kernel copied side by side for each query head
};

/// Whether a kernel contains something that a call may ask for.
enum class Use {
  never,    ///< it is left out
  always,   ///< it is always applied
  runtime,  ///< Params decides: for targets where a test costs less than another copy of the kernel
};

/// The compile-time choices of an attention kernel. The host names it by value; kernels/attention/heuristics.hpp chooses.
struct AttentionConfig {
  int head_dim, value_dim;  ///< D and DV: at least the tensors'
  int rows;                 ///< BM, a tile's queries: 64 for each warpgroup
  int keys;                 ///< BN, keys and values that arrive at a time
  int stages;               ///< slots for keys, and for values
  int form = kEqualLengths;
  Use dropout = Use::never;

  // Schedule. The fastest one depends on the sizes above and on the rules. All give the same results, except for rounding.

  /// Blocks per SM. With two, one block's products overlap with the other's softmax, first loads and last stores; this pays off for short
  /// tiles, which spend much of their time on those. Accumulators and weights must leave room in the 104 registers of a thread.
  int min_blocks = 1;
  /// By how many blocks of keys the output lags behind the scores: 1 if a warpgroup's own product runs under its softmax, otherwise 0.
  int lag = 1;
  /// Whether queries are held in registers, for which two warpgroups have room: Q K^T then reads a third less of shared memory. The kernel
  /// ignores it if it loads without TMA, because the threads that load then need the registers.
  bool queries_in_registers = false;
  /// Whether the queries' slot is released in the last block, right after its scores, so that the next tile's queries arrive in time.
  /// Otherwise it is released after the last block. No effect with queries in registers.
  bool queries_back_early = false;
  /// Whether the kernel detects a larger maximum from a row's scores, before it computes exponents. Otherwise it uses the exponents' signs,
  /// for half of a row at a time. Required by rules that may show a row its first key in any block (Rules::anywhere).
  bool maxima_first = false;
  /// Whether rules that change all scores are applied to half of the columns at a time, under the exponentials of the other half. Not used
  /// for blocks that may hold a row's first key, because these need the maximum of the whole row. Not with maxima_first.
  bool rules_in_halves = false;

  friend constexpr bool operator==(const AttentionConfig&, const AttentionConfig&) = default;
};

}  // namespace tw
