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
#include "tilewave/tile/cpu/run.tile.hpp"
#include "tilewave/tile/grid.tile.hpp"
#include "tilewave/tile/sm_90a/target.tile.hpp"

// Launching a user-defined kernel:
//
//   tw::launch<MatmulRelu<128, 128, 64>>(stream, {.m = tw::ceil_div(M, 128), .n = tw::ceil_div(N, 128)}, [&](auto& bind, auto& params) {
//     bind(params.a, a);   // a tensor [rows, cols], [i, rows, cols] or [j, i, rows, cols]
//     params.steps = ceil_div(K, 64);
//   });
//
// The stream determines the device and the target. `params` is Kernel::On<target>::Params.

namespace tw {

/// For binding a tensor whose tiles are copied in parts of `count` rows each: copy.part().
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

/// A tensor cannot be bound to a Global. bind_params() adds the names of the kernel and the Global to the message.
class BindError : public InvalidArgument {
 public:
  BindError(const BoundView* global, const std::string& what) : InvalidArgument(what), global(global) {}
  const BoundView* global;
};

/// Checks that `tensor` may be bound to a Global of `dtype` on `device` and fills in extents and strides. Throws BindError.
void bind_view(BoundView& view, const Tensor& tensor, DType dtype, Device device);
/// Throws BindError unless an Awaited tensor is contiguous and `whole`: of whole pieces of the Rows that it is bound with.
void require_awaitable(const BoundView& view, bool whole = true);

/// A kernel's Params while they are filled in, for errors that name a Global.
struct ParamsUnderConstruction {
  std::string_view kernel;  ///< its type
  std::string_view source;  ///< the embedded file that defines it, or empty
  void* params;             ///< `bytes` bytes
  std::size_t bytes, alignment;
  void (*make_unbound)(void* at);  ///< constructs Params with nothing bound
};
/// Throws InvalidArgument, which names the kernel and the Global, if a Global was not bound.
void require_bound(const ParamsUnderConstruction& params);
/// Throws `error` as an InvalidArgument that names the kernel and the Global.
[[noreturn]] void throw_named(const ParamsUnderConstruction& params, const BindError& error);

/// Calls bind(binder, params). Errors name the kernel and its parameter; every Global must be bound.
template <class Params, class Binder, class Bind>
ParamsUnderConstruction bind_params(std::string_view kernel, std::string_view source, Params& params, Binder& binder, Bind&& bind) {
  ParamsUnderConstruction named{kernel, source, &params, sizeof(Params), alignof(Params), [](void* at) { ::new (at) Params{}; }};
  try {
    bind(binder, params);
  } catch (const BindError& error) {
    throw_named(named, error);
  }
  require_bound(named);
  return named;
}

/// Kernel::source; empty for a kernel that runs on the CPU only.
template <class Kernel>
constexpr std::string_view source_of() {
  if constexpr (requires { Kernel::source; }) return Kernel::source;
  return {};
}

/// The tensor map that a Global with this binding needs.
TensorMapRequest map_request(const BoundView& view, const MapTile& tile, const Window& window);

/// False where TMA cannot copy the tensor in such tiles.
bool map_possible(const BoundView& view, bool readable, const MapTile& tile, const Window& window);

/// A Global that TMA copies. Its tensor map is made after compilation, when the sizes of its boxes are known.
struct MapToMake {
  const BoundView* view;
  void* tensor_map;
  Window window;
  int copied_rows;  ///< 0: tiles are copied whole
};

/// Binds tensors to a kernel's Globals on a GPU and determines whether TMA can copy them.
class GpuBinder {
 public:
  GpuBinder(Device device, GpuTarget target) : device_(device), target_(target) {}
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
  template <class G>
  void operator()(G& global, const Tensor& tensor, const Window& window, CopiedRows rows) {
    global.window = window;
    bind(global, tensor, window, rows.count);
  }
  bool tma_load = true;
  bool tma_store = true;

  static constexpr int kMostMaps = 16;
  MapToMake maps[kMostMaps];
  int map_count = 0;

 private:
  template <class G>
  void bind(G& global, const Tensor& tensor, const Window& window, [[maybe_unused]] int copied_rows = 0) {
    [[maybe_unused]] const MapTile tile = global.map_tile();
    bind_view(global, tensor, dtype_of<typename G::Element>, device_);
    using Tile = typename G::TileType;
    bool possible = true;
    if constexpr (sm_90a::moves_in_pieces<Tile>) {
      possible = global.template whole_pieces<typename G::Element, Tile::width>();
      if constexpr (is_awaited<G>) require_awaitable(global, possible);
    } else if constexpr (!is_same<Tile, void>) {
      if (target_ == GpuTarget::cuda) {
        // Loads in 16-byte pieces are a variant of the kernel; stores decide at run time.
        constexpr int width = 16 / static_cast<int>(sizeof(typename G::Element));
        if (G::readable && global.cols > 0) tma_load = tma_load && global.template whole_pieces<typename G::Element, width>();
        return;
      }
      possible = map_possible(global, G::readable, {tile.element, copied_rows > 0 ? copied_rows : tile.rows, tile.cols, tile.swizzle_bytes},
                              window);
      if (possible) add_map({&global, global.tensor_map, window, copied_rows});
    }
    if (!possible) (G::readable ? tma_load : tma_store) = false;
  }
  void add_map(const MapToMake& map);

  Device device_;
  GpuTarget target_;
};

/// Throws InvalidArgument unless the type is f32, f16 or bf16.
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
      if constexpr (is_awaited<G>) require_awaitable(global);
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
  template <class G>
  void operator()(G& global, const Tensor& tensor, const Window& window, CopiedRows) const {
    (*this)(global, tensor, window);
  }
};

template <class Kernel>
constexpr KernelInfo make_info() {
  return {type_name<Kernel>(), Kernel::source, tile_recorder<Kernel>()};
}

/// A kernel for any target and device. Lives until the process ends.
class NamedKernel;
/// Always returns the same object for the same type text and source. Takes a lock, so callers should keep the result.
const NamedKernel& named_kernel(std::string_view type, std::string_view source);
template <class Kernel>
const NamedKernel& named() {
  static const NamedKernel& kernel = named_kernel(type_name<Kernel>(), Kernel::source);
  return kernel;
}
std::string_view type_of(const NamedKernel& kernel);
std::string_view source_of(const NamedKernel& kernel);

/// Makes the tensor maps and launches the variant of the kernel that `binder` found possible. Throws InvalidArgument if the layout of
/// Params in the compiled module is not that of `params`.
void launch_bound(const NamedKernel& kernel, const GpuBinder& binder, const ParamsUnderConstruction& params, TileGrid grid,
                  const Stream& stream);

/// Calls bind(binder, params) and launches. `Params` may come from any instantiation that differs only in tile sizes: the layout is the
/// same.
template <class Params, class Bind>
void launch_named(const NamedKernel& kernel, const Stream& stream, const TileGrid& grid, Bind bind) {
  Params params{};
  GpuBinder binder(stream.device(), stream.target());
  const ParamsUnderConstruction named = bind_params(type_of(kernel), source_of(kernel), params, binder, bind);
  launch_bound(kernel, binder, named, grid, stream);
}

/// Runs a kernel for all tiles on the CPU's threads, each with `memory_bytes` of tile memory. `loads`: the kernel has load().
void run_tiles(cpu::RunTile run, const void* params, const TileGrid& grid, std::int64_t memory_bytes, bool loads);

}  // namespace detail

/// A kernel's type and source as text, for make_spec().
template <class Kernel>
inline constexpr KernelInfo kernel_info = detail::make_info<Kernel>();

/// Runs `Kernel` on a CUDA stream's device. See launch().
template <class Kernel, class Bind>
void launch_gpu(const Stream& stream, const TileGrid& grid, Bind bind) {
  if constexpr (requires { Kernel::source; }) {
    detail::launch_named<typename Kernel::template On<sm_90a::Target<>>::Params>(detail::named<Kernel>(), stream, grid, bind);
  } else {
    throw InvalidArgument("kernel " + std::string(detail::type_name<Kernel>()) +
                          " cannot run on a GPU: it has no `source`, the embedded *.tile.hpp file that defines it (a kernel defined in a "
                          "host file is CPU-only)");
  }
}

/// Runs `Kernel` on the CPU's thread pool and returns when it is complete. See launch().
template <class Kernel, class Bind>
void launch_cpu(const TileGrid& grid, Bind bind) {
  using On = typename Kernel::template On<cpu::Target>;
  typename On::Params params{};
  detail::CpuBinder binder;
  detail::bind_params(detail::type_name<Kernel>(), detail::source_of<Kernel>(), params, binder, bind);
  detail::run_tiles(&cpu::run<On>, &params, grid, cpu::memory_bytes<On>(), detail::has_load<On>);
}

/// Runs `Kernel` for every tile of `grid` on the stream's device. On a GPU it compiles the kernel at first use and returns
/// without waiting. `bind(binder, params)` fills in Kernel::On<target>::Params. Every Global must be bound:
///   binder(params.x, tensor)                  a tensor of the Global's dtype on the stream's device, with 1 to 4 dimensions
///   binder(params.x, pointer)                 an optional tensor; null gives a Global without elements
///   binder(params.x, tensor, window)          for a Windowed
///   binder(params.x, tensor)                  for an Awaited: contiguous, and all of its bytes are 0xff: Tensor::poisoned(), for example
///   binder(params.x, tensor, CopiedRows{n})   for copies of n rows at a time instead of whole tiles: copy.part()
/// Addresses and strides that TMA cannot handle, and Rows that cannot be copied in whole vectors, select a slower variant of the kernel.
/// Throws InvalidArgument, which names the kernel and the parameter, CompileError and DeviceError.
template <class Kernel, class Bind>
void launch(const Stream& stream, const TileGrid& grid, Bind bind) {
  if (grid.count() == 0) return;
  if (stream.device().is_cuda())
    launch_gpu<Kernel>(stream, grid, bind);
  else
    launch_cpu<Kernel>(grid, bind);
}

}  // namespace tw
