#include "kernels/attention/packed_tiles.hpp"

#include <algorithm>

#include "kernels/attention/packed_tiles.tile.hpp"
#include "kernels/attention/run.hpp"
#include "kernels/workspace.hpp"
#include "tilewave/launch.hpp"

namespace tw::kernels::attention {

Tensor list_packed_tiles(detail::AttentionCall& call) {
  // Each sequence is held against each other: beyond some thousands that takes longer than it saves.
  constexpr int kMostSequences = 4096;
  if (!call.stream.device().is_cuda() || call.batch > kMostSequences) return {};
  const int units = std::max(1, device_info(call.stream.device()).units), tile_rows = packed_tile_rows(call);
  const TileGrid grid = detail::attention_grid(call, tile_rows);
  if (grid.count() < 2 * units) return {};
  Tensor tiles = workspace({grid.m, PackedTile::numbers}, DType::i32, call.stream);
  packed_tiles(call, tile_rows, tiles);
  call.tiles = tiles.data<std::int32_t>();
  return tiles;
}

void packed_tiles(const detail::AttentionCall& call, int tile_rows, const Tensor& tiles) {
  launch<PackedTiles<256>>(call.stream, {call.batch, 1, 1}, [&](auto&, auto& p) {
    p.cu_q = call.cu_q, p.cu_k = call.cu_k;
    p.used_q = call.used_q, p.used_k = call.used_k;
    p.batch = call.batch;
    p.queries = static_cast<int>(call.q.shape(2)), p.keys = call.keys;
    p.tile_rows = tile_rows;
    p.count = static_cast<int>(tiles.shape(0));
    p.tiles = tiles.data<std::int32_t>();
  });
}

}  // namespace tw::kernels::attention
