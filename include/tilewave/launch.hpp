#pragma once

#include <cstdint>
#include <new>
#include <string>
#include <string_view>

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

/// A tensor that is copied by parts of tiles, of so many rows each: copy.part(). For a Global's binding.
struct CopiedRows {
  int count;
};

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

/// A tensor that may not be bound to a Global. bind_params() adds to the message which kernel and which Global.
class BindError : public InvalidArgument {
 public:
  BindError(const BoundView* global, const std::string& what) : InvalidArgument(what), global(global) {}
  const BoundView* global;
};

/// Checks that `tensor` may be bound to a Global of `dtype` on `device` and fills in extents and strides. Throws BindError.
void bind_view(BoundView& view, const Tensor& tensor, DType dtype, Device device);

/// A kernel's Params under construction, for errors about single Globals.
struct ParamsUnderConstruction {
  std::string_view kernel;  ///< its type
  std::string_view source;  ///< the embedded file that defines it, or empty
  const void* params;       ///< `bytes` bytes
  std::size_t bytes, alignment;
  void (*make_unbound)(void* at);  ///< constructs Params to which nothing is bound
};
/// Throws InvalidArgument, which names the kernel and the Global, if nothing was bound to one of them.
void require_bound(const ParamsUnderConstruction& params);
/// Throws InvalidArgument: `error` with the names of the kernel and the Global.
[[noreturn]] void throw_named(const ParamsUnderConstruction& params, const BindError& error);

/// bind(binder, params), with errors that name the kernel and its parameter; every Global must be bound.
template <class Params, class Binder, class Bind>
void bind_params(std::string_view kernel, std::string_view source, Params& params, Binder& binder, Bind&& bind) {
  const ParamsUnderConstruction named{kernel, source, &params, sizeof(Params), alignof(Params), [](void* at) { ::new (at) Params{}; }};
  try {
    bind(binder, params);
  } catch (const BindError& error) {
    throw_named(named, error);
  }
  require_bound(named);
}

/// Kernel::source, or nothing for a kernel that runs on the CPU only.
template <class Kernel>
constexpr std::string_view source_of() {
  if constexpr (requires { Kernel::source; }) return Kernel::source;
  return {};
}

template <class T>
inline constexpr MapElement map_element = is_same<T, float>  ? MapElement::f32
                                          : is_same<T, f16>  ? MapElement::f16
                                          : is_same<T, bf16> ? MapElement::bf16
                                                             : MapElement::u8;

/// What one copy of a Global by TMA moves: elements, rows of a tile (or as many of them as its map's boxes have) and their columns.
struct MapTile {
  MapElement element;
  int rows, cols;
};
template <class G>
inline constexpr MapTile map_tile = {map_element<typename G::Element>, G::TileType::box_rows / G::split, G::TileType::box_cols};

/// What TMA is asked for when a Global is bound so.
TensorMapRequest map_request(const BoundView& view, const MapTile& tile, const Window& window);

/// Writes the map of a Global whose view is filled in; false where TMA cannot copy it.
bool bind_map(const BoundView& view, bool readable, const MapTile& tile, const Window& window, void* tensor_map);

/// Binds tensors to a kernel's Globals on a GPU, and finds out which copies TMA can do.
class GpuBinder {
 public:
  explicit GpuBinder(Device device) : device_(device) {}
  template <class G>
  void operator()(G& global, const Tensor& tensor) {
    bind(global, tensor, Window{});
  }
  template <class G>
  void operator()(G& global, const Tensor* tensor) {
    if (tensor == nullptr) return void(static_cast<BoundView&>(global) = kNoTensor);
    (*this)(global, *tensor);
  }
  template <class G>
  void operator()(G& global, const Tensor& tensor, const Window& window) {
    global.window = window;
    bind(global, tensor, window);
  }
  template <class G>
  void operator()(G& global, const Tensor& tensor, CopiedRows rows) {
    bind(global, tensor, Window{}, rows.count);
  }
  bool tma_load = true;
  bool tma_store = true;

 private:
  template <class G>
  void bind(G& global, const Tensor& tensor, const Window& window, [[maybe_unused]] int copied_rows = 0) {
    bind_view(global, tensor, dtype_of<typename G::Element>, device_);
    using Tile = typename G::TileType;
    bool possible = true;
    if constexpr (sm_90a::moves_in_pieces<Tile>)
      possible = global.template whole_pieces<typename G::Element, Tile::width>();
    else if constexpr (!is_same<Tile, void>) {
      MapTile tile = map_tile<G>;
      if (copied_rows > 0) tile.rows = copied_rows;
      possible = bind_map(global, G::readable, tile, window, global.tensor_map);
    }
    if (!possible) (G::readable ? tma_load : tma_store) = false;
  }

  Device device_;
};

/// Throws InvalidArgument for another type than f32, f16 or bf16.
cpu::AnyFloat::Type any_float_type(DType dtype);

class CpuBinder {
 public:
  template <class G>
  void operator()(G& global, const Tensor& tensor) const {
    if constexpr (G::any_float) {
      bind_view(global, tensor, tensor.dtype(), Device::cpu());
      global.type = any_float_type(tensor.dtype());
    } else {
      bind_view(global, tensor, dtype_of<typename G::Element>, Device::cpu());
    }
  }
  template <class G>
  void operator()(G& global, const Tensor* tensor) const {
    if (tensor == nullptr) return void(static_cast<BoundView&>(global) = kNoTensor);
    (*this)(global, *tensor);
  }
  template <class G>
  void operator()(G& global, const Tensor& tensor, const Window& window) const {
    global.window = window;
    (*this)(global, tensor);
  }
  template <class G>
  void operator()(G& global, const Tensor& tensor, CopiedRows) const {
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
          sizeof(typename On::Params), Shape::produces, tile_recorder<Kernel>()};
}

/// Launches the variant that `binder` found possible.
void launch_variant(const KernelInfo& info, bool tma_load, bool tma_store, const void* params, TileGrid grid, const Stream& stream);

/// Launches a kernel whose Params are `Bound`'s, and bound alike: of many variants only one need be bound.
template <class Bound, class Bind>
void launch_bound(const KernelInfo& info, const Stream& stream, const TileGrid& grid, Bind bind) {
  typename Bound::template On<sm_90a::Target<>>::Params params{};
  GpuBinder binder(stream.device());
  bind_params(info.type, info.source, params, binder, bind);
  launch_variant(info, binder.tma_load, binder.tma_store, &params, grid, stream);
}

/// Runs a kernel for all tiles on the CPU's threads, each with `memory_bytes` of tile memory. `loads`: the kernel has a load().
void run_tiles(cpu::RunTile run, const void* params, const TileGrid& grid, std::int64_t memory_bytes, bool loads);

}  // namespace detail

/// Everything about a kernel that follows from its type.
template <class Kernel>
inline constexpr KernelInfo kernel_info = detail::make_info<Kernel>();

/// Runs `Kernel` on a CUDA stream's device. See launch().
template <class Kernel, class Bind>
void launch_gpu(const Stream& stream, const TileGrid& grid, Bind bind) {
  if constexpr (requires { Kernel::source; }) {
    detail::launch_bound<Kernel>(kernel_info<Kernel>, stream, grid, bind);
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
  detail::bind_params(detail::type_name<Kernel>(), detail::source_of<Kernel>(), params, binder, bind);
  detail::run_tiles(&cpu::run<On>, &params, grid, cpu::memory_bytes<On>(), detail::has_load<On>);
}

/// Runs `Kernel` for every tile of `grid` on the stream's device; on a GPU it compiles the kernel at first use and returns at once.
/// `bind(binder, params)` fills in Kernel::On<target>::Params. Every Global must be bound:
///   binder(params.x, tensor)                  a tensor of the Global's dtype on the stream's device, with 1 to 4 dimensions
///   binder(params.x, pointer)                 a tensor that a call may leave out: null for a Global without elements
///   binder(params.x, tensor, window)          to a Windowed
///   binder(params.x, tensor, CopiedRows{n})   one that copy.part() copies n rows of at a time
/// Bases and strides that TMA cannot take, and Rows that do not move in whole pieces, select the kernel's slower variant. Throws
/// InvalidArgument, which names the kernel and the parameter, CompileError and DeviceError.
template <class Kernel, class Bind>
void launch(const Stream& stream, const TileGrid& grid, Bind bind) {
  if (grid.count() == 0) return;
  if (stream.device().is_cuda())
    launch_gpu<Kernel>(stream, grid, bind);
  else
    launch_cpu<Kernel>(grid, bind);
}

}  // namespace tw
