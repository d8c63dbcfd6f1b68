#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include "kernels/mamba2/reference.hpp"

// The five steps of the scan (tilewave/mamba2_chunks.hpp) as plain loops: in double, or in a data type, with sums in f32. All tensors are
// contiguous.

namespace tw::kernels::mamba2 {

struct PlainChunks {
  std::size_t batch = 1, seqlen = 1, groups = 1, shared = 1, dim = 1, state = 1, chunk = 16;
  std::optional<DType> dtype = {};  ///< none: double

  using Values = std::vector<double>;
  std::size_t heads() const { return groups * shared; }
  std::size_t chunks() const { return (seqlen + chunk - 1) / chunk; }
  std::size_t area() const { return dim * state; }

  /// {dt, dA_cumsum} of [batch, head, chunk, step]. `begins` [batch, time] may be empty.
  std::pair<Values, Values> cumsum(const Values& dt, const Values& rate, const Values& bias, PlainHead limits,
                                   const std::vector<bool>& begins) const {
    Values sizes(batch * heads() * chunks() * chunk), sums(sizes.size());
    limits.dt.resize(1);
    for (std::size_t row = 0; row < batch * heads(); ++row) {
      const std::size_t head = row % heads();
      limits.rate = rate[head], limits.bias = bias.empty() ? 0 : bias[head];
      for (std::size_t at = 0; at < chunks() * chunk; ++at) {
        const std::size_t i = row * chunks() * chunk + at;
        double g = 0;
        if (at < seqlen) {
          const std::size_t t = row / heads() * seqlen + at;
          limits.dt[0] = dt[t * heads() + head];
          sizes[i] = summed(limits.size(0));
          g = !begins.empty() && begins[t] ? kLowest : std::max(summed(limits.g(0)), kLowest);
        }
        sums[i] = summed((at % chunk == 0 ? 0 : sums[i - 1]) + g);
      }
    }
    return {sizes, sums};
  }

  /// [batch, chunk, head, dim, state]
  Values added(const Values& b, const Values& x, const Values& sizes, const Values& sums) const {
    Values out(batch * chunks() * heads() * area());
    each_step([&](std::size_t n, std::size_t c, std::size_t h, std::size_t i, std::size_t t) {
      const std::size_t row = ((n * heads() + h) * chunks() + c) * chunk;
      const double factor = std::exp(sums[row + chunk - 1] - sums[row + i]) * sizes[row + i];
      for (std::size_t p = 0; p < dim; ++p) {
        const double scaled = rounded(x[((n * seqlen + t) * heads() + h) * dim + p] * factor);
        for (std::size_t s = 0; s < state; ++s) {
          double& to = out[((n * chunks() + c) * heads() + h) * area() + p * state + s];
          to = summed(to + scaled * b[((n * seqlen + t) * groups + h / shared) * state + s]);
        }
      }
    });
    return out;
  }

  /// {the state before each chunk, the last one}; the first rounded to `passed`. decays: [batch, head, chunk].
  std::pair<Values, Values> passed(const Values& added, const Values& decays, const Values& initial, DType of_passed) const {
    Values out(added.size()), last(batch * heads() * area());
    for (std::size_t i = 0; i < last.size(); ++i) {
      const std::size_t row = i / area(), n = row / heads(), h = row % heads();
      double sum = initial.empty() ? 0 : initial[i];
      for (std::size_t c = 0; c < chunks(); ++c) {
        const std::size_t at = ((n * chunks() + c) * heads() + h) * area() + i % area();
        out[at] = dtype ? test::round_to(of_passed, static_cast<float>(sum)) : sum;
        sum = summed(summed(sum * summed(std::exp(decays[row * chunks() + c]))) + added[at]);
      }
      last[i] = sum;
    }
    return {out, last};
  }

  /// [batch, chunk, group, step, step]
  Values products(const Values& c_matrix, const Values& b, bool causal) const {
    Values out(batch * chunks() * groups * chunk * chunk);
    for (std::size_t at = 0; at < out.size(); ++at) {
      const std::size_t j = at % chunk, i = at / chunk % chunk, g = at / chunk / chunk % groups, number = at / chunk / chunk / groups;
      const std::size_t first = number % chunks() * chunk, n = number / chunks();
      if (first + std::max(i, j) >= seqlen || (causal && j > i)) continue;
      const std::size_t row = ((n * seqlen + first + i) * groups + g) * state, column = ((n * seqlen + first + j) * groups + g) * state;
      for (std::size_t s = 0; s < state; ++s) out[at] = summed(out[at] + c_matrix[row + s] * b[column + s]);
    }
    return out;
  }

  /// {outputs before the gate, outputs}, [batch, time, head, dim]. `skip` [head, dim] and `z` may be empty.
  std::pair<Values, Values> outputs(const Values& cb, const Values& x, const Values& sizes, const Values& sums, const Values& c_matrix,
                                    const Values& states, const Values& skip, const Values& z) const {
    Values ungated(batch * seqlen * heads() * dim), out(ungated.size());
    each_step([&](std::size_t n, std::size_t c, std::size_t h, std::size_t i, std::size_t t) {
      const std::size_t row = ((n * heads() + h) * chunks() + c) * chunk, number = n * chunks() + c;
      Values weights(i + 1);
      for (std::size_t j = 0; j <= i; ++j)
        weights[j] = rounded(cb[((number * groups + h / shared) * chunk + i) * chunk + j] * std::exp(sums[row + i] - sums[row + j]) *
                             sizes[row + j]);
      for (std::size_t p = 0; p < dim; ++p) {
        double sum = 0;
        for (std::size_t s = 0; s < state; ++s)
          sum = summed(sum + c_matrix[((n * seqlen + t) * groups + h / shared) * state + s] *
                                 states[(number * heads() + h) * area() + p * state + s]);
        sum = summed(sum * std::exp(sums[row + i]));
        for (std::size_t j = 0; j <= i; ++j) sum = summed(sum + weights[j] * x[((n * seqlen + t - i + j) * heads() + h) * dim + p]);
        const std::size_t at = ((n * seqlen + t) * heads() + h) * dim + p;
        ungated[at] = rounded(sum);
        if (!skip.empty()) ungated[at] = rounded(ungated[at] + rounded(skip[h * dim + p] * x[at]));
        out[at] = z.empty() ? ungated[at] : rounded(ungated[at] * rounded(silu_of(z[at])));
      }
    });
    return {ungated, out};
  }

 protected:
  /// The lowest logarithm of a step's decay.
  static inline const double kLowest = -160 * std::log(2.0);

  double rounded(double x) const { return dtype ? test::round_to(*dtype, static_cast<float>(x)) : x; }
  double summed(double x) const { return dtype ? static_cast<float>(x) : x; }
  /// f(batch, chunk, head, step of the chunk, time) for every step.
  void each_step(auto f) const {
    for (std::size_t n = 0; n < batch; ++n)
      for (std::size_t t = 0; t < seqlen; ++t)
        for (std::size_t h = 0; h < heads(); ++h) f(n, t / chunk, h, t % chunk, t);
  }
};

}  // namespace tw::kernels::mamba2
