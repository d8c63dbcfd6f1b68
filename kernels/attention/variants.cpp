#include "kernels/attention/variants.hpp"

#include "kernels/attention/run.hpp"
#include "kernels/check.hpp"

namespace tw::kernels::attention {

bool wide_tiles(const detail::AttentionCall& call) {
  // Short sequences have few tiles, and under a causal mask unequal ones. Without TMA the loading warpgroup needs registers that three
  // others would not leave it; nor would loads of a mask.
  if (call.upper && call.q.shape(2) <= 1024 && call.q.shape(3) <= 64) return false;
  const auto aligned = [](const Tensor& t) {
    if (reinterpret_cast<std::uintptr_t>(t.data()) % 16 != 0) return false;
    for (int dim = 0; dim < 3; ++dim)
      if (t.shape(dim) > 1 && (t.stride(dim) <= 0 || t.stride(dim) % 8 != 0)) return false;
    return true;
  };
  return call.mask == nullptr && aligned(call.q) && aligned(call.k) && aligned(call.v);
}

namespace {

template <bool kCausal>
using PlainRules =
    Rules<Optional<Softcap, Use::never>, Optional<Alibi, Use::never>, Optional<MaskTensor, Use::never>, Band<false, kCausal>>;

template <int D>
inline constexpr detail::AttentionTiles kTiles = detail::attention_tiles<D, D>(detail::TileUse::wide);
template <class T, int D, bool kCausal>
using Plain = Attention<T, D, D, kTiles<D>.bm, kTiles<D>.bn, kTiles<D>.stages, kEqualLengths, PlainRules<kCausal>>;

template <class T, int D, bool kCausal>
Analysis analyze_variant(const ShapeValues& shape) {
  const int heads = shape.integer("heads"), seqlen_q = shape.integer("seqlen_q"), seqlen_k = shape.integer("seqlen_k");
  const int kv_heads = shape["kv_heads"] > 0 ? shape.integer("kv_heads") : heads, batch = shape.integer("batch");
  require(heads > 0 && heads % kv_heads == 0, "attention: heads is {} and kv_heads {}; heads must be a positive multiple of kv_heads",
          heads, kv_heads);
  const Tensor q = placeholder({batch, seqlen_q, heads, D}, dtype_of<T>), k = placeholder({batch, seqlen_k, kv_heads, D}, dtype_of<T>);
  const Tensor v = placeholder(k.shape(), dtype_of<T>), o = placeholder(q.shape(), dtype_of<T>);
  const Tensor lse = placeholder({batch, heads, seqlen_q}, DType::f32);
  const detail::AttentionCall call = detail::check_attention(q, k, v, o, {.causal = kCausal, .lse = shape["lse"] ? &lse : nullptr});
  return analyze<Plain<T, D, kCausal>>(detail::attention_grid(call, kTiles<D>.bm), [&](auto& bind, auto& p) {
    detail::fill_attention<PlainRules<kCausal>>(bind, p, call, kTiles<D>.bn, kNoUserRule);
  });
}

template <class T, int D, bool kCausal>
KernelVariant variant(const char* dtype) {
  return {make_spec(kernel_info<Plain<T, D, kCausal>>, true, true, tw::format("attention_{}_d{}{}", dtype, D, kCausal ? "_causal" : "")),
          analyze_variant<T, D, kCausal>};
}

}  // namespace

std::vector<KernelVariant> registered() {
  std::vector<KernelVariant> variants;
  const auto add = [&]<class T>(std::type_identity<T>, const char* dtype) {
    variants.push_back(variant<T, 64, false>(dtype));
    variants.push_back(variant<T, 64, true>(dtype));
    variants.push_back(variant<T, 128, false>(dtype));
    variants.push_back(variant<T, 128, true>(dtype));
  };
  add(std::type_identity<bf16>{}, "bf16");
  add(std::type_identity<f16>{}, "f16");
  variants.push_back(variant<bf16, 256, true>("bf16"));
  return variants;
}

}  // namespace tw::kernels::attention
