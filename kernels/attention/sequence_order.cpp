#include "kernels/attention/sequence_order.hpp"

#include <algorithm>

#include "kernels/attention/run.hpp"
#include "kernels/attention/sequence_order.tile.hpp"
#include "kernels/attention/workspace.hpp"
#include "tilewave/launch.hpp"

namespace tw::kernels::attention {

Tensor order_sequences(detail::AttentionCall& call) {
  // Each sequence is held against each other: beyond some thousands that takes longer than it saves, and lengths average out.
  constexpr int kMostSequences = 4096;
  if (!call.stream.device().is_cuda() || call.batch < 2 || call.batch > kMostSequences) return {};
  const int units = std::max(1, device_info(call.stream.device()).units), tile_rows = packed_tile_rows(call);
  if (detail::attention_grid(call, tile_rows).count() < 2 * units) return {};
  Tensor places = workspace({2, call.batch}, DType::i32, call.stream);
  const Tensor order = places.slice(0, 0, 1).reshape({call.batch}), first_tile = places.slice(0, 1, 2).reshape({call.batch});
  sequence_order(call, tile_rows, order, first_tile);
  call.order = order.data<std::int32_t>();
  call.first_tile = first_tile.data<std::int32_t>();
  return places;
}

void sequence_order(const detail::AttentionCall& call, int tile_rows, const Tensor& order, const Tensor& first_tile) {
  launch<SequenceOrder<256>>(call.stream, {call.batch, 1, 1}, [&](auto&, auto& p) {
    p.cu_q = call.cu_q, p.cu_k = call.cu_k, p.used_k = call.used_k;
    p.batch = call.batch;
    p.tile_rows = tile_rows;
    p.queries = static_cast<int>(call.q.shape(2)), p.keys = call.keys;
    p.order = order.data<std::int32_t>(), p.first_tile = first_tile.data<std::int32_t>();
  });
}

}  // namespace tw::kernels::attention
