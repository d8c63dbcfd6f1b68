#pragma once

#include "tilewave/detail/attention_call.hpp"

namespace tw {

/// attention() with a rule of your own (tilewave/tile/attention_rules.tile.hpp) between those of the options and the causal mask or window:
///
///   tw::attention_with<SameDocument, tw::bf16, 128>(q, k, v, o, [&](auto& rule) { rule.document = documents.data<int>(); });
///
/// T is the tensors' type, kHeadDim 64, 96, 128, 192 or 256 and at least head_dim and value_dim: what is named here is what is compiled.
/// `bind_rule` fills in Rule::Params; arrays there lie on the tensors' device. Otherwise as attention(): the rule's file is compiled for a
/// GPU when it is first needed.
template <class Rule, class T, int kHeadDim, class BindRule>
void attention_with(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, BindRule bind_rule,
                    const AttentionOptions& options = {}) {
  const detail::AttentionCall call = detail::check_attention(q, k, v, o, options);
  detail::check_attention_with(call, dtype_of<T>, kHeadDim);
  if (o.numel() == 0) return;
  if (!call.stream.device().is_cuda()) {
    detail::run_attention_cpu<T, kHeadDim, kHeadDim, detail::kCpuRows, Rule>(call, bind_rule);
  } else if constexpr (sizeof(T) == 2) {
    constexpr detail::AttentionTiles tiles = detail::attention_tiles<kHeadDim, kHeadDim>(detail::TileUse::narrow);
    detail::run_attention_gpu<T, kHeadDim, kHeadDim, tiles.bm, tiles.bn, tiles.stages, kEqualLengths, Rule>(call, bind_rule);
  }
}

}  // namespace tw
