#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace tw::kernels::gated_delta {

/// Sequences one after the other: q, k [tokens, heads of keys, dim], v [tokens, heads, values], beta, g [tokens, heads]; tokens of sequence
/// n from offsets[n] to offsets[n + 1] - 1. States are [sequence, head, dim, values]; empty vectors are absent.
struct PlainCall {
  std::vector<float> q = {}, k = {}, v = {}, beta = {}, g = {}, initial_state = {};
  std::vector<std::int64_t> offsets = {};
  std::int64_t heads_of_keys = 1, heads = 1, dim = 1, values = 1;
  double scale = 1;
  bool normalise = false;
};

struct PlainResult {
  std::vector<double> o, state;
};

/// Token by token, in Real. `round` is applied to each token's update of the state and to the state before it is multiplied, as by a kernel
/// whose products have rounded operands.
template <class Real, class Round>
PlainResult plain(const PlainCall& call, Round round) {
  const auto at = [](const std::vector<float>& x, std::int64_t i) { return static_cast<Real>(x[static_cast<std::size_t>(i)]); };
  const auto sequences = static_cast<std::int64_t>(call.offsets.size()) - 1, tokens = call.offsets.back();
  const std::int64_t dim = call.dim, values = call.values, group = call.heads / call.heads_of_keys;
  PlainResult result;
  result.o.resize(static_cast<std::size_t>(tokens * call.heads * values));
  for (std::int64_t n = 0; n < sequences; ++n) {
    for (std::int64_t h = 0; h < call.heads; ++h) {
      std::vector<Real> s(static_cast<std::size_t>(dim * values));
      const std::int64_t of_state = (n * call.heads + h) * dim * values;
      for (std::int64_t i = 0; i < dim * values && !call.initial_state.empty(); ++i)
        s[static_cast<std::size_t>(i)] = at(call.initial_state, of_state + i);
      for (std::int64_t t = call.offsets[static_cast<std::size_t>(n)]; t < call.offsets[static_cast<std::size_t>(n) + 1]; ++t) {
        std::vector<Real> q, k;
        Real q_norm = 0, k_norm = 0;
        for (std::int64_t d = 0; d < dim; ++d) {
          const std::int64_t i = (t * call.heads_of_keys + h / group) * dim + d;
          q.push_back(at(call.q, i));
          k.push_back(at(call.k, i));
          q_norm += q.back() * q.back();
          k_norm += k.back() * k.back();
        }
        const Real epsilon = static_cast<Real>(1e-6);
        for (std::size_t d = 0; d < q.size() && call.normalise; ++d) {
          q[d] = static_cast<Real>(round(q[d] / std::sqrt(q_norm + epsilon)));
          k[d] = static_cast<Real>(round(k[d] / std::sqrt(k_norm + epsilon)));
        }
        const Real decay = call.g.empty() ? Real{1} : std::exp(at(call.g, t * call.heads + h)), beta = at(call.beta, t * call.heads + h);
        for (std::int64_t c = 0; c < values; ++c) {
          Real old = 0, out = 0;
          const auto element = [&](std::int64_t d) -> Real& { return s[static_cast<std::size_t>(d * values + c)]; };
          for (std::int64_t d = 0; d < dim; ++d) {
            element(d) *= decay;
            old += static_cast<Real>(round(element(d))) * k[static_cast<std::size_t>(d)];
          }
          const Real update = static_cast<Real>(round(beta * (at(call.v, (t * call.heads + h) * values + c) - old)));
          for (std::int64_t d = 0; d < dim; ++d) {
            element(d) += k[static_cast<std::size_t>(d)] * update;
            out += static_cast<Real>(round(element(d))) * q[static_cast<std::size_t>(d)];
          }
          result.o[static_cast<std::size_t>((t * call.heads + h) * values + c)] = static_cast<double>(out * static_cast<Real>(call.scale));
        }
      }
      for (const Real x : s) result.state.push_back(static_cast<double>(x));
    }
  }
  return result;
}

}  // namespace tw::kernels::gated_delta
