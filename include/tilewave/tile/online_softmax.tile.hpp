#pragma once

#include "tilewave/tile/language.tile.hpp"

namespace tw {

/// The softmax of rows whose scores arrive one block of keys at a time (Dao et al. 2022, FlashAttention). A score x adds 2^(x * scale_log2
/// - base + kLargest) to its row's sum. A row keeps its base until an exponential would exceed 2^kLargest (lazy rescaling); in practice it
/// is rescaled once or never. `kMaximaFirst`: AttentionConfig::maxima_first. `Weight`: what the exponentials are rounded to for the next
/// product.
template <class Target, class Scores, bool kMaximaFirst, class Weight = bf16>
struct OnlineSoftmax {
  using PerRow = RowVector<Target, float, Scores>;
  /// Weights are at most 2^kLargest: 1 for 16-bit weights. e4m3 has three mantissa bits from 2^-6 on, fewer below, and nothing below 2^-10.
  /// Weights up to 2^8 (e4m3 ends at 448) have a whole mantissa down to 2^-14 of the largest.
  static constexpr float kLargest = is_fp8<Weight> ? 8.0f : 0.0f;
  /// A new base is kHeadroom above the row's largest exponent so far, so that later exponentials may be 2^kHeadroom times as large. For
  /// e4m3 headroom costs range at the small end: with 3, weights have a whole mantissa down to 2^-11 of the row's largest, and in rows of
  /// random scores the first block's maximum is rarely exceeded by a factor of 8.
  static constexpr float kHeadroom = is_fp8<Weight> ? 3.0f : 8.0f;
  /// The base of a row that has not seen a key. It is finite, so that -infinity minus it is -infinity.
  static constexpr float kUnseen = -1e30f;

  PerRow base;
  PerRow sum;  ///< this thread's partial sum, until block.complete(sum)

  TW_INLINE void begin(auto& block) {
    block.fill(base, kUnseen);
    block.fill(sum, 0.0f);
  }

  /// Sets the base of rows that see their first key in these scores.
  TW_INLINE void set_first_bases(auto& block, float scale_log2, Scores& scores) {
    block.rows(scores, [&](int i, auto row) {
      const auto largest = row.max();
      const bool first = base[i] == kUnseen && largest != -kInfinity;
      base[i] = first ? largest * scale_log2 + kHeadroom : base[i];
    });
  }

  /// Turns scores into exponentials and adds them to `sum`. Returns whether a row of this warp was rescaled: then the output so far must be
  /// multiplied by `decay`. Without kMaximaFirst, prepare(Constant<first>, Constant<count>) is called for each half of the columns before
  /// it is used.
  template <class Prepare>
  TW_INLINE bool add(auto& block, float scale_log2, Scores& scores, PerRow& decay, Prepare prepare) {
    block.fill(decay, 1.0f);
    if constexpr (kMaximaFirst) {
      const bool rescaled = rescale_by_maxima(block, scale_log2, scores, decay);
      block.rows(scores, [&](int i, auto row) {
        const auto b = zero(i);
        if constexpr (requires { row.map_exponentials(scale_log2, b); })
          sum[i] += row.map_exponentials(scale_log2, b);
        else
          sum[i] += row.map_partial_sum([&](auto x) { return exp2(x * scale_log2 - b); });
      });
      return rescaled;
    } else {
      // In two halves: the exponents of the second are computed under the exponentials of the first.
      constexpr int half = (Scores::cols + 31) / 32 * 16, rest = Scores::cols - half;
      prepare(Constant<0>{}, Constant<half>{});
      const bool first = exponents<0, half>(block, scale_log2, scores);
      if (first) rescale<0, half>(block, scores, decay);
      prepare(Constant<half>{}, Constant<rest>{});
      add_exponentials<0, half>(block, scores);
      const bool second = exponents<half, rest>(block, scale_log2, scores);
      if (second) rescale<half, rest>(block, scores, decay);
      add_exponentials<half, rest>(block, scores);
      return first || second;
    }
  }

  /// Adds a sink to each row: a summand without a value. `sink_of(row)` is its exponent. `scale` is set to the factor by which the output
  /// must be multiplied.
  template <class SinkOf>
  TW_INLINE void add_sink(auto& block, SinkOf sink_of, PerRow& scale) {
    block.for_rows(sum, [&](int row, int i, auto& total) {
      const auto sink = sink_of(row);
      const auto larger = max(zero(i), sink);
      scale[i] = exp2(zero(i) - larger);
      total = total * scale[i] + exp2(sink - larger);
      base[i] = kLargest == 0.0f ? larger : larger + kLargest;
    });
  }
  /// The natural logarithm of row i's sum of exp(score); -infinity for a row that has seen no key.
  TW_INLINE auto lse(int i) const { return sum[i] == 0.0f ? -kInfinity : (zero(i) + log2(sum[i])) * kLn2; }

 private:
  /// The exponent of a weight of 1.
  TW_INLINE auto zero(int i) const {
    if constexpr (kLargest == 0.0f)
      return base[i];
    else
      return base[i] - kLargest;
  }
  /// 2^(x + kLargest)
  TW_INLINE static auto weight(auto x) {
    if constexpr (kLargest == 0.0f)
      return exp2(x);
    else
      return exp2(x + kLargest);
  }
  /// Turns the scores of some columns into exponents, less kLargest. Returns whether any exponent of this warp is positive: then rescale()
  /// must follow.
  template <int kFirst, int kCount>
  TW_INLINE bool exponents(auto& block, float scale_log2, Scores& scores) {
    RowVector<Target, bool, Scores> over;
    block.rows(scores, [&](int i, auto row) {
      const auto b = base[i];
      over[i] = row.template columns<kFirst, kCount>().map_any_positive([&](auto x) { return x * scale_log2 - b; });
    });
    return block.any(over, [](bool x) { return x; });
  }
  /// Raises the bases of rows that have a positive exponent in these columns. The columns before them already hold exponentials. `decay` is
  /// multiplied by the factor that earlier exponentials need.
  template <int kFirst, int kCount>
  TW_INLINE void rescale(auto& block, Scores& scores, PerRow& decay) {
    block.rows(scores, [&](int i, auto row) {
      const auto largest = row.template columns<kFirst, kCount>().max();
      const auto by = largest > 0.0f ? largest + kHeadroom : 0.0f;
      const auto less = exp2(-by);
      base[i] += by;
      sum[i] *= less;
      decay[i] *= less;
      if constexpr (kFirst > 0) row.template columns<0, kFirst>().map([&](auto x) { return x * less; });
      row.template columns<kFirst, kCount>().map([&](auto x) { return x - by; });
    });
  }
  /// Turns exponents into exponentials and adds them to `sum`.
  template <int kFirst, int kCount>
  TW_INLINE void add_exponentials(auto& block, Scores& scores) {
    block.rows(scores, [&](int i, auto row) {
      sum[i] += row.template columns<kFirst, kCount>().map_partial_sum([](auto x) { return weight(x); });
    });
  }
  /// Raises the bases of rows whose largest score exceeds them. Returns false if this warp has no such row.
  TW_INLINE bool rescale_by_maxima(auto& block, float scale_log2, Scores& scores, PerRow& decay) {
    RowVector<Target, bool, Scores> over;
    block.rows(scores, [&](int i, auto row) { over[i] = row.partial_max() * scale_log2 > base[i]; });
    const bool rescaled = block.any(over, [](bool x) { return x; });
    if (rescaled) {
      block.rows(scores, [&](int i, auto row) {
        const auto largest = row.max() * scale_log2;
        const auto raised = largest > base[i] ? largest + kHeadroom : base[i];
        decay[i] = exp2(base[i] - raised);
        base[i] = raised;
        sum[i] *= decay[i];
      });
    }
    return rescaled;
  }
};

}  // namespace tw
