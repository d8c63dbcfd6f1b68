#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/attention/call.hpp"
#include "kernels/workspace.hpp"
#include "tilewave/detail/parallel.hpp"
#include "tilewave/tile/cpu/row_view.tile.hpp"

// attention_decode() of few queries on the CPU. The kernel packs keys and values for its products; for a few queries that takes several
// times as long as reading them.

namespace tw::kernels::attention {

namespace {

constexpr std::int64_t kMostRows = 8;
/// Keys of a part, whose sums are added up in the end: the same for any number of threads and sequences. All heads' are read together,
/// since they are neighbours in memory.
constexpr int kPart = 64;
/// Keys of a page that all queries are multiplied with before the next ones: they stay in the first-level cache.
constexpr int kTogether = 16;

/// Of a part's keys with one query: a row, as cpu::RowView takes it.
struct alignas(64) Scores {
  using Element = float;
  static constexpr int cols = kPart;
  float x[cols];
};

class FewQueries {
 public:
  explicit FewQueries(const AttentionCall& call)
      : call_(call),
        heads_(call.k.shape(1)),
        rows_(call.q.shape(2)),
        queries_(heads_ * rows_),
        columns_(static_cast<int>(call.v.shape(3))),
        parts_(parts_of_longest()),
        memory_(workspace({call.batch * parts_ * queries_, columns_ + 2}, DType::f32, call.stream)) {}

  void run() const {
    detail::parallel_for(static_cast<long>(call_.batch * parts_), [&](long n) { attend(n / parts_, n % parts_); });
    detail::parallel_for(static_cast<long>(call_.batch * heads_), [&](long n) { combine(n / heads_, n % heads_); });
  }

 private:
  int keys_of(std::int64_t sequence) const {
    const std::int64_t wanted = call_.used_k ? std::int64_t{call_.used_k[sequence]} + call_.keys_added : call_.keys;
    return static_cast<int>(std::clamp<std::int64_t>(wanted, 0, call_.keys));
  }
  std::int64_t parts_of_longest() const {
    int longest = 0;
    for (int b = 0; b < call_.batch; ++b) longest = std::max(longest, keys_of(b));
    return (longest + kPart - 1) / kPart;
  }
  /// The queries' sums of values, weighted by 2^(score - base).
  float* sums(std::int64_t sequence, std::int64_t part) const {
    return memory_.data<float>() + (sequence * parts_ + part) * queries_ * (columns_ + 2);
  }
  float* bases(std::int64_t sequence, std::int64_t part) const { return sums(sequence, part) + queries_ * columns_; }
  /// Of the weights.
  float* totals(std::int64_t sequence, std::int64_t part) const { return bases(sequence, part) + queries_; }
  float* row_of(const Tensor& t, std::int64_t sequence, std::int64_t query) const {
    return t.data<float>() + sequence * t.stride(0) + query / rows_ * t.stride(1) + query % rows_ * t.stride(2);
  }

  /// Calls f(query, its place, rows of the cache, keys) for up to kTogether of a part's keys and all queries, and so on. A page outside of
  /// the cache is left out: it is zeros.
  void for_keys(const Tensor& cache, std::int64_t sequence, int begin, int end, auto f) const {
    const int page_size = call_.pages ? call_.page_size : call_.keys;
    for (int key = begin; key < end;) {
      const int token = key % page_size, count = std::min({kTogether, page_size - token, end - key});
      const std::int64_t page = call_.pages ? call_.pages[sequence * call_.pages_stride + key / page_size] : sequence;
      const float* const rows = cache.data<float>() + page * cache.stride(0) + token * cache.stride(2);
      for (std::int64_t query = 0; query < queries_ && page >= 0 && page < cache.shape(0); ++query)
        f(query, key - begin, rows + query / rows_ * cache.stride(1), count);
      key += count;
    }
  }

  void attend(std::int64_t sequence, std::int64_t part) const {
    const int begin = static_cast<int>(part) * kPart, end = std::min(begin + kPart, keys_of(sequence));
    if (begin >= end) return;
    thread_local std::vector<Scores> scores;
    scores.assign(static_cast<std::size_t>(queries_), {});
    const auto scores_of = [&](std::int64_t query) -> Scores& { return scores[static_cast<std::size_t>(query)]; };
    for_keys(call_.k, sequence, begin, end, [&](std::int64_t query, int at, const float* rows, int count) {
      cpu::library().dots_f32(scores_of(query).x + at, rows, call_.k.stride(2), row_of(call_.q, sequence, query), count,
                              static_cast<int>(call_.k.shape(3)));
    });
    const float scale = call_.scale * kLog2E;
    for (std::int64_t query = 0; query < queries_; ++query) {
      Scores& of_query = scores_of(query);
      std::fill(of_query.x + (end - begin), of_query.x + kPart, -kInfinity);
      const cpu::RowView<Scores> row{of_query, 0};
      const float base = row.max() * scale;
      bases(sequence, part)[query] = base;
      totals(sequence, part)[query] = row.map_exponentials(scale, base == -kInfinity ? 0 : base);
    }
    float* const to = sums(sequence, part);
    std::fill_n(to, queries_ * columns_, 0.0f);
    for_keys(call_.v, sequence, begin, end, [&](std::int64_t query, int at, const float* rows, int count) {
      cpu::library().add_rows_f32(to + query * columns_, rows, call_.v.stride(2), scores_of(query).x + at, count, columns_);
    });
  }

  /// The parts of the queries that share a head of the keys. combine() takes longer: NOTES.md, "CPU".
  void combine(std::int64_t sequence, std::int64_t head) const {
    const std::int64_t parts = (keys_of(sequence) + kPart - 1) / kPart;
    thread_local std::vector<float> weights;
    weights.resize(static_cast<std::size_t>(parts));
    for (std::int64_t query = head * rows_; query < (head + 1) * rows_; ++query) {
      float base = -kInfinity, total = 0;
      for (std::int64_t part = 0; part < parts; ++part) base = std::max(base, bases(sequence, part)[query]);
      for (std::int64_t part = 0; part < parts; ++part) {
        const float of_part = bases(sequence, part)[query];
        weights[static_cast<std::size_t>(part)] = of_part == -kInfinity ? 0 : std::exp2(of_part - base);
        total += weights[static_cast<std::size_t>(part)] * totals(sequence, part)[query];
      }
      for (float& weight : weights) weight /= total == 0 ? 1 : total;
      float* const to = row_of(call_.o, sequence, query);
      std::fill_n(to, columns_, 0.0f);
      if (parts > 0)
        cpu::library().add_rows_f32(to, sums(sequence, 0) + query * columns_, queries_ * (columns_ + 2), weights.data(),
                                    static_cast<int>(parts), columns_);
      if (call_.lse == nullptr) continue;
      float& lse = call_.lse[sequence * call_.lse_stride_batch + head * call_.lse_stride_head + query % rows_];
      lse = total == 0 ? -kInfinity : (base + std::log2(total)) * kLn2;
    }
  }

  const AttentionCall& call_;
  const std::int64_t heads_, rows_, queries_;  ///< of the cache; queries that share one; all queries of a sequence
  const int columns_;
  const std::int64_t parts_;
  const Tensor memory_;
};

}  // namespace

bool takes_few_queries(const AttentionCall& call) {
  const bool sees_all =
      !call.lower && call.chunk == 0 && !call.diagonal && !call.blocks && (!call.upper || (call.queries == 1 && call.right >= 0));
  const bool plain = call.softcap == 0 && call.slopes == nullptr && call.mask == nullptr && call.sink == nullptr && call.qv.numel() == 0;
  const bool in_order = call.k_batch == nullptr && call.k_begin == nullptr && call.cu_added == nullptr && call.cu_q == nullptr;
  const bool contiguous = call.q.stride(3) == 1 && call.k.stride(3) == 1 && call.v.stride(3) == 1 && call.o.stride(3) == 1;
  return call.stream.device() == Device::cpu() && call.q.dtype() == DType::f32 && call.q.shape(2) <= kMostRows && sees_all && plain &&
         in_order && contiguous;
}

void run_few_queries_on_cpu(const AttentionCall& call) { FewQueries(call).run(); }

}  // namespace tw::kernels::attention
