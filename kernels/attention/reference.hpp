#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "tilewave/dtype.hpp"

namespace tw::kernels::attention {

/// A call in plain numbers: row-major and dense, values those of the data type. What the options mean: tilewave/attention.hpp.
struct PlainCall {
  std::int64_t batch = 0, heads = 0, kv_heads = 0, seqlen_q = 0, seqlen_k = 0, head_dim = 0;
  std::int64_t value_dim = 0;     ///< 0: head_dim
  std::span<const float> q = {};  ///< [batch, seqlen_q, heads, head_dim]
  std::span<const float> k = {};  ///< [batch, seqlen_k, kv_heads, head_dim]
  std::span<const float> v = {};  ///< [batch, seqlen_k, kv_heads, value_dim]
  std::span<const float> qv =
      {};  ///< [batch, seqlen_q, heads, value_dim]: multiplied by v and added to the products of q and k; empty: none
  double scale = 1;
  bool causal = false;
  std::optional<std::int64_t> causal_offset = {};  ///< the diagonal; default: each sequence's keys - queries
  std::int64_t window_left = -1, window_right = -1;
  std::int64_t chunk = 0;  ///< AttentionOptions::attention_chunk
  double softcap = 0;
  std::span<const float> alibi_slopes = {};  ///< [heads] or [batch, heads]
  std::span<const float> sink = {};          ///< [heads]
  std::span<const float> mask = {};          ///< added; of a boolean one 0 or -infinity
  /// Of the mask's dimensions batch, head, query and key; 0 where it has extent 1.
  std::array<std::int64_t, 4> mask_strides = {};
  /// [batch, heads, seqlen_q, seqlen_k], dense: what each weight is multiplied by, 0 or 1 / (1 - p); empty: 1.
  std::span<const float> dropout = {};
  /// [batch]: how many of a sequence's queries and keys there are, the first ones; empty: all. Queries beyond give 0 and -infinity.
  std::span<const std::int64_t> lengths_q = {}, lengths_k = {};
};

/// Keys begin, ..., end - 1, which `causal`, the window and the chunks leave visible to the query at position `at`, of `keys`.
struct VisibleKeys {
  std::int64_t begin, end;
  static VisibleKeys of(const PlainCall& call, std::int64_t at, std::int64_t keys) {
    std::int64_t begin = 0, end = keys;
    if (call.window_left >= 0) begin = at - call.window_left;
    if (call.window_right >= 0) end = at + call.window_right + 1;
    if (call.causal) end = std::min(end, at + 1);
    if (call.chunk > 0) {
      const std::int64_t first = at - ((at % call.chunk) + call.chunk) % call.chunk;
      begin = std::max(begin, first), end = std::min(end, first + call.chunk);
    }
    return {std::clamp<std::int64_t>(begin, 0, keys), std::clamp<std::int64_t>(end, 0, keys)};
  }
};

struct PlainResult {
  std::vector<double> o;    ///< [batch, seqlen_q, heads, value_dim]
  std::vector<double> lse;  ///< [batch, heads, seqlen_q]
};

/// Eight numbers at once: tests are compiled without the optimisations that would find them.
template <class Real>
struct Eight {
  /// A register of AVX2: wider vectors would pass through memory.
  typedef Real Lanes __attribute__((vector_size(32), aligned(alignof(Real)), may_alias));
  static constexpr std::int64_t kLanes = 32 / sizeof(Real);

  static Lanes& at(Real* x) { return *reinterpret_cast<Lanes*>(x); }
  static const Lanes& at(const Real* x) { return *reinterpret_cast<const Lanes*>(x); }
  /// Sum of x[c] y[c]; `size` is a multiple of 8.
  static Real dot_product(const Real* x, const Real* y, std::int64_t size) {
    Real sum = 0;
    if constexpr (sizeof(Real) == sizeof(float)) {
      // One after the other, as naive() is to have the error of a plain sum.
      for (std::int64_t c = 0; c < size; ++c) sum += x[c] * y[c];
    } else {
      Lanes sums[2] = {};
      for (std::int64_t c = 0; c < size; c += 8)
        for (const int half : {0, 1}) sums[half] += at(x + c + half * 4) * at(y + c + half * 4);
      for (const Lanes& half : sums)
        for (int n = 0; n < 4; ++n) sum += half[n];
    }
    return sum;
  }
  /// y += a x.
  static void add(Real* y, Real a, const Real* x, std::int64_t size) {
    for (std::int64_t c = 0; c < size; c += kLanes) at(y + c) += a * at(x + c);
  }
};

/// For the functions in double, which the tests of attention spend most of their time in: also compiled with all they call for AVX2. It has
/// no fused multiply-add, so the results are the same.
#if defined(__x86_64__) && !defined(__clang__)
#define TW_ALSO_FOR_AVX2 [[gnu::target_clones("avx2", "default"), gnu::flatten]]
#else
#define TW_ALSO_FOR_AVX2
#endif

/// softmax(S) V in double, row by row.
PlainResult reference(const PlainCall& call);

/// The unfused operations in `dtype`: products and sums in f32, what passes from one to the next rounded.
PlainResult naive(const PlainCall& call, DType dtype);

/// The unfused operations for operands of e4m3 and a result in `dtype`: scores in f32, and weights rounded to e4m3 as a product takes them.
/// A row's largest is 2^7.5, so that the small ones keep their bits. It is no power of two, which alone would not be rounded: in one pass
/// over the keys the largest is not known before the end. The sum divides at the end. `score_step`: scores are multiples of it, where sums
/// of their products have few bits; 0: any.
PlainResult naive_fp8(const PlainCall& call, DType dtype, float score_step);

}  // namespace tw::kernels::attention
