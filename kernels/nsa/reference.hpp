#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <set>
#include <span>
#include <vector>

#include "tilewave/dtype.hpp"

namespace tw::kernels::nsa {

/// A call in plain numbers: row-major and dense, values those of the data type.
struct PlainCall {
  std::int64_t tokens = 0, kv_heads = 1, group = 1, head_dim = 8, value_dim = 8, keys = 0;
  std::span<const float> q = {};  ///< [tokens, kv_heads * group, head_dim]
  std::span<const float> k = {};  ///< [keys, kv_heads, head_dim]: of all sequences
  std::span<const float> v = {};  ///< [keys, kv_heads, value_dim]
  double scale = 1;
  /// For each token and head of keys, [tokens * kv_heads]: the rows of k that it sees.
  std::vector<std::vector<std::int64_t>> seen = {};

  std::int64_t heads() const { return kv_heads * group; }
};

/// The rows of k that a token sees whose list is `blocks`, if its sequence's keys begin at row `begin` and it sees `visible` of them.
inline std::vector<std::int64_t> rows_of_blocks(std::span<const std::int64_t> blocks, std::int64_t block_size, std::int64_t begin,
                                                std::int64_t visible) {
  std::vector<std::int64_t> rows;
  for (const std::int64_t block : std::set<std::int64_t>(blocks.begin(), blocks.end())) {
    if (block < 0) continue;
    for (std::int64_t key = block * block_size; key < std::min((block + 1) * block_size, visible); ++key) rows.push_back(begin + key);
  }
  return rows;
}

struct PlainResult {
  std::vector<double> o;    ///< [tokens, heads, value_dim]
  std::vector<double> lse;  ///< [tokens, heads]
};
struct PlainGradients {
  std::vector<double> dq, dk, dv;
  std::vector<double> dq_size, dk_size;  ///< sums of the absolute values of what cancels in dq and dk
};

/// softmax(scale q K^T) V in arithmetic of type Real; `round` is applied to scores, weights and results.
template <class Real, class Round>
PlainResult evaluate(const PlainCall& call, Round round) {
  const auto at = [](std::int64_t i) { return static_cast<std::size_t>(i); };
  PlainResult result;
  result.o.resize(at(call.tokens * call.heads() * call.value_dim));
  result.lse.resize(at(call.tokens * call.heads()), -std::numeric_limits<double>::infinity());
  for (std::int64_t token = 0; token < call.tokens; ++token) {
    for (std::int64_t head = 0; head < call.heads(); ++head) {
      const std::int64_t kv_head = head / call.group, row = token * call.heads() + head;
      const std::vector<std::int64_t>& seen = call.seen[at(token * call.kv_heads + kv_head)];
      if (seen.empty()) continue;
      std::vector<Real> weights;
      Real largest = -std::numeric_limits<Real>::infinity(), total = 0;
      for (const std::int64_t key : seen) {
        Real s = 0;
        for (std::int64_t d = 0; d < call.head_dim; ++d)
          s += static_cast<Real>(call.q[at(row * call.head_dim + d)]) *
               static_cast<Real>(call.k[at((key * call.kv_heads + kv_head) * call.head_dim + d)]);
        weights.push_back(round(round(s) * static_cast<Real>(call.scale)));
        largest = std::max(largest, weights.back());
      }
      for (Real& x : weights) total += x = std::exp(x - largest);
      std::vector<Real> o(at(call.value_dim));
      for (std::size_t n = 0; n < seen.size(); ++n) {
        const Real weight = round(weights[n] / total);
        for (std::int64_t d = 0; d < call.value_dim; ++d)
          o[at(d)] += weight * static_cast<Real>(call.v[at((seen[n] * call.kv_heads + kv_head) * call.value_dim + d)]);
      }
      for (std::int64_t d = 0; d < call.value_dim; ++d) result.o[at(row * call.value_dim + d)] = static_cast<double>(round(o[at(d)]));
      result.lse[at(row)] = static_cast<double>(largest) + std::log(static_cast<double>(total));
    }
  }
  return result;
}

/// In double.
inline PlainResult reference(const PlainCall& call) {
  return evaluate<double>(call, [](double x) { return x; });
}

/// Rounds to `dtype`.
inline auto rounding_to(DType dtype) {
  return [dtype](float x) {
    return dtype == DType::f16 ? static_cast<float>(f16(x)) : dtype == DType::bf16 ? static_cast<float>(bf16(x)) : x;
  };
}
/// The unfused operations in `dtype`.
inline PlainResult naive(const PlainCall& call, DType dtype) { return evaluate<float>(call, rounding_to(dtype)); }

/// Gradients of the call for d_o [tokens, heads, value_dim], in arithmetic of type Real. `o`: the result, as the op has stored it.
template <class Real, class Round>
PlainGradients evaluate_gradients(const PlainCall& call, std::span<const float> d_o, std::span<const double> o, Round round) {
  const auto at = [](std::int64_t i) { return static_cast<std::size_t>(i); };
  const std::int64_t d_k = call.head_dim, d_v = call.value_dim, heads = call.heads();
  const auto scale = static_cast<Real>(call.scale);
  PlainGradients result;
  std::vector<Real> dq(at(call.tokens * heads * d_k)), dk(at(call.keys * call.kv_heads * d_k)), dv(at(call.keys * call.kv_heads * d_v));
  result.dq_size.resize(dq.size());
  result.dk_size.resize(dk.size());
  for (std::int64_t token = 0; token < call.tokens; ++token) {
    for (std::int64_t head = 0; head < heads; ++head) {
      const std::int64_t kv_head = head / call.group, row = token * heads + head;
      const std::vector<std::int64_t>& seen = call.seen[at(token * call.kv_heads + kv_head)];
      std::vector<Real> weights;
      Real largest = -std::numeric_limits<Real>::infinity(), total = 0, delta = 0;
      const auto element = [&](std::span<const float> x, std::int64_t i) { return static_cast<Real>(x[at(i)]); };
      for (const std::int64_t key : seen) {
        Real s = 0;
        for (std::int64_t d = 0; d < d_k; ++d)
          s += element(call.q, row * d_k + d) * element(call.k, (key * call.kv_heads + kv_head) * d_k + d);
        weights.push_back(round(round(s) * scale));
        largest = std::max(largest, weights.back());
      }
      for (Real& x : weights) total += x = std::exp(x - largest);
      for (std::int64_t d = 0; d < d_v; ++d) delta += static_cast<Real>(o[at(row * d_v + d)]) * element(d_o, row * d_v + d);
      for (std::size_t n = 0; n < seen.size(); ++n) {
        const std::int64_t of_key = seen[n] * call.kv_heads + kv_head;
        const Real weight = round(weights[n] / total);
        Real dp = 0;
        for (std::int64_t d = 0; d < d_v; ++d) {
          dp += element(d_o, row * d_v + d) * element(call.v, of_key * d_v + d);
          dv[at(of_key * d_v + d)] += weight * element(d_o, row * d_v + d);
        }
        const Real ds = round(weight * round(round(dp) - delta));
        const double cancelled = static_cast<double>(weight * (std::abs(dp) + std::abs(delta)) * scale);
        for (std::int64_t d = 0; d < d_k; ++d) {
          dq[at(row * d_k + d)] += ds * element(call.k, of_key * d_k + d);
          dk[at(of_key * d_k + d)] += ds * element(call.q, row * d_k + d);
          result.dq_size[at(row * d_k + d)] += cancelled * std::abs(static_cast<double>(call.k[at(of_key * d_k + d)]));
          result.dk_size[at(of_key * d_k + d)] += cancelled * std::abs(static_cast<double>(call.q[at(row * d_k + d)]));
        }
      }
    }
  }
  for (const Real x : dq) result.dq.push_back(static_cast<double>(round(x * scale)));
  for (const Real x : dk) result.dk.push_back(static_cast<double>(round(x * scale)));
  for (const Real x : dv) result.dv.push_back(static_cast<double>(round(x)));
  return result;
}

}  // namespace tw::kernels::nsa
