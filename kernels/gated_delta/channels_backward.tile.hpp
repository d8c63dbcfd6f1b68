#pragma once

#include "kernels/gated_delta/channels.tile.hpp"

// The gradients of the gated delta rule with gates of channels. With the names of channels.tile.hpp, dO scaled as O is, D the gradient of
// the state after a chunk, and products of vectors elementwise:
//
//   dU = P^T dO + (exp(G_last - G) K) D        Y = inverse^T dU
//   gradient of S = exp(G_last) D + (exp(G) Q)^T dO - (beta exp(G) K)^T Y
//
// With W(i, j) = dO_i U_j for j <= i and X(i, j) = -Y_i U_j for j < i, sums over pairs being those of the levels of PrepareChannels:
//
//   Z_i = -exp(G_i) (S Y_i) + sum over j of X(i, j) exp(G_i - G_j) k_j            dV = beta Y      dbeta = rows of Y V + K Z
//   dQ_i = exp(G_i) (S dO_i) + sum over j of W(i, j) exp(G_i - G_j) k_j
//   M_j = exp(G_last - G_j) (D U_j) + sum over i of exp(G_i - G_j) (W(i, j) q_i + beta_i X(i, j) k_i)      dK = beta Z + M
//
// The gradient of G is Q dQ + K (beta Z - M); that of G_last also gets K exp(G_last - G) (D U) of all tokens and exp(G_last) S D. Gates'
// gradients are sums from the chunk's end.

namespace tw::kernels::gated_delta {

inline constexpr const char* kChannelsBackwardSource = "kernels/gated_delta/channels_backward.tile.hpp";

/// Dimensions of keys and of values that the gradients' kernels have tiles for.
inline constexpr int kMostChannels = 128;
/// Channels that ChannelGradients does at a time: it holds five tiles of them in registers.
inline constexpr int kNarrowSlice = 32;

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

/// WalkChannels without outputs: the state before each chunk, and the chunk's U. Rows of U after a sequence's last token are 0.
template <class T, int D, int Slice, int Stages>
struct StatesChannels {
  static constexpr const char* source = kChannelsBackwardSource;

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
      Global<Target, const T, Tokens> keys, keys_after;  ///< [head, chunk * 64, D]
      Global<Target, const T, Values> v;                 ///< [batch, head, token, dim]
      Global<Target, const T, Matrix> inverses;          ///< [head, chunk * 64, 64]
      Global<Target, const float, OfChannels> whole;     ///< [head, chunk, D]
      Global<Target, const float, OfTokens> scale;       ///< [head, chunk * 64]
      Global<Target, const float> initial_state;         ///< [sequence, head, dim of keys, dim of values], or none
      Global<Target, T> states;                          ///< [chunk, head, dim of keys, dim of values]
      Global<Target, T> updates;                         ///< [head, chunk * 64, dim of values]
      Sequences<Target> sequences;
      int group;
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
      Ring<Target, Matrix, 1> inverses;
      Buffer<Target, T, D, Slice, Contract::rows> state;
      Buffer<Target, T, kChunk, Slice, Contract::rows> updates;
      explicit constexpr Memory(auto& block) : keys(block), inverses(block), state(block), updates(block) {}
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
      producer.put(memory.inverses, [&](auto copy, Matrix& inverse) { copy.tile(p.inverses, inverse, of_chunk, 0, w.head); });
    }
    TW_INLINE static void compute(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      using Part = Fragment<Target, float, kChunk, Slice, warpgroups>;
      if (p.initial_state.cols > 0)
        block.load(state.s, p.initial_state, 0, w.col, w.head, w.n);
      else
        block.fill(state.s, 0.0f);
      const int n = steps(p, w);
      for (int step = 0; step < n; ++step) {
        const int chunk = w.sequence.first_chunk + step, size = w.sequence.size - step * kChunk;
        Slot& slot = block.take(memory.keys);
        RowVector<Target, float, Part> scale;
        RowVector<Target, float, decltype(state.s)> whole;
        block.load(scale, slot.scale);
        block.load(whole, slot.whole);

        block.store(state.s, p.states, 0, w.col, w.head, chunk);
        share(block, state.s, memory.state);
        Part old, updates;
        block.mma(old, slot.k, memory.state, true);
        block.load(updates, slot.v);
        block.wait(leave<0>, old);
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
        block.wait(leave<0>, updates);
        block.release(memory.inverses);
        block.store(updates, p.updates, chunk * kChunk, w.col, w.head);
        block.sync();
        share(block, updates, memory.updates);
        block.map(state.s, whole, [](auto value, auto decay) { return value * decay; });
        block.mma(state.s, view<Contract::rows>(slot.k_after), memory.updates, false);
        block.wait(leave<0>, state.s);
        block.sync();
        block.release(memory.keys);
      }
    }
    TW_INLINE static void finish(auto&, const Params&, const Work&, Memory&, State&) {}
  };
};

/// From a sequence's last chunk to its first, a slice of values: the gradient D of the state after each chunk, and the chunk's Y. Rows of Y
/// after a sequence's last token are 0.
template <class T, int D, int Slice, int Stages>
struct StateGradientsChannels {
  static constexpr const char* source = kChannelsBackwardSource;

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
      Global<Target, const T, Values> d_o;                        ///< [batch, head, token, dim]
      Global<Target, const T, Matrix> inverses, weights;          ///< [head, chunk * 64, 64]
      Global<Target, const float, OfChannels> whole;              ///< [head, chunk, D]
      Global<Target, const float, OfTokens> scale;                ///< [head, chunk * 64]
      Global<Target, const float> d_final_state;                  ///< [sequence, head, dim of keys, dim of values], or none
      Global<Target, float> d_initial_state;                      ///< the same
      Global<Target, T> d_states;                                 ///< [chunk, head, dim of keys, dim of values]
      Global<Target, T> y;                                        ///< [head, chunk * 64, dim of values]
      Sequences<Target> sequences;
      int group;
      float factor;
    };
    struct Work {
      typename Sequences<Target>::Sequence sequence;
      int n, head, col;
    };
    struct Slot {
      Tokens k_after;
      Values d_o;
      Matrix weights, inverse;
      OfChannels whole;
      OfTokens scale;
    };
    struct Memory {
      Ring<Target, Slot, Stages> slots;
      Ring<Target, Tokens, Stages> tokens;  ///< exp(G) Q, then exp(G) K
      Buffer<Target, T, D, Slice, Contract::rows> state;
      Buffer<Target, T, kChunk, Slice, Contract::rows> d_o, updates;
      explicit constexpr Memory(auto& block) : slots(block), tokens(block), state(block), d_o(block), updates(block) {}
    };
    struct State {
      Fragment<Target, float, D, Slice, warpgroups> d;
    };
    TW_INLINE static Work work(const Params& p, Tile t) { return {p.sequences.at(t.m), t.m, t.batch, t.n * Slice}; }
    TW_INLINE static int chunks(const Work& w) { return ceil_div(w.sequence.size, kChunk); }
    /// Two for each chunk: everything but the keys, then the keys.
    TW_INLINE static int steps(const Params&, const Work& w) { return 2 * chunks(w); }
    TW_INLINE static void load(auto& producer, const Params& p, const Work& w, int step, Memory& memory) {
      const int in_sequence = chunks(w) - 1 - step / 2, chunk = w.sequence.first_chunk + in_sequence, of_chunk = chunk * kChunk;
      if (step % 2 == 1) {
        producer.put(memory.tokens, [&](auto copy, Tokens& k) { copy.tile(p.keys, k, of_chunk, 0, w.head); });
        return;
      }
      producer.put(memory.slots, [&](auto copy, Slot& slot) {
        copy.tile(p.keys_after, slot.k_after, of_chunk, 0, w.head);
        copy.tile(p.d_o, slot.d_o, w.sequence.begin + in_sequence * kChunk, w.col, w.head, w.sequence.batch);
        copy.tile(p.weights, slot.weights, of_chunk, 0, w.head);
        copy.tile(p.inverses, slot.inverse, of_chunk, 0, w.head);
        copy.vector(p.whole, slot.whole, chunk, 0, w.head);
        copy.vector(p.scale, slot.scale, w.head, of_chunk);
      });
      producer.put(memory.tokens, [&](auto copy, Tokens& q) { copy.tile(p.queries, q, of_chunk, 0, w.head); });
    }
    TW_INLINE static void compute(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      using Part = Fragment<Target, float, kChunk, Slice, warpgroups>;
      if (p.d_final_state.cols > 0)
        block.load(state.d, p.d_final_state, 0, w.col, w.head, w.n);
      else
        block.fill(state.d, 0.0f);
      const float factor = p.factor;
      for (int n = chunks(w) - 1; n >= 0; --n) {
        const int chunk = w.sequence.first_chunk + n, size = w.sequence.size - n * kChunk;
        Slot& slot = block.take(memory.slots);
        RowVector<Target, float, Part> scale;
        RowVector<Target, float, decltype(state.d)> whole;
        block.load(scale, slot.scale);
        block.load(whole, slot.whole);

        block.store(state.d, p.d_states, 0, w.col, w.head, chunk);
        block.store(state.d, memory.state);
        {
          Part d_o;
          block.load(d_o, slot.d_o);
          block.map(d_o, [factor](auto value) { return value * factor; });
          // The rows after a sequence's last token may be another sequence's, and NaN.
          if (size < kChunk) {
            block.for_each(d_o, [&](int row, int, auto& value) {
              if (row >= size) value = 0.0f;
            });
          }
          share(block, d_o, memory.d_o);
        }
        Part y;
        block.mma(y, slot.k_after, memory.state, true);
        block.mma(y, view<Contract::rows>(slot.weights), memory.d_o, false);
        block.wait(leave<0>, y);
        share(block, y, memory.updates);
        block.mma(y, view<Contract::rows>(slot.inverse), memory.updates, true);
        block.map(state.d, whole, [](auto value, auto decay) { return value * decay; });
        block.wait(leave<0>, y);
        block.store(y, p.y, chunk * kChunk, w.col, w.head);
        block.map(y, scale, [](auto value, auto b) { return -b * value; });
        block.sync();
        share(block, y, memory.updates);
        const Tokens& q = block.take(memory.tokens);
        block.mma(state.d, view<Contract::rows>(q), memory.d_o, false);
        block.wait(leave<0>, state.d);
        block.release(memory.tokens);
        const Tokens& k = block.take(memory.tokens);
        block.mma(state.d, view<Contract::rows>(k), memory.updates, false);
        block.wait(leave<0>, state.d);
        block.sync();
        block.release(memory.tokens);
        block.release(memory.slots);
      }
    }
    TW_INLINE static void finish(auto& block, const Params& p, const Work& w, Memory&, State& state) {
      if (p.d_initial_state.cols > 0) block.store(state.d, p.d_initial_state, 0, w.col, w.head, w.n);
    }
  };
};

/// The products of a chunk and head that sum over values: S dO, -S Y, D U, W, X, rows of Y V, rows of S D; and dV.
template <class T, int TokenStages>
struct ValueGradients {
  static constexpr const char* source = kChannelsBackwardSource;

  template <class Target>
  struct On {
    static constexpr int D = kMostChannels;
    static constexpr int rows = 128;
    static constexpr int warpgroups = rows / 64;
    using Tokens = Shared<Target, T, kChunk, D>;
    using Matrix = Shared<Target, T, D, D>;
    using Square = Fragment<Target, float, kChunk, kChunk, warpgroups>;
    using Part = Fragment<Target, float, kChunk, D, warpgroups>;
    struct Params {
      Global<Target, const T> v;                          ///< [batch, head, token, dim]
      Global<Target, const T, Tokens> d_o;                ///< the same
      Global<Target, const T, Tokens> updates, y;         ///< [head, chunk * 64, dim of values]
      Global<Target, const T, Matrix> states, d_states;   ///< [chunk, head, dim of keys, dim of values]
      Global<Target, const T> state, d_state;             ///< the same
      Global<Target, const float> scale;                  ///< [chunk * 64, head]
      Global<Target, T> d_queries, d_keys, d_keys_after;  ///< [head, chunk * 64, dim]: S dO, -S Y, D U
      Global<Target, T> w, x;                             ///< [head, chunk * 64, 64]
      Global<Target, T> dv;                               ///< [batch, head, token, dim]
      Global<Target, float> values_y;                     ///< [chunk * 64, head]: rows of Y V
      Global<Target, float> d_whole;                      ///< [chunk * D, head]: rows of S D
      Sequences<Target> sequences;
      int group;
      float factor;
    };
    struct Work {
      typename Sequences<Target>::Chunk chunk;
      int head;
    };
    struct Memory {
      Ring<Target, Tokens, TokenStages> tokens;
      Ring<Target, Matrix, 1> states;
      RowExchange<Target, float, Part> exchange;
      explicit constexpr Memory(auto& block) : tokens(block), states(block), exchange(block) {}
    };
    struct State {};
    TW_INLINE static Work work(const Params& p, Tile t) { return {p.sequences.chunk(t), t.batch}; }
    /// Operands in the order of their use: dO and S, Y, U, D.
    TW_INLINE static int steps(const Params&, const Work& w) { return w.chunk.size > 0 ? 4 : 0; }
    TW_INLINE static void load(auto& producer, const Params& p, const Work& w, int step, Memory& memory) {
      const auto& c = w.chunk;
      if (step < 3) {
        producer.put(memory.tokens, [&](auto copy, Tokens& tile) {
          if (step == 0) copy.tile(p.d_o, tile, c.first, 0, w.head, c.batch);
          if (step == 1) copy.tile(p.y, tile, c.index * kChunk, 0, w.head);
          if (step == 2) copy.tile(p.updates, tile, c.index * kChunk, 0, w.head);
        });
      }
      if (step == 0) producer.put(memory.states, [&](auto copy, Matrix& s) { copy.tile(p.states, s, 0, 0, w.head, c.index); });
      if (step == 3) producer.put(memory.states, [&](auto copy, Matrix& d) { copy.tile(p.d_states, d, 0, 0, w.head, c.index); });
    }
    TW_INLINE static void compute(auto& block, const Params& p, const Work& work, Memory& memory, State&) {
      const auto& c = work.chunk;
      const int size = c.size, of_chunk = c.index * kChunk;
      const float factor = p.factor;
      if (size <= 0) return;
      const auto token_of = [&](int row) { return row < size ? c.first + row : -1; };
      Tokens& d_o = block.take(memory.tokens);
      const Matrix& s = block.take(memory.states);
      if (size < kChunk) block.zero_rows(d_o, size);
      Part part, values;
      block.mma(part, d_o, s, true);
      block.wait(leave<0>, part);
      block.map(part, [factor](auto value) { return value * factor; });
      block.store(part, p.d_queries, of_chunk, 0, work.head);
      Tokens& y = block.take(memory.tokens);
      block.mma(part, y, s, true);
      block.wait(leave<0>, part);
      block.release(memory.states);
      block.map(part, [](auto value) { return -value; });
      block.store(part, p.d_keys, of_chunk, 0, work.head);
      const Tokens& u = block.take(memory.tokens);
      Square square;
      block.mma(square, d_o, u, true);
      block.wait(leave<0>, square);
      block.release(memory.tokens);
      block.for_each(square, [factor](int row, int col, auto& value) { value = col > row ? 0.0f : value * factor; });
      block.store(square, p.w, of_chunk, 0, work.head);
      block.mma(square, y, u, true);
      block.wait(leave<0>, square);
      block.for_each(square, [](int row, int col, auto& value) { value = col >= row ? 0.0f : -value; });
      block.store(square, p.x, of_chunk, 0, work.head);
      // Y V, and dV.
      block.load(part, y);
      block.release(memory.tokens);
      RowVector<Target, float, Part> of_tokens, beta;
      block.load(values, p.v, c.first, 0, work.head, c.batch);
      block.map(values, part, [](auto v, auto g) { return v * g; });
      block.row_sum(values, of_tokens, memory.exchange);
      block.store(of_tokens, p.values_y, of_chunk, work.head);
      block.load(beta, p.scale, of_chunk, work.head);
      block.map(part, beta, [](auto g, auto b) { return g * b; });
      block.scatter(part, p.dv, token_of, 0, work.head, c.batch);
      const Matrix& d = block.take(memory.states);
      block.mma(part, u, d, true);
      block.wait(leave<0>, part);
      block.release(memory.tokens);
      block.release(memory.states);
      block.store(part, p.d_keys_after, of_chunk, 0, work.head);
      TW_NO_UNROLL
      for (int row = 0; row < D; row += kChunk) {
        block.load(part, p.state, row, 0, work.head, c.index);
        block.load(values, p.d_state, row, 0, work.head, c.index);
        block.map(part, values, [](auto a, auto b) { return a * b; });
        block.row_sum(part, of_tokens, memory.exchange);
        block.store(of_tokens, p.d_whole, c.index * D + row, work.head);
      }
    }
    TW_INLINE static void finish(auto&, const Params&, const Work&, Memory&, State&) {}
  };
};

/// dQ, dK, dbeta and dg of a chunk and head from what ValueGradients leaves. A step is kNarrowSlice channels.
template <class T, class Beta>
struct ChannelGradients {
  static constexpr const char* source = kChannelsBackwardSource;

  template <class Target>
  struct On {
    static constexpr int rows = kChunk;
    using Tokens = Shared<Target, T, kChunk, kNarrowSlice>;
    static constexpr int min_blocks = 2;  // chains of short steps: another block runs meanwhile
    static constexpr bool moves_registers = true;
    using Square = Fragment<Target, float, kChunk, kChunk>;
    using Part = Fragment<Target, float, kChunk, kNarrowSlice>;
    struct Params {
      Global<Target, const T, Tokens> q, k;                     ///< [batch, head of keys, token, dim]
      Global<Target, const float> gates;                        ///< [batch, head, token, dim]
      Global<Target, const float> scale;                        ///< [chunk * 64, head]: beta
      Global<Target, const T> d_queries, d_keys, d_keys_after;  ///< [head, chunk * 64, dim]: S dO, -S Y, D U
      Global<Target, const T> w, x;                             ///< [head, chunk * 64, 64]
      Global<Target, const float> values_y;                     ///< [chunk * 64, head]: rows of Y V
      Pointer<Target, const float> whole, d_whole;              ///< [head, chunk, kMostChannels]: exp(G_last), rows of S D
      Global<Target, T> dq, dk;                                 ///< [batch, head, token, dim]
      Global<Target, Beta> d_beta;                              ///< [batch, token, head]
      Global<Target, float> dg;                                 ///< [batch, head, token, dim], or none
      Sequences<Target> sequences;
      int group;   ///< heads that share a key
      int chunks;  ///< of all sequences
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
      Buffer<Target, float, kChunk, kNarrowSlice> gates, sums;
      Buffer<Target, T, kChunk, kNarrowSlice> q, k;
      Buffer<Target, T, kChunk, kChunk> w, x, scaled_x;
      explicit constexpr Memory(auto& block)
          : slots(block), gates(block), sums(block), q(block), k(block), w(block), x(block), scaled_x(block) {}
    };
    struct State {};
    TW_INLINE static Work work(const Params& p, Tile t) { return {p.sequences.chunk(t), t.batch}; }
    TW_INLINE static int steps(const Params& p, const Work& w) { return w.chunk.size > 0 ? ceil_div(p.k.cols, kNarrowSlice) : 0; }
    TW_INLINE static void load(auto& producer, const Params& p, const Work& w, int step, Memory& memory) {
      const int head = static_cast<int>(static_cast<u32>(w.head) / static_cast<u32>(p.group));
      producer.put(memory.slots, [&](auto copy, Slot& slot) {
        copy.tile(p.q, slot.q, w.chunk.first, step * kNarrowSlice, head, w.chunk.batch);
        copy.tile(p.k, slot.k, w.chunk.first, step * kNarrowSlice, head, w.chunk.batch);
      });
    }
    TW_INLINE static void compute(auto& block, const Params& p, const Work& work, Memory& memory, State&) {
      const auto& c = work.chunk;
      const int size = c.size, of_chunk = c.index * kChunk, n = steps(p, work);
      if (size <= 0) return;
      const auto token_of = [&](int row) { return row < size ? c.first + row : -1; };
      RowVector<Target, float, Square> beta, d_beta, diagonal;
      block.load(beta, p.scale, of_chunk, work.head);
      block.load(d_beta, p.values_y, of_chunk, work.head);
      {
        Square w;
        block.load(w, p.w, of_chunk, 0, work.head);
        block.for_each(w, [](int row, int col, auto& value) {
          if (row != col) value = 0.0f;
        });
        block.rows(w, [&](int i, auto row) { diagonal[i] = row.sum(); });
      }
      TW_NO_UNROLL
      for (int step = 0; step < n; ++step) {
        const int channel = step * kNarrowSlice;
        Slot& slot = block.take(memory.slots);
        Part dq, z, m, t, factors;
        load_gates(block, t, p.gates, c, channel, work.head, memory.gates);
        block.fill(dq, 0.0f);
        block.fill(z, 0.0f);
        block.fill(m, 0.0f);
        const auto add = [](auto sum, auto product, auto factor) { return sum + factor * product; };
        TW_NO_UNROLL
        for (int half = kChunk / 2; half > 0; half /= 2) {
          const auto keep_level = [half](int row, int col, auto& value) {
            if (!couples_blocks(row, col, half)) value = 0.0f;
          };
          sum_of_level(block, memory.gates, memory.sums, half);
          load_factors(block, factors, memory.sums);
          load_tokens(block, t, slot.q, size);
          block.map(t, factors, [](auto x, auto factor) { return x * factor; });
          block.store(t, memory.q);
          load_tokens(block, t, slot.k, size);
          block.map(t, factors, [](auto x, auto factor) { return x * factor; });
          block.store(t, memory.k);
          Square pairs;
          block.load(pairs, p.w, of_chunk, 0, work.head);
          block.for_each(pairs, keep_level);
          block.store(pairs, memory.w);
          block.load(pairs, p.x, of_chunk, 0, work.head);
          block.for_each(pairs, keep_level);
          block.store(pairs, memory.x);
          block.map(pairs, beta, [](auto x, auto b) { return x * b; });
          share(block, pairs, memory.scaled_x);
          block.mma(t, memory.w, view<Contract::rows>(memory.k), true);
          block.wait(leave<0>, t);
          block.map(dq, t, factors, add);
          block.mma(t, memory.x, view<Contract::rows>(memory.k), true);
          block.wait(leave<0>, t);
          block.map(z, t, factors, add);
          block.mma(t, view<Contract::rows>(memory.w), view<Contract::rows>(memory.q), true);
          block.mma(t, view<Contract::rows>(memory.scaled_x), view<Contract::rows>(memory.k), false);
          block.wait(leave<0>, t);
          block.map(m, t, factors, add);
        }
        block.update(memory.sums, kNarrowSlice, [&](int i) { sum_up_to(memory.gates, memory.sums, i, 0, kChunk); });
        load_factors(block, factors, memory.sums);
        block.load(t, p.d_queries, of_chunk, channel, work.head);
        block.map(dq, t, factors, add);
        block.load(t, p.d_keys, of_chunk, channel, work.head);
        block.map(z, t, factors, add);
        block.sync();
        block.update(memory.sums, kNarrowSlice, [&](int i) { sum_after(memory.gates, memory.sums, i, 0, kChunk); });
        load_factors(block, factors, memory.sums);
        block.load(t, p.d_keys_after, of_chunk, channel, work.head);
        block.map(t, factors, [](auto g, auto factor) { return g * factor; });
        block.map(m, t, [](auto sum, auto more) { return sum + more; });
        // Of G_last, then of each G. The gates have been used.
        Part x;
        load_tokens(block, x, slot.k, size);
        block.map(t, x, [](auto g, auto key) { return g * key; });
        block.sync();
        block.store(t, memory.gates);
        block.map(x, z, [](auto key, auto g) { return key * g; });
        RowVector<Target, float, Part> along;
        block.rows(x, [&](int i, auto row) { along[i] = row.sum(); });
        block.for_rows(d_beta, [&](int, int i, auto& sum) { sum = sum + along[i]; });
        block.map(z, beta, [](auto g, auto b) { return g * b; });
        load_tokens(block, x, slot.k, size);
        load_tokens(block, t, slot.q, size);
        block.map(t, dq, [](auto query, auto g) { return query * g; });
        block.map(t, x, z, m, [](auto sum, auto key, auto plus, auto minus) { return sum + key * (plus - minus); });
        block.store(t, memory.sums);
        // A token's query with its own key has no decay.
        block.map(dq, x, diagonal, [](auto sum, auto key, auto w) { return sum + w * key; });
        block.scatter(dq, p.dq, token_of, channel, work.head, c.batch);
        load_tokens(block, t, slot.q, size);
        block.map(m, t, diagonal, [](auto sum, auto query, auto w) { return sum + w * query; });
        block.map(m, z, [](auto minus, auto plus) { return minus + plus; });
        block.scatter(m, p.dk, token_of, channel, work.head, c.batch);
        block.sync();
        if (p.dg.cols > 0) {
          sum_gradients(block, p, memory, c.index, channel, work.head);
          block.load(t, memory.sums);
          block.scatter(t, p.dg, token_of, channel, work.head, c.batch);
        }
        block.sync();
        block.release(memory.slots);
      }
      auto d_betas = p.d_beta;
      d_betas.rows = c.first + size;
      block.store(d_beta, d_betas, c.first, work.head, c.batch);
    }
    TW_INLINE static void finish(auto&, const Params&, const Work&, Memory&, State&) {}

   private:
    TW_INLINE static void load_factors(auto& block, Part& factors, const auto& sums) {
      block.load(factors, sums);
      block.map(factors, [](auto sum) { return exp(sum); });
    }
    /// Rows after a sequence's last token may hold anything.
    TW_INLINE static void load_tokens(auto& block, Part& to, Tokens& tokens, int size) {
      block.load(to, tokens);
      if (size == kChunk) return;
      block.for_each(to, [&](int row, int, auto& value) {
        if (row >= size) value = 0.0f;
      });
    }
    /// sums, the gradients of G, become those of the gates: sums from the chunk's end, with the gradient of G_last. `gates` has a part of
    /// that for each token.
    TW_INLINE static void sum_gradients(auto& block, const Params& p, Memory& memory, int chunk, int channel, int head) {
      block.update(memory.sums, kNarrowSlice, [&](int i) {
        const i64 at = (static_cast<i64>(head) * p.chunks + chunk) * kMostChannels + channel + i;
        decltype(memory.sums.at(0, 0) + 0.0f) sum = p.whole[at] * p.d_whole[at];
        TW_NO_UNROLL
        for (int token = 0; token < kChunk; ++token) sum = sum + memory.gates.at(token, i);
        TW_NO_UNROLL
        for (int token = kChunk - 1; token >= 0; --token) {
          sum = sum + memory.sums.at(token, i);
          memory.sums.at(token, i) = sum;
        }
      });
    }
  };
};

}  // namespace tw::kernels::gated_delta
