#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include "tests/copy_kernels.tile.hpp"
#include "tests/launch_kernel.hpp"
#include "tests/tile_kernels.tile.hpp"
#include "tilewave/tensor.hpp"

// Launches of kernels in tile_kernels.tile.hpp and copy_kernels.tile.hpp that several test programs run. The kernels' comments say what
// the tensors are.

namespace tw::test {

struct BackwardProductsArguments {
  const Tensor &q, &k, &lse, &delta;
  const Tensor& dq;  ///< is added to
  const Tensor& dk;
};
template <class T, int M, int N, int D>
void launch_backward_products(const Stream& stream, const BackwardProductsArguments& a) {
  const TileGrid grid{.m = ceil_div(static_cast<int>(a.k.shape(1)), N), .batch = static_cast<int>(a.k.shape(0))};
  launch_kernel<BackwardProducts<T, M, N, D>>(stream, grid, [&](auto& bind, auto& p) {
    bind(p.q, a.q);
    bind(p.k, a.k);
    bind(p.lse, a.lse);
    bind(p.delta, a.delta);
    bind(p.dq, a.dq);
    bind(p.dk, a.dk);
  });
}

struct LatentAttentionArguments {
  const Tensor &q, &k, &out;
  float scale;  ///< of the scores before the softmax
};
template <class T, int M, int N, int D, int Dv>
void launch_latent_attention(const Stream& stream, const LatentAttentionArguments& a) {
  const TileGrid grid{.m = ceil_div(static_cast<int>(a.q.shape(1)), M), .batch = static_cast<int>(a.q.shape(0))};
  launch_kernel<LatentAttention<T, M, N, D, Dv>>(stream, grid, [&](auto& bind, auto& p) {
    bind(p.q, a.q);
    bind(p.k, a.k);
    bind(p.out, a.out);
    p.scale_log2 = a.scale * kLog2E;
  });
}

struct GatedDeltaRuleArguments {
  const Tensor &q, &k, &v, &gates, &betas, &out, &last;
};
template <class T, int C, int D>
void launch_gated_delta_rule(const Stream& stream, const GatedDeltaRuleArguments& a) {
  launch_kernel<GatedDeltaRule<T, C, D>>(stream, {.batch = static_cast<int>(a.q.shape(0))}, [&](auto& bind, auto& p) {
    bind(p.q, a.q);
    bind(p.k, a.k);
    bind(p.v, a.v);
    bind(p.gates, a.gates);
    bind(p.betas, a.betas);
    bind(p.out, a.out);
    bind(p.last, a.last);
  });
}

struct PackedProductArguments {
  const Tensor &w, &x;
  const Tensor &scales, &row_scales;  ///< the first is read only with scales by group
  const Tensor& out;
  int depth;  ///< in codes
};
template <class T, class Sum, class Codes, class Scaling, class Decode, int BM, int BN>
void launch_packed_product(const Stream& stream, const PackedProductArguments& a) {
  using Kernel = PackedProduct<T, Sum, Codes, Scaling, Decode, BM, BN>;
  const TileGrid grid{.m = ceil_div(static_cast<int>(a.out.shape(0)), BM), .n = ceil_div(static_cast<int>(a.out.shape(1)), BN)};
  launch_kernel<Kernel>(stream, grid, [&](auto& bind, auto& p) {
    bind(p.w, a.w);
    bind(p.x, a.x);
    bind(p.scales, Kernel::template On<cpu::Target>::by_group ? &a.scales : nullptr);
    bind(p.row_scales, a.row_scales);
    bind(p.out, a.out);
    p.depth = a.depth;
  });
}

struct NarrowChainArguments {
  const Tensor &a, &b, &c, &out;
  float factor;
};
template <class T, class Sum, int M, int N, int D>
void launch_narrow_chain(const Stream& stream, const NarrowChainArguments& a) {
  launch_kernel<NarrowChain<T, Sum, M, N, D>>(stream, {.m = ceil_div(static_cast<int>(a.a.shape(0)), M)}, [&](auto& bind, auto& p) {
    bind(p.a, a.a);
    bind(p.b, a.b);
    bind(p.c, a.c);
    bind(p.out, a.out);
    p.factor = a.factor;
  });
}

struct ExpertProductArguments {
  const Tensor &x, &w;
  const Tensor& ids;      ///< of choices; -1: none
  const Tensor& experts;  ///< of each block of BM ids
  const Tensor& weights;  ///< of each choice
  const Tensor& out;      ///< is added to with `Reduce`
  int top_k;
};
template <class T, class Out, bool Reduce, int BM, int BN>
void launch_expert_product(const Stream& stream, const ExpertProductArguments& a) {
  const TileGrid grid{.m = static_cast<int>(a.experts.numel()), .n = ceil_div(static_cast<int>(a.out.shape(1)), BN)};
  launch_kernel<ExpertProduct<T, Out, Reduce, BM, BN>>(stream, grid, [&](auto& bind, auto& p) {
    bind(p.x, a.x);
    bind(p.w, a.w);
    bind(p.out, a.out);
    p.ids = a.ids.data<std::int32_t>();
    p.experts = a.experts.data<std::int32_t>();
    p.weights = a.weights.data<float>();
    p.count = static_cast<int>(a.ids.numel());
    p.top_k = a.top_k;
  });
}

/// A list of `blocks` blocks of `rows` entries: the ids 0 to ids - 1 in random order, with holes (-1) in random places between them.
inline std::vector<std::int32_t> random_list(std::mt19937_64& random, int blocks, int rows, int ids) {
  std::vector<std::int32_t> list(static_cast<std::size_t>(blocks * rows), -1);
  std::iota(list.begin(), list.begin() + ids, 0);
  std::shuffle(list.begin(), list.end(), random);
  return list;
}

/// `count` random sizes of segments, each less than `limit`.
inline std::vector<int> random_sizes(std::mt19937_64& random, int count, int limit) {
  std::vector<int> sizes(static_cast<std::size_t>(count));
  for (int& size : sizes) size = static_cast<int>(random() % static_cast<unsigned>(limit));
  return sizes;
}
inline std::vector<std::int32_t> offsets_of(const std::vector<int>& sizes) {
  std::vector<std::int32_t> offsets = {0};
  for (const int size : sizes) offsets.push_back(offsets.back() + size);
  return offsets;
}

/// `offsets` has an element more than there are segments.
struct GroupedProductArguments {
  const Tensor &x, &w, &offsets, &out;
};
template <class T, int BM, int BN, int Cluster>
void launch_grouped_product(const Stream& stream, const GroupedProductArguments& a) {
  const int rows = static_cast<int>(a.x.shape(0)), segments = static_cast<int>(a.offsets.numel()) - 1;
  const TileGrid grid{.m = Segments<cpu::Target>::tiles(rows, segments, BM, Cluster), .n = ceil_div(static_cast<int>(a.out.shape(1)), BN)};
  launch_kernel<GroupedProduct<T, BM, BN, Cluster>>(stream, grid, [&](auto& bind, auto& p) {
    bind(p.x, a.x);
    bind(p.w, a.w);
    bind(p.out, a.out);
    p.segments = {a.offsets.data<std::int32_t>(), segments, rows};
  });
}

struct RaggedDepthArguments {
  const Tensor &y, &x, &offsets, &out;
};
template <class T, int M, int N>
void launch_ragged_depth(const Stream& stream, const RaggedDepthArguments& a) {
  const int segments = static_cast<int>(a.offsets.numel()) - 1;
  const TileGrid grid{
      .m = ceil_div(static_cast<int>(a.out.shape(1)), M), .n = ceil_div(static_cast<int>(a.out.shape(2)), N), .batch = segments};
  launch_kernel<RaggedDepth<T, M, N>>(stream, grid, [&](auto& bind, auto& p) {
    bind(p.y, a.y);
    bind(p.x, a.x);
    bind(p.out, a.out);
    p.segments = {a.offsets.data<std::int32_t>(), segments, static_cast<int>(a.x.shape(0))};
  });
}

}  // namespace tw::test
