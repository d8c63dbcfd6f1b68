#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
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
  typedef Real Lanes __attribute__((vector_size(8 * sizeof(Real)), aligned(alignof(Real)), may_alias));

  static Lanes& at(Real* x) { return *reinterpret_cast<Lanes*>(x); }
  static const Lanes& at(const Real* x) { return *reinterpret_cast<const Lanes*>(x); }
  /// Sum of x[c] y[c]; `size` is a multiple of 8.
  static Real dot_product(const Real* x, const Real* y, std::int64_t size) {
    Real sum = 0;
    if constexpr (sizeof(Real) == sizeof(float)) {
      // One after the other, as naive() is to have the error of a plain sum.
      for (std::int64_t c = 0; c < size; ++c) sum += x[c] * y[c];
    } else {
      Lanes sums = {};
      for (std::int64_t c = 0; c < size; c += 8) sums += at(x + c) * at(y + c);
      for (int n = 0; n < 8; ++n) sum += sums[n];
    }
    return sum;
  }
  /// y += a x.
  static void add(Real* y, Real a, const Real* x, std::int64_t size) {
    for (std::int64_t c = 0; c < size; c += 8) at(y + c) += a * at(x + c);
  }
};

/// softmax(S) V row by row, unfused, in arithmetic of type Real; `round` is applied to the scores after every operation, `round_result` to
/// the result. `weight_of(p, total)` is the rounded weight of a key, where p is the exponential of its score less the row's largest, and
/// `total` their sum.
template <class Real, class Round, class WeightOf, class RoundResult>
PlainResult evaluate(const PlainCall& call, Round round, WeightOf weight_of, RoundResult round_result) {
  constexpr Real kInfinite = std::numeric_limits<Real>::infinity();
  const std::int64_t d = call.head_dim, value_dim = call.value_dim > 0 ? call.value_dim : d;
  const std::int64_t group = call.kv_heads > 0 ? call.heads / call.kv_heads : 0;
  PlainResult result;
  result.o.resize(static_cast<std::size_t>(call.batch * call.seqlen_q * call.heads * value_dim));
  result.lse.resize(static_cast<std::size_t>(call.batch * call.heads * call.seqlen_q), -std::numeric_limits<double>::infinity());
  // Of one head, in Real, one behind the other.
  std::vector<Real> keys(static_cast<std::size_t>(call.seqlen_k * d)), values(static_cast<std::size_t>(call.seqlen_k * value_dim));
  std::vector<Real> query(static_cast<std::size_t>(d)), scores(static_cast<std::size_t>(call.seqlen_k));
  std::vector<Real> sums(static_cast<std::size_t>(value_dim)), query_values(static_cast<std::size_t>(value_dim));
  const auto length = [](std::span<const std::int64_t> lengths, std::int64_t b, std::int64_t all) {
    return lengths.empty() ? all : lengths[static_cast<std::size_t>(b)];
  };
  const auto slope_of = [&](std::int64_t b, std::int64_t head) {
    if (call.alibi_slopes.empty()) return Real{0};
    const bool of_batch = static_cast<std::int64_t>(call.alibi_slopes.size()) > call.heads;
    return static_cast<Real>(call.alibi_slopes[static_cast<std::size_t>(of_batch ? b * call.heads + head : head)]);
  };
  const auto scale = static_cast<Real>(call.scale), softcap = static_cast<Real>(call.softcap);

  for (std::int64_t b = 0; b < call.batch; ++b) {
    const std::int64_t length_q = length(call.lengths_q, b, call.seqlen_q), length_k = length(call.lengths_k, b, call.seqlen_k);
    const std::int64_t diagonal = call.causal_offset ? *call.causal_offset : length_k - length_q;
    for (std::int64_t kv_head = 0; kv_head < call.kv_heads; ++kv_head) {
      for (std::int64_t j = 0; j < length_k; ++j) {
        const std::int64_t row = (b * call.seqlen_k + j) * call.kv_heads + kv_head;
        std::copy_n(call.k.data() + row * d, d, keys.data() + j * d);
        std::copy_n(call.v.data() + row * value_dim, value_dim, values.data() + j * value_dim);
      }
      for (std::int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
        const Real slope = slope_of(b, head);
        for (std::int64_t i = 0; i < length_q; ++i) {
          const auto [begin, end] = VisibleKeys::of(call, i + diagonal, length_k);
          const std::int64_t row = (b * call.seqlen_q + i) * call.heads + head;
          std::copy_n(call.q.data() + row * d, d, query.data());
          if (!call.qv.empty()) std::copy_n(call.qv.data() + row * value_dim, value_dim, query_values.data());
          Real* const p = scores.data();
          Real largest = call.sink.empty() ? -kInfinite : static_cast<Real>(call.sink[static_cast<std::size_t>(head)]);
          const float* const mask =
              call.mask.empty() ? nullptr
                                : call.mask.data() + b * call.mask_strides[0] + head * call.mask_strides[1] + i * call.mask_strides[2];
          for (std::int64_t j = begin; j < end; ++j) {
            Real product = Eight<Real>::dot_product(query.data(), keys.data() + j * d, d);
            if (!call.qv.empty()) product += Eight<Real>::dot_product(query_values.data(), values.data() + j * value_dim, value_dim);
            Real s = round(round(product) * scale);
            if (softcap > 0) s = round(softcap * round(std::tanh(round(s / softcap))));
            if (slope != 0) s = round(s - slope * static_cast<Real>(std::abs(i + diagonal - j)));
            if (mask) s = round(s + static_cast<Real>(mask[j * call.mask_strides[3]]));
            p[j] = s;
            largest = std::max(largest, s);
          }
          if (largest == -kInfinite) continue;  // sees no key: 0, and the logarithm of an empty sum
          Real total = call.sink.empty() ? Real{0} : std::exp(static_cast<Real>(call.sink[static_cast<std::size_t>(head)]) - largest);
          for (std::int64_t j = begin; j < end; ++j) total += p[j] = std::exp(p[j] - largest);
          std::fill(sums.begin(), sums.end(), Real{0});
          Real* const o = sums.data();
          for (std::int64_t j = begin; j < end; ++j) {
            Real weight = weight_of(p[j], total);
            if (!call.dropout.empty())
              weight = round(
                  weight * static_cast<Real>(
                               call.dropout[static_cast<std::size_t>(((b * call.heads + head) * call.seqlen_q + i) * call.seqlen_k + j)]));
            Eight<Real>::add(o, weight, values.data() + j * value_dim, value_dim);
          }
          std::transform(o, o + value_dim, result.o.data() + row * value_dim, round_result);
          result.lse[static_cast<std::size_t>((b * call.heads + head) * call.seqlen_q + i)] =
              static_cast<double>(largest) + std::log(static_cast<double>(total));
        }
      }
    }
  }
  return result;
}

/// In double.
inline PlainResult reference(const PlainCall& call) {
  const auto exact = [](double x) { return x; };
  return evaluate<double>(
      call, exact, [](double p, double total) { return p / total; }, exact);
}

/// The unfused operations in `dtype`: products and sums in f32, what passes from one to the next rounded.
inline PlainResult naive(const PlainCall& call, DType dtype) {
  const auto rounded = [&](auto round) {
    return evaluate<float>(
        call, round, [round](float p, float total) { return round(p / total); }, round);
  };
  switch (dtype) {
    case DType::f16:
      return rounded([](float x) { return static_cast<float>(f16(x)); });
    case DType::bf16:
      return rounded([](float x) { return static_cast<float>(bf16(x)); });
    default:
      return rounded([](float x) { return x; });
  }
}

/// The unfused operations for operands of e4m3 and a result in `dtype`: scores in f32, and weights rounded to e4m3 as a product takes them.
/// A row's largest is 2^7.5, so that the small ones keep their bits. It is no power of two, which alone would not be rounded: in one pass
/// over the keys the largest is not known before the end. The sum divides at the end. `score_step`: scores are multiples of it, where sums
/// of their products have few bits; 0: any.
inline PlainResult naive_fp8(const PlainCall& call, DType dtype, float score_step) {
  return evaluate<float>(
      call, [&](float x) { return score_step > 0 ? std::nearbyint(x / score_step) * score_step : x; },
      [](float p, float total) { return static_cast<float>(fp8_e4m3(p * 181.02f)) / (181.02f * total); },
      [&](float x) { return dtype == DType::f16 ? static_cast<float>(f16(x)) : static_cast<float>(bf16(x)); });
}

}  // namespace tw::kernels::attention
