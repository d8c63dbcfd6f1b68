#include <algorithm>
#include <utility>

#include "kernels/attention/append.tile.hpp"
#include "kernels/attention/call.hpp"
#include "kernels/attention/combine.tile.hpp"
#include "kernels/attention/gather.tile.hpp"
#include "kernels/attention/variants.hpp"
#include "kernels/rows.hpp"
#include "kernels/workspace.hpp"
#include "tilewave/launch.hpp"

namespace tw::kernels::attention {

namespace {

void bind_heads(auto& bind, auto& heads, const Tensor& in, const Tensor& out, std::int64_t half, RopePairing pairing) {
  const bool interleaved = pairing == RopePairing::interleaved;
  const std::int64_t step = interleaved ? 2 : 1, second = interleaved ? 1 : half, rest = in.shape(3) - 2 * half;
  bind(heads.first_in, columns_of(in, 0, half, step));
  bind(heads.second_in, columns_of(in, second, half, step));
  bind(heads.first_out, columns_of(out, 0, half, step));
  bind(heads.second_out, columns_of(out, second, half, step));
  bind(heads.rest_in, columns_of(in, 2 * half, rest));
  bind(heads.rest_out, columns_of(out, 2 * half, rest));
}

template <class T, class Table>
void run_append(const AttentionCall& call, const CacheOptions& cache, const Tensor& rotated_q) {
  using Kernel = Append<T, Table>;
  const Tensor new_k = cache.cu_seqlens_new ? as_batch(*cache.new_k) : *cache.new_k;
  const Tensor new_v = cache.cu_seqlens_new ? as_batch(*cache.new_v) : *cache.new_v;
  const Tensor k_cache = call.k.transpose(1, 2), v_cache = call.v.transpose(1, 2);
  const std::int64_t half = cache.rotary_cos ? cache.rotary_cos->shape(1) : 0;
  // Without a table one of no columns.
  const Tensor none = Tensor::borrow(new_k.data(), {1, 0}, new_k.dtype(), new_k.device());
  const bool with_q = cache.rotary_cos && call.q.numel() > 0;
  const Tensor q = with_q ? call.q.transpose(1, 2) : none;
  const std::int64_t seqlen_new = new_k.shape(1), seqlen_q = with_q ? q.shape(1) : 0;
  const std::int64_t most_heads = std::max(new_k.shape(2), with_q ? q.shape(2) : 0);
  const TileGrid grid{ceil_div(static_cast<int>(most_heads), Kernel::heads), static_cast<int>(seqlen_new + seqlen_q),
                      static_cast<int>(new_k.shape(0))};
  launch<Kernel>(call.stream, grid, [&](auto& bind, auto& p) {
    bind_heads(bind, p.k, new_k, k_cache, half, cache.rotary_pairing);
    if (with_q)
      bind_heads(bind, p.q, q, rotated_q, half, cache.rotary_pairing);
    else
      bind_heads(bind, p.q, new_k, k_cache, 0, cache.rotary_pairing);  // not used, but bound
    bind(p.v_in, new_v);
    bind(p.v_out, v_cache);
    bind(p.cos, cache.rotary_cos ? *cache.rotary_cos : none);
    bind(p.sin, cache.rotary_sin ? *cache.rotary_sin : none);
    p.seqlens = call.used_k;
    p.batch_idx = call.k_batch;
    p.leftpad = call.k_begin;
    p.block_table = call.pages;
    p.block_table_stride = call.pages_stride;
    p.tables = call.page_tables;
    p.cu_new = call.cu_added;
    p.batch = call.batch;
    p.capacity = call.keys;
    p.seqlen_new = static_cast<int>(seqlen_new);
    p.query_step = queries_advance(call) ? 1 : 0;
  });
}

template <class T, class To>
void gather(const AttentionCall& call, const Tensor& pages, const Tensor& out) {
  const TileGrid grid{ceil_div(static_cast<int>(out.shape(2)), GatherPages<T, To>::heads), call.keys, call.batch};
  launch<GatherPages<T, To>>(call.stream, grid, [&](auto& bind, auto& p) {
    bind(p.in, pages);
    bind(p.out, out);
    p.seqlens = call.used_k;
    p.leftpad = call.k_begin;
    p.batch_idx = call.k_batch;
    p.cu_added = call.cu_added;
    p.pages = call.pages;
    p.pages_stride = call.pages_stride;
    p.tables = call.pages ? call.page_tables : static_cast<int>(pages.shape(0));
    p.added = call.keys_added;
  });
}

TileGrid grid_of(const CombineCall& call) {
  return {static_cast<int>(call.o.shape(2)), static_cast<int>(call.o.shape(1)), static_cast<int>(call.o.shape(0))};
}

void bind_call(auto& bind, auto& p, const CombineCall& call) {
  const Shape& shape = call.parts.shape();
  bind(p.parts, call.parts.reshape({shape[0], shape[1] * shape[2] * shape[3], shape[4]}).transpose(0, 1));
  p.part_lse = call.part_lse.data<float>();
  bind(p.o, call.o);
  p.lse = call.lse ? call.lse->data<float>() : nullptr;
  p.sink = call.sink ? call.sink->data<float>() : nullptr;
  p.sink_in_lse = call.sink_in_lse;
}

template <class T, int C, int kAhead>
void run(const CombineCall& call, const Stream& stream) {
  launch<Combine<T, C, kAhead>>(stream, grid_of(call), [&](auto& bind, auto& p) { bind_call(bind, p, call); });
}

// On a GPU the parts of a row are on their way at once, or 16 of them: what registers allow. A CPU goes through them.
constexpr int kAheadOnGpu = 16;
/// Columns: the values of latent attention.
constexpr int kMostCombined = 512;

template <int kColumns>
Analysis analyze_combine(const ShapeValues& shape) {
  const std::int64_t splits = shape["splits"], batch = shape["batch"], heads = shape["heads"], seqlen_q = shape["seqlen_q"];
  const Tensor parts = placeholder({splits, batch, heads, seqlen_q, kColumns}, DType::f32);
  const Tensor part_lse = placeholder({splits, batch, heads, seqlen_q}, DType::f32),
               lse = placeholder({batch, heads, seqlen_q}, DType::f32);
  const CombineCall call{parts, part_lse, placeholder({batch, seqlen_q, heads, kColumns}, DType::bf16), shape["lse"] ? &lse : nullptr};
  return analyze<Combine<bf16, kColumns, kAheadOnGpu>>(grid_of(call), [&](auto& bind, auto& p) { bind_call(bind, p, call); });
}

}  // namespace

bool reads_pages(const AttentionCall& call) { return call.page_size % 16 == 0 && call.k_begin == nullptr; }

Tensor gather_tokens(AttentionCall& call) {
  const std::int64_t capacity = call.keys, kv_heads = call.k.shape(1);
  const std::int64_t k_numbers = call.batch * capacity * kv_heads * call.k.shape(3);
  const std::int64_t v_numbers = call.batch * capacity * kv_heads * call.v.shape(3);
  const std::int64_t tiles = (kv_heads + GatherPages<float>::heads - 1) / GatherPages<float>::heads * capacity * call.batch;
  require(tiles <= (std::int64_t{1} << 30),
          "attention_decode: there are {} sequences of {} tokens; with pages and leftpad, a page_size that is no multiple of 16, or "
          "fp8_e4m3 at "
          "most 2^30 tokens are supported",
          call.batch, capacity);
  const DType dtype = call.o.dtype();
  const bool fp8 = call.k.dtype() == DType::fp8_e4m3;
  Tensor memory = workspace({k_numbers + v_numbers}, dtype, call.stream);
  auto* const first = static_cast<char*>(memory.data());
  const Tensor k = Tensor::borrow(first, {call.batch, capacity, kv_heads, call.k.shape(3)}, dtype, memory.device());
  const Tensor v = Tensor::borrow(first + k_numbers * static_cast<std::int64_t>(size_of(dtype)),
                                  {call.batch, capacity, kv_heads, call.v.shape(3)}, dtype, memory.device());
  if (memory.numel() > 0) {
    with_float_type(dtype, [&]<class T>(std::type_identity<T>) {
      for (const auto& [from, to] : {std::pair{call.k, k}, {call.v, v}})
        fp8 ? gather<fp8_e4m3, T>(call, from.transpose(1, 2), to) : gather<T, T>(call, from.transpose(1, 2), to);
    });
  }
  call.k = k.transpose(1, 2);
  call.v = v.transpose(1, 2);
  call.k_batch = nullptr;
  call.pages = nullptr;
  call.page_size = 1;
  return memory;
}

void append(const AttentionCall& call, const CacheOptions& cache, const Tensor& rotated_q) {
  if (cache.new_k->numel() == 0) return;
  const DType dtype = call.k.dtype();
  if (dtype == DType::fp8_e4m3) return run_append<fp8_e4m3, fp8_e4m3>(call, cache, rotated_q);
  with_float_type(dtype, [&]<class T>(std::type_identity<T>) {
    !cache.rotary_cos || cache.rotary_cos->dtype() == dtype ? run_append<T, T>(call, cache, rotated_q)
                                                            : run_append<T, float>(call, cache, rotated_q);
  });
}

void combine(const CombineCall& call, const Stream& stream) {
  if (call.o.numel() == 0) return;
  with_float_type(call.o.dtype(), [&]<class T>(std::type_identity<T>) {
    const bool on_gpu = stream.device().is_cuda();
    const std::int64_t columns = call.o.shape(3);
    require(columns <= kMostCombined, "attention: combine() of {} columns; at most {} are supported", columns, kMostCombined);
    if (columns > 256) return on_gpu ? run<T, kMostCombined, kAheadOnGpu>(call, stream) : run<T, kMostCombined, 1>(call, stream);
    if (!on_gpu) return run<T, 256, 1>(call, stream);
    columns <= 128 ? run<T, 128, kAheadOnGpu>(call, stream) : run<T, 256, kAheadOnGpu>(call, stream);
  });
}

KernelVariant combine_variant() {
  return {make_spec(kernel_info<Combine<bf16, 128, kAheadOnGpu>>, true, true, "attention_combine_bf16"), analyze_combine<128>};
}
KernelVariant wide_combine_variant() {
  return {make_spec(kernel_info<Combine<bf16, kMostCombined, kAheadOnGpu>>, true, true, "attention_combine_bf16_d512"),
          analyze_combine<kMostCombined>};
}

}  // namespace tw::kernels::attention
