#pragma once

#include "kernels/gated_delta/gated_delta.tile.hpp"

// The walk for keys of 129 to 256 dimensions.

namespace tw::kernels::gated_delta {

inline constexpr const char* kWideSource = "kernels/gated_delta/wide.tile.hpp";
/// The most dimensions of a key.
inline constexpr int kMostDims = 256;

/// Walk for 256 dimensions and 64 values. The state takes 128 registers of each thread, so its halves are loaded, shared and updated one
/// after the other, and one product after the other adds to what little else there is room for: P comes first, and what the state adds up
/// is stored before O begins.
template <class T, int Stages>
struct WideWalk {
  static constexpr const char* source = kWideSource;
  static constexpr int D = kMostDims, Half = D / 2, Slice = 64;

  template <class Target>
  struct On : Walk<T, D, Slice, Stages>::template On<Target> {
    using Of = typename Walk<T, D, Slice, Stages>::template On<Target>;
    using typename Of::Inverse, typename Of::Params, typename Of::Slot, typename Of::Tokens, typename Of::Work;
    using Square = Fragment<Target, float, kChunk, kChunk>;
    using Part = Fragment<Target, float, kChunk, Slice>;

    struct Memory {
      Ring<Target, Slot, Stages> keys;
      Ring<Target, Tokens, 1> queries;
      Ring<Target, Inverse, 1> inverses;
      Buffer<Target, T, Half, Slice, Contract::rows> low, high;
      Buffer<Target, T, kChunk, Slice, Contract::rows> updates, decayed;
      Buffer<Target, T, kChunk, kChunk> weights;
      explicit constexpr Memory(auto& block)
          : keys(block), queries(block), inverses(block), low(block), high(block), updates(block), decayed(block), weights(block) {}
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
        const int token = w.sequence.begin + step * kChunk, size = w.sequence.size - step * kChunk;
        Slot& slot = block.take(memory.keys);
        const Tokens& q = block.take(memory.queries);
        // As in Walk: the rows after a sequence's last token may be another sequence's.
        if (size < kChunk) block.zero_rows(slot.k, size);
        RowVector<Target, float, Square> decay, scale;
        block.load(decay, slot.decay);
        block.load(scale, slot.scale);
        const auto whole = slot.decay[kChunk - 1];
        store_weights(block, q, slot, decay, memory);
        block.store(state.high, memory.high);
        share(block, state.low, memory.low);

        Part old, updates;
        times_state(block, old, slot.k, memory);
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
        block.sync();
        block.store(updates, memory.updates);
        block.map(updates, decay, [whole](auto u, auto d) { return u * exp(whole - d); });
        share(block, updates, memory.decayed);

        Part out;
        times_state(block, out, q, memory);
        block.wait(leave<0>, out);
        block.release(memory.queries);
        block.map(out, decay, [](auto o, auto d) { return o * exp(d); });
        block.mma(out, memory.weights, memory.updates, false);
        block.map(state.low, [whole](auto value) { return value * exp(whole); });
        block.map(state.high, [whole](auto value) { return value * exp(whole); });
        block.mma(state.low, view<Contract::rows>(view_columns<0, Half>(slot.k)), memory.decayed, false);
        block.mma(state.high, view<Contract::rows>(view_columns<Half, Half>(slot.k)), memory.decayed, false);
        block.wait(leave<2 * in_flight<Target>>, out);
        const float factor = p.factor;
        block.map(out, [factor](auto o) { return o * factor; });
        block.scatter(
            out, p.o, [&](int row) { return row < size ? token + row : -1; }, w.col, w.head, w.sequence.batch);
        block.wait(leave<0>, state.low, state.high);
        block.sync();
        block.release(memory.keys);
      }
    }
    TW_INLINE static void finish(auto& block, const Params& p, const Work& w, Memory&, State& state) {
      if (p.final_state.cols == 0) return;
      block.store(state.low, p.final_state, 0, w.col, w.head, w.n);
      block.store(state.high, p.final_state, Half, w.col, w.head, w.n);
    }

   private:
    /// P.
    TW_INLINE static void store_weights(auto& block, const Tokens& q, const Slot& slot, const auto& decay, Memory& memory) {
      Square x;
      ColumnVector<Target, float, Square> decay_of_columns;
      block.mma(x, q, slot.k, true);
      block.load(decay_of_columns, slot.decay);
      block.wait(leave<0>, x);
      block.map(x, decay, decay_of_columns, [](auto qk, auto row, auto col) { return qk * exp(row - col); });
      block.for_each(x, [](int row, int col, auto& value) {
        if (col > row) value = 0.0f;
      });
      block.store(x, memory.weights);
    }
    /// product = rows S, for queries or keys.
    TW_INLINE static void times_state(auto& block, Part& product, const Tokens& rows, Memory& memory) {
      block.mma(product, view_columns<0, Half>(rows), memory.low, true);
      block.mma(product, view_columns<Half, Half>(rows), memory.high, false);
    }
  };
};

}  // namespace tw::kernels::gated_delta
