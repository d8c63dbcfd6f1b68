// DeepSeek sparse attention: the indexer's scores, the best keys of each query, and attention to these.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "kernels/indexer/reference.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"
#include "tilewave/indexer.hpp"
#include "tilewave/mla.hpp"
#include "tilewave/topk.hpp"

namespace tw::kernels::indexer {
namespace {

using namespace tw::test;

class SparseAttention : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override { skip_unless_present(GetParam()); }
};

INSTANTIATE_TEST_SUITE_P(Ops, SparseAttention, testing::ValuesIn(kDevices), device_name);

/// Queries that see fewer keys than are asked for get all of them, and -1 after them; attention then leaves these out.
TEST_P(SparseAttention, TakesTheBestKeysOfEachQuery) {
  const Device device = GetParam();
  std::mt19937_64 random = random_engine();
  constexpr std::int64_t kQueries = 40, kKeys = 300, kHeads = 16;
  constexpr int kTopk = 64;
  PlacedTensor q({kQueries, kHeads, kIndexerDim}, DType::fp8_e4m3, device), k({kKeys, kIndexerDim}, DType::fp8_e4m3, device),
      scale({kKeys}, DType::f32, device), weights({kQueries, kHeads}, DType::f32, device), ends({kQueries}, DType::i32, device);
  const std::vector<float> qs = q.fill_random(random), ks = k.fill_random(random), ws = weights.fill_random(random);
  const std::vector<float> scales = scale.fill_random(random);
  std::vector<float> lengths(kQueries);
  for (std::size_t i = 0; i < lengths.size(); ++i) lengths[i] = static_cast<float>(i * i % 300);
  ends.fill(lengths);
  const Stream stream = Stream::standard(device);
  const Tensor scores = Tensor::poisoned({kQueries, kKeys}, DType::f32, stream),
               values = Tensor::empty({kQueries, kTopk}, DType::f32, stream);
  const Tensor lists = Tensor::empty({kQueries, kTopk}, DType::i32, stream);
  PlacedTensor attention_q({kQueries, kHeads, kMlaKeyDim}, DType::bf16, device), kv({kKeys, kMlaKeyDim}, DType::bf16, device);
  attention_q.fill_random(random);
  kv.fill_random(random);
  const Tensor o = Tensor::poisoned({kQueries, kHeads, kMlaLatentDim}, DType::bf16, stream);
  const bool ran = launched([&] {
    indexer_scores(q, k, weights, scores, {.k_scale = &scale.tensor(), .ends = &ends.tensor()});
    // -infinity is a number to topk: it needs the ranges as well.
    topk(scores, kTopk, values, lists, {.ends = &ends.tensor()});
    mla_sparse(attention_q, kv, lists, o);
  });
  if (!ran) return;
  const PlainIndexer plain{kQueries, kHeads, qs, ks, scales, ws};
  const Tensor host_lists = lists.to(Device::cpu()), host_o = o.to(Device::cpu()).to(DType::f32);
  const double allowed = device.is_cuda() ? std::ldexp(1.0, -12) : std::ldexp(1.0, -20);  // as in indexer_test.cpp
  for (std::int64_t i = 0; i < kQueries; ++i) {
    const auto length = static_cast<std::int64_t>(lengths[static_cast<std::size_t>(i)]);
    const std::int64_t count = std::min<std::int64_t>(length, kTopk);
    std::vector<double> exact, sorted;
    double largest = 0;
    for (std::int64_t j = 0; j < length; ++j) {
      const PlainScore of = score(plain, i, j);
      exact.push_back(of.score);
      largest = std::max(largest, of.magnitude);
    }
    sorted = exact;
    std::sort(sorted.begin(), sorted.end(), std::greater<>());
    std::set<std::int32_t> found;
    for (std::int64_t n = 0; n < kTopk; ++n) {
      const std::int32_t key = host_lists.data<std::int32_t>()[i * kTopk + n];
      if (n >= count) {
        ASSERT_EQ(key, -1) << "query " << i << " entry " << n;
        continue;
      }
      ASSERT_TRUE(key >= 0 && key < length && found.insert(key).second) << "query " << i << " entry " << n << " is " << key;
      // Keys may change places where their scores differ by less than rounding.
      ASSERT_NEAR(exact[static_cast<std::size_t>(key)], sorted[static_cast<std::size_t>(n)], 2 * allowed * largest);
    }
    const float* const row = host_o.data<float>() + i * kHeads * kMlaLatentDim;
    for (std::int64_t c = 0; c < kHeads * kMlaLatentDim; ++c) ASSERT_TRUE(count > 0 ? std::isfinite(row[c]) : row[c] == 0) << "query " << i;
  }
}

}  // namespace
}  // namespace tw::kernels::indexer
