#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <utility>

#include "runtime/bind.hpp"
#include "runtime/format.hpp"
#include "runtime/target.hpp"
#include "tilewave/detail/parallel.hpp"
#include "tilewave/launch.hpp"

namespace tw {

KernelSpec make_spec(const KernelInfo& info, bool tma_load, bool tma_store, std::string name) {
  KernelSpec spec;
  spec.type = info.type;
  spec.name = name.empty() ? spec.type : std::move(name);
  spec.target = target_variant(GpuTarget::sm_90a, tma_load, tma_store).text;
  spec.source = info.source;
  spec.record_tiles = info.record_tiles;
  return spec;
}

namespace detail {

void bind_view(BoundView& view, const Tensor& tensor, DType dtype, Device device) {
  const auto refuse = [&](std::string_view what) {
    throw BindError(&view, tw::format("the tensor {}; given {}, allowed: 1 to 4 dimensions of {} on {}", what, tensor.describe(),
                                      name_of(dtype), device.name()));
  };
  if (tensor.dtype() != dtype) refuse("has another dtype");
  if (!(tensor.device() == device)) refuse("is on another device");
  if (tensor.rank() < 1 || tensor.rank() > 4) refuse("has too many or too few dimensions");
  std::int64_t sizes[4], strides[4];
  for (int dim = 0; dim < 4; ++dim) {
    const int from = dim - (4 - tensor.rank());
    sizes[dim] = from < 0 ? 1 : tensor.shape(from);
    strides[dim] = from < 0 ? 0 : tensor.stride(from);
    if (sizes[dim] > std::numeric_limits<int>::max()) refuse("has an extent over 2^31 - 1");
  }
  const auto size = [&](int dim) { return static_cast<int>(sizes[dim]); };
  view = {tensor.data(), strides[0], strides[1], strides[2], strides[3], size(0), size(1), size(2), size(3)};
}

void require_awaitable(const BoundView& view, bool whole) {
  const bool contiguous = (view.cols <= 1 || view.stride_col == 1) && (view.rows <= 1 || view.stride_row == view.cols) &&
                          (view.size_i <= 1 || view.stride_i == std::int64_t{view.rows} * view.cols) &&
                          (view.size_j <= 1 || view.stride_j == std::int64_t{view.size_i} * view.rows * view.cols);
  if (!contiguous || !whole)
    throw BindError(&view, "the tensor's elements are awaited: it must be contiguous, and consist of whole pieces of its Rows");
}

cpu::AnyFloat::Type any_float_type(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return cpu::AnyFloat::Type::f32;
    case DType::f16:
      return cpu::AnyFloat::Type::f16;
    case DType::bf16:
      return cpu::AnyFloat::Type::bf16;
    default:
      throw InvalidArgument(tw::format("the tensor is {}; allowed: f32, f16 and bf16", name_of(dtype)));
  }
}

TensorMapRequest map_request(const BoundView& view, const MapTile& tile, const Window& window) {
  TensorMapRequest request{};
  request.address = view.data;
  request.element = tile.element;
  const auto bytes = static_cast<std::uint64_t>(size_of(tile.element));
  const std::uint64_t extents[4] = {static_cast<std::uint64_t>(view.cols), static_cast<std::uint64_t>(view.rows),
                                    static_cast<std::uint64_t>(view.size_i), static_cast<std::uint64_t>(view.size_j)};
  const std::int64_t strides[3] = {view.stride_row, view.stride_i, view.stride_j};
  for (int dim = 0; dim < 4; ++dim) request.extents[dim] = extents[dim];
  // A dimension with one element needs no stride, but TMA requires a valid one.
  for (int dim = 0; dim < 3; ++dim) request.strides[dim] = extents[dim + 1] == 1 ? 16 : static_cast<std::uint64_t>(strides[dim]) * bytes;
  // The first rows of the window, which is filled row by row.
  const int width = std::min(window.width(), tile.rows);
  const int height = std::min(window.height(), tile.rows / width);
  const int box[4] = {tile.cols, width * window.row_step, height * window.i_step, tile.rows / (width * height)};
  const int steps[4] = {1, window.row_step, window.i_step, 1};
  for (int dim = 0; dim < 4; ++dim) {
    request.box[dim] = static_cast<std::uint32_t>(box[dim]);
    request.steps[dim] = static_cast<std::uint32_t>(steps[dim]);
  }
  request.swizzle_bytes = tile.swizzle_bytes;
  return request;
}

namespace {
bool is_empty(const BoundView& view) { return view.cols == 0 || view.rows == 0 || view.size_i == 0 || view.size_j == 0; }

/// The unbound Global in a module's Params at the offset that `view` has in `params`.
BoundView unbound_view(const BoundView* view, const ParamsUnderConstruction& params, std::string_view unbound) {
  const auto offset = reinterpret_cast<const char*>(view) - static_cast<const char*>(params.params);
  BoundView result;
  std::memcpy(&result, unbound.data() + offset, sizeof result);
  return result;
}
}  // namespace

bool map_possible(const BoundView& view, bool readable, const MapTile& tile, const Window& window) {
  if (is_empty(view)) return true;  // nothing will be copied
  const bool steps_forward = (view.stride_row > 0 || view.rows == 1) && (view.stride_i > 0 || view.size_i == 1) &&
                             (view.stride_j > 0 || view.size_j == 1) && (view.stride_col == 1 || view.cols == 1);
  // A TMA store writes whole 16-byte pieces, also beyond the last column.
  const bool whole_pieces = readable || view.cols * size_of(tile.element) % 16 == 0;
  return steps_forward && whole_pieces && tensor_map_possible(map_request(view, tile, window));
}

void GpuBinder::add_map(const MapToMake& map) {
  if (map_count == kMostMaps)
    throw BindError(map.view, tw::format("the kernel has more tensors that TMA copies than the {} allowed", kMostMaps));
  maps[map_count++] = map;
}

void make_maps(const GpuBinder& binder, const ParamsUnderConstruction& params, std::string_view unbound) {
  for (int i = 0; i < binder.map_count; ++i) {
    const MapToMake& map = binder.maps[i];
    if (is_empty(*map.view)) continue;
    MapTile tile = unbound_view(map.view, params, unbound).map_tile();
    if (map.copied_rows > 0) tile.rows = map.copied_rows;
    encode_tensor_map(map.tensor_map, map_request(*map.view, tile, map.window));
  }
}

void run_tiles(cpu::RunTile run, const void* params, const TileGrid& grid, std::int64_t memory_bytes, bool loads) {
  static std::atomic<std::uint64_t> launches = 0;
  const std::uint64_t launch = ++launches;
  // Tiles of rows are short and numerous, and each prefetches for the next one, so a thread runs several consecutive tiles.
  const long count = grid.count(), at_once = loads ? 1 : std::clamp(count / (8L * cpu_threads()), 1L, 16L);
  parallel_for((count + at_once - 1) / at_once, [&](long first) {
    // Every thread has its own tile memory: rings start empty and nothing is shared.
    thread_local std::shared_ptr<void> arena;
    thread_local std::int64_t arena_bytes = 0;
    thread_local std::uint64_t last_launch = 0;
    if (std::exchange(last_launch, launch) != launch) cpu::unread_stores = {};
    if (arena_bytes < memory_bytes) {
      arena = allocate(static_cast<std::size_t>(memory_bytes), Stream::standard(Device::cpu()));
      arena_bytes = memory_bytes;
    }
    for (long index = first * at_once; index < std::min(count, (first + 1) * at_once); ++index)
      run(params, grid, static_cast<int>(index), static_cast<u8*>(arena.get()));
  });
}

}  // namespace detail
}  // namespace tw
