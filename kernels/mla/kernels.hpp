#pragma once

#include <compare>
#include <string>
#include <type_traits>
#include <vector>

#include "kernels/mla/call.hpp"
#include "kernels/mla/decode.tile.hpp"
#include "kernels/mla/decode_fp8.tile.hpp"
#include "kernels/named.hpp"
#include "kernels/variant.hpp"
#include "tilewave/launch.hpp"

namespace tw::kernels::mla {

/// One of the family's kernels by the values that name it.
struct Kernel {
  DType dtype = DType::bf16;
  Cache cache = Cache::contiguous;
  bool fp8 = false;  ///< the cache's latent columns are e4m3
  int keys = 64;     ///< of a block
  auto operator<=>(const Kernel&) const = default;
};

/// The kernel for a call. `generic_shared`: the shared memory of a block where kernels are compiled for the generic target, else 0.
Kernel choose_kernel(const Call& call, std::int64_t generic_shared);
/// With the keys that fit into so much shared memory, on the generic target.
Kernel generic_kernel(Kernel kernel, std::int64_t generic_shared);

/// The type for the run-time compiler.
std::string type_of(const Kernel& kernel);
/// For people: "mla_decode_bf16_pages", or "mla_sparse_bf16".
std::string name_of(const Kernel& kernel);

/// The same kernel as a type: for Params, which are those of every kernel of the dtype, and for the CPU and analysis targets.
template <Kernel k>
using HostKernel = conditional<k.fp8, DecodeFp8<ElementOf<k.dtype>, k.keys, k.cache>, Decode<ElementOf<k.dtype>, k.keys, k.cache>>;

inline TileGrid grid_of(const Call& call) {
  return {.m = call.splits, .n = static_cast<int>((call.q.shape(1) + kRows - 1) / kRows), .batch = call.batch()};
}

/// The distance of pages in tokens, for gathering.
inline std::int64_t page_step(const Tensor& kv) { return kv.shape(1) == 1 ? 1 : kv.stride(0) / kv.stride(1); }
/// All tokens of a paged cache as rows of one matrix, and rows between pages if there are any.
inline Tensor as_tokens(const Tensor& kv) {
  const std::int64_t rows = (kv.shape(0) - 1) * page_step(kv) + kv.shape(1), stride = kv.stride(kv.shape(1) == 1 ? 0 : 1);
  return Tensor::borrow(kv.data(), {1, rows, kv.shape(2)}, kv.dtype(), kv.device(), {rows * stride, stride, kv.stride(2)});
}

/// Fills in the parameters of any of these kernels.
template <class Params>
void bind_call(auto& bind, Params& p, const Call& call, const Kernel& kernel) {
  bind(p.q, call.q);
  const int copied = copied_rows(kernel.cache, kernel.keys);
  const bool empty = call.kv.numel() == 0, gathers = (kernel.cache == Cache::tokens || kernel.cache == Cache::selected) && !empty;
  // Without keys nothing is read, but a tensor map must describe some memory: that of q.
  const Tensor kv = empty ? Tensor() : gathers ? as_tokens(call.kv) : call.kv;
  if constexpr (requires { p.codes; }) {
    const Fp8Parts parts = empty ? Fp8Parts::of_memory(call.q) : Fp8Parts::of(kv, call.q.dtype());
    bind(p.codes, parts.codes, CopiedRows{copied});
    bind(p.scales, parts.scales, CopiedRows{copied});
    bind(p.rotary, parts.rotary, CopiedRows{copied});
  } else {
    bind(p.kv, empty ? call.q : kv, CopiedRows{copied});
  }
  const bool split = call.partial.data() != nullptr;
  bind(p.o, split ? nullptr : &call.o);
  bind(p.partial, split ? &call.partial : nullptr);
  bind(p.indices, call.indices && call.indices->numel() > 0 ? call.indices : nullptr);
  p.lse = call.lse;
  p.sink = call.sink;
  p.max_logits = call.max_logits;
  p.seqlens = call.seqlens;
  p.pages = call.pages;
  p.pages_stride = call.pages_stride;
  p.page_size = std::max(1, call.page_size());
  p.page_step = gathers ? static_cast<int>(page_step(call.kv)) : p.page_size;
  p.page_count = static_cast<int>(call.kv.shape(0));
  p.capacity = call.capacity;
  p.batch = call.batch();
  p.heads = call.heads;
  p.seqlen_q = call.seqlen_q;
  p.splits = call.splits;
  p.causal = call.causal;
  p.scale_log2 = call.scale * kLog2E;
}

inline constexpr ShapeKey kShape[] = {{"batch", "sequences"},
                                      {"heads", "query heads"},
                                      {"keys", "tokens of each sequence"},
                                      {"seqlen_q", "new tokens of each sequence", 1},
                                      {"splits", "splits of the keys", 1}};
std::vector<KernelVariant> registered();
/// Of them, what appends tokens.
KernelVariant append_variant();
std::vector<KernelSpec> registered_generic(std::int64_t shared_bytes);

}  // namespace tw::kernels::mla
