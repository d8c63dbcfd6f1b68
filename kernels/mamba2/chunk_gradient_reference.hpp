#pragma once

#include "kernels/mamba2/chunk_reference.hpp"

// Gradients of the scan's five steps as plain loops: in double, or in a data type, with sums in f32. All tensors are contiguous.

namespace tw::kernels::mamba2 {

/// A gradient, and the sums of the absolute values of what its elements are sums of.
struct PlainSum {
  std::vector<double> values = {}, terms = {};

  explicit PlainSum(std::size_t count = 0) : values(count), terms(count) {}
  void add(std::size_t i, double x) { values[i] += x, terms[i] += std::abs(x); }
};

class PlainChunkGradients : public PlainChunks {
 public:
  explicit PlainChunkGradients(const PlainChunks& chunks) : PlainChunks(chunks) {}

  struct OfCumsum {
    PlainSum dt, rate, bias;
  };
  /// d_sums and d_sizes: [batch, head, chunk, step].
  OfCumsum cumsum(const Values& dt, const Values& rate, const Values& bias, PlainHead limits, const std::vector<bool>& begins,
                  const Values& d_sums, const Values& d_sizes, DType of_dt) const {
    OfCumsum d{PlainSum(dt.size()), PlainSum(heads()), PlainSum(heads())};
    limits.dt.resize(1);
    for (std::size_t n = 0; n < batch; ++n) {
      for (std::size_t h = 0; h < heads(); ++h) {
        limits.rate = rate[h], limits.bias = bias.empty() ? 0 : bias[h];
        for (std::size_t t = 0; t < seqlen; ++t) {
          const std::size_t at = (n * seqlen + t) * heads() + h, row = (n * heads() + h) * chunks() * chunk;
          limits.dt[0] = dt[at];
          const double size = summed(limits.size(0)), slope = limits.size_derivative(0);
          const bool decays = (begins.empty() || !begins[n * seqlen + t]) && std::isfinite(rate[h]) && limits.g(0) > kLowest;
          double d_g = 0, terms = 0;
          for (std::size_t i = (t / chunk + 1) * chunk; decays && i-- > t;) {
            d_g = summed(d_g + d_sums[row + i]);
            terms += std::abs(d_sums[row + i]);
          }
          const double d_size = summed(d_sizes[row + t] + (decays ? summed(rate[h] * d_g) : 0));
          const double d_dt = slope == 0 ? 0 : summed(d_size * slope);
          const double d_dt_terms = (std::abs(d_sizes[row + t]) + (decays ? std::abs(rate[h]) * terms : 0)) * slope;
          d.dt.values[at] = dtype ? test::round_to(of_dt, static_cast<float>(d_dt)) : d_dt, d.dt.terms[at] = d_dt_terms;
          d.rate.values[h] = summed(d.rate.values[h] + summed(size * d_g)), d.rate.terms[h] += size * terms;
          d.bias.values[h] = summed(d.bias.values[h] + d_dt), d.bias.terms[h] += d_dt_terms;
        }
      }
    }
    return d;
  }

  struct OfState {
    Values b, x;
    PlainSum sizes, sums;
  };
  OfState added(const Values& b, const Values& x, const Values& sizes, const Values& sums, const Values& d_states) const {
    OfState d{Values(b.size()), Values(x.size()), PlainSum(sizes.size()), PlainSum(sums.size())};
    each_step([&](std::size_t n, std::size_t c, std::size_t h, std::size_t i, std::size_t t) {
      const std::size_t row = ((n * heads() + h) * chunks() + c) * chunk, last = row + chunk - 1;
      const std::size_t of_x = ((n * seqlen + t) * heads() + h) * dim, of_b = ((n * seqlen + t) * groups + h / shared) * state;
      const double decay = std::exp(sums[last] - sums[row + i]), factor = decay * sizes[row + i];
      const double* const d_state = &d_states[((n * chunks() + c) * heads() + h) * area()];
      Values of_keys(state);
      for (std::size_t p = 0; p < dim; ++p) {
        double sum = 0;
        for (std::size_t s = 0; s < state; ++s) {
          const double element = rounded(d_state[p * state + s]);
          sum = summed(sum + element * b[of_b + s]);
          of_keys[s] = summed(of_keys[s] + element * x[of_x + p]);
          const double product = decay * element * b[of_b + s] * x[of_x + p];
          d.sizes.add(row + i, product);
          if (row + i == last) continue;
          d.sums.add(row + i, -sizes[row + i] * product);
          d.sums.add(last, sizes[row + i] * product);
        }
        d.x[of_x + p] = rounded(summed(sum * factor));
      }
      for (std::size_t s = 0; s < state; ++s) d.b[of_b + s] = summed(d.b[of_b + s] + of_keys[s] * factor);
    });
    for (double& value : d.b) value = rounded(value);
    return d;
  }

  struct OfPassing {
    Values states, initial;
    PlainSum decays;
  };
  /// before: the state before each chunk. decays: [batch, head, chunk]. d_final may be empty.
  OfPassing passed(const Values& before, const Values& decays, const Values& d_passed, const Values& d_final) const {
    OfPassing d{Values(before.size()), Values(batch * heads() * area()), PlainSum(decays.size())};
    for (std::size_t i = 0; i < d.initial.size(); ++i) {
      const std::size_t row = i / area(), n = row / heads(), h = row % heads();
      double sum = d_final.empty() ? 0 : d_final[i];
      for (std::size_t c = chunks(); c-- > 0;) {
        const std::size_t at = ((n * chunks() + c) * heads() + h) * area() + i % area();
        d.states[at] = sum;
        sum = summed(sum * summed(std::exp(decays[row * chunks() + c])));
        d.decays.add(row * chunks() + c, sum * before[at]);
        sum = summed(sum + d_passed[at]);
      }
      d.initial[i] = sum;
    }
    return d;
  }

  /// {dC, dB}
  std::pair<Values, Values> products(const Values& c_matrix, const Values& b, const Values& d_cb, bool causal) const {
    Values dc(c_matrix.size()), db(b.size());
    for (std::size_t at = 0; at < d_cb.size(); ++at) {
      const std::size_t j = at % chunk, i = at / chunk % chunk, g = at / chunk / chunk % groups, number = at / chunk / chunk / groups;
      const std::size_t first = number % chunks() * chunk, n = number / chunks();
      if (first + std::max(i, j) >= seqlen || (causal && j > i)) continue;
      const std::size_t row = ((n * seqlen + first + i) * groups + g) * state, column = ((n * seqlen + first + j) * groups + g) * state;
      for (std::size_t s = 0; s < state; ++s) {
        dc[row + s] = summed(dc[row + s] + rounded(d_cb[at]) * b[column + s]);
        db[column + s] = summed(db[column + s] + rounded(d_cb[at]) * c_matrix[row + s]);
      }
    }
    for (Values* const d : {&dc, &db})
      for (double& value : *d) value = rounded(value);
    return {dc, db};
  }

  struct OfScan {
    Values cb, x, c, states, z;
    PlainSum sizes, sums, skip;  ///< skip: [head, dim]
  };
  /// `skip` [head, dim], `z` and `ungated` may be empty.
  OfScan outputs(const Values& cb, const Values& x, const Values& sizes, const Values& sums, const Values& c_matrix, const Values& states,
                 const Values& skip, const Values& z, const Values& ungated, const Values& dy) const {
    OfScan d{Values(cb.size()), Values(x.size()),       Values(c_matrix.size()), Values(states.size()),
             Values(z.size()),  PlainSum(sizes.size()), PlainSum(sums.size()),   PlainSum(heads() * dim)};
    Values du = dy;
    for (std::size_t i = 0; i < z.size(); ++i) {
      d.z[i] = rounded(rounded(dy[i] * ungated[i]) * rounded(silu_derivative(z[i])));
      du[i] = rounded(dy[i] * rounded(silu_of(z[i])));
    }
    each_step([&](std::size_t n, std::size_t c, std::size_t h, std::size_t i, std::size_t t) {
      const std::size_t row = ((n * heads() + h) * chunks() + c) * chunk, number = n * chunks() + c;
      const std::size_t of_x = ((n * seqlen + t) * heads() + h) * dim, of_c = ((n * seqlen + t) * groups + h / shared) * state;
      const std::size_t of_state = (number * heads() + h) * area();
      const double start = std::exp(sums[row + i]);
      for (std::size_t s = 0; s < state; ++s) {
        double sum = 0;
        for (std::size_t p = 0; p < dim; ++p) {
          sum = summed(sum + du[of_x + p] * states[of_state + p * state + s]);
          d.sums.add(row + i, start * c_matrix[of_c + s] * du[of_x + p] * states[of_state + p * state + s]);
          double& to = d.states[of_state + p * state + s];
          to = summed(to + rounded(du[of_x + p] * start) * c_matrix[of_c + s]);
        }
        d.c[of_c + s] = summed(d.c[of_c + s] + sum * start);
      }
      // The outputs that see this step.
      Values sum(dim);
      for (std::size_t later = i; later < chunk && t - i + later < seqlen; ++later) {
        const std::size_t of_later = of_x + (later - i) * heads() * dim;
        const std::size_t product = ((number * groups + h / shared) * chunk + later) * chunk + i;
        const double decay = std::exp(sums[row + later] - sums[row + i]), weight = rounded(cb[product] * decay);
        double dot = 0;
        for (std::size_t p = 0; p < dim; ++p) {
          dot = summed(dot + du[of_later + p] * x[of_x + p]);
          sum[p] = summed(sum[p] + weight * du[of_later + p]);
          const double term = cb[product] * decay * du[of_later + p] * x[of_x + p];
          d.sizes.add(row + i, term);
          d.sums.add(row + later, sizes[row + i] * term);
          d.sums.add(row + i, -sizes[row + i] * term);
        }
        d.cb[product] = summed(d.cb[product] + dot * decay * sizes[row + i]);
      }
      for (std::size_t p = 0; p < dim; ++p) {
        d.x[of_x + p] = rounded(summed(sum[p] * sizes[row + i]) + (skip.empty() ? 0 : skip[h * dim + p] * du[of_x + p]));
        d.skip.add(h * dim + p, du[of_x + p] * x[of_x + p]);
      }
    });
    for (double& value : d.c) value = rounded(value);
    return d;
  }
};

}  // namespace tw::kernels::mamba2
