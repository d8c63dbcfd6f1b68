// The tiles that ship for GPUs whose output is an odd number of panels wide, on the CPU: their results, and that their schedule is right
// where tiles follow each other in a block. The CPU's own tiles have an even number.

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <utility>
#include <vector>

#include "kernels/attention/reference.hpp"
#include "tests/accuracy.hpp"
#include "tests/support.hpp"
#include "tilewave/detail/attention_call.hpp"

namespace tw::kernels::attention {
namespace {

using namespace tw::test;
using detail::TileUse;

using CausalRules = Rules<Optional<Softcap, Use::never>, Optional<Alibi, Use::never>, Optional<MaskTensor, Use::never>, Band<false, true>>;

template <int D, TileUse use, int kForm = kEqualLengths>
void expect_right_on_the_cpu() {
  constexpr detail::AttentionTiles tiles = detail::attention_tiles<D, D>(use);
  std::mt19937_64 random = random_engine();
  const std::int64_t heads = 4, rows = 2 * tiles.bm + 5, keys = 70;
  std::vector<float> values[3];
  const auto normal = [&](Shape shape, std::vector<float>& numbers) {
    const Tensor tensor = Tensor::empty(std::move(shape), DType::bf16);
    std::normal_distribution<float> distribution;
    for (std::int64_t i = 0; i < tensor.numel(); ++i) {
      tensor.data<bf16>()[i] = bf16(distribution(random));
      numbers.push_back(static_cast<float>(tensor.data<bf16>()[i]));
    }
    return tensor;
  };
  const Tensor q = normal({1, rows, heads, D}, values[0]), k = normal({1, keys, heads, D}, values[1]),
               v = normal({1, keys, heads, D}, values[2]);
  const Tensor o = Tensor::poisoned(q.shape(), DType::bf16);
  const detail::AttentionCall call = detail::check_attention(q, k, v, o, {.causal = true, .causal_offset = 0});
  launch_cpu<Attention<bf16, D, D, tiles.bm, tiles.bn, tiles.stages, kForm, CausalRules>>(
      detail::attention_grid(call, tiles.bm), [&](auto& bind, auto& p) {
        const auto no_rule = [](auto&) {};
        detail::fill_attention<CausalRules>(bind, p, call, tiles.bn, no_rule);
      });

  PlainCall plain{.batch = 1, .heads = heads, .kv_heads = heads, .seqlen_q = rows, .seqlen_k = keys, .head_dim = D};
  plain.scale = 1 / std::sqrt(static_cast<double>(D));
  plain.causal = true;
  plain.causal_offset = 0;
  plain.q = values[0], plain.k = values[1], plain.v = values[2];
  std::vector<double> got;
  for (std::int64_t i = 0; i < o.numel(); ++i) got.push_back(static_cast<float>(o.data<bf16>()[i]));
  EXPECT_TRUE(accurate({got, reference(plain).o, naive(plain, DType::bf16).o, arithmetic_of(DType::bf16, Device::cpu())}));
}

TEST(ShippedAttention, HeadDimension64WithTheTilesOfAGpu) {
  expect_right_on_the_cpu<64, TileUse::narrow>();
  expect_right_on_the_cpu<64, TileUse::paired>();
}

TEST(ShippedAttention, HeadDimension192WithTheTilesOfAGpu) { expect_right_on_the_cpu<192, TileUse::narrow>(); }

}  // namespace
}  // namespace tw::kernels::attention
