#pragma once

#include "encoder.hpp"

/// The example's arithmetic again in double and plain loops, for the test. Nothing of the library but Tensor::at().
namespace arr_coc::reference {

using Matrix = std::vector<std::vector<double>>;

inline Matrix matrix(const tw::Tensor& x) {
  Matrix m(static_cast<std::size_t>(x.shape(0)), std::vector<double>(static_cast<std::size_t>(x.shape(1))));
  for (std::size_t i = 0; i < m.size(); ++i) {
    for (std::size_t j = 0; j < m[i].size(); ++j) m[i][j] = x.at({static_cast<std::int64_t>(i), static_cast<std::int64_t>(j)});
  }
  return m;
}

inline Matrix product(const Matrix& a, const Matrix& b) {
  Matrix c(a.size(), std::vector<double>(b[0].size()));
  for (std::size_t i = 0; i < a.size(); ++i) {
    for (std::size_t k = 0; k < b.size(); ++k) {
      for (std::size_t j = 0; j < b[k].size(); ++j) c[i][j] += a[i][k] * b[k][j];
    }
  }
  return c;
}

/// Adds softmax(q k^T / sqrt(kHeadDim)) v to `o`, for the keys that `sees(key)` allows, and returns the log-sum-exp. q and o are a head's
/// columns of a row.
inline double attend(const double* q, const Matrix& k, const Matrix& v, double* o, const auto& sees) {
  static_assert(kHeadDim == kScorerDim);
  double sum = 0;
  std::vector<double> weights(k.size());  // scores are small enough for exp() without a maximum
  for (std::size_t key = 0; key < k.size(); ++key) {
    double score = 0;
    for (std::size_t d = 0; d < kHeadDim; ++d) score += q[d] * k[key][d];
    if (sees(key)) sum += weights[key] = std::exp(score / std::sqrt(kHeadDim));
  }
  for (std::size_t key = 0; key < k.size() && sum > 0; ++key) {
    for (std::size_t d = 0; d < kHeadDim; ++d) o[d] += weights[key] / sum * v[key][d];
  }
  return std::log(sum);
}

/// score(): the three scores of each patch.
inline Matrix scores(std::span<const Patch> patches, const Features& features, const Texture& texture) {
  const auto embed = [](const tw::Tensor& x, std::uint32_t scorer) {
    return product(matrix(x), matrix(weight(scorer, kFeatures, kScorerDim)));
  };
  const auto distance = [](const std::vector<double>& a, const std::vector<double>& b) {
    double sum = 0;
    for (std::size_t i = 0; i < a.size(); ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
    return std::sqrt(sum);
  };
  const Matrix first = embed(features.patches, 1), second = embed(features.patches, 2), third = embed(features.patches, 3),
               query = embed(features.query, 3);
  Matrix all;
  for (std::size_t p = 0; p < patches.size(); ++p) {
    const Patch& patch = patches[p];
    std::vector<double> of_others(kScorerDim), of_neighbours(kScorerDim), unused(kScorerDim);
    attend(first[p].data(), first, first, of_others.data(), [&](std::size_t other) { return other != p; });
    attend(second[p].data(), second, second, of_neighbours.data(), [&](std::size_t other) {
      // Neighbours share an edge or a corner: the centres are at most about a patch apart.
      const int dx = 2 * (patches[other].x - patch.x) + patches[other].width - patch.width;
      const int dy = 2 * (patches[other].y - patch.y) + patches[other].height - patch.height;
      return other != p && std::abs(dx) < 3 * patch.width && std::abs(dy) < 3 * patch.height;
    });
    const double eccentricity = texture.at(patch.x + patch.width / 2, patch.y + patch.height / 2)[kEccentricity];
    all.push_back({distance(first[p], of_others), distance(second[p], of_neighbours) / (1 + eccentricity),
                   attend(third[p].data(), query, query, unused.data(), [](std::size_t) { return true; })});
  }
  return all;
}

/// Encoder: a row for each token, from inputs and weights that are rounded to `dtype` as the encoder's are.
inline Matrix encode(const Tokens& tokens, tw::DType dtype) {
  const auto rounded = [&](std::uint32_t seed, int rows, int cols) { return matrix(weight(seed, rows, cols).to(dtype)); };
  const Matrix query = rounded(5, kDim, kDim), key = rounded(6, kDim, kHeadDim), value = rounded(7, kDim, kHeadDim),
               output = rounded(8, kDim, kDim);
  Matrix x = product(matrix(tokens.values.to(dtype)), rounded(4, kChannels, kDim)), h = x;
  for (std::vector<double>& row : h) {
    double squares = 0;
    for (const double element : row) squares += element * element;
    for (double& element : row) element /= std::sqrt(squares / kDim + 1e-5);
  }
  for (std::int64_t p = 0; p + 1 < tokens.cu_seqlens.numel(); ++p) {
    const auto begin = static_cast<std::ptrdiff_t>(tokens.cu_seqlens.at({p})),
               end = static_cast<std::ptrdiff_t>(tokens.cu_seqlens.at({p + 1}));
    const Matrix patch(h.begin() + begin, h.begin() + end), q = product(patch, query), k = product(patch, key), v = product(patch, value);
    Matrix o(patch.size(), std::vector<double>(kDim));
    for (std::size_t i = 0; i < o.size(); ++i) {
      for (std::size_t head = 0; head < kHeads; ++head) {
        attend(q[i].data() + head * kHeadDim, k, v, o[i].data() + head * kHeadDim, [](std::size_t) { return true; });
      }
    }
    const Matrix added = product(o, output);
    for (std::size_t i = 0; i < o.size(); ++i) {
      for (std::size_t d = 0; d < kDim; ++d) x[static_cast<std::size_t>(begin) + i][d] += added[i][d];
    }
  }
  return x;
}

}  // namespace arr_coc::reference
