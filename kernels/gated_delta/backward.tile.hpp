#pragma once

#include "kernels/gated_delta/gated_delta.tile.hpp"

// The gradients of the gated delta rule. With the names of Walk, dO scaled as O is, and D the gradient of the state after a chunk:
//
//   dU = P^T dO + exp(G_last - G) K D          Y = inverse^T dU
//   gradient of S = exp(G_last) D + (exp(G) Q)^T dO - (beta exp(G) K)^T Y
//
// States walks forward and keeps every chunk's S and U, StateGradients walks backward and keeps every D and Y. From these Gradients
// computes the gradients of a chunk, all chunks in parallel.

namespace tw::kernels::gated_delta {

inline constexpr const char* kBackwardSource = "kernels/gated_delta/backward.tile.hpp";

/// Walk without outputs: the state before each chunk, and the chunk's U. Rows of U after a sequence's last token are 0.
template <class T, int D, int Slice, int Stages>
struct States {
  static constexpr const char* source = kBackwardSource;

  template <class Target>
  struct On {
    static constexpr int rows = Slice;
    static constexpr int warpgroups = rows / 64;
    using Tokens = Shared<Target, T, kChunk, D>;
    using Values = Shared<Target, T, kChunk, Slice>;
    using Inverse = Shared<Target, T, kChunk, kChunk>;
    using OfTokens = SharedVector<Target, float, kChunk>;
    struct Params {
      Global<Target, const T, Tokens> k;                   ///< [batch, head of keys, token, dim]
      Global<Target, const T, Values> v;                   ///< [batch, head, token, dim]
      Global<Target, const T, Inverse> inverses;           ///< [head, chunk * 64, 64]
      Global<Target, const float, OfTokens> decay, scale;  ///< [head, chunk * 64]
      Global<Target, const float> initial_state;           ///< [sequence, head, dim of keys, dim of values], or none
      Global<Target, T> states;                            ///< [chunk, head, dim of keys, dim of values]
      Global<Target, T> updates;                           ///< [head, chunk * 64, dim of values]
      Sequences<Target> sequences;
      int group;  ///< heads that share a key
    };
    struct Work {
      typename Sequences<Target>::Sequence sequence;
      int n, head, head_of_keys, col;
    };
    struct Slot {
      Tokens k;
      Values v;
      OfTokens decay, scale;
    };
    struct Memory {
      Ring<Target, Slot, Stages> keys;
      Ring<Target, Inverse, 1> inverses;
      Buffer<Target, T, D, Slice, Contract::rows> state;
      Buffer<Target, T, kChunk, Slice, Contract::rows> updates, decayed;
      explicit constexpr Memory(auto& block) : keys(block), inverses(block), state(block), updates(block), decayed(block) {}
    };
    struct State {
      Fragment<Target, float, D, Slice, warpgroups> s;
    };
    TW_INLINE static Work work(const Params& p, Tile t) {
      return {p.sequences.at(t.m), t.m, t.batch, static_cast<int>(static_cast<u32>(t.batch) / static_cast<u32>(p.group)), t.n * Slice};
    }
    TW_INLINE static int steps(const Params&, const Work& w) { return ceil_div(w.sequence.size, kChunk); }
    TW_INLINE static void load(auto& producer, const Params& p, const Work& w, int step, Memory& memory) {
      load_step(producer, p, w, step, memory);
    }
    /// For any memory with these rings.
    TW_INLINE static void load_step(auto& producer, const Params& p, const Work& w, int step, auto& memory) {
      const int token = w.sequence.begin + step * kChunk, of_chunk = (w.sequence.first_chunk + step) * kChunk;
      producer.put(memory.keys, [&](auto copy, Slot& slot) {
        copy.tile(p.k, slot.k, token, 0, w.head_of_keys, w.sequence.batch);
        copy.tile(p.v, slot.v, token, w.col, w.head, w.sequence.batch);
        copy.vector(p.decay, slot.decay, w.head, of_chunk);
        copy.vector(p.scale, slot.scale, w.head, of_chunk);
      });
      producer.put(memory.inverses, [&](auto copy, Inverse& inverse) { copy.tile(p.inverses, inverse, of_chunk, 0, w.head); });
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
        // The rows after a sequence's last token may be another sequence's. Zeros of U alone would not hide NaN in K.
        if (size < kChunk) block.zero_rows(slot.k, size);
        Part old, updates;
        RowVector<Target, float, Part> decay, scale;
        block.load(decay, slot.decay);
        block.load(scale, slot.scale);
        const auto whole = slot.decay[kChunk - 1];

        block.store(state.s, p.states, 0, w.col, w.head, chunk);
        share(block, state.s, memory.state);
        block.mma(old, slot.k, memory.state, true);
        block.load(updates, slot.v);
        block.wait(leave<0>, old);
        block.map(updates, old, decay, scale, [](auto v, auto o, auto d, auto b) { return b * (v - exp(d) * o); });
        if (size < kChunk) {
          block.for_each(updates, [&](int row, int, auto& value) {
            if (row >= size) value = 0.0f;
          });
        }
        share(block, updates, memory.updates);
        const Inverse& inverse = block.take(memory.inverses);
        block.mma(updates, inverse, memory.updates, true);
        block.wait(leave<0>, updates);
        block.release(memory.inverses);
        block.store(updates, p.updates, chunk * kChunk, w.col, w.head);
        block.map(updates, decay, [whole](auto u, auto d) { return u * exp(whole - d); });
        block.map(state.s, [whole](auto value) { return value * exp(whole); });
        share(block, updates, memory.decayed);
        block.mma(state.s, view<Contract::rows>(slot.k), memory.decayed, false);
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
struct StateGradients {
  static constexpr const char* source = kBackwardSource;

  template <class Target>
  struct On {
    static constexpr int rows = Slice;
    static constexpr int warpgroups = rows / 64;
    using Tokens = Shared<Target, T, kChunk, D>;
    using Values = Shared<Target, T, kChunk, Slice>;
    using Inverse = Shared<Target, T, kChunk, kChunk>;
    using OfTokens = SharedVector<Target, float, kChunk>;
    struct Params {
      Global<Target, const T, Tokens> q, k;                ///< [batch, head of keys, token, dim]
      Global<Target, const T, Values> d_o;                 ///< [batch, head, token, dim]
      Global<Target, const T, Inverse> inverses;           ///< [head, chunk * 64, 64]
      Global<Target, const float, OfTokens> decay, scale;  ///< [head, chunk * 64]
      Global<Target, const float> d_final_state;           ///< [sequence, head, dim of keys, dim of values], or none
      Global<Target, float> d_initial_state;               ///< the same
      Global<Target, T> d_states;                          ///< [chunk, head, dim of keys, dim of values]
      Global<Target, T> y;                                 ///< [head, chunk * 64, dim of values]
      Sequences<Target> sequences;
      int group;  ///< heads that share a key
      float factor;
    };
    struct Work {
      typename Sequences<Target>::Sequence sequence;
      int n, head, head_of_keys, col;
    };
    struct Slot {
      Tokens k;
      Values d_o;
      OfTokens decay, scale;
    };
    struct Memory {
      Ring<Target, Slot, Stages> keys;
      Ring<Target, Tokens, 1> queries;
      Ring<Target, Inverse, 1> inverses;
      Buffer<Target, T, D, Slice, Contract::rows> state;
      Buffer<Target, T, kChunk, Slice, Contract::rows> d_o, decayed, updates;
      Buffer<Target, T, kChunk, kChunk> weights;
      explicit constexpr Memory(auto& block)
          : keys(block), queries(block), inverses(block), state(block), d_o(block), decayed(block), updates(block), weights(block) {}
    };
    struct State {
      Fragment<Target, float, D, Slice, warpgroups> d;
    };
    TW_INLINE static Work work(const Params& p, Tile t) {
      return {p.sequences.at(t.m), t.m, t.batch, static_cast<int>(static_cast<u32>(t.batch) / static_cast<u32>(p.group)), t.n * Slice};
    }
    TW_INLINE static int steps(const Params&, const Work& w) { return ceil_div(w.sequence.size, kChunk); }
    TW_INLINE static void load(auto& producer, const Params& p, const Work& w, int step, Memory& memory) {
      const int chunk = ceil_div(w.sequence.size, kChunk) - 1 - step, token = w.sequence.begin + chunk * kChunk,
                of_chunk = (w.sequence.first_chunk + chunk) * kChunk;
      producer.put(memory.keys, [&](auto copy, Slot& slot) {
        copy.tile(p.k, slot.k, token, 0, w.head_of_keys, w.sequence.batch);
        copy.tile(p.d_o, slot.d_o, token, w.col, w.head, w.sequence.batch);
        copy.vector(p.decay, slot.decay, w.head, of_chunk);
        copy.vector(p.scale, slot.scale, w.head, of_chunk);
      });
      producer.put(memory.queries, [&](auto copy, Tokens& q) { copy.tile(p.q, q, token, 0, w.head_of_keys, w.sequence.batch); });
      producer.put(memory.inverses, [&](auto copy, Inverse& inverse) { copy.tile(p.inverses, inverse, of_chunk, 0, w.head); });
    }
    TW_INLINE static void compute(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      using Square = Fragment<Target, float, kChunk, kChunk, warpgroups>;
      using Part = Fragment<Target, float, kChunk, Slice, warpgroups>;
      if (p.d_final_state.cols > 0)
        block.load(state.d, p.d_final_state, 0, w.col, w.head, w.n);
      else
        block.fill(state.d, 0.0f);
      const float factor = p.factor;
      for (int n = steps(p, w) - 1; n >= 0; --n) {
        const int chunk = w.sequence.first_chunk + n, size = w.sequence.size - n * kChunk;
        Slot& slot = block.take(memory.keys);
        Tokens& q = block.take(memory.queries);
        // The rows after a sequence's last token may be another sequence's, and NaN.
        if (size < kChunk) {
          block.zero_rows(slot.k, size);
          block.zero_rows(q, size);
        }
        RowVector<Target, float, Square> decay, scale;
        ColumnVector<Target, float, Square> decay_of_columns;
        block.load(decay, slot.decay);
        block.load(decay_of_columns, slot.decay);
        block.load(scale, slot.scale);
        const auto whole = slot.decay[kChunk - 1];

        block.store(state.d, p.d_states, 0, w.col, w.head, chunk);
        share(block, state.d, memory.state);
        Part y;
        Square x;
        block.mma(y, slot.k, memory.state, true);
        block.mma(x, q, slot.k, true);
        {
          Part d_o;
          block.load(d_o, slot.d_o);
          block.map(d_o, [factor](auto value) { return value * factor; });
          if (size < kChunk) {
            block.for_each(d_o, [&](int row, int, auto& value) {
              if (row >= size) value = 0.0f;
            });
          }
          block.store(d_o, memory.d_o);
          block.map(d_o, decay, [](auto value, auto d) { return value * exp(d); });
          block.store(d_o, memory.decayed);
        }
        block.wait(leave<0>, y, x);
        block.map(x, decay, decay_of_columns, [](auto qk, auto row, auto col) { return qk * exp(row - col); });
        block.for_each(x, [&](int row, int col, auto& value) {
          if (col > row || row >= size) value = 0.0f;
        });
        block.map(y, decay, [whole](auto value, auto d) { return value * exp(whole - d); });
        share(block, x, memory.weights);
        block.mma(y, view<Contract::rows>(memory.weights), memory.d_o, false);
        block.wait(leave<0>, y);
        share(block, y, memory.updates);
        const Inverse& inverse = block.take(memory.inverses);
        block.mma(y, view<Contract::rows>(inverse), memory.updates, true);
        block.map(state.d, [whole](auto value) { return value * exp(whole); });
        block.wait(leave<0>, y);
        block.release(memory.inverses);
        block.store(y, p.y, chunk * kChunk, w.col, w.head);
        block.map(y, decay, scale, [](auto value, auto d, auto b) { return -b * exp(d) * value; });
        block.sync();
        share(block, y, memory.updates);
        block.mma(state.d, view<Contract::rows>(q), memory.decayed, false);
        block.mma(state.d, view<Contract::rows>(slot.k), memory.updates, false);
        block.wait(leave<0>, state.d);
        block.sync();
        block.release(memory.queries);
        block.release(memory.keys);
      }
    }
    TW_INLINE static void finish(auto& block, const Params& p, const Work& w, Memory&, State& state) {
      if (p.d_initial_state.cols > 0) block.store(state.d, p.d_initial_state, 0, w.col, w.head, w.n);
    }
  };
};

/// Blocks stay, and load their next chunk while they compute the last one's products.
struct InOrder {
  static constexpr Dispatch dispatch = Dispatch::persistent;
  TW_INLINE static constexpr Tile at(const TileGrid& grid, int i) { return RowMajor::at(grid, i); }
};

/// The gradients of a chunk and head. With W(i, j) = dO_i U_j exp(G_i - G_j) for j <= i and X(i, j) = -Y_i U_j exp(G_i - G_j) for j < i:
///   dQ = exp(G) dO S^T + W K,   dV = beta Y,   Z = X K - exp(G) Y S^T,   dbeta = Y V + K Z (of each row)
///   dK = beta Z + W^T Q + (beta X)^T K + exp(G_last - G) U D^T
/// The gradient of G_i is the product of what has the factor exp(G_i) with its query or key, less that of what has exp(-G_i).
template <class T, class Beta, int TokenStages, int StateStages>
struct Gradients {
  static constexpr const char* source = kBackwardSource;

  template <class Target>
  struct On {
    static constexpr int D = 128;  // of keys and of values
    static constexpr int rows = 128;
    static constexpr int warpgroups = rows / 64;
    using Schedule = InOrder;
    using Tokens = Shared<Target, T, kChunk, D>;
    using Matrix = Shared<Target, T, D, D>;
    using Square = Fragment<Target, float, kChunk, kChunk, warpgroups>;
    using Part = Fragment<Target, float, kChunk, D, warpgroups>;
    struct Params {
      Global<Target, const T, Tokens> q, k;              ///< [batch, head of keys, token, dim]
      Global<Target, const T> v;                         ///< [batch, head, token, dim]
      Global<Target, const T, Tokens> d_o;               ///< the same
      Global<Target, const T, Tokens> updates, y;        ///< [head, chunk * 64, dim of values]
      Global<Target, const T, Matrix> states, d_states;  ///< [chunk, head, dim of keys, dim of values]
      Global<Target, const T> state, d_state;            ///< the same
      Global<Target, const float> decay_of_columns;      ///< [head, chunk * 64]
      Global<Target, const float> decay, scale;          ///< [chunk * 64, head]
      Global<Target, T> dq, dk;                          ///< [batch, head, token, dim]
      Global<Target, T> dv;                              ///< the same
      Global<Target, Beta> d_beta;                       ///< [batch, token, head]
      Global<Target, float> dg;                          ///< the same, or none
      Sequences<Target> sequences;
      int group;  ///< heads that share a key
      float factor;
    };
    struct Work {
      typename Sequences<Target>::Chunk chunk;
      int head, head_of_keys;
    };
    struct Memory {
      Ring<Target, Tokens, TokenStages> tokens;
      Ring<Target, Matrix, StateStages> states;
      Buffer<Target, T, kChunk, kChunk> w, x;
      RowExchange<Target, float, Part> exchange;
      VectorBuffer<Target, float, kChunk> terms, sums;
      explicit constexpr Memory(auto& block)
          : tokens(block), states(block), w(block), x(block), exchange(block), terms(block), sums(block) {}
    };
    struct State {};
    TW_INLINE static Work work(const Params& p, Tile t) {
      return {p.sequences.chunk(t), t.batch, static_cast<int>(static_cast<u32>(t.batch) / static_cast<u32>(p.group))};
    }
    /// Operands in the order of their use: dO and S, Y, U, D, K, Q.
    TW_INLINE static int steps(const Params&, const Work& w) { return w.chunk.size > 0 ? 6 : 0; }
    TW_INLINE static void load(auto& producer, const Params& p, const Work& w, int step, Memory& memory) {
      const auto& c = w.chunk;
      if (step != 3) {
        producer.put(memory.tokens, [&](auto copy, Tokens& tile) {
          if (step == 0) copy.tile(p.d_o, tile, c.first, 0, w.head, c.batch);
          if (step == 1) copy.tile(p.y, tile, c.index * kChunk, 0, w.head);
          if (step == 2) copy.tile(p.updates, tile, c.index * kChunk, 0, w.head);
          if (step == 4) copy.tile(p.k, tile, c.first, 0, w.head_of_keys, c.batch);
          if (step == 5) copy.tile(p.q, tile, c.first, 0, w.head_of_keys, c.batch);
        });
      }
      if (step == 0) producer.put(memory.states, [&](auto copy, Matrix& s) { copy.tile(p.states, s, 0, 0, w.head, c.index); });
      if (step == 3) producer.put(memory.states, [&](auto copy, Matrix& d) { copy.tile(p.d_states, d, 0, 0, w.head, c.index); });
    }
    TW_INLINE static void compute(auto& block, const Params& p, const Work& work, Memory& memory, State&) {
      const auto& c = work.chunk;
      const int size = c.size, of_chunk = c.index * kChunk;
      if (size <= 0) return;
      RowVector<Target, float, Part> decay, beta, d_beta, of_whole, sum;
      ColumnVector<Target, float, Square> decay_of_columns;
      block.load(decay, p.decay, of_chunk, work.head);
      block.load(beta, p.scale, of_chunk, work.head);
      block.load(decay_of_columns, p.decay_of_columns, work.head, of_chunk);
      const float whole = block.value(p.decay, of_chunk + kChunk - 1, work.head), factor = p.factor;
      const auto token_of = [&](int row) { return row < size ? c.first + row : -1; };

      Tokens& d_o = block.take(memory.tokens);
      const Matrix& s = block.take(memory.states);
      if (size < kChunk) block.zero_rows(d_o, size);
      Part dq, z;
      Square w, x;
      block.mma(dq, d_o, s, true);
      Tokens& y = block.take(memory.tokens);
      block.mma(z, y, s, true);
      const Tokens& u = block.take(memory.tokens);
      block.mma(w, d_o, u, true);
      block.mma(x, y, u, true);
      block.wait(leave<0>, dq, z, w, x);
      block.release(memory.tokens);
      block.release(memory.states);
      block.map(dq, decay, [factor](auto value, auto g) { return value * (exp(g) * factor); });
      block.map(z, decay, [](auto value, auto g) { return -exp(g) * value; });
      block.map(w, decay, decay_of_columns, [factor](auto value, auto row, auto col) { return value * (exp(row - col) * factor); });
      block.map(x, decay, decay_of_columns, [](auto value, auto row, auto col) { return -value * exp(row - col); });
      block.for_each(w, [](int row, int col, auto& value) {
        if (col > row) value = 0.0f;
      });
      block.for_each(x, [](int row, int col, auto& value) {
        if (col >= row) value = 0.0f;
      });
      block.store(w, memory.w);
      block.store(x, memory.x);
      block.fence();
      // Y V, and dV.
      Part dk, terms;
      block.load(terms, y);
      {
        Part v;
        block.load(v, p.v, c.first, 0, work.head, c.batch);
        block.map(v, terms, [](auto value, auto g) { return value * g; });
        block.row_sum(v, d_beta, memory.exchange);
      }
      block.map(terms, beta, [](auto g, auto b) { return g * b; });
      block.scatter(terms, p.dv, token_of, 0, work.head, c.batch);
      block.release(memory.tokens);
      const Matrix& d = block.take(memory.states);
      block.mma(dk, u, d, true);
      block.wait(leave<0>, dk);
      block.release(memory.tokens);
      block.release(memory.states);
      block.map(dk, decay, [whole](auto value, auto g) { return value * exp(whole - g); });

      Tokens& k = block.take(memory.tokens);
      Tokens& q = block.take(memory.tokens);
      if (size < kChunk) {
        block.zero_rows(k, size);
        block.zero_rows(q, size);
      }
      // The gradient of the chunk's whole decay, exp(G_last): here of what U adds to the state, at the end of S.
      block.load(terms, k);
      block.map(terms, dk, [](auto key, auto g) { return key * g; });
      hide_after(block, terms, size);
      block.row_sum(terms, of_whole, memory.exchange);
      block.mma(dq, memory.w, view<Contract::rows>(k), false);
      block.mma(z, memory.x, view<Contract::rows>(k), false);
      block.mma(dk, view<Contract::rows>(memory.w), view<Contract::rows>(q), false);
      block.load(x, memory.x);
      block.map(x, beta, [](auto value, auto b) { return value * b; });
      block.wait(leave<0>, dq, z, dk);
      block.sync();
      share(block, x, memory.x);
      block.mma(dk, view<Contract::rows>(memory.x), view<Contract::rows>(k), false);
      block.scatter(dq, p.dq, token_of, 0, work.head, c.batch);
      block.load(terms, k);
      block.map(terms, z, [](auto key, auto g) { return key * g; });
      block.row_sum(terms, sum, memory.exchange);
      add(block, d_beta, sum);
      block.map(z, beta, [](auto value, auto b) { return value * b; });
      block.load(terms, q);
      block.map(terms, dq, [](auto query, auto g) { return query * g; });
      block.load(dq, k);
      block.wait(leave<0>, dk);
      block.release(memory.tokens);
      block.release(memory.tokens);
      block.map(terms, dq, z, dk, [](auto t, auto key, auto plus, auto minus) { return t + key * (plus - minus); });
      hide_after(block, terms, size);
      block.row_sum(terms, sum, memory.exchange);
      block.map(dk, z, [](auto value, auto more) { return value + more; });
      block.scatter(dk, p.dk, token_of, 0, work.head, c.batch);
      auto d_betas = p.d_beta;
      d_betas.rows = c.first + size;
      block.store(d_beta, d_betas, c.first, work.head, c.batch);
      if (p.dg.cols > 0) {
        block.fill(terms, 0.0f);
        TW_NO_UNROLL
        for (int row = 0; row < D; row += kChunk) {
          block.load(dq, p.state, row, 0, work.head, c.index);
          block.load(dk, p.d_state, row, 0, work.head, c.index);
          block.map(terms, dq, dk, [whole](auto t, auto a, auto b) { return t + exp(whole) * a * b; });
        }
        block.row_sum(terms, decay, memory.exchange);
        add(block, of_whole, decay);
        store_gate_gradients(block, p, work, sum, of_whole, memory);
      }
      block.sync();
    }
    /// The gradients of the gates: sums of those of G to the chunk's end. The last G also has all that `of_whole` adds up to.
    TW_INLINE static void store_gate_gradients(auto& block, const Params& p, const Work& work, auto& sum, const auto& of_whole,
                                               auto& memory) {
      const auto& c = work.chunk;
      block.store(of_whole, memory.terms);
      block.cumsum(memory.terms, memory.sums);
      const auto last = memory.sums[kChunk - 1];
      block.for_rows(sum, [&](int row, int, auto& value) {
        if (row == kChunk - 1) value += last;
      });
      block.store(sum, memory.terms);
      block.cumsum(memory.terms, memory.sums, Backward{});
      block.load(sum, memory.sums);
      auto dg = p.dg;
      dg.rows = c.first + c.size;
      block.store(sum, dg, c.first, work.head, c.batch);
    }
    /// Rows after a sequence's last token may hold anything.
    TW_INLINE static void hide_after(auto& block, Part& part, int size) {
      if (size == kChunk) return;
      block.for_each(part, [&](int row, int, auto& value) {
        if (row >= size) value = 0.0f;
      });
    }
    TW_INLINE static void add(auto& block, auto& to, auto& from) {
      block.for_rows(to, [&](int, int i, auto& value) { value += from[i]; });
    }
    TW_INLINE static void finish(auto&, const Params&, const Work&, Memory&, State&) {}
  };
};

/// The gradients of queries or keys: of a head that several share the sum, and of what Normalise read.
template <class X, bool kNormalise, int D>
struct RowGradients {
  static constexpr const char* source = kBackwardSource;
  static constexpr int tile_rows = 16;

  template <class Target>
  struct On {
    using Values = Rows<Target, float, tile_rows, D, 4, D / 32>;
    struct Params {
      Global<Target, const X, Values> x;   ///< [batch, head of keys, token, dim]
      Global<Target, const X, Values> dy;  ///< [batch, head, token, dim]
      Global<Target, X, Values> dx;        ///< as x
      Sequences<Target> sequences;
      int heads;  ///< of keys
      int group;
    };
    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const int batch = t.batch / p.heads, head = t.batch - batch * p.heads, row0 = t.m * tile_rows;
      Values x, dy;
      block.load(dy, p.dy, row0, 0, head * p.group, batch);
      TW_NO_UNROLL
      for (int n = 1; n < p.group; ++n) {
        block.load(x, p.dy, row0, 0, head * p.group + n, batch);
        block.map(dy, x, [](auto sum, auto more) { return sum + more; });
      }
      if constexpr (kNormalise) {
        // y = f x with f = 1 / sqrt(|x|^2 + epsilon):   dx = f (dy - y (y dy))
        RowVector<Target, float, Values> factor, along;
        block.load(x, p.x, row0, 0, head, batch);
        block.rows(x, [&](int n, auto row) { factor[n] = rsqrt(row.sum([](auto v) { return v * v; }) + kNormEpsilon); });
        block.map(x, factor, [](auto v, auto f) { return v * f; });
        auto product = x;
        block.map(product, dy, [](auto y, auto g) { return y * g; });
        block.rows(product, [&](int n, auto row) { along[n] = row.sum(); });
        block.map(dy, x, factor, along, [](auto g, auto y, auto f, auto a) { return f * (g - y * a); });
      }
      auto dx = p.dx;
      // Tokens after the last sequence's end have no gradients.
      if (const auto& segments = p.sequences.segments; segments.count > 0) {
        const auto last = segments.at(segments.count - 1);
        dx.rows = min(dx.rows, last.begin + last.size);
      }
      block.store(dy, dx, row0, 0, head, batch);
    }
  };
};

}  // namespace tw::kernels::gated_delta
