#include "kernels/attention/backward_reference.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace tw::kernels::attention {
namespace {

/// The root of the sum of (x[c] y[c])^2: the size of their dot product, but for cancellation. `count` is a multiple of 8.
template <class Real>
Real size_of_product(const Real* x, const Real* y, std::int64_t count) {
  using Math = Eight<Real>;
  typename Math::Lanes sums = {};
  for (std::int64_t c = 0; c < count; c += Math::kLanes) {
    const auto product = Math::at(x + c) * Math::at(y + c);
    sums += product * product;
  }
  Real sum = 0;
  for (int n = 0; n < Math::kLanes; ++n) sum += sums[n];
  return std::sqrt(sum);
}

/// Gradients of the sum of d_o O, from the definitions and row by row, unfused, in arithmetic of type Real. `round` is applied to what
/// passes from one operation to the next: scores, weights, O, dP, dS and the results. `d_o`: [batch, seqlen_q, heads, value_dim].
template <class Real, class Round>
PlainGradients evaluate_gradients(const PlainCall& call, std::span<const float> d_o, Round round) {
  using Math = Eight<Real>;
  constexpr bool kExact = std::is_same_v<Real, double>;
  const std::int64_t d = call.head_dim, value_dim = call.value_dim > 0 ? call.value_dim : d;
  const std::int64_t group = call.kv_heads > 0 ? call.heads / call.kv_heads : 0;
  const auto size = [](std::int64_t elements) { return static_cast<std::size_t>(elements); };
  const auto real = [](std::span<const float> values) { return std::vector<Real>(values.begin(), values.end()); };
  const std::vector<Real> q = real(call.q), k = real(call.k), v = real(call.v), o_gradient = real(d_o);
  std::vector<Real> dq(q.size()), dk(k.size()), dv(v.size()), d_sink(call.sink.size());
  std::vector<Real> dq_cancelled(q.size()), dk_cancelled(k.size()), dv_cancelled(v.size()), d_sink_cancelled(call.sink.size());
  std::vector<Real> d_mask(call.mask.size()), d_mask_cancelled(call.mask.size());
  std::vector<Real> absolute_q(q), absolute_k(k), absolute_gradient(o_gradient);
  for (std::vector<Real>* const values : {&absolute_q, &absolute_k, &absolute_gradient})
    for (Real& x : *values) x = std::abs(x);
  std::vector<Real> p(size(call.seqlen_k)), slopes(size(call.seqlen_k)), o(size(value_dim));
  const auto scale = static_cast<Real>(call.scale), softcap = static_cast<Real>(call.softcap);
  const bool slope_of_batch = static_cast<std::int64_t>(call.alibi_slopes.size()) > call.heads;

  for (std::int64_t b = 0; b < call.batch; ++b) {
    const std::int64_t length_q = call.lengths_q.empty() ? call.seqlen_q : call.lengths_q[size(b)];
    const std::int64_t length_k = call.lengths_k.empty() ? call.seqlen_k : call.lengths_k[size(b)];
    const std::int64_t diagonal = call.causal_offset ? *call.causal_offset : length_k - length_q;
    for (std::int64_t head = 0; head < call.heads; ++head) {
      const auto alibi =
          call.alibi_slopes.empty() ? Real{0} : static_cast<Real>(call.alibi_slopes[size(slope_of_batch ? b * call.heads + head : head)]);
      const auto key = [&](std::int64_t j) { return (b * call.seqlen_k + j) * call.kv_heads + head / group; };
      const auto in_mask = [&](std::int64_t i, std::int64_t j) {
        const auto& strides = call.mask_strides;
        return size(b * strides[0] + head * strides[1] + i * strides[2] + j * strides[3]);
      };
      for (std::int64_t i = 0; i < length_q; ++i) {
        const std::int64_t row = (b * call.seqlen_q + i) * call.heads + head, at = i + diagonal;
        const auto [begin, end] = VisibleKeys::of(call, at, length_k);
        const Real sink = call.sink.empty() ? -std::numeric_limits<Real>::infinity() : static_cast<Real>(call.sink[size(head)]);
        Real largest = sink;
        for (std::int64_t j = begin; j < end; ++j) {
          Real s = round(round(Math::dot_product(&q[size(row * d)], &k[size(key(j) * d)], d)) * scale);
          slopes[size(j)] = 1;
          if (softcap > 0) {
            const Real t = round(std::tanh(round(s / softcap)));
            slopes[size(j)] = round(1 - t * t);
            s = round(softcap * t);
          }
          if (alibi != 0) s = round(s - alibi * static_cast<Real>(std::abs(at - j)));
          if (!call.mask.empty()) s = round(s + static_cast<Real>(call.mask[in_mask(i, j)]));
          p[size(j)] = s;
          largest = std::max(largest, s);
        }
        if (largest == -std::numeric_limits<Real>::infinity()) continue;  // sees no key
        Real total = std::exp(sink - largest);
        for (std::int64_t j = begin; j < end; ++j) total += std::exp(p[size(j)] - largest);
        const Real lse = largest + std::log(total);  // a backward pass is given it in f32, with the rounding error of its size
        std::fill(o.begin(), o.end(), Real{0});
        const Real* const row_gradient = &o_gradient[size(row * value_dim)];
        const Real exponent_size = std::max(Real{1}, std::abs(lse));
        const auto kept = [&](std::int64_t j) {
          if (call.dropout.empty()) return Real{1};
          return static_cast<Real>(call.dropout[size(((b * call.heads + head) * call.seqlen_q + i) * call.seqlen_k + j)]);
        };
        for (std::int64_t j = begin; j < end; ++j) {
          p[size(j)] = round(std::exp(p[size(j)] - lse));
          const Real weight = round(p[size(j)] * kept(j));
          Math::add(o.data(), weight, &v[size(key(j) * value_dim)], value_dim);
          Math::add(&dv[size(key(j) * value_dim)], weight, row_gradient, value_dim);
          if constexpr (kExact)
            Math::add(&dv_cancelled[size(key(j) * value_dim)], weight * exponent_size, &absolute_gradient[size(row * value_dim)],
                      value_dim);
        }
        std::transform(o.begin(), o.end(), o.begin(), round);
        const Real delta = Math::dot_product(row_gradient, o.data(), value_dim);
        const Real delta_size = size_of_product(row_gradient, o.data(), value_dim);
        if (!call.sink.empty()) {
          const Real weight = std::exp(sink - lse);
          d_sink[size(head)] -= weight * delta;
          // The exponent is a difference, of which both terms were rounded. There is one sum for each head, so the naive computation may
          // happen to be almost exact and says little about rounding.
          d_sink_cancelled[size(head)] += weight * delta_size * (exponent_size + std::abs(sink));
        }
        for (std::int64_t j = begin; j < end; ++j) {
          const Real dp = round(round(Math::dot_product(row_gradient, &v[size(key(j) * value_dim)], value_dim)) * kept(j));
          const Real d_score = round(p[size(j)] * (dp - delta)), ds = round(round(d_score * slopes[size(j)]) * scale);
          if (!call.mask.empty()) d_mask[in_mask(i, j)] += d_score;
          Math::add(&dq[size(row * d)], ds, &k[size(key(j) * d)], d);
          Math::add(&dk[size(key(j) * d)], ds, &q[size(row * d)], d);
          if constexpr (!kExact) continue;
          const Real dp_size = size_of_product(row_gradient, &v[size(key(j) * value_dim)], value_dim) * kept(j);
          const Real d_score_size = p[size(j)] * (dp_size + delta_size), cancelled = d_score_size * slopes[size(j)] * scale;
          if (!call.mask.empty()) d_mask_cancelled[in_mask(i, j)] += d_score_size;
          Math::add(&dq_cancelled[size(row * d)], cancelled, &absolute_k[size(key(j) * d)], d);
          Math::add(&dk_cancelled[size(key(j) * d)], cancelled, &absolute_q[size(row * d)], d);
        }
      }
    }
  }
  const auto rounded = [&](const std::vector<Real>& values) {
    std::vector<double> result(values.size());
    std::transform(values.begin(), values.end(), result.begin(), round);
    return result;
  };
  const auto in_double = [](const std::vector<Real>& values) { return std::vector<double>(values.begin(), values.end()); };
  return {rounded(dq),
          rounded(dk),
          rounded(dv),
          in_double(d_sink),
          in_double(d_mask),
          in_double(dq_cancelled),
          in_double(dk_cancelled),
          in_double(dv_cancelled),
          in_double(d_sink_cancelled),
          in_double(d_mask_cancelled)};
}

}  // namespace

TW_ALSO_FOR_AVX2 PlainGradients reference_gradients(const PlainCall& call, std::span<const float> d_o) {
  return evaluate_gradients<double>(call, d_o, [](double x) { return x; });
}

PlainGradients naive_gradients(const PlainCall& call, std::span<const float> d_o, DType dtype) {
  switch (dtype) {
    case DType::f16:
      return evaluate_gradients<float>(call, d_o, [](float x) { return static_cast<float>(f16(x)); });
    case DType::bf16:
      return evaluate_gradients<float>(call, d_o, [](float x) { return static_cast<float>(bf16(x)); });
    default:
      return evaluate_gradients<float>(call, d_o, [](float x) { return x; });
  }
}

}  // namespace tw::kernels::attention
