#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "tilewave/dtype.hpp"

namespace tw::kernels::attention {

/// A call in plain numbers: row-major and dense, values those of the data type.
struct PlainCall {
  std::int64_t batch = 0, heads = 0, kv_heads = 0, seqlen_q = 0, seqlen_k = 0, head_dim = 0;
  std::span<const float> q = {};  ///< [batch, seqlen_q, heads, head_dim]
  std::span<const float> k = {};  ///< [batch, seqlen_k, kv_heads, head_dim]
  std::span<const float> v = {};
  double scale = 1;
  bool causal = false;
  std::int64_t causal_offset = 0;  ///< query i sees keys j <= i + causal_offset
};

struct PlainResult {
  std::vector<double> o;    ///< [batch, seqlen_q, heads, head_dim]
  std::vector<double> lse;  ///< [batch, heads, seqlen_q]
};

/// softmax(scale Q K^T) V row by row, unfused, in arithmetic of type Real; `round` is applied to the scores, to the scaled scores, to the
/// weights and to the result.
template <class Real, class Round>
PlainResult evaluate(const PlainCall& call, Round round) {
  PlainResult result;
  result.o.resize(static_cast<std::size_t>(call.batch * call.seqlen_q * call.heads * call.head_dim));
  result.lse.resize(static_cast<std::size_t>(call.batch * call.heads * call.seqlen_q));
  std::vector<Real> scores(static_cast<std::size_t>(call.seqlen_k)), sums(static_cast<std::size_t>(call.head_dim));
  const std::int64_t d = call.head_dim;
  for (std::int64_t batch = 0; batch < call.batch; ++batch) {
    for (std::int64_t head = 0; head < call.heads; ++head) {
      const std::int64_t kv_head = head / (call.heads / call.kv_heads);
      for (std::int64_t i = 0; i < call.seqlen_q; ++i) {
        std::int64_t seen = call.seqlen_k;
        if (call.causal) seen = std::clamp<std::int64_t>(i + call.causal_offset + 1, 0, call.seqlen_k);
        const float* const q = call.q.data() + ((batch * call.seqlen_q + i) * call.heads + head) * d;
        const auto row = [&](std::span<const float> t, std::int64_t j) {
          return t.data() + ((batch * call.seqlen_k + j) * call.kv_heads + kv_head) * d;
        };
        Real* const p = scores.data();
        Real* const o = sums.data();
        Real largest = -std::numeric_limits<Real>::infinity();
        for (std::int64_t j = 0; j < seen; ++j) {
          const float* const k = row(call.k, j);
          Real sum = 0;
          for (std::int64_t c = 0; c < d; ++c) sum += static_cast<Real>(q[c]) * static_cast<Real>(k[c]);
          p[j] = round(round(sum) * static_cast<Real>(call.scale));
          largest = std::max(largest, p[j]);
        }
        Real total = 0;
        for (std::int64_t j = 0; j < seen; ++j) total += p[j] = std::exp(p[j] - largest);
        std::fill(sums.begin(), sums.end(), Real{0});
        for (std::int64_t j = 0; j < seen; ++j) {
          const Real weight = round(p[j] / total);
          const float* const v = row(call.v, j);
          for (std::int64_t c = 0; c < d; ++c) o[c] += weight * static_cast<Real>(v[c]);
        }
        double* const out = result.o.data() + ((batch * call.seqlen_q + i) * call.heads + head) * d;
        for (std::int64_t c = 0; c < d; ++c) out[c] = round(o[c]);
        // A row that sees no key: O = 0, and the logarithm of an empty sum.
        result.lse[static_cast<std::size_t>((batch * call.heads + head) * call.seqlen_q + i)] =
            seen == 0 ? -std::numeric_limits<double>::infinity() : static_cast<double>(largest) + std::log(static_cast<double>(total));
      }
    }
  }
  return result;
}

/// In double.
inline PlainResult reference(const PlainCall& call) {
  return evaluate<double>(call, [](double x) { return x; });
}

/// The unfused operations in `dtype`: products and sums in f32, what passes from one to the next rounded.
inline PlainResult naive(const PlainCall& call, DType dtype) {
  return evaluate<float>(call, [&](float x) {
    if (dtype == DType::f16) return static_cast<float>(f16(x));
    if (dtype == DType::bf16) return static_cast<float>(bf16(x));
    return x;
  });
}

}  // namespace tw::kernels::attention
