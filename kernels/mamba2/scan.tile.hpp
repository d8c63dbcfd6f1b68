#pragma once

#include "kernels/mamba2/exponents.tile.hpp"
#include "kernels/mamba2/outputs.tile.hpp"

// The scan in chunks of C steps. With G the cumulative sums of dt A inside a chunk, and h the state before it:
//
//   y_i = exp(G_i) h C_i + sum over j <= i of exp(G_i - G_j) dt_j (C_i B_j) x_j
//   h'  = exp(G_C) h + sum over j of exp(G_C - G_j) dt_j x_j B_j^T
//
// dt is part of the exponents: exp(G_i - G_j) dt_j is exp2 of a difference. A step of size 0 has the exponent -infinity.

namespace tw::kernels::mamba2 {

/// Steps of a chunk: the rows of two warpgroups.
inline constexpr int kChunk = 128;

/// Sequences and their chunks: of equal length, or packed one after the other in a tensor of batch 1. Chunks are numbered; if sequences
/// are packed, a number may stand for no chunk.
template <class Target>
struct Chunks {
  Pointer<Target, const i32> cu_seqlens;  ///< [sequences + 1] offsets of packed sequences, or null
  int sequences;
  int length;        ///< of each sequence; of all together if they are packed
  int per_sequence;  ///< chunks of a sequence, if they are not packed

  struct Sequence {
    int batch;  ///< in the tensors
    int begin, size;
    int first_chunk;
  };
  TW_INLINE Sequence sequence(int n) const {
    if (!cu_seqlens) return {n, 0, length, n * per_sequence};
    const auto found = Segments<Target>{cu_seqlens, sequences, length}.at(n);
    return {0, found.begin, found.size, found.begin / kChunk + n};
  }
  /// Steps `first` to `end` - 1: a chunk has the first kChunk of them.
  struct Chunk {
    int batch;
    int first, end;
    bool empty;
  };
  TW_INLINE Chunk chunk(int n) const {
    if (!cu_seqlens) {
      const int batch = n / per_sequence;
      return {batch, (n - batch * per_sequence) * kChunk, length, false};
    }
    const auto part = Segments<Target>{cu_seqlens, sequences, length}.find(n, kChunk);
    return {0, part.first, part.end, part.empty};
  }
};

/// The exponents of a chunk's factors, in powers of two: `until` are the sums up to each step, `from` those minus log2 of the step's size,
/// and `after` the sums after each step plus log2 of its size. A tile is one chunk of R heads.
template <class T, int R>
struct ChunkExponents {
  static constexpr const char* source = "kernels/mamba2/scan.tile.hpp";

  template <class Target>
  struct On {
    using Values = Rows<Target, float, R, kChunk, 4, 4>;
    using OfHeads = RowVector<Target, float, Values>;
    struct Params {
      Global<Target, const T> dt;                        ///< [batch, head, time]
      Global<Target, const float> rate, bias;            ///< [head, 1]; bias may have no elements
      Global<Target, float, Values> until, from, after;  ///< [head, chunk * kChunk + step]
      Pointer<Target, const i32> seq_idx;                ///< [batch, time], or null
      i64 seq_batch, seq_time;                           ///< strides
      Chunks<Target> chunks;
      StepSize size;
    };

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const auto chunk = p.chunks.chunk(t.m);
      if (chunk.empty) return;
      const int head0 = t.n * R, left = min(chunk.end - chunk.first, kChunk), at = t.m * kChunk;
      OfHeads rate, bias;
      block.load(rate, p.rate, head0, 0);
      block.load(bias, p.bias, head0, 0);
      Values sizes, later, sums;
      block.load(sizes, p.dt, head0, chunk.first, chunk.batch);
      block.load(later, p.dt, head0, chunk.first + 1, chunk.batch);  // from one step later, so that nothing has to be subtracted
      const auto to_size = [size = p.size](auto dt, auto b) { return size.of(dt + b); };
      block.map(sizes, bias, to_size);
      block.map(later, bias, to_size);
      step_exponents(block, p, sizes, sums, rate, chunk.batch, chunk.first, chunk.end);
      block.row_cumsum(sums);
      block.store(sums, p.until, head0, at);
      block.map(sums, sizes, [](auto sum, auto size) { return sum - log2(size); });
      block.store(sums, p.from, head0, at);
      step_exponents(block, p, later, sums, rate, chunk.batch, chunk.first + 1, chunk.end);
      block.for_each(sums, [&](int, int col, auto& x) {
        if (col + 1 >= left) x = 0.0f;
      });
      block.row_cumsum(sums, Backward{});
      block.map(sums, sizes, [](auto sum, auto size) { return sum + log2(size); });
      block.store(sums, p.after, head0, at);
    }
  };
};

/// The whole scan of a head in one walk, with D and the gate: every tensor is read or written once. A tile is N columns of one head of one
/// sequence. The state, D x N, stays in registers, transposed.
template <class T, int D, int N, bool kGated>
struct Scan {
  static constexpr const char* source = "kernels/mamba2/scan.tile.hpp";

  template <class Target>
  struct On {
    static constexpr int rows = kChunk;
    static constexpr int vector_bytes = 64;  // on a CPU the exponentials take long
    using Q = Shared<Target, T, kChunk, D>;
    using X = Shared<Target, T, kChunk, N, Contract::rows>;
    using Exponents = SharedVector<Target, float, kChunk>;
    using Scores = Fragment<Target, float, kChunk, kChunk>;
    using Weights = Operand<Target, T, kChunk, kChunk>;
    using Values = Fragment<Target, float, kChunk, N>;

    struct Params {
      Global<Target, const T, Q> c, b;                            ///< [batch, group, time, D]
      Global<Target, const T, X> x, z;                            ///< [batch, head, time, columns]; z only if gated
      Global<Target, const float, Exponents> until, from, after;  ///< ChunkExponents'
      Global<Target, const float> skip;                           ///< [head, columns], or without elements
      Global<Target, const float> initial;                        ///< [sequence, head, D, columns], or without elements: 0
      Global<Target, float> final;                                ///< as initial; without elements it is not stored
      Global<Target, T> y;                                        ///< as x
      Chunks<Target> chunks;
      int heads, shared;  ///< shared: heads for each group
    };
    struct Keys {
      Q c, b;
    };
    struct Inputs {
      X x;
      Exponents until, from, after;
    };
    /// A gate is needed last, so one slot is enough. Without one its slot is small.
    using Gate = conditional<kGated, X, Shared<Target, T, 8, 16>>;
    struct Memory {
      Ring<Target, Keys, 2> keys;
      Ring<Target, Inputs, 2> inputs;
      Ring<Target, Gate, 1> gate;
      Buffer<Target, T, D, N, Contract::rows> state;
      Buffer<Target, T, kChunk, N, Contract::rows> scaled;
      VectorBuffer<Target, float, N> skip;
      explicit constexpr Memory(auto& block) : keys(block), inputs(block), gate(block), state(block), scaled(block), skip(block) {}
    };
    struct State {
      Fragment<Target, float, D, N> sum;
    };
    struct Locals {
      Scores scores;
      Values values;
    };
    struct Work {
      int sequence, head, col0;
      int batch, begin, size, first_chunk;
    };

    TW_INLINE static Work work(const Params& p, Tile t) {
      const int sequence = t.m / p.heads;
      const auto found = p.chunks.sequence(sequence);
      return {sequence, t.m - sequence * p.heads, t.n * N, found.batch, found.begin, found.size, found.first_chunk};
    }
    TW_INLINE static int steps(const Params&, const Work& w) { return ceil_div(w.size, kChunk); }

    TW_INLINE static void load(auto& producer, const Params& p, const Work& w, int step, Memory& memory) {
      const int row = w.begin + step * kChunk, at = (w.first_chunk + step) * kChunk;
      if (step == 0) load_keys(producer, p, w, 0, memory);
      producer.put(memory.inputs, [&](auto copy, Inputs& slot) {
        copy.tile(p.x, slot.x, row, w.col0, w.head, w.batch);
        copy.vector(p.until, slot.until, w.head, at);
        copy.vector(p.from, slot.from, w.head, at);
        copy.vector(p.after, slot.after, w.head, at);
      });
      if constexpr (kGated) producer.put(memory.gate, [&](auto copy, Gate& slot) { copy.tile(p.z, slot, row, w.col0, w.head, w.batch); });
      if (step + 1 < steps(p, w)) load_keys(producer, p, w, step + 1, memory);
    }
    TW_INLINE static void load_keys(auto& producer, const Params& p, const Work& w, int step, Memory& memory) {
      producer.put(memory.keys, [&](auto copy, Keys& slot) {
        copy.tile(p.c, slot.c, w.begin + step * kChunk, 0, w.head / p.shared, w.batch);
        copy.tile(p.b, slot.b, w.begin + step * kChunk, 0, w.head / p.shared, w.batch);
      });
    }

    /// The scores of a chunk do not need the state, so they are computed while the outputs of the chunk before are finished.
    TW_INLINE static void compute(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      block.load(state.sum, p.initial, 0, w.col0, w.head, w.sequence);
      const int n = steps(p, w);
      if (n == 0) return;
      block.parallel(N, [&](int col) { memory.skip[col] = block.value(p.skip, w.head, w.col0 + col); });
      Keys* keys = &block.take(memory.keys);
      Scores scores;
      block.mma(scores, keys->c, keys->b, true);
      block.wait(leave<0>, scores);
      for (int step = 0; step < n; ++step) {
        const int row0 = w.begin + step * kChunk, left = w.size - step * kChunk;
        Inputs& inputs = block.take(memory.inputs);
        const auto decay = exp2(inputs.until[kChunk - 1]);  // of the chunk
        {  // Factors of the dimension that the state's product sums over must be in an operand.
          Values scaled;
          RowVector<Target, float, Values> after;
          block.load(scaled, inputs.x);
          block.load(after, inputs.after);
          block.for_rows(after, [](int, int, auto& e) { e = exp2(e); });
          block.map(scaled, after, [](auto x, auto factor) { return x * factor; });
          if (left < kChunk) {
            block.for_each(scaled, [&](int row, int, auto& x) {
              if (row >= left) x = 0.0f;
            });
          }
          block.store(scaled, memory.scaled);
        }
        block.store(state.sum, memory.state);
        // The rows after a packed sequence's end are another's, and may be NaN.
        if (left < kChunk) {
          block.zero_rows(keys->b, left);
          block.zero_rows(inputs.x, left);
        }
        block.fence();
        block.sync();
        Values out;
        block.mma(out, keys->c, memory.state, true);
        block.for_each(state.sum, [&](int, int, auto& x) { x = x * decay; });
        block.mma(state.sum, view<Contract::rows>(keys->b), memory.scaled, false);
        Weights weights;
        {  // Under these products.
          RowVector<Target, float, Scores> until;
          ColumnVector<Target, float, Scores> from;
          block.load(until, inputs.until);
          block.load(from, inputs.from);
          block.map(scores, until, from, [](auto x, auto to, auto since) { return x * exp2(to - since); });
          block.for_each(scores, [](int row, int col, auto& x) {
            if (row < col) x = 0.0f;
          });
          if (left < kChunk) {
            block.for_each(scores, [&](int, int col, auto& x) {
              if (col >= left) x = 0.0f;
            });
          }
          block.convert(weights, scores);
        }
        RowVector<Target, float, Values> until;
        block.load(until, inputs.until);
        block.for_rows(until, [](int, int, auto& e) { e = exp2(e); });
        block.wait(leave<1>, out);
        block.map(out, until, [](auto x, auto factor) { return x * factor; });
        block.mma(out, weights, inputs.x, false);
        const auto begin_scores = [&] {
          // After the last chunk the same scores again, for nothing: a product under a condition would not be asynchronous.
          if (step + 1 < n) keys = &block.take(memory.keys);
          block.mma(scores, keys->c, keys->b, true);
        };
        constexpr int younger = Target::whole_pieces;  // otherwise there are too few registers for scores beside a gate
        if constexpr (younger > 0) begin_scores();
        block.wait(leave<younger>, state.sum, out);
        finish_outputs(block, p, memory, inputs, out);
        block.scatter(
            out, p.y, [&](int row) { return row < left ? row0 + row : -1; }, w.col0, w.head, w.batch);
        if constexpr (younger == 0) begin_scores();
        block.wait(leave<0>, scores);
        block.sync();
        block.release(memory.keys);
        block.release(memory.inputs);
        if constexpr (kGated) block.release(memory.gate);
      }
    }

    TW_INLINE static void finish(auto& block, const Params& p, const Work& w, Memory&, State& state) {
      block.store(state.sum, p.final, 0, w.col0, w.head, w.sequence);
    }

   private:
    /// (out + D x) silu(z).
    TW_INLINE static void finish_outputs(auto& block, const Params& p, Memory& memory, Inputs& inputs, Values& out) {
      Values values;
      if (p.skip.cols > 0) {
        ColumnVector<Target, float, Values> skip;
        block.load(skip, memory.skip);
        block.load(values, inputs.x);
        add_skip(block, out, values, skip);
      }
      if constexpr (kGated) {
        Gate& gate = block.take(memory.gate);
        block.load(values, gate);
        apply_gate(block, out, values);
      }
    }
  };
};

}  // namespace tw::kernels::mamba2
