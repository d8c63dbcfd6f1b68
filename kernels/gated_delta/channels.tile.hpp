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

/// put(i, factor) for `count` tokens from `first` on: `factor` times their decays since the first one, with its own.
template <class X>
TW_INLINE void since_first(const auto& decays, int first, int count, X factor, auto put) {
  TW_UNROLL
  for (int i = first; i < first + count; ++i) {
    factor = factor * decays[i];
    put(i, factor);
  }
}
/// The same with their decays until the last one, without their own.
template <class X>
TW_INLINE void until_last(const auto& decays, int first, int count, X factor, auto put) {
  TW_UNROLL
  for (int i = first + count - 1; i >= first; --i) {
    put(i, factor);
    factor = factor * decays[i];
  }
}
/// The decays of a chunk's gates, in a Buffer. A token after the sequence's last one has none: 1.
TW_INLINE void load_decays(auto& block, auto& tile, const auto& gates, const auto& chunk, int channel, int head, const auto& decays) {
  block.load(tile, gates, chunk.first, channel, head, chunk.batch);
  block.for_each(tile, [&](int row, int, auto& gate) {
    if (gate < kLowestGate) gate = kLowestGate;
    gate = row < chunk.size ? exp(gate) : 1.0f;
  });
  block.store(tile, decays);
}
/// The decay of the runs before a run, or after it, in its block of `runs`, from those of whole runs of `channels` channels.
template <int channels>
TW_INLINE auto decay_beside(const auto& totals, int run, int channel, int runs, bool before) {
  remove_const_reference<decltype(totals[0] * 1.0f)> product = 1.0f;
  TW_UNROLL
  for (int other = 0; other < kRuns; ++other) {
    if ((other ^ run) < runs && (before ? other < run : other > run)) product = product * totals[other * channels + channel];
  }
  return product;
}

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
    static constexpr int min_blocks = Target::whole_pieces ? Blocks : 1;
    using Gates = Rows<Target, float, kChunk, kSlice, 4 * warpgroups, 4>;
    using Tokens = Rows<Target, float, kChunk, kSlice, 4 * warpgroups, 8>;
    using Held = Rows<Target, T, kChunk, kSlice, 4 * warpgroups, 8>;  ///< in half the registers
    using Square = Fragment<Target, float, kChunk, kChunk, warpgroups>;
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
      Buffer<Target, float, kChunk, kSlice> decays, factors, more_factors;
      VectorBuffer<Target, float, kRuns * kSlice> totals;  ///< of whole runs
      Buffer<Target, T, kChunk, kSlice> q, k;
      Buffer<Target, T, kChunk, kSlice> scaled_q, scaled_k, more_scaled_q, more_scaled_k;
      VectorBuffer<Target, float, kChunk> diagonal;
      explicit constexpr Memory(auto& block)
          : decays(block),
            factors(block),
            more_factors(block),
            totals(block),
            q(block),
            k(block),
            scaled_q(block),
            scaled_k(block),
            more_scaled_q(block),
            more_scaled_k(block),
            diagonal(block) {}
    };
    TW_INLINE static void compute(auto& block, const Params& p, Tile t, Memory& memory) {
      const auto chunk = p.sequences.chunk(t);
      const int size = chunk.size, head = t.batch;
      const int head_of_keys = static_cast<int>(static_cast<u32>(head) / static_cast<u32>(p.group));
      if (size <= 0) return;
      const auto hide_others = [&](auto& tile) {
        block.for_each(tile, [&](int row, int, auto& value) {
          if (row >= size) value = to<remove_const_reference<decltype(value)>>(0.0f);
        });
      };
      Square a, weights;
      block.fill(a, 0.0f);
      block.fill(weights, 0.0f);
      TW_NO_UNROLL
      for (int slices = p.queries.cols / kSlice; slices > 0; --slices) {  // counted up, two blocks do not fit on an SM
        const int channel = p.queries.cols - slices * kSlice;
        {
          Gates decays;
          load_decays(block, decays, p.gates, chunk, channel, head, memory.decays);
        }
        Held q, k;
        block.load(q, p.q, chunk.first, channel, head_of_keys, chunk.batch);
        hide_others(q);
        block.store(q, memory.q);
        block.load(k, p.k, chunk.first, channel, head_of_keys, chunk.batch);
        hide_others(k);
        block.store(k, memory.k);
        block.sync();
        add_levels(block, a, weights, memory);
        put_factors<kLevels>(block, memory);
        block.load(q, memory.q);
        block.load(k, memory.k);
        // The tokens' queries with their own keys.
        RowVector<Target, float, Tokens> diagonal;
        block.fill(diagonal, 0.0f);
        if (slices * kSlice < p.queries.cols) block.load(diagonal, memory.diagonal);
        Tokens x, scaled;
        block.map(x, q, k, multiply);
        block.rows(x, [&](int i, auto row) { diagonal[i] = diagonal[i] + row.sum(); });
        block.load(x, memory.factors);
        block.map(scaled, q, x, multiply);
        block.store(scaled, p.queries, chunk.index * kChunk, channel, head);
        block.map(x, k, times);
        block.store(x, p.keys, chunk.index * kChunk, channel, head);
        block.load(x, memory.more_factors);
        block.map(x, k, times);
        block.store(x, p.keys_after, chunk.index * kChunk, channel, head);
        block.parallel(kSlice, [&](int n) {
          p.whole[(static_cast<i64>(head) * p.chunks + chunk.index) * p.queries.cols + channel + n] = memory.factors.at(kChunk - 1, n);
        });
        block.sync();
        block.store(diagonal, memory.diagonal);
      }
      block.sync();
      block.for_each(weights, [&](int row, int col, auto& value) {
        if (row == col) value = memory.diagonal[row];
      });
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
    static constexpr auto times = [](auto x, auto y) { return x * to<float>(y); };
    static constexpr auto multiply = [](auto, auto x, auto y) { return to<float>(x) * to<float>(y); };

    /// Adds the products of the levels to A, without beta, and P: two levels at a time.
    TW_INLINE static void add_levels(auto& block, Square& a, Square& weights, Memory& memory) {
      TW_NO_UNROLL
      for (int level = 0; level < kLevels; level += 2) {
        if (level == 0)
          put_factors<0>(block, memory);
        else if (level == 2)
          put_factors<2>(block, memory);
        else
          put_factors<4>(block, memory);
        Held q, k;
        block.load(q, memory.q);
        block.load(k, memory.k);
        scale(block, q, k, memory.factors, memory.scaled_q, memory.scaled_k);
        scale(block, q, k, memory.more_factors, memory.more_scaled_q, memory.more_scaled_k);
        block.fence();
        block.sync();
        add_products(block, a, weights, memory.scaled_q, memory.scaled_k, 1 << level);
        add_products(block, a, weights, memory.more_scaled_q, memory.more_scaled_k, 2 << level);
        block.sync();
      }
    }
    /// The factors of a level, and of the next one. Of kLevels, exp(G) and exp(G_last - G).
    template <int level>
    TW_INLINE static void put_factors(auto& block, Memory& memory) {
      using X = remove_const_reference<decltype(memory.decays.at(0, 0) * 1.0f)>;
      block.update(
          kRuns * kSlice,
          [&](int n) {
            const int channel = n % kSlice, run = n / kSlice, token = run * kRun;
            const auto put_in = [&](const auto& factors) { return [&](int i, X factor) { factors.at(token + i, channel) = factor; }; };
            const auto beside = [&](int runs, bool before) { return decay_beside<kSlice>(memory.totals, run, channel, runs, before); };
            X decays[kRun];
            TW_UNROLL
            for (int i = 0; i < kRun; ++i) decays[i] = memory.decays.at(token + i, channel);
            if constexpr (level == 0) {
              X whole = 1.0f;
              since_first(decays, 0, kRun, X(1.0f), [&](int, X factor) { whole = factor; });
              memory.totals[n] = whole;
            }
            if constexpr (level == kLevels) {
              since_first(decays, 0, kRun, beside(kRuns, true), put_in(memory.factors));
              until_last(decays, 0, kRun, beside(kRuns, false), put_in(memory.more_factors));
            } else {
              put_level<(1 << level)>(decays, token, put_in(memory.factors), beside);
              put_level<(2 << level)>(decays, token, put_in(memory.more_factors), beside);
            }
          },
          memory.decays, memory.factors, memory.more_factors);
    }
    template <int half, class X>
    TW_INLINE static void put_level(const X (&decays)[kRun], int token, auto put, auto beside) {
      if constexpr (half < kRun) {
        TW_UNROLL
        for (int first = 0; first < kRun; first += 2 * half) {
          until_last(decays, first, half, X(1.0f), put);
          since_first(decays, first + half, half, X(1.0f), put);
        }
      } else {
        if ((token & half) != 0)
          since_first(decays, 0, kRun, beside(half / kRun, true), put);
        else
          until_last(decays, 0, kRun, beside(half / kRun, false), put);
      }
    }
    /// Queries and keys times a level's factors.
    TW_INLINE static void scale(auto& block, const Held& q, const Held& k, const auto& factors, const auto& scaled_q,
                                const auto& scaled_k) {
      Tokens factor, scaled;
      block.load(factor, factors);
      block.map(scaled, q, factor, multiply);
      block.store(scaled, scaled_q);
      block.map(factor, k, times);
      block.store(factor, scaled_k);
    }
    TW_INLINE static void add_products(auto& block, Square& a, Square& weights, const auto& q, const auto& k, int half) {
      Square of_keys, of_queries;
      block.mma(of_keys, k, k, true);
      block.mma(of_queries, q, k, true);
      const auto add_level = [half](int row, int col, auto& sum, auto& product) {
        if (couples_blocks(row, col, half)) sum = sum + product;
      };
      block.wait(leave<1>, of_keys);
      block.for_each(a, of_keys, add_level);
      block.wait(leave<0>, of_queries);
      block.for_each(weights, of_queries, add_level);
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
      InversionMemory<Target, kChunk> inversion;
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
