#pragma once

#include "tilewave/tile/solve.tile.hpp"

// The gated delta rule over sequences, in chunks of 64 tokens. Prepare inverts each chunk's matrix, all chunks in parallel. Walk carries
// the state from chunk to chunk. Step goes from token to token.

namespace tw::kernels::gated_delta {

inline constexpr const char* kSource = "kernels/gated_delta/gated_delta.tile.hpp";

/// Tokens of a chunk.
inline constexpr int kChunk = 64;
/// exp of this is 0 in f32, so a gate below it does the same: it forgets the state. The sum of a chunk's gates stays finite, and so does
/// every difference of two sums.
inline constexpr float kLowestGate = -110.0f;

/// The sequences of a call: [batch, length], or with offsets a batch of one with all sequences one after the other.
template <class Target>
struct Sequences {
  Segments<Target> segments;  ///< count is 0 without offsets
  int length;                 ///< of every sequence, without offsets

  struct Sequence {
    int batch;  ///< index in the tensors
    int begin, size;
    int first_chunk;  ///< index of its chunks among all
  };
  TW_INLINE Sequence at(int n) const {
    if (segments.count == 0) return {n, 0, length, n * ceil_div(length, kChunk)};
    const auto segment = segments.at(n);
    return {0, segment.begin, segment.size, static_cast<int>(static_cast<u32>(segment.begin) / kChunk) + n};
  }
  struct Chunk {
    int batch;
    int first, size;  ///< its tokens; without any there is nothing to do
    int index;        ///< among all chunks
  };
  TW_INLINE Chunk chunk(Tile t) const {
    if (segments.count == 0) {
      const int chunks = ceil_div(length, kChunk), n = static_cast<int>(static_cast<u32>(t.m) / static_cast<u32>(max(chunks, 1)));
      const int first = (t.m - n * chunks) * kChunk;
      return {n, first, min(length - first, kChunk), t.m};
    }
    const auto part = segments.find(t.m, kChunk);
    return {0, part.first, part.empty ? 0 : min(part.end - part.first, kChunk), t.m};
  }
};

/// Of each chunk and head: the sums of the gates up to each token, G; and the inverse of I + A with A(i, j) = beta_i exp(G_i - G_j) k_i k_j
/// for j < i. Tokens after the chunk's last one get a beta of 0, so that their rows of the inverse are those of I.
template <class T, class Beta, int D>
struct Prepare {
  static constexpr const char* source = kSource;

  template <class Target>
  struct On {
    static constexpr int rows = kChunk;
    static constexpr int min_blocks = 2;  // the inversion is a chain of short steps: another block runs meanwhile
    static constexpr bool moves_registers = true;
    using Tokens = Shared<Target, T, kChunk, D>;
    struct Params {
      Global<Target, const T, Tokens> k;   ///< [batch, head of keys, token, dim]
      Global<Target, const float> gates;   ///< [batch, token, head], or none
      Global<Target, const Beta> betas;    ///< [batch, token, head]
      Global<Target, T> inverses;          ///< [head, chunk * 64, 64]
      Global<Target, float> decay, scale;  ///< [chunk * 64, head]: G, beta
      Sequences<Target> sequences;
      int group;  ///< heads that share a key
    };
    struct Work {
      typename Sequences<Target>::Chunk chunk;
      int head;
    };
    struct Memory {
      Ring<Target, Tokens, 1> keys;
      VectorBuffer<Target, float, kChunk> gates, decay;
      InversionMemory<Target, kChunk> inversion;
      explicit constexpr Memory(auto& block) : keys(block), gates(block), decay(block), inversion(block) {}
    };
    struct State {};
    TW_INLINE static Work work(const Params& p, Tile t) { return {p.sequences.chunk(t), t.batch}; }
    TW_INLINE static int steps(const Params&, const Work& w) { return w.chunk.size > 0 ? 1 : 0; }
    TW_INLINE static void load(auto& producer, const Params& p, const Work& w, int, Memory& memory) {
      producer.put(memory.keys, [&](auto copy, Tokens& k) {
        copy.tile(p.k, k, w.chunk.first, 0, static_cast<int>(static_cast<u32>(w.head) / static_cast<u32>(p.group)), w.chunk.batch);
      });
    }
    TW_INLINE static void compute(auto& block, const Params& p, const Work& w, Memory& memory, State&) {
      using Square = Fragment<Target, float, kChunk, kChunk>;
      if (w.chunk.size <= 0) return;
      const int size = w.chunk.size;
      Square x;
      RowVector<Target, float, Square> decay, beta;
      ColumnVector<Target, float, Square> decay_of_columns;
      const Tokens& k = block.take(memory.keys);
      block.mma(x, k, k, true);
      const auto hide_others = [&](auto& vector) {
        block.for_rows(vector, [&](int row, int, auto& value) {
          if (row >= size) value = 0.0f;
        });
      };
      block.load(decay, p.gates, w.chunk.first, w.head, w.chunk.batch);
      block.load(beta, p.betas, w.chunk.first, w.head, w.chunk.batch);
      hide_others(decay);
      hide_others(beta);
      block.for_rows(decay, [](int, int, auto& gate) {
        if (gate < kLowestGate) gate = kLowestGate;
      });
      block.store(decay, memory.gates);
      block.cumsum(memory.gates, memory.decay);
      block.load(decay, memory.decay);
      block.load(decay_of_columns, memory.decay);
      block.store(decay, p.decay, w.chunk.index * kChunk, w.head);
      block.store(beta, p.scale, w.chunk.index * kChunk, w.head);
      block.wait(leave<0>, x);
      block.release(memory.keys);
      block.map(x, decay, decay_of_columns, beta, [](auto kk, auto row, auto col, auto b) { return kk * b * exp(row - col); });
      // Only what lies below the diagonal is read. Rows of other tokens may hold anything.
      block.for_each(x, [&](int row, int, auto& value) {
        if (row >= size) value = 0.0f;
      });
      invert_unit_lower(block, x, memory.inversion);
      block.store(x, p.inverses, w.chunk.index * kChunk, 0, w.head);
    }
    TW_INLINE static void finish(auto&, const Params&, const Work&, Memory&, State&) {}
  };
};

/// Stores a Fragment so that products may read it.
TW_INLINE void share(auto& block, const auto& fragment, const auto& buffer) {
  block.store(fragment, buffer);
  block.fence();
  block.sync();
}

/// A sequence of a head, a slice of its values: 64 for each warpgroup, which share the rows of a chunk. With S the state before a chunk,
///   U = inverse (beta (V - exp(G) K S)),   O = scale (exp(G) Q S + P U) with P(i, j) = q_i k_j exp(G_i - G_j) for j <= i,
///   S = exp(G_last) S + (exp(G_last - G) K)^T U.
/// All exponents are at most 0 where they count.
template <class T, int D, int Slice, int Stages>
struct Walk {
  static constexpr const char* source = kSource;

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
      Global<Target, const T, Values> v;                   ///< [batch, head, token, dim]
      Global<Target, const T, Inverse> inverses;           ///< [head, chunk * 64, 64]
      Global<Target, const float, OfTokens> decay, scale;  ///< [head, chunk * 64]
      Global<Target, T> o;                                 ///< as v
      Global<Target, const float> initial_state;           ///< [sequence, head, dim of keys, dim of values], or none
      Global<Target, float> final_state;                   ///< the same
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
      Values v;
      OfTokens decay, scale;
    };
    struct Memory {
      Ring<Target, Slot, Stages> keys;
      Ring<Target, Tokens, 1> queries;
      Ring<Target, Inverse, 1> inverses;
      Buffer<Target, T, D, Slice, Contract::rows> state;
      Buffer<Target, T, kChunk, Slice, Contract::rows> differences, updates, decayed;
      Buffer<Target, T, kChunk, kChunk> weights;
      explicit constexpr Memory(auto& block)
          : keys(block),
            queries(block),
            inverses(block),
            state(block),
            differences(block),
            updates(block),
            decayed(block),
            weights(block) {}
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
      producer.put(memory.queries, [&](auto copy, Tokens& q) { copy.tile(p.q, q, token, 0, w.head_of_keys, w.sequence.batch); });
      producer.put(memory.inverses, [&](auto copy, Inverse& inverse) { copy.tile(p.inverses, inverse, of_chunk, 0, w.head); });
    }
    TW_INLINE static void compute(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      using Square = Fragment<Target, float, kChunk, kChunk, warpgroups>;
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
        // The rows after a sequence's last token may be another sequence's. Zeros of U alone would not hide NaN in K.
        if (size < kChunk) block.zero_rows(slot.k, size);
        RowVector<Target, float, Square> decay, scale;
        ColumnVector<Target, float, Square> decay_of_columns;
        block.load(decay, slot.decay);
        block.load(decay_of_columns, slot.decay);
        block.load(scale, slot.scale);
        const auto whole = slot.decay[kChunk - 1];

        share(block, state.s, memory.state);
        Part old, updates;
        Square x;
        block.mma(old, slot.k, memory.state, true);
        block.mma(x, q, slot.k, true);
        block.load(updates, slot.v);
        block.wait(leave<1>, old);
        block.map(updates, old, decay, scale, [](auto v, auto o, auto d, auto b) { return b * (v - exp(d) * o); });
        if (size < kChunk) {
          block.for_each(updates, [&](int row, int, auto& value) {
            if (row >= size) value = 0.0f;
          });
        }
        share(block, updates, memory.differences);
        const Inverse& inverse = block.take(memory.inverses);
        Part out;
        block.mma(updates, inverse, memory.differences, true);
        block.mma(out, q, memory.state, true);
        block.wait(leave<2>, x);
        block.map(x, decay, decay_of_columns, [](auto qk, auto row, auto col) { return qk * exp(row - col); });
        block.for_each(x, [](int row, int col, auto& value) {
          if (col > row) value = 0.0f;
        });
        block.store(x, memory.weights);
        block.wait(leave<0>, updates, out);
        block.release(memory.queries);
        block.release(memory.inverses);
        block.store(updates, memory.updates);
        block.map(updates, decay, [whole](auto u, auto d) { return u * exp(whole - d); });
        block.map(state.s, [whole](auto value) { return value * exp(whole); });
        share(block, updates, memory.decayed);
        block.mma(state.s, view<Contract::rows>(slot.k), memory.decayed, false);
        block.map(out, decay, [](auto o, auto d) { return o * exp(d); });
        block.mma(out, memory.weights, memory.updates, false);
        block.wait(leave<0>, out, state.s);
        const float factor = p.factor;
        block.map(out, [factor](auto o) { return o * factor; });
        block.scatter(
            out, p.o, [&](int row) { return row < size ? token + row : -1; }, w.col, w.head, w.sequence.batch);
        block.sync();
        block.release(memory.keys);
      }
    }
    TW_INLINE static void finish(auto& block, const Params& p, const Work& w, Memory&, State& state) {
      if (p.final_state.cols > 0) block.store(state.s, p.final_state, 0, w.col, w.head, w.n);
    }
  };
};

/// What is added to a squared norm, as in the field's kernels.
inline constexpr float kNormEpsilon = 1e-6f;

/// Values of a tile of Step: runs of 128 bytes and more, 32 or 64 elements of the state for each thread.
constexpr int step_cols(int dim) { return dim <= 64 ? 64 : 32; }

/// Token by token, in f32: a sequence of a head, `cols` of its values. Few tokens in generation, and any number of f32. With the sums
/// S^T k and S^T q of the state S before a token, decayed,
///   u = beta (v - S^T k),   o = scale (S^T q + (q k) u),   S = S + k u^T,
/// so both sums are formed while the state is read, and none waits for the update. With kChannels each channel of a key has a gate of its
/// own, and the state is decayed before the sums.
template <class X, class Beta, int D, bool kNormalise, bool kChannels = false>
struct Step {
  static constexpr const char* source = kSource;
  static constexpr int warps_of_block = 4;
  static constexpr int cols = step_cols(D);

  template <class Target>
  struct On {
    static constexpr int warps = warps_of_block;
    /// Up to 168 registers: 32 or 64 hold the state and 16 or 32 q and k. More blocks are no faster (NOTES.md): what counts is that no load
    /// waits for another one.
    static constexpr int min_blocks = D > 128 ? 2 : 3;
    using Values = Rows<Target, float, D, cols, warps, 4>;
    using OutputRow = Rows<Target, float, warps * 128 / cols, cols, warps, 4>;  ///< a piece for each thread; only the first row is stored
    using Copies = Rows<Target, float, warps, D, warps, D / 32>;                ///< a whole query or key for each warp
    struct Params {
      Global<Target, const X, Copies> q, k;               ///< [batch, head of keys, token, dim]
      Global<Target, const X, OutputRow> v;               ///< [batch, head, token, dim]
      Global<Target, const float> gates;                  ///< [batch, token, head], or none; of channels [batch, head, dim, token]
      Global<Target, const Beta> betas;                   ///< [batch, token, head]
      Global<Target, X, OutputRow> o;                     ///< as v
      Global<Target, const float, Values> initial_state;  ///< [sequence, head, dim of keys, dim of values], or none
      Global<Target, float, Values> final_state;          ///< the same; may be the initial state
      Sequences<Target> sequences;
      int heads, group;
      float factor;
    };

    /// t.m counts heads, then sequences: tiles that run at once are neighbours in memory.
    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const int of_state = static_cast<int>(static_cast<u32>(t.m) / static_cast<u32>(p.heads)), head = t.m - of_state * p.heads;
      const int head_of_keys = static_cast<int>(static_cast<u32>(head) / static_cast<u32>(p.group)), col = t.n * cols;
      const auto sequence = p.sequences.at(of_state);
      Values s;
      OutputRow o;
      block.fill(o, 0.0f);
      block.load(s, p.initial_state, 0, col, head, of_state);
      TW_NO_UNROLL
      for (int n = 0; n < sequence.size; ++n) {
        const int token = sequence.begin + n;
        const auto this_token = [token](int) { return token; };
        RowVector<Target, float, Values> q, k;
        ColumnVector<Target, float, Values> v;
        Copies whole_q, whole_k;
        const float decay = load_decay(block, p, s, token, head, sequence.batch);
        const float beta = block.value(p.betas, token, head, sequence.batch);
        block.load_from_row(k, p.k, token, 0, head_of_keys, sequence.batch);
        block.load_from_row(q, p.q, token, 0, head_of_keys, sequence.batch);
        block.gather(whole_k, p.k, this_token, 0, head_of_keys, sequence.batch);
        block.gather(whole_q, p.q, this_token, 0, head_of_keys, sequence.batch);
        block.load(v, p.v, token, col, head, sequence.batch);
        const auto q_factor = norm_factor(block, whole_q), k_factor = norm_factor(block, whole_k);
        block.map(whole_k, whole_q, [](auto key, auto query) { return key * query; });
        const auto qk = sum_of(block, whole_k, [](auto x) { return x; }) * q_factor * k_factor;
        Values products[2] = {s, s};
        block.map(products[0], k, [](auto value, auto weight) { return value * weight; });
        block.map(products[1], q, [](auto value, auto weight) { return value * weight; });
        ColumnVector<Target, float, Values> sums[2];
        block.column_fold(products, sums, [](auto a, auto b) { return a + b; });
        const auto& [old, read] = sums;
        const auto update = beta * k_factor, old_factor = decay * k_factor, out_factor = decay * q_factor;
        const float factor = p.factor;
        block.map(s, [decay](auto value) { return value * decay; });
        block.map(s, k, v, old, [=](auto value, auto key, auto x, auto y) { return value + key * (update * (x - old_factor * y)); });
        block.map(o, v, old, read,
                  [=](auto, auto x, auto y, auto z) { return factor * (out_factor * z + qk * (beta * (x - old_factor * y))); });
        block.store(o, p.o.part(token, 1, head, sequence.batch), 0, col);
      }
      if (p.final_state.cols > 0) block.store(s, p.final_state, 0, col, head, of_state);
    }

    /// A token's decay of the state. Those of channels are applied at once.
    TW_INLINE static auto load_decay(auto& block, const Params& p, Values& s, int token, int head, int batch) {
      if constexpr (kChannels) {
        RowVector<Target, float, Values> gates;
        block.load(gates, p.gates, 0, token, head, batch);
        block.map(s, gates, [](auto value, auto gate) { return value * exp(gate); });
        return 1.0f;
      } else {
        return exp(block.value(p.gates, token, head, batch));
      }
    }
    /// The sum of f(x) over one of the copies.
    TW_INLINE static auto sum_of(auto& block, Copies& copies, auto f) {
      RowVector<Target, float, Copies> sums;
      block.rows(copies, [&](int i, auto row) { sums[i] = row.sum(f); });
      return sums[0];
    }
    /// The factor that makes a query or key one of unit norm.
    TW_INLINE static auto norm_factor(auto& block, Copies& copies) {
      if constexpr (kNormalise)
        return rsqrt(sum_of(block, copies, [](auto x) { return x * x; }) + kNormEpsilon);
      else
        return 1.0f;
    }
  };
};

/// y = x / sqrt(|x|^2 + epsilon) of each row, rounded.
template <class X, int D>
struct Normalise {
  static constexpr const char* source = kSource;
  static constexpr int tile_rows = 16;

  template <class Target>
  struct On {
    using Values = Rows<Target, float, tile_rows, D, 4, D / 32>;
    struct Params {
      Global<Target, const X, Values> x;
      Global<Target, X, Values> y;
    };
    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const int j = p.x.size_j == 1 ? 0 : t.batch / p.x.size_i, i = t.batch - j * p.x.size_i;
      Values x;
      RowVector<Target, float, Values> factor;
      block.load(x, p.x, t.m * tile_rows, 0, i, j);
      block.rows(x, [&](int n, auto row) { factor[n] = rsqrt(row.sum([](auto v) { return v * v; }) + kNormEpsilon); });
      block.map(x, factor, [](auto v, auto f) { return v * f; });
      block.store(x, p.y, t.m * tile_rows, 0, i, j);
    }
  };
};

}  // namespace tw::kernels::gated_delta
