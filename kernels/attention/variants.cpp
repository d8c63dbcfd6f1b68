#include "kernels/attention/variants.hpp"

#include <algorithm>
#include <map>
#include <mutex>
#include <string>

#include "kernels/attention/combine.hpp"
#include "kernels/attention/run.hpp"
#include "kernels/check.hpp"
#include "kernels/named.hpp"

namespace tw::kernels::attention {

/// Keys that a row sees under a causal mask or in a window, on average, with which paired tiles are faster.
constexpr std::int64_t kFewKeys = 1024;

detail::TileUse tile_use(const detail::AttentionCall& call) {
  using detail::TileUse;
  const std::int64_t head_dim = std::max(call.q.shape(3), call.v.shape(3));
  // Without TMA the loading warpgroup needs registers that three others would not leave it; nor would loads of a mask.
  const auto aligned = [](const Tensor& t) {
    if (reinterpret_cast<std::uintptr_t>(t.data()) % 16 != 0) return false;
    for (int dim = 0; dim < 3; ++dim)
      if (t.shape(dim) > 1 && (t.stride(dim) <= 0 || t.stride(dim) % 8 != 0)) return false;
    return true;
  };
  if (head_dim > 96 || call.mask || !aligned(call.q) || !aligned(call.k) || !aligned(call.v)) return TileUse::narrow;
  if (head_dim > 64) return TileUse::wide;
  // Of sequences that follow each other most work is in those longer than the mean.
  const std::int64_t rows = call.cu_q ? 2 * call.q.shape(2) / call.batch : call.q.shape(2);
  const std::int64_t keys = call.cu_k ? 2 * call.k.shape(2) / call.batch : call.keys;
  if (call.upper) {
    const std::int64_t below = keys - std::min(rows, keys) / 2,
                       seen = call.lower ? std::min<std::int64_t>(below, call.left + call.right) : below;
    if (seen <= kFewKeys) return TileUse::paired;
    // Few tiles, and unequal ones.
    if (rows <= 512) return TileUse::narrow;
  }
  return rows <= 4096 && !call.cu_q ? TileUse::widest : TileUse::wide;
}

detail::AttentionTiles generic_tiles(std::int64_t head_dim, std::int64_t value_dim, bool split, std::int64_t shared) {
  constexpr detail::AttentionTiles choices[] = {{128, 64, 3}, {128, 64, 2}, {64, 64, 2}, {64, 64, 1}, {64, 32, 1}};
  const std::int64_t largest = std::max(head_dim, value_dim);
  for (const detail::AttentionTiles& t : choices) {
    if (t.bm == 128 && (split || largest > 128)) continue;  // decode has few rows; 32 rows of wide outputs leave a warp no registers
    if (t.stages == 3 && largest > 64) continue;
    // Rows have whole lines of 128 bytes; each of four warps has 2 KB of staging, and a dynamic schedule 1 KB.
    const auto line = [](std::int64_t columns) { return (columns + 63) / 64 * 128; };
    if (t.bm * line(head_dim) + t.stages * t.bn * (line(head_dim) + line(value_dim)) + 9 * 1024 <= shared) return t;
  }
  return choices[4];
}

const KernelInfo& attention_info(DType dtype, int head_dim, int value_dim, const detail::AttentionTiles& t, int form) {
  struct Named {
    std::string type;
    KernelInfo info;
  };
  static std::mutex mutex;
  static auto& known = *new std::map<std::string, Named>;
  const std::string type = tw::format("tw::Attention<{}, {}, {}, {}, {}, {}, {}, {}>", element_name(dtype), head_dim, value_dim, t.bm, t.bn,
                                      t.stages, form, detail::type_name<detail::CallRules<>>());
  const std::lock_guard lock(mutex);
  Named& named = known[type];
  if (named.type.empty()) {
    named.type = type;
    named.info = {named.type, "tilewave/tile/attention.tile.hpp", nullptr};
  }
  return named.info;
}

namespace {

template <bool kCausal>
using PlainRules =
    Rules<Optional<Softcap, Use::never>, Optional<Alibi, Use::never>, Optional<MaskTensor, Use::never>, Band<false, kCausal>>;

template <int D, bool kCausal>
inline constexpr detail::AttentionTiles kTiles = detail::attention_tiles<D, D>(kCausal ? detail::TileUse::paired : detail::TileUse::widest);
template <class T, int D, bool kCausal>
using Plain =
    Attention<T, D, D, kTiles<D, kCausal>.bm, kTiles<D, kCausal>.bn, kTiles<D, kCausal>.stages, kEqualLengths, PlainRules<kCausal>>;

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
  return analyze<Plain<T, D, kCausal>>(detail::attention_grid(call, kTiles<D, kCausal>.bm), [&](auto& bind, auto& p) {
    detail::fill_attention<PlainRules<kCausal>>(bind, p, call, kTiles<D, kCausal>.bn, kNoUserRule);
  });
}

template <class T, int D, bool kCausal>
KernelVariant variant(const char* dtype) {
  return {make_spec(kernel_info<Plain<T, D, kCausal>>, true, true, tw::format("attention_{}_d{}{}", dtype, D, kCausal ? "_causal" : "")),
          analyze_variant<T, D, kCausal>};
}

/// Decode: a tile is the queries of all heads that share keys.
template <int D>
inline constexpr detail::AttentionTiles kDecodeTiles = detail::attention_tiles<D, D>(detail::TileUse::split);
template <class T, int D, bool kCausal>
using Decode =
    Attention<T, D, D, kDecodeTiles<D>.bm, kDecodeTiles<D>.bn, kDecodeTiles<D>.stages, kRagged | kSplit | kPaged, PlainRules<kCausal>>;

template <class T, int D, bool kCausal>
Analysis analyze_decode(const ShapeValues& shape) {
  const int heads = shape.integer("heads"), seqlen_q = shape.integer("seqlen_q"), seqlen_k = shape.integer("seqlen_k"),
            batch = shape.integer("batch");
  const int kv_heads = shape["kv_heads"] > 0 ? shape.integer("kv_heads") : heads, together = heads / std::max(kv_heads, 1);
  const int splits = shape.integer("splits");
  require(splits > 0, "attention: splits is {}; it must be positive", splits);
  const int rows = together * seqlen_q;
  require(heads > 0 && heads % kv_heads == 0 && rows <= kDecodeTiles<D>.bm,
          "attention: heads is {}, kv_heads {} and seqlen_q {}; heads / kv_heads * seqlen_q must be a whole number up to {}", heads,
          kv_heads, seqlen_q, kDecodeTiles<D>.bm);
  const Tensor q = placeholder({batch, rows, kv_heads, D}, dtype_of<T>), k = placeholder({batch, seqlen_k, kv_heads, D}, dtype_of<T>);
  const Tensor lse = placeholder({splits * batch, kv_heads, rows}, DType::f32);
  detail::AttentionCall call = detail::check_attention(q, k, placeholder(k.shape(), dtype_of<T>), placeholder(q.shape(), dtype_of<T>), {});
  if (shape["lse"] || splits > 1) {
    call.lse = lse.data<float>();
    call.lse_stride_batch = heads * seqlen_q, call.lse_stride_head = rows;
  }
  call.split = true;
  call.splits = splits;
  if (splits > 1) call.partial = placeholder({splits * batch, kv_heads, rows, D}, DType::f32);
  call.heads_together = together;
  call.queries = seqlen_q;
  call.upper = kCausal;
  return analyze<Decode<T, D, kCausal>>(detail::attention_grid(call, kDecodeTiles<D>.bm), [&](auto& bind, auto& p) {
    detail::fill_attention<PlainRules<kCausal>>(bind, p, call, kDecodeTiles<D>.bn, kNoUserRule);
  });
}

template <class T, int D, bool kCausal>
KernelVariant decode_variant(const char* dtype) {
  return {make_spec(kernel_info<Decode<T, D, kCausal>>, true, true,
                    tw::format("attention_decode_{}_d{}{}", dtype, D, kCausal ? "_causal" : "")),
          analyze_decode<T, D, kCausal>};
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
  variants.push_back(decode_variant<bf16, 128, false>("bf16"));
  variants.push_back(decode_variant<bf16, 128, true>("bf16"));
  variants.push_back(combine_variant());
  return variants;
}

std::vector<KernelSpec> registered_generic(std::int64_t shared_bytes) {
  std::vector<KernelSpec> specs;
  for (const auto& [dtype, name] : {std::pair{DType::bf16, "bf16"}, std::pair{DType::f16, "f16"}}) {
    for (const int dim : {64, 128, 256}) {
      for (const bool split : {false, true}) {
        if (split && dtype == DType::f16) continue;
        const detail::AttentionTiles tiles = generic_tiles(dim, dim, split, shared_bytes);
        const int form = split ? kRagged | kSplit | kPaged : kEqualLengths;
        specs.push_back(for_target(make_spec(attention_info(dtype, dim, dim, tiles, form), true, true,
                                             tw::format("attention{}_{}_d{}", split ? "_decode" : "", name, dim)),
                                   GpuTarget::cuda));
      }
    }
  }
  specs.push_back(for_target(combine_variant().spec, GpuTarget::cuda));
  return specs;
}

}  // namespace tw::kernels::attention
