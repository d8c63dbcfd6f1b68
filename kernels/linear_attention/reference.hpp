#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "tests/accuracy.hpp"

// Linear attention as plain loops: the recurrence in double, and the unfused operations in a data type.

namespace tw::kernels::linear_attention {

/// One head of one sequence. Matrices are row-major: q and k [steps, dk], v and d_o [steps, dv], states [dk, dv]. Vectors may be empty: no
/// gates, no initial state, no gradient of the final one.
struct PlainHead {
  std::size_t steps = 0, dk = 0, dv = 0;
  double scale = 1;
  bool gradients = false;
  std::vector<double> q = {}, k = {}, v = {}, g = {}, initial = {}, d_o = {}, d_final = {};
};
struct PlainResult {
  std::vector<double> o, final, dq, dk, dv, dg, d_initial;
  /// The sum of the absolute values of what dg is a sum of, where it is q dq - k dk; in f32 without what each step gives its own dq and dk.
  std::vector<double> dg_terms;
};

inline PlainResult plain_linear_attention(const PlainHead& h) {
  const std::size_t area = h.dk * h.dv;
  PlainResult r;
  r.o.resize(h.steps * h.dv);
  std::vector<std::vector<double>> states(h.steps + 1, std::vector<double>(area));
  if (!h.initial.empty()) states[0] = h.initial;
  const auto decay = [&](std::size_t t) { return h.g.empty() ? 1.0 : std::exp(h.g[t]); };
  for (std::size_t t = 0; t < h.steps; ++t) {
    for (std::size_t a = 0; a < h.dk; ++a) {
      for (std::size_t c = 0; c < h.dv; ++c) {
        const double s = decay(t) * states[t][a * h.dv + c] + h.k[t * h.dk + a] * h.v[t * h.dv + c];
        states[t + 1][a * h.dv + c] = s;
        r.o[t * h.dv + c] += h.scale * h.q[t * h.dk + a] * s;
      }
    }
  }
  r.final = states[h.steps];
  if (!h.gradients) return r;
  r.dq.resize(h.steps * h.dk), r.dk.resize(h.steps * h.dk), r.dv.resize(h.steps * h.dv), r.dg.resize(h.steps);
  std::vector<double> d_state = h.d_final.empty() ? std::vector<double>(area) : h.d_final;
  for (std::size_t t = h.steps; t-- > 0;) {
    for (std::size_t a = 0; a < h.dk; ++a) {
      for (std::size_t c = 0; c < h.dv; ++c) {
        double& d = d_state[a * h.dv + c];
        d += h.scale * h.q[t * h.dk + a] * h.d_o[t * h.dv + c];
        r.dq[t * h.dk + a] += h.scale * states[t + 1][a * h.dv + c] * h.d_o[t * h.dv + c];
        r.dk[t * h.dk + a] += d * h.v[t * h.dv + c];
        r.dv[t * h.dv + c] += d * h.k[t * h.dk + a];
        d *= decay(t);
        r.dg[t] += d * states[t][a * h.dv + c];
      }
    }
  }
  r.d_initial = d_state;
  return r;
}

namespace internal {

/// All that products and sums of f32 operands in `dtype` make of a pass: out_i = scale * sum of weights(i, j) v_j + state_scale * q_i S,
/// for j up to i, or from i on.
struct NaivePass {
  const PlainHead& h;
  DType dtype;
  double rounded(double x) const { return test::round_to(dtype, static_cast<float>(x)); }
  /// exp of the sum of gates from `first` to `last` - 1.
  double decay(std::size_t first, std::size_t last) const {
    if (h.g.empty()) return 1;
    double sum = 0;
    for (std::size_t t = first; t < last; ++t) sum += h.g[t];
    return std::exp(sum);
  }
  std::vector<double> run(const std::vector<double>& q, const std::vector<double>& k, const std::vector<double>& v,
                          const std::vector<double>& state, bool state_transposed, bool backwards, double scale, double state_scale) const {
    const std::size_t n = h.steps, in = n == 0 ? 0 : q.size() / n, out = n == 0 ? 0 : v.size() / n;
    std::vector<double> result(n * out);
    for (std::size_t i = 0; i < n; ++i) {
      std::vector<float> sum(out);
      for (std::size_t j = backwards ? i : 0; j < (backwards ? n : i + 1); ++j) {
        float dot = 0;
        for (std::size_t a = 0; a < in; ++a) dot += static_cast<float>(q[i * in + a] * k[j * in + a]);
        const double weight = rounded(rounded(scale * dot) * rounded(backwards ? decay(i + 1, j + 1) : decay(j + 1, i + 1)));
        for (std::size_t c = 0; c < out; ++c) sum[c] += static_cast<float>(weight * v[j * out + c]);
      }
      if (!state.empty()) {
        const double factor = state_scale * (backwards ? decay(i + 1, n) : decay(0, i + 1));
        for (std::size_t a = 0; a < in; ++a)
          for (std::size_t c = 0; c < out; ++c)
            sum[c] += static_cast<float>(rounded(q[i * in + a] * factor) * rounded(state[state_transposed ? c * in + a : a * out + c]));
      }
      for (std::size_t c = 0; c < out; ++c) result[i * out + c] = rounded(sum[c]);
    }
    return result;
  }
  std::vector<double> state(const std::vector<double>& k, const std::vector<double>& v, const std::vector<double>& initial, bool backwards,
                            double scale) const {
    std::vector<double> result(h.dk * h.dv), decays(h.steps);
    for (std::size_t t = 0; t < h.steps; ++t) decays[t] = backwards ? decay(0, t + 1) : decay(t + 1, h.steps);
    const double whole = decay(0, h.steps);
    for (std::size_t a = 0; a < h.dk; ++a) {
      for (std::size_t c = 0; c < h.dv; ++c) {
        auto sum = static_cast<float>(initial.empty() ? 0.0 : initial[a * h.dv + c] * whole);
        for (std::size_t t = 0; t < h.steps; ++t) sum += static_cast<float>(k[t * h.dk + a] * rounded(v[t * h.dv + c] * scale * decays[t]));
        result[a * h.dv + c] = sum;
      }
    }
    return result;
  }
};

}  // namespace internal

/// The same by products of whole matrices, of operands in `dtype` and with sums in f32.
inline PlainResult naive_linear_attention(const PlainHead& h, DType dtype) {
  const internal::NaivePass pass{h, dtype};
  PlainResult r;
  r.o = pass.run(h.q, h.k, h.v, h.initial, false, false, h.scale, h.scale);
  r.final = pass.state(h.k, h.v, h.initial, false, 1);
  if (!h.gradients) return r;
  r.dq = pass.run(h.d_o, h.v, h.k, h.initial, true, false, h.scale, h.scale);
  r.dk = pass.run(h.v, h.d_o, h.q, h.d_final, true, true, h.scale, 1);
  r.dv = pass.run(h.k, h.q, h.d_o, h.d_final, false, true, h.scale, 1);
  r.d_initial = pass.state(h.q, h.d_o, h.d_final, true, h.scale);
  r.dg.resize(h.steps), r.dg_terms.resize(h.steps);
  const bool apart = dtype == DType::f32;  // what a step gives itself, and what the last one gives the final state, is left out
  float sum = 0;
  double terms = 0;
  for (std::size_t n = 0; n < h.d_final.size() && h.steps > 0; ++n) {
    const double own = apart ? h.k[(h.steps - 1) * h.dk + n / h.dv] * h.v[(h.steps - 1) * h.dv + n % h.dv] : 0;
    sum += static_cast<float>(h.d_final[n] * (r.final[n] - own));
    terms += std::abs(h.d_final[n] * (r.final[n] - own));
  }
  for (std::size_t t = h.steps; t-- > 0;) {
    double own = 0;
    for (std::size_t c = t * h.dv; c < (t + 1) * h.dv && apart; ++c) own += h.scale * h.v[c] * h.d_o[c];
    for (std::size_t a = t * h.dk; a < (t + 1) * h.dk; ++a) {
      const double of_q = h.q[a] * (r.dq[a] - own * h.k[a]);
      const double of_k = apart && t + 1 == h.steps ? 0 : h.k[a] * (r.dk[a] - own * h.q[a]);
      sum += static_cast<float>(of_q - of_k);
      terms += std::abs(of_q) + std::abs(of_k);
    }
    r.dg[t] = sum;
    r.dg_terms[t] = terms;
  }
  return r;
}

}  // namespace tw::kernels::linear_attention
