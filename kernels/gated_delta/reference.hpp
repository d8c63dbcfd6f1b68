#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace tw::kernels::gated_delta {

/// Sequences one after the other: q, k [tokens, heads of keys, dim], v [tokens, heads, values], beta, g [tokens, heads], or with `channels`
/// g [tokens, heads, dim]; tokens of sequence n from offsets[n] to offsets[n + 1] - 1. States are [sequence, head, dim, values]; empty
/// vectors are absent.
struct PlainCall {
  std::vector<float> q = {}, k = {}, v = {}, beta = {}, g = {}, initial_state = {};
  std::vector<std::int64_t> offsets = {};
  std::int64_t heads_of_keys = 1, heads = 1, dim = 1, values = 1;
  double scale = 1;
  bool normalise = false, channels = false;

  /// The gate of a channel d of a key.
  float gate(std::int64_t token, std::int64_t head, std::int64_t d) const {
    if (g.empty()) return 0;
    const std::int64_t i = token * heads + head;
    return g[static_cast<std::size_t>(channels ? i * dim + d : i)];
  }
};

struct PlainResult {
  std::vector<double> o, state;
};

/// Token by token, in Real. `round` is applied to each token's update of the state and to the state before it is multiplied, as by a kernel
/// whose products have rounded operands. Gates of heads are the differences of their sums in chunks of so many tokens, which limit the
/// accuracy of a computation in f32.
template <class Real, class Round>
PlainResult plain(const PlainCall& call, std::int64_t chunk, Round round) {
  const auto at = [](const std::vector<float>& x, std::int64_t i) { return static_cast<Real>(x[static_cast<std::size_t>(i)]); };
  const auto sequences = static_cast<std::int64_t>(call.offsets.size()) - 1, tokens = call.offsets.back();
  const std::int64_t dim = call.dim, values = call.values, group = call.heads / call.heads_of_keys;
  PlainResult result;
  result.o.resize(static_cast<std::size_t>(tokens * call.heads * values));
  for (std::int64_t n = 0; n < sequences; ++n) {
    for (std::int64_t h = 0; h < call.heads; ++h) {
      std::vector<Real> s(static_cast<std::size_t>(dim * values));
      const std::int64_t of_state = (n * call.heads + h) * dim * values, begin = call.offsets[static_cast<std::size_t>(n)];
      Real gate_sum = 0;
      for (std::int64_t i = 0; i < dim * values && !call.initial_state.empty(); ++i)
        s[static_cast<std::size_t>(i)] = at(call.initial_state, of_state + i);
      for (std::int64_t t = begin; t < call.offsets[static_cast<std::size_t>(n) + 1]; ++t) {
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
        std::vector<Real> decay;
        for (std::int64_t d = 0; d < dim && call.channels; ++d) decay.push_back(std::exp(static_cast<Real>(call.gate(t, h, d))));
        if (!call.channels) {
          const Real before = (t - begin) % chunk == 0 ? Real{0} : gate_sum;
          gate_sum = before + std::max(static_cast<Real>(call.gate(t, h, 0)), Real{-110});
          decay.assign(static_cast<std::size_t>(dim), std::exp(gate_sum - before));
        }
        const Real beta = at(call.beta, t * call.heads + h);
        for (std::int64_t c = 0; c < values; ++c) {
          Real old = 0, out = 0;
          const auto element = [&](std::int64_t d) -> Real& { return s[static_cast<std::size_t>(d * values + c)]; };
          for (std::int64_t d = 0; d < dim; ++d) {
            element(d) *= decay[static_cast<std::size_t>(d)];
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

/// Gradients of a PlainCall, in the shapes of its vectors. `..._terms` are the sums of the absolute values of what a computation in chunks
/// of 64 tokens adds up.
struct PlainGradients {
  std::vector<double> dq, dk, dv, d_beta, dg, d_initial_state, d_beta_terms, dg_terms, d_initial_state_terms;
};

/// The recurrence of plain() in reverse, token by token, in Real. `d_o` has the shape of v. Without `d_state`, the final state's gradient
/// is 0. `round` is applied to states, updates and their gradients before they are multiplied, and to each head's dq and dk.
template <class Real, class Round>
PlainGradients plain_gradients(const PlainCall& call, const std::vector<float>& d_o, const std::vector<float>& d_state,
                               Round round_double) {
  const auto at = [](const std::vector<float>& x, std::int64_t i) { return static_cast<Real>(x[static_cast<std::size_t>(i)]); };
  const auto size = [](std::int64_t n) { return static_cast<std::size_t>(n); };
  const auto round = [&](Real x) { return static_cast<Real>(round_double(x)); };
  const std::int64_t sequences = static_cast<std::int64_t>(call.offsets.size()) - 1, tokens = call.offsets.back();
  const std::int64_t dim = call.dim, values = call.values, group = call.heads / call.heads_of_keys;
  PlainGradients result;
  result.dq.resize(call.q.size());
  result.dk.resize(call.k.size());
  result.dv.resize(call.v.size());
  const std::int64_t gates = call.channels ? dim : 1;  // of a token and head
  for (std::vector<double>* const x : {&result.d_beta, &result.d_beta_terms}) x->resize(size(tokens * call.heads));
  for (std::vector<double>* const x : {&result.dg, &result.dg_terms}) x->resize(size(tokens * call.heads * gates));
  for (std::vector<double>* const x : {&result.d_initial_state, &result.d_initial_state_terms})
    x->resize(size(sequences * call.heads * dim * values));
  using Matrix = std::vector<Real>;
  for (std::int64_t n = 0; n < sequences; ++n) {
    for (std::int64_t h = 0; h < call.heads; ++h) {
      const std::int64_t begin = call.offsets[size(n)], length = call.offsets[size(n + 1)] - begin;
      const std::int64_t of_state = (n * call.heads + h) * dim * values;
      const auto index_of_key = [&](std::int64_t t) { return ((begin + t) * call.heads_of_keys + h / group) * dim; };
      const auto factor_of = [&](const std::vector<float>& x, std::int64_t t) {
        if (!call.normalise) return Real{1};
        Real squares = static_cast<Real>(1e-6);
        for (std::int64_t d = 0; d < dim; ++d) squares += at(x, index_of_key(t) + d) * at(x, index_of_key(t) + d);
        return 1 / std::sqrt(squares);
      };
      const auto element_of = [&](const std::vector<float>& x, std::int64_t t, std::int64_t d) {
        const Real value = at(x, index_of_key(t) + d);
        return call.normalise ? round(value * factor_of(x, t)) : value;
      };
      const auto gate_of = [&](std::int64_t t, std::int64_t d) {
        return std::max(static_cast<Real>(call.gate(begin + t, h, d)), Real{-110});
      };
      // Gates of heads as the differences of their sums in a chunk, which limit the accuracy of a computation in f32.
      const auto gate_sum = [&](std::int64_t t) {
        Real sum = 0;
        for (std::int64_t i = t / 64 * 64; i <= t; ++i) sum += gate_of(i, 0);
        return sum;
      };
      const auto decays_of = [&](std::int64_t t) {
        Matrix decays;
        for (std::int64_t d = 0; d < dim && call.channels; ++d) decays.push_back(std::exp(gate_of(t, d)));
        if (!call.channels) decays.assign(size(dim), std::exp(gate_sum(t) - (t % 64 == 0 ? Real{0} : gate_sum(t - 1))));
        return decays;
      };
      // Of every token: the decayed state, the state, v - S^T k, and the update.
      Matrix s(size(dim * values));
      for (std::int64_t i = 0; i < dim * values && !call.initial_state.empty(); ++i) s[size(i)] = at(call.initial_state, of_state + i);
      std::vector<Matrix> decayed, states, differences, updates;
      for (std::int64_t t = 0; t < length; ++t) {
        const Matrix decays = decays_of(t);
        for (std::int64_t i = 0; i < dim * values; ++i) s[size(i)] *= decays[size(i / values)];
        decayed.push_back(s);
        differences.emplace_back(size(values));
        updates.emplace_back(size(values));
        Matrix k;
        for (std::int64_t d = 0; d < dim; ++d) k.push_back(element_of(call.k, t, d));
        for (std::int64_t c = 0; c < values; ++c) {
          const std::int64_t token = (begin + t) * call.heads + h;
          Real old = 0;
          for (std::int64_t d = 0; d < dim; ++d) old += round(s[size(d * values + c)]) * k[size(d)];
          differences.back()[size(c)] = at(call.v, token * values + c) - old;
          updates.back()[size(c)] = round(at(call.beta, token) * differences.back()[size(c)]);
          for (std::int64_t d = 0; d < dim; ++d) s[size(d * values + c)] += k[size(d)] * updates.back()[size(c)];
        }
        states.push_back(s);
      }
      Matrix gradient(size(dim * values));
      for (std::int64_t i = 0; i < dim * values && !d_state.empty(); ++i) gradient[size(i)] = at(d_state, of_state + i);
      Matrix gradient_terms = gradient;
      std::vector<double> terms(size(gates));
      const auto gate_of_channel = [&](std::int64_t d) { return size(call.channels ? d : 0); };
      for (std::int64_t t = length; t-- > 0;) {
        const std::int64_t token = (begin + t) * call.heads + h;
        if (t + 1 == length || (t + 1) % 64 == 0) {
          gradient_terms = gradient;
          for (Real& x : gradient_terms) x = std::abs(x);
          terms.assign(terms.size(), 0);
          for (std::int64_t i = 0; i < dim * values; ++i)
            terms[gate_of_channel(i / values)] += std::abs(static_cast<double>(gradient[size(i)] * states[size(t)][size(i)]));
        }
        Matrix q, k, dq(size(dim)), dk(size(dim)), du(size(values));
        for (std::int64_t d = 0; d < dim; ++d) {
          q.push_back(element_of(call.q, t, d));
          k.push_back(element_of(call.k, t, d));
        }
        const Real beta = at(call.beta, token), scale = static_cast<Real>(call.scale);
        const Matrix decays = decays_of(t);
        for (std::int64_t d = 0; d < dim; ++d) {
          for (std::int64_t c = 0; c < values; ++c) {
            const Real out = at(d_o, token * values + c) * scale;
            Real& g = gradient[size(d * values + c)];
            g += q[size(d)] * out;
            gradient_terms[size(d * values + c)] += std::abs(q[size(d)] * out);
            dq[size(d)] += round(states[size(t)][size(d * values + c)]) * out;
            du[size(c)] += round(g) * k[size(d)];
            dk[size(d)] += round(g) * updates[size(t)][size(c)];
          }
        }
        Real d_beta = 0;
        Matrix dg(size(gates));
        for (std::int64_t c = 0; c < values; ++c) {
          const Real v = at(call.v, token * values + c), difference = differences[size(t)][size(c)];
          d_beta += round(du[size(c)]) * difference;
          result.d_beta_terms[size(token)] +=
              std::abs(static_cast<double>(du[size(c)])) * static_cast<double>(std::abs(v) + std::abs(v - difference));
          result.dv[size(token * values + c)] = static_cast<double>(beta * du[size(c)]);
          const Real d_old = round(-beta * du[size(c)]);
          for (std::int64_t d = 0; d < dim; ++d) {
            Real& g = gradient[size(d * values + c)];
            const Real before = decayed[size(t)][size(d * values + c)];
            dk[size(d)] += round(before) * d_old;
            g += k[size(d)] * d_old;
            dg[gate_of_channel(d)] += g * before;
            g *= decays[size(d)];
            Real& more = gradient_terms[size(d * values + c)];
            more = (more + std::abs(k[size(d)] * d_old)) * decays[size(d)];
          }
        }
        result.d_beta[size(token)] = static_cast<double>(d_beta);
        for (std::int64_t d = 0; d < dim; ++d)
          terms[gate_of_channel(d)] +=
              std::abs(static_cast<double>(q[size(d)] * dq[size(d)])) + std::abs(static_cast<double>(k[size(d)] * dk[size(d)]));
        for (std::int64_t i = 0; i < gates; ++i) {
          result.dg[size(token * gates + i)] = static_cast<double>(dg[size(i)]);
          result.dg_terms[size(token * gates + i)] = terms[size(i)];
        }
        const auto add = [&](std::vector<double>& to, const std::vector<float>& x, const Matrix& dy) {
          Real along = 0;
          const Real factor = factor_of(x, t);
          for (std::int64_t d = 0; d < dim && call.normalise; ++d) along += at(x, index_of_key(t) + d) * factor * round(dy[size(d)]);
          for (std::int64_t d = 0; d < dim; ++d)
            to[size(index_of_key(t) + d)] +=
                static_cast<double>(factor * (round(dy[size(d)]) - at(x, index_of_key(t) + d) * factor * along));
        };
        add(result.dq, call.q, dq);
        add(result.dk, call.k, dk);
      }
      for (std::int64_t i = 0; i < dim * values; ++i) {
        result.d_initial_state[size(of_state + i)] = static_cast<double>(gradient[size(i)]);
        result.d_initial_state_terms[size(of_state + i)] = static_cast<double>(gradient_terms[size(i)]);
      }
    }
  }
  return result;
}

}  // namespace tw::kernels::gated_delta
