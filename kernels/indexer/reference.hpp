#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace tw::kernels::indexer {

/// q: [queries, heads, 128]; keys: one row of 128 for each key; weights: [queries, heads].
struct PlainIndexer {
  std::int64_t queries, heads;
  std::span<const float> q, k, k_scale, weights;
};

/// A score, and the sum of the absolute values of everything that was added up on the way: what its rounding errors are relative to.
struct PlainScore {
  double score, magnitude;
};

/// The score of one query and key, in double. Without k_scale scales are 1.
inline PlainScore score(const PlainIndexer& call, std::int64_t query, std::int64_t key) {
  constexpr std::int64_t kDim = 128;
  double sum = 0, magnitude = 0;
  for (std::int64_t head = 0; head < call.heads; ++head) {
    const float* const q = call.q.data() + (query * call.heads + head) * kDim;
    const float* const k = call.k.data() + key * kDim;
    double dot = 0, size = 0;
    for (std::int64_t i = 0; i < kDim; ++i) {
      const double product = static_cast<double>(q[i]) * static_cast<double>(k[i]);
      dot += product;
      size += std::abs(product);
    }
    const double weight = static_cast<double>(call.weights[static_cast<std::size_t>(query * call.heads + head)]);
    sum += weight * std::max(dot, 0.0);
    magnitude += std::abs(weight) * size;
  }
  const double scale = call.k_scale.empty() ? 1 : static_cast<double>(call.k_scale[static_cast<std::size_t>(key)]);
  return {scale * sum, std::abs(scale) * magnitude};
}

}  // namespace tw::kernels::indexer
