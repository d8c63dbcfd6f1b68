#pragma once

#include <algorithm>
#include <limits>
#include <memory>
#include <string>
#include <string_view>

#include "tilewave/detail/parallel.hpp"
#include "tilewave/detail/tensor_map.hpp"
#include "tilewave/error.hpp"
#include "tilewave/kernel.hpp"
#include "tilewave/layout.hpp"
#include "tilewave/tensor.hpp"
#include "tilewave/tile/cpu/block.tile.hpp"
#include "tilewave/tile/grid.tile.hpp"
#include "tilewave/tile/sm_90a/target.tile.hpp"

// Launching a kernel of your own:
//
//   tw::launch<MatmulRelu<128, 128, 64>>(stream, {.m = tw::ceil_div(M, 128), .n = tw::ceil_div(N, 128)}, [&](auto& bind, auto& params) {
//     bind(params.a, a);   // tensors [rows, cols], [i, rows, cols] or [j, i, rows, cols]
//     params.steps = ceil_div(K, 64);
//   });
//
// The stream's device says where it runs. `params` is Kernel::On<target>::Params of that device's target.

namespace tw {

namespace detail {

template <class T>
constexpr std::string_view type_name() {
  // "... type_name() [with T = tw::Gemm<tw::bf16, 128>; std::string_view = ...]" (g++) or "... [T = tw::Gemm<tw::bf16, 128>]" (clang)
  const std::string_view text = __PRETTY_FUNCTION__;
  const std::size_t begin = text.find("T = ") + 4;
  const std::size_t semicolon = text.find(';', begin);
  const std::size_t end = semicolon == std::string_view::npos ? text.rfind(']') : semicolon;
  return text.substr(begin, end - begin);
}

/// Checks that `tensor` may be bound to a Global of `dtype` on `device` and fills in extents and strides. Throws InvalidArgument.
struct BoundTensor {
  std::int64_t sizes[4];    ///< j, i, rows, cols
  std::int64_t strides[4];  ///< elements
};
BoundTensor bind_tensor(const Tensor& tensor, DType dtype, Device device);

template <class G>
void fill_view(G& global, const Tensor& tensor, const BoundTensor& bound) {
  global.data = tensor.data();
  global.size_j = static_cast<int>(bound.sizes[0]);
  global.size_i = static_cast<int>(bound.sizes[1]);
  global.rows = static_cast<int>(bound.sizes[2]);
  global.cols = static_cast<int>(bound.sizes[3]);
  global.stride_j = bound.strides[0];
  global.stride_i = bound.strides[1];
  global.stride_row = bound.strides[2];
  global.stride_col = bound.strides[3];
}

template <class T>
inline constexpr MapElement map_element = is_same<T, float>  ? MapElement::f32
                                          : is_same<T, f16>  ? MapElement::f16
                                          : is_same<T, bf16> ? MapElement::bf16
                                                             : MapElement::u8;

/// What TMA is asked for when `G` is bound so. A tile's rows, or as many as its map's boxes have, are `window`.
template <class G>
TensorMapRequest map_request(const G& global, const Window& window) {
  using Tile = typename G::TileType;
  using Element = typename G::Element;
  constexpr std::uint64_t bytes = sizeof(Element);
  TensorMapRequest request{};
  request.address = global.data;
  request.element = map_element<Element>;
  const std::uint64_t extents[4] = {static_cast<std::uint64_t>(global.cols), static_cast<std::uint64_t>(global.rows),
                                    static_cast<std::uint64_t>(global.size_i), static_cast<std::uint64_t>(global.size_j)};
  const std::int64_t strides[3] = {global.stride_row, global.stride_i, global.stride_j};
  for (int dim = 0; dim < 4; ++dim) request.extents[dim] = extents[dim];
  // A dimension of one element never steps; TMA still wants a stride that it could take.
  for (int dim = 0; dim < 3; ++dim) request.strides[dim] = extents[dim + 1] == 1 ? 16 : static_cast<std::uint64_t>(strides[dim]) * bytes;
  // The first rows of the window: it is filled row by row.
  constexpr int rows = Tile::box_rows / G::split;
  const int width = min(window.width(), rows);
  const int height = min(window.height(), rows / width);
  const int box[4] = {Tile::box_cols, width * window.row_step, height * window.i_step, rows / (width * height)};
  const int steps[4] = {1, window.row_step, window.i_step, 1};
  for (int dim = 0; dim < 4; ++dim) {
    request.box[dim] = static_cast<std::uint32_t>(box[dim]);
    request.steps[dim] = static_cast<std::uint32_t>(steps[dim]);
  }
  request.swizzle_bytes = sm_90a::kPanelBytes;
  return request;
}

/// Binds tensors to a kernel's Globals on a GPU, and finds out which copies TMA can do.
class GpuBinder {
 public:
  explicit GpuBinder(Device device) : device_(device) {}
  template <class G>
  void operator()(G& global, const Tensor& tensor) {
    bind(global, tensor, Window{});
  }
  template <class G>
  void operator()(G& global, const Tensor& tensor, const Window& window) {
    global.window = window;
    bind(global, tensor, window);
  }
  bool tma_load = true;
  bool tma_store = true;

 private:
  template <class G>
  void bind(G& global, const Tensor& tensor, const Window& window) {
    const BoundTensor bound = bind_tensor(tensor, dtype_of<typename G::Element>, device_);
    fill_view(global, tensor, bound);
    using Tile = typename G::TileType;
    if constexpr (sm_90a::moves_in_pieces<Tile>) {
      if (!global.template whole_pieces<typename G::Element, Tile::width>()) (G::readable ? tma_load : tma_store) = false;
    } else if constexpr (!is_same<Tile, void>) {
      if (tensor.numel() == 0) return;  // nothing will be copied
      const TensorMapRequest request = map_request(global, window);
      const bool steps_forward = (global.stride_row > 0 || global.rows == 1) && (global.stride_i > 0 || global.size_i == 1) &&
                                 (global.stride_j > 0 || global.size_j == 1) && (global.stride_col == 1 || global.cols == 1);
      // A TMA store writes whole pieces of 16 bytes, beyond the last column too.
      const bool whole_pieces = G::readable || global.cols * sizeof(typename G::Element) % 16 == 0;
      const bool possible = steps_forward && whole_pieces && tensor_map_possible(request);
      if (possible)
        encode_tensor_map(global.tensor_map, request);
      else
        (G::readable ? tma_load : tma_store) = false;
    }
  }

  Device device_;
};

class CpuBinder {
 public:
  template <class G>
  void operator()(G& global, const Tensor& tensor) const {
    fill_view(global, tensor, bind_tensor(tensor, dtype_of<typename G::Element>, Device::cpu()));
  }
  template <class G>
  void operator()(G& global, const Tensor& tensor, const Window& window) const {
    global.window = window;
    (*this)(global, tensor);
  }
};

template <class Kernel>
constexpr KernelInfo make_info() {
  using Target = sm_90a::Target<>;
  using On = typename Kernel::template On<Target>;
  using Shape = sm_90a::Shape<On, Target>;
  return {type_name<Kernel>(),         Kernel::source,  Shape::threads,
          Shape::shared_bytes(),       Shape::cluster,  Shape::dispatch != Dispatch::plain,
          sizeof(typename On::Params), Shape::produces, &record_tiles<Kernel>};
}

/// Launches the variant that `binder` found possible.
void launch_variant(const KernelInfo& info, bool tma_load, bool tma_store, const void* params, TileGrid grid, const Stream& stream);

}  // namespace detail

/// Everything about a kernel that follows from its type.
template <class Kernel>
inline constexpr KernelInfo kernel_info = detail::make_info<Kernel>();

/// Runs `Kernel` on a CUDA stream's device. See launch().
template <class Kernel, class Bind>
void launch_gpu(const Stream& stream, const TileGrid& grid, Bind bind) {
  if constexpr (requires { Kernel::source; }) {
    using On = typename Kernel::template On<sm_90a::Target<>>;
    typename On::Params params{};
    detail::GpuBinder binder(stream.device());
    bind(binder, params);
    detail::launch_variant(kernel_info<Kernel>, binder.tma_load, binder.tma_store, &params, grid, stream);
  } else {
    throw InvalidArgument("kernel " + std::string(detail::type_name<Kernel>()) +
                          " cannot run on a GPU: it has no `source`, the embedded *.tile.hpp file that defines it (a kernel defined in a "
                          "host file is CPU-only)");
  }
}

/// Runs `Kernel` on the CPU's thread pool; complete when it returns. See launch().
template <class Kernel, class Bind>
void launch_cpu(const TileGrid& grid, Bind bind) {
  using On = typename Kernel::template On<cpu::Target>;
  typename On::Params params{};
  detail::CpuBinder binder;
  bind(binder, params);
  // Tiles of rows are many and short, and each begins to fetch the next one's: a thread takes some that follow each other.
  const long count = grid.count(), run = detail::has_load<On> ? 1 : std::clamp(count / (8L * cpu_threads()), 1L, 16L);
  detail::parallel_for((count + run - 1) / run, [&](long first) {
    // Every thread has its own tile memory: rings start empty, and nothing is shared.
    const std::size_t bytes = static_cast<std::size_t>(cpu::memory_bytes<On>());
    thread_local std::shared_ptr<void> arena;
    thread_local std::size_t arena_bytes = 0;
    if (arena_bytes < bytes) {
      arena = allocate(bytes, Stream::standard(Device::cpu()));
      arena_bytes = bytes;
    }
    for (long index = first * run; index < std::min(count, (first + 1) * run); ++index)
      cpu::run<On>(params, grid, static_cast<int>(index), static_cast<u8*>(arena.get()));
  });
}

/// Runs `Kernel` for every tile of `grid` on the stream's device; on a GPU it compiles the kernel at first use and returns at once.
/// `bind(binder, params)` fills in Kernel::On<target>::Params; binder(params.x, tensor) binds a tensor to a Global and throws
/// InvalidArgument for a wrong device, dtype or rank; binder(params.x, tensor, window) binds one to a Windowed. Bases and strides that TMA
/// cannot take, and Rows that do not move in whole pieces, select the kernel's slower variant. Throws CompileError, DeviceError.
template <class Kernel, class Bind>
void launch(const Stream& stream, const TileGrid& grid, Bind bind) {
  if (grid.count() == 0) return;
  if (stream.device().is_cuda())
    launch_gpu<Kernel>(stream, grid, bind);
  else
    launch_cpu<Kernel>(grid, bind);
}

}  // namespace tw
