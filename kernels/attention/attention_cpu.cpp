#include <algorithm>

#include "kernels/attention/call.hpp"

namespace tw::kernels::attention {

namespace {

using detail::kCpuFewRows, detail::kCpuRows, detail::run_attention_cpu;

/// That many queries share packed keys and values, if their tiles fit the cache. Packing weighs most next to products on AMX's tiles.
constexpr int kManyRows = 2 * kCpuRows;

/// Whether tiles of kManyRows do hardly more rows than half as large ones, and are enough to go round.
bool takes_many_rows(const detail::AttentionCall& call) {
  const std::int64_t rows = call.q.shape(2), padded = (rows + kManyRows - 1) / kManyRows * kManyRows;
  return !call.ragged() && (padded - rows) * 8 <= rows && call.q.shape(0) * call.q.shape(1) * padded / kManyRows >= 2 * cpu_threads();
}

/// Tiles of few rows do not mind a width that they do not use; wider ones do.
template <class T>
void run_dtype(const detail::AttentionCall& call) {
  if (call.q.shape(2) <= kCpuFewRows) return run_attention_cpu<T, 256, kCpuFewRows>(call, kNoUserRule);
  if (call.q.shape(3) > 128 || call.v.shape(3) > 128) return run_attention_cpu<T, 256, kCpuRows>(call, kNoUserRule);
  if (takes_many_rows(call)) return run_attention_cpu<T, 128, kManyRows>(call, kNoUserRule);
  run_attention_cpu<T, 128, kCpuRows>(call, kNoUserRule);
}

}  // namespace

void run_on_cpu(const detail::AttentionCall& call) {
  if (call.blocks) return run_listed_on_cpu(call);
  if (call.qv.numel() > 0) return run_query_values_on_cpu(call);
  switch (call.q.dtype()) {
    case DType::f16:  // there for completeness: one size for all is quicker to build
      return run_attention_cpu<f16, 256, kCpuFewRows>(call, kNoUserRule);
    case DType::bf16:
      return run_dtype<bf16>(call);
    default:
      return run_dtype<float>(call);
  }
}

}  // namespace tw::kernels::attention

namespace tw::detail {

namespace {

/// As a kernel, which is compiled for each instruction set.
template <int kKeys>
struct ChangeScores {
  struct Params {
    const CpuChanges::Params<cpu::Target>& changes;
    const Score* first;
    float* scores;
    int rows;
  };
  static constexpr int vector_bytes = 64;

  /// A row of scores as the rules take them.
  struct Row {
    template <int kFirst, int kCount>
    TW_INLINE void for_columns(float* scores, auto f) const {
      for (int col = kFirst; col < kFirst + kCount; ++col) f(0, col, scores[col]);
    }
  };

  static void compute(auto&, const Params& p, Tile) {
    Row row;
    for (int r = 0; r < p.rows; ++r) {
      const Score& first = p.first[r];
      float* const scores = p.scores + r * kKeys;
      CpuChanges::apply<false, 0, kKeys>(row, p.changes, scores, [&](int, int col) {
        Score at = first;
        at.key += col;
        at.distance = difference(at.query + at.diagonal, at.key);
        return at;
      });
    }
  }
};

}  // namespace

void change_scores(const CpuChanges::Params<cpu::Target>& changes, const Score* first, float* scores, int rows, int keys) {
  const auto run = [&]<int kKeys>() {
    const typename ChangeScores<kKeys>::Params params{changes, first, scores, rows};
    cpu::run<ChangeScores<kKeys>>(&params, {}, 0, nullptr);
  };
  keys == kCpuKeys ? run.template operator()<kCpuKeys>() : run.template operator()<kCpuListedKeys>();
}

bool hides_scores(const CpuBand::Params<cpu::Target>& band, const Score& first, const Score& last, int keys) {
  // Where they belong to several heads any query may be between them.
  const bool one_head = first.head == last.head;
  const KeyRange seen =
      CpuBand::untouched(band, {first.batch, first.head, one_head ? first.query : 0, one_head ? last.query : first.seqlen_q - 1,
                                first.seqlen_q, first.seqlen_k, first.diagonal});
  return seen.begin > first.key || seen.end < first.key + keys;
}

void hide_scores(const CpuBand::Params<cpu::Target>& band, const Score* first, float* scores, int rows, int keys) {
  for (int r = 0; r < rows; ++r) {
    const Score& at = first[r];
    const KeyRange seen = CpuBand::keys(band, {at.batch, at.head, at.query, at.query, at.seqlen_q, at.seqlen_k, at.diagonal});
    float* const row = scores + r * keys;
    std::fill(row, row + std::clamp(seen.begin - at.key, 0, keys), -kInfinity);
    std::fill(row + std::clamp(seen.end - at.key, 0, keys), row + keys, -kInfinity);
  }
}

}  // namespace tw::detail
