#pragma once

#include "tilewave/tile/attention_work.tile.hpp"
#include "tilewave/tile/dropout.tile.hpp"
#include "tilewave/tile/online_softmax.tile.hpp"

namespace tw {

/// The order of keys in transposed 8-bit values: column n holds key eight_bit_key(n). A thread of the tensor cores' accumulators has two
/// neighbours of every 8 columns, and needs four neighbours of every 16 as a left operand of 8 bits. In this order those four are the two
/// pairs that it has, so that weights stay where they are (block.convert_in_place()).
TW_INLINE constexpr int eight_bit_key(int n) { return n / 16 * 16 + n / 2 % 2 * 8 + n / 4 % 4 * 2 + n % 2; }

/// O = softmax(scale Q K^T) V with online softmax: the scores never leave the registers (FlashAttention; Dao et al. 2022, 2023; Shah et al.
/// 2024).
///
/// One tile is BM queries of one head. Keys and values arrive BN at a time, the last ones first, so that blocks cut by a mask come before
/// whole ones. `Rules` (attention_rules.tile.hpp) define which keys a query sees and how scores change.
///
/// With kQueryValues S = scale (Q K^T + Qv V^T): a block of values arrives with its keys, and stays until it was added to the output.
///
/// With kListed a tile sees the blocks of its list only, with kColumns also single keys, which were copied side by side: they arrive BN at
/// a time after the blocks.
///
/// T is bf16, f16, f32 or fp8_e4m3; the output is of type `Result`. Tensor cores contract 8-bit operands along rows of memory only, so fp8
/// values are transposed, [value_dim, keys], with the keys in the order of eight_bit_key().
template <class T, AttentionConfig kConfig, class Rules, class Result = T>
struct Attention {
  static constexpr const char* source = Rules::source ? Rules::source : "tilewave/tile/attention.tile.hpp";
  static constexpr int D = kConfig.head_dim, DV = kConfig.value_dim, BM = kConfig.rows, BN = kConfig.keys;
  static_assert(kConfig.lag == 0 || kConfig.lag == 1, "the output lags by one block of keys, or by none");
  static_assert(kConfig.maxima_first || !Rules::anywhere, "rules that may show a row its first key in any block need maxima_first");
  static_assert(!kConfig.rules_in_halves || !kConfig.maxima_first, "rules_in_halves is not for maxima_first");
  static constexpr bool query_values = (kConfig.form & kQueryValues) != 0;
  static_assert(!query_values || (!kConfig.queries_in_registers && kConfig.stages >= 2),
                "a block's values arrive before the previous block's are released, and both queries are read from memory");
  static constexpr bool values_transposed = sizeof(T) == 1;
  static_assert(!query_values || !values_transposed, "values are keys too");
  /// Tensor cores keep some 13 bits of a sum of 8-bit products, and lose more of a long one. So the output of a few blocks is a sum of its
  /// own, added to the output in f32. The registers do not hold both if there are more than 128 columns.
  static constexpr bool two_level = values_transposed && DV <= 128;
  static constexpr int kBlocksOfASum = DV <= 64 ? 1 : 2;  // with 64 columns three warpgroups have no registers for more
  using WarpTile =
      RowWarpTile<(BM % 128 == 0 && BN <= 64 && DV <= 128 ? 32 : 16)>;  // 32 rows of scores and output fit the registers of a warp

  template <class Target>
  struct On {
    using Q = Shared<Target, T, BM, D>;
    using K = Shared<Target, T, BN, D>;
    using V = conditional<values_transposed, Shared<Target, T, DV, BN>, Shared<Target, T, BN, DV, Contract::rows>>;
    using Qv = Shared<Target, T, BM, DV>;
    using Out = Staging<Target, Result, BM, DV>;
    using Scores = Fragment<Target, float, BM, BN>;
    using Output = Fragment<Target, float, BM, DV>;
    using Weights = Operand<Target, T, BM, BN>;
    using Softmax = OnlineSoftmax<Target, Scores, kConfig.maxima_first, T>;
    using PerRow = typename Softmax::PerRow;
    using Integers = Pointer<Target, const i32>;
    using Schedule = LongestFirst;
    static constexpr int rows = BM;
    static constexpr int vector_bytes = 64;  // on a CPU the exponentials take as long as the products
    static constexpr int min_blocks = kConfig.min_blocks, lag = products_are_synchronous<Target> ? 0 : kConfig.lag;
    /// Only a target that can load either way says whether it loads by TMA.
    static constexpr bool loads_by_tma() {
      if constexpr (requires { Target::tma_load; }) return Target::tma_load;
      return !products_are_synchronous<Target>;
    }
    static constexpr bool queries_in_registers = kConfig.queries_in_registers && loads_by_tma();
    static constexpr bool queries_back_early = kConfig.queries_back_early && !queries_in_registers;
    static constexpr bool maxima_first = kConfig.maxima_first, rules_in_halves = kConfig.rules_in_halves;
    using Work = AttentionWork<kConfig, Rules>;
    static constexpr bool ragged = Work::ragged, split = Work::split, paged = Work::paged, descaled = Work::descaled, listed = Work::listed,
                          columns = Work::columns;
    /// Whether the last blocks may be cut.
    static constexpr bool cut_at_end = Rules::lower || columns;
    /// Rules that change scores need them in the unit that the host knows. Otherwise the factor joins scale_log2.
    static constexpr bool descaled_before_rules = descaled && Rules::changing;

    struct QueryValues {
      Global<Target, const T, Qv> qv;  ///< as q, [batch, head, row, DV]
    };
    struct NoQueryValues {};
    struct Columns {
      Global<Target, const T, K> column_k;  ///< [batch, head, column, D]: the keys of each query head's columns
      Global<Target, const T, V> column_v;
      Integers column_positions;  ///< [list, tile, column_numbers]: the key that a column is, or one after the tile's last row to hide it
      int column_numbers;
    };
    struct NoColumns {};
    struct Params : conditional<query_values, QueryValues, NoQueryValues>, conditional<columns, Columns, NoColumns> {
      Global<Target, const T, Q> q;  ///< [batch, head, row, D]; batch is 1 for packed sequences
      Global<Target, const T, K> k;  ///< [batch, kv head, key, D], or [page, kv head, key in page, D]
      Global<Target, const T, V> v;
      Global<Target, Result, Out> o;
      Global<Target, float> partial;      ///< [split * batch, head, row, DV]: replaces o if the keys are split
      Pointer<Target, float> lse;         ///< [batch or split * batch, head, row], or null
      Pointer<Target, const float> sink;  ///< [head], or null
      i64 lse_stride_j, lse_stride_i;
      float scale_log2;  ///< the unit of scores times log2(e): exponentials are powers of two
      int keys;          ///< maximum number of keys of a sequence
      int heads_per_kv;
      bool has_diagonal;  ///< if false, the diagonal is seqlen_k - seqlen_q
      int diagonal;
      typename Rules::template Params<Target> rules;
      DropoutParams<Target> dropout;

      // ragged. Values read from memory are clamped to the tensors.
      int batch;
      Integers cu_q, cu_k;      ///< cu_seqlens; null: sequences are not packed but lie batch by batch
      Integers used_q, used_k;  ///< the number of a sequence's queries and keys; null: all
      Integers k_batch;         ///< maps a sequence to a batch of k and v, or to a row of the page table; null: the identity
      Integers k_begin;         ///< the first key of each sequence; null: 0
      int keys_added;           ///< added to each used_k
      Integers cu_added;        ///< cu_seqlens of the keys added, instead of keys_added; or null
      Integers tiles;           ///< the list of tiles, in PackedTile's format; null: each tile searches cu_q
      // split
      int heads_together;  ///< heads that share keys
      int queries;         ///< queries of each of these heads, whose rows are contiguous; 0: heads are separate, as without kSplit
      int splits;          ///< of a sequence's keys
      // paged
      Integers pages;  ///< [batch, pages of a sequence]; null: k is not paged
      i64 pages_stride;
      int page_tables;           ///< rows of the table
      int page_size, page_rows;  ///< keys of a page, and keys copied at once
      // descaled
      Descale<Target> q_descale, k_descale, v_descale;
      // listed
      Integers lists;      ///< [list, tile, list_numbers]: see BlockList
      int list_tiles;      ///< of the grid, without splits
      i64 list_numbers;    ///< of each list
      int lists_of_batch;  ///< heads with lists of their own; 0: all sequences share lists
      int heads_per_list;
      int first_head, first_list;  ///< of the launch: the first of batch * heads, and the number of the first list
    };
    struct QueryValuesMemory {
      Ring<Target, Qv, 1> qv;
      explicit constexpr QueryValuesMemory(auto& block) : qv(block) {}
    };
    struct NoQueryValuesMemory {
      explicit constexpr NoQueryValuesMemory(auto&) {}
    };
    struct Memory : conditional<query_values, QueryValuesMemory, NoQueryValuesMemory> {
      Ring<Target, Q, 1> q;
      Ring<Target, K, kConfig.stages> k;
      Ring<Target, V, kConfig.stages> v;
      Out out;
      explicit constexpr Memory(auto& block)
          : conditional<query_values, QueryValuesMemory, NoQueryValuesMemory>(block), q(block), k(block), v(block), out(block) {}
    };
    struct Factor {
      float factor;  ///< scale_log2, or with descaled_before_rules what scores are multiplied by
    };
    struct NoFactor {};
    struct LastValues {
      const Qv* qv;
      V* values;  ///< of the last block whose scores were computed
    };
    struct NoLastValues {};
    struct OfBlocks {
      Output of_blocks;  ///< the sum of the last ones
    };
    struct NotOfBlocks {};
    struct State : conditional<descaled, Factor, NoFactor>,
                   conditional<query_values, LastValues, NoLastValues>,
                   conditional<two_level, OfBlocks, NotOfBlocks> {
      Output out;
      Softmax softmax;
      Dropout dropout;
    };
    struct Locals {
      Scores scores;
      Weights weights;
    };

    TW_INLINE static Work work(const Params& p, Tile t) { return Work::of(p, t); }

    /// Step s loads block s of the keys and block s - values_lag of the values: the order in which compute takes them. In another order
    /// keys and values would wait for each other's slots.
    static constexpr int values_lag = query_values ? 0 : lag;
    TW_INLINE static int steps(const Params&, const Work& w) { return w.blocks > 0 ? w.blocks + values_lag : 0; }

    TW_INLINE static void load(auto& producer, const Params& p, const Work& w, int step, Memory& memory) {
      const int kv_head = w.head / p.heads_per_kv;
      if (step == 0) producer.put(memory.q, [&](auto copy, Q& q) { copy.tile(p.q, q, w.q_row + w.first_row, 0, w.head, w.q_batch); });
      if constexpr (query_values) {
        if (step == 0)
          producer.put(memory.qv, [&](auto copy, Qv& qv) { copy.tile(p.qv, qv, w.q_row + w.first_row, 0, w.head, w.q_batch); });
      }
      // An entry of a list is read before the wait for a slot, not after it.
      if (step < w.blocks) {
        const int key = w.first_key(p, step);
        producer.put(memory.k, [&](auto copy, K& k) {
          if constexpr (columns) {
            if (w.of_columns(step)) return copy.tile(p.column_k, k, key, 0, w.head, w.batch);
          }
          load_block(copy, p, w, p.k, k, key, kv_head);
        });
      }
      if (step >= values_lag) {
        const int key = w.first_key(p, step - values_lag);
        producer.put(memory.v, [&](auto copy, V& v) {
          if constexpr (columns) {
            if (w.of_columns(step - values_lag)) return copy.tile(p.column_v, v, key, 0, w.head, w.batch);
          }
          if constexpr (values_transposed)
            copy.tile(p.v, v, 0, key, kv_head, w.k_batch);
          else
            load_block(copy, p, w, p.v, v, key, kv_head);
        });
      }
    }

    /// Starts the product that adds block n to the output, or with two_level is added to it in the end.
    TW_INLINE static void add_output(auto& block, const Params& p, const Work& w, int n, Memory& memory, const Weights& weights,
                                     State& state) {
      if constexpr (two_level)
        block.mma(state.of_blocks, weights, take_values(block, p, w, n, memory), n % kBlocksOfASum == 0);
      else if constexpr (query_values)
        block.mma(state.out, weights, *state.values, n == 0);
      else
        block.mma(state.out, weights, take_values(block, p, w, n, memory), n == 0);
    }
    TW_INLINE static void wait_for_output(auto& block, const Work& w, int n, Memory& memory, State& state) {
      if constexpr (two_level) {
        block.wait(leave<0>, state.of_blocks);
        block.release(memory.v);
        if (n % kBlocksOfASum == kBlocksOfASum - 1 || n + 1 == w.blocks)
          block.map(state.out, state.of_blocks, [](auto x, auto y) { return x + y; });
      } else {
        block.wait(leave<0>, state.out);
        block.release(memory.v);
      }
    }

    /// One block of keys: its scores and weights. The product that adds to the output runs under the softmax, or after it: see lag. `cut`:
    /// rules hide some of the scores. kHalves: no score is hidden and all rows have seen a key; see rules_in_halves.
    template <bool kFirst, bool kHalves = false>
    TW_INLINE static void next(auto& block, const Params& p, const Work& w, int step, bool cut, Memory& memory, const auto& q,
                               Weights& weights, State& state) {
      Scores scores;
      PerRow decay;
      block.mma(scores, q, block.take(memory.k), true);
      [[maybe_unused]] V* values = nullptr;
      if constexpr (query_values) {
        values = &take_values(block, p, w, step, memory);
        block.mma(scores, *state.qv, view<Contract::columns>(*values), false);
      }
      constexpr bool kOutputUnder = lag == 1 && !kFirst;
      constexpr int kUnfinished = kOutputUnder ? 1 : 0;
      if constexpr (kOutputUnder) add_output(block, p, w, step - 1, memory, weights, state);
      block.wait(leave<kUnfinished>, scores);
      block.release(memory.k);
      if (queries_back_early && step + 1 == w.blocks) release_queries(block, memory);
      if constexpr (!kHalves) {
        if (cut)
          apply_rules<true, 0, BN>(block, p, w, step, scores, state);
        else
          apply_rules<false, 0, BN>(block, p, w, step, scores, state);
        if (!maxima_first && (cut || step <= w.cut)) state.softmax.set_first_bases(block, scale_log2(p, state), scores);
      }
      const bool rescaled = state.softmax.add(block, scale_log2(p, state), scores, decay, [&](auto first, auto count) {
        if constexpr (kHalves) apply_rules<false, decltype(first)::value, decltype(count)::value>(block, p, w, step, scores, state);
      });
      if constexpr (kOutputUnder) wait_for_output(block, w, step - 1, memory, state);
      if constexpr (query_values) state.values = values;
      if (!kFirst && rescaled) {
        block.map(state.out, decay, [](auto x, auto d) { return x * d; });
        if constexpr (two_level && kBlocksOfASum > 1) block.map(state.of_blocks, decay, [](auto x, auto d) { return x * d; });
      }
      if constexpr (kConfig.dropout != Use::never) {
        static_assert(!values_transposed, "weights of 8 bits are not dropped");
        const bool dropped = drops(kConfig, p);
        if (dropped) mark_dropped(block, state.dropout, scores, w.first_row, w.first_key(p, step));
        if (dropped || TW_ON_GPU)  // on a GPU the difference is one instruction, less than a branch
          convert_kept(block, weights, scores);
        else
          block.convert(weights, scores);
      } else if constexpr (values_transposed && requires { block.convert_in_place(weights, scores); }) {
        // The analysis has no convert_in_place(): it counts nothing for either.
        block.convert_in_place(weights, scores);
      } else {
        block.convert(weights, scores);
      }
      if constexpr (lag == 0) {
        add_output(block, p, w, step, memory, weights, state);
        wait_for_output(block, w, step, memory, state);
      }
    }
    TW_INLINE static void loop(auto& block, const Params& p, const Work& w, Memory& memory, const auto& q, Weights& weights, State& state) {
      const int whole_end = w.blocks - w.cut_first;
      next<true>(block, p, w, 0, w.cut > 0 || whole_end <= 0, memory, q, weights, state);
      // All warps' products have read the queries by now.
      if constexpr (queries_in_registers) block.release(memory.q);
      int step = 1;
      if constexpr (maxima_first && TW_ON_GPU) {  // on the CPU a test costs less than a copy of the code
        for (; step < w.cut; ++step) next<false>(block, p, w, step, true, memory, q, weights, state);
        for (; step < whole_end; ++step) next<false>(block, p, w, step, false, memory, q, weights, state);
        if constexpr (cut_at_end)
          for (; step < w.blocks; ++step) next<false>(block, p, w, step, true, memory, q, weights, state);
      } else {
        const auto cut = [&](int n) { return n < w.cut || (cut_at_end && n >= whole_end); };
        if constexpr (rules_in_halves) {
          for (; step <= w.cut && step < w.blocks; ++step) next<false>(block, p, w, step, cut(step), memory, q, weights, state);
          for (; step < whole_end; ++step) next<false, true>(block, p, w, step, false, memory, q, weights, state);
        }
        if constexpr (!rules_in_halves || cut_at_end)
          for (; step < w.blocks; ++step) next<false>(block, p, w, step, cut(step), memory, q, weights, state);
      }
    }

    TW_INLINE static void compute(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      state.softmax.begin(block);
      if constexpr (kConfig.dropout != Use::never) state.dropout = Dropout::of(p.dropout, w.batch * p.q.size_i + w.head);
      if constexpr (descaled) state.factor = descaled_before_rules ? w.of_scores : p.scale_log2 * w.of_scores;
      if (two_level || w.blocks == 0) block.fill(state.out, 0.0f);
      if (w.blocks == 0) return;
      const Q& q = block.take(memory.q);
      if constexpr (query_values) state.qv = &block.take(memory.qv);
      Weights weights;
      if constexpr (queries_in_registers) {
        Operand<Target, T, BM, D> in_registers;
        block.load(in_registers, q);
        loop(block, p, w, memory, in_registers, weights, state);
      } else {
        loop(block, p, w, memory, q, weights, state);
        if constexpr (!queries_back_early) release_queries(block, memory);
      }
      if constexpr (lag == 1) {
        add_output(block, p, w, w.blocks - 1, memory, weights, state);
        wait_for_output(block, w, w.blocks - 1, memory, state);
      }
    }

    TW_INLINE static void finish(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      if (ragged && w.first_row >= w.rows) return;  // the tile is empty, which the host could not know
      Softmax& softmax = state.softmax;
      block.complete(softmax.sum);
      PerRow scale;
      block.fill(scale, 1.0f);
      if (p.sink)
        softmax.add_sink(
            block, [&](int row) { return p.sink[w.head_of(p, row)] * kLog2E; }, scale);
      const int part = split ? w.part * p.q.size_j + w.q_batch : w.q_batch;
      if (p.lse) {
        block.for_rows(softmax.sum, [&](int row, int i, auto&) {
          const int r = w.first_row + row;
          const auto lse = softmax.lse(i);
          if (r < w.rows && block.owns_rows(softmax.sum)) p.lse[part * p.lse_stride_j + w.head * p.lse_stride_i + w.q_row + r] = lse;
        });
      }
      block.for_rows(scale, [&](int, int i, auto& x) { x = softmax.sum[i] == 0.0f ? 0.0f : x * reciprocal(softmax.sum[i]); });
      if constexpr (kConfig.dropout != Use::never) block.for_rows(scale, [&](int, int, auto& x) { x *= p.dropout.scale; });
      if constexpr (descaled) block.for_rows(scale, [&](int, int, auto& x) { x *= w.of_values; });
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
    TW_INLINE static void release_queries(auto& block, Memory& memory) {
      block.release(memory.q);
      if constexpr (query_values) block.release(memory.qv);
    }
    /// Loads the block of a sequence's keys or values that begins with `key`. For pages, the part after the sequence's end is loaded from
    /// its last key on; its content does not matter.
    template <class G, class S>
    TW_INLINE static void load_block(auto& copy, const Params& p, const Work& w, const G& from, S& to, int key, int kv_head) {
      if (paged && p.pages) {
        TW_NO_UNROLL
        for (int r = 0; r < BN; r += p.page_rows) {
          const u32 size = static_cast<u32>(p.page_size), at = static_cast<u32>(min(key + r, w.seqlen_k - 1)), number = at / size;
          const int page = SequenceRows::clamp(p.pages[w.k_batch * p.pages_stride + number], from.size_j - 1);
          copy.part(from, to, r, p.page_rows, static_cast<int>(at - number * size), 0, kv_head, page);
        }
      } else {
        copy.tile(from, to, w.k_row + key, 0, kv_head, w.k_batch);
      }
    }
    /// Takes block n of the values. The rows after the sequence's end belong to another sequence and may be NaN, which a weight of 0 would
    /// not hide.
    TW_INLINE static V& take_values(auto& block, const Params& p, const Work& w, int n, Memory& memory) {
      V& v = block.take(memory.v);
      if constexpr (ragged || paged) {
        // Only a sequence's last block has rows after its end. It can be the first of a list or, with columns, any block that rules cut.
        const bool may_end = columns ? n >= w.blocks - w.cut_first && !w.of_columns(n) : !listed || n == 0;
        const int left = may_end ? w.seqlen_k - w.first_key(p, n) : BN;
        if (left < BN) block.zero_rows(v, max(left, 0));
      }
      return v;
    }

    /// The unit of scores, as rules leave them, times log2(e).
    TW_INLINE static float scale_log2(const Params& p, [[maybe_unused]] const State& state) {
      if constexpr (descaled && !descaled_before_rules)
        return state.factor;
      else
        return p.scale_log2;
    }
    /// Applies the rules to kCount columns of the n-th block's scores, from kFirst on. Scores that a row must not see become -infinity.
    template <bool kCut, int kFirst, int kCount>
    TW_INLINE static void apply_rules(auto& block, const Params& p, const Work& w, int n, Scores& scores,
                                      [[maybe_unused]] const State& state) {
      const int key0 = w.first_key(p, n);
      if constexpr (kCut && columns) {
        if (w.of_columns(n)) return hide_columns(block, p, w, key0, scores);
      }
      if constexpr (descaled_before_rules) {
        const float factor = state.factor;
        // A GPU's kernel would need registers for the branch.
        if (TW_ON_GPU || factor != 1.0f) block.template for_columns<kFirst, kCount>(scores, [factor](int, auto, auto& x) { x *= factor; });
      }
      Rules::template apply<kCut, kFirst, kCount>(block, p.rules, scores, [&](int row, auto col) {
        const int query = w.query_of(p, row);
        return Score{w.batch,       w.head_of(p, row), query,      key0 + col,
                     w.seqlen_q(p), w.seqlen_k,        w.diagonal, difference(query + w.diagonal - key0, col)};
      });
      if (kCut && key0 + BN > w.seqlen_k) {
        block.for_each(scores, [&](int, int col, auto& x) {
          if (key0 + col >= w.seqlen_k) x = -kInfinity;
        });
      }
    }
    /// Hides the columns, from `first` on, that come after a row or are hidden from the tile.
    TW_INLINE static void hide_columns(auto& block, const Params& p, const Work& w, int first, Scores& scores) {
      const auto positions = p.column_positions + (w.positions + first);
      block.for_each(scores, [&](int row, int col, auto& x) {
        if (positions[col] > w.query_of(p, row)) x = -kInfinity;
      });
    }
  };
};

}  // namespace tw
