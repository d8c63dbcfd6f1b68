#pragma once

#include "kernels/mamba2/step_size.tile.hpp"

// Decays inside a chunk, as the walk (scan.tile.hpp) and the scan in five steps (chunk_states.tile.hpp, chunk_outputs.tile.hpp) have them.

namespace tw::kernels::mamba2 {

/// The lowest exponent of a step's decay, a power of two. exp2 of it is 0, and so are all products with it. A sum of a chunk's exponents
/// stays finite, so no difference of two is NaN.
inline constexpr float kLowestExponent = -160.0f;

/// sizes(head, i) = the size of step first + i.
template <class Values>
TW_INLINE void load_sizes(auto& block, const auto& p, Values& sizes, const auto& bias, int head0, int batch, int first) {
  const StepSize size = p.size;
  block.load(sizes, p.dt, head0, first, batch);
  block.map(sizes, bias, [=](auto dt, auto b) { return size.of(dt + b); });
}

/// exponents(head, i) = log2 of the decay of step first + i, for steps before `end`, else 0.
template <class Values>
TW_INLINE void step_exponents(auto& block, const auto& p, const Values& sizes, Values& exponents, const auto& rate, int batch, int first,
                              int end) {
  exponents = sizes;
  block.map(exponents, rate, [](auto size, auto r) { return max_or_nan(log_decay(size, r) * kLog2E, kLowestExponent); });
  block.for_each(exponents, [&](int, int col, auto& x) {
    const int time = first + col;
    if (time >= end) x = 0.0f;
    if (p.seq_idx && time > 0 && time < end) {
      const i64 at = batch * p.seq_batch + time * p.seq_time;
      if (p.seq_idx[at] != p.seq_idx[at - p.seq_time]) x = kLowestExponent;
    }
  });
}

/// scores(i, j) *= exp2((until(i) - since(j)) unit) for j <= i + diagonal and j < columns. Others become 0, whatever they and their decay
/// are.
TW_INLINE void decay_scores(auto& block, auto& scores, const auto& until, const auto& since, float unit, int diagonal, int columns) {
  block.map(scores, until, since, [=](auto x, auto to, auto from) { return x * exp2((to - from) * unit); });
  block.for_each(scores, [&](int row, int col, auto& x) {
    if (row + diagonal < col || col >= columns) x = 0.0f;
  });
}

}  // namespace tw::kernels::mamba2
