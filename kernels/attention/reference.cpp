#include "kernels/attention/reference.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

namespace tw::kernels::attention {
namespace {

/// softmax(S) V row by row, unfused, in arithmetic of type Real; `round` is applied to the scores after every operation, `round_result` to
/// the result. `weight_of(p, total)` is the rounded weight of a key, where p is the exponential of its score less the row's largest, and
/// `total` their sum.
template <class Real, class Round, class WeightOf, class RoundResult>
PlainResult evaluate(const PlainCall& call, Round round, WeightOf weight_of, RoundResult round_result) {
  constexpr Real kInfinite = std::numeric_limits<Real>::infinity();
  const std::int64_t d = call.head_dim, value_dim = call.value_dim > 0 ? call.value_dim : d;
  const std::int64_t group = call.kv_heads > 0 ? call.heads / call.kv_heads : 0;
  PlainResult result;
  result.o.resize(static_cast<std::size_t>(call.batch * call.seqlen_q * call.heads * value_dim));
  result.lse.resize(static_cast<std::size_t>(call.batch * call.heads * call.seqlen_q), -std::numeric_limits<double>::infinity());
  // Of one head, in Real, one behind the other.
  std::vector<Real> keys(static_cast<std::size_t>(call.seqlen_k * d)), values(static_cast<std::size_t>(call.seqlen_k * value_dim));
  std::vector<Real> query(static_cast<std::size_t>(d)), scores(static_cast<std::size_t>(call.seqlen_k));
  std::vector<Real> sums(static_cast<std::size_t>(value_dim)), query_values(static_cast<std::size_t>(value_dim));
  const auto length = [](std::span<const std::int64_t> lengths, std::int64_t b, std::int64_t all) {
    return lengths.empty() ? all : lengths[static_cast<std::size_t>(b)];
  };
  const auto slope_of = [&](std::int64_t b, std::int64_t head) {
    if (call.alibi_slopes.empty()) return Real{0};
    const bool of_batch = static_cast<std::int64_t>(call.alibi_slopes.size()) > call.heads;
    return static_cast<Real>(call.alibi_slopes[static_cast<std::size_t>(of_batch ? b * call.heads + head : head)]);
  };
  const auto scale = static_cast<Real>(call.scale), softcap = static_cast<Real>(call.softcap);

  for (std::int64_t b = 0; b < call.batch; ++b) {
    const std::int64_t length_q = length(call.lengths_q, b, call.seqlen_q), length_k = length(call.lengths_k, b, call.seqlen_k);
    const std::int64_t diagonal = call.causal_offset ? *call.causal_offset : length_k - length_q;
    for (std::int64_t kv_head = 0; kv_head < call.kv_heads; ++kv_head) {
      for (std::int64_t j = 0; j < length_k; ++j) {
        const std::int64_t row = (b * call.seqlen_k + j) * call.kv_heads + kv_head;
        std::copy_n(call.k.data() + row * d, d, keys.data() + j * d);
        std::copy_n(call.v.data() + row * value_dim, value_dim, values.data() + j * value_dim);
      }
      for (std::int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
        const Real slope = slope_of(b, head);
        for (std::int64_t i = 0; i < length_q; ++i) {
          const auto [begin, end] = VisibleKeys::of(call, i + diagonal, length_k);
          const std::int64_t row = (b * call.seqlen_q + i) * call.heads + head;
          std::copy_n(call.q.data() + row * d, d, query.data());
          if (!call.qv.empty()) std::copy_n(call.qv.data() + row * value_dim, value_dim, query_values.data());
          Real* const p = scores.data();
          Real largest = call.sink.empty() ? -kInfinite : static_cast<Real>(call.sink[static_cast<std::size_t>(head)]);
          const float* const mask =
              call.mask.empty() ? nullptr
                                : call.mask.data() + b * call.mask_strides[0] + head * call.mask_strides[1] + i * call.mask_strides[2];
          for (std::int64_t j = begin; j < end; ++j) {
            Real product = Eight<Real>::dot_product(query.data(), keys.data() + j * d, d);
            if (!call.qv.empty()) product += Eight<Real>::dot_product(query_values.data(), values.data() + j * value_dim, value_dim);
            Real s = round(round(product) * scale);
            if (softcap > 0) s = round(softcap * round(std::tanh(round(s / softcap))));
            if (slope != 0) s = round(s - slope * static_cast<Real>(std::abs(i + diagonal - j)));
            if (mask) s = round(s + static_cast<Real>(mask[j * call.mask_strides[3]]));
            p[j] = s;
            largest = std::max(largest, s);
          }
          if (largest == -kInfinite) continue;  // sees no key: 0, and the logarithm of an empty sum
          Real total = call.sink.empty() ? Real{0} : std::exp(static_cast<Real>(call.sink[static_cast<std::size_t>(head)]) - largest);
          for (std::int64_t j = begin; j < end; ++j) total += p[j] = std::exp(p[j] - largest);
          std::fill(sums.begin(), sums.end(), Real{0});
          Real* const o = sums.data();
          for (std::int64_t j = begin; j < end; ++j) {
            Real weight = weight_of(p[j], total);
            if (!call.dropout.empty())
              weight = round(
                  weight * static_cast<Real>(
                               call.dropout[static_cast<std::size_t>(((b * call.heads + head) * call.seqlen_q + i) * call.seqlen_k + j)]));
            Eight<Real>::add(o, weight, values.data() + j * value_dim, value_dim);
          }
          std::transform(o, o + value_dim, result.o.data() + row * value_dim, round_result);
          result.lse[static_cast<std::size_t>((b * call.heads + head) * call.seqlen_q + i)] =
              static_cast<double>(largest) + std::log(static_cast<double>(total));
        }
      }
    }
  }
  return result;
}

}  // namespace

TW_ALSO_FOR_AVX2 PlainResult reference(const PlainCall& call) {
  const auto exact = [](double x) { return x; };
  return evaluate<double>(
      call, exact, [](double p, double total) { return p / total; }, exact);
}

PlainResult naive(const PlainCall& call, DType dtype) {
  const auto rounded = [&](auto round) {
    return evaluate<float>(
        call, round, [round](float p, float total) { return round(p / total); }, round);
  };
  switch (dtype) {
    case DType::f16:
      return rounded([](float x) { return static_cast<float>(f16(x)); });
    case DType::bf16:
      return rounded([](float x) { return static_cast<float>(bf16(x)); });
    default:
      return rounded([](float x) { return x; });
  }
}

PlainResult naive_fp8(const PlainCall& call, DType dtype, float score_step) {
  return evaluate<float>(
      call, [&](float x) { return score_step > 0 ? std::nearbyint(x / score_step) * score_step : x; },
      [](float p, float total) { return static_cast<float>(fp8_e4m3(p * 181.02f)) / (181.02f * total); },
      [&](float x) { return dtype == DType::f16 ? static_cast<float>(f16(x)) : static_cast<float>(bf16(x)); });
}

}  // namespace tw::kernels::attention
