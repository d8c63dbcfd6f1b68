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
// counts. Exponents are sums of gates between m and a token, not differences of sums from the chunk's start, which would cancel.

namespace tw::kernels::gated_delta {

inline constexpr const char* kChannelsSource = "kernels/gated_delta/channels.tile.hpp";

/// Channels that PrepareChannels does at a time.
inline constexpr int kSlice = 64;

/// sums(i) = the sum of the gates of tokens first to i, for i from `first` to end - 1.
TW_INLINE void sum_up_to(const auto& gates, const auto& sums, int channel, int first, int end) {
  decltype(gates.at(0, 0) + 0.0f) sum = 0.0f;
  TW_NO_UNROLL
  for (int i = first; i < end; ++i) {
    sum = sum + gates.at(i, channel);
    sums.at(i, channel) = sum;
  }
}
/// sums(i) = the sum of the gates of tokens i + 1 to end - 1.
TW_INLINE void sum_after(const auto& gates, const auto& sums, int channel, int first, int end) {
  decltype(gates.at(0, 0) + 0.0f) sum = 0.0f;
  TW_NO_UNROLL
  for (int i = end - 1; i >= first; --i) {
    sums.at(i, channel) = sum;
    sum = sum + gates.at(i, channel);
  }
}
/// The exponents of a level: up to each token of a second block, after each token of a first one.
TW_INLINE void sum_of_level(auto& block, const auto& gates, const auto& sums, int half) {
  constexpr int channels = remove_const_reference<decltype(sums)>::cols;
  block.update(sums, kChunk / (2 * half) * channels, [&](int n) {
    const int channel = n % channels, first = n / channels * 2 * half;
    sum_after(gates, sums, channel, first, first + half);
    sum_up_to(gates, sums, channel, first + half, first + 2 * half);
  });
}
/// Whether a pair is in a level.
TW_INLINE bool in_level(int row, int col, int half) { return row > col && ((row ^ col) & ~(half - 1)) == half; }

/// Gates of a chunk's tokens, in a Buffer; those of tokens after the last one are 0.
TW_INLINE void load_gates(auto& block, auto& fragment, const auto& from, const auto& chunk, int channel, int head, const auto& gates) {
  block.load(fragment, from, chunk.first, channel, head, chunk.batch);
  block.for_each(fragment, [&](int row, int, auto& gate) {
    if (gate < kLowestGate) gate = kLowestGate;
    if (row >= chunk.size) gate = 0.0f;
  });
  block.store(fragment, gates);
  block.sync();
}

/// Of each chunk and head: the inverse of I + A, P, and the operands of the chunk's other products, exp(G) K, exp(G) Q and
/// exp(G_last - G) K. Tokens after the chunk's last one get a beta and operands of 0. A step is kSlice channels.
template <class T, class Beta>
struct PrepareChannels {
  static constexpr const char* source = kChannelsSource;

  template <class Target>
  struct On {
    static constexpr int rows = kChunk;
    static constexpr int min_blocks = 2;  // chains of short steps: another block runs meanwhile
    static constexpr bool moves_registers = true;
    using Tokens = Shared<Target, T, kChunk, kSlice>;
    struct Params {
      Global<Target, const T, Tokens> q, k;         ///< [batch, head of keys, token, dim]
      Global<Target, const float> gates;            ///< [batch, head, token, dim]
      Global<Target, const Beta> betas;             ///< [batch, token, head]
      Global<Target, T> queries, keys, keys_after;  ///< [head, chunk * 64, dim]: exp(G) Q, exp(G) K, exp(G_last - G) K
      Global<Target, float> whole;                  ///< [head, chunk, dim]: exp(G_last)
      Global<Target, T> inverses, weights;          ///< [head, chunk * 64, 64]: of I + A; P
      Global<Target, float> scale;                  ///< [chunk * 64, head]: beta
      Sequences<Target> sequences;
      int group;  ///< heads that share a key
    };
    struct Work {
      typename Sequences<Target>::Chunk chunk;
      int head;
    };
    struct Slot {
      Tokens q, k;
    };
    struct Memory {
      Ring<Target, Slot, 1> slots;
      Buffer<Target, float, kChunk, kSlice> gates, sums;
      Buffer<Target, T, kChunk, kSlice> q, k;
      explicit constexpr Memory(auto& block) : slots(block), gates(block), sums(block), q(block), k(block) {}
    };
    struct State {};
    TW_INLINE static Work work(const Params& p, Tile t) { return {p.sequences.chunk(t), t.batch}; }
    TW_INLINE static int steps(const Params& p, const Work& w) { return w.chunk.size > 0 ? ceil_div(p.queries.cols, kSlice) : 0; }
    TW_INLINE static void load(auto& producer, const Params& p, const Work& w, int step, Memory& memory) {
      const int head = static_cast<int>(static_cast<u32>(w.head) / static_cast<u32>(p.group));
      producer.put(memory.slots, [&](auto copy, Slot& slot) {
        copy.tile(p.q, slot.q, w.chunk.first, step * kSlice, head, w.chunk.batch);
        copy.tile(p.k, slot.k, w.chunk.first, step * kSlice, head, w.chunk.batch);
      });
    }
    TW_INLINE static void compute(auto& block, const Params& p, const Work& w, Memory& memory, State&) {
      if (w.chunk.size <= 0) return;
      const int size = w.chunk.size, of_chunk = w.chunk.index * kChunk, n = steps(p, w);
      const auto hide_others = [&](auto& tile) {
        block.for_each(tile, [&](int row, int, auto& value) {
          if (row >= size) value = 0.0f;
        });
      };
      Square a, weights;
      block.fill(a, 0.0f);
      block.fill(weights, 0.0f);
      TW_NO_UNROLL
      for (int step = 0; step < n; ++step) {
        const int channel = step * kSlice;
        Slot& slot = block.take(memory.slots);
        Square factors;
        load_gates(block, factors, p.gates, w.chunk, channel, w.head, memory.gates);
        // The tokens' queries with their own keys.
        add_products(block, weights, slot.q, slot.k, [](int row, int col) { return row == col; });
        TW_NO_UNROLL
        for (int half = kChunk / 2; half > 0; half /= 2) {
          const auto level = [half](int row, int col) { return in_level(row, col, half); };
          sum_of_level(block, memory.gates, memory.sums, half);
          load_factors(block, factors, memory.sums);
          Square scaled;
          scale(block, scaled, slot.q, factors);
          block.store(scaled, memory.q);
          scale(block, scaled, slot.k, factors);
          share(block, scaled, memory.k);
          add_products(block, a, memory.k, memory.k, level);
          add_products(block, weights, memory.q, memory.k, level);
        }
        block.update(memory.sums, kSlice, [&](int c) { sum_up_to(memory.gates, memory.sums, c, 0, kChunk); });
        load_factors(block, factors, memory.sums);
        Square scaled;
        scale(block, scaled, slot.q, factors);
        hide_others(scaled);
        block.store(scaled, p.queries, of_chunk, channel, w.head);
        scale(block, scaled, slot.k, factors);
        hide_others(scaled);
        block.store(scaled, p.keys, of_chunk, channel, w.head);
        block.scatter(
            factors, p.whole, [&](int row) { return row == kChunk - 1 ? w.chunk.index : -1; }, channel, w.head);
        block.sync();
        block.update(memory.sums, kSlice, [&](int c) { sum_after(memory.gates, memory.sums, c, 0, kChunk); });
        load_factors(block, factors, memory.sums);
        scale(block, scaled, slot.k, factors);
        hide_others(scaled);
        block.store(scaled, p.keys_after, of_chunk, channel, w.head);
        block.sync();
        block.release(memory.slots);
      }
      hide_others(weights);
      block.store(weights, p.weights, of_chunk, 0, w.head);
      RowVector<Target, float, Square> beta;
      block.load(beta, p.betas, w.chunk.first, w.head, w.chunk.batch);
      block.for_rows(beta, [&](int row, int, auto& value) {
        if (row >= size) value = 0.0f;
      });
      block.store(beta, p.scale, of_chunk, w.head);
      block.map(a, beta, [](auto value, auto b) { return value * b; });
      hide_others(a);
      block.store(a, memory.sums);
      block.sync();
      invert_unit_lower(block, memory.sums);
      block.load(a, memory.sums);
      block.store(a, p.inverses, of_chunk, 0, w.head);
    }
    TW_INLINE static void finish(auto&, const Params&, const Work&, Memory&, State&) {}

   private:
    using Square = Fragment<Target, float, kChunk, kChunk>;  // tokens by tokens, or by channels
    static_assert(kSlice == kChunk);

    TW_INLINE static void load_factors(auto& block, Square& factors, const auto& sums) {
      block.load(factors, sums);
      block.map(factors, [](auto sum) { return exp(sum); });
    }
    TW_INLINE static void scale(auto& block, Square& scaled, Tokens& tokens, Square& factors) {
      block.load(scaled, tokens);
      block.map(scaled, factors, [](auto x, auto factor) { return x * factor; });
    }
    /// Adds those elements of left right^T that `wanted(row, col)` holds for.
    TW_INLINE static void add_products(auto& block, Square& sum, const auto& left, const auto& right, auto wanted) {
      Square product;
      block.mma(product, left, right, true);
      block.wait(leave<0>, product);
      block.for_each(sum, product, [&](int row, int col, auto& x, auto& y) {
        if (wanted(row, col)) x = x + y;
      });
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
