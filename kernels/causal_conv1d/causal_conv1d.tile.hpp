#pragma once

#include "tilewave/tile/language.tile.hpp"

// Depthwise causal convolution over time. A block has a run of time steps of some channels. It walks along the run with the inputs that the
// filter still sees in registers, so each input is read once.

namespace tw::kernels::causal_conv1d {

/// Time steps whose loads are in flight together, and blocks for each SM, which leave each thread the registers for that: the best of those
/// measured on an H200 (NOTES.md). Copies other than in whole pieces of 16 bytes need more registers.
constexpr int forward_steps(int width, int taps) { return width == 8 && taps == 4 ? 8 : 4; }
constexpr int forward_blocks(int width, int bytes_of_x, bool whole_pieces) {
  if (width == 8) return whole_pieces ? 4 : 2;
  return !whole_pieces ? 5 : bytes_of_x == 2 ? 8 : 6;
}
constexpr int backward_steps(int bytes_of_x) { return bytes_of_x == 2 ? 8 : 4; }
constexpr int backward_blocks(int bytes_of_x, bool whole_pieces) { return !whole_pieces ? 4 : bytes_of_x == 2 ? 7 : 6; }

/// Part of a sequence: the time steps from `first` to `end` - 1.
struct Run {
  int i;         ///< index of the batch in x
  int sequence;  ///< index of its states
  int begin, sequence_end;
  int first, end;
  bool last;  ///< it reaches the end of its sequence; of an empty sequence there is one run, which is the last
};

/// The sequences of a call: [batch, length], or with offsets a batch of one with all sequences one after the other.
template <class Target>
struct Sequences {
  Segments<Target> segments;  ///< count is 0 without offsets
  int length;                 ///< of every sequence, without offsets
  int run;                    ///< steps of a run

  TW_INLINE Run find(Tile t) const {
    Run r;
    if (segments.count > 0) {
      const auto part = segments.find(t.m, run);
      const auto segment = segments.at(part.segment);
      r = {0, part.segment, segment.begin, part.end, part.first, part.empty ? part.first : min(part.first + run, part.end), false};
    } else {
      r = {t.batch, t.batch, 0, length, t.m * run, min(t.m * run + run, length), false};
    }
    const bool empty = r.begin >= r.sequence_end;
    r.last = empty ? r.first == r.begin : r.first < r.end && r.end == r.sequence_end;
    return r;
  }
};

template <class Target, class X, class W, int C, int Width>
struct Common {
  using Values = Rows<Target, float, 1, C, 4, Width>;
  Global<Target, const X, Values> x;      ///< [batch, time, channels]
  Global<Target, const X> initial_state;  ///< [sequence, taps - 1, channels], or none
  Global<Target, const W> weight, bias;   ///< [taps, channels], oldest first; [1, channels], or none
  Sequences<Target> sequences;
  bool silu;
};

/// The inputs of the taps - 1 steps before step `time`. Those before the sequence's first are its initial state.
template <int kTaps>
TW_INLINE void load_history(auto& block, const auto& p, auto* x, const Run& run, int time, int col) {
  TW_UNROLL
  for (int n = 0; n < kTaps - 1; ++n) {
    const int row = time - (kTaps - 1) + n;
    if (row >= run.begin)
      block.load(x[n], p.x, row, col, run.i);
    else
      block.load(x[n], p.initial_state, row - run.begin + (kTaps - 1), col, run.sequence);
  }
}

/// sum = bias + the products of the inputs from x[0] on with the filter.
template <int kTaps>
TW_INLINE void convolve(auto& block, const auto* x, const auto* taps, const auto& bias, auto& sum) {
  sum = x[0];
  block.map(sum, taps[0], bias, [](auto v, auto w, auto b) { return b + v * w; });
  TW_UNROLL
  for (int k = 1; k < kTaps; ++k) block.map(sum, x[k], taps[k], [](auto s, auto v, auto w) { return s + v * w; });
}

template <class X, class W, int kTaps, int C, int Width>
struct Forward {
  static constexpr const char* source = "kernels/causal_conv1d/causal_conv1d.tile.hpp";

  template <class Target>
  struct On {
    static constexpr int kSteps = forward_steps(Width, kTaps);
    static constexpr int min_blocks = forward_blocks(Width, sizeof(X), Target::whole_pieces);
    using Values = typename Common<Target, X, W, C, Width>::Values;
    struct Params : Common<Target, X, W, C, Width> {
      Global<Target, X, Values> y;
      Global<Target, X> final_state;  ///< as the initial state
    };

    /// The steps from `time` on; with kWhole all of them are of the run.
    template <int kSilu, bool kWhole>
    TW_INLINE static void filter(auto& block, const Params& p, const Run& run, int time, int col, const auto* taps, const auto& bias,
                                 Values* x) {
      const int count = kWhole ? kSteps : run.end - time;
      const auto x_rows = p.x.part(time, count, run.i);
      const auto y_rows = p.y.part(time, count, run.i);
      Values y;
      TW_UNROLL
      for (int n = 0; n < kSteps; ++n) block.load(x[kTaps - 1 + n], x_rows, n, col);
      TW_UNROLL
      for (int n = 0; n < kSteps; ++n) {
        convolve<kTaps>(block, x + n, taps, bias, y);
        if (kSilu != 0) block.map(y, [](auto v) { return v * sigmoid(v); });
        block.store(y, y_rows, n, col);
      }
      TW_UNROLL
      for (int n = 0; n < kTaps - 1; ++n) x[n] = x[kSteps + n];
    }
    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const Run run = p.sequences.find(t);
      const int col = t.n * C;
      ColumnVector<Target, float, Values> taps[kTaps], bias;
      TW_UNROLL
      for (int k = 0; k < kTaps; ++k) block.load(taps[k], p.weight, k, col);
      block.load(bias, p.bias, 0, col);
      Values x[kTaps - 1 + kSteps];
      load_history<kTaps>(block, p, x, run, run.first, col);
      const auto walk = [&]<int kSilu>(Constant<kSilu>) {
        int time = run.first;
        TW_NO_UNROLL
        for (; time + kSteps <= run.end; time += kSteps) filter<kSilu, true>(block, p, run, time, col, taps, bias, x);
        if (time < run.end) filter<kSilu, false>(block, p, run, time, col, taps, bias, x);
      };
      p.silu ? walk(Constant<1>{}) : walk(Constant<0>{});
      if (!run.last || p.final_state.cols == 0) return;
      // All of the initial state is read before the final state is written, which may be in its place.
      load_history<kTaps>(block, p, x, run, run.sequence_end, col);
      TW_UNROLL
      for (int n = 0; n < kTaps - 1; ++n) block.store(x[n], p.final_state, n, col, run.sequence);
    }
  };
};

/// dz, the gradient of the sums before the activation, from that of y: dz = dy silu'(z).
template <int kTaps>
TW_INLINE void apply_derivative(auto& block, const auto* x, const auto* taps, const auto& bias, auto& dy) {
  auto z = x[0];
  convolve<kTaps>(block, x, taps, bias, z);
  block.map(dy, z, [](auto d, auto v) {
    const auto s = sigmoid(v);
    return d * s * (1.0f + v * (1.0f - s));
  });
}

/// Adds the part that the final state's gradient has in that of the input at `time`.
template <int kTaps>
TW_INLINE void add_final_gradient(auto& block, const auto& p, auto& dx, auto& scratch, const Run& run, int time, int col) {
  const int row = time - run.sequence_end + (kTaps - 1);
  if (row < 0 || p.d_final_state.cols == 0) return;
  block.load(scratch, p.d_final_state, row, col, run.sequence);
  block.map(dx, scratch, [](auto a, auto b) { return a + b; });
}

/// dx(t) = sum over k of w(taps - 1 - k) dz(t + k), and each run's part of the sums dw(k) = sum over t of dz(t) x(t - taps + 1 + k) and
/// db = sum over t of dz(t).
template <class X, class W, int kTaps, int C, int Width>
struct Backward {
  static constexpr const char* source = "kernels/causal_conv1d/causal_conv1d.tile.hpp";

  template <class Target>
  struct On {
    static constexpr int kSteps = backward_steps(sizeof(X));
    static constexpr int min_blocks = backward_blocks(sizeof(X), Target::whole_pieces);
    static_assert(kSteps >= kTaps - 1, "of a run's groups of steps only the first one has gradients of steps before the run");
    using Values = typename Common<Target, X, W, C, Width>::Values;
    struct Params : Common<Target, X, W, C, Width> {
      Global<Target, const X, Values> dy;
      Global<Target, const X> d_final_state;
      Global<Target, X, Values> dx;
      Global<Target, float, Values> sums;  ///< [taps + 1, runs, channels]; the last is db
      int runs;                            ///< of a batch
    };

    /// The steps from `time` on. dx[n] is that of step time - (taps - 1) + n. With kInside all steps of which dz or dx are computed are of
    /// the run, and none is among the last, to which the final state's gradient adds.
    template <int kSilu, bool kInside>
    TW_INLINE static void differentiate(auto& block, const Params& p, const Run& run, int time, int col, const auto* taps, const auto& bias,
                                        Values* x, Values* dx, Values* dw) {
      constexpr int kHistory = kTaps - 1;
      const int count = kInside ? kSteps : max(min(run.sequence_end - time, kSteps), 0);  // zeros after the sequence's end
      const auto x_rows = p.x.part(time, count, run.i), dy_rows = p.dy.part(time, count, run.i);
      Values dz[kSteps];
      TW_UNROLL
      for (int n = 0; n < kSteps; ++n) {
        block.load(x[kHistory + n], x_rows, n, col);
        block.load(dz[n], dy_rows, n, col);
        block.fill(dx[kHistory + n], 0.0f);
      }
      TW_UNROLL
      for (int n = 0; n < kSteps; ++n) {
        if (kSilu != 0) apply_derivative<kTaps>(block, x + n, taps, bias, dz[n]);
        TW_UNROLL
        for (int k = 0; k < kTaps; ++k) block.map(dx[n + k], dz[n], taps[k], [](auto s, auto d, auto w) { return s + d * w; });
        if (!kInside && time + n >= run.end) continue;
        TW_UNROLL
        for (int k = 0; k < kTaps; ++k) block.map(dw[k], dz[n], x[n + k], [](auto s, auto d, auto v) { return s + d * v; });
        block.map(dw[kTaps], dz[n], [](auto s, auto d) { return s + d; });
      }
      if (kInside) {
        const auto dx_rows = p.dx.part(time - kHistory, kSteps, run.i);
        TW_UNROLL
        for (int n = 0; n < kSteps; ++n) block.store(dx[n], dx_rows, n, col);
      } else {
        TW_UNROLL
        for (int n = 0; n < kSteps; ++n) {
          const int row = time - kHistory + n;
          if (row < run.first || row >= run.end) continue;
          add_final_gradient<kTaps>(block, p, dx[n], dz[0], run, row, col);
          block.store(dx[n], p.dx, row, col, run.i);
        }
      }
      TW_UNROLL
      for (int n = 0; n < kHistory; ++n) {
        x[n] = x[kSteps + n];
        dx[n] = dx[kSteps + n];
      }
    }
    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const Run run = p.sequences.find(t);
      const int col = t.n * C;
      ColumnVector<Target, float, Values> taps[kTaps], bias;
      TW_UNROLL
      for (int k = 0; k < kTaps; ++k) block.load(taps[k], p.weight, k, col);
      block.load(bias, p.bias, 0, col);
      Values x[kTaps - 1 + kSteps], dx[kTaps - 1 + kSteps], dw[kTaps + 1];
      TW_UNROLL
      for (int k = 0; k < kTaps + 1; ++k) block.fill(dw[k], 0.0f);
      TW_UNROLL
      for (int n = 0; n < kTaps - 1; ++n) block.fill(dx[n], 0.0f);
      if (run.first < run.end) load_history<kTaps>(block, p, x, run, run.first, col);
      const auto walk = [&]<int kSilu>(Constant<kSilu>) {
        // The last steps of the run need dz of the steps after it.
        int time = run.first;
        TW_NO_UNROLL
        while (run.first < run.end && time < run.end + kTaps - 1) {
          differentiate<kSilu, false>(block, p, run, time, col, taps, bias, x, dx, dw);
          time += kSteps;
          TW_NO_UNROLL
          for (; time + kSteps <= run.end; time += kSteps) differentiate<kSilu, true>(block, p, run, time, col, taps, bias, x, dx, dw);
        }
      };
      p.silu ? walk(Constant<1>{}) : walk(Constant<0>{});
      TW_UNROLL
      for (int k = 0; k < kTaps + 1; ++k) block.store(dw[k], p.sums, t.batch * p.runs + t.m, col, k);
    }
  };
};

/// The gradient of the initial state: what dx is for the steps before a sequence's first.
template <class X, class W, int kTaps, int C, int Width>
struct InitialGradient {
  static constexpr const char* source = "kernels/causal_conv1d/causal_conv1d.tile.hpp";

  template <class Target>
  struct On {
    using Values = typename Common<Target, X, W, C, Width>::Values;
    struct Params : Common<Target, X, W, C, Width> {
      Global<Target, const X, Values> dy;
      Global<Target, const X> d_final_state;
      Global<Target, X> d_initial_state;
    };

    /// A tile of the grid is a sequence.
    TW_INLINE static Run whole(const Params& p, Tile t) {
      if (p.sequences.segments.count == 0) return {t.batch, t.batch, 0, p.sequences.length, 0, p.sequences.length, true};
      const auto segment = p.sequences.segments.at(t.batch);
      const int end = segment.begin + segment.size;
      return {0, t.batch, segment.begin, end, segment.begin, end, true};
    }
    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      constexpr int kStates = kTaps - 1;
      const Run run = whole(p, t);
      const int col = t.n * C;
      ColumnVector<Target, float, Values> taps[kTaps], bias;
      TW_UNROLL
      for (int k = 0; k < kTaps; ++k) block.load(taps[k], p.weight, k, col);
      block.load(bias, p.bias, 0, col);
      Values x[2 * kStates], dz, dx[kStates];
      load_history<kTaps>(block, p, x, run, run.begin, col);
      TW_UNROLL
      for (int n = 0; n < kStates; ++n) {
        block.load(x[kStates + n], p.x, run.begin + n < run.end ? run.begin + n : -1, col, run.i);
        block.fill(dx[n], 0.0f);
      }
      TW_UNROLL
      for (int n = 0; n < kStates; ++n) {
        block.load(dz, p.dy, run.begin + n < run.end ? run.begin + n : -1, col, run.i);
        if (p.silu) apply_derivative<kTaps>(block, x + n, taps, bias, dz);
        TW_UNROLL
        for (int k = 0; k + n < kStates; ++k) block.map(dx[n + k], dz, taps[k], [](auto s, auto d, auto w) { return s + d * w; });
      }
      TW_UNROLL
      for (int n = 0; n < kStates; ++n) {
        add_final_gradient<kTaps>(block, p, dx[n], dz, run, run.begin - kStates + n, col);
        block.store(dx[n], p.d_initial_state, n, col, run.sequence);
      }
    }
  };
};

/// Adds the runs' parts of a sum, in the same order every time.
template <class W>
struct WeightSums {
  static constexpr const char* source = "kernels/causal_conv1d/causal_conv1d.tile.hpp";
  static constexpr int tile_rows = 32, tile_cols = 128;

  template <class Target>
  struct On {
    using Values = Rows<Target, float, tile_rows, tile_cols, 4, 4>;
    struct Params {
      Global<Target, const float, Values> sums;  ///< [taps + 1, runs, channels]
      Global<Target, W> d_weight;                ///< [taps, 1, channels], or none
      Global<Target, W> d_bias;                  ///< [1, channels], or none
      int taps;
    };

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const int col = t.n * tile_cols;
      Values sum, part;
      block.fill(sum, 0.0f);
      TW_NO_UNROLL
      for (int row = 0; row < p.sums.rows; row += tile_rows) {
        block.load(part, p.sums, row, col, t.batch);
        block.map(sum, part, [](auto a, auto b) { return a + b; });
      }
      ColumnVector<Target, float, Values> total;
      block.column_fold(sum, total, [](auto a, auto b) { return a + b; });
      block.map(sum, total, [](auto, auto value) { return value; });
      // The results have one row: the tile's first.
      if (t.batch < p.taps)
        block.store(sum, p.d_weight, 0, col, t.batch);
      else
        block.store(sum, p.d_bias, 0, col);
    }
  };
};

}  // namespace tw::kernels::causal_conv1d
