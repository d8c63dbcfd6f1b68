#pragma once

#include "kernels/gated_delta/backward.tile.hpp"
#include "kernels/gated_delta/wide.tile.hpp"

// The gradients of the gated delta rule for keys of 129 to 256 dimensions, and for more than 128 values. The walks hold the state in two
// halves of 128 dimensions. WideGradients goes through the states in blocks of 128 dimensions and 128 values.

namespace tw::kernels::gated_delta {

inline constexpr const char* kWideBackwardSource = "kernels/gated_delta/wide_backward.tile.hpp";

/// States for 256 dimensions and 64 values, as WideWalk is Walk.
template <class T, int Stages>
struct WideStates {
  static constexpr const char* source = kWideBackwardSource;
  static constexpr int D = kMostDims, Half = D / 2, Slice = 64;

  template <class Target>
  struct On : States<T, D, Slice, Stages>::template On<Target> {
    using Of = typename States<T, D, Slice, Stages>::template On<Target>;
    using typename Of::Inverse, typename Of::Params, typename Of::Slot, typename Of::Work;
    using Part = Fragment<Target, float, kChunk, Slice>;

    struct Memory {
      Ring<Target, Slot, Stages> keys;
      Ring<Target, Inverse, 1> inverses;
      Buffer<Target, T, Half, Slice, Contract::rows> low, high;
      Buffer<Target, T, kChunk, Slice, Contract::rows> updates, decayed;
      explicit constexpr Memory(auto& block) : keys(block), inverses(block), low(block), high(block), updates(block), decayed(block) {}
    };
    struct State {
      Fragment<Target, float, Half, Slice, 1> low, high;  ///< dimensions 0 to 127, and the others
    };
    TW_INLINE static void load(auto& producer, const Params& p, const Work& w, int step, Memory& memory) {
      Of::load_step(producer, p, w, step, memory);
    }
    TW_INLINE static void compute(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      if (p.initial_state.cols > 0) {
        block.load(state.low, p.initial_state, 0, w.col, w.head, w.n);
        block.load(state.high, p.initial_state, Half, w.col, w.head, w.n);
      } else {
        block.fill(state.low, 0.0f);
        block.fill(state.high, 0.0f);
      }
      const int n = Of::steps(p, w);
      for (int step = 0; step < n; ++step) {
        const int chunk = w.sequence.first_chunk + step, size = w.sequence.size - step * kChunk;
        Slot& slot = block.take(memory.keys);
        // As in States: the rows after a sequence's last token may be another sequence's.
        if (size < kChunk) block.zero_rows(slot.k, size);
        Part old, updates;
        RowVector<Target, float, Part> decay, scale;
        block.load(decay, slot.decay);
        block.load(scale, slot.scale);
        const auto whole = slot.decay[kChunk - 1];

        block.store(state.low, p.states, 0, w.col, w.head, chunk);
        block.store(state.high, p.states, Half, w.col, w.head, chunk);
        block.store(state.high, memory.high);
        share(block, state.low, memory.low);
        block.mma(old, view_columns<0, Half>(slot.k), memory.low, true);
        block.mma(old, view_columns<Half, Half>(slot.k), memory.high, false);
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
        block.map(state.low, [whole](auto value) { return value * exp(whole); });
        block.map(state.high, [whole](auto value) { return value * exp(whole); });
        share(block, updates, memory.decayed);
        block.mma(state.low, view<Contract::rows>(view_columns<0, Half>(slot.k)), memory.decayed, false);
        block.mma(state.high, view<Contract::rows>(view_columns<Half, Half>(slot.k)), memory.decayed, false);
        block.wait(leave<0>, state.low, state.high);
        block.sync();
        block.release(memory.keys);
      }
    }
    TW_INLINE static void finish(auto&, const Params&, const Work&, Memory&, State&) {}
  };
};

/// P of each chunk and head, times the outputs' factor: P(i, j) = factor q_i k_j exp(G_i - G_j) for j <= i. Rows after a sequence's last
/// token are 0.
template <class T>
struct Weights {
  static constexpr const char* source = kWideBackwardSource;

  template <class Target>
  struct On {
    static constexpr int rows = kChunk;
    using Tokens = Shared<Target, T, kChunk, kMostDims>;
    struct Params {
      Global<Target, const T, Tokens> q, k;          ///< [batch, head of keys, token, dim]
      Global<Target, const float> decay_of_columns;  ///< [head, chunk * 64]
      Global<Target, const float> decay;             ///< [chunk * 64, head]
      Global<Target, T> weights;                     ///< [head, chunk * 64, 64]
      Sequences<Target> sequences;
      int group;  ///< heads that share a key
      float factor;
    };
    struct Work {
      typename Sequences<Target>::Chunk chunk;
      int head;
    };
    struct Slot {
      Tokens q, k;
    };
    struct Memory {
      Ring<Target, Slot, 1> tokens;
      explicit constexpr Memory(auto& block) : tokens(block) {}
    };
    struct State {};
    TW_INLINE static Work work(const Params& p, Tile t) { return {p.sequences.chunk(t), t.batch}; }
    TW_INLINE static int steps(const Params&, const Work& w) { return w.chunk.size > 0 ? 1 : 0; }
    TW_INLINE static void load(auto& producer, const Params& p, const Work& w, int, Memory& memory) {
      const int head_of_keys = static_cast<int>(static_cast<u32>(w.head) / static_cast<u32>(p.group));
      producer.put(memory.tokens, [&](auto copy, Slot& slot) {
        copy.tile(p.q, slot.q, w.chunk.first, 0, head_of_keys, w.chunk.batch);
        copy.tile(p.k, slot.k, w.chunk.first, 0, head_of_keys, w.chunk.batch);
      });
    }
    TW_INLINE static void compute(auto& block, const Params& p, const Work& w, Memory& memory, State&) {
      using Square = Fragment<Target, float, kChunk, kChunk>;
      const int size = w.chunk.size, of_chunk = w.chunk.index * kChunk;
      if (size <= 0) return;
      Square x;
      RowVector<Target, float, Square> decay;
      ColumnVector<Target, float, Square> decay_of_columns;
      const Slot& slot = block.take(memory.tokens);
      block.mma(x, slot.q, slot.k, true);
      block.load(decay, p.decay, of_chunk, w.head);
      block.load(decay_of_columns, p.decay_of_columns, w.head, of_chunk);
      block.wait(leave<0>, x);
      block.release(memory.tokens);
      const float factor = p.factor;
      block.map(x, decay, decay_of_columns, [factor](auto qk, auto row, auto col) { return factor * qk * exp(row - col); });
      // Rows of other tokens may hold anything.
      block.for_each(x, [&](int row, int col, auto& value) {
        if (col > row || row >= size) value = 0.0f;
      });
      block.store(x, p.weights, of_chunk, 0, w.head);
    }
    TW_INLINE static void finish(auto&, const Params&, const Work&, Memory&, State&) {}
  };
};

/// StateGradients for 256 dimensions and 64 values. P comes from Weights. D is shared as it was before the chunk, so that queries can be
/// used up before keys arrive: a block needs 97 KB with one stage, which every GPU has.
template <class T, int Stages>
struct WideStateGradients {
  static constexpr const char* source = kWideBackwardSource;
  static constexpr int D = kMostDims, Half = D / 2, Slice = 64;

  template <class Target>
  struct On : StateGradients<T, D, Slice, 1>::template On<Target> {
    using Of = typename StateGradients<T, D, Slice, 1>::template On<Target>;
    using typename Of::Tokens, typename Of::Values, typename Of::Inverse, typename Of::OfTokens, typename Of::Work;
    using Part = Fragment<Target, float, kChunk, Slice>;

    struct Params : Of::Params {
      Global<Target, const T, Inverse> weights;  ///< [head, chunk * 64, 64]
    };
    struct Slot {
      Values d_o;
      Inverse inverse, weights;
      OfTokens decay, scale;
    };
    struct Memory {
      Ring<Target, Slot, Stages> chunks;
      Ring<Target, Tokens, Stages> tokens;
      Buffer<Target, T, Half, Slice, Contract::rows> low, high;
      Buffer<Target, T, kChunk, Slice, Contract::rows> part;
      explicit constexpr Memory(auto& block) : chunks(block), tokens(block), low(block), high(block), part(block) {}
    };
    struct State {
      Fragment<Target, float, Half, Slice, 1> low, high;  ///< dimensions 0 to 127, and the others
    };
    /// A chunk's queries, then its keys.
    TW_INLINE static int steps(const Params& p, const Work& w) { return 2 * Of::steps(p, w); }
    TW_INLINE static void load(auto& producer, const Params& p, const Work& w, int step, Memory& memory) {
      const int chunk = Of::steps(p, w) - 1 - step / 2, token = w.sequence.begin + chunk * kChunk,
                of_chunk = (w.sequence.first_chunk + chunk) * kChunk;
      if (step % 2 == 0) {
        producer.put(memory.chunks, [&](auto copy, Slot& slot) {
          copy.tile(p.d_o, slot.d_o, token, w.col, w.head, w.sequence.batch);
          copy.tile(p.inverses, slot.inverse, of_chunk, 0, w.head);
          copy.tile(p.weights, slot.weights, of_chunk, 0, w.head);
          copy.vector(p.decay, slot.decay, w.head, of_chunk);
          copy.vector(p.scale, slot.scale, w.head, of_chunk);
        });
      }
      producer.put(memory.tokens, [&](auto copy, Tokens& tile) {
        if (step % 2 == 0) copy.tile(p.q, tile, token, 0, w.head_of_keys, w.sequence.batch);
        if (step % 2 == 1) copy.tile(p.k, tile, token, 0, w.head_of_keys, w.sequence.batch);
      });
    }
    TW_INLINE static void compute(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      if (p.d_final_state.cols > 0) {
        block.load(state.low, p.d_final_state, 0, w.col, w.head, w.n);
        block.load(state.high, p.d_final_state, Half, w.col, w.head, w.n);
      } else {
        block.fill(state.low, 0.0f);
        block.fill(state.high, 0.0f);
      }
      const float factor = p.factor;
      for (int n = Of::steps(p, w) - 1; n >= 0; --n) {
        const int chunk = w.sequence.first_chunk + n, size = w.sequence.size - n * kChunk;
        Slot& slot = block.take(memory.chunks);
        RowVector<Target, float, Part> decay, scale;
        block.load(decay, slot.decay);
        block.load(scale, slot.scale);
        const auto whole = slot.decay[kChunk - 1];

        block.store(state.low, p.d_states, 0, w.col, w.head, chunk);
        block.store(state.high, p.d_states, Half, w.col, w.head, chunk);
        block.store(state.low, memory.low);
        block.store(state.high, memory.high);
        {
          Part d_o;
          block.load(d_o, slot.d_o);
          block.map(d_o, decay, [factor](auto value, auto d) { return factor * value * exp(d); });
          // The rows after a sequence's last token may be another sequence's, and NaN.
          if (size < kChunk) {
            block.zero_rows(slot.d_o, size);
            block.for_each(d_o, [&](int row, int, auto& value) {
              if (row >= size) value = 0.0f;
            });
          }
          share(block, d_o, memory.part);
        }
        block.map(state.low, [whole](auto value) { return value * exp(whole); });
        block.map(state.high, [whole](auto value) { return value * exp(whole); });
        // D += Q^T (exp(G) dO), then D += K^T (-beta exp(G) Y).
        TW_NO_UNROLL
        for (int operand = 0; operand < 2; ++operand) {
          Tokens& tokens = block.take(memory.tokens);
          if (size < kChunk) block.zero_rows(tokens, size);
          if (operand == 1) store_y(block, p, w, chunk, tokens, slot, decay, scale, memory);
          block.mma(state.low, view<Contract::rows>(view_columns<0, Half>(tokens)), memory.part, false);
          block.mma(state.high, view<Contract::rows>(view_columns<Half, Half>(tokens)), memory.part, false);
          block.wait(leave<0>, state.low, state.high);
          block.sync();
          block.release(memory.tokens);
        }
        block.release(memory.chunks);
      }
    }
    TW_INLINE static void finish(auto& block, const Params& p, const Work& w, Memory&, State& state) {
      if (p.d_initial_state.cols == 0) return;
      block.store(state.low, p.d_initial_state, 0, w.col, w.head, w.n);
      block.store(state.high, p.d_initial_state, Half, w.col, w.head, w.n);
    }

   private:
    /// Y to memory, and shared with its factors. D is shared as it was before the chunk.
    TW_INLINE static void store_y(auto& block, const Params& p, const Work& w, int chunk, const Tokens& k, const Slot& slot,
                                  const RowVector<Target, float, Part>& decay, const RowVector<Target, float, Part>& scale,
                                  Memory& memory) {
      const auto whole = slot.decay[kChunk - 1];
      Part y;
      block.mma(y, view_columns<0, Half>(k), memory.low, true);
      block.mma(y, view_columns<Half, Half>(k), memory.high, false);
      block.wait(leave<0>, y);
      block.map(y, decay, [whole](auto value, auto d) { return value * exp(whole - d); });
      block.mma(y, view<Contract::rows>(slot.weights), view<Contract::rows>(slot.d_o), false);
      block.wait(leave<0>, y);
      share(block, y, memory.part);
      block.mma(y, view<Contract::rows>(slot.inverse), memory.part, true);
      block.wait(leave<0>, y);
      block.store(y, p.y, chunk * kChunk, w.col, w.head);
      block.map(y, decay, scale, [](auto value, auto d, auto b) { return -b * exp(d) * value; });
      block.sync();
      share(block, y, memory.part);
    }
  };
};

/// Gradients for any number of values, and keys of up to 256 dimensions. W, X, dV and Y V come first, 128 values at a time. Then, for each
/// 128 dimensions of keys, S and D come in blocks of 128 x 128, with dO, Y and U once more.
template <class T, class Beta, int TokenStages, int StateStages>
struct WideGradients {
  static constexpr const char* source = kWideBackwardSource;

  template <class Target>
  struct On : Gradients<T, Beta, TokenStages, StateStages>::template On<Target> {
    using Of = typename Gradients<T, Beta, TokenStages, StateStages>::template On<Target>;
    using Of::D, Of::add, Of::hide_after;
    using typename Of::Tokens, typename Of::Matrix, typename Of::Square, typename Of::Part, typename Of::Params, typename Of::Work,
        typename Of::State;
    using Sums = RowVector<Target, float, Part>;

    struct Memory {
      Ring<Target, Tokens, TokenStages> tokens;
      Ring<Target, Matrix, StateStages> states;
      Buffer<Target, T, kChunk, kChunk> w, x, beta_x;
      RowExchange<Target, float, Part> exchange;
      VectorBuffer<Target, float, kChunk> terms, sums;
      explicit constexpr Memory(auto& block)
          : tokens(block), states(block), w(block), x(block), beta_x(block), exchange(block), terms(block), sums(block) {}
    };
    /// Blocks of 128 dimensions of a key, and of 128 values.
    TW_INLINE static int blocks_of_keys(const Params& p) { return ceil_div(p.q.cols, D); }
    TW_INLINE static int blocks_of_values(const Params& p) { return ceil_div(p.v.cols, D); }

    /// dO, U and Y of each block of values; then for each block of keys dO and S, Y, U and D of each block of values, K, Q.
    TW_INLINE static int steps(const Params& p, const Work& w) {
      const int of_values = 3 * blocks_of_values(p);
      return w.chunk.size > 0 ? of_values + blocks_of_keys(p) * (of_values + 2) : 0;
    }
    TW_INLINE static void load(auto& producer, const Params& p, const Work& w, int step, Memory& memory) {
      const auto& c = w.chunk;
      const int of_values = 3 * blocks_of_values(p), of_keys = of_values + 2;
      const bool with_states = step >= of_values;
      if (with_states) step -= of_values;
      const int row = step < of_keys ? 0 : D;
      if (row > 0) step -= of_keys;
      const int col = step / 3 * D, part = step < of_values ? step % 3 : 3 + step - of_values;
      const bool d_o = part == 0, y = part == (with_states ? 1 : 2), u = part == (with_states ? 2 : 1);
      producer.put(memory.tokens, [&](auto copy, Tokens& tile) {
        if (d_o) copy.tile(p.d_o, tile, c.first, col, w.head, c.batch);
        if (y) copy.tile(p.y, tile, c.index * kChunk, col, w.head);
        if (u) copy.tile(p.updates, tile, c.index * kChunk, col, w.head);
        if (part == 3) copy.tile(p.k, tile, c.first, row, w.head_of_keys, c.batch);
        if (part == 4) copy.tile(p.q, tile, c.first, row, w.head_of_keys, c.batch);
      });
      if (!with_states || !(d_o || u)) return;
      producer.put(memory.states, [&](auto copy, Matrix& state) {
        if (d_o) copy.tile(p.states, state, row, col, w.head, c.index);
        if (u) copy.tile(p.d_states, state, row, col, w.head, c.index);
      });
    }
    TW_INLINE static void compute(auto& block, const Params& p, const Work& work, Memory& memory, State&) {
      const auto& c = work.chunk;
      const int size = c.size, of_chunk = c.index * kChunk;
      if (size <= 0) return;
      const int key_blocks = blocks_of_keys(p), value_blocks = blocks_of_values(p);
      Sums decay, beta, d_beta, d_sum, of_whole, sum;
      block.load(decay, p.decay, of_chunk, work.head);
      block.load(beta, p.scale, of_chunk, work.head);
      block.fill(d_beta, 0.0f);
      block.fill(d_sum, 0.0f);
      block.fill(of_whole, 0.0f);
      const float whole = block.value(p.decay, of_chunk + kChunk - 1, work.head), factor = p.factor;
      const auto token_of = [&](int row) { return row < size ? c.first + row : -1; };

      {
        Square w, x;
        block.fill(w, 0.0f);
        block.fill(x, 0.0f);
        TW_NO_UNROLL
        for (int n = 0; n < value_blocks; ++n) {
          Tokens& d_o = block.take(memory.tokens);
          const Tokens& u = block.take(memory.tokens);
          if (size < kChunk) block.zero_rows(d_o, size);
          block.mma(w, d_o, u, false);
          block.wait(leave<0>, w);
          block.release(memory.tokens);
          Tokens& y = block.take(memory.tokens);
          block.mma(x, y, u, false);
          block.wait(leave<0>, x);
          block.release(memory.tokens);
          // Y V, and dV.
          Part v, terms;
          block.load(terms, y);
          block.load(v, p.v, c.first, n * D, work.head, c.batch);
          block.map(v, terms, [](auto value, auto g) { return value * g; });
          block.row_sum(v, sum, memory.exchange);
          add(block, d_beta, sum);
          block.map(terms, beta, [](auto g, auto b) { return g * b; });
          block.scatter(terms, p.dv, token_of, n * D, work.head, c.batch);
          block.release(memory.tokens);
        }
        store_weights(block, p, work, w, x, decay, beta, memory);
      }

      TW_NO_UNROLL
      for (int m = 0; m < key_blocks; ++m) {
        Part dq, z, dk, terms;
        block.fill(dq, 0.0f);
        block.fill(z, 0.0f);
        block.fill(dk, 0.0f);
        TW_NO_UNROLL
        for (int n = 0; n < value_blocks; ++n) {
          Tokens& d_o = block.take(memory.tokens);
          const Matrix& s = block.take(memory.states);
          if (size < kChunk) block.zero_rows(d_o, size);
          block.mma(dq, d_o, s, false);
          const Tokens& y = block.take(memory.tokens);
          block.mma(z, y, s, false);
          block.wait(leave<0>, dq, z);
          block.release(memory.tokens);
          block.release(memory.tokens);
          block.release(memory.states);
          const Tokens& u = block.take(memory.tokens);
          const Matrix& d = block.take(memory.states);
          block.mma(dk, u, d, false);
          block.wait(leave<0>, dk);
          block.release(memory.tokens);
          block.release(memory.states);
        }
        block.map(dq, decay, [factor](auto value, auto g) { return value * (exp(g) * factor); });
        block.map(z, decay, [](auto value, auto g) { return -exp(g) * value; });
        block.map(dk, decay, [whole](auto value, auto g) { return value * exp(whole - g); });

        Tokens& k = block.take(memory.tokens);
        Tokens& q = block.take(memory.tokens);
        if (size < kChunk) {
          block.zero_rows(k, size);
          block.zero_rows(q, size);
        }
        // As in Gradients: the gradient of exp(G_last) of what U adds to the state.
        block.load(terms, k);
        block.map(terms, dk, [](auto key, auto g) { return key * g; });
        hide_after(block, terms, size);
        block.row_sum(terms, sum, memory.exchange);
        add(block, of_whole, sum);
        block.mma(dq, memory.w, view<Contract::rows>(k), false);
        block.mma(z, memory.x, view<Contract::rows>(k), false);
        block.mma(dk, view<Contract::rows>(memory.w), view<Contract::rows>(q), false);
        block.mma(dk, view<Contract::rows>(memory.beta_x), view<Contract::rows>(k), false);
        block.wait(leave<0>, dq, z, dk);
        block.scatter(dq, p.dq, token_of, m * D, work.head, c.batch);
        block.load(terms, k);
        block.map(terms, z, [](auto key, auto g) { return key * g; });
        block.row_sum(terms, sum, memory.exchange);
        add(block, d_beta, sum);
        block.map(z, beta, [](auto value, auto b) { return value * b; });
        block.load(terms, q);
        block.map(terms, dq, [](auto query, auto g) { return query * g; });
        block.load(dq, k);
        block.release(memory.tokens);
        block.release(memory.tokens);
        block.map(terms, dq, z, dk, [](auto t, auto key, auto plus, auto minus) { return t + key * (plus - minus); });
        hide_after(block, terms, size);
        block.row_sum(terms, sum, memory.exchange);
        add(block, d_sum, sum);
        block.map(dk, z, [](auto value, auto more) { return value + more; });
        block.scatter(dk, p.dk, token_of, m * D, work.head, c.batch);
      }
      auto d_betas = p.d_beta;
      d_betas.rows = c.first + size;
      block.store(d_beta, d_betas, c.first, work.head, c.batch);
      if (p.dg.cols > 0) {
        Part terms;
        block.fill(terms, 0.0f);
        TW_NO_UNROLL
        for (int row = 0; row < p.q.cols; row += kChunk) {
          TW_NO_UNROLL
          for (int col = 0; col < p.v.cols; col += D) {
            Part s, d;
            block.load(s, p.state, row, col, work.head, c.index);
            block.load(d, p.d_state, row, col, work.head, c.index);
            block.map(terms, s, d, [whole](auto t, auto a, auto b) { return t + exp(whole) * a * b; });
          }
        }
        block.row_sum(terms, sum, memory.exchange);
        add(block, of_whole, sum);
        Of::store_gate_gradients(block, p, work, d_sum, of_whole, memory);
      }
      block.sync();
    }
    TW_INLINE static void finish(auto&, const Params&, const Work&, Memory&, State&) {}

   private:
    /// W, X and beta X.
    TW_INLINE static void store_weights(auto& block, const Params& p, const Work& work, Square& w, Square& x, const Sums& decay,
                                        const Sums& beta, Memory& memory) {
      const float factor = p.factor;
      ColumnVector<Target, float, Square> decay_of_columns;
      block.load(decay_of_columns, p.decay_of_columns, work.head, work.chunk.index * kChunk);
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
      block.map(x, beta, [](auto value, auto b) { return value * b; });
      share(block, x, memory.beta_x);
    }
  };
};

}  // namespace tw::kernels::gated_delta
