#include <algorithm>

#include "kernels/attention/call.hpp"
#include "kernels/attention/score_softmax.tile.hpp"
#include "kernels/workspace.hpp"
#include "tilewave/gemm.hpp"
#include "tilewave/launch.hpp"

namespace tw::kernels::attention {

namespace {

using Softmax = ScoreSoftmax<1024>;

/// Heads n, n + group, ... of a tensor [heads, rows, columns].
Tensor every(const Tensor& t, std::int64_t n, std::int64_t group) {
  const Tensor from = t.slice(0, n, t.shape(0));
  return Tensor::borrow(from.data(), {t.shape(0) / group, t.shape(1), t.shape(2)}, t.dtype(), t.device(),
                        {group * t.stride(0), t.stride(1), t.stride(2)});
}

/// Scores of queries from `first` on become weights.
void soften(const AttentionCall& call, std::int64_t batch, std::int64_t first, const Tensor& scores) {
  launch<Softmax>(call.stream, {.m = static_cast<int>(scores.shape(1)), .batch = static_cast<int>(scores.shape(0))},
                  [&](auto& bind, auto& p) {
                    bind(p.scores, scores);
                    bind(p.weights, scores);
                    float unit = call.scale;
                    auto no_user_rule = kNoUserRule;
                    detail::fill_rules(Softmax::Changes{}, p.rules, call, unit, no_user_rule);
                    p.sink = call.sink;
                    p.lse = call.lse ? call.lse + batch * call.lse_stride_batch : nullptr;
                    p.lse_stride_head = call.lse_stride_head;
                    p.scale_log2 = unit * kLog2E;
                    p.batch = static_cast<int>(batch), p.first_row = static_cast<int>(first);
                    p.seqlen_q = static_cast<int>(call.q.shape(2));
                    p.diagonal = call.diagonal.value_or(static_cast<int>(call.k.shape(2) - call.q.shape(2)));
                  });
}

}  // namespace

void run_in_f32(const AttentionCall& call, std::int64_t most_scores) {
  const std::int64_t heads = call.q.shape(1), queries = call.q.shape(2), keys = call.k.shape(2), group = heads / call.k.shape(1);
  const std::int64_t most = std::clamp<std::int64_t>(most_scores / std::max<std::int64_t>(heads * keys, 1), 1, queries);
  const Tensor memory = workspace({heads, most, keys}, DType::f32, call.stream);
  for (std::int64_t batch = 0; batch < call.q.shape(0); ++batch) {
    const Tensor k = call.k.select(0, batch).transpose(1, 2), v = call.v.select(0, batch);
    for (std::int64_t first = 0; first < queries; first += most) {
      const std::int64_t end = std::min(first + most, queries);
      const Tensor q = call.q.select(0, batch).slice(1, first, end), o = call.o.select(0, batch).slice(1, first, end);
      const Tensor scores = memory.slice(1, 0, end - first);
      for (std::int64_t n = 0; n < group; ++n) gemm(every(q, n, group), k, every(scores, n, group), {.stream = call.stream});
      soften(call, batch, first, scores);
      for (std::int64_t n = 0; n < group; ++n) gemm(every(scores, n, group), v, every(o, n, group), {.stream = call.stream});
    }
  }
}

}  // namespace tw::kernels::attention
