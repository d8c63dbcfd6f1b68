#include "kernels/attention/append.hpp"

#include <algorithm>
#include <vector>

#include "kernels/attention/append.tile.hpp"
#include "kernels/rows.hpp"
#include "tilewave/launch.hpp"

namespace tw::kernels::attention {

namespace {

/// A view of `t` whose last dimension has `size` elements, `step` apart, from `first` on.
Tensor columns(const Tensor& t, std::int64_t first, std::int64_t size, std::int64_t step = 1) {
  Shape shape = t.shape();
  std::vector<std::int64_t> strides = t.strides();
  auto* const data = static_cast<char*>(t.data()) + first * strides.back() * static_cast<std::int64_t>(size_of(t.dtype()));
  shape.back() = size;
  strides.back() *= step;
  return Tensor::borrow(data, std::move(shape), t.dtype(), t.device(), std::move(strides));
}

void bind_heads(auto& bind, auto& heads, const Tensor& in, const Tensor& out, std::int64_t half, RopePairing pairing) {
  const bool interleaved = pairing == RopePairing::interleaved;
  const std::int64_t step = interleaved ? 2 : 1, second = interleaved ? 1 : half, rest = in.shape(3) - 2 * half;
  bind(heads.first_in, columns(in, 0, half, step));
  bind(heads.second_in, columns(in, second, half, step));
  bind(heads.first_out, columns(out, 0, half, step));
  bind(heads.second_out, columns(out, second, half, step));
  bind(heads.rest_in, columns(in, 2 * half, rest));
  bind(heads.rest_out, columns(out, 2 * half, rest));
}

template <class T, class Table>
void run(const AppendCall& call, const Stream& stream) {
  using Kernel = Append<T, Table>;
  const std::int64_t half = call.rotary_cos ? call.rotary_cos->shape(1) : 0;
  // Without a table one of no columns.
  const Tensor none = Tensor::borrow(call.new_k.data(), {1, 0}, call.new_k.dtype(), call.new_k.device());
  const bool with_q = call.rotary_cos && call.q.numel() > 0;
  const std::int64_t seqlen_new = call.new_k.shape(1), seqlen_q = with_q ? call.q.shape(1) : 0;
  const std::int64_t most_heads = std::max(call.new_k.shape(2), with_q ? call.q.shape(2) : 0);
  const TileGrid grid{ceil_div(static_cast<int>(most_heads), Kernel::heads), static_cast<int>(seqlen_new + seqlen_q),
                      static_cast<int>(call.new_k.shape(0))};
  launch<Kernel>(stream, grid, [&](auto& bind, auto& p) {
    bind_heads(bind, p.k, call.new_k, call.k_cache, half, call.pairing);
    if (with_q)
      bind_heads(bind, p.q, call.q, call.turned_q, half, call.pairing);
    else
      bind_heads(bind, p.q, call.new_k, call.k_cache, 0, call.pairing);  // not used, but bound
    bind(p.v_in, call.new_v);
    bind(p.v_out, call.v_cache);
    bind(p.cos, call.rotary_cos ? *call.rotary_cos : none);
    bind(p.sin, call.rotary_sin ? *call.rotary_sin : none);
    p.seqlens = call.seqlens;
    p.batch_idx = call.batch_idx;
    p.leftpad = call.leftpad;
    p.block_table = call.block_table;
    p.block_table_stride = call.block_table_stride;
    p.tables = call.tables;
    p.cu_new = call.cu_new;
    p.batch = call.batch;
    p.capacity = static_cast<int>(call.capacity);
    p.seqlen_new = static_cast<int>(seqlen_new);
    p.query_step = call.queries_advance ? 1 : 0;
  });
}

}  // namespace

void append(const AppendCall& call, const Stream& stream) {
  if (call.new_k.numel() == 0) return;
  with_float_type(call.new_k.dtype(), [&]<class T>(std::type_identity<T>) {
    !call.rotary_cos || call.rotary_cos->dtype() == call.new_k.dtype() ? run<T, T>(call, stream) : run<T, float>(call, stream);
  });
}

}  // namespace tw::kernels::attention
