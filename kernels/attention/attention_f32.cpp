#include <algorithm>
#include <vector>

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
void soften(const AttentionCall& call, std::int64_t batch, std::int64_t first, std::int64_t keys, const Tensor& scores) {
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
                    detail::fill_dropout(p.dropout, call);
                    p.heads = static_cast<int>(scores.shape(0));
                    p.batch = static_cast<int>(batch), p.first_row = static_cast<int>(first);
                    p.seqlen_q = static_cast<int>(call.q.shape(2));
                    p.diagonal = call.diagonal.value_or(static_cast<int>(keys - call.q.shape(2)));
                  });
}

}  // namespace

void run_in_f32(const AttentionCall& call, std::int64_t most_scores, std::span<const KeyRange> ranges) {
  const std::int64_t heads = call.q.shape(1), queries = call.q.shape(2), group = heads / call.k.shape(1);
  const auto range_of = [&](std::int64_t b) {
    return ranges.empty() ? KeyRange{b, 0, call.k.shape(2)} : ranges[static_cast<std::size_t>(b)];
  };
  std::int64_t most_keys = 1;
  for (std::int64_t b = 0; b < call.q.shape(0); ++b) most_keys = std::max(most_keys, range_of(b).end - range_of(b).begin);
  const std::int64_t most = std::clamp<std::int64_t>(most_scores / std::max<std::int64_t>(heads * most_keys, 1), 1, queries);
  const Tensor memory = workspace({heads * most * most_keys}, DType::f32, call.stream);
  for (std::int64_t b = 0; b < call.q.shape(0); ++b) {
    const KeyRange range = range_of(b);
    const std::int64_t keys = range.end - range.begin;
    const Tensor k = call.k.select(0, range.batch).slice(1, range.begin, range.end).transpose(1, 2);
    const Tensor v = call.v.select(0, range.batch).slice(1, range.begin, range.end);
    for (std::int64_t first = 0; first < queries; first += most) {
      const std::int64_t end = std::min(first + most, queries);
      const Tensor q = call.q.select(0, b).slice(1, first, end), o = call.o.select(0, b).slice(1, first, end);
      const Tensor scores = Tensor::borrow(memory.data(), {heads, end - first, keys}, DType::f32, memory.device());
      for (std::int64_t n = 0; n < group; ++n) gemm(every(q, n, group), k, every(scores, n, group), {.stream = call.stream});
      if (call.qv.numel() > 0) {
        const Tensor qv = call.qv.select(0, b).slice(1, first, end), of_v = v.transpose(1, 2);
        for (std::int64_t n = 0; n < group; ++n)
          gemm(every(qv, n, group), of_v, every(scores, n, group), {.beta = 1, .stream = call.stream});
      }
      soften(call, b, first, keys, scores);
      for (std::int64_t n = 0; n < group; ++n) gemm(every(scores, n, group), v, every(o, n, group), {.stream = call.stream});
    }
  }
}

void run_decode_in_f32(AttentionCall call, const CacheOptions& cache, const Tensor& rotated_q) {
  const auto on_host = [](const Tensor* t) { return t != nullptr ? t->to(Device::cpu()) : Tensor(); };
  call.stream.synchronize();
  const Tensor seqlens = on_host(cache.seqlens), batch_idx = on_host(cache.batch_idx), leftpad = on_host(cache.leftpad);
  const auto value = [](const Tensor& t, std::int64_t at, std::int64_t otherwise) {
    return t.data() ? std::int64_t{t.data<std::int32_t>()[at]} : otherwise;
  };
  const Tensor offsets = on_host(cache.cu_seqlens_new);
  const std::int64_t capacity = call.keys;
  const Tensor gathered = call.pages ? gather_tokens(call) : Tensor();  // then sequence b is k[b]
  std::vector<KeyRange> ranges;
  for (std::int64_t b = 0; b < call.batch; ++b) {
    const std::int64_t added = value(offsets, b + 1, call.keys_added) - value(offsets, b, 0);
    const std::int64_t end = std::clamp<std::int64_t>(value(seqlens, b, capacity - added) + added, 0, capacity);
    const std::int64_t entry = gathered.data() ? b : std::clamp<std::int64_t>(value(batch_idx, b, b), 0, call.k.shape(0) - 1);
    ranges.push_back({entry, std::clamp<std::int64_t>(value(leftpad, b, 0), 0, end), end});
  }
  call.q = rotated_q.transpose(1, 2);
  run_in_f32(call, std::int64_t{64} << 20, ranges);
}

}  // namespace tw::kernels::attention
