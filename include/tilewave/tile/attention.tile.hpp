#pragma once

#include "tilewave/tile/attention_rules.tile.hpp"

namespace tw {

/// Tiles of queries, longest first: with a causal mask the last rows of a sequence see the most keys, and a block that starts one late
/// would hold everybody up. Heads are taken a group at a time so that the keys and values in use fit the L2 cache. The grid's n is heads *
/// batch, m the query tiles.
struct LongestFirst {
  static constexpr Dispatch dispatch = Dispatch::dynamic;
  /// grid.batch counts groups of heads, grid.n the heads of one group; tile.n is the head.
  TW_INLINE static constexpr Tile at(const TileGrid& grid, int i) {
    const int per_group = grid.m * grid.n;
    const int group = i / per_group;
    const int in_group = i - group * per_group;
    return {grid.m - 1 - in_group / grid.n, group * grid.n + in_group % grid.n, 0};
  }
};

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

/// Sequence `i` of those that follow each other, which has `size` rows from `begin` on. What memory says is clamped to the tensor's `rows`.
struct SequenceRows {
  int begin, size;
  TW_INLINE static int clamp(int x, int most) { return max(min(x, most), 0); }
  /// cu_seqlens: where each begins, and the last one's end.
  TW_INLINE static SequenceRows packed(const auto& cu_seqlens, int i, int rows) {
    const int begin = clamp(cu_seqlens[i], rows);
    return {begin, max(clamp(cu_seqlens[i + 1], rows) - begin, 0)};
  }
};

/// A tile of packed sequences in a list in memory: which number of it is what.
struct PackedTile {
  static constexpr int sequence = 0, first_row = 1, q_begin = 2, q_rows = 3, k_begin = 4, keys = 5;
  static constexpr int numbers = 8;  ///< of a tile, the last two are not used
};

/// O = softmax(scale Q K^T) V with online softmax: the scores never leave the registers (FlashAttention; Dao et al. 2022, 2023; Shah et al.
/// 2024).
///
/// One tile is BM queries of one head; keys and values arrive BN at a time, the last ones first, so that the blocks that a mask cuts come
/// before those it does not. `Rules` (attention_rules.tile.hpp) say which keys a query sees and how scores change.
template <class T, AttentionConfig kConfig, class Rules>
struct Attention {
  static constexpr const char* source = Rules::source ? Rules::source : "tilewave/tile/attention.tile.hpp";
  static constexpr int D = kConfig.head_dim, DV = kConfig.value_dim, BM = kConfig.rows, BN = kConfig.keys;
  static_assert(kConfig.lag == 0 || kConfig.lag == 1, "the output lags by one block of keys, or by none");
  static_assert(kConfig.maxima_first || !Rules::anywhere, "rules that may show a row its first key in any block need maxima_first");
  static_assert(!kConfig.rules_in_halves || !kConfig.maxima_first, "rules_in_halves is not for maxima_first");
  using WarpTile = RowWarpTile<(BM % 128 == 0 && BN <= 64 && DV <= 128 ? 32 : 16)>;  // 32 rows of scores and output fit a warp's registers

  template <class Target>
  struct On {
    using Q = Shared<Target, T, BM, D>;
    using K = Shared<Target, T, BN, D>;
    using V = Shared<Target, T, BN, DV, Contract::rows>;
    using Out = Staging<Target, T, BM, DV>;
    using Scores = Fragment<Target, float, BM, BN>;
    using Weights = Operand<Target, T, BM, BN>;
    using PerRow = RowVector<Target, float, Scores>;
    using Integers = Pointer<Target, const i32>;
    using Schedule = LongestFirst;
    static constexpr int rows = BM;
    static constexpr int vector_bytes = 64;  // a CPU's exponentials take as long as its products
    static constexpr int min_blocks = kConfig.min_blocks, lag = products_are_synchronous<Target> ? 0 : kConfig.lag;
    /// A target that can load without TMA says which of the two this is.
    static constexpr bool loads_by_tma() {
      if constexpr (requires { Target::tma_load; }) return Target::tma_load;
      return !products_are_synchronous<Target>;
    }
    static constexpr bool queries_in_registers = kConfig.queries_in_registers && loads_by_tma();
    static constexpr bool queries_back_early = kConfig.queries_back_early && !queries_in_registers;
    static constexpr bool maxima_first = kConfig.maxima_first, rules_in_halves = kConfig.rules_in_halves;
    /// Exponents are relative to 2^kHeadroom times the largest term of a row that has been seen, so that later ones may grow by as much.
    static constexpr float kHeadroom = 8.0f;
    /// A row's base before it has seen a key: finite, so that -infinity minus it is -infinity.
    static constexpr float kUnseen = -1e30f;
    static constexpr bool ragged = (kConfig.form & kRagged) != 0, split = (kConfig.form & kSplit) != 0,
                          paged = (kConfig.form & kPaged) != 0;

    struct Params {
      Global<Target, const T, Q> q;  ///< [batch, head, row, D]; sequences that follow each other: batch 1
      Global<Target, const T, K> k;  ///< [batch, kv head, key, D], or [page, kv head, key in page, D]
      Global<Target, const T, V> v;
      Global<Target, T, Out> o;
      Global<Target, float> partial;      ///< [split * batch, head, row, DV]: instead of o, where the keys are divided
      Pointer<Target, float> lse;         ///< [batch or split * batch, head, row], or null
      Pointer<Target, const float> sink;  ///< [head], or null
      i64 lse_stride_j, lse_stride_i;
      float scale_log2;  ///< of a score's unit, times log2(e): exponentials are powers of two
      int keys;          ///< of a sequence, at most
      int heads_per_kv;
      bool has_diagonal;  ///< else it is seqlen_k - seqlen_q
      int diagonal;
      typename Rules::template Params<Target> rules;

      // ragged. What they say is clamped to the tensors.
      int batch;
      Integers cu_q, cu_k;      ///< where sequences begin, and the last one's end; null: those of a batch lie apart
      Integers used_q, used_k;  ///< the number of a sequence's queries and keys; null: all
      Integers k_batch;         ///< the batch of k and v, or the row of the table, that a sequence uses; null: its own
      Integers k_begin;         ///< keys before do not count; null: none
      int keys_added;           ///< to each of used_k
      Integers cu_added;        ///< instead of keys_added: where each sequence's begin, and the last one's end; null: not given
      Integers tiles;           ///< those of cu_q and cu_k, as PackedTile says; null: each is searched for
      // split
      int heads_together;  ///< that share keys
      int queries;         ///< of one of them: its rows follow each other; 0: heads are apart, as without kSplit
      int splits;          ///< of a sequence's keys
      // paged
      Integers pages;  ///< [batch, pages of a sequence]; null: k is not paged
      i64 pages_stride;
      int page_tables;           ///< rows of the table
      int page_size, page_rows;  ///< keys of a page, and how many of them are copied at once
    };
    struct Memory {
      Ring<Target, Q, 1> q;
      Ring<Target, K, kConfig.stages> k;
      Ring<Target, V, kConfig.stages> v;
      Out out;
      explicit constexpr Memory(auto& block) : q(block), k(block), v(block), out(block) {}
    };
    struct State {
      Fragment<Target, float, BM, DV> out;
      PerRow base;  ///< terms of a row are 2^(score * scale_log2 - base), none above 1
      PerRow sum;   ///< of the terms
    };
    struct Locals {
      Scores scores;
      Weights weights;
    };

    /// A tile: which rows of which sequence, and the blocks of keys that they see, from the last to the first.
    struct Work {
      int batch, head, part;
      int first_row, rows;  ///< rows: of the sequence
      int seqlen_k, diagonal;
      int q_row, k_row;      ///< where the sequence begins
      int q_batch, k_batch;  ///< in which of the tensors' batches
      int blocks;            ///< none: no row sees a key
      int last_block;
      int cut, cut_first;  ///< blocks that rules cut: the last ones, and the first ones

      TW_INLINE int block(int n) const { return last_block - n; }
    };

    TW_INLINE static Work work(const Params& p, Tile t) {
      Work w;
      int m = t.m;
      w.part = 0;
      if (split) {
        w.part = m % p.splits;
        m /= p.splits;
      }
      w.batch = t.n / p.q.size_i;
      w.head = t.n - w.batch * p.q.size_i;
      w.q_batch = w.k_batch = w.batch;
      w.q_row = w.k_row = 0;
      w.rows = p.q.rows;
      w.seqlen_k = p.keys;
      if (ragged) {
        if (p.cu_q) w.q_batch = 0;
        if (p.tiles) {
          m = read_tile(p, m, w);
        } else {
          if (p.cu_q) {
            m = find_sequence(p, m, w);
            place(p.cu_q, w.batch, w.rows, w.q_row);
          }
          if (p.cu_k) place(p.cu_k, w.batch, w.seqlen_k, w.k_row);
          if (p.used_q) w.rows = clamp(p.used_q[w.batch], w.rows);
          if (p.used_k) w.seqlen_k = min(clamp(p.used_k[w.batch], w.seqlen_k) + added(p, w), w.seqlen_k);
        }
        w.k_batch = p.cu_k ? 0 : w.batch;
        if (p.k_batch) w.k_batch = clamp(p.k_batch[w.batch], (paged && p.pages ? p.page_tables : p.k.size_j) - 1);
        if (p.k_begin) {
          const int begin = clamp(p.k_begin[w.batch], w.seqlen_k);
          w.k_row += begin;
          w.seqlen_k -= begin;
        }
      }
      w.first_row = m * BM;
      w.diagonal = p.has_diagonal ? p.diagonal : w.seqlen_k - seqlen_q(p, w);
      find_blocks(p, w);
      return w;
    }

    /// Step s loads keys number s and values number s - lag, the order in which compute takes them: loaded in any other order, each would
    /// wait for the other's slot.
    TW_INLINE static int steps(const Params&, const Work& w) { return w.blocks > 0 ? w.blocks + lag : 0; }

    TW_INLINE static void load(auto& producer, const Params& p, const Work& w, int step, Memory& memory) {
      const int kv_head = w.head / p.heads_per_kv;
      if (step == 0) producer.put(memory.q, [&](auto copy, Q& q) { copy.tile(p.q, q, w.q_row + w.first_row, 0, w.head, w.q_batch); });
      if (step < w.blocks) producer.put(memory.k, [&](auto copy, K& k) { load_block(copy, p, w, p.k, k, w.block(step), kv_head); });
      if (step >= lag) producer.put(memory.v, [&](auto copy, V& v) { load_block(copy, p, w, p.v, v, w.block(step - lag), kv_head); });
    }

    /// Output of block number n, asynchronously.
    TW_INLINE static void add_output(auto& block, const Work& w, int n, Memory& memory, const Weights& weights, State& state) {
      block.mma(state.out, weights, take_values(block, w, n, memory), n == 0);
    }
    TW_INLINE static void wait_for_output(auto& block, Memory& memory, State& state) {
      block.wait(leave<0>, state.out);
      block.release(memory.v);
    }

    /// Block number `step`: its scores and weights, and under them, or behind them, an output: see lag. `cut`: rules leave some of its
    /// scores out. kHalves: none, and all rows have seen a key; see rules_in_halves.
    template <bool kFirst, bool kHalves = false>
    TW_INLINE static void next(auto& block, const Params& p, const Work& w, int step, bool cut, Memory& memory, const auto& q,
                               Weights& weights, State& state) {
      Scores scores;
      PerRow decay;
      block.mma(scores, q, block.take(memory.k), true);
      constexpr bool kOutputUnder = lag == 1 && !kFirst;
      constexpr int kUnfinished = kOutputUnder ? 1 : 0;
      if constexpr (kOutputUnder) add_output(block, w, step - 1, memory, weights, state);
      block.wait(leave<kUnfinished>, scores);
      block.release(memory.k);
      if (queries_back_early && step + 1 == w.blocks) block.release(memory.q);
      if constexpr (!kHalves) {
        if (cut)
          apply_rules<true, 0, BN>(block, p, w, w.block(step), scores);
        else
          apply_rules<false, 0, BN>(block, p, w, w.block(step), scores);
        if (!maxima_first && (cut || step <= w.cut)) settle(block, p, scores, state);
      }
      const bool raised = softmax<kHalves>(block, p, w, step, scores, state, decay);
      if constexpr (kOutputUnder) wait_for_output(block, memory, state);
      if (!kFirst && raised) block.map(state.out, decay, [](auto x, auto d) { return x * d; });
      block.convert(weights, scores);
      if constexpr (lag == 0) {
        add_output(block, w, step, memory, weights, state);
        wait_for_output(block, memory, state);
      }
    }
    TW_INLINE static void loop(auto& block, const Params& p, const Work& w, Memory& memory, const auto& q, Weights& weights, State& state) {
      const int whole_end = w.blocks - w.cut_first;
      next<true>(block, p, w, 0, w.cut > 0 || whole_end <= 0, memory, q, weights, state);
      // Every warp's product has read the queries' registers.
      if constexpr (queries_in_registers) block.release(memory.q);
      int step = 1;
      if constexpr (maxima_first) {
        for (; step < w.cut; ++step) next<false>(block, p, w, step, true, memory, q, weights, state);
        for (; step < whole_end; ++step) next<false>(block, p, w, step, false, memory, q, weights, state);
        if constexpr (Rules::lower)
          for (; step < w.blocks; ++step) next<false>(block, p, w, step, true, memory, q, weights, state);
      } else {
        const auto cut = [&](int n) { return n < w.cut || (Rules::lower && n >= whole_end); };
        if constexpr (rules_in_halves) {
          for (; step <= w.cut && step < w.blocks; ++step) next<false>(block, p, w, step, cut(step), memory, q, weights, state);
          for (; step < whole_end; ++step) next<false, true>(block, p, w, step, false, memory, q, weights, state);
        }
        if constexpr (!rules_in_halves || Rules::lower)
          for (; step < w.blocks; ++step) next<false>(block, p, w, step, cut(step), memory, q, weights, state);
      }
    }

    TW_INLINE static void compute(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      block.fill(state.base, kUnseen);
      block.fill(state.sum, 0.0f);
      if (w.blocks == 0) return block.fill(state.out, 0.0f);
      const Q& q = block.take(memory.q);
      Weights weights;
      if constexpr (queries_in_registers) {
        Operand<Target, T, BM, D> in_registers;
        block.load(in_registers, q);
        loop(block, p, w, memory, in_registers, weights, state);
      } else {
        loop(block, p, w, memory, q, weights, state);
        if constexpr (!queries_back_early) block.release(memory.q);
      }
      if constexpr (lag == 1) {
        add_output(block, w, w.blocks - 1, memory, weights, state);
        wait_for_output(block, memory, state);
      }
    }

    TW_INLINE static void finish(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      if (ragged && w.first_row >= w.rows) return;  // a tile that the host could not know to be empty
      block.complete(state.sum);
      PerRow scale;
      block.fill(scale, 1.0f);
      if (p.sink) {
        // One more term of the sum, which has no value.
        block.for_rows(state.sum, [&](int row, int i, auto& sum) {
          const auto sink = p.sink[head_of(p, w, row)] * kLog2E;
          const auto base = max(state.base[i], sink);
          scale[i] = exp2(state.base[i] - base);
          sum = sum * scale[i] + exp2(sink - base);
          state.base[i] = base;
        });
      }
      const int part = split ? w.part * p.q.size_j + w.q_batch : w.q_batch;
      if (p.lse) {
        block.for_rows(state.sum, [&](int row, int i, auto& sum) {
          const int r = w.first_row + row;
          const auto lse = sum == 0.0f ? -kInfinity : (state.base[i] + log2(sum)) * kLn2;
          if (r < w.rows && block.owns_rows(state.sum)) p.lse[part * p.lse_stride_j + w.head * p.lse_stride_i + w.q_row + r] = lse;
        });
      }
      block.for_rows(scale, [&](int, int i, auto& x) { x = state.sum[i] == 0.0f ? 0.0f : x * reciprocal(state.sum[i]); });
      block.map(state.out, scale, [](auto x, auto s) { return x * s; });
      const int row0 = w.q_row + w.first_row;
      if (split && p.partial.data != nullptr)
        block.store(state.out, p.partial, row0, 0, w.head, part);
      else if (ragged)
        block.store(state.out, memory.out, p.o, row0, 0, w.head, w.q_batch, w.q_row + w.rows);
      else
        block.store(state.out, memory.out, p.o, row0, 0, w.head, w.q_batch);
    }

   private:
    TW_INLINE static int clamp(int x, int most) { return SequenceRows::clamp(x, most); }
    /// Keys that were appended to the sequence after its length was read.
    TW_INLINE static int added(const Params& p, const Work& w) {
      return p.cu_added ? clamp(p.cu_added[w.batch + 1] - p.cu_added[w.batch], w.seqlen_k) : p.keys_added;
    }
    TW_INLINE static int seqlen_q(const Params& p, const Work& w) { return split && p.queries > 0 ? p.queries : w.rows; }
    /// The head and the query that row `row` of the tile belongs to.
    TW_INLINE static int head_of(const Params& p, const Work& w, int row) {
      return split ? w.head * p.heads_together + head_in_tile(p, w, row) : w.head;
    }
    TW_INLINE static int query_of(const Params& p, const Work& w, int row) {
      return w.first_row + row - (split ? head_in_tile(p, w, row) * p.queries : 0);
    }
    TW_INLINE static int head_in_tile(const Params& p, const Work& w, int row) {
      return static_cast<int>(static_cast<u32>(min(w.first_row + row, w.rows - 1)) / static_cast<u32>(seqlen_q(p, w)));
    }

    /// Tile m of the list; gives its number in its sequence.
    TW_INLINE static int read_tile(const Params& p, int m, Work& w) {
      const auto tile = p.tiles + static_cast<i64>(m) * PackedTile::numbers;
      w.batch = tile[PackedTile::sequence];
      w.q_row = tile[PackedTile::q_begin];
      w.rows = tile[PackedTile::q_rows];
      w.k_row = tile[PackedTile::k_begin];
      w.seqlen_k = tile[PackedTile::keys];
      return tile[PackedTile::first_row] / BM;
    }
    /// Sequence b has the tiles from cu_q[b] / BM + b on, of which the last one may be empty: so the host knows how many there are without
    /// knowing the lengths. Finds tile m's sequence and gives its number in there.
    TW_INLINE static int find_sequence(const Params& p, int m, Work& w) {
      int low = 0, high = p.batch;  // first tiles: at low before m or at it, at high behind it
      while (high - low > 1) {
        const int middle = (low + high) / 2;
        (p.cu_q[middle] / BM + middle <= m ? low : high) = middle;
      }
      w.batch = low;
      return max(m - (p.cu_q[low] / BM + low), 0);
    }
    TW_INLINE static void place(const Integers& cu_seqlens, int batch, int& size, int& begin) {
      const SequenceRows at = SequenceRows::packed(cu_seqlens, batch, size);
      begin = at.begin;
      size = at.size;
    }
    TW_INLINE static void find_blocks(const Params& p, Work& w) {
      const int last_row = min(w.first_row + BM, w.rows) - 1;
      w.blocks = w.last_block = w.cut = w.cut_first = 0;
      if (last_row < w.first_row) return;
      const KeyRange all{0, w.seqlen_k};
      const int last = last_row - w.first_row, queries = seqlen_q(p, w);
      const bool one_head = !split || head_in_tile(p, w, 0) == head_in_tile(p, w, last);
      const ScoreRows rows{
          w.batch,    head_of(p, w, 0), one_head ? query_of(p, w, 0) : 0, one_head ? query_of(p, w, last) : queries - 1, queries,
          w.seqlen_k, w.diagonal};
      const KeyRange seen = Rules::keys(p.rules, rows, all), whole = Rules::untouched(p.rules, rows, all);
      if (seen.end <= seen.begin) return;
      int begin = seen.begin / BN, end = ceil_div(seen.end, BN);
      if (split && p.splits > 1) {
        const int share = ceil_div(end - begin, p.splits);
        begin += w.part * share;
        end = min(end, begin + share);
        if (end <= begin) return;
      }
      w.blocks = end - begin;
      w.last_block = end - 1;
      const int whole_end = max(whole.end, 0) / BN, whole_begin = ceil_div(max(whole.begin, 0), BN);
      w.cut = min(max(end - whole_end, 0), w.blocks);
      if (Rules::lower) w.cut_first = min(max(whole_begin - begin, 0), w.blocks - w.cut);
    }

    /// Block `b` of a sequence's keys or values. Of pages, parts behind the sequence's end are from its last key on, whatever lies there.
    template <class G, class S>
    TW_INLINE static void load_block(auto& copy, const Params& p, const Work& w, const G& from, S& to, int b, int kv_head) {
      const int key = b * BN;
      if (paged && p.pages) {
        TW_NO_UNROLL
        for (int r = 0; r < BN; r += p.page_rows) {
          const u32 size = static_cast<u32>(p.page_size), at = static_cast<u32>(min(key + r, w.seqlen_k - 1)), number = at / size;
          const int page = clamp(p.pages[w.k_batch * p.pages_stride + number], from.size_j - 1);
          copy.part(from, to, r, p.page_rows, static_cast<int>(at - number * size), 0, kv_head, page);
        }
      } else {
        copy.tile(from, to, w.k_row + key, 0, kv_head, w.k_batch);
      }
    }
    /// The next values, those of block number n. What lies behind a sequence's end in memory is not this sequence's and may be NaN, which a
    /// weight of 0 would not hide.
    TW_INLINE static V& take_values(auto& block, const Work& w, int n, Memory& memory) {
      V& v = block.take(memory.v);
      if constexpr (ragged || paged) {
        const int left = w.seqlen_k - w.block(n) * BN;
        if (left < BN) block.zero_rows(v, left);
      }
      return v;
    }

    /// Scores of block `b`, kCount columns from kFirst on: those that a row must not see become -infinity.
    template <bool kCut, int kFirst, int kCount>
    TW_INLINE static void apply_rules(auto& block, const Params& p, const Work& w, int b, Scores& scores) {
      const int key0 = b * BN;
      Rules::template apply<kCut, kFirst, kCount>(block, p.rules, scores, [&](int row, auto col) {
        const int query = query_of(p, w, row);
        return Score{w.batch,        head_of(p, w, row), query,      key0 + col,
                     seqlen_q(p, w), w.seqlen_k,         w.diagonal, difference(query + w.diagonal - key0, col)};
      });
      if (kCut && key0 + BN > w.seqlen_k) {
        block.for_each(scores, [&](int, int col, auto& x) {
          if (key0 + col >= w.seqlen_k) x = -kInfinity;
        });
      }
    }

    /// Rows that see their first key get their base. Only blocks that a mask cuts, and the one after them, can be the first.
    TW_INLINE static void settle(auto& block, const Params& p, Scores& scores, State& state) {
      block.rows(scores, [&](int i, auto row) {
        const auto largest = row.max();
        const bool first = state.base[i] == kUnseen && largest != -kInfinity;
        state.base[i] = first ? largest * p.scale_log2 + kHeadroom : state.base[i];
      });
    }
    /// Scores of some columns become exponents; true if any that this warp holds is positive: raise() must follow.
    template <int kFirst, int kCount>
    TW_INLINE static bool exponents(auto& block, const Params& p, Scores& scores, State& state) {
      RowVector<Target, bool, Scores> over;
      block.rows(scores, [&](int i, auto row) {
        const auto base = state.base[i];
        over[i] = row.template columns<kFirst, kCount>().map_any_positive([&](auto x) { return x * p.scale_log2 - base; });
      });
      return block.any(over, [](bool x) { return x; });
    }
    /// Raises the bases so that no exponent of these columns is positive. Columns before them are terms already. `decay` is multiplied by
    /// what earlier terms of the output must be.
    template <int kFirst, int kCount>
    TW_INLINE static void raise(auto& block, Scores& scores, State& state, PerRow& decay) {
      block.rows(scores, [&](int i, auto row) {
        const auto largest = row.template columns<kFirst, kCount>().max();
        const auto by = largest > 0.0f ? largest + kHeadroom : 0.0f;
        const auto less = exp2(-by);
        state.base[i] += by;
        state.sum[i] *= less;
        decay[i] *= less;
        if constexpr (kFirst > 0) row.template columns<0, kFirst>().map([&](auto x) { return x * less; });
        row.template columns<kFirst, kCount>().map([&](auto x) { return x - by; });
      });
    }
    /// Exponents become terms; `sum` grows by them.
    template <int kFirst, int kCount>
    TW_INLINE static void terms(auto& block, Scores& scores, State& state) {
      block.rows(scores, [&](int i, auto row) {
        state.sum[i] += row.template columns<kFirst, kCount>().map_partial_sum([](auto x) { return exp2(x); });
      });
    }
    /// Scores become terms; `sum` grows by them. A base serves until a term would exceed 1: in practice raise() runs once or never. True if
    /// it did in this warp: then the output so far must be scaled by `decay`.
    template <bool kHalves>
    TW_INLINE static bool softmax(auto& block, const Params& p, const Work& w, int step, Scores& scores, State& state, PerRow& decay) {
      block.fill(decay, 1.0f);
      if constexpr (maxima_first) {
        RowVector<Target, bool, Scores> over;
        block.rows(scores, [&](int i, auto row) { over[i] = row.partial_max() * p.scale_log2 > state.base[i]; });
        const bool raised = block.any(over, [](bool x) { return x; });
        if (raised) {
          block.rows(scores, [&](int i, auto row) {
            const auto largest = row.max() * p.scale_log2;
            const auto base = largest > state.base[i] ? largest + kHeadroom : state.base[i];
            decay[i] = exp2(state.base[i] - base);
            state.base[i] = base;
            state.sum[i] *= decay[i];
          });
        }
        block.rows(scores, [&](int i, auto row) {
          const auto base = state.base[i];
          state.sum[i] += row.map_partial_sum([&](auto x) { return exp2(x * p.scale_log2 - base); });
        });
        return raised;
      } else {
        // In two halves: the exponents of the second are computed under the exponentials of the first.
        constexpr int half = (BN + 31) / 32 * 16;
        if constexpr (kHalves) apply_rules<false, 0, half>(block, p, w, w.block(step), scores);
        const bool raised = exponents<0, half>(block, p, scores, state);
        if (raised) raise<0, half>(block, scores, state, decay);
        if constexpr (kHalves) apply_rules<false, half, BN - half>(block, p, w, w.block(step), scores);
        terms<0, half>(block, scores, state);
        const bool again = exponents<half, BN - half>(block, p, scores, state);
        if (again) raise<half, BN - half>(block, scores, state, decay);
        terms<half, BN - half>(block, scores, state);
        return raised || again;
      }
    }
  };
};

}  // namespace tw
