#pragma once

#include "kernels/gated_delta/channels.tile.hpp"

// The gradients of the gated delta rule with gates of channels. With the names of channels.tile.hpp, dO scaled as O is, D the gradient of
// the state after a chunk, and products of vectors elementwise:
//
//   dU = P^T dO + (exp(G_last - G) K) D        Y = inverse^T dU
//   gradient of S = exp(G_last) D + (exp(G) Q)^T dO - (beta exp(G) K)^T Y
//
// With W(i, j) = dO_i U_j for j <= i and X(i, j) = -Y_i U_j for j < i (ChannelGradients says how sums over pairs are computed):
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
/// Channels that ChannelGradients does at a time: the memory of two blocks fits on an SM.
inline constexpr int kNarrowSlice = 32;

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

/// dQ, dK, dbeta and dg of a chunk and head from what ValueGradients leaves, kNarrowSlice channels at a time. A thread adds up the pairs of
/// a run's tokens for its channel. Pairs of tokens in two runs are in the two upper levels, which are products.
template <class T, class Beta>
struct ChannelGradients {
  static constexpr const char* source = kChannelsBackwardSource;

  template <class Target>
  struct On {
    static constexpr int rows = kChunk;
    static constexpr int min_blocks = 2;                // chains of short steps: another block runs meanwhile
    static constexpr int items = kRuns * kNarrowSlice;  ///< a run's tokens of a channel are an item
    using Gates = Rows<Target, float, kChunk, kNarrowSlice, 4, 4>;
    using Tokens = Rows<Target, float, kChunk, kNarrowSlice, 4, 8>;
    using Pairs = Rows<Target, float, kChunk, kChunk, 4, 8>;
    using Part = Fragment<Target, float, kChunk, kNarrowSlice>;
    struct Params {
      Global<Target, const T, Tokens> q, k;                             ///< [batch, head of keys, token, dim]
      Global<Target, const float, Gates> gates;                         ///< [batch, head, token, dim]
      Global<Target, const float> scale;                                ///< [chunk * 64, head]: beta
      Global<Target, const T, Tokens> d_queries, d_keys, d_keys_after;  ///< [head, chunk * 64, dim]: S dO, -S Y, D U
      Global<Target, const T, Pairs> w, x;                              ///< [head, chunk * 64, 64]
      Global<Target, const float> values_y;                             ///< [chunk * 64, head]: rows of Y V
      Pointer<Target, const float> whole, d_whole;                      ///< [head, chunk, kMostChannels]: exp(G_last), rows of S D
      Global<Target, T, Tokens> dq, dk;                                 ///< [batch, head, token, dim]
      Global<Target, Beta> d_beta;                                      ///< [batch, token, head]
      Global<Target, float, Gates> dg;                                  ///< [batch, head, token, dim], or none
      Sequences<Target> sequences;
      int group;   ///< heads that share a key
      int chunks;  ///< of all sequences
    };
    struct Memory {
      Buffer<Target, float, kChunk, kNarrowSlice> decays, dq, z, m;
      Buffer<Target, T, kChunk, kNarrowSlice> q, k;
      Buffer<Target, T, kChunk, kChunk> w, x, scaled_x;
      VectorBuffer<Target, float, kRuns * kRun * kRun> w_of_runs, x_of_runs;
      VectorBuffer<Target, float, kChunk> betas;
      VectorBuffer<Target, float, items> totals, totals_of_last;
      explicit constexpr Memory(auto& block)
          : decays(block),
            dq(block),
            z(block),
            m(block),
            q(block),
            k(block),
            w(block),
            x(block),
            scaled_x(block),
            w_of_runs(block),
            x_of_runs(block),
            betas(block),
            totals(block),
            totals_of_last(block) {}
    };
    TW_INLINE static void compute(auto& block, const Params& p, Tile tile, Memory& memory) {
      const auto chunk = p.sequences.chunk(tile);
      const int size = chunk.size, of_chunk = chunk.index * kChunk, head = tile.batch;
      const int head_of_keys = static_cast<int>(static_cast<u32>(head) / static_cast<u32>(p.group));
      if (size <= 0) return;
      // Tokens after a sequence's last one may be another sequence's, and NaN.
      const auto load_tokens = [&](Tokens& to, const auto& from, int channel) {
        block.load(to, from, chunk.first, channel, head_of_keys, chunk.batch);
        block.for_each(to, [&](int row, int, auto& value) {
          if (row >= size) value = 0.0f;
        });
      };
      const auto only_chunk = [&](auto tensor) {
        tensor.rows = chunk.first + size;
        return tensor;
      };
      RowVector<Target, float, Tokens> beta, d_beta, diagonal;
      block.load(beta, p.scale, of_chunk, head);
      block.store(beta, memory.betas);
      block.load(d_beta, p.values_y, of_chunk, head);
      put_runs(block, p.w, of_chunk, head, memory.w_of_runs);
      put_runs(block, p.x, of_chunk, head, memory.x_of_runs);
      block.sync();
      block.for_rows(diagonal, [&](int row, int, auto& value) { value = memory.w_of_runs[row * kRun + row % kRun]; });
      TW_NO_UNROLL
      for (int channel = 0; channel < p.k.cols; channel += kNarrowSlice) {
        Gates gates;
        Tokens q, k, t;
        load_decays(block, gates, p.gates, chunk, channel, head, memory.decays);
        load_tokens(q, p.q, channel);
        load_tokens(k, p.k, channel);
        block.store(q, memory.q);
        block.store(k, memory.k);
        block.sync();
        add_pairs_of_runs(block, memory);
        Part of_queries, of_keys, of_keys_after;
        block.load(of_queries, memory.dq);
        block.load(of_keys, memory.z);
        block.load(of_keys_after, memory.m);
        block.sync();
        TW_NO_UNROLL
        for (int half = kRun; half < kChunk; half *= 2) {
          put_factors(block, memory, half);
          block.load(t, memory.dq);
          const auto times = [](auto x, auto factor) { return x * factor; };
          Tokens scaled = q;
          block.map(scaled, t, times);
          block.store(scaled, memory.q);
          block.map(t, k, times);
          block.store(t, memory.k);
          put_pairs(block, p, memory, of_chunk, head, half);
          block.fence();
          block.sync();
          Part factors, x, y, z;
          block.load(factors, memory.dq);
          const auto add = [](auto sum, auto product, auto factor) { return sum + factor * product; };
          block.mma(x, memory.w, view<Contract::rows>(memory.k), true);
          block.mma(y, memory.x, view<Contract::rows>(memory.k), true);
          block.mma(z, view<Contract::rows>(memory.w), view<Contract::rows>(memory.q), true);
          block.mma(z, view<Contract::rows>(memory.scaled_x), view<Contract::rows>(memory.k), false);
          block.wait(leave<0>, x, y, z);
          block.map(of_queries, x, factors, add);
          block.map(of_keys, y, factors, add);
          block.map(of_keys_after, z, factors, add);
          block.sync();
        }
        block.store(of_queries, memory.dq);
        block.store(of_keys, memory.z);
        block.store(of_keys_after, memory.m);
        block.load(t, p.d_queries, of_chunk, channel, head);
        block.store(t, memory.q);
        block.load(t, p.d_keys, of_chunk, channel, head);
        block.store(t, memory.k);
        block.sync();
        add_of_state(block, memory);
        block.load(t, p.d_keys_after, of_chunk, channel, head);
        block.store(t, memory.q);
        block.store(k, memory.k);
        block.sync();
        add_of_next_state(block, memory);
        Tokens dq, z, m;
        block.load(dq, memory.dq);
        block.load(z, memory.z);
        block.load(m, memory.m);
        t = k;
        block.map(t, z, [](auto key, auto g) { return key * g; });
        block.rows(t, [&](int i, auto row) { d_beta[i] = d_beta[i] + row.sum(); });
        block.map(z, beta, [](auto g, auto b) { return g * b; });
        t = q;
        block.map(t, dq, [](auto query, auto g) { return query * g; });
        block.map(t, k, z, m, [](auto sum, auto key, auto plus, auto minus) { return sum + key * (plus - minus); });
        block.sync();
        block.store(t, memory.dq);
        // A token's query with its own key has no decay.
        block.map(dq, k, diagonal, [](auto sum, auto key, auto w) { return sum + w * key; });
        block.store(dq, only_chunk(p.dq), chunk.first, channel, head, chunk.batch);
        block.map(m, q, diagonal, [](auto sum, auto query, auto w) { return sum + w * query; });
        block.map(m, z, [](auto minus, auto plus) { return minus + plus; });
        block.store(m, only_chunk(p.dk), chunk.first, channel, head, chunk.batch);
        block.sync();
        if (p.dg.cols > 0) {
          sum_gradients(block, p, memory, chunk.index, channel, head);
          block.load(gates, memory.dq);
          block.store(gates, only_chunk(p.dg), chunk.first, channel, head, chunk.batch);
        }
        block.sync();
      }
      block.store(d_beta, only_chunk(p.d_beta), chunk.first, head, chunk.batch);
    }

   private:
    /// The elements for pairs of tokens in the same run, one run after the other.
    TW_INLINE static void put_runs(auto& block, const auto& from, int of_chunk, int head, const auto& to) {
      Pairs pairs;
      block.load(pairs, from, of_chunk, 0, head);
      block.for_each(pairs, [&](int row, int col, auto& value) {
        if (row / kRun == col / kRun) to[row * kRun + col % kRun] = value;
      });
    }
    /// memory.dq, z and m: the sums over pairs of tokens in the same run. And the decays of whole runs.
    TW_INLINE static void add_pairs_of_runs(auto& block, Memory& memory) {
      block.update(
          items,
          [&](int n) {
            using Number = remove_const_reference<decltype(memory.decays.at(0, 0) * 1.0f)>;
            const int channel = n % kNarrowSlice, token = n / kNarrowSlice * kRun;
            Number decays[kRun], q[kRun], scaled_k[kRun], dq[kRun], z[kRun], whole = 1.0f;
            TW_UNROLL
            for (int i = 0; i < kRun; ++i) {
              decays[i] = memory.decays.at(token + i, channel);
              whole = whole * decays[i];
              q[i] = get(memory.q, token + i, channel);
              scaled_k[i] = get(memory.k, token + i, channel) * memory.betas[token + i];
              dq[i] = z[i] = 0.0f;
            }
            memory.totals[n] = whole;
            TW_UNROLL
            for (int j = 0; j < kRun; ++j) {
              const Number k = get(memory.k, token + j, channel);
              Number decay = 1.0f, m = 0.0f;
              TW_UNROLL
              for (int i = j + 1; i < kRun; ++i) {
                const Number w = memory.w_of_runs[(token + i) * kRun + j], x = memory.x_of_runs[(token + i) * kRun + j];
                decay = decay * decays[i];
                dq[i] = dq[i] + w * (decay * k);
                z[i] = z[i] + x * (decay * k);
                m = m + decay * (w * q[i] + x * scaled_k[i]);
              }
              memory.dq.at(token + j, channel) = dq[j];
              memory.z.at(token + j, channel) = z[j];
              memory.m.at(token + j, channel) = m;
            }
          },
          memory.decays, memory.q, memory.k, memory.dq, memory.z, memory.m);
    }
    /// In memory.dq, the factors of a level: a token's decay since the start of its block of `half` tokens if that is a second one, and
    /// otherwise the decay until its end.
    TW_INLINE static void put_factors(auto& block, Memory& memory, int half) {
      block.update(
          items,
          [&](int n) {
            const int channel = n % kNarrowSlice, run = n / kNarrowSlice, token = run * kRun;
            const bool second = (token & half) != 0;
            auto factor = decay_beside<kNarrowSlice>(memory.totals, run, channel, half / kRun, second);
            if (second) {
              TW_UNROLL
              for (int i = 0; i < kRun; ++i) {
                factor = factor * memory.decays.at(token + i, channel);
                memory.dq.at(token + i, channel) = factor;
              }
            } else {
              TW_UNROLL
              for (int i = kRun - 1; i >= 0; --i) {
                memory.dq.at(token + i, channel) = factor;
                factor = factor * memory.decays.at(token + i, channel);
              }
            }
          },
          memory.decays, memory.dq);
    }
    /// The pairs of a level of W, X and beta X, and 0 for the others.
    TW_INLINE static void put_pairs(auto& block, const Params& p, Memory& memory, int of_chunk, int head, int half) {
      const auto keep_level = [half](int row, int col, auto& value) {
        if (!couples_blocks(row, col, half)) value = 0.0f;
      };
      Pairs pairs;
      block.load(pairs, p.w, of_chunk, 0, head);
      block.for_each(pairs, keep_level);
      block.store(pairs, memory.w);
      block.load(pairs, p.x, of_chunk, 0, head);
      block.for_each(pairs, keep_level);
      block.store(pairs, memory.x);
      RowVector<Target, float, Pairs> beta;
      block.load(beta, memory.betas);
      block.map(pairs, beta, [](auto x, auto b) { return x * b; });
      block.store(pairs, memory.scaled_x);
    }
    /// Adds the terms of the state before the chunk, exp(G) S dO in memory.q and exp(G) S Y in memory.k, to dq and z.
    TW_INLINE static void add_of_state(auto& block, Memory& memory) {
      block.update(
          items,
          [&](int n) {
            const int channel = n % kNarrowSlice, run = n / kNarrowSlice, token = run * kRun;
            auto factor = decay_beside<kNarrowSlice>(memory.totals, run, channel, kRuns, true);
            TW_UNROLL
            for (int i = 0; i < kRun; ++i) {
              factor = factor * memory.decays.at(token + i, channel);
              memory.dq.at(token + i, channel) = memory.dq.at(token + i, channel) + factor * get(memory.q, token + i, channel);
              memory.z.at(token + i, channel) = memory.z.at(token + i, channel) + factor * get(memory.k, token + i, channel);
            }
          },
          memory.decays, memory.dq, memory.z, memory.q, memory.k);
    }
    /// Adds the term of the state after the chunk, exp(G_last - G) D U with D U in memory.q, to m. The gradient of G_last gets its products
    /// with keys.
    TW_INLINE static void add_of_next_state(auto& block, Memory& memory) {
      block.update(
          items,
          [&](int n) {
            const int channel = n % kNarrowSlice, run = n / kNarrowSlice, token = run * kRun;
            auto factor = decay_beside<kNarrowSlice>(memory.totals, run, channel, kRuns, false);
            remove_const_reference<decltype(factor)> of_last = 0.0f;
            TW_UNROLL
            for (int i = kRun - 1; i >= 0; --i) {
              const auto term = factor * get(memory.q, token + i, channel);
              memory.m.at(token + i, channel) = memory.m.at(token + i, channel) + term;
              of_last = of_last + term * get(memory.k, token + i, channel);
              factor = factor * memory.decays.at(token + i, channel);
            }
            memory.totals_of_last[n] = of_last;
          },
          memory.decays, memory.m, memory.q, memory.k);
    }
    /// memory.dq, the gradients of G, become those of the gates: sums from the chunk's end, with the gradient of G_last.
    TW_INLINE static void sum_gradients(auto& block, const Params& p, Memory& memory, int chunk, int channel, int head) {
      block.update(
          items,
          [&](int n) {
            const int col = n % kNarrowSlice, token = n / kNarrowSlice * kRun;
            auto sum = memory.dq.at(token, col) + 0.0f;
            TW_UNROLL
            for (int i = 1; i < kRun; ++i) sum = sum + memory.dq.at(token + i, col);
            memory.totals[n] = sum;
          },
          memory.dq);
      block.update(
          items,
          [&](int n) {
            const int col = n % kNarrowSlice, run = n / kNarrowSlice, token = run * kRun;
            const i64 at = (static_cast<i64>(head) * p.chunks + chunk) * kMostChannels + channel + col;
            auto sum = p.whole[at] * p.d_whole[at];
            TW_UNROLL
            for (int other = 0; other < kRuns; ++other) {
              sum = sum + memory.totals_of_last[other * kNarrowSlice + col];
              if (other > run) sum = sum + memory.totals[other * kNarrowSlice + col];
            }
            TW_UNROLL
            for (int i = kRun - 1; i >= 0; --i) {
              sum = sum + memory.dq.at(token + i, col);
              memory.dq.at(token + i, col) = sum;
            }
          },
          memory.dq);
    }
    TW_INLINE static auto get(const auto& buffer, int row, int col) { return tw::to<float>(buffer.at(row, col)); }
  };
};

}  // namespace tw::kernels::gated_delta
