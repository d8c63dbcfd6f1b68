#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

#include "tilewave/moe.hpp"

namespace tw::kernels::moe {

/// moe_route() of one token.
struct PlainRoute {
  std::span<const float> logits;
  std::span<const float> bias;  ///< or empty
  int k;
  MoeRouteOptions options;  ///< its bias is not used
};
struct Routed {
  std::vector<int> experts;
  std::vector<double> weights;
  /// The smallest relative difference, other than 0, between neighbours in an order on which the result depends. In f32 neighbours that are
  /// very close may change places.
  double margin = std::numeric_limits<double>::infinity();
};

/// The numbers 0, 1, ... in descending order of `by`, equal ones in ascending order of numbers.
inline std::vector<int> descending(std::span<const double> by) {
  std::vector<int> order(by.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int a, int b) { return by[static_cast<std::size_t>(a)] > by[static_cast<std::size_t>(b)]; });
  return order;
}

/// The smallest difference between neighbours from number `first` to number `last` of the order, other than 0, relative to the larger one;
/// with a bias, which may cancel scores, to 1 instead.
inline double margin_of(std::span<const double> by, std::span<const int> order, std::size_t first, std::size_t last, bool bias) {
  double margin = std::numeric_limits<double>::infinity();
  for (std::size_t i = first; i < last && i + 1 < order.size(); ++i) {
    const double larger = by[static_cast<std::size_t>(order[i])], gap = larger - by[static_cast<std::size_t>(order[i + 1])];
    if (gap > 0 && std::isfinite(gap)) margin = std::min(margin, bias ? gap : gap / larger);
  }
  return margin;
}

inline Routed route_reference(const PlainRoute& call) {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  const MoeRouteOptions& options = call.options;
  const std::size_t experts = call.logits.size();
  std::vector<double> logits, scores, choices;
  for (const float x : call.logits) logits.push_back(std::isnan(x) ? -infinity : std::min<double>(x, std::numeric_limits<float>::max()));
  const double largest = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const double x : logits) sum += largest > -infinity ? std::exp(x - largest) : 0;
  for (const double x : logits) {
    if (options.score == MoeScore::sigmoid)
      scores.push_back(1 / (1 + std::exp(-x)));
    else
      scores.push_back(largest > -infinity ? std::exp(x - largest) / sum : 0);
  }
  const bool grouped = options.groups_taken < options.groups, by_sum = options.group_score == MoeGroupScore::sum_of_two;
  const bool by_score = !call.bias.empty() || (grouped && by_sum);
  for (std::size_t e = 0; e < experts; ++e) {
    const double choice = by_score ? scores[e] + (call.bias.empty() ? 0 : call.bias[e]) : logits[e];
    choices.push_back(logits[e] == -infinity || std::isnan(choice) ? -infinity : choice);
  }

  Routed result;
  std::vector<bool> open(experts, !grouped);
  if (grouped) {
    const auto groups = static_cast<std::size_t>(options.groups), taken = static_cast<std::size_t>(options.groups_taken);
    const std::size_t size = experts / groups;
    std::vector<double> group_scores;
    for (std::size_t g = 0; g < groups; ++g) {
      std::vector<double> own(choices.begin() + static_cast<std::ptrdiff_t>(g * size),
                              choices.begin() + static_cast<std::ptrdiff_t>((g + 1) * size));
      std::sort(own.begin(), own.end(), std::greater<>());
      group_scores.push_back(by_sum ? own[0] + own[1] : own[0]);
    }
    const std::vector<int> order = descending(group_scores);
    if (by_score) result.margin = margin_of(group_scores, order, taken - 1, taken, !call.bias.empty());
    for (std::size_t n = 0; n < taken; ++n)
      for (std::size_t i = 0; i < size; ++i) open[static_cast<std::size_t>(order[n]) * size + i] = true;
  }
  std::vector<double> left;
  std::vector<int> number;
  for (std::size_t e = 0; e < experts; ++e) {
    if (!open[e]) continue;
    left.push_back(choices[e]);
    number.push_back(static_cast<int>(e));
  }
  const std::vector<int> order = descending(left);
  const auto k = static_cast<std::size_t>(call.k);
  if (by_score) result.margin = std::min(result.margin, margin_of(left, order, 0, k, !call.bias.empty()));
  double chosen = 0;
  for (std::size_t n = 0; n < k; ++n) {
    result.experts.push_back(number[static_cast<std::size_t>(order[n])]);
    result.weights.push_back(scores[static_cast<std::size_t>(result.experts.back())]);
    chosen += result.weights.back();
  }
  for (double& weight : result.weights) weight *= options.scale / (options.renormalise ? std::max(chosen, 1e-20) : 1);
  return result;
}

/// moe_permutation(): tables of the assignments `experts`, k for each token.
struct Permuted {
  std::vector<int> offsets, rows, places;
};
inline Permuted permutation_reference(std::span<const std::int64_t> experts, int k, int n_experts, std::int64_t first_expert) {
  Permuted result;
  result.places.assign(experts.size(), -1);
  for (int e = 0; e < n_experts; ++e) {
    result.offsets.push_back(static_cast<int>(result.rows.size()));
    for (std::size_t a = 0; a < experts.size(); ++a) {
      if (experts[a] != first_expert + e) continue;
      result.places[a] = static_cast<int>(result.rows.size());
      result.rows.push_back(static_cast<int>(a) / k);
    }
  }
  result.offsets.push_back(static_cast<int>(result.rows.size()));
  result.rows.resize(experts.size(), -1);
  return result;
}

/// One expert's MLP of x [hidden], in double: w_gate_up [2 inner, hidden] with alternating rows, w_down [hidden, inner]. `round` is applied
/// to what is stored between the products, and to the result; `round_gate_up` to gate and up, which not all paths store.
template <class Round, class RoundGateUp = std::identity>
std::vector<double> mlp_reference(std::span<const float> x, std::span<const float> w_gate_up, std::span<const float> w_down, Round round,
                                  RoundGateUp round_gate_up = {}) {
  const std::size_t hidden = x.size(), inner = w_down.size() / hidden;
  std::vector<double> gated(inner), result(hidden);
  for (std::size_t i = 0; i < inner; ++i) {
    double gate = 0, up = 0;
    for (std::size_t h = 0; h < hidden; ++h) {
      gate += static_cast<double>(w_gate_up[2 * i * hidden + h]) * x[h];
      up += static_cast<double>(w_gate_up[(2 * i + 1) * hidden + h]) * x[h];
    }
    gate = round_gate_up(gate), up = round_gate_up(up);
    gated[i] = round(gate / (1 + std::exp(-gate)) * up);
  }
  for (std::size_t h = 0; h < hidden; ++h) {
    double sum = 0;
    for (std::size_t i = 0; i < inner; ++i) sum += static_cast<double>(w_down[h * inner + i]) * gated[i];
    result[h] = round(sum);
  }
  return result;
}

}  // namespace tw::kernels::moe
