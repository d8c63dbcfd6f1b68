#include "kernels/attention/gather.hpp"

#include "kernels/attention/gather.tile.hpp"
#include "kernels/check.hpp"
#include "kernels/rows.hpp"
#include "kernels/workspace.hpp"
#include "tilewave/launch.hpp"

namespace tw::kernels::attention {

namespace {

template <class T>
void gather(const detail::AttentionCall& call, const Tensor& pages, const Tensor& out) {
  const TileGrid grid{ceil_div(static_cast<int>(out.shape(2)), GatherPages<T>::heads), call.keys, call.batch};
  launch<GatherPages<T>>(call.stream, grid, [&](auto& bind, auto& p) {
    bind(p.in, pages);
    bind(p.out, out);
    p.seqlens = call.used_k;
    p.leftpad = call.k_begin;
    p.batch_idx = call.k_batch;
    p.cu_added = call.cu_added;
    p.pages = call.pages;
    p.pages_stride = call.pages_stride;
    p.tables = call.page_tables;
    p.added = call.keys_added;
  });
}

}  // namespace

bool reads_pages(const detail::AttentionCall& call) { return call.page_size % 16 == 0 && call.k_begin == nullptr; }

Tensor gather_pages(detail::AttentionCall& call) {
  const std::int64_t capacity = call.keys, kv_heads = call.k.shape(1);
  const std::int64_t k_numbers = call.batch * capacity * kv_heads * call.k.shape(3);
  const std::int64_t v_numbers = call.batch * capacity * kv_heads * call.v.shape(3);
  const std::int64_t tiles = (kv_heads + GatherPages<float>::heads - 1) / GatherPages<float>::heads * capacity * call.batch;
  require(
      tiles <= (std::int64_t{1} << 30),
      "attention_decode: block_table stands for {} sequences of {} tokens; with leftpad or a page_size that is no multiple of 16 at most "
      "2^30 tokens are supported",
      call.batch, capacity);
  const DType dtype = call.k.dtype();
  Tensor memory = workspace({k_numbers + v_numbers}, dtype, call.stream);
  auto* const first = static_cast<char*>(memory.data());
  const Tensor k = Tensor::borrow(first, {call.batch, capacity, kv_heads, call.k.shape(3)}, dtype, memory.device());
  const Tensor v = Tensor::borrow(first + k_numbers * static_cast<std::int64_t>(size_of(dtype)),
                                  {call.batch, capacity, kv_heads, call.v.shape(3)}, dtype, memory.device());
  if (memory.numel() > 0) {
    with_float_type(dtype, [&]<class T>(std::type_identity<T>) {
      gather<T>(call, call.k.transpose(1, 2), k);
      gather<T>(call, call.v.transpose(1, 2), v);
    });
  }
  call.k = k.transpose(1, 2);
  call.v = v.transpose(1, 2);
  call.k_batch = nullptr;
  call.pages = nullptr;
  call.page_size = 1;
  return memory;
}

}  // namespace tw::kernels::attention
