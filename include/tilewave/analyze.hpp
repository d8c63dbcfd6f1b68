#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "tilewave/launch.hpp"
#include "tilewave/tensor.hpp"
#include "tilewave/tile/analysis/run.tile.hpp"

// What a kernel moves and does, counted from its own source, and the least time that a device needs for it. Nothing is computed and no
// memory is needed:
//
//   const tw::Tensor a = tw::placeholder({m, k}, tw::DType::f16), ...;
//   const tw::Analysis counts = tw::analyze<Matmul<tw::f16, 128, 128, 64, 4>>(grid, [&](auto& bind, auto& params) { bind(params.a, a); });
//   const tw::Roofline time = tw::roofline(counts, *tw::find_device_model("H200"));

namespace tw {

using analysis::OperandType;

/// "f32", "f16", "bf16", "fp8", "i8".
const char* name_of(OperandType operands);

/// A number for each operand type.
template <class T>
using PerOperandType = std::array<T, static_cast<std::size_t>(OperandType::count)>;

/// What units of a processor do.
struct Operations {
  /// Of matrix products: two for each pair of elements that is multiplied and added. Of whole tiles, as tensor cores do them.
  PerOperandType<std::uint64_t> products{};
  PerOperandType<std::uint64_t> inside{};  ///< those of them on elements that lie in the tensors: 2 M N K of a matrix product
  std::uint64_t f32 = 0;                   ///< of element functions and reductions: +, *, comparisons, max, min
  std::uint64_t special = 0;               ///< exp2, log2, sqrt, rsqrt, reciprocal, division, erf, sin, cos; tanh and sigmoid are two
  std::uint64_t all_products() const;
};

/// One launch of a kernel.
struct Analysis {
  std::int64_t tiles = 0;
  int threads = 0;                ///< of a block on the GPU
  std::int64_t shared_bytes = 0;  ///< of a block: rings, staging and scratch, without barriers (1 KB) and padding

  std::uint64_t global_read = 0;     ///< bytes that blocks load, from the L2 cache or beyond: what several load counts several times
  std::uint64_t global_written = 0;  ///< bytes that blocks store
  std::uint64_t unique_read = 0;     ///< bytes of the tensors that are read, each once: the least that must come from memory
  std::uint64_t unique_written = 0;  ///< of those that are written
  std::uint64_t shared_traffic = 0;  ///< bytes into and out of shared memory, products' operands included

  Operations operations;
  Operations largest_tile;      ///< the most of each that one tile does
  std::uint64_t uncounted = 0;  ///< elements given to functions whose parameters are float, not auto: f32 and special lack what they do
};

/// A tensor of zeros for analyze() and the like: it has addresses, but no memory until it is written. Throws InvalidArgument for a shape
/// that has more bytes than the system has addresses.
Tensor placeholder(Shape shape, DType dtype);

/// A processor, by its data sheet. Rates are per second, of the whole device, with the boost clock and without sparsity.
struct DeviceModel {
  std::string name;
  std::string source;  ///< where the figures come from
  int units = 1;       ///< multiprocessors, or threads
  double memory_bytes = 0;
  PerOperandType<double> products{};  ///< 0: the device has none
  double f32 = 0;                     ///< a fused multiply-add is two
  double special = 0;
  std::int64_t shared_per_block = 0;  ///< bytes; 0: no limit
  bool skips_padding = false;         ///< products of elements outside the tensors take no time
};

/// H200, A100 and RTX 4090.
const std::vector<DeviceModel>& device_models();
/// "H200", "A100", "4090", or a part of a device's name that holds one ("NVIDIA H200"); null when it is none of them.
const DeviceModel* find_device_model(std::string_view name);
/// A CPU of `threads` threads that do `flops` f32 operations a second each, and memory of `bytes` a second. Products of every type are done
/// in f32; a special function costs 20 operations (the length of exp2 in math.tile.hpp).
DeviceModel cpu_model(std::string name, int threads, double flops, double bytes);

/// The least time of a launch whose tensors are not in the device's cache yet: each resource at its peak, all of them at once.
struct Roofline {
  double memory = 0;    ///< seconds for the unique bytes
  double products = 0;  ///< matrix products
  double f32 = 0;
  double special = 0;
  double seconds = 0;  ///< the longest of them
  const char* bound = "memory";
};

/// Tiles are not divided among units: the busiest unit has at least ceil(tiles / units) of equal ones, and at least the largest. Throws
/// InvalidArgument for products that the device has no rate for.
Roofline roofline(const Analysis& analysis, const DeviceModel& device);

namespace detail {

/// The bytes of a tensor that is bound, each once.
struct AnalysedArray {
  const void* data;
  std::uint64_t bytes;
};

/// Binds tensors to Globals of the analysis target, on whatever device they are.
class AnalysisBinder {
 public:
  template <class G>
  void operator()(G& global, const Tensor& tensor) {
    bind_view(global, tensor, dtype_of<typename G::Element>, tensor.device());
    global.place = add(tensor);
  }
  template <class G>
  void operator()(G& global, const Tensor* tensor) {
    if (tensor == nullptr) return void(static_cast<BoundView&>(global) = kNoTensor);
    (*this)(global, *tensor);
  }
  template <class G>
  void operator()(G& global, const Tensor& tensor, const Window& window) {
    global.window = window;
    (*this)(global, tensor);
  }
  template <class G>
  void operator()(G& global, const Tensor& tensor, CopiedRows) {
    (*this)(global, tensor);
  }
  template <class G>
  void operator()(G& global, const Tensor& tensor, const Window& window, CopiedRows) {
    (*this)(global, tensor, window);
  }
  const std::vector<AnalysedArray>& arrays() const { return arrays_; }

 private:
  int add(const Tensor& tensor);
  std::vector<AnalysedArray> arrays_;
};

struct AnalysisKernel {
  int threads;
  std::int64_t shared_bytes;
  Tile (*at)(const TileGrid& grid, int index);
  void (*run)(const void* params, Tile tile, u8* arena);
};
Analysis analyze_tiles(const AnalysisKernel& kernel, const void* params, const TileGrid& grid, const std::vector<AnalysedArray>& arrays);

}  // namespace detail

/// Counts what launch<Kernel>(stream, grid, bind) would do; tensors may be placeholders.
///
/// Exact: bytes (parts of tiles outside a tensor are not moved), products, and what element functions do, where that depends on row and
/// column apart (bounds) and not on values. An element function runs for the first row and column of its tile. Every element is 1: a branch
/// on a value goes as it does for 1. An operation on a row counts once, although the threads that share the row repeat it. Up to 2048 tiles
/// are all run; of more, those of equal counts along each dimension of the grid once, and 256 others to see that this holds, else all.
///
/// Elements and values of rows must be taken as `auto` for arithmetic to be counted, arrays be a Pointer for their bytes to be counted.
template <class Kernel, class Bind>
Analysis analyze(TileGrid grid, Bind bind) {
  using On = typename Kernel::template On<analysis::Target>;
  typename On::Params params{};
  detail::AnalysisBinder binder;
  detail::bind_params(detail::type_name<Kernel>(), detail::source_of<Kernel>(), params, binder, bind);
  constexpr int cluster = detail::cluster_of<On>();
  grid.m = ceil_div(grid.m, cluster) * cluster;
  constexpr int warpgroups = ceil_div(detail::warps_of<On>(), 4) + (detail::has_load<On> ? 1 : 0);
  const detail::AnalysisKernel kernel{
      warpgroups * 128, analysis::memory_bytes<On>(),
      [](const TileGrid& g, int index) { return detail::ScheduleOf<On>::Type::at(g, index); },
      [](const void* p, Tile tile, u8* arena) { analysis::run<On>(*static_cast<const typename On::Params*>(p), tile, arena); }};
  return detail::analyze_tiles(kernel, &params, grid, binder.arrays());
}

}  // namespace tw
