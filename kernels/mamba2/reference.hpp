#pragma once

#include <cmath>
#include <cstddef>
#include <limits>
#include <utility>
#include <vector>

#include "tests/accuracy.hpp"

// Mamba-2 as plain loops: the recurrence in double, and the unfused operations in a data type.

namespace tw::kernels::mamba2 {

/// One head of one sequence. Matrices are row-major: x, z and dy [steps, dim], b and c [steps, state], states [dim, state]. z, skip,
/// initial, begins, dy and d_final may be empty.
struct PlainHead {
  std::size_t steps = 0, dim = 0, state = 0;
  double rate = -1, bias = 0;
  bool softplus = false;
  double dt_min = 0, dt_max = std::numeric_limits<double>::infinity();
  std::vector<double> x = {}, dt = {}, b = {}, c = {}, z = {}, skip = {}, initial = {};
  std::vector<bool> begins = {};  ///< of each step: the state before it is 0
  bool gradients = false;
  std::vector<double> dy = {}, d_final = {};

  double unlimited(std::size_t t) const {
    const double raw = dt[t] + bias;
    return softplus ? std::max(raw, 0.0) + std::log1p(std::exp(-std::abs(raw))) : raw;
  }
  double size(std::size_t t) const { return std::min(std::max(unlimited(t), dt_min), dt_max); }
  double size_derivative(std::size_t t) const {
    const double size = unlimited(t);
    if (size < dt_min || size > dt_max) return 0;
    return softplus ? 1 / (1 + std::exp(-dt[t] - bias)) : 1;
  }
  /// The logarithm of a step's decay.
  double g(std::size_t t) const {
    if (!begins.empty() && begins[t]) return -std::numeric_limits<double>::infinity();
    return size(t) == 0 ? 0 : size(t) * rate;
  }
};

/// Gradients of the rate, the bias and the skip are of this head and sequence alone.
struct PlainResult {
  std::vector<double> y, final, dx, d_dt, db, dc, dz, d_skip, d_initial;
  double d_rate = 0, d_bias = 0;
  /// The sums of the absolute values of what d_dt, d_skip, d_rate and d_bias are sums of.
  std::vector<double> d_dt_terms = {}, d_skip_terms = {};
  double d_rate_terms = 0, d_bias_terms = 0;
};

inline double sigmoid_of(double x) { return 1 / (1 + std::exp(-x)); }
inline double silu_of(double x) { return x * sigmoid_of(x); }
inline double silu_derivative(double x) { return sigmoid_of(x) * (1 + x * (1 - sigmoid_of(x))); }

inline PlainResult plain_mamba2(const PlainHead& h) {
  const std::size_t area = h.dim * h.state;
  PlainResult r;
  std::vector<std::vector<double>> states(h.steps + 1, std::vector<double>(area));
  if (!h.initial.empty()) states[0] = h.initial;
  std::vector<double> ungated(h.steps * h.dim);
  r.y.resize(h.steps * h.dim);
  for (std::size_t t = 0; t < h.steps; ++t) {
    const double decay = std::exp(h.g(t));
    for (std::size_t p = 0; p < h.dim; ++p) {
      const std::size_t at = t * h.dim + p;
      for (std::size_t n = 0; n < h.state; ++n) {
        const std::size_t s = p * h.state + n;
        states[t + 1][s] = decay * states[t][s] + h.size(t) * h.x[at] * h.b[t * h.state + n];
        ungated[at] += states[t + 1][s] * h.c[t * h.state + n];
      }
      if (!h.skip.empty()) ungated[at] += h.skip[p] * h.x[at];
      r.y[at] = h.z.empty() ? ungated[at] : ungated[at] * silu_of(h.z[at]);
    }
  }
  r.final = states[h.steps];
  if (!h.gradients) return r;
  r.dx.resize(h.steps * h.dim), r.dz.resize(h.steps * h.dim), r.d_dt.resize(h.steps), r.d_skip.resize(h.dim);
  r.db.resize(h.steps * h.state), r.dc.resize(h.steps * h.state);
  std::vector<double> d_state = h.d_final.empty() ? std::vector<double>(area) : h.d_final;
  for (std::size_t t = h.steps; t-- > 0;) {
    const double decay = std::exp(h.g(t));
    double d_size = 0, d_g = 0;
    for (std::size_t p = 0; p < h.dim; ++p) {
      const std::size_t at = t * h.dim + p;
      double du = h.dy[at];
      if (!h.z.empty()) {
        r.dz[at] = du * ungated[at] * silu_derivative(h.z[at]);
        du *= silu_of(h.z[at]);
      }
      if (!h.skip.empty()) r.dx[at] += h.skip[p] * du;
      r.d_skip[p] += du * h.x[at];
      for (std::size_t n = 0; n < h.state; ++n) {
        const std::size_t s = p * h.state + n, in = t * h.state + n;
        d_state[s] += du * h.c[in];
        r.dc[in] += du * states[t + 1][s];
        r.db[in] += d_state[s] * h.size(t) * h.x[at];
        r.dx[at] += d_state[s] * h.size(t) * h.b[in];
        d_size += d_state[s] * h.x[at] * h.b[in];
        d_state[s] *= decay;
        d_g += d_state[s] * states[t][s];
      }
    }
    if (decay > 0) d_size += h.rate * d_g;
    r.d_rate += h.size(t) * d_g;
    r.d_dt[t] = h.size_derivative(t) == 0 ? 0 : d_size * h.size_derivative(t);
    r.d_bias += r.d_dt[t];
  }
  r.d_initial = d_state;
  return r;
}

/// The same by products of whole matrices, of operands in `dtype` and with sums in f32.
class NaiveMamba2 {
 public:
  NaiveMamba2(const PlainHead& head, DType type) : h(head), dtype(type) {
    for (std::size_t t = 0; t < h.steps; ++t) {
      sizes.push_back(h.size(t));
      gates.push_back(h.g(t));
    }
  }

  PlainResult run() const {
    PlainResult r;
    std::vector<double> scaled(h.x);
    for (std::size_t i = 0; i < scaled.size(); ++i) scaled[i] = rounded(h.x[i] * sizes[i / h.dim]);
    std::vector<double> ungated = outputs(h.c, h.b, scaled, h.initial, false, false);
    const std::vector<double> scanned = ungated;
    r.y.resize(ungated.size());
    for (std::size_t i = 0; i < ungated.size(); ++i) {
      if (!h.skip.empty()) ungated[i] = rounded(ungated[i] + rounded(h.skip[i % h.dim] * h.x[i]));
      r.y[i] = h.z.empty() ? ungated[i] : rounded(ungated[i] * rounded(silu_of(h.z[i])));
    }
    r.final = state(scaled, h.b, h.initial, false);
    if (!h.gradients) return r;
    std::vector<double> du = h.dy;
    r.dz.resize(du.size()), r.d_skip.resize(h.dim), r.d_dt.resize(h.steps), r.d_dt_terms.resize(h.steps);
    r.d_skip_terms.resize(h.dim);
    for (std::size_t i = 0; i < du.size() && !h.z.empty(); ++i) {
      r.dz[i] = rounded(rounded(du[i] * ungated[i]) * rounded(silu_derivative(h.z[i])));
      du[i] = rounded(du[i] * rounded(silu_of(h.z[i])));
    }
    // The states are [dim, state]: with q of `dim` elements they are as stored, with one of `state` elements transposed.
    r.dc = outputs(du, scaled, h.b, h.initial, true, false);
    r.db = outputs(scaled, du, h.c, h.d_final, true, true);
    r.dx = outputs(h.b, h.c, du, h.d_final, false, true);
    r.d_initial = state(du, h.c, h.d_final, true);
    float sum = 0;
    double terms = 0;
    const auto add = [&](double term) {
      sum += static_cast<float>(term);
      terms += std::abs(term);
    };
    const bool apart = dtype == DType::f32;  // what a step gives itself, and what the last one gives the final state, is left out
    for (std::size_t i = 0; i < h.d_final.size() && h.steps > 0; ++i) {
      const std::size_t last = h.steps - 1;
      const double own = apart ? scaled[last * h.dim + i / h.state] * h.b[last * h.state + i % h.state] : 0;
      add(h.d_final[i] * (r.final[i] - own));
    }
    float d_rate = 0, d_bias = 0;
    for (std::size_t t = h.steps; t-- > 0;) {
      double own = 0;
      for (std::size_t i = t * h.dim; i < (t + 1) * h.dim && apart; ++i) own += scaled[i] * du[i];
      for (std::size_t n = t * h.state; n < (t + 1) * h.state; ++n) {
        add(h.c[n] * (r.dc[n] - own * h.b[n]));
        if (!apart || t + 1 < h.steps) add(-h.b[n] * (r.db[n] - own * h.c[n]));
      }
      float d_size = 0;
      double d_size_terms = 0;
      for (std::size_t p = 0; p < h.dim; ++p) {
        const std::size_t at = t * h.dim + p;
        const double scaled_gradient = r.dx[at];
        d_size += static_cast<float>(scaled_gradient * h.x[at]);
        d_size_terms += std::abs(scaled_gradient * h.x[at]);
        r.dx[at] = rounded(scaled_gradient * sizes[t]);
        if (!h.skip.empty()) r.dx[at] = rounded(r.dx[at] + rounded(h.skip[p] * du[at]));
        r.d_skip[p] = static_cast<float>(r.d_skip[p] + du[at] * h.x[at]);
        r.d_skip_terms[p] += std::abs(du[at] * h.x[at]);
      }
      const bool decays = std::exp(gates[t]) > 0;
      if (decays) d_size += static_cast<float>(h.rate * sum), d_size_terms += std::abs(h.rate) * terms;
      if (decays) d_rate += static_cast<float>(sizes[t] * sum), r.d_rate_terms += sizes[t] * terms;
      r.d_dt[t] = rounded(d_size * h.size_derivative(t));
      r.d_dt_terms[t] = d_size_terms * h.size_derivative(t);
      d_bias += static_cast<float>(d_size * h.size_derivative(t));
      r.d_bias_terms += r.d_dt_terms[t];
    }
    r.d_rate = d_rate, r.d_bias = d_bias;
    return r;
  }

 private:
  double rounded(double x) const { return test::round_to(dtype, static_cast<float>(x)); }
  /// exp of the sum of the decays of the steps from `first` to `last` - 1.
  double decay(std::size_t first, std::size_t last) const {
    double sum = 0;
    for (std::size_t t = first; t < last; ++t) sum += gates[t];
    return std::exp(sum);
  }
  /// out_i = sum of (q_i k_j) decay(i, j) v_j + decay(i) S q_i, for j up to i, or from i on. `s` is [dim, state]; `contract_dim`: q has
  /// `dim` elements.
  std::vector<double> outputs(const std::vector<double>& q, const std::vector<double>& k, const std::vector<double>& v,
                              const std::vector<double>& s, bool contract_dim, bool backwards) const {
    const std::size_t in = contract_dim ? h.dim : h.state, out = contract_dim ? h.state : h.dim;
    std::vector<double> result(h.steps * out);
    for (std::size_t i = 0; i < h.steps; ++i) {
      std::vector<float> sum(out);
      for (std::size_t j = backwards ? i : 0; j < (backwards ? h.steps : i + 1); ++j) {
        float dot = 0;
        for (std::size_t a = 0; a < in; ++a) dot += static_cast<float>(q[i * in + a] * k[j * in + a]);
        const double weight = rounded(rounded(dot) * rounded(backwards ? decay(i + 1, j + 1) : decay(j + 1, i + 1)));
        for (std::size_t o = 0; o < out; ++o) sum[o] += static_cast<float>(weight * v[j * out + o]);
      }
      const double factor = backwards ? decay(i + 1, h.steps) : decay(0, i + 1);
      for (std::size_t a = 0; a < in && !s.empty(); ++a)
        for (std::size_t o = 0; o < out; ++o)
          sum[o] += static_cast<float>(rounded(q[i * in + a] * factor) * rounded(contract_dim ? s[a * h.state + o] : s[o * h.state + a]));
      for (std::size_t o = 0; o < out; ++o) result[i * out + o] = rounded(sum[o]);
    }
    return result;
  }
  std::vector<double> state(const std::vector<double>& rows, const std::vector<double>& columns, const std::vector<double>& from,
                            bool backwards) const {
    std::vector<double> result(h.dim * h.state), decays(h.steps);
    for (std::size_t t = 0; t < h.steps; ++t) decays[t] = backwards ? decay(0, t + 1) : decay(t + 1, h.steps);
    const double whole = decay(0, h.steps);
    for (std::size_t p = 0; p < h.dim; ++p) {
      for (std::size_t n = 0; n < h.state; ++n) {
        auto sum = static_cast<float>(from.empty() ? 0.0 : from[p * h.state + n] * whole);
        for (std::size_t t = 0; t < h.steps; ++t)
          sum += static_cast<float>(rounded(rows[t * h.dim + p] * decays[t]) * columns[t * h.state + n]);
        result[p * h.state + n] = sum;
      }
    }
    return result;
  }

  const PlainHead& h;
  DType dtype;
  std::vector<double> sizes = {}, gates = {};
};

inline PlainResult naive_mamba2(const PlainHead& h, DType dtype) { return NaiveMamba2(h, dtype).run(); }

}  // namespace tw::kernels::mamba2
