#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "kernels/attention/reference.hpp"

namespace tw::kernels::mla {

/// The largest relative error of a score with a cache of 8 bits: the ratio of a key's scales and the key are rounded to 11 bits.
inline constexpr double kFp8KeyError = 0x1p-11;

/// Attention's reference with one key head, of 576 columns, whose first 512 are the values. q: [batch, seqlen_q, heads, 576]; kv: [batch,
/// tokens, 576]; lengths: [batch].
struct PlainMla {
  attention::PlainCall call;
  std::vector<float> values;

  PlainMla(std::span<const float> q, std::span<const float> kv, std::span<const std::int64_t> lengths, std::int64_t seqlen_q,
           std::int64_t heads, double scale, bool causal) {
    constexpr std::int64_t kKeys = 576, kValues = 512;
    const auto batch = static_cast<std::int64_t>(lengths.size());
    const std::int64_t rows = static_cast<std::int64_t>(kv.size()) / kKeys;
    for (std::int64_t row = 0; row < rows; ++row) values.insert(values.end(), kv.begin() + row * kKeys, kv.begin() + row * kKeys + kValues);
    call = {.batch = batch,
            .heads = heads,
            .kv_heads = 1,
            .seqlen_q = seqlen_q,
            .seqlen_k = batch > 0 ? rows / batch : 0,
            .head_dim = kKeys,
            .value_dim = kValues,
            .q = q,
            .k = kv,
            .v = values,
            .scale = scale,
            .causal = causal,
            .lengths_k = lengths};
  }
  PlainMla(const PlainMla&) = delete;
};

/// Attention over listed keys. q: [tokens, heads, 576]; kv: [kv_tokens, 576]; indices: [tokens, topk]; lengths: [tokens]; sink: [heads] or
/// empty.
struct PlainSparse {
  std::int64_t tokens, heads, topk;
  std::span<const float> q, kv;
  std::span<const std::int64_t> indices, lengths;
  std::span<const float> sink;
  double scale;

  /// The rows of kv that a token sees.
  std::vector<const float*> keys_of(std::int64_t token) const {
    std::vector<const float*> keys;
    for (std::int64_t n = 0; n < topk && n < lengths[static_cast<std::size_t>(token)]; ++n) {
      const std::int64_t i = indices[static_cast<std::size_t>(token * topk + n)];
      if (i >= 0 && i < static_cast<std::int64_t>(kv.size()) / 576) keys.push_back(kv.data() + i * 576);
    }
    return keys;
  }
};

struct SparseResult {
  std::vector<double> o;                ///< [tokens, heads, 512]
  std::vector<double> lse, max_logits;  ///< [tokens, heads]
};

inline SparseResult reference(const PlainSparse& call) {
  constexpr std::int64_t kKeys = 576, kValues = 512;
  constexpr double kInfinite = std::numeric_limits<double>::infinity();
  using Doubles = attention::Eight<double>;
  SparseResult result;
  for (std::int64_t token = 0; token < call.tokens; ++token) {
    std::vector<std::vector<double>> keys;
    for (const float* key : call.keys_of(token)) keys.emplace_back(key, key + kKeys);
    for (std::int64_t head = 0; head < call.heads; ++head) {
      const float* const of_q = call.q.data() + (token * call.heads + head) * kKeys;
      const std::vector<double> query(of_q, of_q + kKeys);
      std::vector<double> logits, o(kValues);
      double largest = -kInfinite, total = 0;
      for (const std::vector<double>& key : keys) logits.push_back(call.scale * Doubles::dot_product(query.data(), key.data(), kKeys));
      for (const double x : logits) largest = std::max(largest, x);
      for (const double x : logits) total += std::exp(x - largest);
      const double lse = keys.empty() ? -kInfinite : largest + std::log(total);
      // exp(x) / (exp(lse) + exp(sink))
      const double sink = call.sink.empty() ? -kInfinite : static_cast<double>(call.sink[static_cast<std::size_t>(head)]);
      const double share = sink == kInfinite ? 0 : 1 / (1 + std::exp(sink - lse));
      for (std::size_t n = 0; n < keys.size(); ++n) Doubles::add(o.data(), std::exp(logits[n] - lse) * share, keys[n].data(), kValues);
      result.o.insert(result.o.end(), o.begin(), o.end());
      result.lse.push_back(lse);
      result.max_logits.push_back(largest);
    }
  }
  return result;
}

}  // namespace tw::kernels::mla
