#pragma once

#include "kernels/gated_delta/gated_delta.tile.hpp"

// The gated delta rule with a gate for each channel of a key (Kimi Delta Attention), in chunks. With G(i) the sums of a chunk's gates up to
// token i, now vectors, S the state before the chunk, and products of vectors elementwise:
//
//   A(i, j) = beta_i sum over c of k_ic k_jc exp(G_ic - G_jc) for j < i      P(i, j) = the same of q_ic k_jc, without beta, for j <= i
//   U = inverse of (I + A) times beta (V - (exp(G) K) S)                     O = scale ((exp(G) Q) S + P U)
//   S = exp(G_last) S + (exp(G_last - G) K)^T U
//
// The exponent of a pair depends on its channel, so no product of K and Q gives A and P, and exp(-G) overflows. But for a token m from j to
// i - 1, exp(G_i - G_j) = exp(G_i - G_m) exp(G_m - G_j), and both factors are at most 1. Level `half` (32, 16, ... 1) pairs the rows of
// each second block of `half` tokens with those of the block before it, whose last token is m. Every pair j < i is in one level, that of
// the highest bit in which i and j differ, so A and P are sums of parts of six products with operands that neither overflow nor lose what
// counts. Each factor is a product of decays, exponentials of the gates between m and a token, not a quotient of two from the chunk's
// start, which would cancel.

namespace tw::kernels::gated_delta {

inline constexpr const char* kChannelsSource = "kernels/gated_delta/channels.tile.hpp";

/// Channels that PrepareChannels does at a time.
inline constexpr int kSlice = 64;
/// Levels of pairs of a chunk's tokens.
inline constexpr int kLevels = 6;
/// Neighbouring tokens: a thread computes the decays of one channel for all of them.
inline constexpr int kRun = 16;
inline constexpr int kRuns = kChunk / kRun;
/// Levels whose operands are in shared memory together.
inline constexpr int kTogether = 2;

/// The decays of a channel along a run of kRun tokens, in blocks of 1, 2, 4, ... of them: since a block's first token (with its own gate),
/// and until its last one (with those of the tokens after).
template <class X>
struct Decays {
  X since[kRun], until[kRun];

  /// Blocks of one token, of the tokens from `first` on.
  TW_INLINE Decays(const auto& decays, int first, int channel) {
    TW_UNROLL
    for (int i = 0; i < kRun; ++i) {
      since[i] = decays.at(first + i, channel) * 1.0f;
      until[i] = 1.0f;
    }
  }
  /// Makes one block of every two of `half` tokens.
  TW_INLINE void merge(int half) {
    const auto last_of_first = [half](int i) { return i / (2 * half) * 2 * half + half - 1; };
    TW_UNROLL
    for (int i = 0; i < kRun; ++i)
      if ((i & half) == 0) until[i] = until[i] * since[last_of_first(i) + half];
    TW_UNROLL
    for (int i = 0; i < kRun; ++i)
      if ((i & half) != 0) since[i] = since[i] * since[last_of_first(i)];
  }
};

/// Of each chunk and head: A, P, and the operands of the chunk's other products, exp(G) K, exp(G) Q and
/// exp(G_last - G) K. Tokens after the chunk's last one get a beta and operands of 0. It takes kSlice channels at a time. `Blocks`
/// share an SM: while one computes decays, the other multiplies.
template <class T, class Beta, int Blocks>
struct PrepareChannels {
  static constexpr const char* source = kChannelsSource;

  template <class Target>
  struct On {
    static constexpr int rows = 128;
    static constexpr int warpgroups = rows / 64;
    static constexpr int min_blocks = Blocks;
    using Gates = Rows<Target, float, kChunk, kSlice, 4 * warpgroups, 4>;
    using Tokens = Rows<Target, float, kChunk, kSlice, 4 * warpgroups, 8>;
    struct Params {
      Global<Target, const T, Tokens> q, k;                 ///< [batch, head of keys, token, dim]
      Global<Target, const float, Gates> gates;             ///< [batch, head, token, dim]
      Global<Target, const Beta> betas;                     ///< [batch, token, head]
      Global<Target, T, Tokens> queries, keys, keys_after;  ///< [head, chunk * 64, dim]: exp(G) Q, exp(G) K, exp(G_last - G) K
      Pointer<Target, float> whole;                         ///< [head, chunk, dim]: exp(G_last)
      Global<Target, float> matrices;                       ///< [head, chunk * 64, 64]: A, with anything above its diagonal
      Global<Target, T> weights;                            ///< the same of P
      Global<Target, float> scale;                          ///< [chunk * 64, head]: beta
      Sequences<Target> sequences;
      int chunks;  ///< of all sequences
      int group;   ///< heads that share a key
    };
    struct Memory {
      Buffer<Target, float, kChunk, kSlice> decays;
      VectorBuffer<Target, float, kRuns * kSlice> totals;  ///< of whole runs
      Buffer<Target, T, kChunk, kSlice> q, k, k_after;
      Buffer<Target, T, kChunk, 2 * kTogether * kSlice> scaled;  ///< queries and keys of one level after the other
      explicit constexpr Memory(auto& block) : decays(block), totals(block), q(block), k(block), k_after(block), scaled(block) {}
    };
    TW_INLINE static void compute(auto& block, const Params& p, Tile t, Memory& memory) {
      const auto chunk = p.sequences.chunk(t);
      const int size = chunk.size, head = t.batch;
      const int head_of_keys = static_cast<int>(static_cast<u32>(head) / static_cast<u32>(p.group));
      if (size <= 0) return;
      const auto hide_others = [&](auto& tile) {
        block.for_each(tile, [&](int row, int, auto& value) {
          if (row >= size) value = 0.0f;
        });
      };
      Square a, weights;
      block.fill(a, 0.0f);
      block.fill(weights, 0.0f);
      // Counted down, and without an index of the chunk's first token: with either, the kernel spills where two blocks share an SM.
      TW_NO_UNROLL
      for (int slices = ceil_div(p.queries.cols, kSlice); slices > 0; --slices) {
        const int channel = p.queries.cols - slices * kSlice;
        {
          Gates decays;
          block.load(decays, p.gates, chunk.first, channel, head, chunk.batch);
          block.for_each(decays, [&](int row, int, auto& gate) {
            if (gate < kLowestGate) gate = kLowestGate;
            gate = row < size ? exp(gate) : 1.0f;
          });
          block.store(decays, memory.decays);
        }
        Tokens tokens;
        block.load(tokens, p.q, chunk.first, channel, head_of_keys, chunk.batch);
        hide_others(tokens);
        block.store(tokens, memory.q);
        block.load(tokens, p.k, chunk.first, channel, head_of_keys, chunk.batch);
        hide_others(tokens);
        share(block, tokens, memory.k);
        Square x;
        // The tokens' queries with their own keys.
        block.mma(x, memory.q, memory.k, true);
        block.wait(leave<0>, x);
        add_if(block, weights, x, [](int row, int col) { return row == col; });
        add_levels<0>(block, a, weights, memory);
        block.parallel(min(p.queries.cols - channel, kSlice), [&](int n) {
          p.whole[(static_cast<i64>(head) * p.chunks + chunk.index) * p.queries.cols + channel + n] = memory.decays.at(kChunk - 1, n);
        });
        block.load(tokens, memory.q);
        block.store(tokens, p.queries, chunk.index * kChunk, channel, head);
        block.load(tokens, memory.k);
        block.store(tokens, p.keys, chunk.index * kChunk, channel, head);
        block.load(tokens, memory.k_after);
        block.store(tokens, p.keys_after, chunk.index * kChunk, channel, head);
        block.sync();
      }
      hide_others(weights);
      block.store(weights, p.weights, chunk.index * kChunk, 0, head);
      RowVector<Target, float, Square> beta;
      block.load(beta, p.betas, chunk.first, head, chunk.batch);
      block.for_rows(beta, [&](int row, int, auto& value) {
        if (row >= size) value = 0.0f;
      });
      block.store(beta, p.scale, chunk.index * kChunk, head);
      block.map(a, beta, [](auto value, auto b) { return value * b; });
      hide_others(a);
      block.store(a, p.matrices, chunk.index * kChunk, 0, head);
    }

   private:
    using Square = Fragment<Target, float, kChunk, kChunk, warpgroups>;  // tokens by tokens, or by channels
    static_assert(kSlice == kChunk);

    /// Adds the products of the levels from `first` on to A, without beta, and P.
    template <int first>
    TW_INLINE static void add_levels(auto& block, Square& a, Square& weights, Memory& memory) {
      if constexpr (first < kLevels) {
        if constexpr (first > 0) block.sync();  // the products before have read `scaled`
        scale_levels<first>(block, memory);
        block.fence();
        block.sync();
        add_products<first, 0>(block, a, weights, memory);
        add_levels<first + kTogether>(block, a, weights, memory);
      }
    }
    /// The operands of the levels from `first` on. At the last ones the decays become exp(G), and q, k and k_after the operands of the
    /// chunk's other products.
    template <int first>
    TW_INLINE static void scale_levels(auto& block, Memory& memory) {
      using X = remove_const_reference<decltype(memory.decays.at(0, 0) * 1.0f)>;
      const auto scale_run = [&](int n) {
        const int channel = n % kSlice, run = n / kSlice, token = run * kRun;
        // The decay of the runs before or after this one in its block of `runs`.
        const auto beside = [&](int runs, bool before) {
          X product = 1.0f;
          TW_UNROLL
          for (int other = 0; other < kRuns; ++other) {
            if ((other ^ run) < runs && (before ? other < run : other > run)) product = product * memory.totals[other * kSlice + channel];
          }
          return product;
        };
        Decays<X> decays(memory.decays, token, channel);
        TW_UNROLL
        for (int level = 0; level < kLevels; ++level) {
          const int half = 1 << level;
          if (level >= first && level < first + kTogether) {
            const int col = 2 * (level - first) * kSlice + channel;
            const bool second = (token & half) != 0;
            const X rest = half > kRun ? beside(half / kRun, second) : X(1.0f);
            TW_UNROLL
            for (int i = 0; i < kRun; ++i) {
              const X factor = rest * (((token + i) & half) != 0 ? decays.since[i] : decays.until[i]);
              put(memory.scaled, token + i, col, get(memory.q, token + i, channel) * factor);
              put(memory.scaled, token + i, col + kSlice, get(memory.k, token + i, channel) * factor);
            }
          }
          if (half < kRun) decays.merge(half);
        }
        if (first == 0) memory.totals[n] = decays.since[kRun - 1];
        if (first + kTogether < kLevels) return;
        const X before = beside(kRuns, true), after = beside(kRuns, false);
        TW_UNROLL
        for (int i = 0; i < kRun; ++i) {
          const X since = decays.since[i] * before;
          const auto key = get(memory.k, token + i, channel);
          memory.decays.at(token + i, channel) = since;
          put(memory.q, token + i, channel, get(memory.q, token + i, channel) * since);
          put(memory.k, token + i, channel, key * since);
          put(memory.k_after, token + i, channel, key * (decays.until[i] * after));
        }
      };
      if constexpr (first + kTogether < kLevels)
        block.update(memory.scaled, kRuns * kSlice, scale_run);
      else
        block.update(kRuns * kSlice, scale_run, memory.scaled, memory.decays, memory.q, memory.k, memory.k_after);
    }
    TW_INLINE static auto get(const auto& buffer, int row, int col) { return tw::to<float>(buffer.at(row, col)); }
    TW_INLINE static void put(const auto& buffer, int row, int col, auto value) { buffer.at(row, col) = tw::to<T>(value); }
    template <int first, int n>
    TW_INLINE static void add_products(auto& block, Square& a, Square& weights, Memory& memory) {
      if constexpr (n < kTogether) {
        const auto q = view_columns<2 * n * kSlice, kSlice>(memory.scaled);
        const auto k = view_columns<(2 * n + 1) * kSlice, kSlice>(memory.scaled);
        Square of_keys, of_queries;
        block.mma(of_keys, k, k, true);
        block.mma(of_queries, q, k, true);
        const auto is_in_level = [](int row, int col) { return couples_blocks(row, col, 1 << (first + n)); };
        block.wait(leave<1>, of_keys);
        add_if(block, a, of_keys, is_in_level);
        block.wait(leave<0>, of_queries);
        add_if(block, weights, of_queries, is_in_level);
        add_products<first, n + 1>(block, a, weights, memory);
      }
    }
    /// Adds those elements of the product that `wanted(row, col)` holds for.
    TW_INLINE static void add_if(auto& block, Square& sum, Square& product, auto wanted) {
      block.for_each(sum, product, [&](int row, int col, auto& x, auto& y) {
        if (wanted(row, col)) x = x + y;
      });
    }
  };
};

/// The inverses of I + A of all chunks. `Blocks` share an SM: the inversion is a chain of short steps.
template <class T, int Blocks>
struct InvertChannels {
  static constexpr const char* source = kChannelsSource;

  template <class Target>
  struct On {
    static constexpr int rows = kChunk;
    static constexpr int min_blocks = Blocks;
    struct Params {
      Global<Target, const float> matrices;  ///< [head, chunk * 64, 64]: A
      Global<Target, T> inverses;            ///< the same
    };
    struct Memory {
      InversionMemory<Target, kChunk, kInversionParts<T>> inversion;
      explicit constexpr Memory(auto& block) : inversion(block) {}
    };
    TW_INLINE static void compute(auto& block, const Params& p, Tile t, Memory& memory) {
      Fragment<Target, float, kChunk, kChunk> x;
      block.load(x, p.matrices, t.m * kChunk, 0, t.batch);
      invert_unit_lower(block, x, memory.inversion);
      block.store(x, p.inverses, t.m * kChunk, 0, t.batch);
    }
  };
};

/// Walk for gates of channels: a sequence of a head, a slice of its values, from operands that PrepareChannels made.
template <class T, int D, int Slice, int Stages>
struct WalkChannels {
  static constexpr const char* source = kChannelsSource;

  template <class Target>
  struct On {
    static constexpr int rows = Slice;
    static constexpr int warpgroups = rows / 64;
    using Tokens = Shared<Target, T, kChunk, D>;
    using Values = Shared<Target, T, kChunk, Slice>;
    using Matrix = Shared<Target, T, kChunk, kChunk>;
    using OfTokens = SharedVector<Target, float, kChunk>;
    using OfChannels = SharedVector<Target, float, D>;
    struct Params {
      Global<Target, const T, Tokens> queries, keys, keys_after;  ///< [head, chunk * 64, D]
      Global<Target, const T, Values> v;                          ///< [batch, head, token, dim]
      Global<Target, const T, Matrix> inverses, weights;          ///< [head, chunk * 64, 64]
      Global<Target, const float, OfChannels> whole;              ///< [head, chunk, D]
      Global<Target, const float, OfTokens> scale;                ///< [head, chunk * 64]
      Global<Target, T> o;                                        ///< as v
      Global<Target, const float> initial_state;                  ///< [sequence, head, dim of keys, dim of values], or none
      Global<Target, float> final_state;                          ///< the same
      Sequences<Target> sequences;
      int group;
      float factor;
    };
    struct Work {
      typename Sequences<Target>::Sequence sequence;
      int n, head, col;
    };
    struct Slot {
      Tokens k, k_after;
      Values v;
      OfChannels whole;
      OfTokens scale;
    };
    struct Memory {
      Ring<Target, Slot, Stages> keys;
      Ring<Target, Tokens, 1> queries;
      Ring<Target, Matrix, 1> inverses, weights;
      Buffer<Target, T, D, Slice, Contract::rows> state;
      Buffer<Target, T, kChunk, Slice, Contract::rows> updates;
      explicit constexpr Memory(auto& block) : keys(block), queries(block), inverses(block), weights(block), state(block), updates(block) {}
    };
    struct State {
      Fragment<Target, float, D, Slice, warpgroups> s;
    };
    TW_INLINE static Work work(const Params& p, Tile t) { return {p.sequences.at(t.m), t.m, t.batch, t.n * Slice}; }
    TW_INLINE static int steps(const Params&, const Work& w) { return ceil_div(w.sequence.size, kChunk); }
    TW_INLINE static void load(auto& producer, const Params& p, const Work& w, int step, Memory& memory) {
      const int chunk = w.sequence.first_chunk + step, of_chunk = chunk * kChunk;
      producer.put(memory.keys, [&](auto copy, Slot& slot) {
        copy.tile(p.keys, slot.k, of_chunk, 0, w.head);
        copy.tile(p.keys_after, slot.k_after, of_chunk, 0, w.head);
        copy.tile(p.v, slot.v, w.sequence.begin + step * kChunk, w.col, w.head, w.sequence.batch);
        copy.vector(p.whole, slot.whole, chunk, 0, w.head);
        copy.vector(p.scale, slot.scale, w.head, of_chunk);
      });
      producer.put(memory.queries, [&](auto copy, Tokens& q) { copy.tile(p.queries, q, of_chunk, 0, w.head); });
      producer.put(memory.inverses, [&](auto copy, Matrix& inverse) { copy.tile(p.inverses, inverse, of_chunk, 0, w.head); });
      producer.put(memory.weights, [&](auto copy, Matrix& weights) { copy.tile(p.weights, weights, of_chunk, 0, w.head); });
    }
    TW_INLINE static void compute(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      using Part = Fragment<Target, float, kChunk, Slice, warpgroups>;
      if (p.initial_state.cols > 0)
        block.load(state.s, p.initial_state, 0, w.col, w.head, w.n);
      else
        block.fill(state.s, 0.0f);
      const int n = steps(p, w);
      for (int step = 0; step < n; ++step) {
        const int token = w.sequence.begin + step * kChunk, size = w.sequence.size - step * kChunk;
        Slot& slot = block.take(memory.keys);
        const Tokens& q = block.take(memory.queries);
        RowVector<Target, float, Part> scale;
        RowVector<Target, float, decltype(state.s)> whole;
        block.load(scale, slot.scale);
        block.load(whole, slot.whole);

        share(block, state.s, memory.state);
        Part old, updates, out;
        block.mma(old, slot.k, memory.state, true);
        block.mma(out, q, memory.state, true);
        block.load(updates, slot.v);
        block.wait(leave<1>, old);
        block.map(updates, old, scale, [](auto v, auto o, auto b) { return b * (v - o); });
        // The rows after a sequence's last token may be another sequence's, and NaN.
        if (size < kChunk) {
          block.for_each(updates, [&](int row, int, auto& value) {
            if (row >= size) value = 0.0f;
          });
        }
        share(block, updates, memory.updates);
        const Matrix& inverse = block.take(memory.inverses);
        block.mma(updates, inverse, memory.updates, true);
        block.wait(leave<0>, updates, out);
        block.release(memory.queries);
        block.release(memory.inverses);
        block.sync();
        share(block, updates, memory.updates);
        const Matrix& weights = block.take(memory.weights);
        block.mma(out, weights, memory.updates, false);
        block.map(state.s, whole, [](auto value, auto decay) { return value * decay; });
        block.mma(state.s, view<Contract::rows>(slot.k_after), memory.updates, false);
        block.wait(leave<1>, out);
        const float factor = p.factor;
        block.map(out, [factor](auto o) { return o * factor; });
        block.scatter(
            out, p.o, [&](int row) { return row < size ? token + row : -1; }, w.col, w.head, w.sequence.batch);
        block.wait(leave<0>, state.s);
        block.sync();
        block.release(memory.weights);
        block.release(memory.keys);
      }
    }
    TW_INLINE static void finish(auto& block, const Params& p, const Work& w, Memory&, State& state) {
      if (p.final_state.cols > 0) block.store(state.s, p.final_state, 0, w.col, w.head, w.n);
    }
  };
};

}  // namespace tw::kernels::gated_delta
