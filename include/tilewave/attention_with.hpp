#pragma once

#include "tilewave/detail/attention_call.hpp"

namespace tw {

/// attention() with a user-defined rule (tilewave/tile/attention_rules.tile.hpp):
///
///   tw::attention_with<SameDocument, tw::bf16, 128>(q, k, v, o, [&](auto& rule) { rule.document = documents.data<int>(); });
///
/// T is the tensors' type. kHeadDim is 64, 96, 128, 192 or 256, at least head_dim and value_dim; the kernel is compiled for it. `bind_rule`
/// fills in Rule::Params; arrays there are on the tensors' device and must stay valid until the stream is done. The rule runs after
/// softcap, ALiBi and mask, so it gets scores that include them, and before `causal` and windows. Otherwise the same as attention(). For a
/// GPU the rule's file is compiled at its first use.
template <class Rule, class T, int kHeadDim, class BindRule>
void attention_with(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, BindRule bind_rule,
                    const AttentionOptions& options = {}) {
  const detail::AttentionCall call = detail::check_attention(q, k, v, o, options);
  detail::check_attention_with(call, dtype_of<T>, kHeadDim);
  if (o.numel() == 0) return;
  const detail::ScopedSmMargin margin(call.sm_margin);
  if (!call.stream.device().is_cuda())
    detail::run_attention_cpu<T, kHeadDim, detail::kCpuRows, Rule>(call, bind_rule);
  else if constexpr (sizeof(T) == 2)
    detail::run_attention_gpu<T, Rule>(call, detail::attention_kernel_with(call, dtype_of<T>, kHeadDim, detail::kUserRule<Rule>),
                                       bind_rule);
}

/// The kernel that attention_with() uses on a GPU for calls with these options, to compile it ahead of time or to inspect it:
/// compile(make_spec(info, true, true)). Needs no GPU.
template <class Rule, class T, int kHeadDim>
KernelInfo attention_with_kernel(const AttentionOptions& options = {}) {
  detail::AttentionCall call;
  call.softcap = options.softcap;
  call.slopes = options.alibi_slopes ? options.alibi_slopes->data<float>() : nullptr;
  call.mask = options.mask ? options.mask->data() : nullptr;
  call.lower = options.window_left >= 0;
  call.upper = options.causal || options.window_right >= 0;
  call.chunk = options.attention_chunk;
  const detail::NamedKernel& kernel = detail::attention_kernel_with(call, dtype_of<T>, kHeadDim, detail::kUserRule<Rule>).name;
  return {detail::type_of(kernel), detail::source_of(kernel), nullptr};
}

}  // namespace tw
