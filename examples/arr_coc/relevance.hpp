#pragma once

#include <optional>
#include <queue>
#include <span>
#include <string>
#include <tilewave/attention.hpp>
#include <tilewave/gemm.hpp>
#include <utility>

#include "texture.hpp"
#include "weights.hpp"

namespace arr_coc {

inline constexpr int kPatchSide = 64;  ///< pixels, about: the grid's patches have sides of 48 to 95
inline constexpr int kMinTokens = 64, kMaxTokens = 400, kMeanTokens = 160;
inline constexpr int kFeatures = 2 * kAppearance;  ///< of a patch: mean and standard deviation of the channels of appearance
inline constexpr int kScorerDim = 64;              ///< head dimension of the scorers' attention

/// Three scores of a patch, their balance, and what it gets for it.
struct Patch {
  int x, y, width, height;              ///< pixels
  double information, salience, match;  ///< see score()
  double relevance;                     ///< see balance()
  int tokens;                           ///< see allocate()
};

/// Cuts the image into a grid, row by row.
inline std::vector<Patch> cut(const Texture& texture) {
  const int rows = (texture.height + kPatchSide / 2) / kPatchSide, cols = (texture.width + kPatchSide / 2) / kPatchSide;
  std::vector<Patch> patches;
  for (int row = 0; row < rows; ++row) {
    for (int col = 0; col < cols; ++col) {
      const int x = texture.width * col / cols, y = texture.height * row / rows;
      patches.push_back({x, y, texture.width * (col + 1) / cols - x, texture.height * (row + 1) / rows - y, 0, 0, 0, 0, 0});
    }
  }
  return patches;
}

/// Mean and standard deviation of a list of numbers.
struct Moments {
  double mean = 0, deviation = 0;

  explicit Moments(const std::vector<double>& values) {
    const double count = static_cast<double>(values.size());
    for (const double x : values) mean += x / count;
    for (const double x : values) deviation += (x - mean) * (x - mean) / count;
    deviation = std::sqrt(deviation);
  }

  /// How many standard deviations `x` is above the mean. Numbers here are of about the size of 1, and where they differ by less than a
  /// quarter of an 8-bit step, they are equal.
  double standardise(double x) const { return (x - mean) / std::max(deviation, 1e-3); }
};

/// What the scorers know of the patches, and of the colours that are looked for: f32 [patches, kFeatures] and [colours, kFeatures],
/// standardised over the patches. Position is not part of it. A colour says nothing about texture and edges, so it has the mean of the
/// image there, which is 0.
struct Features {
  tw::Tensor patches, query;

  Features(const Texture& texture, std::span<const Patch> in, std::span<const Colour> colours)
      : patches(tw::Tensor::empty({std::ssize(in), kFeatures}, tw::DType::f32)),
        query(tw::Tensor::zeros({std::ssize(colours), kFeatures}, tw::DType::f32)) {
    for (std::size_t channel = 0; channel < kAppearance; ++channel) {
      std::vector<double> means, deviations;
      for (const Patch& patch : in) {
        std::vector<double> values;
        for (int y = patch.y; y < patch.y + patch.height; ++y) {
          for (int x = patch.x; x < patch.x + patch.width; ++x) values.push_back(texture.at(x, y)[channel]);
        }
        const Moments of_patch(values);
        means.push_back(of_patch.mean);
        deviations.push_back(of_patch.deviation);
      }
      const Moments mean(means), deviation(deviations);
      for (std::size_t p = 0; p < in.size(); ++p) {
        float* row = patches.data<float>() + p * kFeatures;
        row[channel] = static_cast<float>(mean.standardise(means[p]));
        row[kAppearance + channel] = static_cast<float>(deviation.standardise(deviations[p]));
      }
      for (std::size_t c = 0; channel < kColours && c < colours.size(); ++c) {
        query.data<float>()[c * kFeatures + channel] = static_cast<float>(mean.standardise(colour_channels(colours[c])[channel]));
      }
    }
  }
};

struct Attended {
  tw::Tensor o;    ///< [queries, kScorerDim]
  tw::Tensor lse;  ///< [queries]
};

/// Attention of the rows of `q` over the rows of `kv`, which are keys and values: [queries, kScorerDim] and [keys, kScorerDim]. `mask`, if
/// given: bool [queries, keys], true where a query sees a key.
inline Attended cross_attention(const tw::Tensor& q, const tw::Tensor& kv, const tw::Tensor* mask = nullptr) {
  const tw::Shape queries = {1, q.shape(0), 1, kScorerDim}, keys = {1, kv.shape(0), 1, kScorerDim};
  const tw::Tensor o = tw::Tensor::empty(queries, q.dtype()), lse = tw::Tensor::empty({1, 1, q.shape(0)}, tw::DType::f32);
  tw::attention(q.reshape(queries), kv.reshape(keys), kv.reshape(keys), o, {.mask = mask, .lse = &lse});
  return {o.reshape(q.shape()), lse.reshape({q.shape(0)})};
}

/// For each patch the distance between what it is and what the patches that `sees` allows make of it: attention over those, where weights
/// grow with similarity. 0: they know all of it.
inline std::vector<double> surprise(const tw::Tensor& embedded, const auto& sees) {
  const std::int64_t patches = embedded.shape(0);
  const tw::Tensor mask = tw::Tensor::empty({patches, patches}, tw::DType::boolean);
  for (std::int64_t p = 0; p < patches; ++p) {
    for (std::int64_t other = 0; other < patches; ++other) mask.data<bool>()[p * patches + other] = sees(p, other);
  }
  const tw::Tensor expected = cross_attention(embedded, embedded, &mask).o;
  std::vector<double> distances;
  for (std::int64_t p = 0; p < patches; ++p) {
    double sum = 0;
    for (std::int64_t d = 0; d < kScorerDim; ++d) sum += std::pow(embedded.at({p, d}) - expected.at({p, d}), 2);
    distances.push_back(std::sqrt(sum));
  }
  return distances;
}

/// Scores the patches in three ways, each a cross-attention with a projection of its own. Queries, keys and values share the projection: a
/// random one keeps distances and angles approximately (Johnson and Lindenstrauss), so the scores mean something without training.
///
/// - information (propositional knowing): what the rest of the image does not tell. Patches attend to all others.
/// - salience (perspectival): what stands out from its surroundings, for a viewer whose sight is sharp at the fixation point. Patches
///   attend to those they touch.
/// - match (participatory): what the viewer looks for. Patches attend to the colours of the query; the log-sum-exp is the similarity.
///
/// On the CPU in f32, whatever device encodes the tokens: the numbers of tokens do not depend on the device.
inline void score(std::vector<Patch>& patches, const Features& features, const Texture& texture) {
  const auto embed = [](const tw::Tensor& x, std::uint32_t scorer) { return tw::matmul(x, weight(scorer, kFeatures, kScorerDim)); };
  const auto touch = [&](std::size_t p, std::size_t other) {
    const Patch &a = patches[p], &b = patches[other];
    return a.x <= b.x + b.width && b.x <= a.x + a.width && a.y <= b.y + b.height && b.y <= a.y + a.height;
  };
  const auto information = surprise(embed(features.patches, 1), [](auto p, auto other) { return p != other; });
  const auto salience = surprise(embed(features.patches, 2), [&](auto p, auto other) { return p != other && touch(p, other); });
  const tw::Tensor match = cross_attention(embed(features.patches, 3), embed(features.query, 3)).lse;
  for (std::size_t p = 0; p < patches.size(); ++p) {
    Patch& patch = patches[p];
    const float eccentricity = texture.at(patch.x + patch.width / 2, patch.y + patch.height / 2)[kEccentricity];
    patch.information = information[p];
    patch.salience = salience[p] / (1 + eccentricity);
    patch.match = match.at({static_cast<std::int64_t>(p)});
  }
}

/// Relevance: the mean of the three scores, each standardised over the patches, so that none outweighs the others by its unit.
inline void balance(std::vector<Patch>& patches) {
  for (double Patch::*score : {&Patch::information, &Patch::salience, &Patch::match}) {
    std::vector<double> scores;
    for (const Patch& patch : patches) scores.push_back(patch.*score);
    const Moments moments(scores);
    for (Patch& patch : patches) patch.relevance += moments.standardise(patch.*score) / 3;
  }
}

/// Divides the budget among the patches as Sainte-Lague's method divides seats among parties. Each patch has kMinTokens. The others are
/// given one by one to the patch whose weight, exp(2 relevance), is the largest for what it has; at kMaxTokens a patch leaves. The sum is
/// the budget, exactly. Throws tw::InvalidArgument for a budget that cannot be divided like this.
inline void allocate(std::vector<Patch>& patches, std::int64_t budget) {
  const std::int64_t least = std::ssize(patches) * kMinTokens, most = std::ssize(patches) * kMaxTokens;
  if (budget < least || budget > most) {
    throw tw::InvalidArgument("budget: is " + std::to_string(budget) + " tokens; " + std::to_string(patches.size()) + " patches take " +
                              std::to_string(least) + " to " + std::to_string(most));
  }
  std::priority_queue<std::pair<double, std::int64_t>> claims;  // of equal claims the earlier patch's is first: indices are negative
  const auto claim = [&](std::int64_t p) {
    const Patch& patch = patches[static_cast<std::size_t>(p)];
    claims.push({std::exp(2 * patch.relevance) / (2 * (patch.tokens - kMinTokens) + 1), -p});
  };
  for (std::int64_t p = 0; p < std::ssize(patches); ++p) {
    patches[static_cast<std::size_t>(p)].tokens = kMinTokens;
    claim(p);
  }
  for (std::int64_t left = budget - least; left > 0; --left) {
    const std::int64_t p = -claims.top().second;
    claims.pop();
    if (++patches[static_cast<std::size_t>(p)].tokens < kMaxTokens) claim(p);
  }
}

/// Who looks at the image, for what, and with how many tokens.
struct Options {
  Point fixation = {};                                          ///< where the viewer looks
  std::vector<Colour> query = {{200, 60, 44}, {250, 200, 90}};  ///< the colours looked for: the lighthouse's red, the sun's yellow
  std::optional<std::int64_t> budget = {};                      ///< tokens in all; default: kMeanTokens for each patch
};

/// The image's patches with their scores and numbers of tokens. Throws as allocate().
inline std::vector<Patch> plan(const Texture& texture, const Options& options) {
  std::vector<Patch> patches = cut(texture);
  score(patches, Features(texture, patches, options.query), texture);
  balance(patches);
  allocate(patches, options.budget.value_or(std::ssize(patches) * kMeanTokens));
  return patches;
}

}  // namespace arr_coc
